"""Whatever a loop of one's own writes to weights or gradients is there, as in plain torch, or one line refuses it.

Each idiom runs plainly and under plans that let weights, gradients and state rest in every place. A plan either trains
to the same bits or refuses with the idiom's line. The table says which it is, so that neither changes unseen.
"""

import ctypes
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations, parametrize

from deepstow.strategies.engine.transfer.transfer import Transfer
from tests.helpers.models import Net, build
from tests.helpers.sides import (
    BATCHES,
    Plain,
    Script,
    both_sides,
    copies,
    refused,
    train,
    training,
)

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


def scaled(factor: Any) -> Script:
    return each(lambda param: param.grad.mul_(factor))


def by_a_number_that_changes(model: Any, optimizer: Any) -> None:
    factor = torch.tensor(-0.3)
    scaled(factor)(model, optimizer)
    factor.fill_(100.0)


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


def zeroed_and_again(model: Any, optimizer: Any) -> object:
    model(**BATCHES[0]).loss.backward()
    model.zero_grad(set_to_none=False)
    return one_after_another(ours)(model, optimizer)


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
    "a number that changes": one_after_another(by_a_number_that_changes),
    "ours, then not": one_after_another(ours, lambda _, optimizer: float(optimizer.clip_grad_norm_(torch.inf))),
    "torch's, then ours": one_after_another(torchs, ours),
    "ours, by value, scaled, torch's": one_after_another(ours, by_value, scaled(3), torchs),
    "in two groups": one_after_another(in_two_groups),
    "decayed by layer, then ours": one_after_another(decayed_by_layer, ours),
    "lists": one_after_another(in_lists, ours),
    "scaled, some zero, scaled": one_after_another(scaled(0.3), some_zero, scaled(3.0)),
    "some None, scaled, then ours": one_after_another(some_none, scaled(0.3), ours),
    "all zero, and another backward": zeroed_and_again,
    "rows": one_after_another(rows_zero, ours),
    "decay": one_after_another(each(lambda param: param.grad.add_(param, alpha=0.1)), ours),
    "data": one_after_another(each(lambda param: param.grad.data.detach().add_(0.1).mul_(0.5))),
    "assigned": one_after_another(each(lambda param: setattr(param, "grad", param.grad * 0.3 + 0.1)), ours),
    "out": one_after_another(each(lambda param: torch.mul(param.grad, 0.3, out=param.grad)), ours),
    "a custom operator": one_after_another(each(lambda param: scale(param.grad, 0.3)), ours),
}  # fmt: skip
# These do not multiply, so that the step clips as planned.
CLIPPED_AS_PLANNED: dict[str, Script] = {
    "by value": one_after_another(by_value),
    "noise": one_after_another(noisy),
}  # fmt: skip
UNSCALED: dict[str, Script] = {
    ", ".join(order): unscaling(*order)
    for order in (
        ("unscale", "a third", "ours"), ("a third", "unscale", "torch's"), ("torch's", "unscale", "ours"),
        ("a third", "ours"),
    )
}  # fmt: skip
RAW: dict[str, tuple[Callable[[Any], object], str]] = {
    "a slice": (lambda grad: grad[2:9].zero_(), "write to param.grad itself"),
    "set_": (lambda grad: grad.set_(torch.zeros_like(grad)), "assign to param.grad"),
    "its storage": (lambda grad: grad.untyped_storage().fill_(0), "on the storage"),
    "NumPy": (lambda grad: grad.numpy().fill(0), "read-only"),
    "DLPack": (lambda grad: torch.from_dlpack(grad).zero_(), "could be written to unseen"),
}


@pytest.mark.parametrize("idiom", GRADIENTS)
def test_gradients(idiom: str) -> None:
    """In two plans in turn."""
    turn = list(GRADIENTS).index(idiom)
    plans = [list(PLANS.values())[(turn + more) % len(PLANS)] for more in (0, 3)]
    both_sides(net, GRADIENTS[idiom], plans, clips=True, max_norm=NORM, transfer=Transfer)


@pytest.mark.parametrize("idiom", CLIPPED_AS_PLANNED)
def test_gradients_that_the_step_clips(idiom: str) -> None:
    both_sides(net, CLIPPED_AS_PLANNED[idiom], [PLANS["device"], PLANS["streamed"]], max_norm=NORM, transfer=Transfer)


@pytest.mark.parametrize("idiom", UNSCALED)
def test_gradients_of_a_scaled_loss(idiom: str) -> None:
    how: dict[str, Any] = {"clips": True, "max_norm": NORM, "fused": False, "transfer": Transfer}
    both_sides(net, UNSCALED[idiom], [PLANS["device"], PLANS["streamed"]], **how)


def test_gradients_where_updates_begin_in_backward() -> None:
    """They may be used up already."""
    for change in (scaled(0.5), each(lambda param: setattr(param, "grad", torch.ones_like(param))), some_zero):
        refused(net, training(change), "updates in backward|updates have begun", PLANS["streamed"], in_backward=True)


def kept_and_discarded(assign: Callable[[Any, Tensor], object], discard: Script) -> Script:
    """``assign`` is given a weight, and what stood for its gradient before ``discard``."""

    def script(model: Any, optimizer: Any) -> None:
        weight = model.get_parameter(UP)
        model(**BATCHES[0]).loss.backward()
        kept = weight.grad
        discard(model, optimizer)
        model(**BATCHES[1]).loss.backward()
        assign(weight, kept)

    return script


def test_what_stands_for_a_gradient_that_is_gone() -> None:
    """It would show the one that came after it."""
    steps: Script = lambda _, optimizer: (optimizer.step(), optimizer.zero_grad())  # noqa: E731
    each_none = each(lambda param: setattr(param, "grad", None))
    for discard, passes in ((each_none, 2), (steps, 1)):
        for assign in (lambda weight, kept: setattr(weight, "grad", kept), lambda weight, kept: weight.grad.add_(kept)):
            script = kept_and_discarded(assign, discard)
            refused(net, script, "belongs to an earlier step", PLANS["streamed"], accumulation=passes)


def assigned_again(model: Any, optimizer: Any) -> None:
    weight = model.get_parameter(UP)
    kept, weight.grad = weight.grad, None
    weight.grad = kept


def of_two_weights(model: Any, optimizer: Any) -> None:
    one, other = (model.get_parameter(f"layers.{number}.up.weight") for number in range(2))
    one.grad, other.grad = other.grad, one.grad


def of_another_shape(model: Any, optimizer: Any) -> None:
    model.embed.weight.grad = torch.ones(1)


def test_gradients_that_are_refused() -> None:
    for write, line in RAW.values():
        refused(net, training(lambda model, _, write=write: write(model.embed.weight.grad)), line, PLANS["streamed"])
    refused(net, training(assigned_again), "come from backward only", PLANS["streamed"])
    refused(net, training(of_two_weights), r"assign a clone\(\)", PLANS["streamed"])
    refused(net, training(of_another_shape), "assigned to a parameter that is", PLANS["streamed"])


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


def another(name: str, register: Callable[[nn.Module, str, nn.Parameter], object], trained: bool = True) -> Script:
    def write(model: Any, optimizer: Any) -> None:
        owner, _, key = name.rpartition(".")
        register(model.get_submodule(owner), key, nn.Parameter(torch.ones(32, 32), trained))

    return write


OTHERS = ("device, travelling", "host", "streamed, waits there")  # than "device", a weight's only memory
AWAY = "written to in place; write under|on a parameter that is away; write under"
SHOWN = "on what a stowed parameter shows; write under"
PLANNED = "whose memory is planned; write under|memory of a stowed model is planned; write under"
RAW_MEMORY = "could be written to unseen"
WRITES: dict[str, tuple[Script, str]] = {
    "mul_": (to_parameter(lambda param: param.mul_(0.5)), AWAY),
    "out": (to_parameter(lambda param: torch.mul(param, 0.5, out=param)), AWAY),
    "a list": (to_parameter(lambda param: torch._foreach_lerp_([param], [numbers(param)], 0.3)), AWAY),
    "a custom operator": (to_parameter(lambda param: scale(param, 0.5)), AWAY),
    "renormed": (
        to("embed.weight", UP)(lambda param: functional.embedding(torch.arange(9), param, max_norm=0.1)),
        "written to in place; write under|a function wrote to a copy of a parameter that travels; write under",
    ),
    "detach().mul_": (to_parameter(lambda param: param.detach().mul_(0.5)), SHOWN),
    "NumPy": (to_parameter(lambda param: param.detach().numpy().__setitem__(3, 0.5)), "read-only"),
    "DLPack": (to_parameter(lambda param: torch.from_dlpack(param.detach()).mul_(0.5)), RAW_MEMORY),
    "an address": (
        to_parameter(lambda param: ctypes.memset(param.data_ptr(), 0, param.nbytes) and None),
        "data_ptr of a parameter that travels|was written to by its address; write under",
    ),
}  # fmt: skip
NEVER: dict[str, tuple[Script, str]] = {
    "data.mul_": (to_parameter(lambda param: param.data.mul_(0.5)), SHOWN),
    "data, renormed": (
        to_parameter(lambda param: functional.embedding(torch.arange(9), param.data, max_norm=0.1)), SHOWN,
    ),
    "data, a view": (to_parameter(lambda param: param.data.view(-1)[3:9].copy_(torch.ones(6))), SHOWN),
    "data =": (to_parameter(lambda param: setattr(param, "data", param.data * 0.5)), PLANNED),
    "set_": (to_parameter(lambda param: param.set_(numbers(param))), PLANNED),
    "set_, torch's": (
        to_parameter(lambda param: Tensor.set_(param, numbers(param))), "was given other memory|on a parameter that is",
    ),
    "data =, torch's": (
        to_parameter(lambda param: Tensor.data.__set__(param, numbers(param))),  # type: ignore[attr-defined]
        "was given other memory",
    ),
    "half()": (lambda m, _: m.half(), PLANNED),
    "swap_tensors": (
        to_parameter(lambda param: torch.utils.swap_tensors(param, nn.Parameter(numbers(param)))), "has weakref",
    ),
    "another frozen parameter": (another(FROZEN, setattr, False), "is not the one that was stowed"),
    "assign=True": (lambda m, _: m.load_state_dict(m.state_dict(), assign=True), "copy instead"),
    "untyped_storage()": (to_parameter(lambda param: param.untyped_storage().fill_(0)), RAW_MEMORY),
}  # fmt: skip


@pytest.mark.parametrize("idiom", WRITES)
def test_writes_to_weights(idiom: str) -> None:
    write, line = WRITES[idiom]
    both_sides(net, after_steps(write), [PLANS["device"]], transfer=Transfer)
    for plan in OTHERS if idiom == "mul_" else in_turn(WRITES, idiom):
        refused(net, after_steps(write), line, PLANS[plan], transfer=Transfer())


def in_turn(idioms: Iterable[str], idiom: str) -> tuple[str, str]:
    """Two of the plans in which a weight may have another memory."""
    turn = list(idioms).index(idiom)
    return OTHERS[turn % 3], OTHERS[(turn + 1) % 3]


def test_a_momentum_encoder() -> None:
    """A frozen weight that stays on the device has no other memory."""
    write = to(FROZEN)(lambda param: param.mul_(0.9).add_(numbers(param), alpha=0.1))
    stays = [PLANS[plan] for plan in ("device", "host", "streamed, waits there")]
    both_sides(net, after_steps(write, write), stays, transfer=Transfer)
    refused(net, after_steps(write), AWAY, PLANS["device, travelling"], transfer=Transfer())


@pytest.mark.parametrize("idiom", NEVER)
def test_writes_that_no_plan_has_a_place_for(idiom: str) -> None:
    write, line = NEVER[idiom]
    for plan in ("device", OTHERS[list(NEVER).index(idiom) % 3]):
        refused(net, after_steps(write), line, PLANS[plan], transfer=Transfer())


PRESENT: dict[str, Script] = {
    "by functions": to_parameter(lambda param: param.mul_(0.5).add_(numbers(param))),
    "NumPy": to_parameter(lambda param: param.detach().numpy().__setitem__(3, 0.5)),
    "an address": to_parameter(lambda param: ctypes.memset(param.data_ptr(), 0, param.nbytes) and None),
    "state_dict": lambda model, _: [value.mul_(0.5) for value in model.state_dict().values()] and None,
}


@pytest.mark.parametrize("idiom", PRESENT)
def test_writes_inside_of_present(idiom: str) -> None:
    plans = [PLANS[plan] for plan in in_turn(PRESENT, idiom)]
    both_sides(net, after_steps(inside_present(PRESENT[idiom])), plans, transfer=Transfer)


class Parametrized(Net):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.orthogonal(self.layers[2].spare, orthogonal_map="householder")


def test_what_parametrize_assigns_is_refused_in_the_engines_words() -> None:
    def removed(model: Any, optimizer: Any) -> None:
        parametrize.remove_parametrizations(model.layers[2].spare, "weight", leave_parametrized=True)

    make = partial(build, Parametrized)
    refused(make, after_steps(removed), r"set_\(\) on a parameter", PLANS["device"], transfer=Transfer())


# --- values of state dicts --------------------------------------------------------------------------------------------


def follow(optimizer: Any) -> None:
    """A plain loop that has masters writes what it wrote to weights there, too."""
    if isinstance(optimizer, Plain):
        optimizer._follow()


def averaged(model: Any, optimizer: Any) -> None:
    """Nobody holds the values afterwards."""
    for value in model.state_dict().values():
        value.lerp_(torch.linspace(-0.1, 0.1, value.numel()).view(value.shape).to(value), 0.25)
    follow(optimizer)


def rows_of_one(model: Any, optimizer: Any) -> None:
    model.layers[1].state_dict()["up.weight"][2:9].zero_()
    if isinstance(optimizer, Plain):
        weight = model.get_parameter(UP)
        optimizer.masters[weight].copy_(weight)


def seen_by_others(model: Any, optimizer: Any) -> list[Any]:
    averaged(model, optimizer)
    seen: list[Any] = [model.get_parameter(UP).detach().clone(), copies(model)]
    averaged(model, optimizer)
    with optimizer.present(model.parameters()):
        seen += [param.detach().clone() for param in model.parameters()]
    return seen


def between_backward_and_step(model: Any, optimizer: Any) -> list[Any]:
    return train(model, optimizer, BATCHES[:3], averaged)


EDITS: dict[str, Script] = {
    "averaged": after_steps(averaged, averaged),
    "rows of one": after_steps(rows_of_one),
    "seen by others": after_steps(seen_by_others),
    "between backward and step": between_backward_and_step,
}


@pytest.mark.parametrize("idiom", EDITS)
def test_values_of_state_dicts_that_are_written_to(idiom: str) -> None:
    both_sides(net, EDITS[idiom], [PLANS[plan] for plan in ("device", *in_turn(EDITS, idiom))], transfer=Transfer)
    if idiom != "between backward and step":
        both_sides(low, EDITS[idiom], [PLANS["host, travelling"]], transfer=Transfer)


def held(model: Any, optimizer: Any) -> None:
    state = model.state_dict()
    for value in state.values():
        value.mul_(0.5)
    follow(optimizer)
    model(**BATCHES[7])


def stale(model: Any, optimizer: Any) -> None:
    state = model.state_dict()
    with torch.enable_grad():
        train(model, optimizer, BATCHES[:1])
    state[UP].mul_(0.5)
    model(**BATCHES[7])


def test_values_of_state_dicts_that_are_copies(tmp_path: Path) -> None:
    """They become the weights as long as somebody holds them."""
    both_sides(low, after_steps(held), [PLANS["host, travelling"]], transfer=Transfer)
    for make, script, plan in (
        (low, between_backward_and_step, PLANS["host, travelling"]),
        *((net, after_steps(stale), PLANS[plan]) for plan in ("device", *OTHERS)),
    ):
        refused(make, script, r"what model.state_dict\(\) had of it was written to", plan, transfer=Transfer())


def inside_of_a_forward(model: nn.Module, optimizer: Any) -> None:
    """A hook of one layer changes the next one's weight, which may be there already."""

    def change(*_: Any) -> None:
        model.state_dict()[UP].mul_(0.5)

    model.get_submodule("layers.0").register_forward_hook(change)
    model(**BATCHES[7])


@pytest.mark.parametrize("plan", ["device", "host"])
def test_values_of_state_dicts_written_inside_of_a_forward(plan: str) -> None:
    refused(net, inside_of_a_forward, r"written to inside of a forward", PLANS[plan], transfer=Transfer())
