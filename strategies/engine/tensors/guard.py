"""The guard: saved weights that backward reads are in their home when it reads them, whatever made the node run.

A backward node may run where no hook announced it (``module_hooks.py``): an auxiliary loss that a block left in an
attribute, an output that cannot be hooked, several blocks that are recomputed as one. Its weights may be absent. So a
guard packs and unpacks every tensor that autograd saves while a scope runs. A view of an offloaded weight is kept with
its bucket, which is fetched, and counted, if it is not in its home when backward unpacks the view. A node cannot use a
saved tensor without unpacking it.

If other code has hooks on saved tensors at that moment (a checkpoint, activation offloading), it gets all tensors but
these. Hooks switch off torch's own check of versions, so it is done here, for weights and for all others.

Not seen: tensors that a custom ``autograd.Function`` keeps in an attribute. Refused: backward through backward
(``create_graph``), and backward through a graph that was made before an update of its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

strided = torch.strided
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


@dataclass(slots=True, eq=False)
class SavedWeight:
    """A view of a weight that autograd saved."""

    bucket: Any  # a BucketState
    view: Tensor
    version: int


def guard(offloaded: Sequence[Any], bring: Callable[[Any], None]) -> saved_tensors_hooks:
    """Hooks on tensors that autograd saves while a scope runs that uses ``offloaded``. ``bring`` is called with a
    bucket that is not shown when it is read, and fetches it.
    """
    places = [(bucket, start := bucket.weight.data_ptr(), start + bucket.weight.nbytes) for bucket in offloaded]
    first, last = min(start for _, start, _ in places), max(end for *_, end in places)
    others: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def pack(tensor: Tensor) -> Any:  # a thousand times per step
        if tensor.layout is strided and first <= tensor.data_ptr() < last:
            for bucket, start, end in places:
                if start <= tensor.data_ptr() < end:
                    return SavedWeight(bucket, tensor.detach(), tensor._version)
        return (tensor.detach(), tensor._version) if others is None else others[0](tensor)

    pack.ours = True  # type: ignore[attr-defined]

    def unpack(kept: Any) -> Tensor:
        if type(kept) is SavedWeight:
            return _read(kept, bring)
        if others is not None:
            return others[1](kept)
        tensor: Tensor = kept[0]
        if tensor._version != kept[1]:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; expected version {kept[1]} "
                f"instead"
            )
        return tensor

    return saved_tensors_hooks(pack, unpack)


def others_keep() -> bool:
    """Whether hooks of other code keep what autograd saves now, set inside of any guard. Torch's checkpoints keep
    nothing: they run forward again in backward and read weights once more.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or not torch.is_grad_enabled():
        return False
    return not hasattr(hooks[0], "ours") and hooks[0].__module__ != "torch.utils.checkpoint"


def _read(kept: SavedWeight, bring: Callable[[Any], None]) -> Tensor:
    if not kept.bucket.views.shown:
        bring(kept.bucket)
    if kept.view._version != kept.version:
        raise RuntimeError(f"{kept.bucket.name} was updated since the forward of this backward; run forward again")
    if torch.is_grad_enabled():
        raise RuntimeError(DOUBLE)
    return kept.view


def refuse_transforms() -> None:
    """Raise RuntimeError under torch.compile or torch.func's transforms, which keep the memory of weights or do not see
    that it is overwritten.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "a model whose weights travel cannot be in torch.func: plan with weights='resident', or do not"
        )
    if callable(torch._C._dynamo.eval_frame.get_eval_frame_callback()):
        raise RuntimeError("a model whose weights travel cannot be compiled: plan with weights='resident', or do not")


DOUBLE = (
    "backward with create_graph=True needs weights again that travel: plan with weights='resident', or more gpu_memory"
)
