"""Exchanges inside and across machines, on four and six ranks that stand for machines of two and three.

The reference is written here: every rank gets the gradients of all, and adds ((r0 + r1) + (r2 + r3)), by torch's own
communication hook in plain data parallelism. Bits are compared, of weights and moments, and those of all ranks.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from deepstow.strategies.engine.ranks.two_level import TwoLevel
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.run.accelerator import StowAccelerator
from tests.helpers.moves import Kind, different, made, state_of

pytestmark = pytest.mark.ranks
HERE = 2  # ranks of a machine
SIZES = (1, 7, 1001)
SPANS = (8, 60)  # that ranks divide evenly


def machine_by_machine(parts: list[Tensor], here: int) -> Tensor:
    machines = [reduce(torch.add, parts[first : first + here]) for first in range(0, len(parts), here)]
    return reduce(torch.add, machines)


# --- the exchanges themselves -----------------------------------------------------------------------------------------


def _exchanges(ranks: Ranks, here: int) -> dict[str, int]:
    many = {slices: TwoLevel(here, slices) for slices in (1, 4, 7)}
    for size in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            parts = [
                torch.randn(size, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks.world_size)
            ]
            expected = machine_by_machine([part.to(dtype) for part in parts], here)
            for slices, two_level in many.items():
                flat = parts[ranks.rank].to(dtype).clone()
                two_level.all_reduce(flat, torch.full((two_level.room(size),), torch.nan, dtype=dtype))
                assert torch.equal(flat, expected), (size, dtype, slices)
    for share in SPANS:
        parts = [torch.randn(share * ranks.world_size) * 10**rank for rank in range(ranks.world_size)]
        dist.broadcast_object_list(parts)
        expected = machine_by_machine(parts, here)
        for two_level in many.values():
            flat = parts[ranks.rank].clone()
            two_level.sum_to_owners(flat, torch.full_like(flat, torch.nan))
            own = slice(ranks.rank * share, (ranks.rank + 1) * share)
            assert torch.equal(flat[own], expected[own])
            flat[: own.start], flat[own.stop :] = torch.nan, torch.nan
            two_level.gather(flat)
            assert torch.equal(flat, expected)
    in_ring = parts[ranks.rank].clone()
    dist.all_reduce(in_ring)
    return {"other in a ring": int((in_ring != expected).sum())}


def test_sums_have_the_bits_of_the_declared_order_for_each_number_of_slices() -> None:
    found = run_world(6, _exchanges, 3, deepspeed=False)
    assert found["other in a ring"] > 0, "the order shows in the bits of these numbers"


# --- training ---------------------------------------------------------------------------------------------------------


def _all_and_add(here: int, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    flat = bucket.buffer().div_(dist.get_world_size())
    parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, flat)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(machine_by_machine(parts, here))
    return future


class _Reference(StowAccelerator):
    """Plain data parallelism, with a hook that is obviously right."""

    def prepare_model(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super().prepare_model(*args, **kwargs)
        assert isinstance(prepared, DistributedDataParallel)
        prepared.register_comm_hook(HERE, _all_and_add)
        return prepared


def _train(ranks: Ranks, jobs: list[tuple[str, RunConfig, str | None]]) -> dict[str, Any]:
    """The state that each run ends with; the first one is the reference."""
    ranks = replace(ranks, local_rank=ranks.rank % HERE, local_world_size=HERE)
    found: dict[str, Any] = {}
    for name, config, resume in jobs:
        found[name] = _state(ranks, config, resume, reference=name == "reference")
        every: list[Any] = [None] * ranks.world_size
        dist.all_gather_object(every, found[name])
        assert not any(different(found[name], other) for other in every), f"{name}: ranks end with other bits"
    return found


def _state(ranks: Ranks, config: RunConfig, resume: str | None, *, reference: bool) -> dict[str, Tensor]:
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    AcceleratorState._reset_state()
    trainer = made(ranks, config)
    if reference:
        trainer.accelerator.__class__ = _Reference
    try:
        trainer.train(resume_from_checkpoint=resume)
        return state_of(trainer)
    finally:
        trainer.accelerator.free_memory()


TWO: Mapping[str, Any] = {"slices": 2}
STREAMED: Mapping[str, Any] = {"site": "host", "weights": "streamed"}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "reference": {},
    "one slice": {"collectives": {"slices": 1}},
    "auto": {"collectives": {"hierarchical": True}},
    "offload": {"collectives": TWO, "offload": {"site": "host"}},
    "zero 1 with offload": {"collectives": TWO, "zero": {"stage": 1}, "offload": {"site": "device"}},
    "zero 3 with offload": {"collectives": {"slices": 4}, "zero": {"stage": 3}, "offload": STREAMED},
}


ZERO_0: Mapping[str, Any] = {"collectives": TWO, "zero": {"stage": 0}}


@pytest.mark.slow
def test_all_ways_of_training_end_with_the_bits_of_the_declared_order(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1, "save_strategy": "no"}
    jobs = [(name, Kind(4, each, options).config(tmp_path, 3), None) for name, each in WAYS.items()]
    jobs.append(("ring", Kind(4, {}, options).config(tmp_path, 3), None))
    jobs.append(
        ("zero 0", Kind(4, ZERO_0, options).config(tmp_path, 3), None)
    )  # the last: it stays in Accelerate's mind
    found = run_world(4, _train, jobs)
    expected = found.pop("reference")
    assert different(expected, found.pop("ring")), "the order shows in the bits of this run"
    for name, state in found.items():
        assert different(expected, state) == [], name
