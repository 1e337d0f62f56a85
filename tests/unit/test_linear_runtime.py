"""Linear layers over every route: derivatives, values, a state dict as it was."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from deepstow.strategies.engine.forward.routed_linear import FLIP, LEFT, RIGHT, ROUTES, Routes, route
from tests.helpers.pairwise import Table

KINDS = ("linear", "conv1d")
BOTH = Routes(forward=FLIP, dgrad=RIGHT)


def layer(kind: str, inputs: int, outputs: int, *, bias: bool = True, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(inputs * 100 + outputs)
    made = nn.Linear(inputs, outputs, bias=bias) if kind == "linear" else Conv1D(outputs, inputs)
    if made.bias is not None:
        nn.init.normal_(made.bias)
    return made.to(dtype)


def routed(made: Any, routes: Routes) -> Any:
    """A copy of the layer with these routes."""
    model = nn.Sequential(copy.deepcopy(made))
    route(model, {"0": routes})
    return model[0]


def results(made: Any, x: Tensor) -> list[Tensor]:
    """Output and gradients of one forward and backward."""
    made.zero_grad()
    x = x.detach().requires_grad_()
    out = made(x)
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64).reshape(out.shape).to(out.dtype)
    out.backward(weights)
    assert x.grad is not None
    return [out, x.grad, *(param.grad for param in made.parameters())]


BY_PRODUCT: Mapping[str, Sequence[object]] = {"kind": KINDS, **dict.fromkeys(Routes._fields, ROUTES)}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def ids(row: Mapping[str, Any]) -> str:
    return ", ".join(str(getattr(level, "value", level)) for level in row.values())


def routes_of(row: Mapping[str, Any]) -> Routes:
    return Routes(**{gemm: row[gemm] for gemm in Routes._fields})


@pytest.mark.parametrize("routes", [Routes(LEFT, LEFT, LEFT), Routes(FLIP, RIGHT, FLIP)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_derivatives(kind: str, routes: Routes) -> None:
    """By the weight as well."""

    def second(made: Any) -> tuple[Tensor, ...]:
        x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3).requires_grad_()
        (first,) = torch.autograd.grad(made(x).pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), [x, *made.parameters()])

    made = layer(kind, 3, 5)
    for one, other in zip(second(made), second(routed(made, routes)), strict=True):
        torch.testing.assert_close(other, one)


# Odd sizes, one token, one number, no token, any number of dimensions; rows that are transposed, strided or repeated.
INPUTS: Mapping[str, Callable[[], Tensor]] = {
    "matrix": lambda: torch.randn(7, 13),
    "one token": lambda: torch.randn(1, 9),
    "three dimensions": lambda: torch.randn(2, 3, 11),
    "vector": lambda: torch.randn(6),
    "no token": lambda: torch.randn(0, 5),
    "one number": lambda: torch.randn(3, 1, 1),
    "transposed": lambda: torch.randn(6, 4, 3).transpose(0, 2),
    "strided": lambda: torch.randn(8, 12)[::2, ::2],
    "repeated": lambda: torch.randn(1, 6).expand(4, 6),
}
FACTORS = {**BY_PRODUCT, "dtype": list(TOLERANCE), "input": list(INPUTS), "outputs": [1, 4, 16], "bias": [True, False]}


@pytest.mark.parametrize("row", Table(FACTORS, [(("kind", "conv1d"), ("bias", False))]).rows(), ids=ids)
def test_values_are_those_of_the_stock_layer(row: Mapping[str, Any]) -> None:
    torch.manual_seed(1)
    x = INPUTS[row["input"]]().to(row["dtype"])
    made = layer(row["kind"], x.shape[-1], row["outputs"], bias=row["bias"], dtype=row["dtype"])
    tolerance = TOLERANCE[row["dtype"]]
    expected = results(made, x.contiguous())  # which the stock Conv1D insists on
    found = results(routed(made, routes_of(row)), x)
    assert found[0].is_contiguous(), "the layers after it may call view"
    for one, other in zip(expected, found, strict=True):
        assert other.shape == one.shape and other.dtype == one.dtype
        torch.testing.assert_close(other, one, rtol=tolerance, atol=tolerance)


def test_a_native_forward_makes_the_call_of_the_stock_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another product takes another route. Other calls may have the same bits at some sizes only."""
    made = routed(layer("linear", 3, 4), Routes(wgrad=LEFT))
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, weight, bias: x.new_full((len(x), len(weight)), 7.0))
    assert (made(torch.randn(2, 3, dtype=torch.float64)) == 7.0).all()


def test_frozen_weights_and_inputs_take_no_products() -> None:
    made = routed(layer("linear", 4, 3), BOTH)
    made.weight.requires_grad_(False)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    made(x).sum().backward()
    assert made.weight.grad is None and x.grad is not None and made.bias.grad is not None
    made.weight.requires_grad_(True)
    made(x.detach()).sum().backward()
    assert made.weight.grad is not None
    with torch.no_grad():
        assert not made(x).requires_grad


@pytest.mark.parametrize("routes", [BOTH, Routes(wgrad=FLIP)], ids=str)
def test_autocast(routes: Routes) -> None:
    made = layer("linear", 24, 16, dtype=torch.float32)
    x = torch.randn(3, 5, 24)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = results(made, x), results(routed(made, routes), x)
    for one, other in zip(expected, found, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(other, one, rtol=2e-2, atol=2e-2)


# --- surroundings ----------------------------------------------------------------------------------------------------
