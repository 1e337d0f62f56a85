"""The plan as a picture: the simulated step over time above the device's memory, or the memory of a rank as bars; or a
simulated step above a measured one. Drawn by matplotlib, which is imported when a picture is asked for.

The memory curve is the arena and what forward has saved so far, during the ticks of the first pass. Without a simulated
step (nothing is stowed, or the machine's rates are unknown): one bar per tier that adds up to the predicted peak of a
rank. The red line is the budget.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from deepstow.strategies.core.install import needs
from deepstow.strategies.core.plan import Kind, Plan, Tier, When
from deepstow.strategies.core.sizes import human
from deepstow.strategies.planner.simulate import TraceEvent
from deepstow.strategies.planner.step_cost import StepCost
from deepstow.strategies.planner.tasks import Resource
from deepstow.strategies.report.full_report import headline
from deepstow.trainer.errors import printable
from deepstow.trainer.planning.chrome_trace import Steps, within

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
WIDTH, ROW, HEAD = 14.0, 0.55, 1.2  # inches: of a picture, of a resource in it, and of its title and legend
INK = "#282828"
ARENA = "#7890b0"
SAVED = "#bac8dc"
RED = "#c82828"
# By the first word of an event's label.
COLOURS = {
    "forward": "#568c5a",
    "backward": "#3c6496",
    "update": "#c47828",
    "gradient": "#965a96",
    "state": "#bea03c",
    "weight": "#6ea0be",
    "other": INK,
}
ALIKE = {
    "parked": "gradient", "arriving": "gradient", "moments": "state", "master": "state", "new": "weight",
}  # fmt: skip
PARTS = ("#3c6496", "#c47828", "#bea03c", "#965a96", "#568c5a", "#aaaaaa")
SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
BYTES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


def cannot(path: Path) -> str:
    """Why no picture can be drawn into ``path`` here, and the cure; empty if it can."""
    if path.suffix not in SUFFIXES:
        return f"the name of a picture ends in {', '.join(SUFFIXES)}"
    return "" if find_spec("matplotlib") else f"a picture {needs('matplotlib', 'plots')}"


def canvas(height: float, width: float = WIDTH) -> Figure:
    """An empty picture of so many inches. ImportError: matplotlib is missing."""
    from matplotlib.figure import Figure

    return Figure((width, height), dpi=100, layout="constrained")


def save(figure: Figure, path: Path) -> None:
    """Write the picture. Raises OSError or ValueError: it cannot be written, or its suffix is no picture's."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # a name in letters that no font has
        figure.savefig(path)


def plain(text: str) -> str:
    """``text`` as it is: what others wrote is one line, and no formula."""
    return printable(text).replace("$", r"\$")


def unit(most: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The largest of ``units`` that is not larger than ``most``, or else the smallest."""
    return next((candidate for candidate in units if most >= candidate[0]), units[-1])


def action(event: TraceEvent) -> str:
    """The kind of what was done: a key of ``COLOURS``."""
    word = event.label.split()[0]
    word = ALIKE.get(word, word)
    return word if word in COLOURS else "other"


def draw(plan: Plan, cost: StepCost | None, *, model: str, budget: int | None = None) -> Figure:
    """The plan of a ``model`` of this name: its simulated step above the device's memory, or the memory of a rank.

    Args:
        budget: bytes of the device to be used; None: all that it has.
    """
    limit = (budget, "budget") if budget is not None else (plan.facts.machine.device_bytes, "device has")
    if cost is None:
        figure = _bars(plan, limit)
    else:
        seldom = (Resource.NET, Resource.DISK)
        shown = [resource for resource in Resource if resource not in seldom or cost.outcome.busy[resource]]
        figure = canvas(HEAD + ROW * len(shown) + 3)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[ROW * len(shown), 2.4])
        resources(above, cost.seconds, cost.outcome.events, shown)
        memory(below, plan, cost, limit)
        time_axis(below, cost.seconds)
        legend(figure, [above], cost.outcome.events)
    _title(figure, title(plan, cost, model))
    return figure


def beside(plan: Plan, steps: Steps, *, model: str) -> Figure:
    """The ``steps``, one below the other on one axis of time."""
    events = [event for _, step_events in steps.values() for event in step_events]
    busy = [resource for resource in Resource if any(event.resource is resource for event in events)]
    longest = max(seconds for seconds, _ in steps.values())
    figure = canvas(HEAD + (ROW * len(busy) + 0.6) * len(steps))
    axes = figure.subplots(len(steps), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (name, (seconds, step_events)) in zip(axes, steps.items(), strict=True):
        resources(panel, longest, step_events, busy)
        panel.set_title(f"{name} step: {seconds:.3g} s", loc="left", fontsize="medium")
    time_axis(axes[-1], longest)
    legend(figure, axes, events)
    _title(figure, title(plan, None, model)[:1])
    return figure


def title(plan: Plan, cost: StepCost | None, model: str) -> list[str]:
    """Model, card and ranks; the step; what is busy in it."""
    run, facts = plan.facts.run, plan.facts
    ranks = f"{run.grid.words} on {facts.machine.name}"
    about = f"{model}, {(run.model_params or facts.num_params) / 1e9:.3g} B parameters, {run.precision.value}, {ranks}"
    about += f", {run.tokens_per_step:,} tokens per step"
    if cost is None:
        return [about, "predicted peak of one rank; no simulated step: nothing is stowed, or rates are unknown"]
    busy, hidden = cost.outcome.busy, cost.outcome.hidden
    transfers = [resource for resource in Resource if resource is not Resource.COMPUTE and busy[resource] > 0]
    shares = [f"{each.value} {busy[each]:.3g} s ({hidden[each] / busy[each]:.0%} hidden)" for each in transfers]
    return [about, headline(plan, cost), f"busy beside compute: {', '.join(shares) or 'nothing'}"]


def _title(figure: Figure, lines: Iterable[str]) -> None:
    figure.suptitle("\n".join(map(plain, lines)), x=0.01, ha="left", fontsize="medium")


def resources(axes: Axes, seconds: float, events: Sequence[TraceEvent], shown: Sequence[Resource]) -> None:
    """A row for each resource, with what it does from 0 to ``seconds``: one collection of bars for each action."""
    spans: dict[tuple[Resource, str], list[tuple[float, float]]] = {}
    for event in within(events, seconds):
        if event.resource in shown:
            spans.setdefault((event.resource, action(event)), []).append((event.start, event.end - event.start))
    for (resource, kind), bars in spans.items():
        place = (shown.index(resource) - 0.4, 0.8)
        edges = ["white" if length > seconds / 400 else COLOURS[kind] for _, length in bars]  # narrow ones stay seen
        axes.broken_barh(bars, place, facecolors=COLOURS[kind], edgecolors=edges, linewidth=0.4, label=kind)
    axes.set_yticks(range(len(shown)), [resource.value for resource in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlim(0, seconds)
    axes.grid(axis="x", alpha=0.4)
    axes.set_axisbelow(True)


def time_axis(axes: Axes, seconds: float) -> None:
    """The axis of time, in a unit with few digits."""
    from matplotlib.ticker import FuncFormatter

    size, name = unit(seconds, SECONDS)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / size:.4g}"))
    axes.set_xlabel(f"time in one step ({name})")


def legend(figure: Figure, axes: Iterable[Axes], events: Iterable[TraceEvent], across: int = len(COLOURS)) -> None:
    """The colours of what is done, once each, below all, so many ``across``."""
    handles = {name: handle for panel in axes for handle, name in zip(*panel.get_legend_handles_labels(), strict=True)}
    shown = {action(event) for event in events} & handles.keys()
    names = [name for name in COLOURS if name in shown]
    figure.legend([handles[name] for name in names], names, loc="outside lower left", ncols=across, frameon=False)


def memory(axes: Axes, plan: Plan, cost: StepCost, limit: tuple[int, str]) -> None:
    """Arena and saved tensors during the ticks of the first pass, and the line that they may not cross."""
    assert plan.addresses is not None
    arena, peak, (most, called) = plan.addresses.num_bytes(Tier.DEVICE), plan.peak(Tier.DEVICE), limit
    near = peak * 4 > most  # a far line would flatten the curve
    size, name = unit(max(peak, most if near else 0), BYTES)
    axes.fill_between([0, cost.seconds], arena / size, color=ARENA, linewidth=0, label=f"arena {human(arena)}")
    if spans := saved_over_time(plan, cost):
        edges = [start for start, _, _ in spans] + [spans[-1][1]]
        levels = [(arena + saved) / size for _, _, saved in spans]
        axes.stairs(levels, edges, baseline=arena / size, fill=True, color=SAVED, label="saved by forward")
    if near:
        axes.axhline(most / size, color=RED, label=f"{called} {human(most)}")
    else:
        far = f"{called} {human(most)}, far above the predicted peak"
        axes.axhline(peak / size, color=RED, linestyle="dashed", label=f"predicted peak {human(peak)}; {far}")
    axes.set_ylim(0, 1.1 * max(peak, most if near else 0) / size)
    axes.set_ylabel(f"device memory ({name})")
    axes.legend(loc="lower right", fontsize="small")


def parts(plan: Plan, tier: Tier) -> Iterator[tuple[str, int]]:
    """What one rank holds at ``tier``, by owner; together its predicted peak."""
    standing = [(kind.value, plan.total(kind, tier)) for kind in Kind if kind is not Kind.GRAD]
    standing.append(("buffers", sum(buffer.num_bytes for buffer in plan.reserves(tier) if buffer.when is When.ALWAYS)))
    if tier is Tier.HOST:
        standing.append(("Python and libraries", plan.facts.machine.runtime_host_bytes))
    yield from standing
    yield "gradients and saved tensors, at the peak", plan.peak(tier) - sum(size for _, size in standing)


def _bars(plan: Plan, limit: tuple[int, str]) -> Figure:
    """One bar per tier, with its parts and the line that it may not cross."""
    figure = canvas(HEAD + 2.0 * len(Tier))
    for axes, tier in zip(figure.subplots(len(Tier), 1), Tier, strict=True):
        has, called = limit if tier is Tier.DEVICE else (plan.facts.machine.host_bytes, "host has")
        peak, edge = plan.peak(tier), 0.0
        size, name = unit(max(has, peak), BYTES)
        for colour, (owner, num_bytes) in zip(PARTS, parts(plan, tier), strict=False):
            if num_bytes:
                axes.barh(0, num_bytes / size, left=edge, color=colour, label=f"{owner} {human(num_bytes)}")
            edge += num_bytes / size
        axes.axvline(has / size, color=RED, label=f"{called} {human(has)}")
        axes.set_yticks([0], [tier.value])
        axes.set_ylim(-0.6, 0.6)
        axes.set_xlim(0, 1.05 * max(has, peak, 1) / size)
        axes.set_xlabel(f"memory of one rank ({name}); {human(peak)} at the peak")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=4, fontsize="small", frameon=False)
    return figure


def saved_over_time(plan: Plan, cost: StepCost) -> list[tuple[float, float, int]]:
    """(start, end, bytes saved) for each tick in the picture: saved by forward, freed by backward."""
    saved = {unit.name: plan.saved_bytes(unit.name) for unit in plan.facts.units}
    ticks: list[tuple[TraceEvent, str, str]] = []
    for event in sorted(cost.outcome.events, key=lambda event: event.start):
        direction, _, unit = event.label.partition(" ")
        if event.resource is Resource.COMPUTE and direction in ("forward", "backward"):
            ticks.append((event, direction, unit))
    num_bytes = sum(size for unit, size in saved.items() if unit not in {unit for _, _, unit in ticks})  # takes no time
    intervals: list[tuple[float, float, int]] = []
    last = {(direction, unit): index for index, (_, direction, unit) in enumerate(ticks)}  # backward may have parts
    for index, (event, direction, unit) in enumerate(ticks):
        if intervals:  # saved tensors remain while compute waits
            intervals[-1] = (intervals[-1][0], event.start, intervals[-1][2])
        num_bytes += saved[unit] if direction == "forward" else 0
        intervals.append((event.start, event.end, max(num_bytes, 0)))
        num_bytes -= saved[unit] if direction == "backward" and last[direction, unit] == index else 0
    return intervals
