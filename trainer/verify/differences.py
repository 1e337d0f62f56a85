"""Compare two runs by bits, and make sure first that plain training repeats itself.

On an accelerator some sums are made in any order. So processes that are compared ask for deterministic kernels
(``repeat_sums``), and plain training is compared with itself before anything else is compared with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from strategies.engine.memory import accelerator
from trainer.errors import UserError


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that is not equal. ``relative``: its largest difference over its largest weight."""

    name: str
    relative: float
    num_different: int
    num_elements: int


def compare(plain: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[Difference]:
    """Tensors that differ in any bit, the worst first.

    Raises:
        ValueError: the names are not the same; a strategy renamed or dropped a parameter.
    """
    if plain.keys() != other.keys():
        raise ValueError(f"parameter names differ: {sorted(plain.keys() ^ other.keys())[:5]}")
    differences = []
    for name, expected in plain.items():
        found = other[name]
        if not torch.equal(expected.view(torch.int32), found.view(torch.int32)):
            relative = float((expected - found).abs().max() / expected.abs().max().clamp_min(1e-12))
            differences.append(Difference(name, relative, int((expected != found).sum()), expected.numel()))
    return sorted(differences, key=lambda difference: -difference.relative)


def repeatable(train: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of plain training; on an accelerator, where sums may be made in any order, it runs twice.

    Raises:
        UserError: the two runs differ, so that a comparison with them would prove nothing.
    """
    found = train()
    noise = compare(found["weights"], train()["weights"]) if accelerator.kind() is not None else []
    if noise:
        raise UserError(
            f"plain training does not repeat itself here: {len(noise)} tensors differ between two runs, "
            f"{noise[0].name} by {noise[0].relative:.1e}; an operator has no deterministic kernel"
        )
    return found


def repeat_sums() -> None:
    """Select kernels whose sums have one order, in this process.

    Not by Hugging Face's ``full_determinism``: that makes each kernel wait for the one before, which would hide a wait
    that the engine forgot.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it
    torch.use_deterministic_algorithms(mode=True)
    torch.backends.cudnn.benchmark = False
