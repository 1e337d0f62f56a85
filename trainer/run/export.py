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
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from strategies.core.commit import replaced_folder, same_modes
from strategies.core.sealed import Damaged, damage, read, seal
from trainer.errors import write_line
from trainer.model.build import set_use_cache
from trainer.run.checkpoint import move_aside
from trainer.run.model_card import model_card
from trainer.run.trainer import Trainer
from trainer.tasks.table import TASKS
from trainer.tasks.task import Task, loaded

if TYPE_CHECKING:
    from trainer.config.sections import RunConfig

KIND = "export"  # in its manifest
PROBE_TOKENS = 32
# Of the largest logit. The same kernels give the same bits; another device or 16-bit compute rounds differently.
FP32_TOLERANCE, HALF_TOLERANCE = 1e-3, 5e-2


@dataclass(frozen=True, slots=True)
class Receipt:
    """The result of the check. ``largest_difference`` is between logits, relative to the largest logit."""

    num_tensors: int
    num_bytes: int
    largest_difference: float


class ExportError(RuntimeError):
    """The export is not the trained model, or there is nothing finite to export."""


def export(trainer: Trainer, tokenizer: PreTrainedTokenizerBase, config: RunConfig) -> Receipt | None:
    """Write the model, with a card, and check it; a collective. Only the first rank gets a receipt. Raise ExportError
    if a weight is not finite, or a name, a shape, a value or a logit differs after reloading.
    """
    merge = config.model.lora is not None and config.model.name_or_path is None
    model: Any = trainer.accelerator.unwrap_model(trainer.whole, keep_torch_compile=False)
    task = TASKS[config.task]
    rows = trainer.whole.get_input_embeddings().num_embeddings
    probe = task.probe((torch.arange(PROBE_TOKENS) * 7919 % rows).unsqueeze(0))
    logits = trainer.logits_of(probe)
    gathered = {name.replace("_orig_mod.", ""): tensor for name, tensor in trainer.whole_state().items()}  # compiled
    state, has_adapters = tied_again(model, gathered), hasattr(model, "peft_config")
    if trainer.stowed is not None and has_adapters and merge:
        trainer.stowed.close()  # merging changes weights in place, so they have to be in ordinary memory
    if not trainer.is_world_process_zero():
        return None
    card = model_card(config, model.config, trainer.state, sys.argv, trainer.args.world_size)
    if has_adapters and merge:
        for name, parameter in model.named_parameters():
            if hasattr(parameter, "ds_id"):  # stage 3: this rank has only a share of it
                parameter.data = state[name]
        model = model.merge_and_unload()
        state = model.state_dict()
    refuse_not_finite(model, state)
    rounds = trainer.args.bf16 or trainer.args.fp16 or model.dtype is not torch.float32
    tolerance = HALF_TOLERANCE if rounds else FP32_TOLERANCE
    with replaced_folder(Path(config.training.output_dir) / "export") as draft:
        with config_as_it_came(model):
            model.save_pretrained(draft, state_dict=dict(state))  # save_pretrained empties the dict
        tokenizer.save_pretrained(draft)
        card.save(draft / "README.md")
        with as_a_user(trainer):
            labels = {}
            if config.model.labels and has_adapters and not merge:  # a user names them, since the files do not
                labels = {"id2label": model.config.id2label, "label2id": model.config.label2id}
            reloaded = reload(draft, task, trust_remote_code=config.model.trust_remote_code, **labels)
            # Reloaded adapters have other names than trained ones; their values are compared alone.
            difference = compare(reloaded, state, probe, logits, tolerance, names=merge or not has_adapters)
        same_modes(draft)
        seal(draft, KIND, about(config, trainer.state.global_step))
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


def reload(folder: Path, task: Task, **options: Any) -> PreTrainedModel:
    """The model in ``folder``, loaded as a user would; ExportError if a weight is missing or has another shape."""
    logging.getLogger("transformers.modeling_utils").setLevel(logging.ERROR)
    try:
        opened: Any = loaded(task.model_class).from_pretrained(
            folder, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except (RuntimeError, OSError, ValueError, SafetensorError) as error:
        raise ExportError(f"export: cannot be opened: {' '.join(str(error).split())}") from error
    model: PreTrainedModel = opened[0]
    loading = opened[1]
    refuse_different([f"{name} is not in the file" for name in loading["missing_keys"]])
    refuse_different(
        f"{name} has shape {tuple(found)} in the file, not {tuple(wanted)}"
        for name, found, wanted in loading["mismatched_keys"]
    )
    return model


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
    bit the trained one (in the dtype of the file), or, if ``names`` are compared, is missing.
    """
    found = model.state_dict()
    trained = {name.removeprefix("base_model.model."): tensor for name, tensor in state.items()}  # the prefix is peft's
    # What peft keeps of a module that is trained in full is not saved, and a new head has other random numbers.
    trained = {name: tensor for name, tensor in trained.items() if ".original_module." not in name}
    assert trained.keys() & found.keys(), "nothing to compare"
    refuse_different(f"{name} is not in the model" for name in trained.keys() - found.keys() if names)
    refuse_different(
        f"{name} has other values"
        for name in trained.keys() & found.keys()
        if not trained[name].detach().cpu().to(found[name].dtype).equal(found[name])
    )
    model.eval()
    model.config.use_cache = False  # as it was for ``logits``
    with torch.no_grad():
        again = model(**probe).logits.float()
        difference = float((again - logits).abs().max() / logits.abs().max().clamp_min(1e-12))
    if not difference <= tolerance:
        raise ExportError(f"export: logits differ by {difference:.2e} of the largest after reloading")
    return difference


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
