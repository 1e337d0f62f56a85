"""The model trains like any other: every way in which people use a model, an optimizer and a loop, against plain."""

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.models import build, tokens
from tests.helpers.sides import LAYOUTS, TWO, both_sides, everything, ground, stowed, train, unequal

BATCHES = tokens("llama", 8)
layouts = pytest.mark.parametrize("layout", TWO)


def llama() -> nn.Module:
    return build("llama")


# --- errors ----------------------------------------------------------------------------------------------------------


class Stop(Exception):
    """Raised by hooks."""


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("block", [0, 2])
def test_an_error_in_the_middle(where: str, block: int) -> None:
    def script(model: nn.Module, optimizer: Any) -> list[float]:
        losses = train(model, optimizer, BATCHES[:1])

        def stop(*_: object) -> None:
            raise Stop

        layer = model.get_submodule(f"model.layers.{block}.mlp")
        if where == "forward":
            hook = layer.register_forward_pre_hook(stop)
        else:
            hook = layer.down_proj.weight.register_hook(stop)  # type: ignore[union-attr, operator]
        with pytest.raises(Stop):
            model(**BATCHES[1]).loss.backward()
        hook.remove()
        optimizer.zero_grad()
        return losses + train(model, optimizer, BATCHES[2:5])

    both_sides(llama, script, LAYOUTS, max_norm=0.5)


# --- numbers that are not finite -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wishes",
    [
        {"site": "device"},
        {"site": "streamed", "weights": "travelling"},
        {"site": "mixed", "weights": "some", "park": "host"},
        {"site": "host", "weights": "travelling", "in_backward": True, "park": "host"},
    ],
    ids=lambda wishes: ", ".join(map(str, wishes.values())),
)
@pytest.mark.parametrize(("max_norm", "dtype"), [(0.0, torch.bfloat16), (0.0, torch.float32), (1.0, torch.bfloat16)])
def test_a_step_that_is_not_finite_is_skipped(
    wishes: dict[str, Any], max_norm: float, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """Because of one infinite gradient; of all where updates begin in backward, which know no norm."""
    in_backward = "in_backward" in wishes
    max_norm = 0.0 if in_backward else max_norm
    model = build("llama", dtype=dtype)
    optimizer = stowed(model, wishes, max_norm=max_norm)
    train(model, optimizer, BATCHES[:1])
    before = everything(model, optimizer)
    param = model.get_parameter("model.layers.2.mlp.up_proj.weight")
    hook = param.register_hook(lambda grad: grad.index_fill(0, torch.tensor([3]), float("inf")))
    with caplog.at_level(logging.WARNING):
        (model(**BATCHES[1]).loss * (float("inf") if in_backward else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.drain()
    hook.remove()
    assert unequal(before, everything(model, optimizer)) == []
    assert optimizer.skipped == 1
    assert "this step was skipped (1 so far)" in caplog.text
    train(model, optimizer, BATCHES[2:4])
    other = build("llama", dtype=dtype)
    never = stowed(other, wishes, max_norm=max_norm)
    train(other, never, [BATCHES[0], *BATCHES[2:4]])
    assert unequal(everything(other, never), everything(model, optimizer)) == []
    assert (optimizer.skipped, never.skipped) == (1, 0)


@pytest.mark.parametrize("in_backward", [True, False])
def test_updates_begin_in_backward_where_nothing_is_clipped(in_backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    wishes = {"site": "host", "weights": "travelling", "park": "host", "in_backward": in_backward}
    optimizer = stowed(model, wishes)
    begun: list[str] = []
    submit = optimizer.engine.updates.submit
    monkeypatch.setattr(
        optimizer.engine.updates, "submit", lambda bucket, job: (begun.append(bucket.name), submit(bucket, job))
    )
    model(**BATCHES[0]).loss.backward()
    before = list(begun)
    optimizer.step()
    assert len(begun) == len(set(begun)) == sum(bucket.spec.group is not None for bucket in optimizer.engine.buckets)
    assert bool(before) is in_backward
    if in_backward:  # the last blocks are complete first
        assert before[0] != begun[-1] and len(before) > len(begun) // 2


# --- accumulation ----------------------------------------------------------------------------------------------------


def test_fewer_passes_than_planned() -> None:
    def script(model: nn.Module, optimizer: Any) -> list[float]:
        losses = []
        for window in (BATCHES[:3], BATCHES[3:5], BATCHES[5:6], BATCHES[6:8]):
            for batch in window:
                loss = model(**batch).loss
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    for park in ("host", "device"):
        both_sides(llama, script, LAYOUTS, accumulation=3, park=park, max_norm=0.5)


# --- models ----------------------------------------------------------------------------------------------------------


def with_lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    made: nn.Module = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return made


@layouts
def test_lora(layout: str) -> None:
    both_sides(with_lora, lambda model, optimizer: train(model, optimizer, BATCHES[:4]), [layout], max_norm=0.5)
    model = with_lora()
    optimizer = stowed(model, layout)
    frozen = {b.name for b in optimizer.engine.layout.buckets if b.group is None}
    assert frozen and not all(b.resident for b in optimizer.engine.layout.buckets if b.name in frozen)
    for bucket in optimizer.engine.buckets:
        if bucket.name in frozen:
            assert bucket.grad is None and bucket.parked is None and bucket.moments == [] and bucket.steps is None
    base = {id(param) for param in model.parameters() if not param.requires_grad}
    downs: list[torch.Tensor] = []
    transfer, copy = optimizer.engine.transfer, optimizer.engine.transfer.copy

    def watched(lane: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        if lane.value == "down":
            downs.append(target)
        copy(lane, target, source)

    transfer.copy = watched
    train(model, optimizer, BATCHES[:2])
    optimizer.drain()
    trained = sum(bucket.spec.weight_bytes for bucket in optimizer.engine.buckets if bucket.spec.group is not None)
    assert 0 < transfer.bytes_down <= 2 * 4 * trained  # gradient, weight and moments, twice
    for bucket in optimizer.engine.buckets:
        if bucket.name in frozen and bucket.copy is not None:
            start, end = bucket.copy.data_ptr(), bucket.copy.data_ptr() + bucket.copy.nbytes
            assert not any(start <= target.data_ptr() < end for target in downs)
    assert base == {id(param) for param in model.parameters() if not param.requires_grad}


def test_autocast() -> None:
    def script(model: nn.Module, optimizer: Any) -> list[float]:
        losses = []
        for batch in BATCHES[:4]:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**batch).loss
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    both_sides(llama, script, LAYOUTS, max_norm=0.5)


# --- the optimizer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [0.05, 1e6])
def test_the_plan_clips_if_nobody_does(max_norm: float) -> None:
    both_sides(llama, lambda model, optimizer: train(model, optimizer, BATCHES[:3]), LAYOUTS, max_norm=max_norm)


def test_groups_cannot_be_added() -> None:
    optimizer = stowed(llama(), "streamed")
    with pytest.raises(RuntimeError, match="cannot be added"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ValueError, match="closures"):
        optimizer.step(lambda: 0.0)


def test_state_dict_of_the_optimizer() -> None:
    """Round trip, and from a plain optimizer's."""
    import copy

    model = ground.put(llama())
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    train(model, plain, BATCHES[:2])
    state, weights = copy.deepcopy(plain.state_dict()), copy.deepcopy(model.state_dict())
    train(model, plain, BATCHES[2:4])
    for layout in LAYOUTS:
        other = llama()
        optimizer = stowed(other, layout)
        other.load_state_dict(weights)
        optimizer.load_state_dict(state)
        train(other, optimizer, BATCHES[2:3])
        middle, middle_weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(other.state_dict())
        train(other, optimizer, BATCHES[4:6])  # somewhere else, and back
        other.load_state_dict(middle_weights)
        optimizer.load_state_dict(middle)
        train(other, optimizer, BATCHES[3:4])
        assert unequal(model.state_dict(), other.state_dict()) == []
        for (_, ours), theirs in zip(other.named_parameters(), model.parameters(), strict=True):
            found = {key: value.clone() for key, value in optimizer.state_of(ours).items()}
            assert unequal(found, {key: plain.state[theirs][key] for key in found}) == []
        optimizer.close()


# --- memory ----------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The addresses and sizes of all results of operations that are no views of ``arenas``."""

    def __init__(self, arenas: list[torch.Tensor]) -> None:
        super().__init__()
        self._arenas = [(arena.data_ptr(), arena.data_ptr() + arena.nbytes) for arena in arenas]
        self.sizes: list[tuple[int, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for made in (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)):
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
        model = build("llama")
        optimizer = stowed(model, layout, max_norm=1.0, bucket="one")
        arena = optimizer.engine.arena
        train(model, optimizer, BATCHES[:2])
        memories = [arena._device, arena._host.memory]
        places = [memory.data_ptr() for memory in memories]
        homes = [bucket.weight.data_ptr() for bucket in optimizer.engine.buckets]
        blocks = [b.weight_bytes for b in optimizer.engine.layout.buckets if "layers" in b.name]
        largest_parameter = max(param.numel() * 4 for param in model.parameters())
        with Largest(memories) as seen:
            train(model, optimizer, BATCHES[2:4])
            optimizer.drain()
        assert max(seen.sizes)[0] <= largest_parameter < min(blocks), max(seen.sizes)
        assert [arena._device.data_ptr(), arena._host.memory.data_ptr()] == places
        assert [bucket.weight.data_ptr() for bucket in optimizer.engine.buckets] == homes
        optimizer.close()
