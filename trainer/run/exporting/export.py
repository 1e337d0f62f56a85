"""Export the trained model in Hugging Face's format, and check that the export is the trained model.

``save_pretrained`` writes into a draft folder, which is opened with ``from_pretrained``, as a user would, and compared:
all names and shapes, all values bit for bit, and the logits of a probe. Only then it replaces ``<output_dir>/export``,
sealed with the step and the hash of every file. Adapters (LoRA) are exported as adapters if their base can be loaded by
name; on a base with random weights, or as ``model.lora.export`` says, they are merged into it.

Invariant. A tied weight is in the file once, under every strategy. The config has the model's own ``use_cache`` and
not the one that training sets. Python files that came with the model are in the folder; the check runs them only if
``model.trust_remote_code`` allowed that for the run. The live model is not changed, unless adapters are merged.

Nothing that a run has finished is replaced. A restart script starts a run once more after it has ended: resumed at its
last step, with a whole export of that checkpoint (``checkpoints/finished.py``), it ends at once. If only the export is
missing or damaged it is made again, without a step of training; what was there moves to ``earlier-N``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from huggingface_hub import ModelCard, ModelCardData
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from deepstow.strategies.core.resume import rule_at
from deepstow.strategies.engine.tensors.quantised import keep_packing
from deepstow.strategies.parallel.tensor_shards import whole_shape
from deepstow.strategies.state.commit import inside, replaced_folder, same_modes
from deepstow.strategies.state.sealed import seal, size_and_hash
from deepstow.trainer.data.sources import is_on_hub
from deepstow.trainer.model import apart, attention, build, hub, quantise
from deepstow.trainer.model.adapters import merged, round_base
from deepstow.trainer.model.mapped import Spilled
from deepstow.trainer.registry import blamed, codes
from deepstow.trainer.run.callbacks.nonfinite import NonFinite
from deepstow.trainer.run.callbacks.reports import of_best, perplexity
from deepstow.trainer.run.checkpoints import disk
from deepstow.trainer.run.checkpoints.checkpoint import versions
from deepstow.trainer.run.checkpoints.finished import KIND, NAME
from deepstow.trainer.run.trainer import Trainer
from deepstow.trainer.tasks.task import PROBE_TOKENS, PROBED, Task, loaded, scores

if TYPE_CHECKING:
    from transformers import PretrainedConfig, TrainerState

    from deepstow.strategies.core.protocol import Parity
    from deepstow.trainer.config.sections import RunConfig

UNOPENED = (RuntimeError, OSError, ValueError, SafetensorError)  # of what cannot be loaded
# Of the largest logit. The same kernels give the same bits; another device or 16-bit compute rounds differently.
# Evaluated layers with 8-bit weights round their inputs to 8 bits as well, and merged ones do not.
FP32_TOLERANCE = 1e-3
HALF_TOLERANCE = 5e-2
EIGHT_TOLERANCE = 1e-1


class Receipt(NamedTuple):
    """The result of the check. ``largest_difference`` is between logits, relative to the largest logit."""

    num_tensors: int
    num_bytes: int
    largest_difference: float


class ExportError(RuntimeError):
    """The export is not the trained model."""


def export(
    trainer: Trainer,
    tokenizer: PreTrainedTokenizerBase,
    config: RunConfig,
    about: Mapping[str, Any] | None = None,
    recipes: Sequence[str] = (),
    callbacks: str = "",
) -> Receipt | None:
    """Write the model, with a card, and check it; a collective. Only the first rank gets a receipt. ``about``: what the
    manifest says of it; ``recipes``, ``callbacks``: what the card says of those of the config. Raise NonFinite if a
    weight is not finite, ExportError if a name, a shape, a value or a logit differs after reloading.
    """
    section, merge = config.model, config.model.merges
    model: Any = trainer.accelerator.unwrap_model(trainer.whole, keep_torch_compile=False)
    task = config.chosen_task
    rows = trainer.whole.get_input_embeddings().num_embeddings
    probe = task.probe((torch.arange(PROBE_TOKENS) * 7919 % rows).unsqueeze(0))
    with blamed(task.name, PROBED) if codes([task]) else nullcontext():
        logits = trainer.logits_of(probe)
    spilled = Spilled(Path(config.training.output_dir))
    # A compiled model has other names.
    gathered = {name.replace("_orig_mod.", ""): tensor for name, tensor in trainer.whole_state(spilled).items()}
    state, has_adapters = tied_again(model, gathered), hasattr(model, "peft_config")
    if trainer.stowed is not None and has_adapters and merge:
        trainer.stowed.close()  # merging changes weights in place, so they have to be in ordinary memory
    if not trainer.is_world_process_zero():
        return None
    spilled.settle()
    parities = {name: strategy.parity(trainer.plan.facts.run) for name, strategy in config.strategies.items()}
    card = model_card(config, model.config, trainer.state, trainer.args.world_size, parities, recipes, callbacks)
    eight = any(parameter.dtype is torch.int8 for parameter in model.parameters())
    if has_adapters and merge:
        named = dict(model.named_parameters())
        if any(whole_shape(param) != tuple(param.shape) for param in named.values()):  # this rank has shares of some
            for name, parameter in named.items():
                parameter.data = state[name]
        model = merged(model)
        state = model.state_dict()
    refuse_not_finite(model, state)
    halves = any(param.dtype is torch.bfloat16 for param in model.parameters())  # adapters among them, of some tasks
    rounds = trainer.args.bf16 or trainer.args.fp16 or halves or model.dtype is not torch.float32
    tolerance = EIGHT_TOLERANCE if eight and merge else HALF_TOLERANCE if rounds else FP32_TOLERANCE
    with replaced_folder(Path(config.training.output_dir) / NAME) as draft:
        taken_apart, folder = False, Path(config.training.output_dir)
        with config_as_it_came(model):
            if spilled.num_bytes:
                taken_apart = apart.save(model, draft, state, Spilled(folder))
                spilled.refuse_damaged()
            else:
                chosen = {"selected_adapters": ["default"]} if has_adapters and not merge else {}  # TRL may add others
                model.save_pretrained(draft, state_dict=dict(state), **chosen)  # save_pretrained empties the dict
        tokenizer.save_pretrained(draft)
        with as_a_user(trainer):
            base = {} if merge else quantise.loading(section.quantization_config, section.dtype)
            if has_adapters and not merge:  # a user names the labels, and how exact the base is: its files may say less
                base |= {"dtype": section.dtype, **build.of_head(section, model.config)}
            base |= attention.of_export(section)
            open_again = partial(reload, draft, task, trust_remote_code=section.trust_remote_code, **base)
            reloaded = apart.opened(draft, open_again, Spilled(folder)) if taken_apart else open_again()
            round_base(reloaded, trainer.plan.layout)
            # Products in bf16, as ``logits`` were computed; in fp32 a mixture would choose other experts now and then.
            in_bf16 = trainer.args.bf16 and reloaded.dtype is torch.float32
            with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
                # Reloaded adapters have other names than trained ones; their values are compared alone.
                difference = compare(reloaded, state, probe, logits, tolerance, names=merge or not has_adapters)
        card.text += (
            f"\nBefore it was published the model was loaded with `from_pretrained` and compared with the trained one: "
            f"every tensor has its bits, and logits differ by {difference:.1e} of the largest at most.\n"
        )
        card.save(draft / "README.md")
        same_modes(draft)
        seal(draft, KIND, about or {})
        num_bytes = sum(path.stat().st_size for path in draft.glob("*.safetensors"))
        return Receipt(len(reloaded.state_dict()), num_bytes, difference)


def tied_again(model: torch.nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``state`` with one tensor under all names of a tied weight, since ``save_pretrained`` knows them by their memory.

    DeepSpeed's stages 0 to 2 return a copy for each name, and every copy would be written.
    """
    live = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    return {name: state[first.setdefault(id(live[name]), name)] for name in state}


def refuse_not_finite(model: torch.nn.Module, state: Mapping[str, Tensor]) -> None:
    """Raise NonFinite if a weight has NaN or infinity in it, naming the first. Buffers may, as masks do."""
    for name, _ in model.named_parameters():
        tensor = state[name]
        num_bad = tensor.numel() - int(tensor.isfinite().sum())
        if num_bad:
            raise NonFinite(
                f"{name}: {num_bad} of {tensor.numel()} values are not finite (NaN or infinity), so nothing is "
                f"exported; look in metrics.jsonl for the step at which the loss went wrong, and resume from an "
                f"earlier checkpoint with a smaller training.learning_rate"
            )


@contextmanager
def config_as_it_came(model: Any) -> Iterator[None]:
    """Inside, the model has a copy of its config, with its own ``use_cache``; ``save_pretrained`` changes the copy."""
    if hasattr(model, "peft_config"):
        yield
        return
    live = model.config
    model.config = deepcopy(live)
    build.set_use_cache(model.config, model.own_use_cache)
    try:
        yield
    finally:
        model.config = live


@contextmanager
def as_a_user(trainer: Trainer) -> Iterator[None]:
    """Inside, Transformers does not know of ZeRO stage 3; otherwise it would split the reloaded model over ranks."""
    config = getattr(trainer.args, "hf_deepspeed_config", None)  # only there with DeepSpeed
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if config is not None:
            set_hf_deepspeed_config(config)


def reload(folder: Path, task: Task, **options: Any) -> PreTrainedModel:
    """The model in ``folder``, loaded as a user would; ExportError if a weight is missing or has another shape."""
    logging.getLogger("transformers.modeling_utils").setLevel(logging.ERROR)

    def opens() -> Any:
        kind: Any = loaded(task.model_class)
        return kind.from_pretrained(folder, output_loading_info=True, ignore_mismatched_sizes=True, **options)

    try:
        opened = opens()
    except UNOPENED as error:
        refuse_unreadable(folder, error)
        try:
            opened = opens()  # Transformers takes a file that could not be looked at once for one that is not there
        except UNOPENED:
            raise ExportError(f"export: cannot be opened: {' '.join(str(error).split())}") from error
    model: PreTrainedModel = opened[0]
    loading = opened[1]
    keep_packing(model)
    refuse_different([f"{name} is not in the file" for name in loading["missing_keys"]])
    refuse_different(
        f"{name} has shape {tuple(stored)} in the file, not {tuple(expected)}"
        for name, stored, expected in loading["mismatched_keys"]
    )
    return model


def refuse_unreadable(folder: Path, error: Exception) -> None:
    """Raise ``error`` if it is one of the disk's, or OSError if a file in ``folder`` cannot be read."""
    if disk.found(error, folder):
        raise error
    for path in inside(folder):
        if path.is_file():
            size_and_hash(path)


def refuse_different(lines: Iterable[str]) -> None:
    """Raise ExportError with the number and the first of ``lines``, each about a tensor, if there are any."""
    if wrong := sorted(lines):
        raise ExportError(f"export: {len(wrong)} tensors differ after reloading: {'; '.join(wrong[:5])}")


def compare(
    model: PreTrainedModel,
    state: Mapping[str, Tensor],
    probe: Mapping[str, Tensor],
    logits: Tensor,
    tolerance: float,
    *,
    names: bool,
) -> float:
    """The largest difference of a logit. Raise ExportError if it is beyond ``tolerance``, or a tensor is not bit for
    bit the trained one (in the dtype of the file), or, if ``names`` are compared, is missing. The base of adapters,
    which are compared without names, may have been rounded to train: what its file has, rounded so, is compared then.
    """
    reloaded, state = _by_parts(model.state_dict()), _by_parts(state)
    trained = {name.removeprefix("base_model.model."): tensor for name, tensor in state.items()}  # the prefix is peft's
    # What peft keeps of a module that is trained in full is not saved, and a new head has other random numbers.
    trained = {name: tensor for name, tensor in trained.items() if ".original_module." not in name}
    assert trained.keys() & reloaded.keys(), "nothing to compare"
    refuse_different(f"{name} is not in the model" for name in trained.keys() - reloaded.keys() if names)
    refuse_different(
        f"{name} has other values"
        for name in trained.keys() & reloaded.keys()
        if not _same(trained[name].detach().cpu(), reloaded[name], rounded=not names)
    )
    model.eval()
    model.config.use_cache = False  # as it was for ``logits``
    with torch.no_grad():
        reloaded_logits = scores(model(**probe)).float()
        difference = float((reloaded_logits - logits).abs().max() / logits.abs().max().clamp_min(1e-12))
    if not difference <= tolerance:
        raise ExportError(f"export: logits differ by {difference:.2e} of the largest after reloading")
    return difference


def _same(trained: Tensor, exported: Tensor, *, rounded: bool) -> bool:
    return trained.to(exported.dtype).equal(exported) or (rounded and exported.to(trained.dtype).equal(trained))


def _by_parts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``state``, with the parts of torchao's tensors, which cannot be compared as they are."""
    comparable = dict[str, Tensor]()
    for name, tensor in state.items():
        flatten = getattr(tensor, "__tensor_flatten__", None)
        parts = flatten()[0] if flatten is not None else ()
        comparable |= {f"{name}.{part}": getattr(tensor, part) for part in parts} or {name: tensor}
    return comparable


# --- the card: what a reader needs, and nothing of this machine; whoever publishes adds a licence ---------------------


def model_card(
    config: RunConfig,
    hf_config: PretrainedConfig,
    state: TrainerState,
    num_ranks: int,
    parities: Mapping[str, Parity],
    recipes: Sequence[str] = (),
    callbacks: str = "",
) -> ModelCard:
    """The card of the trained model; ``state`` has the log, and each strategy a parity. Bases and data are called by
    their names on the hub, others by nothing that says where they are.
    """
    base, brings_code = config.model.name_or_path, bool(getattr(hf_config, "auto_map", None))
    adapters = config.model.lora is not None and not config.model.merges
    tags = ["deepstow", *(["lora"] if adapters else []), *(["custom_code"] if brings_code else [])]
    header = ModelCardData(
        base_model=base if base and hub.is_name(base) else None,
        library_name="peft" if adapters else "transformers",
        pipeline_tag=config.chosen_task.pipeline_tag,
        tags=tags,
    )
    data, used = config.data, {name: number for name, number in versions().items() if number != "not installed"}
    if config.model.lora is None:
        used.pop("peft", None)
    sentences = (attention.sentence(config.model), *recipes)
    source = ", ".join(dict.fromkeys(_source(part.path, part.name) for part in data.parts()))
    parts = [
        f"# {Path(config.training.output_dir).name}",
        " ".join(filter(None, (_origin(config, hf_config.model_type), *sentences))),
        f"It was trained on {source} in sequences of up to {data.max_length} tokens, for {state.global_step} steps. "
        + of_best(config, state, "These are {}. ")
        + " ".join(_results(config, state.log_history)),
        f"Settings: {', '.join(_settings(config))}.",
        f"Strategies, on {num_ranks} process{'es' if num_ranks > 1 else ''}: {_strategies(config)}. "
        f"{_exactness(parities, ' with the same callbacks' * bool(callbacks))}{callbacks}".strip(),
        f"Versions: {', '.join(f'{name} {number}' for name, number in used.items())}.",
    ]
    if brings_code:
        parts.append("The model brings its own Python code: read it, then load it with `trust_remote_code=True`.")
    return ModelCard(f"---\n{header.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n")


def after(folder: Path, lines: str) -> ModelCard:
    """The card of the export in ``folder``, behind ``lines``, which say what was made of it."""
    card = ModelCard.load(folder / "README.md")
    card.data.library_name = None  # Transformers does not open it
    header = card.data.to_yaml()
    return ModelCard(f"---\n{header}\n---\n\n{lines}\n\nOf the model that it was made of:\n\n{card.text.lstrip()}")


def _source(path: str | None, name: str | None) -> str:
    if path is None or (path != "pydoc" and not is_on_hub(path)):
        return "local files"
    return f"`{path}` ({name})" if name else f"`{path}`"


def _origin(config: RunConfig, model_type: str) -> str:
    lora, base = config.model.lora, config.model.name_or_path and hub.shown(config.model.name_or_path)
    if lora is not None and not config.model.merges:
        began = f" Training went on with `{Path(config.model.adapter).name}`." if config.model.adapter else ""
        return (
            f"Low-rank adapters (rank {lora.r}) for `{base}`, trained with DeepStow.{began} The base is not included."
        )
    how = f"; what was trained are low-rank adapters (rank {lora.r}), merged into it" if lora is not None else ""
    if base is not None:
        return f"`{base}`, a model of type {model_type}, trained further with DeepStow{how}."
    return f"A model of type {model_type}, trained with DeepStow from random weights{how}."


def _results(config: RunConfig, history: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A sentence for each of the last losses in the log, and what recipes say of it."""
    for kind, key in (("training", "loss"), ("evaluation", "eval_loss")):
        last = next((record for record in reversed(history) if key in record), None)
        if last is not None:
            loss = float(last[key])
            shown = f" (perplexity {perplexity(loss):.1f})" if config.chosen_task.language else ""
            yield f"The last {kind} loss, at step {last['step']}, was {loss:.4f}{shown}."
    for recipe in config.switched_on:
        yield from recipe.results(history)


def _settings(config: RunConfig) -> Iterator[str]:
    """The keys of ``training`` on which the result depends, as they were set or by default."""
    fields = type(config.training).model_fields
    for key, value in config.training.model_dump().items():
        decides = key != "callbacks" and rule_at(fields[key], "fixed") not in ("free", "evaluations")
        if value is not None and value is not False and decides:
            yield f"{key} {_shown(value)}"


def _shown(value: Any) -> str:
    """A value of the config, unless it is a place on this machine."""
    return "(a local path)" if any(mark in str(value) for mark in "/\\~") else str(value)


def _exactness(parities: Mapping[str, Parity], beside: str = "") -> str:
    """How training with each strategy compares with plain training, which tests hold it to."""
    exact = [name for name, parity in parities.items() if parity.tolerance == 0.0]
    claims = [f"{', '.join(exact)} bit for bit"] if exact else []
    claims += [
        f"{name} to {parity.tolerance:.0e} of the largest weight ({parity.reason})"
        for name, parity in parities.items()
        if name not in exact and not parity.is_lossy
    ]
    lossy = "; ".join(f"{name}: {parity.reason}" for name, parity in parities.items() if parity.is_lossy)
    equal = f"Training equals plain training{beside}: {'; '.join(claims)}. " if claims and not lossy else ""
    return f"Training is lossy, and does not equal plain training{beside} ({lossy}). " if lossy else equal


def _strategies(config: RunConfig) -> str:
    """Each strategy with the options that the config sets."""
    described = []
    for name, strategy in config.strategies.items():
        options = [f"{key} {_shown(value)}" for key, value in strategy.model_dump(exclude_unset=True).items()]
        described.append(f"{name} ({', '.join(options)})" if options else name)
    return ", ".join(described) or "none"
