"""Run a part of a Hugging Face model with the model's own forward: what is elsewhere is replaced by stand-ins.

A stage needs all that a forward does around its blocks: masks, positions, rotary tables, the loss, different for each
architecture. So the model keeps its shape, and modules with weights that a stage does not have are replaced:

    a module in front of the blocks    gives zeros of the right shape, from which masks and positions are made
    a block in front of the stage's    gives back the hidden states that it is given; the last one those received
    a block or module behind           gives back what it is given

A part in front of the last one runs the model without its head (``base_model``), and its output are hidden states; the
last part runs all of it, loss included. A rank with two parts replaces the modules of the other one while it runs one.

Invariant. Names of parameters are the model's. Stand-ins have none. Backward and recomputation refer to blocks and not
to where they stood, so it does not matter what stands there meanwhile.

Refused: architectures whose blocks do not pass on one tensor of hidden states, or whose forward does something else
between blocks. Whether that is so is tried on a small copy (``form_of``), which must give the bits of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepstow.strategies.engine.forward.blocks import find_blocks


class Through(nn.Module):
    """Stands for a block or for a module behind the blocks: gives back its first argument."""

    def __init__(self, original: nn.Module, *, in_tuple: bool = False) -> None:
        super().__init__()
        self.in_tuple = in_tuple
        self.__dict__.update(  # a model may ask a block for the kind of its attention
            {key: value for key, value in vars(original).items() if not key.startswith("_") and key != "training"}
        )

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        return (hidden,) if self.in_tuple else hidden


class Received(Through):
    """Stands for the block in front of a part: gives the hidden states that have come from there."""

    hidden: Tensor | None = None

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        assert self.hidden is not None, "every part but the first is given hidden states"
        return super().forward(self.hidden)


class Zeros(nn.Module):
    """Stands for a module in front of the blocks: zeros of the shape that it would give."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        weight = next(original.parameters())
        self.size = weight.shape[-1 if isinstance(original, nn.Embedding) else 0]
        self.dtype = weight.dtype
        self.is_embedding = isinstance(original, nn.Embedding)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        shape = hidden.shape if self.is_embedding else hidden.shape[:-1]
        return torch.zeros(*shape, self.size, dtype=self.dtype, device=hidden.device)


@dataclass(frozen=True, slots=True)
class Form:
    """What an architecture's forward is like, found out on a small copy."""

    front: tuple[str, ...]  # paths of the modules with weights that it uses in front of the blocks
    outside: frozenset[str]  # paths of all modules with weights that are in no block
    in_tuple: bool  # blocks give hidden states as the first element of a tuple
    width: int  # of the hidden states
    dtype: torch.dtype


class Stage:
    """A model of which this rank keeps some parts; what is in none of ``mine`` is removed from it.

    ``parts`` are names of units, of blocks their paths; ``whole`` the model as it was, on the device ``meta``: names,
    shapes and ties, without values. Raise CannotCut if it has other modules around its blocks than ``form`` knows.
    ``fill`` is called before anything is removed, with the names of the parameters that stay.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[Sequence[str]],
        mine: Sequence[int],
        form: Form,
        fill: Callable[[set[str]], None] = lambda names: None,
    ) -> None:
        self.model = model
        self.form = form
        self.front = list(form.front)
        self.blocks = list(find_blocks(model))
        outside = _outside(model, self.blocks)
        if unlike := form.outside ^ set(outside):
            raise CannotCut(f"{min(unlike)} is not both in the model and in the small copy on which cutting was tried")
        self.back = [path for path in outside if path not in self.front]
        self.parts = [[name for name in part if name in self.blocks] for part in parts]
        self.mine = list(mine)
        gone = set.intersection(*(self._absent(part) for part in self.mine))
        fill({name for name, _ in model.named_parameters(remove_duplicate=False) if not _is_in(gone, name)})
        self.whole = without_values(model)
        self._swaps = {part: self._swaps_of(part, gone) for part in self.mine}
        for path in gone:
            replace(model, path, self._stand_in(path))

    def names(self) -> dict[str, nn.Parameter]:
        """The weights of this rank by their names in the whole model; a tied one by its first name."""
        whole = dict(self.whole.named_parameters(remove_duplicate=False))
        first = {id(param): name for name, param in reversed(whole.items())}
        return {first[id(whole[name])]: param for name, param in self.model.named_parameters()}

    def is_last(self, part: int) -> bool:
        return part == len(self.parts) - 1

    @contextmanager
    def only(self, part: int, hidden: Tensor | None) -> Iterator[None]:
        """Run the model inside as ``part`` alone, which is given the ``hidden`` states of the part before it."""
        swaps = self._swaps[part]
        received = [module for module in swaps.values() if isinstance(module, Received)]
        originals = {path: self.model.get_submodule(path) for path in swaps}
        for path, module in swaps.items():
            replace(self.model, path, module)
        for module in received:
            module.hidden = hidden
        try:
            yield
        finally:
            for path, module in originals.items():
                replace(self.model, path, module)
            for module in received:
                module.hidden = None

    def hidden_states(self, part: int, hidden: Tensor | None, inputs: Mapping[str, Any]) -> Tensor:
        """What ``part`` makes of ``hidden``, or the first one of the tokens; for all parts but the last."""
        model_inputs = {key: value for key, value in inputs.items() if key != "labels"}
        with self.only(part, hidden):
            base_model: Any = self.model.base_model
            output: Tensor = base_model(**model_inputs)[0]
        return output

    def parameters(self, part: int) -> Iterator[nn.Parameter]:
        absent = self._absent(part)
        for path in (*self.front, *self.blocks, *self.back):
            if path not in absent:
                yield from self.model.get_submodule(path).parameters(recurse=path in self.blocks)

    def _absent(self, part: int) -> set[str]:
        absent = set(self.blocks) - set(self.parts[part])
        absent |= set(self.front) if part > 0 else set()
        return absent | (set() if self.is_last(part) else set(self.back))

    def _swaps_of(self, part: int, gone: set[str]) -> dict[str, nn.Module]:
        """What stands in the model, by path, while ``part`` runs and no longer: in place of the rank's other parts."""
        swaps = {path: self._stand_in(path) for path in self._absent(part) - gone}
        if part > 0:
            block_before = self.blocks[self.blocks.index(self.parts[part][0]) - 1]
            swaps[block_before] = Received(self.model.get_submodule(block_before), in_tuple=self.form.in_tuple)
        return swaps

    def _stand_in(self, path: str) -> nn.Module:
        """A norm keeps the shape that it is given; an embedding or a projection in front has one of its own."""
        module = self.model.get_submodule(path)
        if path in self.front and isinstance(module, nn.Embedding | nn.Linear):
            return Zeros(module)
        return Through(module, in_tuple=path in self.blocks and self.form.in_tuple)


def _outside(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Paths of the modules that have weights themselves and are in no block."""
    with_weights = [path for path, module in model.named_modules() if [*module.parameters(recurse=False)]]
    return [path for path in with_weights if not _is_in(blocks, path)]


def _is_in(paths: Collection[str], name: str) -> bool:
    return f"{name}.".startswith(tuple(f"{path}." for path in paths))


def replace(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put ``module`` where ``path`` says."""
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module


def without_values(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose tensors have no memory. Tied weights are tied."""
    memo: dict[int, Any] = {}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return deepcopy(model, memo)


class CannotCut(ValueError):
    """The blocks of an architecture cannot run apart; one line says why."""


def form_of(model: nn.Module, inputs: Mapping[str, Tensor]) -> Form:
    """Try on a small copy that parts of one block each give the bits of the whole, in loss and gradients of one batch
    with labels. Raise CannotCut if they do not, or if the forward cannot run in parts.
    """
    model.eval()  # no dropout: the parts would draw other numbers
    blocks = list(find_blocks(model))
    called = list[str]()
    outs = list[Any]()
    outside = _outside(model, blocks)
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    handles = [
        model.get_submodule(path).register_forward_pre_hook(lambda *_, path=path: called.append(path))
        for path in (*outside, *blocks)
    ]
    handles += [model.get_submodule(path).register_forward_hook(lambda *each: outs.append(each[2])) for path in blocks]
    loss, grads = _run(model, inputs, params)
    for handle in handles:
        handle.remove()
    if [path for path in called if path in blocks] != blocks:
        raise CannotCut("its forward does not run each block once, in their order")
    front = tuple(path for path in outside if path in called[: called.index(blocks[0])])
    in_tuple = isinstance(outs[0], tuple)
    hidden = outs[0][0] if in_tuple else outs[0]
    if not isinstance(hidden, Tensor) or hidden.shape[:2] != inputs["input_ids"].shape:
        raise CannotCut("its blocks do not give one tensor of hidden states")
    form = Form(front, frozenset(outside), in_tuple, hidden.shape[-1], hidden.dtype)
    stage = Stage(model, [[block] for block in blocks], range(len(blocks)), form)
    try:
        hidden = None
        for part in range(len(blocks) - 1):
            hidden = stage.hidden_states(part, hidden, inputs)
        with stage.only(len(blocks) - 1, hidden):
            parted, others = _run(model, inputs, params)
    except Exception as error:  # a model's code can raise anything
        raise CannotCut(f"its forward cannot run in parts: {str(error).splitlines()[0]}") from None
    same = grads.keys() == others.keys() and all(torch.equal(grads[name], others[name]) for name in grads)
    if not same or not torch.equal(loss, parted):
        raise CannotCut("its blocks need more of what is in front of them than hidden states: results differ")
    return form


def _run(
    model: nn.Module, inputs: Mapping[str, Tensor], params: Mapping[str, nn.Parameter]
) -> tuple[Tensor, dict[str, Tensor]]:
    loss: Tensor = model(**inputs).loss
    grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    return loss.detach(), {name: grad for name, grad in zip(params, grads, strict=True) if grad is not None}
