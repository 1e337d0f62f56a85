"""Linear layers over every route: derivatives, values, copies that are never stale, a state dict as it was."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from deepstow.strategies.core.linears import LEGAL, Gemm, Route, Routes
from deepstow.strategies.engine.forward.routed_linear import route, weights_changed
from tests.helpers.pairwise import Table

KINDS = ("linear", "conv1d")
BOTH = Routes(forward=Route.COPY, dgrad=Route.COPY)


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


ROUTES: Mapping[str, Sequence[object]] = {"kind": KINDS, **{gemm.value: routes for gemm, routes in LEGAL.items()}}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def ids(row: Mapping[str, Any]) -> str:
    return ", ".join(str(getattr(level, "value", level)) for level in row.values())


def routes_of(row: Mapping[str, Any]) -> Routes:
    return Routes(**{gemm.value: row[gemm.value] for gemm in Gemm})


@pytest.mark.parametrize(
    "routes", [Routes(*[Route.COPY] * 2, Route.LEFT), Routes(Route.FLIP, Route.RIGHT, Route.FLIP)], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_derivatives(kind: str, routes: Routes) -> None:
    """By the weight as well, which a backward that is differentiated in turn has to read instead of the copy."""

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
FACTORS = {**ROUTES, "dtype": list(TOLERANCE), "input": list(INPUTS), "outputs": [1, 4, 16], "bias": [True, False]}


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
    made = routed(layer("linear", 3, 4), Routes(wgrad=Route.LEFT))
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


# --- the second copy -------------------------------------------------------------------------------------------------


def test_the_copy_is_written_once_per_change_that_is_seen_or_announced() -> None:
    made = routed(layer("linear", 5, 5), BOTH)
    x, weight = torch.randn(2, 5, dtype=torch.float64), made.weight
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1, foreach=False)
    other = torch.ones(5, 5, dtype=torch.float64)

    def unseen() -> None:
        weight.data.fill_(3.0)  # what engines with flat buffers do: the same address, no version

    made(x).sum().backward()
    held = made._copy.tensor
    for change, written in (
        (lambda: made(x).sum().backward(), False),  # another micro-batch
        (optimizer.step, True),
        (lambda: setattr(weight, "data", other), True),  # another address
        (lambda: made.load_state_dict({"weight": 2 * other, "bias": made.bias.detach()}), True),
        (unseen, False),
        (lambda: weights_changed(made), True),
        (lambda: weight.requires_grad_(False), False),
        (lambda: weights_changed(made), False),  # steps change no frozen weight
    ):
        before = held._version
        change()
        assert torch.equal(made.eval()(x), torch.addmm(made.bias, x, weight.t())), "evaluation reads the weight itself"
        made.train()(x), made(x)
        assert held._version - before == written
        assert torch.equal(held, weight.t()) is (change is not unseen)


def test_backward_refuses_a_copy_made_since_its_forward() -> None:
    made = routed(layer("linear", 3, 4), Routes(forward=Route.COPY, dgrad=Route.COPY))
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    first = made(x)
    made.weight.data.add_(1.0)
    weights_changed(made)
    made(x)
    with pytest.raises(RuntimeError, match="changed between a forward and its backward"):
        first.sum().backward()


# --- surroundings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("routes", [BOTH, Routes(wgrad=Route.FLIP)], ids=str)
def test_autocast(routes: Routes) -> None:
    made = layer("linear", 24, 16, dtype=torch.float32)
    x = torch.randn(3, 5, 24)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = results(made, x), results(routed(made, routes), x)
    for one, other in zip(expected, found, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(other, one, rtol=2e-2, atol=2e-2)


def test_other_layers_are_refused_by_name() -> None:
    model = nn.Sequential(nn.LayerNorm(3))
    with pytest.raises(ValueError, match="0 is LayerNorm"):
        route(model, {"0": BOTH})
