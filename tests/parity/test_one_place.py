"""A weight's copy on the host and the gradient that waits there share one place: no loop sees one for the other.

The ordinary loops are in the grid (``test_engine.py``). Here weights are wanted while gradients are in their place, and
gradients are dropped or not taken; or there is no copy, and every weight is rounded from its master. Each loop runs on
a plain model with fp32 masters and on a stowed one, under the double that is as late as it may and leaves nothing where
a weight was, and under the race detector.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from strategies.core.layout import parks_in_copy, rounded_to_fetch
from strategies.engine import AdamW, stow
from strategies.engine.buckets.bucket_state import BucketState
from strategies.engine.transfer.transfer import Transfer
from tests.helpers.doubles import Delayed, RaceDetector, Vacant
from tests.helpers.engine import Made
from tests.helpers.masters import Masters
from tests.helpers.sides import ground
from trainer.machine.probe import probe
from trainer.planning.plan_for import plan_for

pytestmark = pytest.mark.usefixtures("one_thread")
MACHINE, LR, NORM = probe(), 1e-2, 0.5
Loop = Callable[[Any, Any], list[Any]]
generator = torch.Generator().manual_seed(1)
TEXT = [torch.randint(64, (2, 8), generator=generator) for _ in range(8)]
LAYOUTS: dict[str, dict[str, Any]] = {
    "host": {"site": "host", "gradients": "host", "prefetch": 0},
    "host, sent late": {"site": "host", "gradients": "device", "prefetch": 1},
    "host, two ahead": {"site": "host", "gradients": "host", "prefetch": 2, "bucket_size": "4KiB"},
    "host, without slots": {"site": "host", "gradients": "host", "prefetch": 1, "direct": True},
    "streamed": {"site": "streamed", "gradients": "host", "prefetch": 0},
    "streamed, ahead": {"site": "streamed", "gradients": "host", "prefetch": 1, "bucket_size": "8KiB"},
}
WITHOUT_COPIES: dict[str, dict[str, Any]] = {
    "masters": {"site": "streamed", "gradients": "device", "prefetch": 0, "weight_copies": False},
    "masters, ahead": {"site": "streamed", "gradients": "device", "prefetch": 2, "weight_copies": False},
}
TRANSFERS: list[type[Transfer]] = [Vacant, RaceDetector]


class Block(nn.Module):
    """``spare`` is used if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 48), nn.Linear(48, 32)
        self.spare = nn.Linear(32, 32)
        self.uses_spare = True

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return x + self.spare(x) if self.uses_spare else x


class Net(nn.Module):
    """``recomputes``: its blocks; ``looks_back``: the first block's output meets the last one's weight, detached."""

    def __init__(self, recomputes: bool = False, looks_back: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.recomputes, self.looks_back = recomputes, looks_back
        self.skip: int | None = None
        self.fails = False

    def hidden(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index != self.skip:
                x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
            if index == 0 and self.looks_back:
                x = x + 0.1 * (x @ self.layers[3].spare.weight.detach())  # type: ignore[operator, union-attr]
        return x

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.fails:
            raise IndexError
        return cross_entropy(self.head(self.hidden(x)).flatten(0, 1).float(), ids.flatten())


def made(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options).to(torch.bfloat16)


def stowed(layout: str, transfer: Transfer, max_norm: float = NORM, **options: Any) -> tuple[Any, Any]:
    model = made(**options)
    wishes: dict[str, Any] = {"weights": "streamed", **(LAYOUTS | WITHOUT_COPIES)[layout]}
    direct, debug = wishes.pop("direct", False), not isinstance(transfer, Vacant)
    plan: Any = plan_for(model, machine=MACHINE, max_grad_norm=max_norm, debug=debug, **wishes)
    if direct:
        buckets = (replace(bucket, grad_direct=True) for bucket in plan.layout.buckets)
        plan = Made.of(replace(plan.layout, buckets=tuple(buckets)), plan.facts.params, debug=debug)
    special = rounded_to_fetch if layout in WITHOUT_COPIES else parks_in_copy
    assert sum(special(bucket, plan.layout) for bucket in plan.layout.buckets) >= 4
    rule = AdamW(lr=LR)
    return model, stow(ground.feed(model), plan, rule=rule, device=ground.device, transfer=transfer, beside=True)  # type: ignore[arg-type]


def backward(model: Any, number: int, factor: float = 1.0) -> float:
    loss = model(TEXT[number]) * factor
    loss.backward()
    return float(loss.detach())


def train(model: Any, optimizer: Any, numbers: range = range(3)) -> list[float]:
    seen = []
    for number in numbers:
        seen.append(backward(model, number))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def evaluated(model: Any) -> float:
    with torch.no_grad():
        return float(model(TEXT[7]))


def weights(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


# --- weights are wanted between backward and step --------------------------------------------------------------------


def evaluates(model: Any, optimizer: Any) -> list[Any]:
    """Twice, with other work before: what was present is away the second time."""
    seen: list[Any] = []
    for number in range(3):
        seen += [backward(model, number), evaluated(model), evaluated(model)]
        optimizer.step()
        seen += [evaluated(model)]
        optimizer.zero_grad()
    return seen


def another_forward(model: Any, optimizer: Any) -> list[Any]:
    """With gradients, whose graph is dropped; and the gradient of an input, for which only weights are needed."""
    seen: list[Any] = []
    for number in range(3):
        seen += [backward(model, number), float(model(TEXT[6]).detach())]
        x = torch.ones(1, 4, 32, dtype=torch.bfloat16, device=ground.device, requires_grad=True)
        seen.append(torch.autograd.grad(model.hidden(x).sum(), x)[0])
        optimizer.step()
        optimizer.zero_grad()
    return seen


def reads(model: Any, optimizer: Any) -> list[Any]:
    """State dicts, single weights and gradients, in turn."""
    seen: list[Any] = []
    for number in range(3):
        seen += [backward(model, number), weights(model), [param.clone() for param in model.parameters()]]
        seen += [[(param.grad + 0).clone() for param in model.parameters()], weights(model)]
        with optimizer.present([model.layers[0].up.weight]):
            seen.append(model.layers[0].up.weight.detach().clone())
        seen.append(evaluated(model))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def loads(model: Any, optimizer: Any) -> list[Any]:
    """Other weights are loaded between backward and step, which then steps from there."""
    seen: list[Any] = [*train(model, optimizer), backward(model, 3)]
    other = {name: value.mul(0.5) for name, value in made().state_dict().items()}
    (optimizer.load if isinstance(optimizer, Masters) else model.load_state_dict)(other)
    seen += [weights(model), evaluated(model)]
    optimizer.step()
    optimizer.zero_grad()
    return [*seen, *train(model, optimizer)]


def half_a_backward(model: Any, optimizer: Any) -> list[Any]:
    """The gradients of ``spare`` come by a backward of their own, for which the other weights are needed again."""
    seen: list[Any] = []
    for number in range(3):
        spares = [layer.spare for layer in model.layers]
        for spare in spares:
            spare.requires_grad_(False)
        first = model(TEXT[number])
        for spare in spares:
            spare.requires_grad_(True)
        first.backward()
        seen += [float(first.detach()), evaluated(model)]
        optimizer.step()
        optimizer.zero_grad()
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
            model(TEXT[6])
        model.fails = False
        seen.append([param.grad + 0 for param in model.layers[0].up.parameters()])
        seen.append(evaluated(model))
        optimizer.step()
        optimizer.zero_grad()
    return seen


# --- gradients that no update takes ----------------------------------------------------------------------------------


def skips(model: Any, optimizer: Any) -> list[Any]:
    """Two steps in a row are not finite, and one more after a good one."""
    seen: list[Any] = []
    for number, factor in enumerate([1.0, torch.inf, torch.inf, 1.0, torch.inf, 1.0, 1.0]):
        seen.append(backward(model, number, factor))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(weights(model) if number % 2 else evaluated(model))
    return [*seen, optimizer.skipped]


def drops(model: Any, optimizer: Any) -> list[Any]:
    """``zero_grad`` before the step: once between good steps, once before weights are read at once."""
    seen: list[Any] = train(model, optimizer, range(1))
    seen.append(backward(model, 1))
    optimizer.zero_grad()
    seen += train(model, optimizer, range(2, 3))
    seen.append(backward(model, 3))
    optimizer.zero_grad()
    seen += [weights(model), evaluated(model), backward(model, 4)]
    optimizer.zero_grad()
    seen += [backward(model, 4), evaluated(model)]
    optimizer.step()
    optimizer.zero_grad()
    return [*seen, *train(model, optimizer, range(5, 7))]


def drops_some(model: Any, optimizer: Any) -> list[Any]:
    """All gradients of a block are set to None, and one of another block: the block is not updated."""
    seen: list[Any] = []
    for number in range(3):
        seen.append(backward(model, number))
        for param in (*model.layers[1].parameters(), model.layers[2].up.weight):
            param.grad = None
        seen.append(evaluated(model))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(evaluated(model))
    return seen


def leaves_out(model: Any, optimizer: Any) -> list[Any]:
    """A block gets no gradients, and in another one a layer gets none."""
    seen: list[Any] = []
    for number in range(5):
        model.skip = number % 4
        model.layers[(number + 1) % 4].uses_spare = False
        seen += [backward(model, number), evaluated(model)]
        optimizer.step()
        optimizer.zero_grad()
        model.skip = None
        model.layers[(number + 1) % 4].uses_spare = True
        seen += [evaluated(model)] if number % 2 else []
    return seen


LOOPS: list[Loop] = [
    train, evaluates, another_forward, reads, loads, half_a_backward, stops_early, skips, drops, drops_some, leaves_out,
]  # fmt: skip


@cache
def plainly(
    loop: Loop, device: torch.device, max_norm: float = NORM, **shape: Any
) -> tuple[list[Any], Any, dict[Any, Any]]:
    """What ``loop`` sees, the model and its masters; once for all layouts."""
    plain = ground.put(made(**shape))
    optimizer = Masters(plain, LR, max_norm)
    return loop(plain, optimizer), plain, optimizer.masters


def compare(loop: Loop, layout: str, transfer: Transfer, **options: Any) -> None:
    """What ``loop`` sees and leaves, plainly and stowed."""
    wanted, plain, masters = plainly(loop, ground.device, **options)
    model, optimizer = stowed(layout, transfer, **options)
    found = loop(model, optimizer)
    for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
        assert _same(one, other), f"what the loop saw as number {number} differs"
    for (name, param), mine in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert _same(masters[param].data, optimizer.state_of(mine)["master"]), f"master of {name}"
    optimizer.close()
    for (name, param), mine in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert _same(param.data, mine.data), name
    assert not isinstance(transfer, RaceDetector) or transfer.races == []


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return all(map(_same, one, other))
    return torch.equal(one.cpu(), other.cpu()) if isinstance(one, Tensor) else repr(one) == repr(other)


def cases() -> Iterator[Any]:
    """Every loop in every layout, under the doubles in turn."""
    for number, layout in enumerate(LAYOUTS | WITHOUT_COPIES):
        for turn, loop in enumerate(LOOPS):
            transfer = TRANSFERS[(number + turn) % 2]
            yield pytest.param(layout, loop, transfer, id=f"{layout}-{loop.__name__}-{transfer.__name__}")


@pytest.mark.parametrize(("layout", "loop", "transfer"), cases())
def test_loops(layout: str, loop: Loop, transfer: type[Transfer]) -> None:
    compare(loop, layout, transfer())


@pytest.mark.parametrize("options", [{"recomputes": True}, {"looks_back": True}], ids=["recomputes", "looks back"])
@pytest.mark.parametrize("layout", LAYOUTS | WITHOUT_COPIES)
def test_backward_needs_weights_again(layout: str, options: dict[str, Any]) -> None:
    """For recomputation; and after the weight's own gradient was made and sent."""
    for loop, transfer in zip((train, evaluates), TRANSFERS, strict=True):
        compare(loop, layout, transfer(), **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_calling_thread_rounds_nothing_in_ordinary_loops(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker does, or the device, in skipped steps as well: otherwise each fetch would wait for it."""
    slow: list[str] = []

    def counted(name: str) -> Any:
        former = getattr(BucketState, name)

        def called(*args: Any) -> Any:
            slow.append(name)
            return former(*args)

        return called

    for name in ("restored", "weight_of", "rounded"):
        monkeypatch.setattr(BucketState, name, counted(name))
    model, optimizer = stowed(layout, Vacant())
    for number, factor in enumerate([1.0, torch.inf, 1.0, 1.0]):
        backward(model, number, factor)
        optimizer.step()
        optimizer.zero_grad()
    assert slow == []
    backward(model, 4)
    evaluated(model)
    assert "rounded" in slow


@pytest.mark.parametrize("layout", LAYOUTS | WITHOUT_COPIES)
def test_updates_in_backward(layout: str) -> None:
    for loop, transfer in zip((skips, leaves_out_quietly), TRANSFERS, strict=True):
        compare(loop, layout, transfer(), max_norm=0.0)


def leaves_out_quietly(model: Any, optimizer: Any) -> list[Any]:
    """As ``leaves_out``, without reading weights between backward and step, which is refused there."""
    seen: list[Any] = []
    for number in range(5):
        model.skip = number % 4
        seen.append(backward(model, number))
        optimizer.step()
        optimizer.zero_grad()
        model.skip = None
        seen.append(evaluated(model))
    return seen


# --- state dicts that are held ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_state_dict_that_is_held_keeps_its_values(layout: str) -> None:
    """Nothing is copied until a gradient takes the place; then what is held, and nothing else."""
    model, optimizer = stowed(layout, Delayed())
    train(model, optimizer)
    model.state_dict()  # dropped at once
    held = model.state_dict()
    before, places = weights(model), [value.data_ptr() for value in held.values()]
    bucket, index = optimizer.engine.bucket_of[id(model.layers[1].up.weight)]
    assert held["layers.1.up.weight"].data_ptr() == bucket.part(bucket.copy, index).data_ptr()
    evaluated(model)
    assert [value.data_ptr() for value in held.values()] == places
    backward(model, 3)
    optimizer.clip_grad_norm_(1.0)
    moved = {name for name, value in held.items() if value.data_ptr() not in places}
    assert {name for name in held if name.startswith("layers.")} <= moved
    of_layers = [index for index, name in enumerate(held) if name.startswith("layers.")]
    assert all(torch.equal(before[index], list(held.values())[index]) for index in of_layers)
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.equal(model.state_dict()["layers.1.up.weight"], held["layers.1.up.weight"])


def test_a_part_of_a_state_dict_that_is_held_is_refused() -> None:
    model, optimizer = stowed("host", Delayed())
    train(model, optimizer)
    part = model.state_dict()["layers.1.up.weight"][:2]
    with pytest.raises(RuntimeError, match=r"layers.1.*: a part of what model.state_dict\(\) returned is held"):
        backward(model, 3)
    assert part.isfinite().all()
    cycle: list[Any] = [model.state_dict()["layers.1.up.weight"][:2]]
    cycle.append(cycle)
    model, optimizer = stowed("host", Delayed())
    cycle = [model.state_dict()["layers.1.up.weight"][:2]]
    cycle.append(cycle)
    del cycle
    train(model, optimizer)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saved_loaded_and_closed_between_backward_and_step(layout: str, tmp_path: Path) -> None:
    """Loading drops the gradients; ``close`` leaves the weights that there were."""
    model, optimizer = stowed(layout, Delayed())
    train(model, optimizer)
    before, value = weights(model), evaluated(model)
    backward(model, 3)
    optimizer.save(tmp_path)
    optimizer.load(tmp_path)
    assert evaluated(model) == value and _same(weights(model), before)
    backward(model, 3)
    optimizer.close()
    assert _same([param.data for param in model.parameters()], before)
