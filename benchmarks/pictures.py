"""Draw the pictures of the docs from plans and simulations made here:   python -m deepstow.benchmarks.pictures

They are SVG, light, and readable at 390 pixels: a picture is 720 units wide, and its smallest letters have 20. One
whose figures come from a plan says so in its title; the others show an order, and no time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from deepstow.strategies.core.on_disk import disk_bytes
from deepstow.strategies.core.plan import Kind, Plan, Tier
from deepstow.strategies.core.sizes import human
from deepstow.strategies.planner.simulate import TraceEvent
from deepstow.strategies.planner.step_cost import StepCost, plan_cost
from deepstow.strategies.planner.tasks import Resource
from deepstow.trainer.config.load import load
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.machine.profiles import profile, sized
from deepstow.trainer.planning import picture
from deepstow.trainer.planning.from_config import plan_of
from deepstow.trainer.planning.picture import COLOURS, INK, RED

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
CARD = "rtx4090-pcie4"
WIDTH, UNIT, EDGE = 720, 100, 12  # units, and how many are an inch
PAPER = "#ffffff"
RANKS = ("#3c6496", "#c47828")  # of the first and the second rank
WEIGHTS = "#6ea0be"
STATE = "#c47828"
REST = "#b4b4b4"
OWNERS = {"weights": WEIGHTS, "optimizer state": STATE, "gradients, buffers, other": REST}
ROWS = {
    Resource.COMPUTE: "compute",
    Resource.UP: "copies up",
    Resource.DOWN: "copies down",
    Resource.CPU: "CPU updates",
}
# Letters of 20 units; the same file each time.
STYLE: Any = {"font.size": 14.4, "font.family": "sans-serif", "svg.fonttype": "none", "svg.hashsalt": "deepstow"}


def save(figure: Figure, name: str, title: str) -> None:
    """Write it to the folder of the docs' pictures."""
    figure.savefig(IMAGES / name, metadata={"Title": title, "Date": None})


def planned(*overrides: str, ranks: int = 1, host: int | None = None) -> Plan:
    """The plan of a 7 B Llama on this many of the card, with ``host`` bytes of host memory or the profile's."""
    config = load(ROOT / "configs" / "offload.yaml", list(overrides))
    machine = sized(profile(CARD), None, host)
    return plan_of(config, Ranks(world_size=ranks, local_world_size=ranks), machine)


def step(plan: Plan, cost: StepCost) -> None:
    """The step of a 7 B model on a 24 GB card, and the memory of the card."""
    title = "One step of a 7 B model on a 24 GB card, simulated"
    figure = picture.canvas(6.2, WIDTH / UNIT)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    events = joined(cost.outcome.events, cost.seconds / (WIDTH // 2))
    picture.resources(above, cost.seconds, events, list(ROWS))
    above.set_yticks(range(len(ROWS)), [f"{name}\n{cost.outcome.busy[r]:.1f} s" for r, name in ROWS.items()])
    picture.memory(below, plan, cost, (plan.facts.machine.device_bytes, "the card has"))
    picture.time_axis(below, cost.seconds)
    picture.legend(figure, [above], events, across=3)
    below.set_ylabel("memory (GiB)")
    about = f"RTX 4090, bf16, {plan.facts.run.tokens_per_step:,} tokens, clipped: {cost.seconds:.2f} s, not measured"
    figure.suptitle(f"{title}\n{about}", fontsize="medium", x=0.01, ha="left")
    save(figure, "step-7b.svg", title)


def joined(events: Iterable[TraceEvent], gap: float) -> list[TraceEvent]:
    """The same, but what a resource does of one kind with less than ``gap`` seconds between is one event."""
    spans: list[TraceEvent] = []
    last_at: dict[Resource, int] = {}
    for event in sorted(events, key=lambda event: event.start):
        at = last_at.get(event.resource)
        if at is not None and picture.action(spans[at]) == picture.action(event) and event.start - spans[at].end < gap:
            spans[at] = replace(spans[at], end=max(spans[at].end, event.end))
        else:
            last_at[event.resource] = len(spans)
            spans.append(event)
    return spans


def bytes_at_rest(offloaded: Plan) -> None:
    """Device, host and disk of the same model under four configs."""
    title = "Where the bytes of a 7 B model rest, by plan"
    with tempfile.TemporaryDirectory() as folder:
        disk = [f"strategies.offload.disk={folder}", "strategies.offload.disk_memory=400GiB"]
        cases = {
            "plain: does not fit": planned("strategies.offload=null"),
            "zero 3 on 8 cards": planned("strategies.offload=null", "strategies.zero.stage=3", ranks=8),
            "offload on 1 card": offloaded,
            "offload on 1 card, a host of 32 GiB and a disk": planned(*disk, host=32 << 30),
        }
    bars = {name: at_rest(plan) for name, plan in cases.items()}
    figure = picture.canvas(1.9 + 0.36 * sum(len(rows) + 1.6 for rows in bars.values()), WIDTH / UNIT)
    panels = figure.subplots(len(cases), 1, sharex=True, height_ratios=[len(rows) for rows in bars.values()])
    for axes, (name, rows) in zip(panels, bars.items(), strict=True):
        capacity = cases[name].facts.machine.device_bytes / (1 << 30)
        axes.plot([capacity, capacity], [-0.5, 0.5], color=RED)
        for row, (place, sizes) in enumerate(rows.items()):
            left = 0.0
            for size, colour in zip(sizes, OWNERS.values(), strict=True):
                axes.barh(row, size / (1 << 30), left=left, color=colour)
                left += size / (1 << 30)
            right = max(left, capacity) if place == Tier.DEVICE.value else left
            axes.annotate(f" {human(sum(sizes))}", (right, row), va="center")
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_title(name, loc="left", fontsize="medium")
    panels[-1].set_xlim(0, 1.25 * max(sum(sizes) for rows in bars.values() for sizes in rows.values()) / (1 << 30))
    panels[-1].set_xlabel("bytes of one rank (GiB)")
    handles = [Patch(color=colour, label=name) for name, colour in (OWNERS | {"what the card has": RED}).items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=2, frameon=False)
    about = "Each rank of RTX 4090s with 24 GB; bf16; blocks recomputed"
    figure.suptitle(f"{title}\n{about}", fontsize="medium", x=0.01, ha="left")
    save(figure, "where-bytes-rest.svg", title)


def at_rest(plan: Plan) -> dict[str, tuple[int, int, int]]:
    """Bytes of one rank's peak by place, each as weights, optimizer state and what is left."""
    rows = {}
    for tier in Tier:
        weights = plan.total(Kind.PARAM, tier)
        state = plan.total(Kind.MASTER, tier) + plan.total(Kind.MOMENT, tier)
        rows[tier.value] = (weights, state, plan.peak(tier) - weights - state)
    if plan.layout is not None:
        rows["disk"] = (0, disk_bytes(plan.layout), 0)
    return {place: sizes for place, sizes in rows.items() if sum(sizes)}


def sheet(height: float) -> tuple[Figure, Axes]:
    """An empty drawing without axes: units to the right and down from its upper left corner."""
    figure = Figure((WIDTH / UNIT, height / UNIT), facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(height, 0)
    axes.axis("off")
    return figure, axes


def box(axes: Axes, left: float, top: float, width: float, height: float, fill: str, line: str = "none") -> None:
    """A rectangle."""
    axes.add_patch(Rectangle((left, top), width, height, facecolor=fill, edgecolor=line, linewidth=1.0))


def text(axes: Axes, left: float, base: float, said: str, **style: Any) -> None:
    """A line of letters; ``base`` is the line that they stand on."""
    axes.text(left, base, said, **{"color": INK, **style})


def arrow(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """A line through ``points`` with a head at its end."""
    axes.plot(*zip(*points[:-1], strict=True), color=INK, linewidth=1.4)
    axes.annotate("", points[-1], points[-2], arrowprops={"arrowstyle": "->", "color": INK, "linewidth": 1.4})


def way_of_a_run() -> None:
    """From a config to an export."""
    boxes = {
        "config.yaml": ("one file;", "all errors at once"),
        "facts": ("the model, from", "fake tensors"),
        "plan": ("what rests where,", "bytes, seconds"),
        "training": ("Hugging Face's", "Trainer"),
        "checkpoints": ("the same bits,", "any strategy"),
        "export": ("reloaded and", "compared"),
    }
    width = 200
    across = 248
    high = 92
    figure, axes = sheet(42 + 172 + high + 12)
    text(axes, EDGE, 28, "decided first, on any laptop, without device memory")
    text(axes, EDGE, 200, "then carried out")
    for index, (name, lines) in enumerate(boxes.items()):
        left, top = EDGE + index % 3 * across, 42 + index // 3 * 172
        box(axes, left, top, width, high, "#eef3f8" if index < 3 else "#f8f1e8", INK)
        text(axes, left + 12, top + 28, name, weight="bold")
        for line, words in enumerate(lines):
            text(axes, left + 12, top + 54 + 24 * line, words)
        if index % 3 < 2:
            arrow(axes, [(left + width, top + high / 2), (left + across, top + high / 2)])
    middle, right = 42 + high + 22, EDGE + 2 * across + width / 2  # from the plan, back to the left
    start = EDGE + width / 2 + 80
    arrow(axes, [(right, 42 + high), (right, middle), (start, middle), (start, 42 + 172)])
    save(figure, "way-of-a-run.svg", "The way of a run")


def two_arenas() -> None:
    """What rests in the arena of the device, what in that of the host, and what travels between them."""
    title = "Two arenas, each reserved once"
    figure, axes = sheet(396)
    text(axes, EDGE, 28, title, weight="bold")
    upper = (
        "weights that stay",
        "addresses for weights",
        "that travel",
        "gradients, or slots for",
        "those that go down",
        "",
    )
    device = (*upper, "masters and moments", "updated here, or slots", "for state that visits")
    host = (
        "",
        "copies of weights",
        "that travel",
        "gradients that wait",
        "",
        "",
        "masters and moments",
        "that left the device",
        "",
    )
    for left, name, lines in ((EDGE, "device", device), (WIDTH - EDGE - 262, "host (pinned)", host)):
        text(axes, left, 62, name, weight="bold")
        box(axes, left, 74, 262, 306, "#eef3f8", INK)
        for index, line in enumerate(lines):
            text(axes, left + 12, 106 + 32 * index, line)
    start, end = EDGE + 262 + 4, WIDTH - EDGE - 262 - 4
    for top, label, up in ((134, "copies up", True), (202, "copies down", False), (300, "visits", True)):
        text(axes, (start + end) / 2, top - 8, label, ha="center")
        arrow(axes, [(end, top), (start, top)] if up else [(start, top), (end, top)])
    arrow(axes, [(start, 318), (end, 318)])
    save(figure, "two-arenas.svg", title)


def order_of_a_step() -> None:
    """Gradients wait for the norm; updates run under the next forward."""
    title = "The order of a step with clipping"
    wide = 47
    blocks = 4
    left = EDGE
    tops = {"compute": 78, "gradients that wait": 154, "updates": 322}
    figure, axes = sheet(tops["updates"] + 100)
    text(axes, EDGE, 28, f"{title}, four blocks", weight="bold")
    for name, top in tops.items():
        text(axes, EDGE, top + 4, name)

    def cell(position: float, top: float, said: str, colour: str) -> None:
        box(axes, left + position * wide, top, wide - 3, 40, colour)
        text(axes, left + position * wide + wide / 2 - 2, top + 27, said, ha="center", color=PAPER)

    norm = 2 * blocks + 0.4
    for block in range(blocks):
        cell(block, tops["compute"] + 12, f"F{block + 1}", COLOURS["forward"])
        cell(2 * blocks - 1 - block, tops["compute"] + 12, f"B{block + 1}", COLOURS["backward"])
        cell(norm + 1.4 + block, tops["compute"] + 12, f"F{block + 1}", COLOURS["forward"])
        cell(norm + 0.4 + block, tops["updates"] + 12, f"U{block + 1}", COLOURS["update"])
        start = 2 * blocks - block
        upper = tops["gradients that wait"] + 14 + block * 34
        box(axes, left + start * wide, upper, (norm + 0.4 + block - start) * wide - 3, 26, COLOURS["gradient"])
        text(axes, left + start * wide - 8, upper + 20, f"g{block + 1}", ha="right")
    axes.plot([left + norm * wide] * 2, [70, tops["updates"] + 56], color=RED)
    text(axes, left + norm * wide, 64, "the norm is known", ha="center", color=RED)
    text(axes, left + (norm + 1.4) * wide, tops["updates"] + 84, "under the next forward")
    text(axes, EDGE, tops["updates"] + 84, "F forward, B backward, U update")
    save(figure, "order-of-a-step.svg", title)


def axes_of_ranks() -> None:
    """Which axis divides what: two ranks in two colours."""
    title = "Which axis divides what"
    figure, axes = sheet(84 + 2 * 216 - 8)
    text(axes, EDGE, 28, f"{title}, with two ranks", weight="bold")
    first, second = RANKS
    for left, name, colour in ((EDGE, "first rank", first), (EDGE + 174, "second rank", second)):
        box(axes, left, 44, 16, 16, colour)
        text(axes, left + 24, 59, name)
    captions = {
        "data": "rows", "zero": "state of each weight", "tensor": "each layer",
        "pipeline": "the blocks", "sequence": "tokens of a row", "experts": "the experts",
    }  # fmt: skip
    for index, (name, divided) in enumerate(captions.items()):
        left, top = EDGE + index % 3 * 240, 84 + index // 3 * 216
        text(axes, left, top + 22, name, weight="bold")
        text(axes, left, top + 48, divided)
        for layer in range(4):
            for start, width, rank in parts_of_a_layer(name, layer):
                box(axes, left + start, top + 60 + layer * 32, width, 26, RANKS[rank])
    save(figure, "axes.svg", title)


def parts_of_a_layer(axis: str, layer: int) -> list[tuple[int, int, int]]:
    """Where each part of a layer is drawn, how wide, and which of the two ranks has it."""
    return {
        "data": [(0, 92, 0), (104, 92, 1)],  # two whole models
        "pipeline": [(0, 196, int(layer >= 2))],
        "sequence": [(token * 25, 21, int(token >= 4)) for token in range(8)],
        "experts": [(expert * 50, 44, expert % 2) for expert in range(4)],
        # Of each layer a weight, a gradient and two moments.
        "zero": [(part * 50 + 22 * rank, 22, rank) for part in range(4) for rank in range(2)],
        "tensor": [(0, 98, 0), (98, 98, 1)],
    }[axis]


def main() -> None:
    """Draw all of them."""
    IMAGES.mkdir(exist_ok=True)
    with rc_context(STYLE):
        way_of_a_run()
        two_arenas()
        order_of_a_step()
        axes_of_ranks()
        plan = planned()
        cost = plan_cost(plan)
        assert cost is not None, "the profile has rates"
        step(plan, cost)
        bytes_at_rest(plan)


if __name__ == "__main__":
    main()
