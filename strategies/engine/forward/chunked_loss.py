"""The cross-entropy of a causal language model by chunks of rows, with the bits of Transformers' own.

Plain training casts all logits to fp32, saves the log-probabilities of all words, and makes two more tensors of that
size in backward. Here the same kernels run on a few rows at a time. Forward keeps the logits as the head made them;
backward computes the log-probabilities again and writes the gradient of the logits.

Exactness. ``_log_softmax``, its gradient and the gradient of ``nll_loss`` treat every row by itself. A chunk starts on
a multiple of ``ROWS`` rows, so that a row has the alignment in its chunk that it has in the whole, by which kernels may
choose how they add up. The losses of the rows are reduced by ``nll_loss`` itself, on one column per row. The products
of the head are not cut, so sums over rows stay as they are. Tried on CPUs; no GPU has run it yet.

[Note: memory of the logits] The gradient is written into the memory of the logits if nothing else can read them any
more: the storage is asked how many tensors hold it, and it must be only the one that is saved here. A backward that
keeps the graph needs the logits again, and other code's hooks on saved tensors may have kept them; then the gradient
gets memory of its own.

Left to Transformers is what ``_is_foreign`` says. A second derivative is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import nll_loss, pad
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from deepstow.strategies.core.applied import log_applied
from deepstow.strategies.core.plan import CHUNKS

if TYPE_CHECKING:
    from deepstow.strategies.core.plan import Plan

aten = torch.ops.aten
MOST = 32  # at most so many chunks, each of LEAST_BYTES in fp32 or more: fewer kernels to launch, and still in a cache
LEAST_BYTES = 2 << 20
NO_ROW = -100  # the label of a row without one, where rows have one word only
ROWS = 16  # a chunk has a multiple of so many rows
MEAN, SUM = 1, 2  # of torch's at::Reduction
OWN = "_loss_function"  # where Transformers' setter of ``loss_function`` keeps a loss


def chunks(rows: int, words: int) -> Iterator[slice]:
    """Slices of ``rows`` rows of ``words`` logits."""
    size = max(rows // MOST, LEAST_BYTES // (4 * max(1, words)), ROWS) // ROWS * ROWS
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _parts(logits: Tensor) -> Iterator[slice]:
    """The chunks; of fake logits, which are only counted, some: two chunks' tensors are alive at a time at most."""
    return islice(chunks(*logits.shape), 3 if isinstance(logits, FakeTensor) else None)


class _CrossEntropy(torch.autograd.Function):
    """``cross_entropy(logits.float(), target)`` of logits ``[rows, words]``, as mean or sum over the rows."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, reduction: int, ignored: int) -> Tensor:
        losses = losses_of_rows(logits, target, ignored)
        first = torch.where(target == ignored, NO_ROW, 0)  # not ``ignored``, which may be 0
        loss: Tensor
        loss, weight = aten.nll_loss_forward(losses.neg_().unsqueeze(1), first, None, reduction, NO_ROW)
        # Not the input itself, which others hold as well: see [Note: memory of the logits].
        ctx.save_for_backward(logits.detach(), target, weight)
        ctx.reduction = reduction
        ctx.ignored = ignored
        ctx.hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # without this the part that comes through the logits would be missing
            raise RuntimeError(
                "create_graph=True: a loss by chunks has no second derivative; "
                "write strategies.cross_entropy.chunked: false"
            )
        logits, target, weight = ctx.saved_tensors
        into = logits if is_free(ctx, logits) else torch.empty_like(logits)
        for rows in _parts(logits):
            logprobs = _log_probabilities(logits[rows])
            grads = aten.nll_loss_backward(grad, logprobs, target[rows], None, ctx.reduction, ctx.ignored, weight)
            into[rows] = aten._log_softmax_backward_data(grads, logprobs, 1, torch.float32)
        return into, None, None, None


def losses_of_rows(logits: Tensor, target: Tensor, ignored: int = -100) -> Tensor:
    """The cross-entropy of each row of ``logits`` [rows, words] in fp32, 0 where ``target`` [rows] is ``ignored``. Only
    a chunk of rows is ever cast to fp32.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    for rows in _parts(logits):
        losses[rows] = nll_loss(_log_probabilities(logits[rows]), target[rows], ignore_index=ignored, reduction="none")
    return losses


def _log_probabilities(logits: Tensor) -> Tensor:
    logprobs: Tensor = aten._log_softmax(logits.float(), 1, False)
    return logprobs


def is_free(ctx: Any, logits: Tensor) -> bool:
    """Whether nothing reads the memory of ``logits`` after this backward."""
    if ctx.hooked or torch._C._autograd._get_current_graph_task_keep_graph():
        return False
    alone = torch.empty(0, device=logits.device)
    return _holders(logits) == _holders(alone) and logits.is_contiguous()


def _holders(tensor: Tensor) -> int:
    """How many tensors, and Python's own objects, hold the memory of ``tensor``."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def targets(labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    """The word that each position predicts, [batch * length]: ``shift_labels``, or else the next of ``labels``."""
    if shift_labels is None:
        assert labels is not None
        shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return shift_labels.reshape(-1)


def per_item(total: Tensor, count: Tensor | int) -> Tensor:
    """``total`` over a number of items, which may lie on another device."""
    return total / (count.to(total.device) if isinstance(count, Tensor) else count)


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """The loss of a causal language model with the arguments and the bits of Transformers' ``ForCausalLMLoss``."""
    used_labels = labels if shift_labels is None else shift_labels
    assert used_labels is not None
    if _is_foreign(logits, used_labels):
        from transformers.loss.loss_utils import ForCausalLMLoss

        untyped: Any = ForCausalLMLoss  # a number of items may be an int, though it is not declared
        theirs: Tensor = untyped(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
        return theirs
    target = targets(labels, shift_labels, ignore_index).to(logits.device)
    reduction = MEAN if num_items_in_batch is None else SUM
    loss: Tensor = _CrossEntropy.apply(logits.reshape(-1, vocab_size), target, reduction, ignore_index)
    return loss if num_items_in_batch is None else per_item(loss, num_items_in_batch)


def _is_foreign(logits: Tensor, target: Tensor) -> bool:
    """Compiled code, transforms of ``torch.func``, tensor subclasses, targets that are no class indices."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or is_traceable_wrapper_subclass(logits)
        or target.dtype is not torch.int64
        or not logits.is_floating_point()
    )


def owners(model: nn.Module) -> list[nn.Module]:
    """The modules of ``model`` whose loss is Transformers' for causal language models, or the one of this file."""
    if "transformers" not in sys.modules or not is_same():
        return []
    from transformers import PreTrainedModel
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    def loss_of(module: nn.Module) -> object:
        by_kind = LOSS_MAPPING.get(str(getattr(module, "loss_type", None)), ForCausalLMLoss)
        return vars(module).get(OWN, by_kind)

    heads = (owner for owner in model.modules() if isinstance(owner, PreTrainedModel) and owner.base_model is not owner)
    return [owner for owner in heads if loss_of(owner) in (ForCausalLMLoss, causal_lm_loss)]


def set_by_plan(model: nn.Module, plan: Plan) -> None:
    """Let ``model`` compute its loss as ``plan`` says. Doing it again changes nothing. ValueError if the plan counts on
    chunks, and the model's loss is another one.
    """
    heads = [unit.name for unit in plan.facts.units if plan.keep(unit.name).policy == CHUNKS]
    if not heads:
        return
    modules: list[Any] = owners(model)
    if not modules:
        raise ValueError(
            "the plan counts on a loss by chunks, and this model has a loss of its own: "
            "plan with strategies.cross_entropy.chunked: false"
        )
    native = [module for module in modules if vars(module).get(OWN) is not causal_lm_loss]
    for module in native:
        module.loss_function = causal_lm_loss
    if native:
        log_applied("cross_entropy", ((head, "the loss by chunks of rows") for head in heads))


def set_native(model: nn.Module) -> None:
    """Undo ``set_by_plan``."""
    for module in model.modules():
        if vars(module).get(OWN) is causal_lm_loss:
            delattr(module, OWN)


@contextmanager
def counting(model: nn.Module) -> Iterator[list[int]]:
    """Inside, ``model`` computes its loss by chunks; yields the number of logits of every call."""
    calls: list[int] = []

    def loss(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(logits.numel())
        return causal_lm_loss(logits, *args, **kwargs)

    modules: list[Any] = owners(model)
    former_losses = [vars(module).get(OWN) for module in modules]
    for module in modules:
        module.loss_function = loss
    try:
        yield calls
    finally:
        for module, former_loss in zip(modules, former_losses, strict=True):
            delattr(module, OWN)
            if former_loss is not None:
                setattr(module, OWN, former_loss)


@cache
def is_same() -> bool:
    """Whether the loss of the installed Transformers is the one that is computed here, tried on a few numbers."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    def results(loss: Callable[..., Tensor], **options: Any) -> list[Tensor]:
        numbers = torch.arange(2 * 24 * 7, dtype=torch.float32, device="cpu").view(2, 24, 7)
        logits = (numbers * 1.7).sin().mul(5).bfloat16().requires_grad_()
        labels = (torch.arange(48, device="cpu").view(2, 24) * 5) % 7
        labels[0, :9] = -100
        value = loss(logits=logits, labels=labels, vocab_size=7, **options)
        value.backward()
        assert logits.grad is not None
        return [value.detach(), logits.grad]

    with _disable_current_modes(), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        return all(
            torch.equal(mine, theirs)
            for options in ({}, {"num_items_in_batch": torch.tensor(31, device="cpu")})
            for mine, theirs in zip(
                results(causal_lm_loss, **options), results(ForCausalLMLoss, **options), strict=True
            )
        )
