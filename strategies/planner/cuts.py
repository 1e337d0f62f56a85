"""Cut a model into the parts of a pipeline, and say which stage holds which parts. Pure.

The slowest part decides how long a micro-batch takes: the cut has the least longest part of all cuts, and of several
it is the one whose parts are longest at the front, where fewer weights wait for the last micro-batch. The head of a
large vocabulary counts for several blocks, and the embedding for nothing.

A part is a run of blocks, with the embedding in front of the first and the head behind the last. Most schedules give
every stage one part. ``interleaved`` and ``interleaved_zero_bubble`` give it two, in turn (0 1 0 1); ``zbv`` and
``dualpipev`` two, there and back (0 1 1 0). Refused: fewer blocks than parts, and numbers of blocks that do not add up
to the model's.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from enum import Enum
from itertools import accumulate

from deepstow.strategies.core.facts import Unit, UnitKind
from deepstow.strategies.core.grid import Cut

DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")  # Hugging Face's keys for the number of blocks


class Schedule(Enum):
    """In which order a stage runs forwards and backwards; the names of ``torch.distributed.pipelining``, shortened."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    INTERLEAVED_ZERO_BUBBLE = "interleaved_zero_bubble"
    ZBV = "zbv"
    DUALPIPEV = "dualpipev"

    @property
    def parts_per_stage(self) -> int:
        return 1 if self in (Schedule.GPIPE, Schedule.ONE_F_ONE_B) else 2

    @property
    def returns(self) -> bool:
        """Whether the second parts go back from the last stage to the first, which then has both ends."""
        return self in (Schedule.ZBV, Schedule.DUALPIPEV)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed apart from those of inputs."""
        return self in (Schedule.INTERLEAVED_ZERO_BUBBLE, Schedule.ZBV, Schedule.DUALPIPEV)

    def stage_of(self, part: int, stages: int) -> int:
        """The stage that holds ``part``."""
        turn, place = divmod(part, stages)
        return stages - 1 - place if self.returns and turn else place

    def least_micro_batches(self, stages: int) -> int:
        """How many micro-batches a step must have, at least."""
        return {Schedule.ONE_F_ONE_B: stages, Schedule.DUALPIPEV: 2 * stages}.get(self, 1)

    def in_rounds(self, micro_batches: int, stages: int) -> bool:
        """Whether so many micro-batches fill all rounds of a schedule whose stages take their parts in turn."""
        takes_turns = self in (Schedule.INTERLEAVED, Schedule.INTERLEAVED_ZERO_BUBBLE)
        return not takes_turns or micro_batches % max(1, micro_batches // stages) == 0

    def takes(self, micro_batches: int, stages: int) -> bool:
        """Whether a step can have so many micro-batches."""
        return micro_batches >= self.least_micro_batches(stages) and self.in_rounds(micro_batches, stages)

    def in_flight(self, part: int, stages: int, micro_batches: int) -> int:
        """At most so many micro-batches have been through the forward of ``part`` and not yet through its backward."""
        if self is Schedule.GPIPE:
            return micro_batches
        count = stages * self.parts_per_stage
        return min(micro_batches, count - part if self.parts_per_stage == 1 else count)


def cut(units: Sequence[Unit], schedule: Schedule, stages: int, blocks: Sequence[int] | None = None) -> Cut:
    """Cut a model.

    Args:
        blocks: how many blocks each part has; None: so that parts take equally long.

    Raises:
        ValueError: it cannot be cut so; the message says what can be.
    """
    names = [unit.name for unit in units if unit.kind is UnitKind.BLOCK]
    count = stages * schedule.parts_per_stage
    if why := complaint(len(names), schedule, stages, blocks):
        raise ValueError(why)
    blocks = blocks or _balanced(_costs(units), count)
    ends = {kind: tuple(unit.name for unit in units if unit.kind is kind) for kind in UnitKind}
    parts, start = [], 0
    for number in blocks:
        parts.append(tuple(names[start : start + number]))
        start += number
    parts[0] = (*ends[UnitKind.EMBEDDING], *parts[0])
    parts[-1] = (*parts[-1], *ends[UnitKind.HEAD])
    holders = tuple(schedule.stage_of(part, stages) for part in range(count))
    return Cut(tuple(parts), holders, schedule.value)


def complaint(depth: int, schedule: Schedule, stages: int, blocks: Sequence[int] | None) -> str:
    """Why a model of ``depth`` blocks cannot be cut so; empty if it can."""
    count = stages * schedule.parts_per_stage
    if depth < count:
        return f"the model has {depth} blocks, and {schedule.value} on {stages} stages takes {count} parts"
    if blocks is not None and (len(blocks) != count or sum(blocks) != depth or min(blocks) < 1):
        return f"must be {count} numbers of at least 1 that add up to the model's {depth} blocks"
    return ""


def work(units: Sequence[Unit]) -> dict[str, int]:
    """By unit, the weights that products read: none in the embedding, a head's whether it is tied or not."""
    table = sum(unit.num_params for unit in units if unit.kind is UnitKind.EMBEDDING)
    floor = {UnitKind.EMBEDDING: 0, UnitKind.BLOCK: 0, UnitKind.HEAD: table}
    return {
        unit.name: 0 if unit.kind is UnitKind.EMBEDDING else max(unit.num_params, floor[unit.kind]) for unit in units
    }


def _costs(units: Sequence[Unit]) -> list[int]:
    """What each block costs; the last one has the head's in addition."""
    by_name = work(units)
    costs = [by_name[unit.name] for unit in units if unit.kind is UnitKind.BLOCK]
    costs[-1] += sum(by_name[unit.name] for unit in units if unit.kind is UnitKind.HEAD)
    return costs


def _balanced(costs: Sequence[int], parts: int) -> list[int]:
    """Numbers of consecutive costs in each part, such that the largest sum is least; the first part as long as that
    allows, then the second.
    """
    if parts == 1:
        return [len(costs)]
    largest_sum = bisect_left(range(sum(costs)), True, key=lambda most: _fit(costs, parts, most))
    first = bisect_right(list(accumulate(costs)), largest_sum, hi=len(costs) - parts + 1)
    return [first, *_balanced(costs[first:], parts - 1)]


def _fit(costs: Sequence[int], parts: int, most: int) -> bool:
    """Whether so many parts are enough if none may cost more than ``most``."""
    room = 0
    for cost in costs:
        if cost > room:
            parts, room = parts - 1, most
        room -= cost
        if parts < 0 or room < 0:
            return False
    return True
