"""Whatever a loop of one's own writes to weights or gradients is there, as in plain torch, or one line refuses it.

Each idiom runs plainly and under plans that let weights, gradients and state rest in every place. A plan either trains
to the same bits or refuses with the idiom's line. The table says which it is, so that neither changes unseen.
"""

import copy
import ctypes
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations, parametrize, vector_to_parameters

from strategies.engine.transfer.transfer import Transfer
from tests.helpers.models import Net, build
from tests.helpers.releases import needs_scratch
from tests.helpers.sides import BATCHES, Plain, Script, both_sides, refused, train, training

NORM = 0.05
PLANS: dict[str, dict[str, Any]] = {
    "device": {"site": "device"},  # the home is the only memory of every weight
    "device, travelling": {"site": "device", "weights": "travelling", "prefetch": 1},
    "host": {"site": "host", "park": "host"},
    "host, travelling": {"site": "host", "weights": "travelling", "bucket": "half", "park": "host", "prefetch": 1},
    "host, without slots": {"site": "host", "weights": "travelling", "park": "host", "direct": True},
    "streamed": {"site": "streamed", "weights": "travelling", "park": "host", "prefetch": 1},
    "streamed, waits there": {"site": "streamed", "weights": "some", "park": "device", "prefetch": 1},
}
AHEAD = {"site": "host", "weights": "travelling", "park": "host", "ahead": True, "prefetch": 1}
UP, FROZEN = "layers.1.up.weight", "layers.2.spare.weight"  # of blocks


class Partly(Net):
    """Some of its parameters are frozen."""

    def __init__(self) -> None:
        super().__init__()
        for name in (FROZEN, "head.bias"):
            self.get_parameter(name).requires_grad_(False)


net = partial(build, Partly)
low = partial(build, Partly, dtype=torch.bfloat16)


@torch.library.custom_op("test_writes::scale", mutates_args=("it",))
def scale(it: Tensor, factor: float) -> None:
    """A writer whose name does not say so."""
    it.mul_(factor)


# --- gradients -------------------------------------------------------------------------------------------------------


def each(change: Callable[[Any], object]) -> Script:
    """``change`` of every parameter that has a gradient; no grad is recorded."""

    def between(model: Any, optimizer: Any) -> None:
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    change(param)

    return between


def ours(model: Any, optimizer: Any) -> float:
    return float(optimizer.clip_grad_norm_(NORM))


def torchs(model: Any, optimizer: Any) -> float:
    return float(clip_grad_norm_(model.parameters(), NORM / 2))


def by_value(model: Any, optimizer: Any) -> None:
    clip_grad_value_(model.parameters(), 1e-3)


def in_two_groups(model: Any, optimizer: Any) -> list[float]:
    params = list(model.parameters())
    return [float(clip_grad_norm_(some, NORM / 10)) for some in (params[:5], params[5:])]


def half_of_them(model: Any, optimizer: Any) -> float:
    return float(clip_grad_norm_(list(model.parameters())[:5], NORM / 10))


def scaled(factor: Any) -> Script:
    return each(lambda param: param.grad.mul_(factor))


def decayed_by_layer(model: Any, optimizer: Any) -> None:
    for number, param in enumerate(model.parameters()):
        if param.grad is not None:
            param.grad *= 0.9**number


def in_lists(model: Any, optimizer: Any) -> None:
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    torch._foreach_mul_(grads, [0.5 + 0.1 * number for number in range(len(grads))])
    torch._foreach_add_(grads, grads, alpha=0.1)


def some_zero(model: Any, optimizer: Any) -> None:
    for name in (UP, "embed.weight"):
        model.get_parameter(name).grad.zero_()


def some_none(model: Any, optimizer: Any) -> None:
    for name in (UP, "embed.weight"):
        model.get_parameter(name).grad = None


def rows_zero(model: Any, optimizer: Any) -> None:
    model.embed.weight.grad[2:9] = 0.0
    model.get_parameter(UP).grad[torch.arange(48) % 2 == 0] = 0.0


def noisy(model: Any, optimizer: Any) -> None:
    numbers = torch.Generator().manual_seed(4)
    each(lambda param: param.grad.add_(torch.randn(param.shape, generator=numbers).to(param.device), alpha=1e-3))(
        model, optimizer
    )


def looks(model: Any, optimizer: Any) -> list[Tensor]:
    return [param.grad + 0.0 for param in model.parameters() if param.grad is not None]


def one_after_another(*changes: Script) -> Script:
    """What each of them sees, and the gradients at the end."""
    return training(lambda model, optimizer: [change(model, optimizer) for change in (*changes, looks)])


def unscaling(*order: str) -> Script:
    """A GradScaler's unscaling in some order with others' factors and clipping, under fp16."""

    def script(model: Any, optimizer: Any) -> list[Any]:
        scaler, seen = torch.amp.GradScaler("cpu", 2.0**10), list[Any]()
        for batch in BATCHES[:3]:
            with torch.autocast("cpu", torch.float16):
                loss = model(**batch).loss
            scaler.scale(loss).backward()
            for one in order:
                if one == "unscale":
                    scaler.unscale_(optimizer)
                else:
                    seen.append({"a third": scaled(1 / 3), "ours": ours, "torch's": torchs}[one](model, optimizer))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return seen

    return script


GRADIENTS: dict[str, Script] = {
    "a third, then ours": one_after_another(scaled(1 / 3), ours),
    "times four, then ours": one_after_another(scaled(4.0), ours),
    "a tensor, then torch's": one_after_another(scaled(torch.tensor(0.3)), torchs),
    "ours, then a third": one_after_another(ours, scaled(1 / 3)),
    "ours twice": one_after_another(ours, lambda _, optimizer: float(optimizer.clip_grad_norm_(NORM / 3))),
    "ours, then not": one_after_another(ours, lambda _, optimizer: float(optimizer.clip_grad_norm_(torch.inf))),
    "torch's, then ours": one_after_another(torchs, ours),
    "ours, then torch's": one_after_another(ours, torchs),
    "scaled three times": one_after_another(scaled(3), scaled(1 / 3), scaled(0.7)),
    "ours, by value, scaled, torch's": one_after_another(ours, by_value, scaled(3), torchs),
    "in two groups": one_after_another(in_two_groups),
    "half of them, then ours": one_after_another(half_of_them, ours),
    "decayed by layer": one_after_another(decayed_by_layer),
    "decayed by layer, then ours": one_after_another(decayed_by_layer, ours),
    "lists": one_after_another(in_lists, ours),
    "some zero": one_after_another(some_zero, ours),
    "scaled, some zero, scaled": one_after_another(scaled(0.3), some_zero, scaled(3.0)),
    "some None, scaled, then ours": one_after_another(some_none, scaled(0.3), ours),
    "all zero, and another backward": lambda model, optimizer: [
        model(**BATCHES[0]).loss.backward(), model.zero_grad(set_to_none=False), one_after_another(ours)(model, optimizer)
    ],
    "rows": one_after_another(rows_zero, ours),
    "a mask": one_after_another(each(lambda param: param.grad.mul_(torch.ones_like(param).cumsum(-1) > 3))),
    "centred": one_after_another(each(lambda param: param.grad.sub_(param.grad.mean())), ours),
    "decay": one_after_another(each(lambda param: param.grad.add_(param, alpha=0.1)), ours),
    "data": one_after_another(each(lambda param: param.grad.data.detach().add_(0.1).mul_(0.5))),
    "assigned": one_after_another(each(lambda param: setattr(param, "grad", param.grad * 0.3 + 0.1)), ours),
    "divided by 3": one_after_another(each(lambda param: param.grad.div_(3)), ours),
    "out": one_after_another(each(lambda param: torch.mul(param.grad, 0.3, out=param.grad)), ours),
    "an overload": one_after_another(each(lambda param: torch.ops.aten.mul_.Scalar(param.grad, 0.3)), ours),
    "a custom operator": one_after_another(each(lambda param: scale(param.grad, 0.3)), ours),
}  # fmt: skip
# These do not multiply, so that the step clips as planned.
CLIPPED_AS_PLANNED: dict[str, Script] = {
    "by value": one_after_another(by_value),
    "noise": one_after_another(noisy),
    "signs": one_after_another(each(lambda param: param.grad.copy_(param.grad.sign()))),
    "relu, in place": one_after_another(each(lambda param: functional.relu(param.grad, inplace=True))),
    "threshold, in place": one_after_another(each(lambda param: functional.threshold(param.grad, 0.0, 0.5, True))),
    "dropout, in place": one_after_another(each(lambda param: functional.dropout(param.grad, 0.5, True, True))),
}  # fmt: skip
UNSCALED: dict[str, Script] = {
    ", ".join(order): unscaling(*order)
    for order in (
        ("unscale", "a third", "ours"), ("a third", "unscale", "torch's"), ("unscale", "ours", "a third"),
        ("ours", "unscale"), ("a third", "ours"), ("torch's", "unscale", "ours"),
    )
}  # fmt: skip
RAW: dict[str, tuple[Callable[[Any], object], str]] = {
    "a slice": (lambda grad: grad[2:9].zero_(), "write to param.grad itself"),
    "a row, by a custom operator": (lambda grad: scale(grad[2:9], 0.0), "write to param.grad itself"),
    "its storage": (lambda grad: grad.untyped_storage().fill_(0), "on the storage"),
    "its storage, typed": (lambda grad: grad.storage().fill_(0), "could be written to unseen"),
    "NumPy": (lambda grad: grad.numpy().fill(0), "read-only"),
    "DLPack": (lambda grad: torch.from_dlpack(grad).zero_(), "could be written to unseen"),
}


@pytest.mark.parametrize("idiom", GRADIENTS)
def test_gradients(idiom: str) -> None:
    both_sides(net, GRADIENTS[idiom], PLANS.values(), clips=True, max_norm=NORM, transfer=Transfer)


@pytest.mark.parametrize("idiom", CLIPPED_AS_PLANNED)
def test_gradients_that_the_step_clips(idiom: str) -> None:
    for norm in (0.0, NORM):
        both_sides(net, CLIPPED_AS_PLANNED[idiom], PLANS.values(), max_norm=norm, transfer=Transfer)


@pytest.mark.parametrize("idiom", UNSCALED)
def test_gradients_of_a_scaled_loss(idiom: str) -> None:
    how: dict[str, Any] = {"clips": True, "max_norm": NORM, "fused": False, "transfer": Transfer}
    both_sides(net, UNSCALED[idiom], [PLANS["device"], PLANS["streamed"]], **how)


@pytest.mark.parametrize("idiom", RAW)
def test_gradients_that_are_written_unseen(idiom: str) -> None:
    write, line = RAW[idiom]
    refused(net, training(lambda model, _: write(model.embed.weight.grad)), line, PLANS["streamed"])


# --- weights ---------------------------------------------------------------------------------------------------------


def after_steps(*writes: Script, steps: int = 2) -> Script:
    """Train, write, and train on; what a write returns, and the loss of another batch right after it, are seen."""

    def script(model: Any, optimizer: Any) -> list[Any]:
        seen = train(model, optimizer, BATCHES[:steps])
        for number, write in enumerate(writes):
            with torch.no_grad():
                seen.append(write(model, optimizer))
                seen.append(float(model(**BATCHES[7]).loss))
            seen += train(model, optimizer, BATCHES[2 + steps * number :][:steps])
        return seen

    return script


def to(*names: str) -> Callable[[Callable[[Any], object]], Script]:
    """A write to the parameters of these names."""

    def of(write: Callable[[Any], object]) -> Script:
        def script(model: Any, optimizer: Any) -> None:
            for name in names:
                write(model.get_parameter(name))

        return script

    return of


def inside_present(write: Script) -> Script:
    def script(model: Any, optimizer: Any) -> object:
        with optimizer.present(model.parameters()):
            return write(model, optimizer)

    return script


def to_parameter(change: Callable[[Any], object]) -> Script:
    return to(UP, "embed.weight", FROZEN)(change)


def numbers(param: Tensor) -> Tensor:
    return torch.linspace(-0.1, 0.1, param.numel()).view(param.shape).to(param)


def through_ctypes(param: Tensor) -> None:
    ctypes.memset(param.data_ptr(), 0, param.nbytes)


def another(name: str, register: Callable[[nn.Module, str, nn.Parameter], object], trained: bool = True) -> Script:
    def write(model: Any, optimizer: Any) -> None:
        owner, _, key = name.rpartition(".")
        register(model.get_submodule(owner), key, nn.Parameter(torch.ones(32, 32), trained))

    return write


HERE = "written to in place; write under"
SHOWN = "what a stowed parameter shows"
PLANNED = "whose memory is planned|memory of a stowed model is planned"
WRITES: dict[str, tuple[Script, str]] = {
    "mul_": (to_parameter(lambda param: param.mul_(0.5)), f"{HERE}|on a parameter that is away"),
    "index": (to_parameter(lambda param: param.__setitem__(3, 0.5)), f"{HERE}|on a parameter that is away"),
    "init": (to_parameter(lambda param: nn.init.constant_(param, 0.01)), f"{HERE}|on a parameter that is away"),
    "out": (to_parameter(lambda param: torch.mul(param, 0.5, out=param)), f"{HERE}|on a parameter that is away"),
    "a list": (to_parameter(lambda param: torch._foreach_lerp_([param], [numbers(param)], 0.3)), f"{HERE}|is away"),
    "an overload": (to_parameter(lambda param: torch.ops.aten.mul_.Scalar(param, 0.5)), f"{HERE}|is away"),
    "a packet": (to_parameter(lambda param: torch.ops.aten.mul_(param, 0.5)), f"{HERE}|is away"),
    "a custom operator": (to_parameter(lambda param: scale(param, 0.5)), f"{HERE}|is away"),
    "relu, in place": (to_parameter(lambda param: functional.relu(param, inplace=True)), f"{HERE}|is away"),
    "renormed": (
        to("embed.weight", UP)(lambda param: functional.embedding(torch.arange(9), param, max_norm=0.1)),
        f"{HERE}|a function wrote to a copy",
    ),
    "detach().mul_": (to_parameter(lambda param: param.detach().mul_(0.5)), f"{HERE}|{SHOWN}"),
    "detach(), a custom operator": (to_parameter(lambda param: scale(param.detach(), 0.5)), f"{HERE}|{SHOWN}"),
    "data.mul_": (to_parameter(lambda param: param.data.mul_(0.5)), f"{SHOWN}"),
    "data, a custom operator": (to_parameter(lambda param: scale(param.data, 0.5)), f"{SHOWN}"),
    "data, a view": (to_parameter(lambda param: param.data.view(-1)[3:9].copy_(torch.ones(6))), f"{SHOWN}"),
    "data =": (to_parameter(lambda param: setattr(param, "data", param.data * 0.5)), PLANNED),
    "set_": (to_parameter(lambda param: param.set_(numbers(param))), PLANNED),
    "vector_to_parameters": (lambda m, _: vector_to_parameters(torch.zeros(40000), m.parameters()), PLANNED),
    "half()": (lambda m, _: m.half(), PLANNED),
    "swap_tensors": (
        to_parameter(lambda param: torch.utils.swap_tensors(param, nn.Parameter(numbers(param)))), "has weakref",
    ),
    "another parameter": (another(FROZEN, setattr), "is not in the optimizer"),
    "another frozen parameter": (another(FROZEN, setattr, False), "is not the one that was stowed"),
    "another, in _parameters": (
        another(FROZEN, lambda module, key, param: module._parameters.__setitem__(key, param), False),
        "is not the one that was stowed",
    ),
    "assign=True": (lambda m, _: m.load_state_dict(m.state_dict(), assign=True) and None, "copy instead"),
    "NumPy": (to_parameter(lambda param: param.detach().numpy().__setitem__(3, 0.5)), "read-only"),
    "NumPy, of data": (to_parameter(lambda param: param.data.numpy().__setitem__(3, 0.5)), "read-only"),
    "a memoryview": (
        to_parameter(lambda param: memoryview(param.detach().numpy()).cast("B").__setitem__(0, 1)), "read-?only",
    ),
    "DLPack": (to_parameter(lambda param: torch.from_dlpack(param.detach()).mul_(0.5)), "written to unseen"),
    "storage()": (to_parameter(lambda param: param.storage().fill_(0.5)), "written to unseen"),
    "untyped_storage()": (to_parameter(lambda param: param.untyped_storage().fill_(0)), "written to unseen"),
    "ctypes": (to_parameter(through_ctypes), "a parameter that travels"),
}  # fmt: skip
