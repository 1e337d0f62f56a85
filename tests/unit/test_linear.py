"""The linear strategy: what it declares, which layers it takes, and what is chosen from measured seconds."""

from typing import Any

import pytest
import torch
from torch import nn

from deepstow.strategies.core.compose import compose
from deepstow.strategies.core.protocol import BITWISE
from deepstow.strategies.core.registry import find
from deepstow.strategies.engine.forward import routed_linear
from deepstow.strategies.engine.forward.routed_linear import (
    FLIP,
    LEFT,
    NATIVE,
    ROUTES,
    Routes,
    Shape,
    fastest,
    layers_of,
    measured,
)
from deepstow.strategies.report import plan_table
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from tests.helpers.fakes import facts, run_facts

CPU = torch.device("cpu")
SHAPE = Shape(10, 4, 6, "out_in", torch.float32, trains=True)


def linear(**options: Any) -> Any:
    return find("linear").model_validate(options)


def test_parity_is_declared_by_mode() -> None:
    assert linear(transpose="native").parity(run_facts(accumulation=3)) == BITWISE
    assert linear().parity(run_facts()).tolerance == 1e-4


def test_the_plan_says_who_computes() -> None:
    plan = compose({"linear": linear()}, facts())
    assert "computed: adaptive [linear: the fastest, measured at the start]" in plan_table.explained(plan, "head")
    assert "native leaves every layer" in compose({"linear": linear(transpose="native")}, facts()).idle["linear"]


@pytest.mark.parametrize("transpose", [NATIVE, FLIP])
def test_a_route_is_taken_by_every_linear_layer(transpose: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    strategy = linear(transpose=transpose)
    strategy.apply(model, compose({"linear": strategy}, facts()))
    taken = {path: layer._routes for path, layer in model.named_modules() if isinstance(layer, routed_linear.Routed)}
    assert taken == ({} if transpose == NATIVE else dict.fromkeys(("0", "2"), Routes(FLIP, FLIP, FLIP)))
    assert layers_of(model).keys() == ({"0", "2"} if transpose == NATIVE else set()), "routed ones are stock no more"


def timed(**seconds: float) -> Any:
    """Seconds by product and route, as ``wgrad_left=9``; 10 natively unless given."""

    def of(gemm: str, shape: Shape, device: torch.device) -> dict[str, float]:
        given = {route: seconds[key] for route in ROUTES if (key := f"{gemm}_{route}") in seconds}
        return {NATIVE: 10.0} | given

    return of


SMALL = {f"{gemm}_native": 1e-5 for gemm in Routes._fields}


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({}, Routes()),
        ({"wgrad_left": 9.6}, Routes()),  # 4 % of the product, 1.3 % of the layer
        ({"wgrad_left": 9.0}, Routes(wgrad=LEFT)),
        ({"wgrad_left": 9.0, "dgrad_flip": 9.8}, Routes(wgrad=LEFT)),
        ({"dgrad_left": 8.0, "dgrad_flip": 7.0, "dgrad_right": 9.0}, Routes(dgrad=FLIP)),
        (SMALL | {"forward_flip": 1e-6}, Routes()),  # a Python function costs 15 us per forward
        (SMALL | {f"{gemm}_flip": 1e-6 for gemm in Routes._fields}, Routes(FLIP, FLIP, FLIP)),
    ],
)
def test_fastest(seconds: dict[str, float], expected: Routes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed_linear, "_seconds", timed(**seconds))
    assert fastest(SHAPE, CPU) == expected


def test_weights_that_are_not_trained_have_no_gradient_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed_linear, "_seconds", timed(wgrad_left=1.0))
    assert fastest(SHAPE._replace(trains=False), CPU) == Routes()


@pytest.mark.parametrize("stored", ["out_in", "in_out"])
def test_real_products_are_timed_over_every_route_with_the_right_result(
    stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(3, 5, 7, stored, torch.float32, trains=True)
    for gemm in Routes._fields:
        assert routed_linear._seconds(gemm, shape, CPU).keys() == set(ROUTES)
    right = routed_linear.product

    def wrong(gemm: str, route: str, *operands: Any) -> Any:
        return right(gemm, route, *operands) * (1.01 if (gemm, route) == ("dgrad", FLIP) else 1.0)

    monkeypatch.setattr(routed_linear, "product", wrong)
    assert routed_linear._seconds("dgrad", shape, CPU).keys() == set(ROUTES) - {FLIP}
    monkeypatch.setattr(routed_linear, "product", lambda *given: right(*given) * torch.nan)
    assert routed_linear._seconds("dgrad", shape, CPU).keys() == {NATIVE}


def test_random_numbers_go_on_as_if_nothing_was_measured() -> None:
    layer, before = nn.Linear(3, 4), torch.get_rng_state()
    measured({"a": layer}, run_facts())
    assert torch.equal(torch.get_rng_state(), before)


def test_what_cannot_be_measured_or_is_not_reached_stays_native(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = {"small": nn.Linear(2, 2), "large": nn.Linear(8, 8)}
    seen: list[int] = []

    def no_memory(shape: Shape, device: torch.device) -> Routes:
        seen.append(shape.inputs)
        if shape.inputs == 8:
            raise RuntimeError("out of memory")
        return Routes(FLIP)

    monkeypatch.setattr(routed_linear, "fastest", no_memory)
    assert measured(layers, run_facts()) == {"small": Routes(FLIP)} and seen == [8, 2], "the most work first"
    monkeypatch.setattr(routed_linear, "BUDGET_S", 0.0)
    assert measured(layers, run_facts()) == {}


def decided(ranks: Ranks) -> list[dict[str, list[str]]]:
    """By each rank, which has a layer of its own and one that all have, and measures other routes for it."""
    routed_linear.fastest = lambda shape, device: Routes(ROUTES[1 + ranks.rank])
    layers = {"all": nn.Linear(2, 2), f"of {ranks.rank}": nn.Linear(3 + ranks.rank, 2)}
    mine = {path: list(routes) for path, routes in measured(layers, run_facts()).items()}
    everyones: list[Any] = [None] * ranks.world_size
    torch.distributed.all_gather_object(everyones, mine)
    return everyones


@pytest.mark.ranks
def test_one_decision_for_all_ranks() -> None:
    first, second = run_world(2, decided)
    flip, left = list(Routes(FLIP)), list(Routes(LEFT))
    assert (first, second) == ({"all": flip, "of 0": flip}, {"all": flip, "of 1": left})
