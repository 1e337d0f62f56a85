"""The simulated step as a picture: four resources over time, above the device's memory with its budget line.

A resource is white while it is idle; compute that is white waits for something. The memory curve is the arena and what
forward has saved so far, during the ticks of the first pass.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from strategies.core.plan import Home, Plan
from strategies.core.sizes import human
from strategies.planner.simulate import TraceEvent
from strategies.planner.step_cost import StepCost
from strategies.planner.tasks import Resource
from strategies.report.full_report import headline

WIDTH, ROW, LEFT, MARGIN, CURVE = 1400, 54, 110, 24, 190
TITLE = 58
INK, GRID, ARENA, SAVED, LIMIT = (40, 40, 40), (225, 225, 225), (120, 144, 176), (186, 200, 220), (200, 40, 40)
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


def draw(plan: Plan, cost: StepCost, path: Path) -> None:
    """Write the picture of one simulated step to ``path``; the suffix says the format.

    Raises:
        OSError, ValueError: the file cannot be written, or its suffix is no picture's.
    """
    height = TITLE + ROW * len(Resource) + CURVE + 4 * MARGIN
    image = Image.new("RGB", (WIDTH, height), "white")
    pen = ImageDraw.Draw(image)
    font = ImageFont.load_default(15)
    across = (WIDTH - LEFT - MARGIN) / cost.seconds

    def at(seconds: float) -> float:
        return LEFT + max(0.0, min(cost.seconds, seconds)) * across

    pen.text((MARGIN, 10), headline(cost), INK, font)
    pen.text((MARGIN, 30), _busy(cost), INK, font)
    for row, resource in enumerate(Resource):
        top = TITLE + row * ROW
        pen.text((MARGIN, top + 14), resource.value, INK, font)
        pen.rectangle((LEFT, top + 4, WIDTH - MARGIN, top + ROW - 8), outline=GRID)
        for event in cost.outcome.events:
            if event.resource is resource:
                colour = COLOURS.get(event.label.split()[0], INK)
                pen.rectangle((at(event.start), top + 5, at(event.end), top + ROW - 9), fill=colour, outline="white")
    for index, (word, colour) in enumerate(list(COLOURS.items())[:-1]):
        left = LEFT + 150 * index
        pen.rectangle((left, height - MARGIN, left + 12, height - MARGIN + 12), fill=colour)
        pen.text((left + 18, height - MARGIN - 4), word, INK, font)
    _memory(pen, font, plan, cost, at, TITLE + ROW * len(Resource) + MARGIN)
    image.save(path)


def _busy(cost: StepCost) -> str:
    """The busy seconds of each resource besides compute, on one line."""
    out = cost.outcome
    parts = [
        f"{resource.value} {out.busy[resource]:.3g} s ({out.hidden[resource] / out.busy[resource]:.0%} hidden)"
        for resource in Resource
        if resource is not Resource.COMPUTE and out.busy[resource] > 0
    ]
    return f"busy beside compute: {', '.join(parts) or 'nothing'}"


def _memory(
    pen: ImageDraw.ImageDraw,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    plan: Plan,
    cost: StepCost,
    at: Callable[[float], float],
    top: int,
) -> None:
    """Arena and saved tensors during the ticks of the first pass, and the line that they may not cross."""
    assert plan.addresses is not None
    arena, has = plan.addresses.num_bytes(Home.DEVICE), plan.facts.machine.device_bytes
    limit = has if plan.peak(Home.DEVICE) * 4 > has else plan.peak(Home.DEVICE)  # a far line would flatten the curve
    scale = (CURVE - 30) / (1.08 * max(limit, plan.peak(Home.DEVICE)))
    floor = top + CURVE

    def level(num_bytes: int) -> float:
        return floor - num_bytes * scale

    pen.rectangle((LEFT, level(arena), WIDTH - MARGIN, floor), fill=ARENA)
    for start, end, saved in saved_over_time(plan, cost):
        pen.rectangle((at(start), level(arena + saved), at(end), level(arena)), fill=SAVED)
    pen.line((LEFT, level(limit), WIDTH - MARGIN, level(limit)), LIMIT, 2)
    name = "device has" if limit == has else "predicted peak"
    pen.text((LEFT + 4, level(limit) - 20), f"{name} {human(limit)}", LIMIT, font)
    pen.text((LEFT + 4, floor - 20), f"arena {human(arena)}", INK, font)
    pen.text((MARGIN, floor - CURVE // 2), "memory", INK, font)


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
