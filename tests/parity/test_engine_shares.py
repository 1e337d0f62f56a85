"""Ranks that share the engine's buckets have the bits of one process that accumulates their micro-batches.

A world of ranks lives for all rows of a table. Each rank trains its own micro-batch of every window by the engine, and
all of them plainly; compared are weights, norms, moments, masters and counts, put together from all ranks.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepstow.strategies.core.layout import Item
from deepstow.strategies.core.plan import Plan
from deepstow.strategies.engine import AdamW, UpdateRule, stow
from deepstow.strategies.engine.memory.common_host import CommonHost
from deepstow.strategies.engine.ranks.shares import Shares
from deepstow.strategies.engine.updating.updates import Updates
from deepstow.strategies.planner.step_cost import problem_of, traffic
from deepstow.strategies.planner.weight_schedule import ASSUMED
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.planning.plan_for import plan_for
from tests.helpers import grid
from tests.helpers.doubles import RaceDetector
from tests.helpers.engine import (
    DECAY,
    LR,
    STEPS,
    Result,
    checkpointing,
    differences,
    groups_of,
    least_of,
    plain,
    plan_of,
    planned,
    stowed,
)
from tests.helpers.grid import ENGINE, NORMS, batches_on, title
from tests.helpers.models import build, causal, on, tokens
from tests.helpers.pairwise import Row, Table

pytestmark = pytest.mark.ranks
FORBIDDEN = [
    *grid.FORBIDDEN,
    (("site", "host"), ("split", True)),
    (("park", "host"), ("split", True)),
    (("dtype", "bfloat16"), ("model", "mixtral")),
]
FACTORS: Mapping[str, Sequence[object]] = {
    "model": ("llama", "experts", "gpt2", "mixtral"),
    **{name: levels for name, levels in ENGINE.items() if name != "accumulation"}, "clip": ("off", "tight", "loose"),
    "tied": (False, True), "groups": (1, 2), "frozen": (False, True), "recompute": ("none", "later"),
    "prefetch": (2, 0), "dtype": ("float32", "bfloat16"), "split": (True, False), "gather": ("host", "network"),
    "transfer": ("delayed", "watched", "vacant"), "rule": ("AdamW", "RMSprop", "SGD"),
}  # fmt: skip
RULES: Mapping[str, Mapping[str, Any]] = {
    "AdamW": {"fused": True},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "SGD": {"momentum": 0.9},
}
CASE: Row = {name: levels[0] for name, levels in FACTORS.items()} | {"clip": "tight", "gather": "network"}


FEW = ("site", "weights", "bucket", "park", "dtype", "split", "gather")  # decide who sends what to whom


def rows_for(num_ranks: int, strength: int = 2) -> list[Row]:
    """Made before ranks are, each of which imports this module as well."""
    if num_ranks == 2:
        return list(Table({**FACTORS, "reduction": ("exact", "fast")}, FORBIDDEN, strength).rows())
    few = Table({name: FACTORS[name] for name in FEW}, FORBIDDEN).rows()
    return [{**CASE, "model": "experts", **row} for row in few]


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


def both(ranks: Ranks, row: Row, device: str = "cpu", turn: int = 0, **how: Any) -> tuple[Result, Result]:
    """Train a case plainly on one rank, whose turn it is, and on all by the engine; what both left is on every rank.

    ``device`` is where they train; ``how`` is the engine's transfer and process group.
    """
    case: dict[str, Any] = dict(row)
    count, norm, groups = ranks.world_size, NORMS[case["clip"]], case["groups"]
    steps = STEPS - bool(turn % 3)  # in the second all that the first has left is read; two of three cases end there
    batches = batches_on(device, case["model"], steps * count)
    alone: list[Result | None] = [None]
    kind, options = case["rule"], {"lr": LR, "weight_decay": DECAY, **RULES[case["rule"]]}
    if ranks.rank == turn % count:
        loop: dict[str, Any] = {"accumulation": count, "max_norm": norm, "groups": groups}
        alone = [plain(on(device, made(case)), batches, make=partial(getattr(torch.optim, kind), **options), **loop)]
    model = made(case)
    asked = ("site", "weights", "bucket", "park", "prefetch", "split", "gather", "reduction")
    where = {name: case[name] for name in asked if name in case}
    rule = UpdateRule(kind, **options)
    plan = plan_of(model, max_norm=norm, groups=groups, ranks=count, moments=len(rule.names), **where)
    how = how or {"transfer": grid.TRANSFERS[case["transfer"]]()}
    how |= {"rule": rule, "max_norm": norm, "groups": groups, "device": device, "scaled": True}
    shared = stowed(model, plan, batches[ranks.rank :: count], **how)
    dist.broadcast_object_list(alone, turn % count)
    assert alone[0] is not None
    return alone[0], shared


def train(ranks: Ranks, rows: Sequence[Row], device: str = "cpu", how: Callable[[], Any] = dict) -> list[str]:
    """What differs, a line for each row; ``how`` makes what ``both`` is given for a row."""
    torch.set_num_threads(1)
    found = []
    for turn, row in enumerate(rows):
        wanted, shared = both(ranks, row, device, turn, **how())
        wanted.losses = shared.losses = []  # each rank knows its own
        wrong = everyones(ranks, differences(wanted, shared))
        found += [f"{title(row)} on rank {rank}: {names}" for rank, names in enumerate(wrong) if names]
    return found


def everyones(ranks: Ranks, mine: Any) -> list[Any]:
    """What each rank has."""
    found: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(found, mine)
    return found


def test_the_bits_of_one_process() -> None:
    """Any two levels meet."""
    assert run_world(3, train, rows_for(3)) == []


def divided_once_of_twice(ranks: Ranks) -> str:
    """What is said of a step of two micro-batches of which one loss is divided by the number of ranks."""
    model = build("llama")
    plan: Any = plan_of(model, ranks=ranks.world_size, accumulation=2)
    optimizer = stow(model, plan, rule=AdamW(), device="cpu")
    batch = batches_on("cpu", "llama", 1)[0]
    with pytest.raises(RuntimeError) as caught:
        with optimizer.scaled_loss() as count:
            (model(**batch).loss / count).backward()
        model(**batch).loss.backward()
        optimizer.step()
    return str(caught.value)


def test_losses_of_a_step_are_all_divided_or_none() -> None:
    assert run_world(3, divided_once_of_twice).startswith("of the losses of one step some were divided")


@pytest.mark.slow
def test_any_three_levels() -> None:
    assert run_world(2, train, rows_for(2, strength=3), timeout_s=600) == []


def summed_fast(ranks: Ranks) -> None:
    """Two trainings with ``reduction: fast``: each sum is nearly the one in the order of ranks, ranks send the bytes
    that the plan has, and the weights are nearly those of plain training.
    """
    called, sent, eps, cut = Counter[str](), dict[str, int](), list[float](), Counter[bool]()
    for name in ("reduce_scatter_tensor", "all_to_all_single"):
        former = getattr(dist, name)

        def counted(to: Any, of: Any, *given: Any, former: Any = former, name: str = name, **named: Any) -> None:
            called[name] += 1
            sent[name] = of.nbytes - to.nbytes
            former(to, of, *given, **named)

        setattr(dist, name, counted)
    sum_to_owners = Shares.sum_to_owners

    def compared(self: Shares, bucket: Any) -> None:
        grad = bucket.memory[Item.GRAD]
        parts = [torch.empty_like(grad) for _ in range(ranks.world_size)]
        dist.all_gather(parts, grad / ranks.world_size)
        spans = [bucket.own(part) for part in parts]
        sum_to_owners(self, bucket)
        cut[bool(bucket.spec.cut)] += 1
        if not bucket.spec.cut:  # of the others spans go to the owners of their first elements, too
            sent[bucket.name] = sent["reduce_scatter_tensor"]
        exact = reduce(torch.add, spans)
        size = reduce(torch.add, [span.double().abs() for span in spans]) * torch.finfo(exact.dtype).eps
        apart = (bucket.own(grad).double() - exact.double()).abs()
        used = torch.zeros_like(grad, dtype=torch.bool)  # between parameters there is whatever was there before
        for index in range(len(bucket.params)):
            bucket.part(used, index).fill_(True)
        eps.append(float(torch.where(bucket.own(used), apart / size.clamp_min(1e-300), 0.0).max()))

    Shares.sum_to_owners = compared  # type: ignore[method-assign]  # in this process, which ends with the test
    wanted, shared = both(ranks, {**CASE, "prefetch": 2, "transfer": "watched", "reduction": "fast"})
    for name, exact in wanted.tensors.items():
        if name.endswith("weight"):
            assert (exact - shared.tensors[name]).abs().max() < 1e-4 * exact.abs().max(), name
    sent.clear()
    model, how = build("llama", dtype=torch.bfloat16), {"site": "device", "reduction": "fast"}
    plan = plan_for(model, max_grad_norm=0.05, world_size=ranks.world_size, zero={"stage": 3}, debug=True, **how)
    stowed(model, plan, tokens("llama", 4)[ranks.rank :: 4], max_norm=0.05, transfer=RaceDetector())
    assert plan.layout is not None
    weights = problem_of(plan.facts, plan.layout, ASSUMED).weights
    planned = {each.name: each.update.exchange_bytes for each in weights if each.update}
    of_buckets = {name: num_bytes for name, num_bytes in sent.items() if name not in called}
    assert of_buckets and of_buckets.items() <= planned.items()
    assert cut[True] and cut[False] and 0 < max(eps) <= 3
    assert called == {"reduce_scatter_tensor": cut.total(), "all_to_all_single": cut[True]}


def test_a_fast_sum_differs_by_its_roundings() -> None:
    """Each of two sums of four numbers rounds three times, by half an eps of at most the sum of their sizes. Of two
    numbers both have the same bits, which is in the table.
    """
    run_world(4, summed_fast)


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
    for weights in ("travelling", "resident"):
        wanted, shared = both(ranks, {**CASE, "bucket": "half", "weights": weights})
        assert wanted.norms == shared.norms
    return everyones(ranks, seen)


def test_no_exchange_depends_on_timing() -> None:
    first, second = run_world(2, orders)
    assert first == second and len(first) > 50


def stowed_on(
    ranks: Ranks, model: nn.Module, site: str = "host", weights: str = "travelling", transfer: Any = None, **wishes: Any
) -> Any:
    """The optimizer of ``model``, whose buckets these ranks share; clipped."""
    plan: Any = plan_of(model, site=site, weights=weights, max_norm=0.05, ranks=ranks.world_size, **wishes)
    rule, how = AdamW(lr=LR, weight_decay=DECAY), {"transfer": transfer, "beside": transfer is not None}
    return stow(model, plan, groups_of(model, 1), rule, device="cpu", **how)


def unlike(model: nn.Module, wanted: Mapping[str, Any]) -> list[str]:
    """Names of weights with other bits; a collective."""
    state = model.state_dict()
    return [name for name, _ in model.named_parameters() if not torch.equal(state[name], wanted[name])]


def finish(optimizer: Any) -> None:
    optimizer.clip_grad_norm_(0.05)
    optimizer.step()
    optimizer.zero_grad()


# --- refused ---------------------------------------------------------------------------------------------------------


def other_path(ranks: Ranks) -> str:
    """The second rank leaves out another block than the first; all blocks have the same size. Nothing is updated."""
    model: Any = build("llama")
    optimizer = stowed_on(ranks, model)
    blocks = model.model.layers
    model.model.layers = nn.ModuleList(block for index, block in enumerate(blocks) if index != 1 + ranks.rank)
    loss = model(**tokens("llama", 1)[0]).loss
    start = [bucket.master if bucket.master is not None else bucket.copy for bucket in optimizer.engine.buckets]
    before = [span.clone() for span in start if span is not None]
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    assert all(torch.equal(*pair) for pair in zip(before, [span for span in start if span is not None], strict=True))
    return str(caught.value)


def other_loss(ranks: Ranks) -> str:
    """The second rank's loss does not depend on the last blocks, which it has run."""
    model: Any = build("llama")
    stowed_on(ranks, model)
    states = model(**tokens("llama", 1)[0], output_hidden_states=True).hidden_states
    with pytest.raises(RuntimeError) as caught:
        states[2 if ranks.rank else -1].sum().backward()
    return str(caught.value)


def alone(ranks: Ranks) -> str:
    """After a step the first rank reads a weight, and then runs forward without gradients while the others train."""
    model: Any = build("llama")
    plan: Any = plan_for(model, max_grad_norm=0.05, world_size=2, zero={"stage": 3}, site="host", debug=True)
    optimizer = stow(model, plan, groups_of(model, 1), device="cpu")
    batch = tokens("llama", 1)[0]
    model(**batch).loss.backward()
    finish(optimizer)
    weight = model.model.layers[3].mlp.up_proj.weight
    if ranks.is_first:
        for read in (weight.norm, partial(getattr, weight, "data"), weight.data_ptr):
            with pytest.raises(RuntimeError, match=r"^model.layers.3.mlp.up_proj.weight is shared over ranks"):
                read()
    with optimizer.present([weight]):
        assert weight.norm() > 0
    with torch.set_grad_enabled(not ranks.is_first), pytest.raises(RuntimeError) as caught:
        model(**batch)
    return str(caught.value)


def apart(ranks: Ranks) -> str:
    """The second rank says that its memory is in a file that is something else where the first one looks for it."""
    former = CommonHost.__init__

    def elsewhere(self: CommonHost, *args: Any) -> None:
        former(self, *args)
        self._token = self._token + ranks.rank

    with patch.object(CommonHost, "__init__", elsewhere), pytest.raises(RuntimeError) as caught:
        stowed_on(ranks, build("llama"), gather="host")
    assert everyones(ranks, str(caught.value)) == [str(caught.value)] * 2
    assert str(caught.value).endswith("write strategies.offload.gather: network")
    return str(caught.value)


SKIPPED = "through the model: at one time rank 0 ran model.layers.2, and rank 1 ran model.layers.1. "


@pytest.mark.parametrize(
    ("what", "line"),
    [
        (other_path, SKIPPED),
        (other_loss, "at one time rank 0 goes back through model.layers.2, and rank 1 did nothing. "),
        (alone, "rank 0 began a forward without gradients, and rank 1 began a forward with gradients. "),
        (apart, "strategies.offload.gather: rank 0 cannot read the memory of another one (another file): "),
    ],
    ids=["other path", "other loss", "alone", "another machine"],
)
def test_refused(what: Callable[[Ranks], str], line: str) -> None:
    assert line in run_world(2, what)


# --- bytes -----------------------------------------------------------------------------------------------------------


def shared_plans() -> Iterator[tuple[nn.Module, Plan]]:
    """Of two ranks; the last one with a table that two units use, and that travels at the least budget."""
    known: dict[str, Any] = {"batch": (2, 8), "max_grad_norm": 0.05, "world_size": 2}
    counted = {each: plan_for(build("llama", dtype=each), **known).facts for each in (torch.float32, torch.bfloat16)}
    for dtype, stage, site, gather in (
        (torch.float32, 3, "streamed", "network"),
        (torch.bfloat16, 2, "host", "host"),
        (torch.bfloat16, 3, "host", "network"),
    ):
        model: Any = build("llama", dtype=dtype)
        options: dict[str, Any] = {"site": site, "gather": gather, "zero": {"stage": stage}}
        options |= {"weights": "streamed", "prefetch": 1} if stage == 3 else {}
        yield model, planned(counted[dtype], **options)
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6}
    make = partial(causal, "llama", **sizes, num_attention_heads=4, tie_word_embeddings=True)
    facts = plan_for(make(), **known).facts
    model, plan = make(), least_of(facts, gather="host", zero={"stage": 3})
    assert plan.layout is not None
    table = plan.layout.buckets[0]
    assert table.units == ("embedding", "head") and not table.resident
    yield model, plan


def moved(ranks: Ranks) -> list[str]:
    """Of which of them a rank copies other bytes over its link, in the third and fourth step, than is predicted."""
    wrong = []
    for number, (model, plan) in enumerate(shared_plans()):
        assert plan.layout is not None
        optimizer, seen, batch = stow(model, plan, device="cpu"), [], tokens("llama", 1)[0]
        transfer = optimizer.engine.transfer
        for _ in range(4):
            before = transfer.bytes_up, transfer.bytes_down
            model(**batch).loss.backward()
            finish(optimizer)
            seen.append((transfer.bytes_up - before[0], transfer.bytes_down - before[1]))
        optimizer.close()
        predicted = traffic(plan.facts, plan.layout, plan.facts.machine.rates or ASSUMED)
        wrong += [] if seen[2] == seen[3] == predicted else [f"plan {number}: {seen[2:]}, not {predicted}"]
    return wrong


def test_bytes_over_the_link_of_a_rank_are_those_that_are_predicted() -> None:
    assert run_world(2, moved) == []
