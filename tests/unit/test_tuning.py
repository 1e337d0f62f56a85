"""Measuring with a fake timer: rounds, budget, the file and its strangers, one decision for all ranks."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepstow.strategies.core.linears import LEGAL, Gemm, Linear, Route, Shape, Timing
from deepstow.strategies.core.registry import find
from deepstow.strategies.engine.forward import routed_linear
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.machine import gemm_timing
from deepstow.trainer.machine.gemm_timing import FILE, ROUNDS, WHAT, measure, place_of, save
from deepstow.trainer.machine.probe import probe
from deepstow.trainer.machine.profiles import kept
from tests.helpers.fakes import facts

SMALL, LARGE = Shape(4, 8, 8, "out_in", "float32"), Shape(4, 16, 32, "out_in", "float32")
PRODUCTS = ["forward native", "dgrad native", "wgrad native", "forward flip", "copy"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock, and products that take as long as they are told, in turn; of 9 rows there is no memory for any."""
    fake = SimpleNamespace(now=0.0, each_s=1e-3, readings=dict[str, list[float]](), calls=list[str]())

    def run(name: str) -> float:
        fake.now += fake.each_s
        fake.calls.append(name)
        given = fake.readings.get(name)
        return given.pop(0) if given else fake.each_s

    def prepare(shape: Shape, device: str) -> dict[str, Callable[[], float]]:
        if shape.rows == 9:
            raise RuntimeError("out of memory\nand much more")
        return {name: partial(run, name) for name in PRODUCTS}

    monkeypatch.setattr(gemm_timing, "timers_of", prepare)
    monkeypatch.setattr(gemm_timing, "time", SimpleNamespace(perf_counter=lambda: fake.now))
    return fake


def made(value: float = 1e-3) -> Timing:
    return {**{f"{gemm} native": value for gemm in Gemm}, "wgrad left": 5e-4, "copy": 2e-4}


def test_routes_take_turns_and_the_least_counts(fake: Any) -> None:
    fake.readings = {"forward flip": [9.0, 0.0012, 5.0, 0.0011, *[7.0] * 20]}
    found = measure([SMALL], "cpu", 1000.0, lambda line: None)
    assert found == {str(SMALL): dict.fromkeys(PRODUCTS, 0.001) | {"forward flip": 0.0011}}
    assert fake.calls == PRODUCTS * ROUNDS


def test_the_budget_ends_it_and_what_is_left_is_said(fake: Any) -> None:
    """The first shape is measured however small the budget, and each reached one in at least two rounds."""
    fake.each_s, said = 1.0, list[str]()
    found = measure([LARGE, SMALL, replace(SMALL, rows=5)], "cpu", 15.0, said.append)
    assert list(found) == [str(LARGE), str(SMALL)] and fake.calls == PRODUCTS * 4  # two rounds of five each
    assert said[0].startswith("measuring linear layers, 1 of 3: 16 -> 32, 4 tokens, float32; 0 of 15 s")
    assert "1 were not reached and stay native: raise strategies.linear.budget_s" in said[-1]
    assert len(measure([LARGE, SMALL], "cpu", 0.1, said.append)) == 1


def test_a_shape_that_cannot_be_measured_costs_a_line(fake: Any) -> None:
    said: list[str] = []
    assert list(measure([replace(LARGE, rows=9), SMALL], "cpu", 60.0, said.append)) == [str(SMALL)]
    assert said[1] == "16 -> 32, 9 tokens, float32 stays native, it could not be measured: out of memory"
    assert "not reached" not in said[-1]


# --- the file --------------------------------------------------------------------------------------------------------


def test_what_was_measured_comes_back_by_place(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "linear.json"
    save(path, "here", {"a": made()})
    save(path, "there", {"a": made()})
    save(path, "here", {"b": made()})
    save(path, "here", {"a": made(2e-3)})
    assert kept(path, FILE, WHAT) == ({"here": {"a": made(2e-3), "b": made()}, "there": {"a": made()}}, "")


def test_all_that_timings_depend_on_is_in_the_place() -> None:
    machine = probe()
    cuda = replace(machine, device_kind="cuda")
    places = {
        place_of(each, threads) for each in (machine, replace(machine, name="other"), cuda) for threads in (1, 99)
    }
    assert len(places) == 5  # threads count on a CPU only
    assert f"torch {torch.__version__}" in place_of(machine)
    assert f"CUDA {torch.version.cuda}" in place_of(cuda) or torch.version.hip


def test_times_that_cannot_be_are_ignored_in_one_line(tmp_path: Path) -> None:
    """``test_rates.py`` has what is no JSON, and what is no file."""
    path, good = tmp_path / "linear.json", json.dumps({"here": {"a": made()}})
    for change in (("0.0002", "NaN"), ("0.0005", "0")):
        path.write_text(good.replace(*change))
        measured, ignored = kept(path, FILE, WHAT)
        assert measured is None and ignored.startswith(f"{path} is ignored") and "\n" not in ignored


# --- facts -----------------------------------------------------------------------------------------------------------


def timings(
    path: Path,
    *shapes: Shape,
    tune: bool = True,
    say: Callable[[str], None] = lambda line: None,
    origin: Any = "here",
    **options: Any,
) -> Mapping[str, Timing]:
    strategy = find("linear").model_validate({"cache": str(path), **options})
    config: Any = SimpleNamespace(strategies={"linear": strategy})
    given = replace(facts(), linears=tuple(Linear("l", "layers.0", shape) for shape in shapes))
    machine = replace(probe(), origin=origin)
    return gemm_timing.for_config(config, given, Ranks(), machine, tune=tune, say=say).timings


def test_the_second_run_measures_nothing(fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / ".cache/deepstow/linear.json"  # the usual one
    first = timings(path, SMALL, LARGE, cache=None)
    calls = len(fake.calls)
    assert calls > 0 and set(first) == {str(SMALL), str(LARGE)}
    assert timings(path, SMALL, LARGE) == first and len(fake.calls) == calls
    save(path, place_of(probe()), {str(SMALL): {"copy": 1.0, "forward native": 1.0}})  # not all that is needed
    more = timings(path, SMALL, replace(SMALL, rows=5))
    assert len(fake.calls) > calls and len(more) == 2 and more[str(SMALL)] == first[str(SMALL)]


def test_what_another_machine_measured_or_broke_is_said_and_replaced(fake: Any, tmp_path: Path) -> None:
    path, said = tmp_path / "linear.json", list[str]()
    save(path, "there", {str(SMALL): made()})
    assert timings(path, SMALL, say=said.append)[str(SMALL)] != made()
    assert said[0].startswith(f"{path} is not used: nothing in it was measured on this machine")
    path.write_text("{")
    assert timings(path, SMALL, say=said.append) and kept(path, FILE, WHAT)[1] == ""
    assert any(line.startswith(f"{path} is ignored") for line in said)


def test_a_file_that_cannot_be_written_costs_a_line(fake: Any, tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "file").write_text("")
    found = timings(tmp_path / "file" / "x.json", SMALL, say=said.append)
    assert len(found) == 1 and "the next run measures again" in said[-1]


def test_only_adaptive_asks_for_timings_of_this_machine(fake: Any, tmp_path: Path) -> None:
    path = tmp_path / "linear.json"
    assert timings(path, SMALL, transpose="minimal") == {} and timings(path, SMALL, origin="profile") == {}
    assert timings(path, SMALL, tune=False) == {}, "showing a plan measures nothing"
    assert fake.calls == [] and not path.exists()
    said: list[str] = []
    assert timings(path, SMALL, LARGE, budget_s=0.001, say=said.append) and "of 0.001 s" in said[0]


def decided(ranks: Ranks, path: Path) -> list[float]:
    """The seconds that every rank takes, summed over ranks; each would measure others."""
    gemm_timing.measure = lambda *given: {str(SMALL): made(1.0 + ranks.rank)}  # type: ignore[assignment]
    seconds = torch.tensor([timings(path, SMALL)[str(SMALL)]["forward native"]])
    torch.distributed.all_reduce(seconds)
    return [float(seconds)]


@pytest.mark.ranks
def test_the_first_rank_decides_for_all(tmp_path: Path) -> None:
    assert run_world(2, decided, tmp_path / "linear.json") == [2.0]


# --- for real --------------------------------------------------------------------------------------------------------


def test_real_products_are_timed_over_every_route_with_the_right_result(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [Shape(3, 5, 7, "out_in", "float32"), Shape(3, 5, 7, "in_out", "float32")]
    names = {"copy", *(f"{gemm} {route}" for gemm, routes in LEGAL.items() for route in routes)}
    found = measure(shapes, "cpu", 60.0, lambda line: None)
    assert [set(found[str(shape)]) for shape in shapes] == [names, names]
    right = routed_linear.product

    def wrong(gemm: Gemm, route: Route, *operands: Any) -> Any:
        return right(gemm, route, *operands) * (1.01 if (gemm, route) == (Gemm.DGRAD, Route.FLIP) else 1.0)

    monkeypatch.setattr(routed_linear, "product", wrong)
    assert gemm_timing.timers_of(shapes[0], "cpu").keys() == names - {"dgrad flip"}
    monkeypatch.setattr(routed_linear, "product", lambda *given: right(*given) * torch.nan)
    with pytest.raises(ValueError, match="no numbers"):
        gemm_timing.timers_of(shapes[0], "cpu")
