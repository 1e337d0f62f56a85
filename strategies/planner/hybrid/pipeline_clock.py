"""When each stage of a pipeline runs which micro-batch: an event simulation of 1F1B.

With s stages to come, a stage runs s forwards to fill the pipeline, then one forward and one backward in turn. A
forward waits for the activations of the stage before, a backward for the gradients of the stage after. They are sent
while stages compute, one after the other in each direction of each boundary.

Orders do not depend on times, so an end is a maximum of sums of durations: what gets shorter makes no end later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deepstow.strategies.planner.cuts import Schedule


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Of one micro-batch in one stage, and of sending its activations on, or as many gradients back the same way."""

    forward: float
    backward: float
    send: float = 0.0  # to the next stage; the last one sends nothing


def order(stage: int, stages: int, micro_batches: int) -> Iterator[tuple[bool, int]]:
    """The tasks of a stage: whether it is a backward, and the micro-batch."""
    ahead = Schedule.ONE_F_ONE_B.in_flight(stage, stages, micro_batches)
    for number in range(micro_batches + ahead - 1):
        if number < micro_batches:
            yield False, number
        if number >= ahead - 1:
            yield True, number - ahead + 1


def last_backwards(stages: Sequence[StageSeconds], micro_batches: int) -> list[float]:
    """Per stage, when its last backward ends, in seconds from the start of the step."""
    count = len(stages)
    if count == 1:
        return [micro_batches * (stages[0].forward + stages[0].backward)]
    orders = [list(order(index, count, micro_batches)) for index in range(count)]
    at, clocks = [0] * count, [0.0] * count
    # When activations and gradients of each micro-batch are there; those of the first and last stage always are.
    there: list[list[list[float]]] = [[[], []] for _ in stages]
    there[0][0] = [0.0] * micro_batches
    sent = [[0.0, 0.0] for _ in stages]  # when the link to the next stage is free, and the one to the stage before
    waiting = list(range(count))
    while waiting:
        index = waiting.pop()
        arrived = there[index]
        own = stages[index]
        clock = clocks[index]
        tasks, position = orders[index], at[index]
        woken = set()
        while position < len(tasks):
            backward, number = tasks[position]
            if backward and index == count - 1:
                ready = clock
            elif number < len(arrived[backward]):
                ready = arrived[backward][number]
            else:
                break
            clock = max(clock, ready) + (own.backward if backward else own.forward)
            other = index - 1 if backward else index + 1
            if 0 <= other < count:
                free = sent[index]
                free[backward] = max(free[backward], clock) + (stages[other].send if backward else own.send)
                there[other][backward].append(free[backward])
                woken.add(other)
            position += 1
        at[index], clocks[index] = position, clock
        waiting += [other for other in woken if other not in waiting]
    assert all(position == len(tasks) for position, tasks in zip(at, orders, strict=True)), "stages wait for each other"
    return clocks


def least_seconds(stages: Sequence[StageSeconds], micro_batches: int) -> float:
    """No schedule is faster: a stage waits for the first micro-batch, does all, and the last one has to go back."""
    found = before = 0.0
    for stage in stages:
        own = stage.forward + stage.backward
        found = max(found, before + micro_batches * own)
        before += own + 2 * stage.send
    return found
