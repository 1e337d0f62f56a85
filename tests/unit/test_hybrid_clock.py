"""The clock of a pipeline: equal stages by the closed form, what is in flight, and what must hold for any stages."""

from dataclasses import replace
from random import Random

import pytest

from strategies.planner.cuts import Schedule
from strategies.planner.hybrid.pipeline_clock import (
    StageSeconds,
    last_backwards,
    least_seconds,
    order,
)

SCHEDULES = (Schedule.ONE_F_ONE_B, Schedule.GPIPE)
SIZES = [(stages, micro_batches) for stages in range(1, 6) for micro_batches in (1, 2, 3, 4, 5, 8, 13)]


def random_stages(seed: int) -> tuple[list[StageSeconds], int]:
    random = Random(f"stages {seed}")
    count = random.randint(2, 6)
    stages = [StageSeconds(*(random.uniform(0.5, 3) for _ in range(2)), random.uniform(0, 0.5)) for _ in range(count)]
    return stages, random.randint(1, 12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equal_stages_take_the_closed_form(schedule: Schedule) -> None:
    for stages, micro_batches in SIZES:
        same = [StageSeconds(1.0, 2.0)] * stages
        ends = last_backwards(same, micro_batches, schedule)
        assert ends[0] == (micro_batches + stages - 1) * 3 == least_seconds(same, micro_batches)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_micro_batches_in_flight(schedule: Schedule) -> None:
    """Stage i of p has p - i at most under 1F1B, and GPipe all; each runs every micro-batch forward, then backward."""
    for stages, micro_batches in SIZES:
        for stage in range(stages):
            tasks = list(order(stage, stages, micro_batches, schedule))
            inside, most = set(), 0
            for backward, number in tasks:
                inside = inside - {number} if backward else inside | {number}
                most = max(most, len(inside))
            assert most == schedule.in_flight(stage, stages, micro_batches)
            expected = micro_batches if schedule is Schedule.GPIPE else min(micro_batches, stages - stage)
            assert most == expected and len(tasks) == len(set(tasks)) == 2 * micro_batches and not inside


def test_a_pipeline_of_unlike_stages_by_hand() -> None:
    """Two stages, two micro-batches, sending takes 1. Forwards end at 1 and 2; the second stage has the first at 2."""
    stages = [StageSeconds(1.0, 1.0, 1.0), StageSeconds(3.0, 2.0)]
    # Second stage: forward 2-5, backward 5-7, forward 7-10, backward 10-12; first: backwards 8-9 and 13-14.
    assert last_backwards(stages, 2) == [14.0, 12.0]
    # GPipe: forwards 2-5 and 5-8, backwards 8-10 and 10-12.
    assert last_backwards(stages, 2, Schedule.GPIPE) == [14.0, 12.0]


def test_a_slow_boundary_sends_one_after_the_other() -> None:
    """Activations arrive at 4, 7 and 10, gradients at 15, 18 and 21."""
    assert last_backwards([StageSeconds(1.0, 1.0, 3.0), StageSeconds(1.0, 1.0)], 3, Schedule.GPIPE) == [22.0, 14.0]


def test_no_schedule_is_faster_than_the_bound_and_nothing_faster_makes_it_slower() -> None:
    slower = 0
    for seed in range(40):
        stages, micro_batches = random_stages(seed)
        ends = last_backwards(stages, micro_batches)
        assert max(ends) == ends[0] >= least_seconds(stages, micro_batches) * (1 - 1e-12)
        for index, stage in enumerate(stages):
            for name in ("forward", "backward", "send"):
                faster = [*stages]
                faster[index] = replace(stage, **{name: getattr(stage, name) * 0.7})
                after = last_backwards(faster, micro_batches)
                assert after[0] <= ends[0], (seed, index, name)
                slower += after[0] < ends[0]
    assert slower > 80
