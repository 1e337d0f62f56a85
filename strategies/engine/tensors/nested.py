"""Find the tensors in what a module takes or returns, and compare tensors bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two strided tensors of one shape, dtype and device are equal byte by byte, NaN included."""
    return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


def tensors_in(output: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists, mappings and dataclasses."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (list, tuple, set)):
        for value in output:
            yield from tensors_in(value)
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif is_dataclass(output) and not isinstance(output, type):
        for field in fields(output):
            yield from tensors_in(getattr(output, field.name, None))
