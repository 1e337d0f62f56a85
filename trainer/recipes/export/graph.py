"""The trained model as a program, of ``torch.export`` or ONNX, that runs without Transformers and the model's own code.

The program takes ``input_ids`` and ``attention_mask`` of any number of rows and tokens, and returns logits. It is made
on the CPU of the exact export, saved, opened again (by ``torch.export.load`` or onnxruntime) and run on rows of other
lengths, padded ones among them; its logits must be those of the model.

Refused, before any weight is loaded: architectures that torch cannot export, which a small copy of the model shows, and
ONNX without its packages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule
from transformers import AutoModelForCausalLM

from deepstow.trainer.errors import first_line, write_line
from deepstow.trainer.model.build import config_of
from deepstow.trainer.model.shrink import small_copy
from deepstow.trainer.run.exporting.export import FP32_TOLERANCE, HALF_TOLERANCE, ExportError

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig

TRACED = (2, 12)  # rows and tokens
USE = {
    "torch_export": """```python
import torch
program = torch.export.load("model.pt2").module()
logits = program(input_ids, attention_mask)  # [rows, tokens], int64, on the CPU
```""",
    "onnx": """```python
import onnxruntime
session = onnxruntime.InferenceSession("model.onnx")
(logits,) = session.run(None, {"input_ids": ids, "attention_mask": mask})  # [rows, tokens], int64
```""",
}


class Logits(nn.Module):
    """A causal language model as a function of two tensors."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return logits


def program_of(model: Any) -> ExportedProgram:
    """``model`` as a program for any number of rows and tokens. Raises what torch raises if it cannot be exported."""
    max_length = getattr(model.config, "max_position_embeddings", None)
    axes = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC(max=max_length) if max_length else Dim.DYNAMIC}
    inputs = (torch.zeros(TRACED, dtype=torch.int64), torch.ones(TRACED, dtype=torch.int64))
    with torch.no_grad():
        program = torch.export.export(
            Logits(model.eval()), inputs, dynamic_shapes={"input_ids": axes, "attention_mask": axes}
        )
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            node.meta.pop("stack_trace", None)  # which names files of this machine, and would be saved
    return program


def saved(model: Any, form: str, folder: Path) -> Callable[[Tensor, Tensor], Tensor]:
    """The program of ``model`` as it is opened again from a file in ``folder``. Raises what the library raises."""
    program = program_of(model)
    if form == "torch_export":
        torch.export.save(program, folder / "model.pt2")
        return torch.export.load(folder / "model.pt2").module()
    import onnxruntime

    onnx_program: Any = torch.onnx.export(program, dynamo=True, verbose=False, output_names=["logits"])
    onnx_program.save(folder / "model.onnx", external_data=True)
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])

    def call(ids: Tensor, mask: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0])

    return call


def refused(config: RunConfig, form: str) -> str:
    """Why a small copy of the model cannot be exported, or is another model after it; empty if it can."""
    built = config_of(config)
    attention = {"attn_implementation": "eager"} if config.model.attn_implementation == "eager" else {}
    copy = small_copy(built, attention)
    try:
        with TemporaryDirectory() as folder:
            difference = largest_difference(saved(copy, form, Path(folder)), copy)
    except Exception as error:  # whatever the tracer meets in somebody's forward
        return f"torch cannot export a {built.model_type} model: {first_line(error)}; leave it out"
    if not difference <= FP32_TOLERANCE:
        what = f"logits of a {built.model_type} model differ by {difference:.1e} of the largest once it is exported"
        return f"{what}; leave it out"
    return ""


def largest_difference(program: Any, model: Any) -> float:
    """Of a logit, relative to the largest, over a few rows; where padding is, logits mean nothing."""
    worst = 0.0
    for ids, mask in _rows(model.get_input_embeddings().num_embeddings):
        with torch.no_grad():
            ours, theirs = (forward(ids, mask).float()[mask.bool()] for forward in (Logits(model), program))
        worst = max(worst, float((ours - theirs).abs().max() / ours.abs().max().clamp_min(1e-12)))
        worst = worst if theirs.isfinite().all() else float("inf")
    return worst


def _rows(words: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Token ids and masks: a short row, and longer ones that are padded on either side."""
    for rows, tokens in ((1, 5), (3, 17)):
        ids = (torch.arange(rows * tokens) * 7919 % words).view(rows, tokens)
        mask = torch.ones_like(ids)
        if rows > 1:
            mask[0, :4], mask[1, -3:] = 0, 0
        yield ids, mask


def make(config: RunConfig, form: str, exact: Path, draft: Path) -> str:
    """Write the program of the ``exact`` export into ``draft``, and return what is said of it. Raise ExportError if its
    logits are not the model's.
    """
    trusts = config.model.trust_remote_code
    model: Any = AutoModelForCausalLM.from_pretrained(exact, trust_remote_code=trusts)
    try:
        program = saved(model, form, draft)
    except Exception as error:
        raise ExportError(f"export: torch cannot export the model: {first_line(error)}") from error
    difference = largest_difference(program, model)
    if not difference <= (FP32_TOLERANCE if model.dtype is torch.float32 else HALF_TOLERANCE):
        raise ExportError(f"export: logits of the program differ by {difference:.2e} of the largest")
    write_line(f"export: as a program ({form}), reloaded: largest difference of a logit {difference:.1e}")
    sentence = f"Logits differ from the model's by {difference:.1e} of the largest at most."
    return f"# As a program ({form}, by torch {torch.__version__})\n\n{sentence}\n\n{USE[form]}"
