"""The simulated step as a picture: four resources over time, above the device's memory with its budget line.

For people who would rather look than read. What is idle is white; where compute is white it waits for something. The
memory curve is the arena and what forward has saved so far, at the steps of the first pass.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from strategies.core.plan import Home, Plan
from strategies.planner.simulate import Event
from strategies.planner.step_cost import StepCost
from strategies.planner.tasks import Resource
from strategies.report.plan_table import human

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


def draw(plan: Plan, priced: StepCost, path: Path) -> None:
    """Write the picture of one simulated step to ``path``; the suffix says the format.

    Raises:
        OSError, ValueError: the file cannot be written, or its suffix is no picture's.
    """
    height = TITLE + ROW * len(Resource) + CURVE + 4 * MARGIN
    image = Image.new("RGB", (WIDTH, height), "white")
    pen = ImageDraw.Draw(image)
    font = ImageFont.load_default(15)
    across = (WIDTH - LEFT - MARGIN) / priced.seconds

    def at(seconds: float) -> float:
        return LEFT + max(0.0, min(priced.seconds, seconds)) * across

    pen.text((MARGIN, 10), next(priced.lines()), INK, font)
    pen.text((MARGIN, 30), priced.bill(), INK, font)
    for row, resource in enumerate(Resource):
        top = TITLE + row * ROW
        pen.text((MARGIN, top + 14), resource.value, INK, font)
        pen.rectangle((LEFT, top + 4, WIDTH - MARGIN, top + ROW - 8), outline=GRID)
        for event in priced.outcome.events:
            if event.resource is resource:
                colour = COLOURS.get(event.label.split()[0], INK)
                pen.rectangle((at(event.start), top + 5, at(event.end), top + ROW - 9), fill=colour, outline="white")
    for index, (word, colour) in enumerate(list(COLOURS.items())[:-1]):
        left = LEFT + 150 * index
        pen.rectangle((left, height - MARGIN, left + 12, height - MARGIN + 12), fill=colour)
        pen.text((left + 18, height - MARGIN - 4), word, INK, font)
    _memory(pen, font, plan, priced, at, TITLE + ROW * len(Resource) + MARGIN)
    image.save(path)


def _memory(
    pen: ImageDraw.ImageDraw,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    plan: Plan,
    priced: StepCost,
    at: Callable[[float], float],
    top: int,
) -> None:
    """Arena and saved tensors while the steps of the first pass run, and the line that they may not cross."""
    assert plan.addresses is not None
    arena, has = plan.addresses.num_bytes(Home.DEVICE), plan.facts.machine.device_bytes
    limit = has if plan.peak(Home.DEVICE) * 4 > has else plan.peak(Home.DEVICE)  # a far line would flatten the curve
    scale = (CURVE - 30) / (1.08 * max(limit, plan.peak(Home.DEVICE)))
    floor = top + CURVE

    def level(num_bytes: int) -> float:
        return floor - num_bytes * scale

    pen.rectangle((LEFT, level(arena), WIDTH - MARGIN, floor), fill=ARENA)
    for start, end, saved in held(plan, priced):
        pen.rectangle((at(start), level(arena + saved), at(end), level(arena)), fill=SAVED)
    pen.line((LEFT, level(limit), WIDTH - MARGIN, level(limit)), LIMIT, 2)
    name = "device has" if limit == has else "predicted peak"
    pen.text((LEFT + 4, level(limit) - 20), f"{name} {human(limit)}", LIMIT, font)
    pen.text((LEFT + 4, floor - 20), f"arena {human(arena)}", INK, font)
    pen.text((MARGIN, floor - CURVE // 2), "memory", INK, font)


def held(plan: Plan, priced: StepCost) -> list[tuple[float, float, int]]:
    """(start, end, bytes saved) for each step of compute in the picture: saved by forward, dropped by backward."""
    saved = {unit.name: plan.saved_bytes(unit.name) for unit in plan.facts.units}
    steps: list[tuple[Event, str, str]] = []
    for event in sorted(priced.outcome.events, key=lambda event: event.start):
        direction, _, unit = event.label.partition(" ")
        if event.resource is Resource.COMPUTE and direction in ("forward", "backward"):
            steps.append((event, direction, unit))
    now = sum(size for unit, size in saved.items() if unit not in {unit for _, _, unit in steps})  # takes no time
    found: list[tuple[float, float, int]] = []
    for event, direction, unit in steps:
        if found:  # what is saved stays while compute waits
            found[-1] = (found[-1][0], event.start, found[-1][2])
        now += saved[unit] if direction == "forward" else 0
        found.append((event.start, event.end, max(now, 0)))
        now -= saved[unit] if direction == "backward" else 0
    return found
