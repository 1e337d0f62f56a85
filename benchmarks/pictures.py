"""Draw the pictures of the docs from plans and simulations made here:   python -m deepstow.benchmarks.pictures

They are SVG, light, and readable at 390 pixels: a picture is 720 units wide, and its smallest letters have 20. One
whose figures come from a plan says so in its title; the others show an order, and no time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from deepstow.strategies.core.on_disk import disk_bytes
from deepstow.strategies.core.plan import Kind, Plan, Tier
from deepstow.strategies.core.sizes import human
from deepstow.strategies.planner.simulate import TraceEvent
from deepstow.strategies.planner.step_cost import StepCost, plan_cost
from deepstow.strategies.planner.tasks import Resource
from deepstow.trainer.config.load import load
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.machine.profiles import profile, sized
from deepstow.trainer.planning.from_config import plan_of
from deepstow.trainer.planning.picture import COLOURS, axis

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
CARD = "rtx4090-pcie4"
WIDTH, EDGE = 720, 12
INK, FAINT, RED, PAPER = "#282828", "#d8d8d8", "#c82828", "#ffffff"
RANKS = ("#3c6496", "#c47828")  # of the first and the second rank
WEIGHTS, STATE, REST = "#6ea0be", "#c47828", "#b4b4b4"
ROWS = {
    Resource.COMPUTE: "compute (the GPU)",
    Resource.UP: "copies up (host to GPU)",
    Resource.DOWN: "copies down (GPU to host)",
    Resource.CPU: "updates by the CPU",
}
MEANINGS = {"forward": "forward", "backward": "backward", "weight": "weights", "gradient": "gradients"} | {
    "state": "optimizer state", "update": "updates",
}  # fmt: skip


@dataclass
class Drawing:
    """An SVG that grows downwards."""

    title: str
    parts: list[str] = field(default_factory=list)

    def box(self, left: float, top: float, width: float, height: float, fill: str, line: str = "none") -> None:
        """A rectangle."""
        at = f'x="{left:.1f}" y="{top:.1f}" width="{max(width, 0.6):.1f}" height="{height:.1f}"'
        self.parts.append(f'<rect {at} fill="{fill}" stroke="{line}"/>')

    def text(
        self, left: float, base: float, said: str, *, anchor: str = "start", fill: str = INK, size: int = 20
    ) -> None:
        """A line of letters; ``base`` is the line that they stand on."""
        style = f'font-size="{size}" text-anchor="{anchor}" fill="{fill}"'
        self.parts.append(f'<text x="{left:.1f}" y="{base:.1f}" {style}>{escape(said)}</text>')

    def line(self, points: Sequence[tuple[float, float]], stroke: str = INK, *, arrow: bool = False) -> None:
        """A line through ``points``."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        end = ' marker-end="url(#arrow)"' if arrow else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="2"{end}/>')

    def legend(self, top: float, entries: Iterable[tuple[str, str]], across: int = 3) -> None:
        """Colours and what they mean, ``across`` in a row."""
        for index, (said, colour) in enumerate(entries):
            left = EDGE + index % across * (WIDTH - 2 * EDGE) / across
            self.box(left, top + index // across * 28, 16, 16, colour)
            self.text(left + 24, top + index // across * 28 + 15, said)

    def save(self, name: str, height: float) -> None:
        """Write it to the folder of the docs' pictures."""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif">'
        arrow = '<defs><marker id="arrow" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
        arrow += f'<path d="M0,0 L9,4 L0,8 z" fill="{INK}"/></marker></defs>'
        paper = f'<rect width="{WIDTH}" height="{height:.0f}" fill="{PAPER}"/>'
        lines = [head, f"<title>{escape(self.title)}</title>", arrow, paper, *self.parts, "</svg>"]
        (IMAGES / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def planned(*overrides: str, ranks: int = 1, host: int | None = None) -> Plan:
    """The plan of a 7 B Llama on this many of the card, with ``host`` bytes of host memory or the profile's."""
    config = load(ROOT / "configs" / "offload.yaml", list(overrides))
    machine = sized(profile(CARD), None, host)
    return plan_of(config, Ranks(world_size=ranks, local_world_size=ranks), machine)


def step(plan: Plan, cost: StepCost) -> None:
    """The step of a 7 B model on a 24 GB card."""
    run = plan.facts.run
    drawing = Drawing("One step of a 7 B model on a 24 GB card, simulated")
    drawing.text(EDGE, 28, drawing.title, size=24)
    about = f"RTX 4090, bf16, {run.tokens_per_step:,} tokens, clipped: {cost.seconds:.2f} s"
    drawing.text(EDGE, 56, f"{about}. No GPU has measured it.")
    across = (WIDTH - 2 * EDGE) / cost.seconds
    top, height = 72.0, 34
    for time in axis(cost.seconds)[:: 2 if len(axis(cost.seconds)) > 6 else 1]:
        left = EDGE + time * across
        drawing.line([(left, top), (left, top + len(ROWS) * 66 + 6)], FAINT)
        drawing.text(min(max(left, 26), WIDTH - 26), top + len(ROWS) * 66 + 28, f"{time:.3g} s", anchor="middle")
    for row, (resource, name) in enumerate(ROWS.items()):
        upper = top + row * 66
        drawing.text(EDGE, upper + 20, f"{name}, busy {cost.outcome.busy[resource]:.1f} s")
        drawing.box(EDGE, upper + 26, WIDTH - 2 * EDGE, height, "none", FAINT)
        for start, end, colour in joined(cost, resource, 1 / across):
            drawing.box(EDGE + start * across, upper + 26, (end - start) * across, height, colour)
    drawing.legend(top + len(ROWS) * 66 + 46, ((said, css(COLOURS[word])) for word, said in MEANINGS.items()))
    drawing.save("step-7b.svg", top + len(ROWS) * 66 + 108)


def joined(cost: StepCost, resource: Resource, gap: float) -> list[tuple[float, float, str]]:
    """Start, end and colour of what a resource does; what is less than ``gap`` seconds apart is one."""

    def begins(event: TraceEvent) -> float:
        return event.start

    found: list[tuple[float, float, str]] = []
    for event in sorted((each for each in cost.outcome.events if each.resource is resource), key=begins):
        colour = css(COLOURS[event.label.split()[0]])
        start, end = max(event.start, 0.0), min(event.end, cost.seconds)
        if found and found[-1][2] == colour and start - found[-1][1] < gap:
            found[-1] = (found[-1][0], max(found[-1][1], end), colour)
        else:
            found.append((start, end, colour))
    return found


def css(colour: tuple[int, int, int]) -> str:
    """A colour as SVG writes it."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def bytes_at_rest(offloaded: Plan) -> None:
    """Device, host and disk of the same model under four configs."""
    drawing = Drawing("Where the bytes of a 7 B model rest, by plan")
    drawing.text(EDGE, 28, drawing.title, size=24)
    drawing.text(EDGE, 56, "Each rank of RTX 4090s with 24 GB; bf16; blocks recomputed")
    with tempfile.TemporaryDirectory() as folder:
        disk = [f"strategies.offload.disk={folder}", "strategies.offload.disk_memory=400GiB"]
        cases = {
            "plain: does not fit": planned("strategies.offload=null"),
            "zero 3 on 8 cards": planned("strategies.offload=null", "strategies.zero.stage=3", ranks=8),
            "offload on 1 card": offloaded,
            "offload on 1 card, a host of 32 GiB and a disk": planned(*disk, host=32 << 30),
        }
    most = max(plan.peak(tier) for plan in cases.values() for tier in Tier)
    left = 84
    top = 76.0
    scale = (WIDTH - left - EDGE - 96) / most
    for name, plan in cases.items():
        drawing.text(EDGE, top + 20, name, size=22)
        rows = {tier.value: owners(plan, tier) for tier in Tier}
        rows["disk"] = [(disk_bytes(plan.layout), STATE)] if plan.layout is not None else []
        upper = top + 30
        for where, bar in rows.items():
            total = sum(size for size, _ in bar)
            if total == 0:
                continue
            drawing.text(EDGE, upper + 20, where)
            at = float(left)
            for size, colour in bar:
                drawing.box(at, upper + 2, size * scale, 24, colour)
                at += size * scale
            limit = left + plan.facts.machine.device_bytes * scale
            if where == Tier.DEVICE.value:
                drawing.line([(limit, upper - 2), (limit, upper + 30)], RED)
                at = max(at, limit)
            drawing.text(at + 8, upper + 20, human(total))
            upper += 32
        top = upper + 12
    legend = [("weights", WEIGHTS), ("optimizer state", STATE), ("gradients, buffers, other", REST)]
    drawing.legend(top + 4, [*legend, ("what the card has", RED)], across=2)
    drawing.save("where-bytes-rest.svg", top + 68)


def owners(plan: Plan, tier: Tier) -> list[tuple[int, str]]:
    """Bytes of one rank's peak at ``tier``, with their colours."""
    weights = plan.total(Kind.PARAM, tier)
    state = plan.total(Kind.MASTER, tier) + plan.total(Kind.MOMENT, tier)
    return [(weights, WEIGHTS), (state, STATE), (plan.peak(tier) - weights - state, REST)]


def way_of_a_run() -> None:
    """From a config to an export."""
    drawing = Drawing("The way of a run")
    boxes = {
        "config.yaml": ("one file;", "all errors at once"),
        "facts": ("the model, from", "fake tensors"),
        "plan": ("what rests where,", "bytes, seconds"),
        "training": ("Hugging Face's", "Trainer"),
        "checkpoints": ("the same bits,", "any strategy"),
        "export": ("reloaded and", "compared"),
    }
    width, across, high = 200, 248, 92
    drawing.text(EDGE, 28, "decided first, on any laptop, without device memory")
    drawing.text(EDGE, 200, "then carried out")
    for index, (name, said) in enumerate(boxes.items()):
        left, top = EDGE + index % 3 * across, 42 + index // 3 * 172
        drawing.box(left, top, width, high, "#eef3f8" if index < 3 else "#f8f1e8", INK)
        drawing.text(left + 12, top + 28, name, size=22)
        for line, text in enumerate(said):
            drawing.text(left + 12, top + 54 + 24 * line, text)
        if index % 3 < 2:
            drawing.line([(left + width, top + high / 2), (left + across - 2, top + high / 2)], arrow=True)
    middle = 42 + high + 32  # from the plan, back to the left
    right = EDGE + 2 * across + width / 2
    start = EDGE + width / 2
    drawing.line([(right, 42 + high), (right, middle), (start + 120, middle), (start + 120, middle)])
    drawing.line([(start + 120, middle), (start + 80, middle), (start + 80, 42 + 172 - 2)], arrow=True)
    drawing.save("way-of-a-run.svg", 42 + 172 + high + 12)


def two_arenas() -> None:
    """What rests in the arena of the device, what in that of the host, and what travels between them."""
    drawing = Drawing("Two arenas, each reserved once")
    drawing.text(EDGE, 28, drawing.title, size=24)
    here = (
        "weights that stay",
        "addresses for weights",
        "that travel",
        "gradients, or slots for",
        "those that go down",
        "",
    )
    device = (*here, "masters and moments", "updated here, or slots", "for state that visits")
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
        drawing.text(left, 62, name, size=22)
        drawing.box(left, 74, 262, 306, "#eef3f8", INK)
        for index, line in enumerate(lines):
            drawing.text(left + 12, 106 + 32 * index, line)
    start, end = EDGE + 262 + 4, WIDTH - EDGE - 262 - 4
    for top, said, up in ((134, "copies up", True), (202, "copies down", False), (300, "visits", True)):
        drawing.text((start + end) / 2, top - 8, said, anchor="middle")
        drawing.line([(end, top), (start, top)] if up else [(start, top), (end, top)], arrow=True)
    drawing.line([(start, 318), (end, 318)], arrow=True)
    drawing.save("two-arenas.svg", 396)


def order_of_a_step() -> None:
    """Gradients wait for the norm; updates run under the next forward."""
    drawing = Drawing("The order of a step with clipping")
    drawing.text(EDGE, 28, f"{drawing.title}, four blocks", size=24)
    wide, blocks, left = 47, 4, EDGE
    tops = {"compute": 78, "gradients that wait": 154, "updates": 322}
    for name, top in tops.items():
        drawing.text(EDGE, top + 4, name)
    forward, backward, update = (css(COLOURS[word]) for word in ("forward", "backward", "update"))

    def cell(position: float, top: float, said: str, colour: str) -> None:
        drawing.box(left + position * wide, top, wide - 3, 40, colour)
        drawing.text(left + position * wide + wide / 2 - 2, top + 27, said, anchor="middle", fill=PAPER)

    norm = 2 * blocks + 0.4
    for block in range(blocks):
        cell(block, tops["compute"] + 12, f"F{block + 1}", forward)
        cell(2 * blocks - 1 - block, tops["compute"] + 12, f"B{block + 1}", backward)
        cell(norm + 1.4 + block, tops["compute"] + 12, f"F{block + 1}", forward)
        cell(norm + 0.4 + block, tops["updates"] + 12, f"U{block + 1}", update)
        made = 2 * blocks - block
        upper = tops["gradients that wait"] + 14 + block * 34
        drawing.box(left + made * wide, upper, (norm + 0.4 + block - made) * wide - 3, 26, css(COLOURS["gradient"]))
        drawing.text(left + made * wide - 8, upper + 20, f"g{block + 1}", anchor="end")
    drawing.line([(left + norm * wide, 70), (left + norm * wide, tops["updates"] + 56)], RED)
    drawing.text(left + norm * wide, 64, "the norm is known", anchor="middle", fill=RED)
    drawing.text(left + (norm + 1.4) * wide, tops["updates"] + 84, "under the next forward")
    drawing.text(EDGE, tops["updates"] + 84, "F forward, B backward, U update")
    drawing.save("order-of-a-step.svg", tops["updates"] + 100)


def axes() -> None:
    """Which axis divides what: two ranks in two colours."""
    drawing = Drawing("Which axis divides what")
    drawing.text(EDGE, 28, f"{drawing.title}, with two ranks", size=24)
    drawing.legend(44, [("first rank", RANKS[0]), ("second rank", RANKS[1])], across=4)
    captions = {
        "data": "rows", "zero": "state of each weight", "tensor": "each layer",
        "pipeline": "the blocks", "sequence": "tokens of a row", "experts": "the experts",
    }  # fmt: skip
    first, second = RANKS
    for index, (name, what) in enumerate(captions.items()):
        left, top = EDGE + index % 3 * 240, 84 + index // 3 * 216
        drawing.text(left, top + 22, name, size=22)
        drawing.text(left, top + 48, what)
        upper, high = top + 60, 26
        for layer in range(4):
            here = upper + layer * (high + 6)
            if name == "data":  # two whole models
                drawing.box(left, here, 92, high, first)
                drawing.box(left + 104, here, 92, high, second)
            elif name == "pipeline":
                drawing.box(left, here, 196, high, first if layer < 2 else second)
            elif name == "sequence":
                for token in range(8):
                    drawing.box(left + token * 25, here, 21, high, first if token < 4 else second)
            elif name == "experts":
                for expert in range(4):
                    drawing.box(left + expert * 50, here, 44, high, RANKS[expert % 2])
            elif name == "zero":  # of each layer a weight, a gradient and two moments
                for part in range(4):
                    drawing.box(left + part * 50, here, 22, high, first)
                    drawing.box(left + part * 50 + 22, here, 22, high, second)
            else:
                drawing.box(left, here, 98, high, first)
                drawing.box(left + 98, here, 98, high, second)
    drawing.save("axes.svg", 84 + 2 * 216 - 8)


def main() -> None:
    """Draw all of them."""
    IMAGES.mkdir(exist_ok=True)
    way_of_a_run()
    two_arenas()
    order_of_a_step()
    axes()
    plan = planned()
    cost = plan_cost(plan)
    assert cost is not None, "the profile has rates"
    step(plan, cost)
    bytes_at_rest(plan)


if __name__ == "__main__":
    main()
