"""Ranks that share the engine's buckets have the bits of one process that accumulates their micro-batches.

A world of ranks lives for all rows of a table. Each rank trains its own micro-batch of every window by the engine, and
all of them plainly; compared are weights, norms, moments, masters and counts, put together from all ranks.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from strategies.engine import AdamW, stow
from strategies.engine.shares import Shares
from strategies.engine.transfer.race_detector import RaceDetector
from strategies.engine.transfer.transfer import Delayed
from strategies.engine.updates import Updates
from tests.helpers.doubles import Vacant
from tests.helpers.engine import (
    DECAY,
    LR,
    STEPS,
    Result,
    checkpointing,
    differences,
    groups_of,
    plain,
    plan_of,
    stowed,
)
from tests.helpers.grid import ENGINE, NORMS, title
from tests.helpers.models import build, on, tokens
from tests.helpers.pairwise import Row, Table
from trainer.dist.ranks import Ranks
from trainer.dist.spawn import run_world
from trainer.planning.plan_for import plan_for

pytestmark = pytest.mark.ranks
TRANSFERS = {"delayed": Delayed, "watched": RaceDetector, "vacant": Vacant}
FORBIDDEN = [
    (("site", "device"), ("park", "host")),
    (("site", "host"), ("split", True)),
    (("park", "host"), ("split", True)),
    (("weights", "resident"), ("prefetch", 0)),
    (("dtype", "bfloat16"), ("model", "mixtral")),
]
FACTORS: Mapping[str, Sequence[object]] = {
    "model": ("llama", "experts", "gpt2", "mixtral"),
    **{name: levels for name, levels in ENGINE.items() if name != "accumulation"},
    "clip": ("off", "tight", "loose"),
    "tied": (False, True),
    "groups": (1, 2),
    "frozen": (False, True),
    "recompute": ("none", "later"),
    "prefetch": (2, 0),
    "dtype": ("float32", "bfloat16"),
    "split": (True, False),
    "transfer": tuple(TRANSFERS),
}
OTHERS = Table({name: levels[::-1] for name, levels in FACTORS.items()}, FORBIDDEN)
RANKS = (2, 4)


@cache
def rows_for(num_ranks: int) -> list[Row]:
    """Not made by ranks, which import this module as well."""
    if num_ranks == 2:
        return [*Table(FACTORS, FORBIDDEN, strength=3).rows(), *OTHERS.rows()]
    return list(Table(FACTORS, FORBIDDEN).rows())


def made(case: dict[str, Any]) -> nn.Module:
    model = build(case["model"], tied=case["tied"], dtype=getattr(torch, case["dtype"]))
    checkpointing(model, case["recompute"])
    for module in model.modules():
        if isinstance(module, nn.Dropout):  # each rank would draw numbers of its own
            module.p = 0.0
    if case["frozen"]:
        vectors = [param for param in model.parameters() if param.ndim < 2]
        for param in vectors[::2]:
            param.requires_grad_(False)
    return model


def both(ranks: Ranks, row: Row, device: str = "cpu", **how: Any) -> tuple[Result, Result]:
    """Train a case plainly and by the engine, on ``device``; ``how``: its transfer and process group."""
    case: dict[str, Any] = dict(row)
    count, norm, groups = ranks.world_size, NORMS[case["clip"]], case["groups"]
    batches = [
        {key: value.to(device) for key, value in batch.items()} for batch in tokens(case["model"], STEPS * count)
    ]
    wanted = plain(on(device, made(case)), batches, accumulation=count, max_norm=norm, groups=groups)
    model = made(case)
    where = {name: case[name] for name in ("site", "weights", "bucket", "park", "prefetch", "split")}
    plan = plan_of(model, max_norm=norm, groups=groups, ranks=count, **where)
    how = how or {"transfer": TRANSFERS[case["transfer"]]()}
    return wanted, stowed(model, plan, batches[ranks.rank :: count], max_norm=norm, groups=groups, device=device, **how)


def train(ranks: Ranks, rows: Sequence[Row], device: str = "cpu", how: Callable[[], Any] = dict) -> list[str]:
    """What differs, a line for each row; ``how`` makes what ``both`` is given for a row."""
    torch.set_num_threads(1)
    found = []
    for row in rows:
        wanted, shared = both(ranks, row, device, **how())
        wanted.losses = shared.losses = []  # each rank knows its own
        wrong = differences(wanted, shared)
        everywhere: list[Any] = [None] * ranks.world_size
        dist.all_gather_object(everywhere, wrong)
        found += [f"{title(row)} on rank {rank}: {names}" for rank, names in enumerate(everywhere) if names]
    return found


@pytest.mark.parametrize("num_ranks", RANKS)
def test_the_bits_of_one_process(num_ranks: int) -> None:
    assert run_world(num_ranks, train, rows_for(num_ranks)) == []


def test_there_are_many_combinations() -> None:
    assert sum(len({title(row) for row in rows_for(num_ranks)}) for num_ranks in RANKS) >= 120


def orders(ranks: Ranks) -> list[list[str]]:
    """The exchanges of every rank, where workers take their time, each rank its own."""
    seen: list[str] = []
    chance = random.Random(ranks.rank)
    for name in ("gather", "sum_to_owners"):
        former = getattr(Shares, name)

        def noted(self: Shares, bucket: Any, former: Any = former, name: str = name) -> None:
            seen.append(f"{name} {bucket.name}")
            former(self, bucket)

        setattr(Shares, name, noted)
    updates: Any = Updates
    on_host = updates._on_host

    def late(self: Updates, *args: Any) -> Any:
        time.sleep(chance.random() * 0.02)
        return on_host(self, *args)

    updates._on_host = late
    row = {"model": "llama", "site": "host", "weights": "travelling", "bucket": "half", "park": "host", "prefetch": 2}
    row |= {
        "clip": "tight",
        "tied": False,
        "groups": 1,
        "frozen": False,
        "recompute": "none",
        "dtype": "float32",
        "split": True,
    }
    for weights in ("travelling", "resident"):
        wanted, shared = both(ranks, row | {"transfer": "delayed", "weights": weights})
        assert wanted.norms == shared.norms
    everywhere: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(everywhere, seen)
    return everywhere


def summed_first(ranks: Ranks) -> list[str]:
    """Two micro-batches per rank: they are summed before the ranks are, as torch's data parallelism does."""
    case = {"model": "llama", "tied": False, "dtype": "float32", "recompute": "none", "frozen": False}
    batches = tokens("llama", STEPS * 2 * ranks.world_size)
    mine = [batches[at] for at in range(len(batches)) if at // 2 % ranks.world_size == ranks.rank]
    parallel: Any = nn.parallel.DistributedDataParallel(made(case))
    optimizer, norms = torch.optim.AdamW(parallel.parameters(), lr=LR, weight_decay=DECAY, fused=True), []
    for step in range(STEPS):
        with parallel.no_sync():
            (parallel(**mine[2 * step]).loss / 2).backward()
        (parallel(**mine[2 * step + 1]).loss / 2).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parallel.parameters(), 0.05)))
        optimizer.step()
        optimizer.zero_grad()
    model, loop = made(case), {"accumulation": 2, "max_norm": 0.05}
    plan = plan_of(model, site="host", weights="travelling", ranks=ranks.world_size, **loop)
    found = stowed(model, plan, mine, transfer=Delayed(), **loop)
    wrong = [name for name, param in parallel.module.named_parameters() if not torch.equal(param, found.tensors[name])]
    return wrong + (["norms"] if norms != found.norms else [])


def test_micro_batches_are_summed_before_ranks() -> None:
    assert run_world(2, summed_first) == []


def other_path(ranks: Ranks) -> str:
    """The second rank leaves out another block than the first; all blocks have the same size."""
    model: Any = build("llama")
    plan: Any = plan_of(model, site="host", weights="travelling", max_norm=1.0, ranks=2)
    optimizer = stow(model, plan, groups_of(model, 1), device="cpu")
    blocks = model.model.layers
    model.model.layers = nn.ModuleList(block for index, block in enumerate(blocks) if index != 1 + ranks.rank)
    loss = model(**tokens("llama", 1)[0]).loss
    start = [bucket.master if bucket.master is not None else bucket.copy for bucket in optimizer.engine.buckets]
    before = [span.clone() for span in start if span is not None]
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    assert all(torch.equal(*pair) for pair in zip(before, [span for span in start if span is not None], strict=True))
    return str(caught.value)


def test_ranks_that_take_other_paths_are_refused_before_anything_is_updated() -> None:
    line = run_world(2, other_path)
    assert "paths through the model: at one time rank 0 ran model.layers.2, and rank 1 ran model.layers.1. " in line


def other_loss(ranks: Ranks) -> str:
    """The second rank's loss does not depend on the last blocks, which it has run."""
    model: Any = build("llama")
    plan: Any = plan_of(model, site="host", weights="travelling", max_norm=1.0, ranks=2)
    stow(model, plan, groups_of(model, 1), device="cpu")
    states = model(**tokens("llama", 1)[0], output_hidden_states=True).hidden_states
    with pytest.raises(RuntimeError) as caught:
        states[2 if ranks.rank else -1].sum().backward()
    return str(caught.value)


def test_ranks_whose_losses_depend_on_other_blocks_are_refused() -> None:
    line = run_world(2, other_loss)
    assert "at one time rank 0 goes back through model.layers.2, and rank 1 did nothing. " in line


def alone(ranks: Ranks, stage: int) -> list[str]:
    """After a step the first rank reads a weight, and then runs forward without gradients while the others train."""
    model: Any = build("llama")
    plan: Any = plan_for(model, max_grad_norm=1.0, world_size=2, zero={"stage": stage}, site="host")
    optimizer = stow(model, plan, groups_of(model, 1), device="cpu")
    batch = tokens("llama", 1)[0]
    model(**batch).loss.backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    weight, lines = model.model.layers[3].mlp.up_proj.weight, []
    if ranks.is_first:
        for read in (weight.norm, partial(getattr, weight, "data"), weight.data_ptr):
            with pytest.raises(RuntimeError) as caught:
                read()
            lines.append(str(caught.value))
    with optimizer.present([weight]):
        assert weight.norm() > 0
    with torch.set_grad_enabled(not ranks.is_first), pytest.raises(RuntimeError) as caught:
        model(**batch)
    return [*lines, str(caught.value)]


@pytest.mark.parametrize("stage", [1, 3])
def test_what_one_rank_does_alone_is_refused(stage: int) -> None:
    *reads, forward = run_world(2, alone, stage)
    assert all(line.startswith("model.layers.3.mlp.up_proj.weight is shared over ranks") for line in reads)
    assert "rank 0 began a forward without gradients, and rank 1 began a forward with gradients. " in forward


def between(ranks: Ranks) -> list[str]:
    """A model whose blocks share weights; its state dict is read between backward and step."""
    model: Any = build("shared")
    batches = tokens("shared", 2 * ranks.world_size)
    wanted = plain(build("shared"), batches, accumulation=ranks.world_size, max_norm=0.05)
    plan: Any = plan_of(model, site="host", weights="travelling", max_norm=0.05, ranks=ranks.world_size)
    ours = stow(model, plan, groups_of(model, 1), AdamW(lr=LR, weight_decay=DECAY), device="cpu")
    for batch in batches[ranks.rank :: ranks.world_size]:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model(**batch).loss.backward()
        unchanged = all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        ours.clip_grad_norm_(0.05)
        ours.step()
        ours.zero_grad()
    state = model.state_dict()
    wrong = [name for name in dict(model.named_parameters()) if not torch.equal(state[name], wanted.tensors[name])]
    return wrong if unchanged else [*wrong, "between"]


def test_weights_are_read_between_backward_and_step() -> None:
    assert run_world(2, between) == []


def skipping(ranks: Ranks, site: str) -> list[str]:
    """All ranks leave out the same block, another one in each step, whose last update may not have been computed."""
    case = {"model": "llama", "tied": False, "dtype": "float32", "recompute": "none", "frozen": False}
    plain, model = made(case), made(case)
    parallel: Any = nn.parallel.DistributedDataParallel(plain, find_unused_parameters=True)
    theirs = torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=DECAY, fused=True)
    plan: Any = plan_of(model, site=site, weights="travelling", prefetch=0, max_norm=0.05, ranks=ranks.world_size)
    rule = AdamW(lr=LR, weight_decay=DECAY)
    ours = stow(model, plan, groups_of(model, 1), rule, device="cpu", transfer=RaceDetector(), beside=True)
    for step, batch in enumerate(tokens("llama", 8)[ranks.rank :: 2]):
        for net, bare, optimizer in ((parallel, plain, theirs), (model, model, ours)):
            blocks: Any = bare.model.layers
            bare.model.layers = nn.ModuleList(block for index, block in enumerate(blocks) if index != (step + 1) % 4)
            net(**batch).loss.backward()
            bare.model.layers = blocks
            if optimizer is theirs:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    state = model.state_dict()
    watched: Any = ours.engine.transfer
    return watched.races + [name for name, value in plain.state_dict().items() if not torch.equal(value, state[name])]


@pytest.mark.parametrize("site", ["host", "streamed", "device"])
def test_a_block_that_no_rank_runs_keeps_its_update(site: str) -> None:
    assert run_world(2, skipping, site) == []


def read_by_the_first(ranks: Ranks) -> list[str]:
    """What is wrong with the state dict that the first rank keeps, and with what the other one has meanwhile."""
    model: Any = build("llama")
    plan: Any = plan_of(model, site="host", weights="travelling", ranks=2)
    optimizer = stow(model, plan, groups_of(model, 1), device="cpu")
    whole, gathered = model.state_dict(), optimizer.gathered(keep=ranks.rank == 0)
    assert all(value.numel() for value in model.state_dict().values())
    if ranks.rank:
        wrong = [name for name, value in gathered.items() if value.numel()]
    else:
        wrong = [name for name, value in whole.items() if not torch.equal(value, gathered[name])]
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, wrong)
    return [*everywhere[0], *everywhere[1]]


def test_one_copy_is_made_for_a_checkpoint() -> None:
    """And not one per rank."""
    assert run_world(2, read_by_the_first) == []


def test_no_exchange_depends_on_timing() -> None:
    first, second = run_world(2, orders)
    assert first == second and len(first) > 50
