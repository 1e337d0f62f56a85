"""Export the trained model in Hugging Face's format, and check that the export is the trained model.

``save_pretrained`` writes into a draft folder, which is opened with ``from_pretrained``, as a user would, and compared:
all names and shapes, all values bit for bit, and the logits of a probe. Only then it replaces ``<output_dir>/export``,
sealed with the step and the hash of every file. Adapters (LoRA) are exported as adapters if their base can be loaded by
name; on a base with random weights they are merged into it.

Invariant. A tied weight is in the file once, under every strategy. The config has the model's own ``use_cache`` and
not the one that training sets. Python files that came with the model are in the folder; the check runs them only if
``model.trust_remote_code`` allowed that for the run. The live model is not changed, unless adapters are merged.

Nothing that a run has finished is replaced. A restart script starts a run once more after it has ended: resumed at its
last step, with a whole export of that step, it ends at once. If only the export is missing or damaged it is made again,
without a step of training; what was there moves to ``earlier-N``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import ModelCard
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from strategies.backends.tensor_shards import whole_shape
from strategies.core.commit import replaced_folder, same_modes
from strategies.core.sealed import Damaged, damage, read, seal
from strategies.engine.tensors.quantised import keep_packing
from trainer.errors import write_line
from trainer.model.adapters import merged
from trainer.model.build import set_use_cache
from trainer.run.checkpoint import move_aside
from trainer.run.trainer import Trainer

if TYPE_CHECKING:
    from trainer.config.sections import RunConfig

KIND = "export"  # in its manifest
PROBE_TOKENS = 32
# Of the largest logit. The same kernels give the same bits; another device or 16-bit compute rounds differently.
# Evaluated layers with 8-bit weights round their inputs to 8 bits as well, and merged ones do not.
FP32_TOLERANCE, HALF_TOLERANCE, EIGHT_TOLERANCE = 1e-3, 5e-2, 1e-1


@dataclass(frozen=True, slots=True)
class Receipt:
    """The result of the check. ``largest_difference`` is between logits, relative to the largest logit."""

    num_tensors: int
    num_bytes: int
    largest_difference: float


class ExportError(RuntimeError):
    """The export is not the trained model, or there is nothing finite to export."""


def export(
    trainer: Trainer,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    merge: bool,
    trust_remote_code: bool = False,
    loads: Mapping[str, Any] = MappingProxyType({}),
    card: ModelCard | None = None,
    about: Mapping[str, Any] | None = None,
) -> Receipt | None:
    """Write the model to ``folder`` and check it; a collective. Only the first rank gets a receipt. Raise ExportError
    if a weight is not finite, or a name, a shape, a value or a logit differs after reloading.

    Args:
        merge: merge adapters into the weights; for a base that cannot be loaded by name.
        trust_remote_code: run Python code that came with the model when it is reloaded.
        loads: what it is reloaded with besides, as adapters of a quantised base are.
        card: written as README.md.
        about: what the manifest says.
    """
    model: Any = trainer.accelerator.unwrap_model(trainer.whole, keep_torch_compile=False)
    probe, logits = probe_logits(trainer)
    expected = shapes(model)
    gathered = {name.replace("_orig_mod.", ""): tensor for name, tensor in trainer.whole_state().items()}  # compiled
    state, has_adapters = tied_again(model, gathered), hasattr(model, "peft_config")
    if trainer.stowed is not None and has_adapters and merge:
        trainer.stowed.close()  # merging changes weights in place, so they have to be in ordinary memory
    if not trainer.is_world_process_zero():
        return None
    eight = any(parameter.dtype is torch.int8 for parameter in model.parameters())
    if has_adapters:
        expected = {}  # reloaded adapters have other names than trained ones; only their values are compared
        if merge:
            for name, parameter in model.named_parameters():
                if hasattr(parameter, "ds_id"):  # stage 3: this rank has only a share of it
                    parameter.data = state[name]
            model = merged(model)
            expected, state = shapes(model), model.state_dict()
    refuse_not_finite(model, state)
    rounds = trainer.args.bf16 or trainer.args.fp16 or model.dtype is not torch.float32
    tolerance = HALF_TOLERANCE if rounds else FP32_TOLERANCE
    tolerance, code = EIGHT_TOLERANCE if eight and merge else tolerance, {"trust_remote_code": trust_remote_code}
    with replaced_folder(folder) as draft:
        with config_as_it_came(model):
            model.save_pretrained(draft, state_dict=dict(state))  # save_pretrained empties the dict
        tokenizer.save_pretrained(draft)
        if card is not None:
            card.save(draft / "README.md")
        with as_a_user(trainer):
            receipt = check(draft, expected, state, probe, logits, tolerance, {**loads, **code})
        same_modes(draft)
        seal(draft, KIND, about or {"step": trainer.state.global_step})
        return receipt


def tied_again(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``state`` with one tensor under all names of a tied weight, since ``save_pretrained`` knows them by their memory.

    DeepSpeed's stages 0 to 2 return a copy for each name, and every copy would be written.
    """
    live = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    return {name: state[first.setdefault(id(live[name]), name)] for name in state}


def refuse_not_finite(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Raise ExportError if a weight has NaN or infinity in it, naming the first. Buffers may, as masks do."""
    for name, _ in model.named_parameters():
        tensor = state[name]
        num_bad = tensor.numel() - int(tensor.isfinite().sum())
        if num_bad:
            raise ExportError(
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
    set_use_cache(model.config, model.own_use_cache)
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


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Full shape by name of all that is in the state dict; parameters that ranks divide know their full shape."""
    return {name: whole_shape(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}


def probe_logits(trainer: Trainer) -> tuple[torch.Tensor, torch.Tensor]:
    """A fixed row of tokens and its logits from the trained model. [1, T], [1, T, V]"""
    rows = trainer.whole.get_input_embeddings().num_embeddings
    probe = (torch.arange(PROBE_TOKENS) * 7919 % rows).unsqueeze(0)
    if trainer.pipeline is not None:
        return probe, trainer.logits_of(probe)
    wrapped = trainer.model_wrapped
    was_training = wrapped.training
    wrapped.eval()
    with torch.no_grad(), trainer.compute_loss_context_manager():
        logits = wrapped(input_ids=probe.to(trainer.args.device)).logits
    wrapped.train(was_training)
    return probe, logits.float().cpu()


def check(
    folder: Path,
    expected: Mapping[str, tuple[int, ...]],
    state: Mapping[str, torch.Tensor],
    probe: torch.Tensor,
    logits: torch.Tensor,
    tolerance: float,
    options: Mapping[str, Any],
) -> Receipt:
    """Load the model from ``folder`` as a user would and compare it; ExportError names the first differences.

    Tied weights are stored once, and the model has both names after loading, so names are compared on the model:
    those that are ``expected``, with their shapes, if any are.
    """
    model, wrong = reload(folder, **options)
    wrong += _different_names(expected, shapes(model)) if expected else []
    wrong = wrong or _different_values(state, model.state_dict())
    if wrong:
        raise ExportError(f"export: {len(wrong)} tensors differ after reloading: {'; '.join(sorted(wrong)[:5])}")
    model.eval()
    keep_packing(model)
    model.config.use_cache = False  # as it was for ``logits``
    with torch.no_grad():
        again = model(input_ids=probe).logits.float()
        difference = float((again - logits).abs().max() / logits.abs().max().clamp_min(1e-12))
    if not difference <= tolerance:
        raise ExportError(f"export: logits differ by {difference:.2e} of the largest after reloading")
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return Receipt(len(model.state_dict()), num_bytes, difference)


def reload(folder: Path, **options: Any) -> tuple[PreTrainedModel, list[str]]:
    """The model in ``folder``, and a line for each weight that was missing or had another shape."""
    logging.getLogger("transformers.modeling_utils").setLevel(logging.ERROR)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except (RuntimeError, OSError, ValueError, SafetensorError) as error:
        raise ExportError(f"export: cannot be opened: {' '.join(str(error).split())}") from error
    model, loading = loaded
    return model, [f"{name} is not in the file" for name in loading["missing_keys"]] + [
        f"{name} has shape {tuple(found)} in the file, not {tuple(wanted)}"
        for name, found, wanted in loading["mismatched_keys"]
    ]


def _different_names(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> list[str]:
    return [
        f"{name} has shape {found.get(name, 'none')}, not {expected.get(name, 'none')}"
        for name in expected.keys() | found.keys()
        if found.get(name) != expected.get(name)
    ]


def _different_values(state: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> list[str]:
    """A line for each tensor that is not, bit for bit, the trained one (in the dtype of the file)."""
    names = {name: name.removeprefix("base_model.model.") for name in state}  # the prefix is peft's
    assert set(names.values()) & found.keys(), "nothing to compare"
    return [
        f"{name} has other values"
        for name, plain in names.items()
        if plain in found and not state[name].detach().cpu().to(found[plain].dtype).equal(found[plain])
    ]


# --- a run that is over ----------------------------------------------------------------------------------------------


def about(config: RunConfig, step: int) -> dict[str, Any]:
    """What an export says about itself: its step, and what decided that it is the last one."""
    training = config.training
    return {
        "step": step,
        "max_steps": training.max_steps,
        "num_train_epochs": training.num_train_epochs,
        "load_best_model_at_end": bool(training.load_best_model_at_end),
    }


def finished_before(config: RunConfig, step: int) -> str | None:
    """The line of a run that is over at ``step``, its export whole; None if something is left to do."""
    folder = Path(config.training.output_dir) / "export"
    try:
        sealed = read(folder, KIND)
    except Damaged:
        return None
    if sealed.about != about(config, step) or damage(folder, sealed):
        return None
    return f"finished before, at step {step}: {folder} is whole and of that step; nothing was changed"


def make_room(config: RunConfig, step: int) -> str | None:
    """``finished_before``; if it says nothing, an export that is there moves aside. OSError: it cannot be moved."""
    line = finished_before(config, step)
    folder = Path(config.training.output_dir)
    earlier = None if line else move_aside([folder / "export"], folder, overwrite=config.training.overwrite)
    if earlier is not None:
        write_line(f"the export of before is now in {earlier}")
    return line
