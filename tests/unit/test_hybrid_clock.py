"""The clock of a pipeline: equal stages by the closed form, what is in flight, and what must hold for any stages."""

from dataclasses import replace
from random import Random

from deepstow.strategies.planner.cuts import Schedule
from deepstow.strategies.planner.hybrid.pipeline_clock import StageSeconds, last_backwards, least_seconds, order


def test_equal_stages_take_the_closed_form_and_have_so_many_in_flight() -> None:
    """Stage i of p has p - i micro-batches at most; each runs every micro-batch forward, then backward."""
    for stages in range(1, 6):
        for micro_batches in (1, 2, 3, 4, 5, 8, 13):
            same = [StageSeconds(1.0, 2.0)] * stages
            assert last_backwards(same, micro_batches)[0] == (micro_batches + stages - 1) * 3
            assert least_seconds(same, micro_batches) == (micro_batches + stages - 1) * 3
            for stage in range(stages):
                tasks = list(order(stage, stages, micro_batches))
                inside, most = set(), 0
                for backward, number in tasks:
                    inside = inside - {number} if backward else inside | {number}
                    most = max(most, len(inside))
                assert most == Schedule.ONE_F_ONE_B.in_flight(stage, stages, micro_batches)
                assert most == min(micro_batches, stages - stage)
                assert len(tasks) == len(set(tasks)) == 2 * micro_batches and not inside


def test_a_pipeline_of_unlike_stages_by_hand() -> None:
    """Two stages, two micro-batches, sending takes 1. Forwards end at 1 and 2; the second stage has the first at 2."""
    stages = [StageSeconds(1.0, 1.0, 1.0), StageSeconds(3.0, 2.0)]
    # Second stage: forward 2-5, backward 5-7, forward 7-10, backward 10-12; first: backwards 8-9 and 13-14.
    assert last_backwards(stages, 2) == [14.0, 12.0]


def test_a_slow_boundary_sends_one_after_the_other() -> None:
    """Activations are there at 4, 7 and 10; gradients, made at 9, 12 and 14, are back at 12, 15 and 18."""
    stages = [StageSeconds(1.0, 1.0, 3.0), StageSeconds(1.0, 1.0), StageSeconds(1.0, 1.0)]
    assert last_backwards(stages, 3) == [19.0, 14.0, 13.0]


def test_no_schedule_is_faster_than_the_bound_and_nothing_faster_makes_it_slower() -> None:
    slower = 0
    for seed in range(40):
        random = Random(f"stages {seed}")
        count = random.randint(2, 6)
        most = (3.0, 3.0, 0.5)
        stages = [StageSeconds(*(random.uniform(one / 6, one) for one in most)) for _ in range(count)]
        micro_batches = random.randint(1, 12)
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
