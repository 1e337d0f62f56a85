"""Pictures of a plan and of steps: what their bars, lines and words say, that none is upon another, and the files."""

import subprocess
import sys
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from deepstow.launch import cli
from deepstow.strategies.core.plan import Plan, Tier
from deepstow.strategies.planner.simulate import TraceEvent
from deepstow.strategies.planner.step_cost import StepCost, plan_cost
from deepstow.strategies.planner.tasks import Resource
from deepstow.trainer.planning import picture
from deepstow.trainer.planning.picture import action, beside, draw, parts, saved_over_time
from tests.unit.test_step_cost import FAST, known, planned

ROOT = Path(__file__).parents[2]
DID = [TraceEvent(Resource.COMPUTE, 0.0, 9.0, "backward"), TraceEvent(Resource.UP, 1.0, 4.0, "moments b")]


def simulated() -> tuple[Plan, StepCost]:
    plan = planned(known(FAST), site="host")
    cost = plan_cost(plan)
    assert cost is not None
    return plan, cost


def seconds(axes: Any, row: int, kind: str) -> float:
    """How long the bars of an action are in a row, together."""
    bars = (path.get_extents() for each in axes.collections if each.get_label() == kind for path in each.get_paths())
    return sum(box.width for box in bars if round(box.y0 + 0.4) == row)


def words(figure: Figure) -> list[str]:
    return [each.get_text() for each in figure.findobj(Text) if each.get_text()]


def test_each_bar_is_as_long_as_what_it_shows() -> None:
    plan, cost = simulated()
    figure = draw(plan, cost, model="a model")
    above, below = figure.axes
    names = [each.get_text() for each in above.get_yticklabels()]
    for row, resource in enumerate(Resource(name) for name in names):
        kinds = {action(event) for event in cost.outcome.events if event.resource is resource}
        shown = sum(seconds(above, row, kind) for kind in kinds)
        assert shown == pytest.approx(cost.outcome.busy[resource], rel=1e-6)
    assert names == ["compute", "link up", "link down", "cpu"], "network and disk do nothing"
    assert seconds(above, 0, "forward") == pytest.approx(5.0, rel=1e-3) and below.get_xlim() == (0, cost.seconds)
    said = words(figure)
    assert {"forward", "backward", "gradient", "time in one step (s)", "device memory (MiB)"} <= {*said}
    assert any(line.startswith("a model, 0.00629 B parameters, fp32, 1 rank on test gpu") for line in said)


def test_what_is_saved_grows_through_forward_and_is_gone_after_backward() -> None:
    about = known(FAST)
    about = replace(about, units=tuple(replace(unit, saved_bytes=1 << 20) for unit in about.units))
    plan = planned(about, site="host")
    saved = {unit.name: plan.saved_bytes(unit.name) for unit in plan.facts.units}
    cost = plan_cost(plan)
    assert cost is not None
    spans = saved_over_time(plan, cost)
    assert sum(saved.values()) == 6 << 20
    assert max(size for _, _, size in spans) == sum(saved.values())
    assert all(end == start for (_, end, _), (start, _, _) in pairwise(spans))
    (curve,) = (each for each in draw(plan, cost, model="m").axes[1].patches if each.get_label() == "saved by forward")
    assert plan.addresses is not None
    assert max(curve.get_data().values) * (1 << 20) == plan.addresses.num_bytes(Tier.DEVICE) + (6 << 20)


@pytest.mark.parametrize("factor", [2, 5])
def test_the_line_is_at_the_budget(factor: int) -> None:
    """Not at the size of the device; one far above the peak would flatten the curve, and is said."""
    plan, cost = simulated()
    peak = plan.peak(Tier.DEVICE)
    (line,) = draw(plan, cost, model="m", budget=factor * peak).axes[1].lines
    near = factor < 4
    assert line.get_ydata()[0] * (1 << 20) == (factor * peak if near else peak)
    assert f"budget {factor * peak >> 20}.0 MiB" in str(line.get_label()) and ("far above" in line.get_label()) != near


def test_a_measured_step_below_the_simulated_one() -> None:
    plan, cost = simulated()
    steps = {"simulated": (cost.seconds, cost.outcome.events), "measured": (20.0, DID)}
    above, below = (figure := beside(plan, steps, model="a model")).axes
    assert above.get_xlim() == below.get_xlim() == (0, 20.0), "the axis of the longer one is that of both"
    assert seconds(below, 1, "state") == pytest.approx(3.0) and seconds(below, 0, "backward") == pytest.approx(9.0)
    assert {"simulated step: 15 s", "measured step: 20 s"} <= {*words(figure)}
    assert len(beside(plan, {"measured": (20.0, DID)}, model="a model").axes) == 1


def test_the_bars_add_up_to_the_peak_where_there_is_no_step() -> None:
    plan = Plan.baseline(known(FAST, world_size=8))
    for axes, tier in zip(draw(plan, None, model="m").axes, Tier, strict=True):
        assert sum(size for _, size in parts(plan, tier)) == plan.peak(tier)
        assert sum(bar.get_width() for bar in axes.patches) * (1 << 40) == pytest.approx(plan.peak(tier))
        assert axes.lines[0].get_xdata()[0] == 1.0 and "(TiB)" in axes.get_xlabel(), "what the machine has"


@pytest.mark.parametrize("which", ["step", "far", "bars", "beside"])
def test_no_word_is_upon_another(which: str) -> None:
    plan, cost = simulated()
    name = "a name with $price$ and\ntwo lines"
    figure = {
        "step": lambda: draw(plan, cost, model=name, budget=2 * plan.peak(Tier.DEVICE)),
        "far": lambda: draw(plan, cost, model=name),
        "bars": lambda: draw(Plan.baseline(known(FAST)), None, model=name),
        "beside": lambda: beside(plan, {"one": (cost.seconds, cost.outcome.events), "two": (20, DID)}, model=name),
    }[which]()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    axes = [axis for each in figure.axes for axis in (each.xaxis, each.yaxis)]
    ticks = [(axis.get_view_interval(), tick) for axis in axes for tick in axis.get_major_ticks()]
    beyond = {tick.label1 for ends, tick in ticks if not min(ends) <= tick.get_loc() <= max(ends)}
    shown = [each for each in figure.findobj(Text) if each.get_text() and each.get_visible() and each not in beyond]
    boxes = [(each.get_text(), each.get_window_extent(canvas.get_renderer())) for each in shown]
    assert [(one, two) for (one, box), (two, other) in combinations(boxes, 2) if box.overlaps(other)] == []
    assert any(r"\$price\$ and\ntwo lines" in said for said, _ in boxes)
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.width for _, box in boxes)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = str(ROOT / "configs" / "zero.yaml")
    common = ["plan", "--config", config, "--ranks", "8", "--profile", "rtx4090-pcie4"]
    for name, begins in (("x.png", b"\x89PNG"), ("x.svg", b"<?xml")):
        assert cli.main([*common, "--plot", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(begins)
    capsys.readouterr()
    assert cli.main([*common, "--plot", "x.nothing"]) == 2
    assert capsys.readouterr().err == "--plot x.nothing: the name of a picture ends in .png, .svg, .pdf\n"
    monkeypatch.setattr(picture, "find_spec", lambda name: None)
    assert cli.main([*common, "--plot", "x.png"]) == 2
    cure = "a picture needs the package matplotlib; install it with: pip install 'deepstow[plots]'"
    assert capsys.readouterr().err == f"--plot x.png: {cure}\n"


def test_matplotlib_is_imported_for_a_picture_alone() -> None:
    code = (
        "import sys; from deepstow.launch import cli; "
        f"cli.main(['plan', '--config', {str(ROOT / 'configs' / 'zero.yaml')!r}, '--profile', 'rtx4090-pcie4']); "
        "print('LOADED', [name for name in ('matplotlib', 'rich') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "LOADED []"
