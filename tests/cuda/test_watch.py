"""The watch sees what makes the host wait, in forward and in backward, and nothing else."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.helpers.waits import watched

DEVICE = "cuda:0"


def in_backward(value: Tensor) -> None:
    """In the thread of backward."""
    value.register_hook(lambda grad: grad * grad.sum().item())
    (value * 2).sum().backward()


def to_pinned(value: Tensor) -> None:
    there = torch.empty(value.shape, pin_memory=True)
    there.copy_(value.detach(), non_blocking=True)
    torch.accelerator.current_stream().record_event().query()


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda value: value[0].item(),
    "bool": lambda value: bool(value.isfinite().all()),
    "tolist": lambda value: value.tolist(),
    "nonzero": lambda value: value.nonzero(),
    "a mask": lambda value: value[value > 0],
    "cpu": lambda value: value.cpu(),
    "a number up": lambda value: torch.tensor(1.0, device=DEVICE),
    "not pinned": lambda value: value.detach().copy_(torch.ones(4), non_blocking=True),
    "an event": lambda value: torch.cuda.current_stream().record_event().synchronize(),
    "torch.Event": lambda value: torch.accelerator.current_stream().record_event().synchronize(),
    "a stream": lambda value: torch.cuda.current_stream().synchronize(),
    "the device": lambda value: torch.cuda.synchronize(),
    "the accelerator": lambda value: torch.accelerator.synchronize(),
    "in backward": in_backward,
}
NONE: dict[str, Callable[[Tensor], object]] = {
    "kernels": lambda value: (value @ value).relu().sum().backward(),
    "an index": lambda value: value[torch.zeros(2, dtype=torch.long, device=DEVICE)],
    "pinned down": to_pinned,
    "pinned up": lambda value: torch.ones(4).pin_memory().to(DEVICE, non_blocking=True),
}


def value() -> Tensor:
    """Its backward has a thread already."""
    made = torch.ones(4, device=DEVICE, requires_grad=True)
    (made * 2).sum().backward()
    return made


@pytest.mark.parametrize("name", WAITS)
def test_what_waits(name: str) -> None:
    given = value()
    with watched() as found:
        WAITS[name](given)
    assert found and found[0].caller.file == "tests/cuda/test_watch.py", found


@pytest.mark.parametrize("name", NONE)
def test_what_does_not_wait(name: str) -> None:
    given = value()
    with watched() as found:
        NONE[name](given)
    assert list(map(str, found)) == []
