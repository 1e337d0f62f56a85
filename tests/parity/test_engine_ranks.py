"""The engine on two real ranks: a step is skipped by all or by none, and weights stay the same everywhere."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from strategies.engine import AdamW, stow
from tests.helpers.masters import Masters
from tests.helpers.models import build, tokens
from trainer.dist.ranks import Ranks
from trainer.dist.spawn import run_world
from trainer.planning.plan_for import plan_for

pytestmark = pytest.mark.ranks


def one_bad_rank(ranks: Ranks, max_norm: float, dtype: torch.dtype, zero: dict[str, int] | None) -> dict[str, Any]:
    """Three steps; in the second, one rank alone has a gradient that is not finite.

    Nobody says that there are two ranks, and they begin with different weights.
    """
    model: Any = build("llama", dtype=dtype)
    if ranks.rank == 1:
        torch.nn.init.normal_(model.lm_head.weight)
    plan = plan_for(model, max_grad_norm=max_norm, site="host", weights="streamed", prefetch=1, zero=zero)
    optimizer = stow(model, plan, rule=AdamW(lr=1e-2), device="cpu")
    with pytest.raises(ValueError, match="averages gradients over the ranks itself: do not wrap it"):
        torch.nn.parallel.DistributedDataParallel(model)
    start = model.state_dict()["lm_head.weight"].clone()
    weights = []
    for step, batch in enumerate(tokens("llama", 3)):
        loss = model(**batch).loss
        (loss * float("inf") if step == 1 and ranks.rank == 1 else loss).backward()
        if max_norm:
            optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()
        weights.append({name: value.clone() for name, value in model.state_dict().items()})
    flat = torch.cat([value.reshape(-1) for value in weights[-1].values()])
    both = [torch.empty_like(flat) for _ in range(ranks.world_size)]
    dist.all_gather(both, flat)
    optimizer.close()
    return {
        "started as the first": bool(torch.equal(start, build("llama", dtype=dtype).state_dict()["lm_head.weight"])),
        "skipped": optimizer.skipped,
        "alike": bool(torch.equal(*both)),
        "kept": all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0]),
        "trained": any(not torch.equal(weights[1][name], weights[2][name]) for name in weights[0]),
        "finite": bool(flat.isfinite().all()),
    }


BAD: dict[str, Any] = {
    "whole, fp32": (0.0, torch.float32, None),
    "whole, bf16, clipped": (1.0, torch.bfloat16, None),
    "shared, bf16": (0.0, torch.bfloat16, {"stage": 3}),
    "shared, fp32, clipped": (1.0, torch.float32, {"stage": 3}),
}


def one_bad_rank_in_each(ranks: Ranks) -> dict[str, dict[str, Any]]:
    return {name: one_bad_rank(ranks, *case) for name, case in BAD.items()}


def test_one_rank_that_is_not_finite_stops_the_step_of_all() -> None:
    for name, found in run_world(2, one_bad_rank_in_each).items():
        assert found.pop("skipped") == 1, name
        assert all(found.values()), (name, found)


def skipping(ranks: Ranks, max_norm: float, site: str, dtype: torch.dtype) -> list[float]:
    """Each rank leaves out another block, in turn; against torch's data parallelism, in bf16 with fp32 masters."""
    import copy

    plain: Any = build("llama", dtype=dtype)
    model = copy.deepcopy(plain)
    plan = plan_for(model, max_grad_norm=max_norm, site=site, weights="streamed", prefetch=0, gradients="device")
    ours = stow(model, plan, rule=AdamW(), device="cpu")
    mixed = dtype is not torch.float32
    theirs: Any = Masters(plain, 1e-3, max_norm) if mixed else torch.optim.AdamW(plain.parameters(), fused=True)
    parallel = torch.nn.parallel.DistributedDataParallel(plain, find_unused_parameters=True)
    unequal = []
    for step, batch in enumerate(tokens("llama", 4)):
        norms = [0.0, 0.0]
        for net, bare, optimizer in ((parallel, plain, theirs), (model, model, ours)):
            all_blocks = bare.model.layers
            left_out = all_blocks[(step + ranks.rank) % len(all_blocks)]
            bare.model.layers = torch.nn.ModuleList(block for block in all_blocks if block is not left_out)
            net(**batch).loss.backward()
            bare.model.layers = all_blocks
            if max_norm and not mixed:
                norms.append(float(torch.nn.utils.clip_grad_norm_(bare.parameters(), max_norm)))
            optimizer.step()
            optimizer.zero_grad()
        unequal.append(norms[-2] - norms[-1])
    state = model.state_dict()
    return [*unequal, *(float((value - state[name]).abs().max()) for name, value in plain.state_dict().items())]


@pytest.mark.parametrize(
    ("max_norm", "site", "dtype"),
    [(0.0, "host", torch.float32), (1.0, "streamed", torch.float32), (1.0, "host", torch.bfloat16)],
)
def test_ranks_that_leave_out_blocks(max_norm: float, site: str, dtype: torch.dtype) -> None:
    assert set(run_world(2, skipping, max_norm, site, dtype)) == {0.0}


class Averaging(nn.Module):
    """A block with buffers that change in training: one that the output depends on, and an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
        out: Tensor = x + self.norm(self.up(x - self.mean))
        return out


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Averaging() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def buffers(ranks: Ranks, accumulation: int) -> list[float]:
    """Against torch's data parallelism: losses, evaluation by the model itself, and the state, of both ranks.

    The last window is one micro-batch short, as at the end of an epoch, and followed by another step.
    """
    import copy

    plain = Blocks()
    model = copy.deepcopy(plain)
    plan = plan_for(model, max_grad_norm=0.0, accumulation=accumulation, site="host", weights="streamed", prefetch=0)
    ours = stow(model, plan, rule=AdamW(), device="cpu")
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    parallel = nn.parallel.DistributedDataParallel(plain)
    seen: list[list[float]] = []
    for net, bare, optimizer in ((parallel, plain, theirs), (model, model, ours)):
        torch.manual_seed(1 + ranks.rank)
        found: list[float] = []
        for last in [accumulation, accumulation, accumulation - 1 or 1, accumulation]:
            for micro_batch in range(1, last + 1):
                averages = net is model or micro_batch == last
                with nullcontext() if averages else parallel.no_sync():
                    loss = net(torch.randn(4, 8))
                    loss.backward()
                found.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            bare.eval()
            with torch.no_grad():
                found.append(bare(torch.ones(1, 8)).item())
            bare.train()
        state = bare.state_dict()
        seen.append(found + torch.cat([state[name].flatten().double() for name in sorted(state)]).tolist())
    unlike = torch.tensor(seen[0]).sub(torch.tensor(seen[1])).abs()
    dist.all_reduce(unlike, dist.ReduceOp.MAX)
    return [float(value) for value in unlike]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_buffers_are_shared_as_torch_does(accumulation: int) -> None:
    assert set(run_world(2, buffers, accumulation)) == {0.0}
