"""The picture of a simulated step: it opens, it is not empty, and what it shows adds up."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image

from deepstow.launch.plan import main
from deepstow.strategies.core.plan import Plan, Tier
from deepstow.strategies.planner.simulate import TraceEvent
from deepstow.strategies.planner.step_cost import plan_cost
from deepstow.strategies.planner.tasks import Resource
from deepstow.trainer.planning.picture import (
    ARENA,
    COLOURS,
    PARTS,
    RED,
    WIDTH,
    axis,
    beside,
    draw,
    parts,
    saved_over_time,
    title,
)
from tests.unit.test_step_cost import FAST, known, planned


def test_the_picture_shows_compute_and_memory(tmp_path: Path) -> None:
    plan = planned(known(FAST), site="host")
    draw(plan, plan_cost(plan), tmp_path / "step.png", model="a model", budget=1 << 30)
    about, step, busy = title(plan, plan_cost(plan), "llama")
    assert about.startswith("llama, 0.00629 B parameters, fp32, 1 rank on test gpu")
    assert step.startswith("simulated step: 15 s") and busy.startswith("busy beside compute")
    image = Image.open(tmp_path / "step.png")
    assert image.width == WIDTH
    colours = {colour for _, colour in image.getcolors(1 << 20)}
    assert {COLOURS["forward"], COLOURS["backward"]} <= colours


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


def test_the_line_is_at_the_budget(tmp_path: Path) -> None:
    """Not at the size of the device. Twice the budget halves the curve below the line."""
    plan = planned(known(FAST), site="host")
    assert plan.addresses is not None
    peak = plan.peak(Tier.DEVICE)
    tops = []
    for factor in (2, 3):
        draw(plan, plan_cost(plan), path := tmp_path / f"{factor}.png", model="m", budget=factor * peak)
        image = Image.open(path)
        column = [image.getpixel((WIDTH - 60, row)) for row in range(image.height)]
        floor = max(row for row, colour in enumerate(column) if colour == ARENA)
        tops.append((floor - column.index(RED)) / (floor - column.index(ARENA)))
    assert tops[1] / tops[0] == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize("simulated", [True, False])
def test_a_measured_step_below_the_simulated_one(simulated: bool, tmp_path: Path) -> None:
    plan = planned(known(FAST), site="host")
    cost = plan_cost(plan) if simulated else None
    did = [TraceEvent(Resource.COMPUTE, 0.0, 9.0, "backward"), TraceEvent(Resource.UP, 1.0, 4.0, "moments b")]
    beside(plan, cost, 20.0, did, path := tmp_path / "step.png", model="a model")
    image = Image.open(path)
    bars = {colour: count for count, colour in image.getcolors(1 << 20)}
    assert bars[COLOURS["state"]] > 3 / 20 * 1000 * 30, "as wide as its time, on the axis of the longer step"
    assert (bars[COLOURS["forward"]] > 1000) is simulated  # besides the legend


@pytest.mark.parametrize("seconds", [0.0042, 0.99, 4711.0])
def test_the_axis_has_round_times_up_to_the_end(seconds: float) -> None:
    times = axis(seconds)
    assert times[0] == 0 and 5 <= len(times) <= 11
    assert 0 <= seconds - times[-1] <= times[1] * 1.001
    assert float(f"{times[1]:.0e}") == pytest.approx(times[1])


def test_the_bars_add_up_to_the_peak_where_there_is_no_step(tmp_path: Path) -> None:
    plan = Plan.baseline(known(FAST, world_size=8))
    for home in Tier:
        assert sum(size for _, size in parts(plan, home)) == plan.peak(home)
    draw(plan, None, tmp_path / "x.png", model="m")
    colours = {colour for _, colour in Image.open(tmp_path / "x.png").getcolors(1 << 20)}
    assert {PARTS[0], PARTS[4], RED} <= colours


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = str(Path(__file__).parents[2] / "configs" / "zero.yaml")
    common = ["--config", config, "--world-size", "8", "--profile", "rtx4090-pcie4"]
    assert main([*common, "--plot", str(tmp_path / "x.png")]) == 0
    assert Image.open(tmp_path / "x.png").width == WIDTH
    capsys.readouterr()
    assert main([*common, "--plot", str(tmp_path / "x.nothing")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("--plot ")
