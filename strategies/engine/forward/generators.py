"""Torch's generators that a forward draws from: their states, and how to move a state as far as a forward does.

A state is moved without running anything: by arithmetic where a generator counts what it has given (CUDA's), and by
drawing as many words where it is a Mersenne Twister (the CPU's), which takes about a nanosecond each.
"""

from __future__ import annotations

import torch
from torch import Tensor

TWISTER = 5056  # bytes of a state: seed, how many words are left of 624, whether it is seeded, place, words, normals
COUNTING = 16  # seed and offset
WORDS, NORMALS = 624, 5016
MOST = 1 << 28  # words that a forward may draw on the CPU, where each is looked for
AT_ONCE = 1 << 20

States = tuple[Tensor, ...]  # the CPU's, and the device's


class Generators:
    """The default generators of the CPU and of ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def states(self) -> States:
        """Copies of them."""
        cpu = torch.get_rng_state()
        if self._device.type == "cpu":
            return (cpu,)
        return cpu, torch.get_device_module(self._device).get_rng_state(self._device)

    def give(self, states: States) -> None:
        """Go on from ``states``."""
        torch.set_rng_state(states[0])
        if self._device.type != "cpu":
            torch.get_device_module(self._device).set_rng_state(states[1], self._device)


def same(some: States, others: States) -> bool:
    """Whether they give the same numbers."""
    return all(map(torch.equal, some, others))


def moves(before: States, after: States) -> tuple[int, ...] | None:
    """By how much each was moved. None: not so many draws, or one is not of a generator that is known."""
    amounts = [move for move in map(_move, before, after) if move is not None]
    return tuple(amounts) if len(amounts) == len(before) else None


def moved(states: States, by: tuple[int, ...]) -> States:
    """Copies of ``states``, each moved."""
    return tuple(map(_moved, states, by))


def _move(before: Tensor, after: Tensor) -> int | None:
    if torch.equal(before, after):
        return 0
    if before.numel() == COUNTING:
        (seed, offset), (new_seed, new_offset) = before.view(torch.int64).tolist(), after.view(torch.int64).tolist()
        if seed != new_seed or new_offset < offset:
            return None
        return int(new_offset - offset)
    if before.numel() != TWISTER or not torch.equal(before[NORMALS:], after[NORMALS:]):
        return None
    generator = torch.Generator()
    generator.set_state(before)
    count = (_left(before) - _left(after)) % WORDS
    _draw(generator, count)
    while not torch.equal(generator.get_state(), after):
        if count > MOST:
            return None
        _draw(generator, WORDS)
        count += WORDS
    return count


def _moved(state: Tensor, by: int) -> Tensor:
    if by == 0:
        return state
    if state.numel() == COUNTING:
        seed, offset = state.view(torch.int64).tolist()
        return torch.tensor([seed, offset + by]).view(torch.uint8)
    generator = torch.Generator()
    generator.set_state(state)
    while by > 0:
        _draw(generator, min(by, AT_ONCE))
        by -= AT_ONCE
    return generator.get_state()


def _left(state: Tensor) -> int:
    return int(state[8:12].view(torch.int32).item())


def _draw(generator: torch.Generator, words: int) -> None:
    torch.empty(words, dtype=torch.int32).random_(generator=generator)
