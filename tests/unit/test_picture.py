"""The picture of a simulated step: it opens, it is not empty, and what it shows adds up."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image

from launch.plan import main
from strategies.planner.step_cost import plan_cost
from tests.unit.test_step_cost import FAST, known, planned
from trainer.planning.picture import COLOURS, WIDTH, draw, saved_over_time


def test_the_picture_shows_compute_and_memory(tmp_path: Path) -> None:
    plan = planned(known(FAST), site="host")
    cost = plan_cost(plan)
    assert cost is not None
    draw(plan, cost, tmp_path / "step.png")
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


def test_without_a_price_there_is_one_clear_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    assert main(["--config", str(config), "--plot", str(tmp_path / "x.png")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("--plot ")
    assert "strategies.offload" in line
