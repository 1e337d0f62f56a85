"""A weight's copy on the host and the gradient that waits there share one place: no loop sees one for the other.

The ordinary loops are in the grid (``test_engine.py``). Here weights are wanted while gradients are in their place, and
gradients are dropped or not taken; or there is no copy, and every weight is rounded from its master. Each loop runs on
a plain model with fp32 masters and on a stowed one, under the double that is as late as it may and leaves nothing where
a weight was, and under the race detector.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deepstow.strategies.engine.buckets.bucket_state import BucketState
from deepstow.strategies.engine.transfer.transfer import Transfer
from tests.helpers import sides
from tests.helpers.doubles import Delayed, RaceDetector, Vacant
from tests.helpers.models import Net, build
from tests.helpers.sides import (
    BATCHES,
    Script,
    both_sides,
    copies,
    everything,
    ground,
    parameters,
    train,
    training,
    unequal,
)

NORM = 0.5
LAYOUTS: dict[str, dict[str, Any]] = {
    "host": {"site": "host", "park": "host", "prefetch": 0},
    "host, sent late": {"site": "host", "park": "device", "prefetch": 1},
    "host, two ahead": {"site": "host", "park": "host", "prefetch": 2, "bucket": "half"},
    "host, without slots": {"site": "host", "park": "host", "prefetch": 1, "direct": True},
    "streamed": {"site": "streamed", "park": "host", "prefetch": 0},
    "streamed, ahead": {"site": "streamed", "park": "host", "prefetch": 1, "bucket": "half"},
}
FEW = ("host, sent late", "host, two ahead", "streamed")
TRANSFERS: list[type[Transfer]] = [Vacant, RaceDetector]


class Recomputes(Net):
    """Its blocks."""

    def hidden(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class LooksBack(Net):
    """The first block's output meets the last one's weight, detached."""

    def hidden(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 0:
                x = x + 0.1 * (x @ self.layers[3].spare.weight.detach())
        return x


class Skips(Net):
    """A block that it is told to leave out; fails where it is told to."""

    skip: int | None = None
    fails = False

    def hidden(self, x: Tensor) -> Tensor:
        if self.fails:
            raise IndexError
        for index, layer in enumerate(self.layers):
            x = x if index == self.skip else layer(x)
        return x


def made(kind: type[Net] = Skips) -> Any:
    return build(kind, dtype=torch.bfloat16)


MADE = {kind: partial(made, kind) for kind in (Skips, Recomputes, LooksBack)}


def backward(model: Any, number: int, factor: float = 1.0) -> float:
    loss = model(**BATCHES[number]).loss * factor
    loss.backward()
    return float(loss.detach())


def evaluated(model: Any, optimizer: Any = None) -> float:
    with torch.no_grad():
        return float(model(**BATCHES[7]).loss)


def finish(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


# --- weights are wanted between backward and step --------------------------------------------------------------------

# Twice, with other work before: what was present is away the second time.
evaluates = training(lambda model, _: [evaluated(model), evaluated(model)], evaluated)


def another_forward(model: Any, optimizer: Any) -> list[Any]:
    """With gradients, whose graph is dropped; and the gradient of an input, for which only weights are needed."""

    def between(model: Any, optimizer: Any) -> list[Any]:
        loss = float(model(**BATCHES[6]).loss.detach())
        x = torch.ones(1, 4, 32, dtype=torch.bfloat16, device=ground.device, requires_grad=True)
        return [loss, torch.autograd.grad(model.hidden(x).sum(), x)[0]]

    return train(model, optimizer, BATCHES[:3], between)


def reads(model: Any, optimizer: Any) -> list[Any]:
    """State dicts, single weights and gradients, in turn."""

    def between(model: Any, optimizer: Any) -> list[Any]:
        seen: list[Any] = [copies(model), [param.clone() for param in model.parameters()]]
        seen += [[(param.grad + 0).clone() for param in model.parameters()], copies(model)]
        with optimizer.present([model.layers[0].up.weight]):
            seen.append(model.layers[0].up.weight.detach().clone())
        return [*seen, evaluated(model)]

    return train(model, optimizer, BATCHES[:3], between)


def loads(model: Any, optimizer: Any) -> list[Any]:
    """Other weights are loaded between backward and step, which then steps from there."""
    seen: list[Any] = [*train(model, optimizer, BATCHES[:3]), backward(model, 3)]
    model.load_state_dict({name: value.mul(0.5) for name, value in made().state_dict().items()})
    seen += [copies(model), evaluated(model)]
    finish(optimizer)
    return [*seen, *train(model, optimizer, BATCHES[:3])]


def half_a_backward(model: Any, optimizer: Any) -> list[Any]:
    """The gradients of ``spare`` come by a backward of their own, for which the other weights are needed again."""
    seen: list[Any] = []
    for batch in BATCHES[:3]:
        for layer in model.layers:
            layer.spare.requires_grad_(False)
        loss = model(**batch).loss
        for layer in model.layers:
            layer.spare.requires_grad_(True)
        loss.backward()
        seen += [float(loss.detach()), evaluated(model)]
        finish(optimizer)
    return seen


def stops_early(model: Any, optimizer: Any) -> list[Any]:
    """A gradient goes down when it is read, while a forward that failed has begun to fetch its weight."""
    seen: list[Any] = []
    for number in range(2):
        model.layers[0].uses_spare = False  # so that its gradients are not complete
        seen.append(backward(model, number))
        model.layers[0].uses_spare = True
        seen.append(evaluated(model))  # the block has left the device
        model.fails = True
        with pytest.raises(IndexError):
            model(**BATCHES[6])
        model.fails = False
        seen += [[param.grad + 0 for param in model.layers[0].up.parameters()], evaluated(model)]
        finish(optimizer)
    return seen


# --- gradients that no update takes ----------------------------------------------------------------------------------


def skips(model: Any, optimizer: Any) -> list[Any]:
    """Two steps in a row are not finite, and one more after a good one."""
    seen: list[Any] = []
    for number, factor in enumerate([1.0, torch.inf, torch.inf, 1.0, torch.inf, 1.0, 1.0]):
        seen.append(backward(model, number, factor))
        finish(optimizer)
        seen.append(copies(model) if number % 2 else evaluated(model))
    return [*seen, optimizer.skipped]


def drops(model: Any, optimizer: Any) -> list[Any]:
    """``zero_grad`` before the step: once between good steps, once before weights are read at once."""
    seen: list[Any] = train(model, optimizer, BATCHES[:1])
    for number in (1, 3, 4):
        seen.append(backward(model, number))
        optimizer.zero_grad()
        seen += train(model, optimizer, BATCHES[2:3]) if number == 1 else []
        seen += [copies(model), evaluated(model)] if number == 3 else []
    seen += [backward(model, 4), evaluated(model)]
    finish(optimizer)
    return [*seen, *train(model, optimizer, BATCHES[5:7])]


def drops_some(model: Any, optimizer: Any) -> list[Any]:
    """All gradients of a block are set to None, and one of another block: the block is not updated."""

    def between(model: Any, optimizer: Any) -> float:
        for param in (*model.layers[1].parameters(), model.layers[2].up.weight):
            param.grad = None
        return evaluated(model)

    return train(model, optimizer, BATCHES[:3], between, evaluated)


def leaves_out(model: Any, optimizer: Any, looks: bool = True) -> list[Any]:
    """A block gets no gradients, and in another one a layer gets none. ``looks``: at weights between backward and step,
    which is refused where updates begin in backward."""
    seen: list[Any] = []
    for number in range(5):
        model.skip = number % 4
        model.layers[(number + 1) % 4].uses_spare = not looks
        seen += [backward(model, number), *([evaluated(model)] if looks else [])]
        finish(optimizer)
        model.skip = None
        model.layers[(number + 1) % 4].uses_spare = True
        seen += [evaluated(model)] if number % 2 or not looks else []
    return seen


leaves_out_quietly = partial(leaves_out, looks=False)
plainly = training()
LOOPS: dict[str, Script] = {
    "train": plainly, "evaluates": evaluates,
    **{loop.__name__: loop for loop in (another_forward, reads, loads, half_a_backward, stops_early, skips, drops,
                                        drops_some, leaves_out)},
}  # fmt: skip


def compare(
    loop: Script, layout: str, transfer: type[Transfer] | None, kind: type[Net] = Skips, max_norm: float = NORM
) -> None:
    """What ``loop`` sees and leaves, plainly and stowed."""
    how: dict[str, Any] = {"transfer": transfer, "beside": True, "debug": transfer is not Vacant}
    where = {"weights": "travelling", "in_backward": max_norm == 0, **LAYOUTS[layout]}
    both_sides(MADE[kind], loop, [where], max_norm=max_norm, **how)


def stowed(layout: str, transfer: Transfer) -> tuple[Any, Any]:
    model, how = made(), {"debug": not isinstance(transfer, Vacant), "max_norm": NORM}
    where = {"weights": "travelling", **LAYOUTS[layout]}
    return model, sides.stowed(model, where, transfer=transfer, beside=True, **how)


@pytest.mark.parametrize("loop", LOOPS)
def test_loops(loop: str) -> None:
    """Every loop in every third layout, under the doubles in turn."""
    turn = list(LOOPS).index(loop)
    for number, layout in enumerate(list(LAYOUTS)[turn % 3 :: 3]):
        compare(LOOPS[loop], layout, TRANSFERS[(number + turn // 2) % 2])


@pytest.mark.parametrize("kind", [Recomputes, LooksBack])
def test_backward_needs_weights_again(kind: type[Net]) -> None:
    """For recomputation; and after the weight's own gradient was made and sent."""
    for number, layout in enumerate(list(LAYOUTS)[1::2]):
        compare((plainly, evaluates)[number % 2], layout, TRANSFERS[number // 2 % 2], kind)


@pytest.mark.parametrize("layout", FEW)
def test_updates_in_backward(layout: str) -> None:
    for loop, transfer in zip((skips, leaves_out_quietly), TRANSFERS, strict=True):
        compare(loop, layout, transfer, max_norm=0.0)


@pytest.mark.parametrize("layout", FEW)
def test_the_calling_thread_rounds_nothing_in_ordinary_loops(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker does, or the device, in skipped steps as well: otherwise each fetch would wait for it."""
    slow: list[str] = []

    def counted(name: str) -> Any:
        former = getattr(BucketState, name)
        return lambda *args: (slow.append(name), former(*args))[1]

    for name in ("restored", "weight_of", "rounded"):
        monkeypatch.setattr(BucketState, name, counted(name))
    model, optimizer = stowed(layout, Vacant())
    for number, factor in enumerate([1.0, torch.inf, 1.0, 1.0]):
        backward(model, number, factor)
        finish(optimizer)
    assert slow == []
    backward(model, 4)
    evaluated(model)
    assert "rounded" in slow


# --- state dicts that are held ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", FEW)
def test_a_state_dict_that_is_held_keeps_its_values(layout: str) -> None:
    """Nothing is copied until a gradient takes the place; then what is held, and nothing else."""
    model, optimizer = stowed(layout, Delayed())
    train(model, optimizer, BATCHES[:3])
    model.state_dict()  # dropped at once
    held = model.state_dict()
    before, places = copies(model), [value.data_ptr() for value in held.values()]
    bucket, index = optimizer.engine.bucket_of[id(model.layers[1].up.weight)]
    assert held["layers.1.up.weight"].data_ptr() == bucket.part(bucket.copy, index).data_ptr()
    evaluated(model)
    assert [value.data_ptr() for value in held.values()] == places
    backward(model, 3)
    optimizer.clip_grad_norm_(1.0)
    of_layers = {name for name in held if name.startswith("layers.")}
    assert of_layers <= {name for name, value in held.items() if value.data_ptr() not in places}
    assert all(torch.equal(before[name], held[name]) for name in of_layers)
    finish(optimizer)
    assert not torch.equal(model.state_dict()["layers.1.up.weight"], held["layers.1.up.weight"])


def test_a_part_of_a_state_dict_that_is_held_is_refused() -> None:
    model, optimizer = stowed("host", Delayed())
    train(model, optimizer, BATCHES[:3])
    part = model.state_dict()["layers.1.up.weight"][:2]
    with pytest.raises(RuntimeError, match=r"layers.1.*: a part of what model.state_dict\(\) returned is held"):
        backward(model, 3)
    assert part.isfinite().all()
    model, optimizer = stowed("host", Delayed())
    cycle: list[Any] = [model.state_dict()["layers.1.up.weight"][:2]]
    cycle.append(cycle)
    del cycle
    train(model, optimizer, BATCHES[:3])


@pytest.mark.parametrize("layout", FEW)
def test_saved_loaded_and_closed_between_backward_and_step(layout: str, tmp_path: Path) -> None:
    """Loading drops the gradients; ``close`` leaves the weights that there were."""
    model, optimizer = stowed(layout, Delayed())
    train(model, optimizer, BATCHES[:3])
    before, weights, value = everything(model, optimizer), copies(model), evaluated(model)
    backward(model, 3)
    optimizer.save(tmp_path)
    optimizer.load(tmp_path)
    assert evaluated(model) == value and unequal(everything(model, optimizer), before) == []
    backward(model, 3)
    optimizer.close()
    assert unequal(weights, parameters(model)) == []
