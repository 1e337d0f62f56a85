"""The model trains like any other: every way in which people use a model, an optimizer and a loop, against plain."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepstow.strategies.core.layout import Item
from tests.helpers.models import build
from tests.helpers.sides import BATCHES, LAYOUTS, TWO, Layout, Script, refused, same, stowed, train, training

llama, in_bf16 = partial(build, "llama"), partial(build, "llama", dtype=torch.bfloat16)


class Stop(Exception):
    """Raised by hooks."""


def stopped(where: str, block: int) -> Script:
    """An error in the middle of a step."""

    def stop(*_: object) -> None:
        raise Stop

    def script(model: Any, optimizer: Any) -> list[Any]:
        losses = train(model, optimizer, BATCHES[:1])
        layer = model.get_submodule(f"model.layers.{block}.mlp")
        hooked = layer.register_forward_pre_hook if where == "forward" else layer.down_proj.weight.register_hook
        hook = hooked(stop)
        with pytest.raises(Stop):
            model(**BATCHES[1]).loss.backward()
        hook.remove()
        optimizer.zero_grad()
        return losses + train(model, optimizer, BATCHES[2:5])

    return script


def not_finite(model: nn.Module, optimizer: Any) -> list[Any]:
    """Because of one infinite gradient a step is skipped."""
    param = model.get_parameter("model.layers.2.mlp.up_proj.weight")
    losses = train(model, optimizer, BATCHES[:1])
    hook = param.register_hook(lambda grad: grad.index_fill(0, torch.tensor([3]).to(grad.device), float("inf")))
    losses += train(model, optimizer, BATCHES[1:2])
    hook.remove()
    optimizer.drain()
    assert optimizer.skipped == 1
    return losses + train(model, optimizer, BATCHES[2:4])


def with_lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    made: nn.Module = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return made


def in_autocast(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss: Tensor = model(**batch).loss
    return loss


fewer = training(steps=8, passes=(3, 2, 1, 2))  # than the plan has
UNCLIPPED: list[Layout] = [{"site": "device"}, "streamed", {"site": "mixed", "weights": "some", "park": "host"}]
SAME: dict[str, Callable[[], None]] = {
    "stopped in forward": same(llama, stopped("forward", 2), max_norm=0.5),
    "stopped at the end of backward": same(llama, stopped("backward", 0), LAYOUTS, max_norm=0.5),
    "not finite": same(llama, not_finite, UNCLIPPED),
    "not finite, clipped": same(in_bf16, not_finite, UNCLIPPED, max_norm=1.0),
    "fewer passes than planned": same(llama, fewer, LAYOUTS, max_norm=0.5, accumulation=3, park="host"),
    "adapters": same(with_lora, training(steps=4), TWO, max_norm=0.5),
    "autocast": same(llama, training(loss_of=in_autocast), max_norm=0.5),
}


@pytest.mark.parametrize("case", SAME)
def test_the_same(case: str) -> None:
    SAME[case]()


def test_a_skipped_step_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = llama()
    not_finite(model, stowed(model, "streamed"))
    assert "this step was skipped (1 so far)" in caplog.text


@pytest.mark.parametrize("in_backward", [True, False])
def test_updates_begin_in_backward_where_nothing_is_clipped(in_backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    optimizer = stowed(model, "host, one ahead", in_backward=in_backward)
    begun: list[str] = []
    updates, submit = optimizer.engine.updates, optimizer.engine.updates.submit
    monkeypatch.setattr(updates, "submit", lambda bucket, job: (begun.append(bucket.name), submit(bucket, job)))
    model(**BATCHES[0]).loss.backward()
    before = list(begun)
    optimizer.step()
    assert len(begun) == len(set(begun)) == sum(bucket.spec.group is not None for bucket in optimizer.engine.buckets)
    assert bool(before) is in_backward
    if in_backward:  # the last blocks are complete first
        assert before[0] != begun[-1] and len(before) > len(begun) // 2


def test_frozen_weights_take_nothing_but_their_place() -> None:
    """No gradient, no state, no copy down."""
    model = with_lora()
    optimizer = stowed(model, "host, one ahead")
    frozen = [bucket for bucket in optimizer.engine.buckets if bucket.spec.group is None]
    assert frozen and not all(bucket.spec.resident for bucket in frozen)
    for bucket in frozen:
        assert not bucket.memory.keys() & {Item.GRAD, Item.PARKED, Item.STEPS} and bucket.moments == []
    base = {id(param) for param in model.parameters() if not param.requires_grad}
    downs: list[Tensor] = []
    transfer, copy = optimizer.engine.transfer, optimizer.engine.transfer.copy

    def watched(stream: Any, target: Tensor, source: Tensor) -> None:
        downs.extend([target] if stream.value == "down" else [])
        copy(stream, target, source)

    transfer.copy = watched
    train(model, optimizer, BATCHES[:2])
    optimizer.drain()
    trained = sum(bucket.spec.weight_bytes for bucket in optimizer.engine.buckets if bucket.spec.group is not None)
    assert 0 < transfer.bytes_down <= 2 * 4 * trained  # gradient, weight and moments, twice
    for rests in (bucket.copy for bucket in frozen if bucket.copy is not None):
        start, end = rests.data_ptr(), rests.data_ptr() + rests.nbytes
        assert not any(start <= target.data_ptr() < end for target in downs)
    assert base == {id(param) for param in model.parameters() if not param.requires_grad}


def test_groups_and_closures() -> None:
    group = {"params": [nn.Parameter(torch.zeros(2))]}
    refused(llama, lambda _, optimizer: optimizer.add_param_group(group), "cannot be added")
    refused(llama, lambda _, optimizer: optimizer.step(lambda: 0.0), "closures")


# --- memory ----------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The addresses and sizes of all results of operations that are no views of ``arenas``."""

    def __init__(self, arenas: list[Tensor]) -> None:
        super().__init__()
        self._arenas = [(arena.data_ptr(), arena.data_ptr() + arena.nbytes) for arena in arenas]
        self.sizes: list[tuple[int, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for made in (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            start = made.untyped_storage().data_ptr()
            inside = any(low <= start < high for low, high in self._arenas)
            if not inside and start not in known:
                self.sizes.append((made.untyped_storage().nbytes(), str(func)))
        return result


def test_nothing_grows() -> None:
    """After step 2: the arenas stay, and everything made outside of them is smaller than a bucket's weights.

    The gradients that autograd makes, one parameter at a time, are the largest.
    """
    for layout in LAYOUTS:
        model = llama()
        optimizer = stowed(model, layout, max_norm=1.0, bucket="one")
        engine = optimizer.engine
        train(model, optimizer, BATCHES[:2])
        memories = [engine.arena._device, engine.arena._host.memory]
        places = [memory.data_ptr() for memory in (*memories, *(bucket.weight for bucket in engine.buckets))]
        blocks = [b.weight_bytes for b in engine.layout.buckets if "layers" in b.name]
        largest_parameter = max(param.numel() * 4 for param in model.parameters())
        with Largest(memories) as seen:
            train(model, optimizer, BATCHES[2:4])
            optimizer.drain()
        assert max(seen.sizes)[0] <= largest_parameter < min(blocks), max(seen.sizes)
        memories = [engine.arena._device, engine.arena._host.memory]
        assert [memory.data_ptr() for memory in (*memories, *(bucket.weight for bucket in engine.buckets))] == places
        optimizer.close()
