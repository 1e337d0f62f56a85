"""What a CUDA device holds beside planned tensors: left free by plans, and limits that torch's allocator gets."""

from dataclasses import replace

import pytest
import torch

from deepstow.strategies.core.sizes import CONTEXT_BYTES, OVERHEAD_BYTES
from deepstow.strategies.engine.memory import accelerator
from deepstow.strategies.planner.budget import device_budget
from deepstow.trainer.machine.probe import GIB
from deepstow.trainer.machine.profiles import profile
from deepstow.trainer.planning.facts import machine_facts

OVERHEAD = OVERHEAD_BYTES["cuda"]
DEVICE = torch.device("cuda", 0)


def test_tensors_get_what_context_and_libraries_leave() -> None:
    """A share, and auto, are of the whole device, as long as so much is left; a size is that of tensors."""
    card = profile("h100-pcie5")
    facts, small = (machine_facts(each, 1) for each in (card, replace(card, device_total_bytes=12 * GIB)))
    assert facts.device_bytes == card.device_total_bytes - OVERHEAD
    assert device_budget(facts) == int(0.9 * card.device_total_bytes)
    assert device_budget(facts, 0.5) == int(0.5 * card.device_total_bytes)
    assert device_budget(small, 1.0) == small.device_bytes == 12 * GIB - OVERHEAD
    assert machine_facts(replace(card, device_total_bytes=1000), 1).device_bytes == 900
    assert device_budget(small, "1GiB") == GIB
    assert machine_facts(profile("cpu"), 1).device_overhead_bytes == 0


@pytest.mark.parametrize(("context", "left"), [(CONTEXT_BYTES // 2, CONTEXT_BYTES), (2 * CONTEXT_BYTES,) * 2])
def test_a_process_is_limited_with_its_context(context: int, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's allocator has 1 GiB of what is in use; the context grows with the kernels that are loaded."""
    total, limits = 16 * GIB, list[float]()
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (total - GIB - context, total))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: GIB)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: limits.append(share))
    accelerator.TABLE["cuda"].limit(DEVICE, 8 * GIB)
    assert [share * total for share in limits] == [8 * GIB - left]


@pytest.mark.parametrize(
    ("set_by_user", "fails", "changes"),
    [
        ("", False, ["expandable_segments:True"]),
        ("", True, ["expandable_segments:True", "expandable_segments:False"]),
        ("max_split_size_mb:64", False, []),
    ],
)
def test_segments_expand_unless_the_user_or_the_driver_says_otherwise(
    set_by_user: str, fails: bool, changes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[str]()

    def empty(*size: int, device: torch.device) -> None:
        if fails:
            raise RuntimeError("CUDA driver error")

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", made.append, raising=False)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", set_by_user)
    accelerator.TABLE["cuda"].expand_segments(DEVICE)
    assert made == changes
