"""Megatron's sequence parallelism: between divided layers each tensor rank has a slice of the tokens.

Norms and residuals are computed per token, so ranks that compute attention and MLP together need not all compute and
save them of every token. Before attention and before the MLP the slices are gathered; in place of summing their outputs
over the ranks, each rank is sent the sum of its slice, which is as many bytes. Hooks do it over the layers that AutoTP
has divided:

    embedding   whole, then this rank's slice        backward: gathered, so that its gradient is whole on each rank
    columns     slices gathered once per module      backward: gradients summed, each rank keeps its slice
    rows        products summed, a slice is kept     backward: gathered
    last norm   slices gathered, for the head        backward: this rank's slice

Attention has all tokens of its rows, so masks, positions and packed documents are as ever. Tokens of all rows of a
micro-batch are divided together, as [tokens / ranks, width]: two dimensions are how a layer knows a slice. Saved for
backward is the slice; it is gathered once more there, for the gradients of weights.

Invariant. Weights that meet slices (norms, biases of layers divided by rows) have the gradient of a slice, which is
summed over the ranks as soon as it is made (``autotp.partition``), so they stay equal on all ranks to the last bit.
Zeros that fill up the last slice get no gradient. Without gradients (evaluation, generation) nothing would be saved,
and ranks compute all tokens as without slices. Rows of fewer tokens than ranks end a run.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from deepstow.strategies.engine.forward.blocks import find_blocks
from deepstow.strategies.engine.forward.token_slices import filled, gather, scatter_sum, scattered_product
from deepstow.strategies.parallel.autotp import Cut, cut_of

GATHERED = ("self_attn", "mlp")  # modules that begin with divided columns and end with divided rows


class Tokens:
    """The slices of rank ``place`` of ``ranks``, which are the process group named ``group``."""

    def __init__(self, ranks: int, place: int, group: str) -> None:
        self.ranks = ranks
        self.place = place
        self.group = group
        self.shape = (0, 0)  # of the rows that are between the first block and the last norm
        self.inside = False  # a module whose tokens were gathered runs
        self.part = self.whole = torch.empty(0)  # its input: this rank's slice, and of all ranks
        self.again = Again(self)

    def gather(self, part: Tensor) -> Tensor:
        return gather(part, self.ranks, self.group)

    def scatter_sum(self, whole: Tensor) -> Tensor:
        return scatter_sum(whole.flatten(0, -2), self.ranks, self.group)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's slice of what all ranks have alike, in memory of its own."""
        tokens = filled(whole.flatten(0, -2), self.ranks)
        return tokens.chunk(self.ranks)[self.place].clone()

    # --- hooks -------------------------------------------------------------------------------------------------------

    def divide(self, block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Before the first block: give it a slice of the hidden states."""
        hidden = args[0]
        if not torch.is_grad_enabled():
            return None
        if hidden.shape[1] < self.ranks:  # from slices of such rows nobody could tell how many they are
            why = f"the longest row of a micro-batch has {hidden.shape[1]} tokens, fewer than strategies.tensor.degree"
            raise RuntimeError(f"{why}, over which strategies.tensor.sequence_parallel divides them; leave it out")
        self.shape = hidden.shape[:2]
        return _Divide.apply(hidden, self), *args[1:]

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before attention or MLP: gather its tokens. A replay may be of rows of another length than the last ones, so
        attention's are those of the positions that it is given.
        """
        part = args[0] if args else kwargs["hidden_states"]
        self.inside = part.dim() == 2
        if not self.inside:
            return None
        self.part, self.again = part.detach(), Again(self)
        whole = _Gather.apply(part, self)
        if "position_embeddings" in kwargs:
            length = kwargs["position_embeddings"][0].shape[-2]
            rows = len(whole) // length
            whole = whole[: rows * length].unflatten(0, (rows, length))
        self.whole = whole
        return ((whole, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": whole})

    def leave(self, module: nn.Module, args: object, output: object) -> None:
        self.inside = False
        self.part = self.whole = torch.empty(0)

    def unite(self, norm: nn.Module, args: object, output: Tensor) -> Tensor | None:
        """After the last norm: gather the hidden states for the head."""
        return _Unite.apply(output, self) if output.dim() == 2 else None


class Again:
    """The tokens of a slice, gathered in backward once for all products that they went into."""

    def __init__(self, tokens: Tokens) -> None:
        self.products = 0  # whose weights have gradients
        self._tokens = tokens
        self._left = 0
        self._whole: Tensor | None = None

    def gathered(self, part: Tensor) -> Tensor:
        if self._whole is None:
            self._whole = self._tokens.gather(part)
            self._left = self.products
        whole, self._left = self._whole, self._left - 1
        if self._left == 0:
            self._whole = None
        return whole


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, tokens: Tokens) -> Tensor:
        ctx.tokens = tokens
        ctx.shape = whole.shape
        return tokens.own(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows, length, width = ctx.shape
        return ctx.tokens.gather(grad)[: rows * length].view(rows, length, width), None


class _Unite(torch.autograd.Function):
    """Of a head that is whole, or sums the gradients of its parts itself: each rank has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, tokens: Tokens) -> Tensor:
        ctx.tokens, (rows, length) = tokens, tokens.shape
        return tokens.gather(part)[: rows * length].view(rows, length, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.tokens.own(grad), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, tokens: Tokens) -> Tensor:
        ctx.tokens = tokens
        return tokens.gather(part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.tokens.scatter_sum(grad), None


class _Columns(torch.autograd.Function):
    """The product of gathered tokens with this rank's columns; the slice is saved in place of the tokens."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, part: Tensor, weight: Tensor, bias: Tensor | None, again: Again) -> Tensor:
        ctx.save_for_backward(part, weight)
        ctx.again = again
        again.products += weight.requires_grad
        output: Tensor = linear(whole, weight, bias)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        part, weight = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        of_weight = None
        of_bias = None
        if ctx.needs_input_grad[2]:
            of_weight = flat.t() @ ctx.again.gathered(part)[: len(flat)]
        if ctx.needs_input_grad[3]:
            of_bias = flat.sum(0)
        return grad @ weight, None, of_weight, of_bias, None


class _Rows(torch.autograd.Function):
    """The derivative of products with all ranks' rows. What ``forward`` returns has the shape of this rank's slice of
    their sum and no memory: torch saves tensors after a forward, and a block that runs again ends with the last tensor
    saved, so the product, which is made after it (``_Sum``), need not be made again where it is the block's last.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, tokens: Tokens) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.tokens = tokens
        count = inputs.shape[:-1].numel()
        return weight.new_empty(()).expand(-(-count // tokens.ranks), len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        flat = inputs.flatten(0, -2)
        whole = ctx.tokens.gather(grad)[: len(flat)]
        of_weight = whole.t() @ flat if ctx.needs_input_grad[1] else None
        return (whole @ weight).view_as(inputs), of_weight, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shaped: Tensor, inputs: Tensor, weight: Tensor, tokens: Tokens) -> Tensor:
        output: Tensor = scattered_product(inputs.flatten(0, -2), weight, tokens.ranks, tokens.group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None


class Scattered:
    """Replaces the ``forward`` of a divided layer while tokens are gathered around it; otherwise it is the layer's."""

    def __init__(self, layer: Any, cut: Cut, tokens: Tokens) -> None:
        self.forward = layer.forward
        self._layer = layer
        self._cut = cut
        self._tokens = tokens

    def __call__(self, inputs: Tensor) -> Tensor:
        layer, tokens = self._layer, self._tokens
        bias: Tensor | None = layer.bias
        if not tokens.inside:
            return self.forward(inputs)  # type: ignore[no-any-return]
        if self._cut is Cut.COLUMNS:
            if inputs is not tokens.whole:  # its gradient would be summed twice, or never
                raise RuntimeError("a layer divided by columns was given other tokens than its module")
            output: Tensor = _Columns.apply(inputs, tokens.part, layer.weight, bias, tokens.again)
            return output
        shaped = _Rows.apply(inputs, layer.weight, tokens)
        output = _Sum.apply(shaped, inputs.detach(), layer.weight.detach(), tokens)
        return output if bias is None else output + bias


def start(model: Any, tokens: Tokens) -> None:
    """Let the blocks of ``model``, whose layers are divided, compute and save slices of the tokens."""
    next(iter(find_blocks(model).values())).register_forward_pre_hook(tokens.divide)
    model.base_model.norm.register_forward_hook(tokens.unite)
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] in GATHERED:
            module.register_forward_pre_hook(tokens.enter, with_kwargs=True)
            module.register_forward_hook(tokens.leave, always_call=True)
        elif (cut := cut_of(name, tied=True)) is not None:
            module.forward = Scattered(module, cut, tokens)
