"""The finished model as Hugging Face expects it, and the proof that it is the trained one.

Export writes safetensors and the tokenizer to ``<output_dir>/export`` through ``save_pretrained``. Then the folder is
opened again with ``from_pretrained``, as a user would, and compared: every name and shape, and the logits of a probe.
A model that was trained is not worth more than the file that holds it.

Under ZeRO stage 3 the weights are gathered to the first rank. Adapters (LoRA) are exported as adapters when their
base can be loaded again by name; on a base with random weights they are merged into it.

Refused: calling an export done that does not reload.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from trainer.trainer import Trainer

PROBE_TOKENS = 32
# Of the largest logit. The same kernels give the same bits; another device, or 16-bit compute, rounds its own way.
FP32_TOLERANCE, HALF_TOLERANCE = 1e-3, 5e-2


@dataclass(frozen=True, slots=True)
class Receipt:
    """What was compared. ``largest_difference`` is between logits, relative to the largest one."""

    folder: Path
    num_tensors: int
    num_bytes: int
    largest_difference: float
    tolerance: float


class ExportError(RuntimeError):
    """The export does not hold what was trained."""


def export(trainer: Trainer, tokenizer: PreTrainedTokenizerBase, folder: Path, *, merge: bool) -> Receipt | None:
    """Write the model to ``folder`` and check it; a collective. The receipt is on the first rank only.

    Args:
        merge: fold adapters into the weights; for a base that cannot be loaded by name.

    Raises:
        ExportError: a name, a shape or a logit differs after reloading.
    """
    import torch

    model: Any = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    probe, logits = probe_logits(trainer, model)
    expected = shapes(model)
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if not trainer.is_world_process_zero():
        return None
    draft = folder.with_name(folder.name + ".partial")
    shutil.rmtree(draft, ignore_errors=True)
    if hasattr(model, "peft_config") and merge:
        model = model.merge_and_unload()
        state = None
    model.save_pretrained(draft, state_dict=state)
    tokenizer.save_pretrained(draft)
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)
    rounds = trainer.args.bf16 or trainer.args.fp16 or model.dtype is not torch.float32
    tolerance = HALF_TOLERANCE if rounds else FP32_TOLERANCE
    return check(folder, {} if hasattr(model, "peft_config") else expected, probe, logits, tolerance)


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Name to full shape of everything a state dict holds; a parameter split by stage 3 knows its full shape."""
    return {
        name: tuple(getattr(tensor, "ds_shape", tensor.shape))
        for name, tensor in model.state_dict(keep_vars=True).items()
    }


def probe_logits(trainer: Trainer, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a fixed row of tokens, from the model as it was trained. [1, T], [1, T, V]"""
    import torch

    rows = model.get_input_embeddings().num_embeddings
    probe = (torch.arange(PROBE_TOKENS) * 7919 % rows).unsqueeze(0)
    wrapped = trainer.model_wrapped
    was_training = wrapped.training
    wrapped.eval()
    with torch.no_grad(), trainer.compute_loss_context_manager():
        logits = wrapped(input_ids=probe.to(trainer.args.device)).logits
    wrapped.train(was_training)
    return probe, logits.float().cpu()


def check(
    folder: Path,
    expected: dict[str, tuple[int, ...]],
    probe: torch.Tensor,
    logits: torch.Tensor,
    tolerance: float = FP32_TOLERANCE,
) -> Receipt:
    """Open ``folder`` as a user would and compare.

    Tied weights are stored once; after loading both names must be there again, so names are compared on the model.

    Raises:
        ExportError: naming the first differences.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # under stage 3 from_pretrained would split the copy over ranks that are not here
    logging.getLogger("transformers.modeling_utils").setLevel(logging.ERROR)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    found = shapes(model)
    if expected:
        wrong = [f"{name} is missing" for name in expected.keys() - found.keys()]
        wrong += [f"{name} is new" for name in found.keys() - expected.keys()]
        wrong += [
            f"{name} has shape {found[name]}, not {shape}"
            for name, shape in expected.items()
            if name in found and found[name] != shape
        ]
        if wrong:
            raise ExportError(f"{folder}: {len(wrong)} tensors differ after reloading: {'; '.join(sorted(wrong)[:5])}")
    model.eval()
    with torch.no_grad():
        again = model(input_ids=probe).logits.float()
    difference = float((again - logits).abs().max() / logits.abs().max().clamp_min(1e-12))
    if not difference <= tolerance:
        raise ExportError(f"{folder}: logits differ by {difference:.2e} of the largest after reloading")
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return Receipt(folder, len(found), num_bytes, difference, tolerance)
