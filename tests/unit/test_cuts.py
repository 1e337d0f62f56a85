"""Cutting a model into parts: the least longest part, the stage of each, its facts; and the grid of ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from random import Random

import pytest

from deepstow.strategies.core.compose import in_order, refusals, requirements_of
from deepstow.strategies.core.facts import Facts, Param, Tier, Unit, UnitKind
from deepstow.strategies.core.grid import Cell, Grid
from deepstow.strategies.core.plan import Kind, Plan, Reserve
from deepstow.strategies.core.protocol import Refusal, Requirement, Strategy
from deepstow.strategies.core.registry import find
from deepstow.strategies.planner.cuts import Schedule, cut, work
from deepstow.strategies.report.plan_table import grid_table
from deepstow.trainer.run.checkpoints.saving import estimated_bytes
from tests.helpers.fakes import block, facts, refusals_of


def model(*sizes: int, table: int = 7) -> tuple[Unit, ...]:
    """An embedding of ``table`` elements, blocks of these sizes, and a head tied to it."""
    blocks = [block(index, size) for index, size in enumerate(sizes)]
    return (Unit("embedding", UnitKind.EMBEDDING, table, table), *blocks, Unit("head", UnitKind.HEAD, 1, 1))


def test_no_other_cut_has_a_shorter_longest_part() -> None:
    draw = Random(0)
    for _ in range(200):
        units = model(*(draw.randint(1, 9) for _ in range(draw.randint(3, 7))), table=draw.randint(0, 9))
        stages = draw.randint(2, 3)
        costs = work(units)

        def longest(parts: list[list[str]], costs: dict[str, int] = costs) -> int:
            return max(sum(costs[name] for name in part) for part in parts)

        names = [unit.name for unit in units]
        every = combinations(range(2, len(names) - 1), stages - 1)  # a block in front of each border and behind it
        cuts = ([0, *borders, len(names)] for borders in every)
        best = min(longest([names[i:j] for i, j in pairwise(at)]) for at in cuts)
        found = cut(units, Schedule.GPIPE, stages)
        assert longest([list(part) for part in found.parts]) == best
        assert [name for part in found.parts for name in part] == names


def test_a_head_counts_as_much_as_its_products() -> None:
    parts = cut(model(10, 10, 10, 10, table=20), Schedule.ONE_F_ONE_B, 2).parts
    assert parts == (("embedding", "layers.0", "layers.1", "layers.2"), ("layers.3", "head"))


def test_stages_of_parts() -> None:
    four = model(1, 1, 1, 1)
    assert cut(four, Schedule.INTERLEAVED, 2).stages == (0, 1, 0, 1)
    assert cut(four, Schedule.ZBV, 2).stages == (0, 1, 1, 0)
    assert cut(four, Schedule.ZBV, 2).of_stage(0) == [0, 3]


def test_cuts_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="the model has 3 blocks, and zbv on 2 stages takes 4 parts"):
        cut(model(1, 1, 1), Schedule.ZBV, 2)
    for blocks in ([1, 1, 1], [2, 2], [0, 3]):
        with pytest.raises(ValueError, match="must be 2 numbers of at least 1 that add up to the model's 3 blocks"):
            cut(model(1, 1, 1), Schedule.GPIPE, 2, blocks)
    assert [len(part) for part in cut(model(1, 1, 1), Schedule.GPIPE, 2, [2, 1]).parts] == [3, 2]


def pipeline(**options: object) -> Strategy:
    return find("pipeline").model_validate({"stages": 2, **options})


def known(accumulation: int, rank_count: int = 2) -> Facts:
    units = tuple(replace(unit, saved_bytes=100) for unit in model(10, 10, 10, table=7))
    params = [Param(f"{unit.name}.weight", unit.name, unit.num_params, "float32", 0) for unit in units]
    params[0] = replace(params[0], users=("head",))
    made = facts(*units, world_size=rank_count, accumulation=accumulation, stages=2)
    return replace(made, params=tuple(params))


def test_the_facts_of_a_stage() -> None:
    first, last = (pipeline().narrowed(known(8), rank) for rank in (0, 1))
    assert [unit.name for unit in first.units] == ["embedding", "layers.0", "layers.1"]
    assert first.run.in_flight == 2, "1f1b: two micro-batches are under way in stage 0"
    assert last.run.in_flight == 1
    peaks = [Plan.baseline(replace(first, run=replace(first.run, in_flight=many))).peak(Tier.DEVICE) for many in (1, 2)]
    assert peaks[1] - peaks[0] == 3 * 100, "three units wait for their backward a second time"
    assert last.units[-1].num_params == 1 + 7, "the head has a copy of the tied table"
    assert pipeline(schedule="gpipe").narrowed(known(8), 1).run.in_flight == 8
    assert first.loaded_bytes == 4 * first.num_params < known(8).loaded_bytes, "each rank loads its stage"


def test_a_stowed_stage_has_what_all_micro_batches_under_way_keep() -> None:
    first = pipeline().narrowed(known(8), 0)
    first = replace(first, run=replace(first.run, micro_batch=1, sequence=2, hidden_size=4))
    plan = Plan.baseline(first)
    received = [each for each in pipeline().decide(first, plan) if isinstance(each, Reserve)]
    alone = Plan.baseline(replace(first, run=replace(first.run, in_flight=1))).saved_peak()
    kept = sum(unit.waiting for unit in plan.kept())
    assert received[0].num_bytes > 0 < kept
    assert plan.amend(received, by="pipeline").saved_peak() == received[0].num_bytes + kept + alone


def test_a_checkpoint_of_stages_takes_as_much_as_one_of_the_whole_model() -> None:
    whole = estimated_bytes(Plan.baseline(known(8)), adapters=False)
    for rank in (0, 1):
        stage = estimated_bytes(Plan.baseline(pipeline().narrowed(known(8), rank)), adapters=False)
        assert abs(stage - whole) <= 8, "rounded per kind of tensor"


def test_stages_of_tensor_ranks() -> None:
    """Both are counted: of the whole model what it has, and weights in the dtype of plain training."""
    divided = known(8)
    divided = replace(divided, run=replace(divided.run, tensor=2, world_size=4, model_params=1000, model_flops=2000))
    run = pipeline().narrowed(divided, 0).run
    assert (run.model_params, run.model_flops) == (1000, 2000)
    chosen = {"pipeline": pipeline(), "tensor": find("tensor").model_validate({"degree": 2})}
    assert requirements_of(chosen) == {Requirement.PARAMETERS, Requirement.DEEPSPEED, Requirement.BLOCK_TIMES}
    estimated = estimated_bytes(Plan.baseline(pipeline().narrowed(divided, 0)), adapters=False)
    assert abs(estimated - 1000 * 4 * (1 + divided.run.moments)) <= 8


def refused(strategy: Strategy, made: Facts, **others: Strategy) -> list[str]:
    return refusals_of("pipeline", {"pipeline": strategy, **others}, made.run)


def test_copies_divide_moments_and_the_engine_of_offload_keeps_its_own() -> None:
    first = find("zero").model_validate({"stage": 1})
    made = in_order({"pipeline": pipeline(), "zero": first})
    assert [*made] == ["pipeline"]
    whole = known(8)
    facts = replace(whole, run=replace(whole.run, stages=2, world_size=8, accumulation=4))
    stage = made["pipeline"].narrowed(facts, 0)
    alone, shared = (
        Plan.baseline(stage).amend(each.decide(stage, Plan.baseline(stage)), by="pipeline")
        for each in (pipeline(), made["pipeline"])
    )
    assert shared.divides(Kind.MOMENT) and not alone.divides(Kind.MOMENT)
    assert 4 * shared.total(Kind.MOMENT) - alone.total(Kind.MOMENT) in range(4 * 4 * len(stage.units))
    assert all(shared.total(kind) == alone.total(kind) for kind in Kind if kind is not Kind.MOMENT)
    beside = in_order({"pipeline": pipeline(), "zero": first, "offload": find("offload").model_validate({})})
    assert beside["pipeline"]._zero == 0 and beside["offload"]._stage == 1


def test_refusals() -> None:
    """Numbers and optimizers; what does not go together is in docs/compatibility.md."""
    first, offload = find("zero").model_validate({"stage": 1}), find("offload").model_validate({})
    assert not refused(pipeline(), known(8), zero=first, offload=offload) + refused(pipeline(), known(8), zero=first)
    run = replace(known(8).run, stages=2, world_size=4, accumulation=4)
    for optim, count in (("adafactor", 1), ("adagrad", 1), ("adamw_torch", 0)):
        found = list(refusals({"pipeline": pipeline(), "zero": first}, replace(run, optim=optim)))
        assert [each.key for each in found] == ["training.optim"] * count
    run, inside = replace(known(8).run, max_grad_norm=0.0), find("offload").model_validate({"update_in_backward": True})
    (line,) = refusals_of("offload", {"offload": inside, "pipeline": pipeline()}, run)
    assert "agree on a step first" in line
    assert not refusals_of("offload", {"offload": inside}, replace(run, stages=1, world_size=1))
    (line,) = refused(pipeline(), known(1))
    assert line == "training.gradient_accumulation_steps = 1: 1f1b on 2 stages takes at least 2 micro-batches"
    (line,) = refused(pipeline(schedule="interleaved"), known(5))
    assert line.endswith("interleaved on 2 stages takes full rounds; write 4 or 6")
    assert refused(pipeline(schedule="dualpipev"), known(4)) == []
    with pytest.raises(Refusal, match=r"strategies.pipeline.blocks = \[3, 1\]"):
        pipeline(blocks=[3, 1]).narrowed(known(8), 0)


def test_groups_of_eight_ranks() -> None:
    grid = Grid(stages=2, replicas=2, tensor=2)
    assert grid.groups("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.groups("replica") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.groups("stage") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.cell(6) == Cell(stage=1, replica=1, tensor=0)
    uneven = Grid(stages=2, replicas=3, tensor=4)
    assert [uneven.rank(uneven.cell(rank)) for rank in range(24)] == list(range(24))
    assert [len(uneven.groups(axis)[0]) for axis in ("stage", "replica", "tensor")] == [2, 3, 4]
    assert str(grid) == "pipeline 2 x data 2 x tensor 2"


def test_the_table_of_the_grid() -> None:
    assert grid_table(Grid(stages=2, replicas=2, tensor=2)) == [
        "ranks: pipeline 2 x data 2 x tensor 2",
        "         data 0  data 1",
        "-----------------------",
        "stage 0  0 = 1   2 = 3",
        "stage 1  4 = 5   6 = 7",
        "ranks joined by = exchange in every layer; stages send hidden states on, and gradients back; ranks "
        "of a row add up gradients once per step",
    ]
    assert grid_table(Grid(replicas=8)) == []
    assert len(grid_table(Grid(64, 16, 1))) < 25
