"""Facts of a run, without weights and without an accelerator: what the planner may look at.

The model is built without storage, given fake tensors (shapes and dtypes) and run forward once. Torch's own dispatch
decides what is saved for backward and how many floating-point operations there are, so the numbers follow the model
and not a formula, and an architecture never seen before is counted like any other. A 70 B model takes about two
seconds and a few hundred megabytes.

Blocks are found by structure: the outermost ``nn.ModuleList`` children are blocks; parameters registered before the
first block belong to the embedding, those after to the head. A tied parameter counts once, where it comes first.

What is saved, and what it would cost to keep less, is counted in ``trainer/model/counting.py``.
Fake tensors have no values, so Transformers cannot see that a batch needs no mask, and makes one: batches count as
padded or packed, which most are. Full rows keep somewhat less.

``gather`` describes a run of a config, ``describe`` a live model of any kind. What was counted for a config is
remembered (``trainer/model/count_cache.py``).

[Note: layer drop] Some models draw a number before each block and skip the block where it is small. A fake number has
no value to compare; here it is 1, so that no block is skipped, which costs the most.

[Note: grouped matmul] Transformers runs the experts of a mixture through one grouped matmul. Torch's kernels take
any float dtype, its fake version takes bf16 only and its flop counter does not know the operation, so both answers
are given here: the output's shape, and two flop per row of tokens, column and summed element.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from strategies.core.compose import needs_of
from strategies.core.facts import Facts, MachineFacts, Param, Precision, RunFacts, Unit
from strategies.core.linears import Linear
from strategies.core.protocol import Need
from trainer.errors import ConfigError, CountingError, first_line
from trainer.machine.profiles import known_rates
from trainer.model.build import load_config, with_lora
from trainer.model.count_cache import remembered
from trainer.model.linear_layers import LinearCounter
from trainer.model.params import decay_groups, list_params

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from trainer.config.sections import RunConfig
    from trainer.machine.probe import Machine
    from trainer.model.counting import Counter

# Resident besides tensors. On CPU with torch, Transformers and datasets: 600 to 632 MiB in small runs, a few kernels'
# workspace included; DeepSpeed's engine and a CUDA context need more, 0.6 to 1.0 GiB.
RUNTIME_HOST_BYTES, ENGINE_HOST_BYTES = 624 << 20, 1 << 30
MOMENTS = {"sgd": 0, "adagrad": 1, "adafactor": 0, "lion": 1}  # others keep two fp32 numbers per parameter


@dataclass(frozen=True, slots=True)
class ModelCount:
    """Counts of one fake run: units in order, forward flop of one micro-batch, the largest tensor's elements.

    ``params`` are listed where a strategy places single parameters.
    """

    units: tuple[Unit, ...]
    forward_flops: int
    largest_param: int
    hidden_size: int
    params: tuple[Param, ...] = ()
    linears: tuple[Linear, ...] = ()


def precision_of(config: RunConfig) -> Precision:
    """The compute format: mixed precision by ``training.bf16`` or ``fp16``, else fp32."""
    if config.training.bf16:
        return Precision.BF16
    return Precision.FP16 if config.training.fp16 else Precision.FP32


def vocab_size_of(config: RunConfig) -> int | None:
    """Rows of the embedding where only the tokenizer to be trained knows them; None where the model says."""
    tokenizer = config.model.tokenizer
    return None if tokenizer is None or isinstance(tokenizer, str) else tokenizer.vocab_size


def gather(config: RunConfig, world_size: int, local_world_size: int, machine: Machine) -> Facts:
    """All facts of a run on ``world_size`` ranks of ``machine``.

    Raises:
        ConfigError: the model cannot be described.
    """
    count = remembered(config, ModelCount, lambda: count_model(config))
    run = replace(
        run_facts(config, world_size, accelerated=machine.device_kind != "cpu"),
        hidden_size=count.hidden_size,
        largest_param=count.largest_param,
        forward_flops=count.forward_flops,
    )
    here = machine_facts(machine, local_world_size, engine=Need.DEEPSPEED in needs_of(config.strategies))
    no_copies = next((why for each in config.strategies.values() if (why := each.refuses_weight_copies())), "")
    return Facts(count.units, run, here, count.params, count.linears, no_copies=no_copies)


def products_again(config: RunConfig) -> bool:
    """Whether backward takes the products of every block's forward once more; selective recomputation keeps them."""
    return run_facts(config, 1).recomputes or any(each.repeats_products() for each in config.strategies.values())


def run_facts(config: RunConfig, world_size: int, *, accelerated: bool = False) -> RunFacts:
    """What the config alone says about the work."""
    training = config.training
    return RunFacts(
        micro_batch=training.per_device_train_batch_size,
        sequence=config.data.max_length,
        accumulation=training.gradient_accumulation_steps,
        max_grad_norm=training.max_grad_norm,
        precision=precision_of(config),
        world_size=world_size,
        moments=MOMENTS.get(training.optim, 2),
        recomputes=training.gradient_checkpointing or bool(training.activation_checkpointing),
        accelerated=accelerated,
    )


def machine_facts(machine: Machine, local_world_size: int, *, engine: bool = False) -> MachineFacts:
    """One rank's part of ``machine``. Without an accelerator the ranks share its memory as their device.

    Args:
        engine: DeepSpeed's is used.
    """
    host, rates = machine.host_available_bytes // local_world_size, known_rates(machine).rates
    if rates is not None:  # of what the ranks of a machine share, each has its part; each has a link of its own
        rates = rates.shared_by(local_world_size)
    if machine.device_kind == "cpu":
        runtime = ENGINE_HOST_BYTES if engine else RUNTIME_HOST_BYTES
        return MachineFacts("cpu", host - runtime, host, runtime, rates)
    return MachineFacts(machine.name, machine.device_total_bytes, host, ENGINE_HOST_BYTES, rates)


def count_model(config: RunConfig) -> ModelCount:
    """Build the configured model from fake tensors, run it forward once, and count."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    from trainer.model.counting import Counter, find_blocks, flop_formulas

    precision = precision_of(config)
    needs = needs_of(config.strategies)
    linears = LinearCounter() if Need.LINEARS in needs else None
    casts = precision is not Precision.FP32 and Need.COMPUTE_DTYPE in needs
    compute = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}.get(precision, torch.float32)
    flops = FlopCounterMode(display=False, custom_mapping=flop_formulas())
    model: Any = _meta_model(config)
    if casts:
        # As DeepSpeed does, adapters and buffers included; our engine leaves buffers, which are small.
        model.to(compute)
    with FakeTensorMode(allow_non_fake_inputs=True), _grouped_matmul():
        model.to_empty(device="cpu")
        model.tie_weights()  # to_empty has given each name a tensor of its own
        recomputes = run_facts(config, 1).recomputes
        if recomputes:
            # Release 5.23 renamed it and warns about the old name; the releases before know the old one only.
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        model.train()
        counter = Counter(model)
        shape = (config.training.per_device_train_batch_size, config.data.max_length)
        ids = torch.zeros(shape, dtype=torch.long)
        third = "position_ids" if config.data.packing else "attention_mask"
        inputs = {"input_ids": ids, "labels": ids, third: torch.zeros_like(ids)}
        autocast = torch.autocast("cpu", compute) if precision is not Precision.FP32 and not casts else None
        hooked = linears.counting(model) if linears else contextlib.nullcontext()
        with counter, flops, hooked, autocast or contextlib.nullcontext():
            model(**inputs)
    dtype = "bfloat16" if precision is Precision.BF16 else "float32"
    return ModelCount(
        units=counter.units(),
        forward_flops=flops.get_total_flops(),
        largest_param=max(parameter.numel() for parameter in model.parameters()),
        hidden_size=getattr(model.config.get_text_config(), "hidden_size", 0),
        params=list_params(model, find_blocks(model), decay_groups(model), lambda _: dtype, counter.elsewhere)
        if Need.PARAMETERS in needs
        else (),
        linears=linears.listed(find_blocks(model), compute if autocast else None, recomputes=products_again(config))
        if linears
        else (),
    )


def describe(
    model: nn.Module,
    batch: tuple[int, int] | Mapping[str, Any] | None,
    groups: Sequence[Sequence[str]],
    run: RunFacts,
    machine: MachineFacts,
) -> Facts:
    """Facts of a live model, which is left as it is. Every parameter is computed in the dtype that it has.

    Args:
        batch: keyword arguments of its forward; (rows, tokens) stands for ids and labels. With None nothing is run, and
            what backward needs counts as nothing.
        groups: names of the optimizer's parameters, group by group; the others are frozen.

    Raises:
        CountingError: forward fails on tensors without values.
    """
    from trainer.model.counting import Counter, find_blocks

    group_of = {name: index for index, names in enumerate(groups) for name in names}
    counter = Counter(model) if batch is None else _counted(model, batch)
    dtype_of = {param: str(param.dtype).removeprefix("torch.") for param in model.parameters()}
    params = list_params(model, find_blocks(model), group_of, dtype_of.__getitem__, counter.elsewhere)
    largest = max((param.num_elements for param in params), default=0)
    return Facts(counter.units(), replace(run, largest_param=largest), machine, params)


def _counted(model: nn.Module, batch: tuple[int, int] | Mapping[str, Any]) -> Counter:
    """After one forward on fake tensors.

    Raises:
        CountingError: it failed.
    """
    try:
        return _count_fake(model, batch)
    except Exception as error:  # whatever a model does that it cannot do here, or nowhere
        raise CountingError(
            f"batch: the model's forward cannot be counted on tensors without values ({first_line(error)}); if it runs "
            f"otherwise, leave out batch=: what backward keeps then counts as nothing"
        ) from error


def _count_fake(model: nn.Module, batch: tuple[int, int] | Mapping[str, Any]) -> Counter:
    import torch
    from torch.func import functional_call
    from torch.utils._pytree import tree_map_only

    from trainer.model.counting import Counter
    from trainer.model.undisturbed import undisturbed

    with undisturbed(model), _fake_run(model) as mode:
        fakes = {name: mode.from_tensor(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        counter = Counter(model, fakes)
        inputs = tree_map_only(torch.Tensor, mode.from_tensor, _inputs(model, batch))
        with counter:
            functional_call(model, fakes, kwargs=inputs)
    return counter


@contextlib.contextmanager
def _fake_run(model: nn.Module) -> Iterator[Any]:
    """A mode for fake tensors, in which ``model`` trains."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _grouped_matmul():
        model.train()
        yield mode


def _inputs(model: nn.Module, batch: tuple[int, int] | Mapping[str, Any]) -> dict[str, Any]:
    """What forward is called with: tensors of the batch; each on the model's device."""
    import torch

    device = next(model.parameters()).device
    if isinstance(batch, tuple):
        batch = dict.fromkeys(("input_ids", "labels"), torch.empty(batch, dtype=torch.long, device="meta"))
    return {
        name: torch.empty_like(value, device=device) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


def _meta_model(config: RunConfig) -> PreTrainedModel:
    """The configured model on the meta device: shapes and dtypes, no storage.

    Not made of fake tensors from the start, because modules of fake tensors cannot be moved or cast, and peft does.

    Raises:
        ConfigError: Transformers cannot build it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    section = config.model
    hf_config = load_config(section, vocab_size_of(config))
    options = {"dtype": getattr(torch, section.dtype), "trust_remote_code": section.trust_remote_code}
    # A flash kernel that is not installed here keeps what torch's fused attention keeps.
    attention = "eager" if section.attn_implementation == "eager" else "sdpa"
    with torch.device("meta"):
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                hf_config, attn_implementation=attention, **options
            )
        except ValueError as error:
            reason = str(error).splitlines()[0]
            if "does not support" not in reason:
                raise ConfigError(f"model: {reason}") from None
            if section.attn_implementation == attention:
                raise ConfigError(
                    f"model.attn_implementation = {attention!r}: {hf_config.model_type} does not support it; "
                    f"leave it out"
                ) from None
            model = AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager", **options)
        except KeyError as error:  # looked up in a table of Transformers, as activation functions are
            raise ConfigError(f"model.config: Transformers knows no {error}") from None
        return with_lora(model, section.lora) if section.lora is not None else model


def _grouped_matmul() -> AbstractContextManager[object]:
    """A mode of answers that fake tensors lack; see [Note: grouped matmul] and [Note: layer drop]; below autograd."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class AnyDtype(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._grouped_mm.default:
                rows, weight = args[:2]
                return rows.new_empty(rows.shape[0], weight.shape[2])
            if func is torch.ops.aten.rand.default and list(args[0]) == []:
                return torch.tensor(1.0)  # a fake tensor that knows its value
            return func(*args, **(kwargs or {}))

    return AnyDtype()
