"""Tensor parallelism whose ranks sum fewer tokens, in fewer bits. Lossy: no step equals that of plain training.

Attention and MLP of a divided model end with a sum over the ranks. Here each rank has scores of its tokens, the squared
norms of the rows of its partial sum; they are added in the order of ranks, and of every row of a micro-batch the best
``tokens`` of all tokens are summed, of equal ones the first. The rows of the others are zero, so these tokens keep
their residual stream as it is. (Attention's probabilities would do as scores, but fused attention has none.) Padding
counts as tokens. What is chosen depends on later tokens of a row, too, so losses with an exchange may be too low.

Numbers in 8 or 4 bits cannot be added on their way, so each rank owns a part of them: all send it theirs, it adds them
in fp32 in the order of ranks, and sends the sums to all, in as many bits (``codec_rows.py``).

    forward     after attention and after the MLP: scores gathered, chosen rows exchanged
    backward    the gradient of attention's input summed, and of the MLP's input the chosen rows, since all others are
                zero on all ranks; nothing is coded. (AutoTP sums once for each layer divided by columns.)

Invariant. All ranks choose the same tokens and decode the same bytes, so what is not divided stays equal on them to the
last bit. What is chosen follows from the values of a step alone: there is no state. Without gradients (evaluation,
generation) sums are whole and exact, unless somebody is ``evaluating`` with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from deepstow.strategies.parallel.autotp import Cut, cut_of
from deepstow.strategies.plugins.codec_rows import BLOCK, Codec

ATTENTION, MLP = "self_attn", "mlp"


def chosen(scores: Tensor, tokens: float) -> Tensor:
    """The places of the best ``tokens`` of all, of each row and in order; of equal ones the first."""
    many = ceil(round(tokens * scores.shape[-1], 6))
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :many].sort(dim=-1).values


@dataclass(slots=True)
class Exchange:
    """``codec``: None sends numbers as they are."""

    tokens: float
    codec: Codec | None
    group: Any
    evaluates: bool = False  # in evaluations, too

    @property
    def runs(self) -> bool:
        return self.evaluates or torch.is_grad_enabled()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within it evaluations exchange what training does."""
        self.evaluates = True
        try:
            yield
        finally:
            self.evaluates = False

    def choose(self, partial: Tensor) -> Tensor | None:
        """The tokens that are summed; None: all. A collective."""
        if self.tokens == 1:
            return None
        mine = partial.float().square().sum(-1)
        every = mine.new_empty(self.group.size(), *mine.shape)
        dist.all_gather_into_tensor(every.flatten(0, 1), mine, group=self.group)
        total = torch.zeros_like(mine)
        for scores in every:  # one rank's after the other
            total += scores
        return chosen(total, self.tokens)

    def summed(self, partial: Tensor) -> Tensor:
        """The sum over the ranks; a collective."""
        if self.codec is None:
            reduced = partial.contiguous().clone()
            dist.all_reduce(reduced, group=self.group)
            return reduced
        ranks = self.group.size()
        flat = pad(partial.flatten().float(), (0, -partial.numel() % (ranks * BLOCK)))
        mine = self.codec.encoded(flat.view(ranks, -1, BLOCK))
        received = torch.empty_like(mine)
        dist.all_to_all_single(received, mine, group=self.group)
        total = torch.zeros_like(flat[: len(flat) // ranks]).view(1, -1, BLOCK)
        for coded in received:  # one rank's after the other
            total += self.codec.decoded(coded[None])
        every = torch.empty_like(mine)
        dist.all_gather_into_tensor(every, self.codec.encoded(total), group=self.group)
        return self.codec.decoded(every).flatten()[: partial.numel()].view_as(partial).to(partial.dtype)


def of_tokens(whole: Tensor, kept: Tensor) -> Tensor:
    """The rows of the tokens ``kept``."""
    return whole.gather(-2, kept[..., None].expand(*kept.shape, whole.shape[-1]))


def among_zeros(rows: Tensor, kept: Tensor, like: Tensor) -> Tensor:
    """Those rows in their places, and zeros in all others of ``like``."""
    return like.new_zeros(like.shape).scatter(-2, kept[..., None].expand_as(rows), rows)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, sublayer: Sublayer, call: list[Tensor]) -> Tensor:
        ctx.group = sublayer.exchange.group
        ctx.call = call
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        kept = ctx.call[0] if ctx.call else None
        rows = grad.contiguous().clone() if kept is None else of_tokens(grad, kept)
        dist.all_reduce(rows, group=ctx.group)
        return rows if kept is None else among_zeros(rows, kept, grad), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, sublayer: Sublayer, call: list[Tensor]) -> Tensor:
        exchange = sublayer.exchange
        ctx.kept = kept = exchange.choose(partial)
        if kept is None:
            return exchange.summed(partial)
        if sublayer.by_token:
            call.append(kept)
        return among_zeros(exchange.summed(of_tokens(partial, kept)), kept, partial)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad if ctx.kept is None else among_zeros(of_tokens(grad, ctx.kept), ctx.kept, grad), None, None


class Sublayer:
    """Attention or MLP; ``by_token``: no token needs another, and while it runs ``call`` gets the chosen ones."""

    def __init__(self, module: nn.Module, exchange: Exchange, *, by_token: bool) -> None:
        self.exchange = exchange
        self.by_token = by_token
        self.call: list[Tensor] | None = None
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.exchange.runs:
            return None
        self.call = []
        if args:
            return (_Enter.apply(args[0], self, self.call), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": _Enter.apply(kwargs["hidden_states"], self, self.call)}

    def _leave(self, *_: object) -> None:
        self.call = None


class Layer:
    """Replaces the ``forward`` of a divided layer while its sub-layer exchanges; otherwise it is the layer's."""

    def __init__(self, layer: Any, cut: Cut, sublayer: Sublayer) -> None:
        self.forward: Callable[[Tensor], Tensor] = layer.forward
        self._layer = layer
        self._cut = cut
        self._sublayer = sublayer

    def __call__(self, inputs: Tensor) -> Tensor:
        layer, call = self._layer, self._sublayer.call
        if call is None:
            return self.forward(inputs)
        if self._cut is Cut.COLUMNS:
            return linear(inputs, layer.weight, layer.bias)
        output: Tensor = _Sum.apply(linear(inputs, layer.weight), self._sublayer, call)
        return output if layer.bias is None else output + layer.bias


def start(model: nn.Module, exchange: Exchange) -> None:
    """Let the sub-layers of ``model``, whose layers are divided, sum by ``exchange``."""
    for path, module in list(model.named_modules()):
        kind = path.rpartition(".")[2]
        if kind in (ATTENTION, MLP):
            sublayer = Sublayer(module, exchange, by_token=kind == MLP)
            for name, layer in module.named_children():
                if (cut := cut_of(f".{name}", tied=True)) is not None:
                    layer.forward = Layer(layer, cut, sublayer)


def exchange_of(model: nn.Module) -> Exchange | None:
    """Of a model that was started."""
    layers = (getattr(module, "forward", None) for module in model.modules())
    return next((layer._sublayer.exchange for layer in layers if isinstance(layer, Layer)), None)
