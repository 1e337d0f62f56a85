"""Weights that backward reads are at home when it reads them, whatever brought it there.

Problem. Weights that travel come and go at the borders of scopes (``module_hooks.py``). A node of backward may run
where no border was met: an auxiliary loss that a block made after its output and left in an attribute, an output that
nothing can be hooked on, a segment of several blocks that is recomputed as one. Its weights may be away: without the
guard torch refuses to read them (``bucket_state.py``, Note: versions).

With it, every tensor that autograd saves while the scope runs goes through the two functions here. A view of a weight
that travels is kept with its bucket; when backward unpacks it, the bucket is at home or is brought there first. That is
right by construction: a node cannot use a saved tensor without unpacking it. What was fetched so is counted. Which
scopes have a guard, and when: ``module_hooks.py``, Note: unannounced nodes.

Where others have hooks of their own at that moment (a checkpoint, activations that go elsewhere), they get all tensors
but these. Hooks switch off torch's own look at versions, so it is done here, for weights and for all others.

Not seen: tensors that a custom ``autograd.Function`` hides from autograd in an attribute of its context.

Refused: backward through backward (``create_graph``) over weights that travel, and backward through a graph that was
made before an update of its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

if TYPE_CHECKING:
    from strategies.engine.bucket_state import BucketState

strided = torch.strided
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


@dataclass(slots=True, eq=False)
class Weight:
    """A view of a weight that autograd saved."""

    bucket: BucketState
    view: Tensor
    version: int


def guard(travelling: Sequence[BucketState], come: Callable[[BucketState], None]) -> saved_tensors_hooks:
    """Hooks for what is saved while a scope runs that uses ``travelling``; to be entered before, left afterwards.

    Args:
        come: brings a bucket home that is not there when it is read.
    """
    places = [(bucket, start := bucket.weight.data_ptr(), start + bucket.weight.nbytes) for bucket in travelling]
    first, last = min(start for _, start, _ in places), max(end for *_, end in places)
    others: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def pack(tensor: Tensor) -> Any:  # a thousand times per step
        if tensor.layout is strided and first <= tensor.data_ptr() < last:
            for bucket, start, end in places:
                if start <= tensor.data_ptr() < end:
                    return Weight(bucket, tensor.detach(), tensor._version)
        return (tensor.detach(), tensor._version) if others is None else others[0](tensor)

    pack.ours = True  # type: ignore[attr-defined]

    def unpack(kept: Any) -> Tensor:
        if type(kept) is Weight:
            return _read(kept, come)
        if others is not None:
            return others[1](kept)
        tensor: Tensor = kept[0]
        return tensor if tensor._version == kept[1] else _refuse_written(*kept)

    return saved_tensors_hooks(pack, unpack)


def hooked() -> bool:
    """Whether somebody has hooks on what autograd saves now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def others_keep() -> bool:
    """Whether what autograd saves now is kept by somebody else's hooks, which no guard is above.

    Torch's checkpoints keep nothing: they run forward again when backward comes by, and read weights once more.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or not torch.is_grad_enabled():
        return False
    return not hasattr(hooks[0], "ours") and hooks[0].__module__ != "torch.utils.checkpoint"


def _read(kept: Weight, come: Callable[[BucketState], None]) -> Tensor:
    if not kept.bucket.views.shown:
        come(kept.bucket)
    if kept.view._version != kept.version:
        raise RuntimeError(f"{kept.bucket.name} was updated since the forward of this backward; run forward again")
    if torch.is_grad_enabled():
        raise RuntimeError(DOUBLE)
    return kept.view


def refuse_transforms() -> None:
    """Raise where compiled or transformed code would meet weights that travel.

    Raises:
        RuntimeError: torch.compile is on in this thread, which keeps the memory of the weights that it met, or one of
            torch.func's transforms, which knows nothing of memory that is written elsewhere.
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


def _refuse_written(tensor: Tensor, version: int) -> NoReturn:
    raise RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"shape {tuple(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
    )
