"""The state of a torch optimizer as spans of named parameters, whatever tensors it updates.

Plain training updates the model's own parameters. DeepSpeed gives the optimizer fp32 copies of them, or flat tensors
with pieces of many parameters. ``Held`` says which pieces of which parameters are in one such tensor; state of the same
shape is divided in the same way.

Invariant. State is filled in with the dtype, the strides and the device that torch would have given it. Refused: what
such a tensor cannot hold (``_unlike``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepstow.strategies.state.blocks import Columns, ranges
from deepstow.strategies.state.saved_state import MASTER, Described, Saved, Weights, other_model
from deepstow.strategies.state.spans import WEIGHT, Span

RECOMPUTED = frozenset(["RMS"])  # Adafactor computes it anew in every step before it reads it


@dataclass(frozen=True, slots=True)
class Piece:
    """``count`` elements of a parameter from element ``start`` on; in the tensor that holds it from ``offset`` on."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    start: int
    offset: int
    count: int
    columns: Columns | None = None  # elements are counted in these columns alone
    written: bool = True  # this rank writes them


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that the optimizer updates. ``dtype``: of the weights; ``copied``: it is an fp32 copy of them."""

    tensor: Tensor
    pieces: tuple[Piece, ...]
    dtype: str
    copied: bool = False

    @property
    def is_parameter(self) -> bool:
        return len(self.pieces) == 1 and tuple(self.tensor.shape) == self.pieces[0].shape

    def part(self, tensor: Tensor, piece: Piece) -> Tensor:
        """The elements of ``piece`` in ``tensor``, which is divided as this one is."""
        if self.is_parameter or piece.count == tensor.numel():
            return tensor
        return tensor.detach().view(-1)[piece.offset : piece.offset + piece.count]


class TorchState:
    """A ``Holder`` for an optimizer of torch's kind."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        held: Sequence[Held],  # what it updates on this rank
        groups: Sequence[Sequence[str]],  # names of the parameters in each of its groups, the same on all ranks
        shapes: Mapping[str, tuple[int, ...]],  # of the trained parameters, the same on all ranks
        weights: Sequence[Held],  # the model's on this rank, also those that are not trained
        *,
        divides_weights: bool = False,  # each rank has a part of the weights
    ) -> None:
        self._optimizer = optimizer
        self._held = held
        self._groups = groups
        self._shapes = shapes
        self._weights = weights
        self.divides_weights = divides_weights
        self.rule = type(optimizer).__name__
        self._is_torchs = type(optimizer).__module__.startswith("torch.")  # they keep state in the dtype of the weight

    def groups(self) -> list[dict[str, Any]]:
        named = zip(self._optimizer.param_groups, self._groups, strict=True)
        return [{**group, "params": list(names)} for group, names in named]

    def entries(self) -> Iterator[tuple[str, Described, list[Span]]]:
        for held in self._held:
            mine = [piece for piece in held.pieces if piece.written]
            tensors, numbers = self._state_of(held) if mine else ({}, {})
            for piece in mine:
                shapes = {kind: tuple(it.shape) if held.is_parameter else piece.shape for kind, it in tensors.items()}
                parts = ((kind, held.part(tensor, piece)) for kind, tensor in tensors.items())
                piece_spans = [span for kind, part in parts for span in spans_of(kind, shapes[kind], piece, part)]
                yield piece.name, Described(piece.shape, held.dtype, numbers, shapes), piece_spans

    def weight_spans(self, names: set[str]) -> Iterator[Span]:
        for held in self._weights:
            for piece in held.pieces:
                if piece.written and piece.name in names:
                    yield from spans_of(WEIGHT, piece.shape, piece, held.part(held.tensor, piece))

    def _state_of(self, held: Held) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Tensors and numbers of what is held; a master is one of the tensors."""
        tensors: dict[str, Tensor] = {MASTER: held.tensor} if held.copied and held.dtype != "float32" else {}
        numbers: dict[str, float] = {}
        for key, value in self._optimizer.state.get(held.tensor, {}).items():
            if isinstance(value, Tensor) and (value.dim() > 0 or (held.tensor.dim() == 0 and key != "step")):
                if not held.is_parameter and value.shape != held.tensor.shape:
                    names = f"{held.pieces[0].name} to {held.pieces[-1].name}"
                    raise ValueError(f"{names}: {key} of {self.rule} has a shape of its own and cannot be divided")
                tensors[key] = value
            elif value is not None and key not in RECOMPUTED:
                numbers[key] = value.item() if isinstance(value, Tensor) else value
        return tensors, numbers

    # --- loading -----------------------------------------------------------------------------------------------------

    def misfits(self, saved: Saved) -> Iterator[str]:
        complaints = list(other_model(saved, self._shapes, self.rule))
        yield from complaints
        for held in self._held if not complaints else ():
            first = held.pieces[0]
            for piece in held.pieces:
                yield from _unlike(saved, held, first.name, piece.name)
            for kind in saved.parameters[first.name].tensors if self._is_torchs else ():
                dtype = saved.store.dtype(first.name, kind)
                if kind not in (MASTER, WEIGHT) and torch.promote_types(dtype, held.tensor.dtype) != held.tensor.dtype:
                    yield f"{first.name}: {kind} was saved in {dtype}, and here it would be {held.tensor.dtype}"

    def fill(self, saved: Saved) -> None:
        for held in self._held:
            described = saved.parameters[held.pieces[0].name]
            state: dict[str, Any] = {}
            for key, number in described.numbers.items():
                state[key] = self._number(held.tensor, number)
            for kind, shape in described.tensors.items():
                if kind not in (MASTER, WEIGHT):
                    state[kind] = self._filled(saved, held, kind, shape)
            if state:
                self._optimizer.state[held.tensor] = state
            else:
                self._optimizer.state.pop(held.tensor, None)

    def _number(self, tensor: Tensor, number: float) -> Any:
        """As torch's optimizers keep it: floats in a tensor, which fused kernels read on the device. Others count in
        plain numbers.
        """
        if isinstance(number, int) or not self._is_torchs:
            return int(number)
        group = self._optimizer.defaults
        device = tensor.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
        return torch.tensor(number, dtype=torch.get_default_dtype(), device=device)

    def _filled(self, saved: Saved, held: Held, kind: str, shape: tuple[int, ...]) -> Tensor:
        first = held.pieces[0].name
        dtype = held.tensor.dtype if self._is_torchs else saved.store.dtype(first, kind)
        if held.is_parameter and shape != tuple(held.tensor.shape):
            filled = torch.empty(shape, dtype=dtype, device=held.tensor.device)
        else:
            filled = torch.zeros_like(held.tensor, dtype=dtype, memory_format=torch.preserve_format).detach()
        for piece in held.pieces:
            saved.store.read(piece.name, kind, piece.start, held.part(filled, piece), columns=piece.columns)
        return filled

    def fill_weights(self, weights: Weights) -> None:
        copies = [held for held in self._held if held.copied]
        for held in (*self._weights, *copies):
            for piece in held.pieces:
                if held.copied or weights.find(piece.name) is not None:
                    weights.read(piece.name, piece.start, held.part(held.tensor.detach(), piece), piece.columns)


def spans_of(kind: str, shape: tuple[int, ...], what: Piece, tensor: Tensor) -> Iterator[Span]:
    """``tensor``, which holds ``what``, as spans; of some columns whole rows and parts of one row."""
    if what.columns is None:
        yield Span(what.name, kind, shape, what.start, tensor)
        return
    flat = tensor.detach().reshape(-1)
    for start, count in ranges(what.columns, what.start, flat.numel()):
        rows = flat[start - what.start : start - what.start + count]
        yield Span(what.name, kind, shape, start, rows, what.columns)


def _unlike(saved: Saved, held: Held, first: str, name: str) -> Iterator[str]:
    """Why the state of ``name`` cannot be kept in one tensor with that of ``first``, one line each: torch keeps one
    count of steps for each tensor, and Adafactor's rows and columns belong to one parameter.
    """
    one, other = saved.parameters[first], saved.parameters[name]
    if one.numbers != other.numbers:
        yield (
            f"{name}: saved after {other.numbers.get('step', 0):g} updates and {first} after "
            f"{one.numbers.get('step', 0):g}; ZeRO counts them together: train on with the strategy that saved it"
        )
    for kind, shape in other.tensors.items():
        if kind not in (MASTER, WEIGHT) and not held.is_parameter and shape != other.shape:
            yield (
                f"{name}: {kind} was saved with {math.prod(shape)} elements, and ZeRO needs one for each of the "
                f"weight's {math.prod(other.shape)}: train on with the strategy that saved it"
            )
    if {*one.tensors} - {MASTER, WEIGHT} != {*other.tensors} - {MASTER, WEIGHT} and one.numbers == other.numbers:
        yield f"{name}: saved with other kinds of state than {first}: train on with the strategy that saved it"


def whole(param: Tensor, name: str, *, written: bool) -> Held:
    """A parameter that is whole on this rank."""
    piece = Piece(name, tuple(param.shape), 0, 0, param.numel(), written=written)
    return Held(param, (piece,), str(param.dtype).removeprefix("torch."))


def plain_state(optimizer: torch.optim.Optimizer, model: nn.Module, *, writes: bool) -> TorchState:
    """The ``Holder`` of plain training, in which the optimizer updates the model's own parameters."""
    names = {id(param): name for name, param in model.named_parameters()}
    groups = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    weights = {name: whole(param, name, written=writes) for name, param in model.named_parameters()}
    held = [weights[name] for group in groups for name in group]
    shapes = {piece.name: piece.shape for holding in held for piece in holding.pieces}
    return TorchState(optimizer, held, groups, shapes, list(weights.values()))
