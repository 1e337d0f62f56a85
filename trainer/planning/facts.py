"""The facts of a run that the planner may look at, without weights and without an accelerator.

``gather`` builds the configured model without storage and runs it on fake tensors, forward and backward. Torch's own
dispatch decides what is saved and how many floating-point operations there are. A 70 B model takes about one second (of
blocks that are alike three run) and a few hundred megabytes. The counts are cached (``trainer/model/count_cache.py``).
Facts of a live model come from ``plan_for.py``. Its counts and facts are made here too, by ``count_of`` and
``facts_of``, so that both doors to a plan say the same of the same run.

Batches count as padded or packed, so that attention needs a mask, unless all rows are known to be full ones of one
document each (``run/collated.py``). These save less, where key and value heads are grouped about a tenth: without a
mask torch's fused attention does not repeat them.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from deepstow.strategies.core.compose import casts, degrees, requirements_of
from deepstow.strategies.core.facts import IN_ORDER, Facts, MachineFacts, ModelNumbers, Param, Precision, RunFacts, Unit
from deepstow.strategies.core.optimizers import moments_of
from deepstow.strategies.core.protocol import Axis, Phase, Refusal, Requirement
from deepstow.strategies.core.sizes import OVERHEAD_BYTES
from deepstow.trainer.errors import ConfigError, first_line
from deepstow.trainer.machine.profiles import known_rates
from deepstow.trainer.model import attention, config_keys, hub, loss_terms
from deepstow.trainer.model.adapters import loraplus_groups
from deepstow.trainer.model.build import config_of, with_lora
from deepstow.trainer.model.count_cache import cached
from deepstow.trainer.model.params import decay_groups, list_params
from deepstow.trainer.model.quantise import quantise
from deepstow.trainer.planning import positions
from deepstow.trainer.registry import blamed, codes
from deepstow.trainer.tasks.task import PROBE_TOKENS, PROBED, TASKS, Task, loaded

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    from deepstow.strategies.core.protocol import Strategy
    from deepstow.trainer.config.sections import RunConfig
    from deepstow.trainer.machine.probe import Machine
    from deepstow.trainer.model.counting import Counter

# Resident memory besides tensors. On CPU with torch, Transformers and datasets: 600 to 632 MiB in small runs, workspace
# of a few kernels included; DeepSpeed's engine and a CUDA context need more, 0.6 to 1.0 GiB.
RUNTIME_HOST_BYTES, ENGINE_HOST_BYTES = 624 << 20, 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCount(ModelNumbers):
    """Counts of one forward on fake tensors. ``params``: if a strategy requires them."""

    units: tuple[Unit, ...]
    params: tuple[Param, ...] = ()

    def facts(self, run: RunFacts, machine: MachineFacts) -> Facts:
        """The facts of a ``run`` of this model."""
        counted = {number.name: getattr(self, number.name) for number in fields(ModelNumbers)}
        return Facts(self.units, replace(run, **counted), machine, self.params)


def precision_of(config: RunConfig) -> Precision:
    """The compute format: mixed precision by ``training.bf16`` or ``fp16``, else fp32."""
    if config.training.bf16:
        return Precision.BF16
    return Precision.FP16 if config.training.fp16 else Precision.FP32


def gather(
    config: RunConfig, world_size: int, local_world_size: int, machine: Machine, *, masked: bool = True
) -> Facts:
    """All facts of a run on ``world_size`` ranks of ``machine``. ``masked``: as for ``count_model``. ConfigError: the
    model cannot be described.
    """
    model_count = counted(config, masked=masked)
    run = run_facts(config, world_size)
    if refused := _not_layerwise(config):
        model_count = replace(model_count, not_layerwise=refused)
    held = [item for recipe in config.switched_on for item in recipe.memory(config, model_count, run)]
    run = replace(run, held=tuple(held))
    return facts_of(model_count, run, config.strategies, machine, local_world_size)


def _not_layerwise(config: RunConfig) -> str:
    """Why micro-batches cannot take turns in each layer, of what a count of one forward does not show."""
    kwargs = config.training.gradient_checkpointing_kwargs or config.training.activation_checkpointing_kwargs or {}
    reasons = {
        f"a loss of task: {config.task} may run the model twice": not config.chosen_task.runs_once,
        **{recipe.not_layerwise: bool(recipe.not_layerwise) for recipe in config.switched_on},
        "reentrant checkpoints run a backward of their own": bool(kwargs.get("use_reentrant")),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def facts_of(
    count: ModelCount, run: RunFacts, strategies: Mapping[str, Strategy], machine: Machine, local_world_size: int
) -> Facts:
    """The facts of a ``run`` with these ``strategies``, of a model that is counted already."""
    of_machine = machine_facts(machine, local_world_size, engine=Requirement.DEEPSPEED in requirements_of(strategies))
    run = replace(run, accelerated=machine.device_kind != "cpu")
    return asked(count, strategies).facts(run, of_machine)


def check_model(config: RunConfig, built: Any) -> None:
    """Check the configured model by its configuration alone, before any weight and, where it is known, any data.
    ConfigError: a key cannot be meant, or a strategy cannot train such a model.
    """
    config_keys.check(config, built)
    auto = config.chosen_task.model_class
    if type(built) not in loaded(auto)._model_mapping and not config.model.trust_remote_code:
        what = f"{built.model_type} models are not for it: Transformers has no {auto.rpartition('.')[2]} of one"
        raise config.error("task", config.task, f"{what}; {tasks_of(built)}")
    if config.chosen_task.generates and sees_what_follows(built):
        what = f"{built.model_type} models see the words that follow, so there is nothing to learn in predicting them"
        raise config.error("task", config.task, f"{what}; {tasks_of(built)}")
    if config.chosen_task.language and built.model_type in loss_terms.UNSHIFTED:
        what = f"Transformers compares what a {built.model_type} says of a token with that token, not with the next one"
        raise config.error("task", config.task, f"{what}; {tasks_of(built)}")
    if built.is_encoder_decoder and auto.endswith("SequenceClassification"):
        what = f"{built.model_type} models find the end of a text by its values, which no plan can know"
        raise config.error("task", config.task, f"{what}; {tasks_of(built)}")
    smoothing, term = config.training.label_smoothing_factor, loss_terms.switched_on(built)
    if smoothing and term is not None and not config.chosen_task.own_loss:
        what = f"leaves out what the model adds to its loss (model.config.{term})"
        raise config.error("training.label_smoothing_factor", smoothing, f"{what}; leave one of the two out")
    keys = built.get_text_config().to_dict()
    saved = partial(hub.file_of, config.model.name_or_path)
    refuse(config, [*config.chosen_task.refuses_model(config, built, saved), *attention.refuses_model(config, built)])
    refuse(config, [refused for strategy in config.strategies.values() for refused in strategy.refuses_model(keys)])


def tasks_of(built: Any) -> str:
    """What may be written for a model of this configuration."""
    fit = [task for task in TASKS.values() if type(built) in loaded(task.model_class)._model_mapping]
    if built.is_encoder_decoder:
        fit = [task for task in fit if task.has_decoder]
    fit = [task for task in fit if not (task.generates and sees_what_follows(built))]
    fit = [task for task in fit if not (task.language and built.model_type in loss_terms.UNSHIFTED)]
    return f"its tasks are {', '.join(task.name for task in fit)}" if fit else "no task here takes one"


def sees_what_follows(built: Any) -> bool:
    """Whether the model is BERT or its like, whose words all see each other unless ``is_decoder`` is set."""
    masked = type(built) in loaded("transformers.AutoModelForMaskedLM")._model_mapping
    return masked and not built.is_encoder_decoder and getattr(built, "is_decoder", None) is False


def refuse(config: RunConfig, refusals: Sequence[Refusal]) -> None:
    """Raise ConfigError with a line for each refusal, which begins with file and line of its key."""
    if refusals:
        raise ConfigError(config.error(refusal.key, refusal.value, refusal.cure).lines[0] for refusal in refusals)


def run_facts(config: RunConfig, world_size: int, *, accelerated: bool = False) -> RunFacts:
    """The facts that follow from the config alone."""
    training, divided = config.training, degrees(config.strategies)
    return RunFacts(
        micro_batch=training.per_device_train_batch_size * config.chosen_task.sequences(config),
        sequence=config.data.max_length,
        accumulation=training.gradient_accumulation_steps,
        max_grad_norm=training.max_grad_norm,
        precision=precision_of(config),
        world_size=world_size,
        moments=moments_of(training.optim, training.optim_args),
        optim=training.optim,
        recomputes=training.recomputes,
        compiled=training.compile_backend is not None,
        accelerated=accelerated,
        sequences=config.chosen_task.sequences(config),
        stages=divided.get(Axis.STAGES, 1),
        tensor=divided.get(Axis.TENSOR, 1),
        slices=divided.get(Axis.SEQUENCE, 1),
        stowed=any(strategy.phase is Phase.WHERE for strategy in config.strategies.values()),
        in_slices=Axis.TOKENS in divided,
        adapters=config.model.lora is not None,
        steps=max(0, training.max_steps),
    )


def machine_facts(machine: Machine, local_world_size: int, *, engine: bool = False) -> MachineFacts:
    """One rank's share of ``machine``, with DeepSpeed's ``engine`` or without. Without an accelerator its part of host
    memory is also its device. What the process has of the memory counted for libraries is its own, not taken by others.
    """
    runtime = ENGINE_HOST_BYTES if engine or machine.device_kind != "cpu" else RUNTIME_HOST_BYTES
    host = machine.host_available_bytes // local_world_size + min(machine.host_own_bytes, runtime)
    if (rates := known_rates(machine).rates) is not None:
        rates = rates.shared_by(local_world_size)
    local_facts: dict[str, Any] = {"ranks": local_world_size}
    if machine.origin == "probed":
        local_facts["in_order"] = platform.machine() in IN_ORDER
    if machine.device_kind == "cpu":
        return MachineFacts(machine.name, host - runtime, host, runtime, rates, **local_facts)
    # Of small devices no more than what auto leaves over.
    beside = min(OVERHEAD_BYTES.get(machine.device_kind, 0), machine.device_total_bytes // 10)
    device = machine.device_total_bytes - beside
    return MachineFacts(machine.name, device, host, runtime, rates, **local_facts, device_overhead_bytes=beside)


def asked(count: ModelCount, strategies: Mapping[str, Strategy]) -> ModelCount:
    """``count`` with the list of parameters if ``strategies`` require it; it is counted once for all strategies."""
    return count if Requirement.PARAMETERS in requirements_of(strategies) else replace(count, params=())


def saved_without_mask(config: RunConfig) -> dict[str, int]:
    """Bytes that each unit saves of full rows of one document each. Random numbers go on as if nothing was counted."""
    from deepstow.strategies.engine.forward.effects import forked_rng

    with forked_rng():
        return {unit.name: unit.saved_bytes for unit in counted(config, masked=False).units}


def counted(config: RunConfig, *, masked: bool = True) -> ModelCount:
    """``count_model``, from the cache if it is there."""
    what = "" if masked else "without mask"
    return cached(config, ModelCount, lambda: count_model(config, masked=masked), what=what)


def meta_model(config: RunConfig) -> Any:
    """The configured model on the meta device; one rank's part of it, where tensor ranks divide layers."""
    from deepstow.trainer.model import liger, tensor_share

    model: Any = _meta_model(config)
    for recipe in config.switched_on:
        model = recipe.counted(model, config)
    model = liger.counted(model, config)
    positions.refuse(config, model)
    if _divided(config):
        of_ranks = run_facts(config, 1)
        tensor_share.divide(model, of_ranks.tensor, in_slices=of_ranks.in_slices)
    return model


def cast_weights(config: RunConfig, model: Any) -> None:
    """Give ``model`` the dtype in which an engine computes, if one has copies of the weights in it."""
    import torch

    if casts(config.strategies, precision_of(config)):
        # As DeepSpeed does, adapters and buffers included; our engine leaves buffers, which are small.
        torch.nn.Module.to(model, half_of(precision_of(config)))


def autocast_of(config: RunConfig) -> Any:
    """The dtype in which Accelerate has operators compute; None: in that of the weights."""
    return None if casts(config.strategies, precision_of(config)) else half_of(precision_of(config))


def half_of(precision: Precision | None) -> Any:
    """The dtype of two bytes in which operators compute; None: they do in fp32."""
    import torch

    return {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}.get(precision) if precision else None


def count_model(config: RunConfig, *, masked: bool = True) -> ModelCount:
    """Build the configured model from fake tensors, run it forward, and backward where blocks differ, and count all
    that any strategy may require. ``masked``: rows are padded or packed, so that attention needs a mask; flash
    attention never does. Raises ConfigError if Transformers cannot build the model.
    """
    import torch

    from deepstow.strategies.engine.forward.compiled import compile_blocks
    from deepstow.strategies.engine.tensors import quantised
    from deepstow.trainer.model.stubs import fake_tensors

    precision, task = precision_of(config), config.chosen_task
    autocast = autocast_of(config)
    model: Any = meta_model(config)
    undivided = _whole(config)
    loaded = sizes(model)
    cast_weights(config, model)
    with fake_tensors(), quantised.counted_with(model, lambda meta: torch.empty_like(meta, device="cpu")):
        if run_facts(config, 1).recomputes:
            # Release 5.23 renamed it and warns about the old name; the releases before know the old one only.
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        if (backend := config.training.compile_backend) is not None:
            compile_blocks(model, backend)
        model.train()
        shape, slices = (run_facts(config, 1).micro_batch, config.data.max_length), run_facts(config, 1).slices
        inputs = inputs_of(config, model, shape, masked=masked)
        for recipe in config.switched_on:
            inputs |= recipe.counted_loss(model, config, shape)
        shift = task.language
        call = _call(task.forward(model, config), inputs, config.training.label_smoothing_factor, autocast, shift=shift)
        counter = _counted_forward(model, call, shape, task)
        if codes([task]):
            _try_probe(model, task)
    ratio = config.model.lr_ratio
    groups = decay_groups(model) if ratio is None else loraplus_groups(model, ratio)

    def dtype_of(param: torch.nn.Parameter) -> str:
        if quantised.is_quantised(param):
            return str(param.dtype).removeprefix("torch.")
        rounded = param.requires_grad and param.dtype is torch.bfloat16  # by TRL, on a quantised base
        return "bfloat16" if rounded or precision is Precision.BF16 else "float32"

    return replace(
        count_of(model, counter, groups, dtype_of, autocast),
        **loaded,
        model_params=0 if undivided is None else sum(unit.num_params for unit in undivided.units),
        model_flops=undivided.forward_flops if undivided is not None else slices * counter.flops if slices > 1 else 0,
    )


def sizes(model: nn.Module) -> dict[str, Any]:
    """Bytes of each element that is trained, and frozen, where they differ of the largest; and of all scales."""
    from deepstow.strategies.engine.tensors.quantised import scales_bytes

    largest = {False: 0, True: 0}
    for param in model.parameters():
        largest[param.requires_grad] = max(largest[param.requires_grad], param.element_size())
    return {"trained_bytes": largest[True], "frozen_bytes": largest[False], "scales_bytes": scales_bytes(model)}


def count_of(
    model: nn.Module,
    counter: Counter,
    groups: Mapping[str, int],
    dtype_of: Callable[[nn.Parameter], str],
    autocast: Any,
) -> ModelCount:
    """All that is known of a model which is all there is, and one forward of which ``counter`` has counted.

    Args:
        groups: of the optimizer, by the names of parameters.
        dtype_of: of a parameter, as the memory engine computes with it.
        autocast: the dtype in which operators compute; None: in that of the weights.
    """
    from deepstow.trainer.model import tensor_share

    config = getattr(model, "config", None)
    config = config if hasattr(config, "get_text_config") else None  # Transformers', and not a class of the user's
    text = None if config is None else config.get_text_config()
    experts = (number for module in model.modules() if isinstance(number := getattr(module, "num_experts", 0), int))
    return ModelCount(
        units=counter.units(),
        params=list_params(model, groups, dtype_of, counter.outside, counter.computing),
        forward_flops=counter.flops,
        largest_param=max((parameter.numel() for parameter in model.parameters()), default=0),
        hidden_size=getattr(text, "hidden_size", 0),
        **sizes(model),
        tied=tensor_share.is_tied(model),
        untied=getattr(model, "untied", ()),
        written=tuple(sorted(counter.written)),
        not_layerwise=counter.not_layerwise,
        draws=counter.draws,
        loss_reads_blocks=bool(getattr(text, "output_router_logits", False)),
        head_words=tensor_share.head_words(model),
        num_experts=max(experts, default=0),
        experts_per_token=getattr(text, "num_experts_per_tok", 0) or 0,
        positions=0 if config is None else positions.made_for(config),
        sums=tensor_share.sums(counter.linears()),
    )


def _try_probe(model: Any, task: Task) -> None:
    """Raise ConfigError if forward fails on what a task from outside probes the export with, after training."""
    import torch

    with torch.no_grad(), blamed(task.name, PROBED):
        model(**task.probe(torch.zeros(1, PROBE_TOKENS, dtype=torch.long)))


def _counted_forward(model: Any, call: Callable[[], Any], shape: tuple[int, int], task: Task) -> Any:
    """``call``, counted. Raise ConfigError if forward fails on rows of this ``shape``, or no block can be compiled."""
    from torch._subclasses.fake_tensor import DataDependentOutputException

    from deepstow.trainer.model.compiled import NotCompilable
    from deepstow.trainer.model.temporaries import count

    try:
        return count(model, call)
    except NotCompilable as error:
        raise ConfigError(f"training.torch_compile: a block of this model cannot be compiled whole: {error}") from None
    except (NotImplementedError, AttributeError) as error:  # a mask that it has not; adapters in what gives no tensor
        raise ConfigError(f"model: {first_line(error).removeprefix('NotImplementedError: ')}") from None
    except DataDependentOutputException as error:
        what = f"its forward asks for values of tensors ({error.func}), which no plan knows, so it cannot be planned"
        cure = "train another architecture, or in a loop of your own, with plan_for(model) without batch="
        raise ConfigError(f"model: {model.config.model_type}: {what}; {cure}") from None
    except (RuntimeError, IndexError) as error:
        cause = "has it so many positions? data.max_length says how many tokens a row has"
        if codes([task]):
            cause = f"{task.name} says in targets, forward and sequences what it is given"
        what = f"{first_line(error)}; {cause}"
        raise ConfigError(f"model: its forward fails on {shape[0]} x {shape[1]} tokens: {what}") from None


def inputs_of(config: RunConfig, model: Any, shape: tuple[int, int], *, masked: bool) -> dict[str, Any]:
    """What forward is given of rows of this shape, or of one rank's slice of them; inside of ``fake_tensors()``."""
    import torch

    ids, slices = torch.zeros(shape, dtype=torch.long), run_facts(config, 1).slices
    inputs = {"input_ids": ids, **config.chosen_task.targets(ids, config)}
    if slices > 1:  # attention over slices takes no mask
        from deepstow.strategies.parallel import ulysses

        return ulysses.count(model, slices).slice_of(inputs)
    name = str(config.model.attn_implementation)
    masked &= not name.startswith("fl")  # flash and flex attention have no mask for every pair
    if config.data.packing:
        inputs["position_ids"] = torch.zeros_like(ids) if masked else torch.arange(shape[1]).repeat(shape[0], 1)
        if masked and name == attention.VARLEN:  # two documents: the results of several are copied into one
            from deepstow.strategies.parallel import varlen

            first = -(-shape[1] // 2)
            inputs["position_ids"] = (torch.arange(shape[1]) % first).repeat(shape[0], 1)
            inputs[varlen.DOCUMENTS] = varlen.Documents(((first, shape[1] - first),) * shape[0])
    elif masked:
        inputs["attention_mask"] = torch.zeros_like(ids)
    return inputs


def _divided(config: RunConfig) -> bool:
    """Whether tensor ranks divide the model's layers."""
    return any(Axis.TENSOR in strategy.divides() for strategy in config.strategies.values())


def _whole(config: RunConfig) -> ModelCount | None:
    """The count of the whole model, where tensor ranks divide its layers."""
    if not _divided(config):
        return None
    without = {name: strategy for name, strategy in config.strategies.items() if Axis.TENSOR not in strategy.divides()}
    return counted(config.model_copy(update={"strategies": without}))


def _call(
    model: Any, inputs: Mapping[str, Any], smoothing: float | None, autocast: Any, *, shift: bool
) -> Callable[[], Any]:
    """One forward with its loss. Smoothed labels are outside of the model, as in Transformers' Trainer."""

    def run() -> Any:
        if not smoothing:
            return model(**inputs)
        from transformers.trainer_pt_utils import LabelSmoother

        unlabelled = {key: inputs[key] for key in inputs if key != "labels"}
        return {"loss": LabelSmoother(smoothing)(model(**unlabelled), inputs["labels"], shift_labels=shift)}

    return under_autocast(run, autocast)


def under_autocast(run: Callable[[], Any], autocast: Any, device_kind: str = "cpu") -> Callable[[], Any]:
    """``run`` with operators computing in ``autocast`` (a dtype or None); its outputs are copied in fp32, as Accelerate
    does.
    """

    def cast() -> Any:
        import torch
        from accelerate.utils import convert_to_fp32

        with torch.autocast(device_kind, autocast):
            outputs = convert_to_fp32(run())
        torch.clear_autocast_cache()  # within another autocast cast weights would stay, and not count the next time
        return outputs

    return run if autocast is None else cast


def refuse_unsavable(hf_config: PretrainedConfig) -> None:
    """Raise ConfigError for a config that Transformers would refuse when it is saved, at the first checkpoint."""
    try:
        getattr(hf_config, "validate", lambda: None)()
    except Exception as error:  # its cause says why; the error itself names the check
        raise ConfigError(f"model.config: could not be saved: {first_line(error.__cause__ or error)}") from None


def _meta_model(config: RunConfig) -> PreTrainedModel:
    """The configured model on the meta device. Modules of fake tensors cannot be moved or cast, and peft does that."""
    import torch

    from deepstow.trainer.model import tying

    section, task = config.model, config.chosen_task
    auto = loaded(task.model_class)
    hf_config = config_of(config)
    check_model(config, hf_config)
    for name in ("pad_token_id", "decoder_start_token_id"):  # a run takes those of the tokenizer
        if not task.language and getattr(hf_config, name, None) is None:
            setattr(hf_config, name, 0)
    # A flash kernel that is not installed here saves what torch's fused attention saves, and so does flex attention.
    kernel = attention.of_copy(section).get("attn_implementation", "sdpa")
    options = {"dtype": getattr(torch, section.dtype), "trust_remote_code": section.trust_remote_code}
    options["attn_implementation"] = kernel
    lacking = f"model.attn_implementation = {kernel!r}: {hf_config.model_type} does not support it; leave it out"
    lacking = attention.NO_MASK.format(hf_config.model_type) if section.attention_mask else lacking
    with torch.device("meta"):
        try:
            model: PreTrainedModel = auto.from_config(hf_config, **options)
        except ValueError as error:
            reason = str(error).splitlines()[0]
            if "does not support" not in reason:
                raise ConfigError(f"model: {reason}") from None
            if section.attn_implementation == kernel:
                raise ConfigError(lacking) from None
            model = auto.from_config(hf_config, **options | {"attn_implementation": "eager"})
        except KeyError as error:  # looked up in a table of Transformers, as activation functions are
            if error.args[0] in (section.attn_implementation, kernel):  # and attention, by Falcon and GPT-J
                raise ConfigError(lacking) from None
            raise ConfigError(f"model.config: Transformers knows no {error}") from None
        except Exception as error:  # too large for a machine, padding beyond the vocabulary, odd values
            raise ConfigError(f"model.config: cannot be built: {first_line(error)}") from None
    refuse_unsavable(model.config)
    attention.check(config, model)
    tying.untie(model, tying.untied(model, section.name_or_path))
    if section.quantization_config is not None:
        quantise(model, section.quantization_config)
    with torch.device("meta"):
        if section.lora is None:
            return model
        adapted: PreTrainedModel = task.adapted(
            model, config, partial(with_lora, section=section.lora, task=task, adapter=section.adapter)
        )
        return adapted
