"""Loops on two real ranks, with the engine's buckets whole on each or shared: the bits of torch's data parallelism or
of one process, and a step is skipped by all or by none.

A world of ranks lives for all loops of the table; each returns what is wrong.
"""

import copy
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from deepstow.strategies.engine import AdamW, stow
from deepstow.strategies.engine.transfer.transfer import Stream, Transfer
from deepstow.strategies.engine.updating.updates import Updates
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.planning.plan_for import plan_for
from tests.helpers.doubles import Delayed, RaceDetector
from tests.helpers.engine import DECAY, LR, STEPS, differences, plain, plan_of, stowed
from tests.helpers.models import build, tokens
from tests.helpers.sides import Plain, copies, unequal
from tests.parity.test_engine_shares import everyones, finish, stowed_on, unlike
from tests.parity.test_frozen_later import STEPS as FREEZING_STEPS
from tests.parity.test_frozen_later import freezing
from tests.unit.test_effects import Block, normed, running

pytestmark = pytest.mark.ranks
WHOLE: dict[str, Any] = {"weights": "streamed", "prefetch": 0, "gradients": "device"}
RULE = AdamW(lr=LR, weight_decay=DECAY)


def one_bad_rank(ranks: Ranks, max_norm: float, dtype: torch.dtype, zero: dict[str, int] | None) -> list[str]:
    """In the second of three steps one rank alone has a gradient that is not finite: no rank makes that step.

    Nobody says that there are two ranks, and they begin with different weights.
    """
    model: Any = build("llama", dtype=dtype)
    if ranks.rank == 1:
        nn.init.normal_(model.lm_head.weight)
    plan = plan_for(model, max_grad_norm=max_norm, site="host", weights="streamed", prefetch=1, zero=zero)
    optimizer = stow(model, plan, rule=RULE, device="cpu")
    with pytest.raises(ValueError, match="averages gradients over the ranks itself: do not wrap it"):
        DistributedDataParallel(model)
    wrong = unequal(build("llama", dtype=dtype).state_dict(), copies(model))
    weights = []
    for step, batch in enumerate(tokens("llama", 3)):
        loss = model(**batch).loss
        (loss * float("inf") if step == 1 and ranks.rank == 1 else loss).backward()
        if max_norm:
            optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()
        weights.append(copies(model))
    first, second = everyones(ranks, weights[-1])
    optimizer.close()
    wrong += unequal(first, second) + unequal(weights[0], weights[1])
    wrong += [name for name, value in first.items() if not value.isfinite().all()]
    return wrong + ([] if unequal(weights[1], weights[2]) and optimizer.skipped == 1 else ["the other steps"])


def leaving_out(
    ranks: Ranks, site: str, max_norm: float = 0.05, dtype: torch.dtype = torch.float32, shared: bool = False
) -> list[Any]:
    """Ranks leave out a block, another one in each step: each its own, or, with shared buckets, all the same, whose
    last update may not have been computed; against torch's data parallelism, in bf16 with fp32 masters."""
    plain, model = build("llama", dtype=dtype), build("llama", dtype=dtype)
    watch = RaceDetector()
    if shared:
        ours = stowed_on(ranks, model, site, transfer=watch, prefetch=0)
    else:
        plan = plan_for(model, max_grad_norm=max_norm, site=site, **WHOLE)
        ours = stow(model, plan, rule=RULE, device="cpu", transfer=watch)
    theirs, parallel = Plain(plain, max_norm), DistributedDataParallel(plain, find_unused_parameters=True)
    norms: list[list[float]] = [[], []]
    for step, batch in enumerate(tokens("llama", 8)[ranks.rank :: 2]):
        for number, (net, bare, optimizer) in enumerate(((parallel, plain, theirs), (model, model, ours))):
            inner: Any = bare.model
            blocks, left_out = inner.layers, (step + (1 if shared else ranks.rank)) % 4
            inner.layers = nn.ModuleList(block for index, block in enumerate(blocks) if index != left_out)
            net(**batch).loss.backward()
            inner.layers = blocks
            if max_norm:
                norms[number].append(float(optimizer.clip_grad_norm_(max_norm)))
            optimizer.step()
            optimizer.zero_grad()
    return [*watch.races, *unlike(model, plain.state_dict()), *(["norms"] if norms[0] != norms[1] else [])]


class Blocks(nn.Module):
    """With buffers that change in training: some that the output depends on, and an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(lambda block, x: normed(block, x) + running(block, x)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def buffers(ranks: Ranks, accumulation: int) -> list[str]:
    """As torch shares them: losses, evaluation by the model itself, and the state.

    The last window is one micro-batch short, as at the end of an epoch, and followed by another step.
    """
    plain = build(Blocks)
    model = copy.deepcopy(plain)
    plan = plan_for(model, max_grad_norm=0.0, accumulation=accumulation, site="host", **WHOLE)
    ours, theirs = stow(model, plan, rule=RULE, device="cpu"), Plain(plain, 0.0)
    seen: list[list[float]] = []
    for net, bare, optimizer in ((DistributedDataParallel(plain), plain, theirs), (model, model, ours)):
        torch.manual_seed(1 + ranks.rank)
        found: list[float] = []
        for last in [accumulation, accumulation, accumulation - 1 or 1, accumulation]:
            for micro_batch in range(1, last + 1):
                with net.no_sync() if net is not model and micro_batch < last else nullcontext():
                    loss = net(torch.randn(4, 6))
                    loss.backward()
                found.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            bare.eval()
            with torch.no_grad():
                found.append(bare(torch.ones(1, 6)).item())
            bare.train()
        seen.append(found)
    return [*unequal(plain.state_dict(), copies(model)), *(["losses"] if seen[0] != seen[1] else [])]


def summed_first(ranks: Ranks) -> list[str]:
    """Two micro-batches per rank: they are summed before the ranks are, as torch's data parallelism does."""
    batches = tokens("llama", STEPS * 2 * ranks.world_size)
    mine = [batches[at] for at in range(len(batches)) if at // 2 % ranks.world_size == ranks.rank]
    parallel: Any = DistributedDataParallel(build("llama"))
    optimizer, norms = torch.optim.AdamW(parallel.parameters(), lr=LR, weight_decay=DECAY, fused=True), []
    for step in range(STEPS):
        with parallel.no_sync():
            (parallel(**mine[2 * step]).loss / 2).backward()
        (parallel(**mine[2 * step + 1]).loss / 2).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parallel.parameters(), 0.05)))
        optimizer.step()
        optimizer.zero_grad()
    model, loop = build("llama"), {"accumulation": 2, "max_norm": 0.05}
    plan = plan_of(model, site="host", weights="travelling", ranks=ranks.world_size, **loop)
    found = stowed(model, plan, mine, transfer=Delayed(), **loop)
    wrong = [name for name, param in parallel.module.named_parameters() if not torch.equal(param, found.tensors[name])]
    return wrong + (["norms"] if norms != found.norms else [])


def between(ranks: Ranks) -> list[str]:
    """A model whose blocks share weights; its state dict is read between backward and step."""
    model, batches = build("shared"), tokens("shared", 2 * ranks.world_size)
    wanted = plain(build("shared"), batches, accumulation=ranks.world_size, max_norm=0.05)
    ours, changed = stowed_on(ranks, model), list[str]()
    for batch in batches[ranks.rank :: ranks.world_size]:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model(**batch).loss.backward()
        changed += unlike(model, before)
        finish(ours)
    return changed + unlike(model, wanted.tensors)


def read_by_the_first(ranks: Ranks) -> list[str]:
    """What is wrong with the state dict that the first rank keeps for a checkpoint, and with what the other one has."""
    model = build("llama")
    optimizer = stowed_on(ranks, model)
    whole, gathered = model.state_dict(), optimizer.gathered(keep=ranks.rank == 0)
    assert all(value.numel() for value in model.state_dict().values())
    if ranks.rank:
        return [name for name, value in gathered.items() if value.numel()]
    return [name for name, value in whole.items() if not torch.equal(value, gathered[name])]


def multiplied_and_clipped(ranks: Ranks, zero: dict[str, int] | None) -> list[str]:
    """The loop multiplies gradients by a third before it clips; ranks that share them refuse that."""
    model, alone, wrong = build("llama"), build("llama"), list[str]()
    plan = plan_for(model, max_grad_norm=0.05, site="host", weights="streamed", prefetch=1, zero=zero)
    ours, other = stow(model, plan, rule=RULE, device="cpu"), Plain(alone, 0.05)
    batches = tokens("llama", 4)
    for both in (batches[:2], batches[2:]):
        for batch in both:
            (alone(**batch).loss / 2).backward()
        model(**both[ranks.rank]).loss.backward()
        for param in (*alone.parameters(), *model.parameters()):
            param.grad *= 1 / 3
        if zero:
            with pytest.raises(RuntimeError, match="is shared over ranks: it can be multiplied once"):
                ours.clip_grad_norm_(0.05)
            return []
        wrong += [] if ours.clip_grad_norm_(0.05) == other.clip_grad_norm_(0.05) else ["norm"]
        for optimizer in (ours, other):
            optimizer.step()
            optimizer.zero_grad()
    return [*wrong, *unlike(model, dict(alone.named_parameters()))]


def frozen_later(ranks: Ranks, **where: Any) -> list[str]:
    """Some parameters are frozen for two steps."""
    batches, model = tokens("llama", FREEZING_STEPS * 2), freezing()
    wanted = plain(freezing(accumulation=2), batches, accumulation=2, max_norm=0.05)
    plan = plan_of(model, **where, max_norm=0.05, ranks=2)
    shared = stowed(model, plan, batches[ranks.rank :: 2], transfer=Delayed(), max_norm=0.05)
    wanted.losses = shared.losses = []
    return differences(wanted, shared)


class SlowReader(Transfer):
    """Copies up take their time while ``slow``."""

    slow = False

    def _copy(self, stream: Stream, target: Any, source: Any) -> None:
        if self.slow and stream is Stream.UP:
            time.sleep(0.1)
        super()._copy(stream, target, source)


def common_memory(ranks: Ranks, dtype: torch.dtype, weights: str) -> list[str]:
    """The first rank is late to write what the second one reads, and the second late to read what the first replaces:
    it still evaluates, between the norm and the step, when the first one has gone on.
    """
    updates: Any = Updates
    compute = updates._compute_on_host

    def late(self: Updates, *args: Any) -> Any:
        time.sleep(0.01 * ranks.is_first)
        return compute(self, *args)

    model, batches, seen = build("llama", dtype=dtype), tokens("llama", 2 * STEPS), []
    transfer = SlowReader()
    with patch.object(updates, "_compute_on_host", late):
        optimizer = stowed_on(ranks, model, weights=weights, transfer=transfer, gather="host")
        assert any(bucket.sources for bucket in optimizer.engine.buckets)
        for batch in batches[ranks.rank :: 2]:
            model(**batch).loss.backward()
            optimizer.clip_grad_norm_(0.05)
            transfer.slow = not ranks.is_first
            with torch.no_grad():
                seen.append(float(model(**batches[0]).loss))
            transfer.slow = False
            optimizer.step()
            optimizer.zero_grad()
        wrong = unlike(model, plain(build("llama", dtype=dtype), batches, accumulation=2, max_norm=0.05).tensors)
    first, second = everyones(ranks, seen)
    return [*wrong, *(["losses"] if first != second else [])]


LOOPS: Mapping[str, Callable[[Ranks], list[Any]]] = {
    "one bad rank, bf16, clipped": partial(one_bad_rank, max_norm=1.0, dtype=torch.bfloat16, zero=None),
    "one bad rank, clipped, shared": partial(one_bad_rank, max_norm=1.0, dtype=torch.float32, zero={"stage": 3}),
    "blocks left out, clipped, streamed": partial(leaving_out, site="streamed"),
    "blocks left out, clipped, bf16": partial(leaving_out, site="host", dtype=torch.bfloat16),
    **{f"a block left out by all, {site}": partial(leaving_out, site=site, shared=True)
       for site in ("host", "streamed")},
    "buffers, accumulated": partial(buffers, accumulation=3),
    "summed first": summed_first,
    "read between backward and step": between,
    "one copy for a checkpoint": read_by_the_first,
    "multiplied and clipped": partial(multiplied_and_clipped, zero=None),
    "multiplied and clipped, shared": partial(multiplied_and_clipped, zero={"stage": 3}),
    "frozen later, on the host": partial(frozen_later, site="host", weights="travelling", park="host"),
    "common memory": partial(common_memory, dtype=torch.float32, weights="travelling"),
    "common memory, resident": partial(common_memory, dtype=torch.bfloat16, weights="resident"),
}  # fmt: skip


def loops(ranks: Ranks) -> dict[str, list[Any]]:
    return {name: everyones(ranks, loop(ranks)) for name, loop in LOOPS.items()}


def test_loops() -> None:
    assert run_world(2, loops) == {name: [[], []] for name in LOOPS}
