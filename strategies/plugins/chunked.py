"""Tensor parallelism whose ranks sum the rows of one chunk while they compute the next.

Attention and MLP of a divided model end with a sum over the ranks, and begin with one in backward. Rows of a
micro-batch do not need each other, so each of these sub-layers takes them in chunks, and while a sum is on its way the
other chunks are computed, those of the next sub-layer included:

    compute    attention 1   attention 2   MLP 1         MLP 2         attention 1 ...
    sums                     attention 1   attention 2   MLP 1         MLP 2

Between two sub-layers (a ``Seam``) are the residual stream and a norm. ``_Meet`` begins the sum of a chunk; ``_Branch``
of the next sub-layer waits for it, adds it to the stream and takes the norm. In backward ``_Branch`` begins the sum of
the gradient, and ``_Meet`` waits for it and goes back through the norm. What autograd sees between the two has no
memory (``_edge``): values, and what is waited for, are in the ``Part`` that both have. Of the nodes that are ready
autograd runs the one that was made last, and ``_Meet`` is made before the next chunk is computed, so backward comes to
it after that chunk. In the same way the gradients of weights, which nobody waits for, are made after the sum of their
chunk's gradient has begun (``_Later``).

Invariant. Ranks of a copy begin the same sums in the same order, and streams and norms have whole sums, so what is not
divided stays equal on them to the last bit. Each row is summed as without chunks; but products of fewer rows may be
rounded otherwise, and gradients of weights are added up chunk by chunk. In backward there is one sum per sub-layer,
where AutoTP sums the gradient of each of its layers.

Blocks of ``autotp.IN_SLICES`` are x + attention(norm(x)), then x + MLP(norm(x)), which is what runs here in place of
their ``forward``. Without gradients (evaluation, generation) that one runs, and nothing is in chunks. Arguments of a
block that are neither per row nor the same for all end a run. Refused (``strategies/tensor.py``): what runs blocks
again or one by one, and chunks that do not divide the rows of a micro-batch; the last one of an epoch may be uneven.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.nn.functional import linear

from deepstow.strategies.engine.forward.blocks import find_blocks
from deepstow.strategies.parallel.autotp import Cut, cut_of
from deepstow.strategies.parallel.varlen import Documents

Span = tuple[int, int]  # of rows
SUBLAYERS = (("input_layernorm", "self_attn"), ("post_attention_layernorm", "mlp"))


def spans(rows: int, chunks: int) -> list[Span]:
    """``rows`` in even chunks; in fewer, if there are fewer rows."""
    cuts = [rows * number // chunks for number in range(chunks + 1)]
    return [(start, stop) for start, stop in pairwise(cuts) if start < stop]


def _edge(like: Tensor, rows: int) -> Tensor:
    """What autograd sees of rows that are not there yet."""
    return like.new_empty(()).expand(rows, *like.shape[1:])


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class Part:
    """The rows of one chunk behind its sub-layer: the stream, and its norm for the next sub-layer (``norm``).

    ``stream`` are the rows before the sub-layer, ``made`` what this rank adds to them of what all ranks of ``group``
    do; None: nothing is added.
    """

    def __init__(
        self, span: Span, stream: Tensor, made: Tensor | None, bias: Tensor | None, norm: nn.Module | None, group: Any
    ) -> None:
        self.span = span
        self.norm = norm
        self.stream = self.normed = stream.detach()
        self.sums: list[Any] = []  # of gradients, begun
        self._made = None if made is None else made.detach().contiguous()
        self._bias = None if bias is None else bias.detach()
        self._sum = None if made is None else all_reduce(self._made, group=group, async_op=True)
        self._waits = True

    @property
    def params(self) -> list[nn.Parameter]:
        return [] if self.norm is None else [param for param in self.norm.parameters() if param.requires_grad]

    def wait(self) -> None:
        """Until the rows are there."""
        if not self._waits:
            return
        self._waits = False
        if self._made is not None and self._sum is not None:
            self._sum.wait()
            product = self._made if self._bias is None else self._made.add_(self._bias)
            self.stream = product.add_(self.stream)
            self._made = self._sum = None
        if self.norm is not None:
            with torch.enable_grad():
                self.normed = self.norm(self.stream.requires_grad_())

    def back(self, of_stream: Tensor, of_normed: Sequence[Tensor]) -> list[Tensor]:
        """The gradient of the stream, and those of the norm's parameters."""
        for reduction in self.sums:
            reduction.wait()
        self.sums.clear()
        grads = torch.autograd.grad(self.normed, [self.stream, *self.params], _cat(of_normed))
        return [of_stream + grads[0], *grads[1:]]


@dataclass(slots=True)
class Seam:
    """All rows between two sub-layers, and autograd's edges: stream and norm of each piece, by its rows. A piece is
    in one chunk of the sub-layer before and in one of the sub-layer behind.
    """

    parts: list[Part] = field(default_factory=list)
    edges: dict[Span, tuple[Tensor, ...]] = field(default_factory=dict)

    def pieces(self, span: Span) -> list[Span]:
        return [piece for piece in self.edges if span[0] <= piece[0] < span[1]]

    def parts_of(self, span: Span) -> list[Part]:
        return [part for part in self.parts if part.span[0] < span[1] and span[0] < part.span[1]]

    def rows(self, span: Span, what: str) -> Tensor:
        """The ``stream`` or the ``normed`` rows, once they are there."""
        rows = []
        for part in self.parts_of(span):
            part.wait()
            first = part.span[0]
            rows.append(getattr(part, what).detach()[max(span[0] - first, 0) : span[1] - first])
        return _cat(rows)

    def add(
        self, part: Part, before: Mapping[Span, Tensor], made: Tensor | None, bias: Any, behind: Sequence[Span]
    ) -> None:
        """``before``: the stream's edges in front of the sub-layer; ``behind``: the chunks of the next one."""
        cuts = sorted({*part.span, *(start for start, _ in behind if part.span[0] < start < part.span[1])})
        pieces = list(pairwise(cuts))
        outputs = _Meet.apply(part, pieces, list(before), made, bias, *before.values(), *part.params)
        per_piece = len(outputs) // len(pieces)
        for number, piece in enumerate(pieces):
            self.edges[piece] = outputs[number * per_piece : (number + 1) * per_piece]
        self.parts.append(part)


class _Meet(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: Part, pieces: list[Span], before: list[Span], made: Any, bias: Any, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.part = part
        ctx.before = before
        ctx.has = (made is not None, bias is not None)
        edges = 1 if part.norm is None else 2
        return tuple(_edge(part.stream, stop - start) for start, stop in pieces for _ in range(edges))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        part: Part = ctx.part
        if part.norm is None:
            grad, of_params = _cat(grads), list[Tensor]()
        else:
            grad, *of_params = part.back(_cat(grads[::2]), grads[1::2])
        first = part.span[0]
        of_before = [grad[start - first : stop - first] for start, stop in ctx.before]
        of_bias = grad.flatten(0, -2).sum(0) if ctx.has[1] else None
        return None, None, None, grad if ctx.has[0] else None, of_bias, *of_before, *of_params


class _Branch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, seam: Seam, span: Span, group: Any, *edges: Tensor) -> Tensor:
        ctx.parts, ctx.pieces, ctx.first, ctx.group = seam.parts_of(span), seam.pieces(span), span[0], group
        return seam.rows(span, "normed")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad.contiguous()
        begun = all_reduce(grad, group=ctx.group, async_op=True)
        for part in ctx.parts:
            part.sums.append(begun)
        return None, None, None, *(grad[start - ctx.first : stop - ctx.first] for start, stop in ctx.pieces)


class _Join(torch.autograd.Function):
    """All rows behind the last sub-layer."""

    @staticmethod
    def forward(ctx: Any, seam: Seam, *edges: Tensor) -> Tensor:
        ctx.spans = list(seam.edges)
        return seam.rows((0, seam.parts[-1].span[1]), "stream")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(grad[start:stop] for start, stop in ctx.spans)


class _Later(torch.autograd.Function):
    """A weight whose gradient is made, of what its product has left in ``held``, when backward comes here."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, held: list[tuple[Tensor, Tensor]]) -> Tensor:
        ctx.held = held
        return _edge(weight, len(weight))

    @staticmethod
    def backward(ctx: Any, unused: Tensor) -> tuple[Tensor, None]:
        grad, inputs = ctx.held.pop()
        return grad.flatten(0, -2).t() @ inputs.flatten(0, -2), None


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, later: Tensor, weight: Tensor, bias: Any, held: list[Any]) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.held = held
        output: Tensor = linear(inputs, weight, bias)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.held.append((grad, inputs))
        of_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
        return grad @ weight, _edge(weight, len(weight)), None, of_bias, None


class Layer:
    """Replaces the ``forward`` of a divided layer while a sub-layer of chunks runs; otherwise it is the layer's. It
    sums nothing, and leaves the bias of rows to what does.
    """

    def __init__(self, layer: Any, cut: Cut) -> None:
        self.forward = layer.forward
        self.bias = layer.bias if cut is Cut.ROWS else None
        self._layer = layer
        self._cut = cut
        self._later: tuple[Tensor, list[Any]] | None = None
        self.runs = False

    def begin(self) -> None:
        """A chunk, before anything of it is computed."""
        self.runs = True
        if self._cut is Cut.COLUMNS:
            held: list[Any] = []
            self._later = _Later.apply(self._layer.weight, held), held

    def end(self) -> None:
        self.runs = False
        self._later = None

    def __call__(self, inputs: Tensor) -> Tensor:
        if not self.runs:
            return self.forward(inputs)  # type: ignore[no-any-return]
        if self._later is None:
            return linear(inputs, self._layer.weight)
        later, held = self._later
        output: Tensor = _Columns.apply(inputs, later, self._layer.weight.detach(), self._layer.bias, held)
        return output


class Sublayer:
    """Attention or MLP with the norm in front of it. It takes rows in ``chunks``."""

    def __init__(self, norm: nn.Module, module: nn.Module, chunks: int, group: Any) -> None:
        self.norm = norm
        self.chunks = chunks
        self._module = module
        self._group = group
        self._layers: list[Layer] = []
        for name, layer in module.named_children():
            if (cut := cut_of(f".{name}", tied=True)) is not None:
                layer.forward = Layer(layer, cut)
                self._layers.append(layer.forward)

    def first(self, hidden: Tensor) -> Seam:
        """What is in front of the first sub-layer."""
        seam, parts = Seam(), spans(len(hidden), self.chunks)
        for span, rows in zip(parts, hidden.split([stop - start for start, stop in parts]), strict=True):
            part = Part(span, rows, None, None, self.norm, self._group)
            seam.add(part, {span: rows}, None, None, [span])
        return seam

    def run(self, seam: Seam, rows: int, behind: Sublayer | None, given: Mapping[str, Any]) -> Seam:
        next_seam, norm = Seam(), None if behind is None else behind.norm
        spans_behind = [] if behind is None else spans(rows, behind.chunks)
        bias = next((layer.bias for layer in self._layers if layer.bias is not None), None)
        for span in spans(rows, self.chunks):
            pieces = seam.pieces(span)
            for layer in self._layers:
                layer.begin()
            try:
                inputs = _Branch.apply(seam, span, self._group, *(seam.edges[piece][1] for piece in pieces))
                arguments = {name: _own(name, value, span, rows) for name, value in given.items()}
                output = self._module(inputs, **arguments)
            finally:
                for layer in self._layers:
                    layer.end()
            output = output[0] if isinstance(output, tuple) else output
            part = Part(span, seam.rows(span, "stream"), output, bias, norm, self._group)
            next_seam.add(part, {piece: seam.edges[piece][0] for piece in pieces}, output, bias, spans_behind)
        return next_seam


def _own(name: str, value: Any, span: Span, rows: int) -> Any:
    """Of an argument that all rows have, what is of those in ``span``."""
    if span == (0, rows) or value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Documents):
        return value.of_rows(*span)
    if isinstance(value, tuple):
        return tuple(_own(name, item, span, rows) for item in value)
    if not isinstance(value, Tensor) or (value.dim() and len(value) not in (1, rows)):
        raise RuntimeError(f"attention was given {name}, which is not per row; leave strategies.tensor.chunks out")
    return value[slice(*span)] if value.dim() and len(value) == rows else value


@dataclass(slots=True)
class Rows:
    """All rows of a micro-batch between two blocks, of which some may be on their way."""

    seam: Seam
    count: int


class Block:
    """Replaces the ``forward`` of a block; ``behind`` is the first sub-layer of the next one."""

    def __init__(self, block: nn.Module, attention: Sublayer, mlp: Sublayer, behind: Sublayer | None) -> None:
        self.forward = block.forward
        self._attention = attention
        self._mlp = mlp
        self._behind = behind

    def __call__(self, hidden: Tensor | Rows, **given: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(hidden, **given)
        if (cache := given.pop("past_key_values", None)) is not None and cache.get_seq_length():
            raise RuntimeError("rows with keys and values of earlier tokens cannot train with strategies.tensor.chunks")
        rows = hidden if isinstance(hidden, Rows) else Rows(self._attention.first(hidden), len(hidden))
        seam = self._attention.run(rows.seam, rows.count, self._mlp, {**given, "past_key_values": None})
        seam = self._mlp.run(seam, rows.count, self._behind, {})
        if self._behind is not None:
            return Rows(seam, rows.count)
        return _Join.apply(seam, *(edge for (edge,) in seam.edges.values()))


def agreed(chunks: int, group: Any) -> int:
    """The number of the first rank of ``group``: what is measured, and so what is chosen, may differ between them."""
    chosen = [chunks]
    torch.distributed.broadcast_object_list(chosen, group=group, group_src=0)
    return chosen[0]


def start(model: nn.Module, chunks: Sequence[int], group: Any) -> None:
    """Let the blocks of ``model``, whose layers are divided over ``group``, take rows in chunks, as many for each
    sub-layer, attention and MLP in turn.
    """
    blocks = list(find_blocks(model).values())
    many = iter(chunks)
    sublayers = [
        Sublayer(block.get_submodule(norm), block.get_submodule(module), next(many), group)
        for block in blocks
        for norm, module in SUBLAYERS
    ]
    for number, block in enumerate(blocks):
        attention, mlp, *following = sublayers[2 * number : 2 * number + 3]
        block.forward = Block(block, attention, mlp, following[0] if following else None)  # type: ignore[assignment]
