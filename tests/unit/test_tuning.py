"""Measuring with a fake timer: rounds, budget, order, the file and its strangers, one decision for all ranks."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from strategies.core.linears import Gemm, Linear, Route, Shape, Timed
from strategies.core.registry import find
from strategies.engine.forward import routed_linear
from tests.helpers.fakes import facts
from trainer.dist.ranks import Ranks
from trainer.dist.spawn import run_world
from trainer.machine import gemm_timing
from trainer.machine.gemm_timing import (
    REFRESH,
    ROUNDS,
    ROUTED,
    STOCK,
    Say,
    from_json,
    load,
    measure,
    name_of,
    place_of,
    save,
    timers_of,
    to_json,
)
from trainer.machine.probe import probe

SMALL, LARGE = Shape(4, 8, 8, "out_in", "float32"), Shape(4, 16, 32, "out_in", "float32")
PLACE = place_of(probe())


class Fake:
    """A clock, and products that take as long as they are told, in turn."""

    def __init__(self, *, each_s: float = 1.0, readings: Mapping[Any, list[float]] | None = None) -> None:
        self.now, self.each_s, self.readings = 0.0, each_s, dict(readings or {})
        self.calls: list[Any] = []

    def clock(self) -> float:
        return self.now

    def prepare(self, shape: Shape) -> dict[Any, Callable[[], float]]:
        products = [(gemm, Route.NATIVE) for gemm in Gemm] + [(Gemm.FORWARD, Route.FLIP)]
        products += [REFRESH, STOCK, ROUTED]
        return {product: self._run(product) for product in products}

    def _run(self, product: Any) -> Callable[[], float]:
        def run() -> float:
            self.now += self.each_s
            self.calls.append(product)
            given = self.readings.get(product)
            return given.pop(0) if given else self.each_s

        return run


def made(shape: Shape = SMALL, value: float = 1e-3) -> Timed:
    return Timed(shape, (*((gemm, Route.NATIVE, value) for gemm in Gemm), (Gemm.WGRAD, Route.LEFT, 5e-4)), 2e-4, 3e-5)


def test_routes_take_turns_and_the_least_counts() -> None:
    flipped = (Gemm.FORWARD, Route.FLIP)
    fake = Fake(each_s=0.001, readings={flipped: [9.0, 0.0012, 5.0, 0.0011, *[7.0] * 20]})
    found = measure([SMALL], fake.prepare, 1000.0, lambda line: None, fake.clock)[0]
    assert found.of(Gemm.FORWARD) == {Route.NATIVE: 0.001, Route.FLIP: 0.0011}
    assert found.refresh_s == 0.001 and found.overhead_s == 0.0
    one_round = list(fake.prepare(SMALL))
    assert fake.calls == one_round * ROUNDS


def test_what_routing_itself_costs_is_measured() -> None:
    fake = Fake(each_s=0.001, readings={ROUTED: [0.003] * 20, STOCK: [0.0025, 0.002] * 10})
    assert measure([SMALL], fake.prepare, 60.0, lambda line: None, fake.clock)[0].overhead_s == pytest.approx(0.001)


def test_what_is_far_behind_after_two_rounds_gets_no_more() -> None:
    flipped = (Gemm.FORWARD, Route.FLIP)
    fake = Fake(each_s=0.001, readings={flipped: [9.0, 3.0, 0.0001]})
    found = measure([SMALL], fake.prepare, 1000.0, lambda line: None, fake.clock)[0]
    assert found.of(Gemm.FORWARD) == {Route.NATIVE: 0.001, Route.FLIP: 3.0}
    assert fake.calls.count(flipped) == 2 and fake.calls.count((Gemm.FORWARD, Route.NATIVE)) == ROUNDS


def test_the_budget_ends_it_and_what_is_left_is_said() -> None:
    fake, said = Fake(each_s=1.0), []
    found = measure([LARGE, SMALL, replace(SMALL, rows=5)], fake.prepare, 30.0, said.append, fake.clock)
    assert [timed.shape for timed in found] == [LARGE, SMALL]  # two rounds of seven each: 14 s and 14 s
    assert said[0].startswith("measuring linear layers, 1 of 3: 16 -> 32, 4 tokens, float32; 0 of 30 s")
    assert "1 were not reached and stay native: raise strategies.linear.budget_s" in said[-1]


def test_a_shape_that_cannot_be_measured_costs_a_line() -> None:
    fake, said = Fake(each_s=0.001), []

    def prepare(shape: Shape) -> Any:
        if shape == LARGE:
            raise RuntimeError("out of memory\nand much more")
        return fake.prepare(shape)

    (found,) = measure([LARGE, SMALL], prepare, 60.0, said.append, fake.clock)
    assert found.shape == SMALL
    assert said[1] == "16 -> 32, 4 tokens, float32 stays native, it could not be measured: out of memory"
    assert "not reached" not in said[-1]


def test_a_first_shape_is_measured_however_small_the_budget() -> None:
    fake = Fake(each_s=10.0)
    (found,) = measure([LARGE, SMALL], fake.prepare, 0.1, lambda line: None, fake.clock)
    assert found.shape == LARGE


# --- the file --------------------------------------------------------------------------------------------------------


def test_what_was_measured_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "linear.json"
    save(path, PLACE, [made()])
    save(path, PLACE, [made(LARGE)])
    shapes, ignored = load(path, PLACE)
    assert ignored == "" and set(shapes) == {name_of(SMALL), name_of(LARGE)}
    assert from_json(SMALL, shapes[name_of(SMALL)]) == made()


def test_other_machines_keep_their_entries(tmp_path: Path) -> None:
    path, other = tmp_path / "linear.json", {**PLACE, "threads": 99}
    save(path, other, [made()])
    save(path, PLACE, [made(LARGE)])
    assert set(load(path, other)[0]) == {name_of(SMALL)} and set(load(path, PLACE)[0]) == {name_of(LARGE)}
    for threads in range(100, 140):
        save(path, {**PLACE, "threads": threads}, [])
    assert len(json.loads(path.read_text())["measured"]) == gemm_timing.MOST_ENTRIES


@pytest.mark.parametrize(
    "change",
    [
        {"threads": 99},
        {"settings": "deterministic"},
        {"machine": PLACE["machine"] | {"torch": "1.0"}},
        {"machine": PLACE["machine"] | {"device": "NVIDIA other"}},
    ],
    ids=str,
)
def test_timings_of_another_machine_are_not_used(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "linear.json"
    save(path, {**PLACE, **change}, [made()])
    shapes, ignored = load(path, PLACE)
    assert shapes == {} and ignored.startswith(f"{path} is not used") and "\n" not in ignored


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "null", '{"format": 7}', '{"format": 1}', '{"format": 1, "measured": [3]}', "\x00\xff"],
    ids=repr,
)
def test_a_broken_file_is_ignored_in_one_line_and_replaced(text: str, tmp_path: Path) -> None:
    path = tmp_path / "linear.json"
    path.write_text(text, encoding="latin-1")
    shapes, ignored = load(path, PLACE)
    assert shapes == {} and ignored.startswith(f"{path} is ignored") and "\n" not in ignored
    save(path, PLACE, [made()])
    assert load(path, PLACE) == ({name_of(SMALL): to_json(made())}, "")


def test_a_file_of_another_format_is_ignored_by_name(tmp_path: Path) -> None:
    path = tmp_path / "linear.json"
    save(path, PLACE, [made()])
    path.write_text(path.read_text().replace('"format": 1', '"format": 7'))
    assert load(path, PLACE) == ({}, f"{path} is ignored: its format is 7, this is 1")


def test_what_a_device_runs_on_is_part_of_the_place() -> None:
    settings = {
        kind: place_of(replace(probe(), device_kind=kind))["settings"] for kind in ("cpu", "cuda", "xpu", "hpu")
    }
    assert settings["cuda"] == f"{settings['cpu']}, CUDA {torch.version.cuda}" or torch.version.hip
    assert settings["xpu"] == f"{settings['cpu']}, XPU {torch.version.xpu}"
    assert settings["hpu"] == settings["cpu"], "no row says what its versions are"


def test_a_folder_in_its_place_is_ignored(tmp_path: Path) -> None:
    assert "ignored" in load(tmp_path, PLACE)[1]


@pytest.mark.parametrize(
    "change",
    [
        {"forward": {}},
        {"forward": {"native": -1}},
        {"refresh": "x"},
        {"overhead": -1},
        {"wgrad": {"native": 1.0, "sideways": 1.0}},
    ],
    ids=str,
)
def test_a_damaged_shape_is_measured_anew(change: dict[str, Any]) -> None:
    assert from_json(SMALL, to_json(made()) | change) is None
    assert from_json(SMALL, 3) is None


@pytest.mark.parametrize(
    "change", [{"rows": 5}, {"inputs": 9}, {"stored": "in_out"}, {"dtype": "bfloat16"}, {"outputs": 12}], ids=str
)
def test_every_part_of_a_shape_is_in_its_key(change: dict[str, Any]) -> None:
    assert name_of(replace(SMALL, **change)) != name_of(SMALL)


# --- facts -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake(each_s=1e-3)
    monkeypatch.setattr(gemm_timing, "timers_of", lambda shape, device: fake.prepare(shape))
    return fake


def timings(
    path: Path, *shapes: Shape, tune: bool = True, say: Say = lambda line: None, origin: Any = "here", **options: Any
) -> tuple[Timed, ...]:
    strategy = find("linear").model_validate({"cache": str(path), **options})
    config: Any = SimpleNamespace(strategies={"linear": strategy})
    given = replace(facts(), linears=tuple(Linear("l", "layers.0", shape) for shape in shapes))
    machine = replace(probe(), origin=origin)
    return gemm_timing.for_config(config, given, Ranks(), machine, tune=tune, say=say).timings


def test_the_second_run_measures_nothing(fake: Fake, tmp_path: Path) -> None:
    path = tmp_path / "linear.json"
    first = timings(path, SMALL, LARGE)
    calls = len(fake.calls)
    assert calls > 0 and {timed.shape for timed in first} == {SMALL, LARGE}
    assert timings(path, SMALL, LARGE) == first and len(fake.calls) == calls
    more = timings(path, SMALL, replace(SMALL, rows=9))
    assert len(fake.calls) > calls and len(more) == 2


def test_showing_a_plan_measures_nothing(fake: Fake, tmp_path: Path) -> None:
    assert timings(tmp_path / "none.json", SMALL, tune=False) == ()
    assert fake.calls == []


def test_a_file_that_cannot_be_written_costs_a_line(fake: Fake, tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "file").write_text("")
    found = timings(tmp_path / "file" / "x.json", SMALL, say=said.append)
    assert len(found) == 1 and "the next run measures again" in said[-1]


def test_only_adaptive_asks_for_timings_of_this_machine(fake: Fake, tmp_path: Path) -> None:
    path = tmp_path / "linear.json"
    assert timings(path, SMALL, transpose="minimal") == () and timings(path, SMALL, origin="profile") == ()
    assert fake.calls == [] and not path.exists()
    said: list[str] = []
    assert timings(path, SMALL, LARGE, budget_s=0.001, say=said.append) and "of 0.001 s" in said[0]


def test_the_usual_file_is_in_the_home_folder(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert timings(tmp_path, SMALL, cache=None)
    assert (tmp_path / ".cache/deepstow/linear.json").exists()


def decided(ranks: Ranks) -> list[float]:
    """The seconds that every rank takes, summed over ranks: only the first one looks for them."""

    def find() -> tuple[Timed, ...]:
        assert ranks.rank == 0
        return (made(value=1.0),)

    (taken,) = gemm_timing.of_first_rank(find)
    seconds = torch.tensor([taken.of(Gemm.FORWARD)[Route.NATIVE]])
    torch.distributed.all_reduce(seconds)
    return [float(seconds)]


@pytest.mark.ranks
def test_the_first_rank_decides_for_all() -> None:
    assert run_world(2, decided) == [2.0]


# --- for real --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", ["out_in", "in_out"])
def test_real_products_are_timed_over_every_route(stored: Any) -> None:
    shape = Shape(3, 5, 7, stored, "float32")
    found = measure([shape], lambda shape: timers_of(shape, "cpu"), 5.0, lambda line: None)[0]
    assert {gemm: len(found.of(gemm)) for gemm in Gemm} == {Gemm.FORWARD: 5, Gemm.DGRAD: 5, Gemm.WGRAD: 4}
    assert all(seconds > 0 for *_, seconds in found.seconds) and found.refresh_s > 0
    assert 0 <= found.overhead_s < 1e-2


def test_a_route_with_another_result_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = routed_linear.product

    def wrong(gemm: Gemm, route: Route, *operands: Any) -> Any:
        return right(gemm, route, *operands) * (1.01 if (gemm, route) == (Gemm.DGRAD, Route.FLIP) else 1.0)

    monkeypatch.setattr(routed_linear, "product", wrong)
    timers = timers_of(Shape(3, 5, 7, "out_in", "float32"), "cpu")
    assert (Gemm.DGRAD, Route.FLIP) not in timers and (Gemm.FORWARD, Route.FLIP) in timers
