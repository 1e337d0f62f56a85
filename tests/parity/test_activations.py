"""Saved tensors on the host: the same bits whenever copies are made, in order by events alone, and nothing piles up."""

import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from deepstow.strategies.core.layout import ALIGN_BYTES
from deepstow.strategies.core.plan import INPUT
from deepstow.strategies.engine.forward.activations import HostRoom, Sent, arena_of_saved, flat
from deepstow.strategies.engine.forward.checkpointing import checkpoint_blocks, recompute, room_of
from deepstow.strategies.engine.transfer.transfer import Transfer
from tests.helpers.doubles import Delayed, RaceDetector
from tests.parity.test_recompute import POLICIES, decided, facts_of, made, micro_batches, plainly, steps, unequal

CPU = torch.device("cpu")
HOSTED = ("full, on the host", "selective, on the host")


def quiet(room: HostRoom) -> bool:
    """Nothing is on its way, nothing was refused, and no slot is taken."""
    return not (room._leaving or room._coming or room.num_refused) and all(sent() is None for _, sent in room._slots)


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "attention", "transfer"),
    [("gpt2", "eager", Delayed), ("llama", "sdpa", RaceDetector)],
)
def test_bits_order_and_bytes(name: str, attention: str, transfer: type[Transfer]) -> None:
    """With dropout and a padded batch; bytes that cross are those that the plan counts, in each direction."""
    for policy in HOSTED:
        model = made(name, True, attention, torch.float32)
        plan = decided(facts_of(name, True, attention, torch.float32), POLICIES[policy])
        moves = transfer()
        recompute(model, plan, moves)
        room = room_of(model)
        assert room is not None
        found = steps(model, micro_batches())
        assert unequal(plainly(name, True, attention, torch.float32), found) == []
        assert quiet(room)
        assert getattr(moves, "races", []) == []
        once, inputs = (sum(keep.hosted_bytes for keep in keeps_of(plan, only)) for only in (None, "full"))
        assert once > 0
        first = once if policy == HOSTED[0] else inputs  # the first forward only looks at what operators make
        assert room.traffic == (first + once, first + once)


def keeps_of(plan: Any, policy: str | None) -> list[Any]:
    """What blocks keep; with a policy: what they would have on the host under it."""
    from deepstow.strategies.planner.activation_policy import by_policy

    keeps = [plan.keep(unit.name) for unit in plan.facts.units]
    if policy is None:
        return keeps
    pairs = zip(plan.facts.units, keeps, strict=True)
    return [by_policy(unit, policy, hosts=True) for unit, keep in pairs if keep.hosted]


# --- one stack of layers ---------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Two products, the second of which is read across."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.second(torch.tanh(self.first(x))).transpose(0, 1).tanh().transpose(0, 1), 0.1)


class Stack(nn.Module):
    def __init__(self, count: int = 5) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def hosting(model: Stack, num_bytes: int = 1 << 16, transfer: Transfer | None = None) -> HostRoom:
    """All of its layers send their inputs and both products."""
    names = {f"layers.{index}": ("linear 0", "linear 1") for index in range(len(model.layers))}
    room = HostRoom(
        list(model.layers), arena_of_saved(num_bytes, next(model.parameters()).device), transfer or RaceDetector()
    )
    checkpoint_blocks(model, names, {name: (INPUT, *kept) for name, kept in names.items()}, room)
    model(torch.randn(2, 6)).sum().backward()  # looks only
    model.zero_grad()
    return room


def grads(model: nn.Module) -> list[Tensor]:
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


Loop = Callable[[nn.Module], object]


def retained(model: nn.Module) -> None:
    loss = model(rows(4)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def two_forwards(model: nn.Module) -> None:
    first, second = model(rows(4)), model(rows(3))
    (first.sum() * second.mean()).backward()


def half(model: nn.Module) -> None:
    """What came up for the first layer is not read. The graph goes when its places are about to be taken again."""
    middle: list[Tensor] = []
    layers: Any = model.layers
    handle = layers[0].register_forward_hook(lambda module, inputs, output: middle.append(output))
    graph = [model(rows(4)).sum()]
    handle.remove()
    torch.autograd.grad(graph[0], middle.pop())
    handle = layers[0].register_forward_pre_hook(lambda module, inputs: graph.clear())
    model(rows(4)).sum().backward()
    handle.remove()


def abandoned(model: nn.Module) -> None:
    model(rows(4))
    model(rows(5)).sum().backward()


def evaluated(model: nn.Module) -> None:
    out = model(rows(4))
    with torch.no_grad():
        model(rows(7))
    out.sum().backward()


def partly(model: nn.Module) -> None:
    x = rows(4)
    torch.autograd.grad(model(x).sum(), x)[0].sum()
    model(x).sum().backward()


def of_any_length(model: nn.Module) -> None:
    for number in (3, 9, 1, 0, 4):
        model(rows(number)).sum().backward()


def rows(number: int) -> Tensor:
    return torch.randn(number, 6, requires_grad=True)


def alike(plain: nn.Module, model: nn.Module, loop: Loop) -> bool:
    """Whether ``loop`` leaves both the same gradients; the numbers drawn are the same."""
    for one in (plain, model):
        torch.manual_seed(4)
        loop(one)
    return all(torch.equal(a, b) for a, b in zip(grads(plain), grads(model), strict=True))


@pytest.mark.parametrize("loop", [retained, two_forwards, half, abandoned, evaluated, partly, of_any_length])
def test_loops(loop: Loop) -> None:
    """What people do with graphs."""
    plain, model = Stack(), Stack()
    room = hosting(model, transfer=(watched := RaceDetector()))
    assert alike(plain, model, loop) and quiet(room)
    assert watched.races == []


def test_an_error_in_the_middle_leaves_nothing_behind() -> None:
    """And no graph, even where the model is dropped before it runs again."""
    model = Stack()
    room = hosting(model)
    inner = model.layers[2].first
    for register in (inner.register_forward_pre_hook, inner.register_full_backward_hook):
        handle = register(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(rows(4)).sum().backward()
        handle.remove()
    model.zero_grad()
    assert alike(Stack(), model, lambda one: one(rows(2)).sum().backward()) and quiet(room)
    inner.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(rows(4))
    dropped = weakref.ref(room)
    del model, inner, room, register, handle
    gc.collect()
    assert dropped() is None


def test_slots_do_not_pile_up() -> None:
    """Steps of other lengths, in just the room that the longest needs, without a garbage collector."""
    model = Stack()
    room = hosting(model, 5 * 3 * ALIGN_BYTES)
    gc.disable()
    try:
        for step in range(26):
            model(rows(1 + step * 7 % 13)).sum().backward()
            assert quiet(room), step
    finally:
        gc.enable()


def test_what_finds_no_slot_is_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    """An input stays, a product is made again; a graph that is dropped takes all with it."""
    plain, model = Stack(), Stack()
    room = hosting(model, 7 * ALIGN_BYTES)
    assert alike(plain, model, lambda one: one(rows(4)).sum().backward())
    assert room.num_refused > 0
    assert sum("is not sent to the host" in message for message in caplog.messages) == 1
    gc.collect()
    before = sum(type(each) is Tensor for each in gc.get_objects())
    for _ in range(5):
        model(rows(4))
    gc.collect()
    assert sum(type(each) is Tensor for each in gc.get_objects()) <= before + 2


@pytest.mark.parametrize("what", ["product", "input"])
@pytest.mark.parametrize("num_bytes", [1 << 16, 0], ids=["sent", "no place"])
def test_a_saved_tensor_may_not_be_written_to(num_bytes: int, what: str) -> None:
    """Out of autograd's sight. A product that was not sent is made again, and so is the write."""

    class Careless(Layer):
        careless = False

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.first(x)
            if self.careless:
                with torch.no_grad():
                    (y if what == "product" else x).add_(1)
            return torch.tanh(x) + torch.tanh(y)

    def changed(first: Tensor) -> Tensor:
        return first * 2  # of which nobody keeps a copy

    plain, model = Stack(2), Stack(2)
    for one in (plain, model):
        one.layers = nn.ModuleList(Careless() for _ in range(2))
    model.load_state_dict(plain.state_dict())
    hosting(model, num_bytes)
    Careless.careless = True
    if what == "product" and not num_bytes:
        assert alike(plain, model, lambda one: one(changed(rows(4))).sum().backward())
    else:
        with pytest.raises(RuntimeError, match="activation_offloading: false"):
            model(changed(rows(4))).sum().backward()


def test_memory_is_given_up_after_the_next_block() -> None:
    """In forward two blocks' worth is held, in backward two blocks' worth is there."""
    held = []

    class Looking(Layer):
        def forward(self, x: Tensor) -> Tensor:
            if looks:
                held.append((len({one.call for one in room._leaving}), len(room._coming)))
            return super().forward(x)

    model, looks = Stack(5), False
    model.layers = nn.ModuleList(Looking() for _ in range(5))
    room, looks = hosting(model), True
    loss = model(rows(4)).sum()
    assert [blocks for blocks, _ in held] == [1, 2, 2, 2, 2]
    assert {one.call for one in room._leaving} == {4}  # there is no next one
    held.clear()
    loss.backward()
    # A replay has read its input, has two products yet to read, and three tensors of the block before arrive.
    assert [coming for _, coming in held] == [5, 5, 5, 5, 2]


# --- shapes ----------------------------------------------------------------------------------------------------------

SHAPES: Mapping[str, Callable[[], Tensor]] = {
    "plain": lambda: torch.randn(3, 4),
    "transposed": lambda: torch.randn(3, 4, 5).transpose(0, 2),
    "channels last": lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "one in the middle": lambda: torch.randn(3, 1, 4)[:, :1],
    "part of a larger one": lambda: torch.randn(8, 4)[2:5],
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(5, 0),
    "boolean": lambda: torch.rand(7) > 0.5,
    "nan": lambda: torch.tensor([float("nan"), -0.0]),
}


@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)
def test_what_comes_back_is_what_was_sent(make: Callable[[], Tensor]) -> None:
    room = HostRoom([], arena_of_saved(1 << 12, CPU), Delayed())
    tensor = make()
    sent = room.send(tensor.clone(memory_format=torch.preserve_format) if tensor.numel() else tensor)
    assert isinstance(sent, Sent)
    for _ in range(2):
        back = sent.get()
        assert (back.shape, back.stride(), back.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
        bits = [flat(one) for one in (back, tensor)]
        assert bits[0] is not None and bits[1] is not None
        assert torch.equal(bits[0].view(torch.uint8), bits[1].view(torch.uint8))


@pytest.mark.parametrize("make", [lambda: torch.randn(4)[::2], lambda: torch.randn(1, 4).expand(3, 4)])
def test_tensors_with_gaps_or_overlaps_stay(make: Callable[[], Tensor]) -> None:
    room = HostRoom([], arena_of_saved(1 << 12, CPU))
    tensor = make()
    assert room.send(tensor) is None
    assert room.num_refused == 1 and flat(tensor) is None
