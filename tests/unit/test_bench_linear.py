"""The linear bench: its cases, how it judges, its refusals, and a run with one small case."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import linear, processes
from benchmarks.harness.linear import judge, summary, table, wanted
from benchmarks.harness.record import answer
from launch import bench
from strategies.core.linears import LEGAL, Route, Routes, Shape, Timing
from strategies.planner import gemm_routes
from trainer.errors import ExitCode

SHAPE = Shape(4, 8, 6, "out_in", "float32")


@pytest.fixture(autouse=True)
def routing_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that numbers are round."""
    monkeypatch.setattr(gemm_routes, "ROUTING_S", 0.0)


def timing(**faster: float) -> Timing:
    """10 ms natively, 20 over other routes, unless given as ``forward_flip=7.0``."""
    names = {f"{gemm}_{route}": 20.0 for gemm, routes in LEGAL.items() for route in routes}
    given = names | {f"{gemm}_native": 10.0 for gemm in LEGAL} | {"copy": 1.0} | faster
    return {name.replace("_", " "): value * 1e-3 for name, value in given.items()}


def squeezed(lines: Iterable[str]) -> str:
    """Without the spaces that align columns."""
    return re.sub(" +", " ", "\n".join(lines))


def judged(accumulation: int, first: Timing, second: Timing) -> linear.Case:
    return {"models": ["m"], **judge(SHAPE, accumulation, first, second)}


def test_there_are_enough_cases_and_none_comes_twice() -> None:
    cases = wanted([], ["16", "64", "128"], [])
    assert len(cases) >= 83
    assert {model for models in cases.values() for model in models} == set(linear.MODELS)
    assert {shape.stored for shape, models in cases.items() if "gpt2-xl" in models} == {"in_out"}
    assert [shape.rows for shape in cases] == sorted(shape.rows for shape in cases)


def test_routes_are_chosen_by_one_measurement_and_judged_by_the_other() -> None:
    """The first measurement was disturbed: what it favours is slower in the second."""
    case = judged(1, timing(forward_flip=5.0), timing(forward_flip=12.0))
    native = str(Routes())
    assert case["routes"] == {"minimal": native, "adaptive": str(Routes(forward=Route.FLIP)), "best": native}
    assert case["adaptive_s"] == pytest.approx(0.032) and case["native_s"] == pytest.approx(0.030)


def test_table_and_summary() -> None:
    good = judged(1, timing(dgrad_left=5.0), timing(dgrad_left=5.0))
    bad = judged(1, timing(wgrad_left=5.0), timing(wgrad_left=15.0))
    text = squeezed(summary([good, judged(1, timing(), timing()), bad]))
    assert "| all: 3 | adaptive | 1 | 1 | 1 | 0.991 | 1.167 |" in text
    assert "Adaptive leaves 1 of 3 layers untouched." in text
    assert "| float32 | 4 | 8 -> 6 | m | 30.000 ms | 1.000 | 0.833 | 0.833 |" in squeezed(table([good]))


def test_an_interrupted_run_keeps_its_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readings: Iterator[Any] = iter([timing(), timing()])

    def reading(shapes: Any, budget_s: float) -> list[Timing]:
        for found in readings:
            return [found]
        raise KeyboardInterrupt

    monkeypatch.setattr(linear, "timed", reading)
    hardware = {"name": "cpu", "device_kind": "cpu", "usable_cores": 2}
    monkeypatch.setattr(processes, "surroundings", lambda: {"hardware": hardware, "versions": {"torch": "0"}})
    given = bench.parse(["linear", "--accumulation=2", "--seconds=1", "--steps=0"])
    question = linear.question({SHAPE: ["m"], replace(SHAPE, rows=5): ["m"]}, given, lambda line: None)
    assert answer("linear", question, tmp_path, "the command", lambda line: None) == ExitCode.INTERRUPTED
    (folder,) = tmp_path.iterdir()
    record = json.loads((folder / "record.json").read_text())
    assert record["command"] == "the command" and len(record["cases"]) == 1
    assert record["cases"][0]["measurements"][0] == timing()
    assert "| all: 1 | adaptive |" in squeezed([(folder / "table.md").read_text()])


def test_step_tables_take_ratios_within_a_round() -> None:
    seconds = {"plain": [1.0, 2.0, 1.0], "adaptive": [0.9, 1.8, 0.9]}
    steps = {"model": "45m", "tokens_per_step": 64, "dtype": "fp32", "seconds": seconds}
    assert squeezed(linear.step_lines(steps)[-1:]) == "| adaptive | 0.900 s | 0.900 s | 0.900 | 0.900 to 0.900 |"
