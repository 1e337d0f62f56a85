"""Measuring with a fake timer: rounds, budget, the file and its strangers, one decision for all ranks."""

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
from trainer.machine.gemm_timing import REFRESH, ROUNDS, load, measure, place_of, save, timers_of
from trainer.machine.probe import probe

SMALL, LARGE = Shape(4, 8, 8, "out_in", "float32"), Shape(4, 16, 32, "out_in", "float32")
FLIPPED = (Gemm.FORWARD, Route.FLIP)
PRODUCTS = [*((gemm, Route.NATIVE) for gemm in Gemm), FLIPPED, REFRESH]


class Fake:
    """A clock, and products that take as long as they are told, in turn."""

    def __init__(self, *, each_s: float = 1.0, readings: Mapping[Any, list[float]] | None = None) -> None:
        self.now, self.each_s, self.readings = 0.0, each_s, dict(readings or {})
        self.calls: list[Any] = []

    def clock(self) -> float:
        return self.now

    def prepare(self, shape: Shape) -> dict[Any, Callable[[], float]]:
        return {product: self._run(product) for product in PRODUCTS}

    def _run(self, product: Any) -> Callable[[], float]:
        def run() -> float:
            self.now += self.each_s
            self.calls.append(product)
            given = self.readings.get(product)
            return given.pop(0) if given else self.each_s

        return run


def made(shape: Shape = SMALL, value: float = 1e-3) -> Timed:
    return Timed(shape, (*((gemm, Route.NATIVE, value) for gemm in Gemm), (Gemm.WGRAD, Route.LEFT, 5e-4)), 2e-4)


def test_routes_take_turns_and_the_least_counts() -> None:
    fake = Fake(each_s=0.001, readings={FLIPPED: [9.0, 0.0012, 5.0, 0.0011, *[7.0] * 20]})
    (found,) = measure([SMALL], fake.prepare, 1000.0, lambda line: None, fake.clock)
    assert found.of(Gemm.FORWARD) == {Route.NATIVE: 0.001, Route.FLIP: 0.0011}
    assert found.of(Gemm.WGRAD) == {Route.NATIVE: 0.001} and found.refresh_s == 0.001
    assert fake.calls == PRODUCTS * ROUNDS


def test_the_budget_ends_it_and_what_is_left_is_said() -> None:
    """The first shape is measured however small the budget, and each reached one in at least two rounds."""
    fake, said = Fake(each_s=1.0), []
    found = measure([LARGE, SMALL, replace(SMALL, rows=5)], fake.prepare, 15.0, said.append, fake.clock)
    assert [timed.shape for timed in found] == [LARGE, SMALL]  # two rounds of five each
    assert said[0].startswith("measuring linear layers, 1 of 3: 16 -> 32, 4 tokens, float32; 0 of 15 s")
    assert "1 were not reached and stay native: raise strategies.linear.budget_s" in said[-1]
    assert len(measure([LARGE, SMALL], fake.prepare, 0.1, said.append, fake.clock)) == 1


def test_a_shape_that_cannot_be_measured_costs_a_line() -> None:
    fake, said = Fake(each_s=0.001), []

    def prepare(shape: Shape) -> Any:
        if shape == LARGE:
            raise RuntimeError("out of memory\nand much more")
        timers = fake.prepare(shape)
        return {FLIPPED: timers[FLIPPED], REFRESH: timers[REFRESH]} if shape.rows == 9 else timers

    odd = replace(SMALL, rows=9)  # torch's own products have no numbers
    (found,) = measure([LARGE, SMALL, odd], prepare, 60.0, said.append, fake.clock)
    assert found.shape == SMALL and "9 tokens, float32 stays native, it could not be measured: seconds" in said[4]
    assert said[1] == "16 -> 32, 4 tokens, float32 stays native, it could not be measured: out of memory"
    assert "not reached" not in said[-1]


# --- the file --------------------------------------------------------------------------------------------------------


def test_what_was_measured_comes_back_by_place(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "linear.json"
    save(path, "here", [made()])
    save(path, "there", [made()])
    save(path, "here", [made(LARGE), made(value=2e-3)])
    assert load(path) == ({"here": [made(value=2e-3), made(LARGE)], "there": [made()]}, "")


def test_all_that_timings_depend_on_is_in_the_place() -> None:
    machine = probe()
    cuda = replace(machine, device_kind="cuda")
    places = {
        place_of(each, threads) for each in (machine, replace(machine, name="other"), cuda) for threads in (1, 99)
    }
    assert len(places) == 5  # threads count on a CPU only
    assert f"torch {torch.__version__}" in place_of(machine)
    assert f"CUDA {torch.version.cuda}" in place_of(cuda) or torch.version.hip


BROKEN = ["{", "[]", '{"here": [3]}', "\x00\xff"]
DAMAGED = [("0.0002", "NaN"), ("0.0005", "0"), ('"left"', '"sideways"'), ('"forward"', '"dgrad"')]


def test_a_broken_file_is_ignored_in_one_line_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "linear.json"
    for change in (*BROKEN, *DAMAGED):
        save(path, "here", [made()])
        assert load(path) == ({"here": [made()]}, "")
        path.write_text(change if isinstance(change, str) else path.read_text().replace(*change), encoding="latin-1")
        measured, ignored = load(path)
        assert measured == {} and ignored.startswith(f"{path} is ignored") and "\n" not in ignored, change
    assert "ignored" in load(tmp_path)[1], "a folder"


# --- facts -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake(each_s=1e-3)
    monkeypatch.setattr(gemm_timing, "timers_of", lambda shape, device: fake.prepare(shape))
    return fake


def timings(
    path: Path,
    *shapes: Shape,
    tune: bool = True,
    say: Callable[[str], None] = lambda line: None,
    origin: Any = "here",
    **options: Any,
) -> tuple[Timed, ...]:
    strategy = find("linear").model_validate({"cache": str(path), **options})
    config: Any = SimpleNamespace(strategies={"linear": strategy})
    given = replace(facts(), linears=tuple(Linear("l", "layers.0", shape) for shape in shapes))
    machine = replace(probe(), origin=origin)
    return gemm_timing.for_config(config, given, Ranks(), machine, tune=tune, say=say).timings


def test_the_second_run_measures_nothing(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / ".cache/deepstow/linear.json"  # the usual one
    first = timings(path, SMALL, LARGE, cache=None)
    calls = len(fake.calls)
    assert calls > 0 and {timed.shape for timed in first} == {SMALL, LARGE}
    assert timings(path, SMALL, LARGE) == first and len(fake.calls) == calls
    more = timings(path, SMALL, replace(SMALL, rows=9))
    assert len(fake.calls) > calls and len(more) == 2


def test_timings_of_another_machine_are_not_used(fake: Fake, tmp_path: Path) -> None:
    path, said = tmp_path / "linear.json", list[str]()
    save(path, "there", [made()])
    assert timings(path, SMALL, say=said.append) != (made(),) and len(fake.calls) > 0
    assert said[0].startswith(f"{path} is not used: nothing in it was measured on this machine")


def test_a_file_that_cannot_be_written_costs_a_line(fake: Fake, tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "file").write_text("")
    found = timings(tmp_path / "file" / "x.json", SMALL, say=said.append)
    assert len(found) == 1 and "the next run measures again" in said[-1]


def test_only_adaptive_asks_for_timings_of_this_machine(fake: Fake, tmp_path: Path) -> None:
    path = tmp_path / "linear.json"
    assert timings(path, SMALL, transpose="minimal") == () and timings(path, SMALL, origin="profile") == ()
    assert timings(path, SMALL, tune=False) == (), "showing a plan measures nothing"
    assert fake.calls == [] and not path.exists()
    said: list[str] = []
    assert timings(path, SMALL, LARGE, budget_s=0.001, say=said.append) and "of 0.001 s" in said[0]


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


def test_real_products_are_timed_over_every_route() -> None:
    shapes = [Shape(3, 5, 7, "out_in", "float32"), Shape(3, 5, 7, "in_out", "float32")]
    both = measure(shapes, lambda shape: timers_of(shape, "cpu"), 60.0, lambda line: None)
    assert [found.shape for found in both] == shapes
    for found in both:
        assert {gemm: len(found.of(gemm)) for gemm in Gemm} == {Gemm.FORWARD: 5, Gemm.DGRAD: 5, Gemm.WGRAD: 4}
        assert all(seconds > 0 for *_, seconds in found.seconds) and found.refresh_s > 0


def test_a_route_with_another_result_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = routed_linear.product

    def wrong(gemm: Gemm, route: Route, *operands: Any) -> Any:
        return right(gemm, route, *operands) * (1.01 if (gemm, route) == (Gemm.DGRAD, Route.FLIP) else 1.0)

    monkeypatch.setattr(routed_linear, "product", wrong)
    timers = timers_of(Shape(3, 5, 7, "out_in", "float32"), "cpu")
    assert (Gemm.DGRAD, Route.FLIP) not in timers and FLIPPED in timers
