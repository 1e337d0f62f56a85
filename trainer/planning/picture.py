"""The plan as a picture: the simulated step over time above the device's memory, or the memory of a rank as bars; or a
simulated step above a measured one.

The memory curve is the arena and what forward has saved so far, during the ticks of the first pass. Without a simulated
step (nothing is stowed, or the machine's rates are unknown): one bar per tier that adds up to the predicted peak of a
rank. The red line is the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from deepstow.strategies.core.plan import Kind, Plan, Tier, When
from deepstow.strategies.core.sizes import human
from deepstow.strategies.planner.simulate import TraceEvent
from deepstow.strategies.planner.step_cost import StepCost
from deepstow.strategies.planner.tasks import Resource
from deepstow.strategies.report.full_report import headline

WIDTH, ROW, LEFT, MARGIN, CURVE = 1400, 54, 110, 24, 190
TITLE, AXIS, BAR = 78, 34, 90
INK, GRID, ARENA, SAVED, RED = (40, 40, 40), (225, 225, 225), (120, 144, 176), (186, 200, 220), (200, 40, 40)
# By the first word of an event's label.
COLOURS = {
    "forward": (86, 140, 90),
    "backward": (60, 100, 150),
    "update": (196, 120, 40),
    "gradient": (150, 90, 150),
    "state": (190, 160, 60),
    "weight": (110, 160, 190),
    "new": (110, 160, 190),
}
PARTS = ((60, 100, 150), (196, 120, 40), (190, 160, 60), (150, 90, 150), (86, 140, 90), (170, 170, 170))
FONT = ImageFont.load_default(15)
ALIKE = {"parked": "gradient", "arriving": "gradient", "moments": "state", "master": "state"}  # in measured labels
Limit = tuple[int, str]  # bytes of the device, and what they are called
Pen = ImageDraw.ImageDraw


def draw(plan: Plan, cost: StepCost | None, path: Path, *, model: str, budget: int | None = None) -> None:
    """Write the picture of a ``model`` of this name to ``path``. ``budget``: bytes of the device to be used, None:
    all that it has. Raises OSError or ValueError: the file cannot be written, or its suffix is no picture's.
    """
    seldom = (Resource.NET, Resource.DISK)
    shown = [] if cost is None else [each for each in Resource if each not in seldom or cost.outcome.busy[each]]
    height = 2 * (BAR + MARGIN) if cost is None else ROW * len(shown) + CURVE + AXIS + 3 * MARGIN
    image = Image.new("RGB", (WIDTH, TITLE + MARGIN + height), "white")
    pen = ImageDraw.Draw(image)
    limit = (budget, "budget") if budget is not None else (plan.facts.machine.device_bytes, "device has")
    for index, line in enumerate(title(plan, cost, model)):
        pen.text((MARGIN, 10 + 20 * index), line, INK, FONT)
    if cost is None:
        _bars(pen, plan, limit)
    else:
        _step(pen, plan, cost, shown, limit)
    image.save(path)


def beside(
    plan: Plan, cost: StepCost | None, seconds: float, measured: Sequence[TraceEvent], path: Path, *, model: str
) -> None:
    """Write the picture of the simulated step above one that was ``measured`` and took so many ``seconds``."""
    steps = [("measured", seconds, measured)]
    if cost is not None:
        steps.insert(0, ("simulated", cost.seconds, cost.outcome.events))
    used = [each for each in Resource if any(event.resource is each for _, _, some in steps for event in some)]
    longest, height = max(length for _, length, _ in steps), ROW * len(used) + AXIS
    image = Image.new("RGB", (WIDTH, TITLE + height * len(steps) + AXIS + MARGIN), "white")
    pen = ImageDraw.Draw(image)
    lengths = ", ".join(f"{name} step {length:.3g} s" for name, length, _ in steps)
    for index, line in enumerate([title(plan, None, model)[0], lengths]):
        pen.text((MARGIN, 10 + 20 * index), line, INK, FONT)

    def at(time: float) -> float:
        return LEFT + max(0.0, min(longest, time)) * (WIDTH - LEFT - MARGIN) / longest

    for number, (name, _, events) in enumerate(steps):
        top = TITLE + height * number
        pen.text((MARGIN, top - 20), name, INK, FONT)
        _resources(pen, events, used, at, top, longest)
    _legend(pen, TITLE + height * len(steps))
    image.save(path)


def title(plan: Plan, cost: StepCost | None, model: str) -> list[str]:
    """Model, card and ranks; the step; what is busy in it."""
    run, facts = plan.facts.run, plan.facts
    ranks = f"{run.grid.words} on {facts.machine.name}"
    about = f"{model}, {(run.model_params or facts.num_params) / 1e9:.3g} B parameters, {run.precision.value}, {ranks}"
    about += f", {run.tokens_per_step:,} tokens per step"
    if cost is None:
        return [about, "predicted peak of one rank; no simulated step: nothing is stowed, or rates are unknown"]
    busy, hidden = cost.outcome.busy, cost.outcome.hidden
    others = [each for each in Resource if each is not Resource.COMPUTE and busy[each] > 0]
    parts = [f"{each.value} {busy[each]:.3g} s ({hidden[each] / busy[each]:.0%} hidden)" for each in others]
    return [about, headline(plan, cost), f"busy beside compute: {', '.join(parts) or 'nothing'}"]


def axis(seconds: float) -> list[float]:
    """At most ten round times from 0 to ``seconds``, evenly."""
    power = 10.0 ** math.floor(math.log10(seconds / 10))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if seconds / (power * factor) <= 10)
    return [step * index for index in range(int(seconds / step) + 1)]


def _step(pen: Pen, plan: Plan, cost: StepCost, shown: Sequence[Resource], limit: Limit) -> None:
    """Resources (network and disk only if they are used), memory, and the time below both."""
    across = (WIDTH - LEFT - MARGIN) / cost.seconds

    def at(seconds: float) -> float:
        return LEFT + max(0.0, min(cost.seconds, seconds)) * across

    _resources(pen, cost.outcome.events, shown, at, TITLE, cost.seconds, MARGIN + CURVE)
    floor = TITLE + ROW * len(shown) + MARGIN + CURVE
    _legend(pen, floor + AXIS)
    _memory(pen, plan, cost, at, floor, limit)


def _resources(
    pen: Pen,
    events: Sequence[TraceEvent],
    shown: Sequence[Resource],
    at: Callable[[float], float],
    top: int,
    seconds: float,
    below: int = 0,
) -> None:
    """A row for each resource from ``top`` on, and the time that much ``below`` them."""
    floor = top + ROW * len(shown) + below
    for time in axis(seconds):
        pen.line((at(time), top, at(time), floor + 5), GRID)
        pen.text((at(time) - 10, floor + 8), f"{time:.3g} s", INK, FONT)
    for row, resource in enumerate(shown):
        here = top + row * ROW
        pen.text((MARGIN, here + 14), resource.value, INK, FONT)
        pen.rectangle((LEFT, here + 4, WIDTH - MARGIN, here + ROW - 8), outline=GRID)
        for event in events:
            if event.resource is resource:
                word, place = event.label.split()[0], (at(event.start), here + 5, at(event.end), here + ROW - 9)
                wide = place[2] - place[0] > 3  # narrower ones would be all outline
                colour = COLOURS.get(ALIKE.get(word, word), INK)
                pen.rectangle(place, fill=colour, outline="white" if wide else None)


def _legend(pen: Pen, top: int) -> None:
    for index, (word, colour) in enumerate(list(COLOURS.items())[:-1]):
        left = LEFT + 150 * index
        pen.rectangle((left, top, left + 12, top + 12), fill=colour)
        pen.text((left + 18, top - 4), word, INK, FONT)
    said = "time in one step"
    pen.text((WIDTH - MARGIN - FONT.getlength(said), top - 4), said, INK, FONT)


def _memory(pen: Pen, plan: Plan, cost: StepCost, at: Callable[[float], float], floor: int, limit: Limit) -> None:
    """Arena and saved tensors during the ticks of the first pass, and the line that they may not cross."""
    assert plan.addresses is not None
    arena, peak, (most, called) = plan.addresses.num_bytes(Tier.DEVICE), plan.peak(Tier.DEVICE), limit
    shown = most if peak * 4 > most else peak  # a far line would flatten the curve
    scale = (CURVE - 30) / (1.08 * max(shown, peak))

    def level(num_bytes: int) -> float:
        return floor - num_bytes * scale

    pen.rectangle((LEFT, level(arena), WIDTH - MARGIN, floor), fill=ARENA)
    for start, end, saved in saved_over_time(plan, cost):
        pen.rectangle((at(start), level(arena + saved), at(end), level(arena)), fill=SAVED)
    pen.line((LEFT, level(shown), WIDTH - MARGIN, level(shown)), RED, 2)
    far = "" if shown == most else f", far above the predicted peak {human(peak)}"
    pen.text((LEFT + 4, level(shown) - 20), f"{called} {human(most)}{far}", RED, FONT)
    pen.text((LEFT + 4, floor - 20), f"arena {human(arena)}", INK, FONT)
    for line, word in enumerate(("device", "memory")):
        pen.text((MARGIN, floor - CURVE // 2 + 18 * line), word, INK, FONT)


def parts(plan: Plan, tier: Tier) -> Iterator[tuple[str, int]]:
    """What one rank holds at ``tier``, by owner; together its predicted peak."""
    standing = [(kind.value, plan.total(kind, tier)) for kind in Kind if kind is not Kind.GRAD]
    standing.append(("buffers", sum(one.num_bytes for one in plan.reserves(tier) if one.when is When.ALWAYS)))
    if tier is Tier.HOST:
        standing.append(("Python and libraries", plan.facts.machine.runtime_host_bytes))
    yield from standing
    yield "gradients and saved tensors, at the peak", plan.peak(tier) - sum(size for _, size in standing)


def _bars(pen: Pen, plan: Plan, limit: Limit) -> None:
    """One bar per tier, with its parts and the line that it may not cross."""
    for index, tier in enumerate(Tier):
        has, name = limit if tier is Tier.DEVICE else (plan.facts.machine.host_bytes, "host has")
        peak, top = plan.peak(tier), TITLE + MARGIN // 2 + index * (BAR + MARGIN)
        scale = (WIDTH - LEFT - 2 * MARGIN) / max(has, peak, 1)
        pen.text((MARGIN, top + 14), tier.value, INK, FONT)
        left, words = float(LEFT), LEFT
        for colour, (owner, size) in zip(PARTS, parts(plan, tier), strict=False):
            pen.rectangle((left, top, left + size * scale, top + ROW - 8), fill=colour)
            left += size * scale
            if size:
                text = f"{owner} {human(size)}"
                pen.rectangle((words, top + ROW, words + 12, top + ROW + 12), fill=colour)
                pen.text((words + 18, top + ROW - 4), text, INK, FONT)
                words += 40 + int(FONT.getlength(text))
        line = LEFT + has * scale
        pen.line((line, top - 6, line, top + ROW - 2), RED, 2)
        pen.text((LEFT, top + ROW + 16), f"peak {human(peak)}, {name} {human(has)}", RED, FONT)


def saved_over_time(plan: Plan, cost: StepCost) -> list[tuple[float, float, int]]:
    """(start, end, bytes saved) for each tick in the picture: saved by forward, freed by backward."""
    saved = {unit.name: plan.saved_bytes(unit.name) for unit in plan.facts.units}
    ticks: list[tuple[TraceEvent, str, str]] = []
    for event in sorted(cost.outcome.events, key=lambda event: event.start):
        direction, _, unit = event.label.partition(" ")
        if event.resource is Resource.COMPUTE and direction in ("forward", "backward"):
            ticks.append((event, direction, unit))
    now = sum(size for unit, size in saved.items() if unit not in {unit for _, _, unit in ticks})  # takes no time
    found: list[tuple[float, float, int]] = []
    last = {(direction, unit): index for index, (_, direction, unit) in enumerate(ticks)}  # backward may have parts
    for index, (event, direction, unit) in enumerate(ticks):
        if found:  # saved tensors remain while compute waits
            found[-1] = (found[-1][0], event.start, found[-1][2])
        now += saved[unit] if direction == "forward" else 0
        found.append((event.start, event.end, max(now, 0)))
        now -= saved[unit] if direction == "backward" and last[direction, unit] == index else 0
    return found
