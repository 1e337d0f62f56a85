"""Updates ahead of the norm: made under backward, kept if nothing is clipped, and bits as without in every case.

The grid of ``test_engine.py`` has them in every kind of layout. Here is what may come between: norms on either side of
the limit in any order, gradients that are not finite, values that change between backward and step, and saved state.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from deepstow.strategies.core.layout import Layout
from deepstow.strategies.engine import AdamW, StowOptimizer, stow
from deepstow.strategies.engine.buckets.bucket_state import BucketState
from deepstow.strategies.engine.transfer.transfer import Transfer
from tests.helpers.doubles import Delayed, RaceDetector
from tests.helpers.engine import LR, plan_of
from tests.helpers.models import build, tokens

LOOSE, TIGHT = 1e6, 1e-3  # norms that no step, and every step, goes beyond
Between = Callable[[int, Any, StowOptimizer], None]  # what the loop does between backward and step, by the step


@cache
def made(*, ahead: bool, travelling: bool = False) -> Any:
    where = {"weights": "travelling", "prefetch": 1} if travelling else {"park": "host"}
    return plan_of(build("gpt2", dtype=torch.bfloat16), site="host", max_norm=1.0, ahead=ahead, **where)


def trained(
    limits: Sequence[float],
    *,
    ahead: bool,
    between: Between = lambda *_: None,
    travelling: bool = False,
    transfer: type[Transfer] = Transfer,
    nan_at: int | None = None,
) -> tuple[dict[str, Tensor], int]:
    """Weights and state after a step with each limit, and how many updates ahead were kept. ``nan_at``: the step of
    which the loss is not finite.
    """
    torch.manual_seed(0)
    moves, model = transfer(), build("gpt2", dtype=torch.bfloat16)
    optimizer = stow(model, made(ahead=ahead, travelling=travelling), None, AdamW(lr=LR), transfer=moves, beside=True)
    kept = count_kept(optimizer)
    batches = tokens("gpt2", 4)
    for step, limit in enumerate(limits):
        loss = model(**batches[step % 4]).loss
        (loss * torch.nan if step == nan_at else loss).backward()
        between(step, model, optimizer)
        optimizer.clip_grad_norm_(limit)
        optimizer.step()
        optimizer.zero_grad()
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for name, param in model.named_parameters():
        state = optimizer.access.state_of(param)
        found |= {f"{name} {kind}": value.clone() for kind, value in state.items()}
    optimizer.close()
    assert not isinstance(moves, RaceDetector) or moves.races == []
    return found, len(kept)


def count_kept(optimizer: StowOptimizer) -> list[str]:
    """A list that gets the name of a bucket whenever an update that was made ahead of it is kept."""
    kept: list[str] = []

    def counted(bucket: BucketState, keep: Any, steps: Tensor) -> None:
        kept.append(bucket.name)
        keep(steps)

    for bucket in optimizer.engine.buckets:
        bucket.keep_ahead = partial(counted, bucket, bucket.keep_ahead)  # type: ignore[method-assign]
    return kept


def finished(step: int, model: Any, optimizer: StowOptimizer) -> None:
    """So slow a loop that every update ahead is made."""
    for bucket in optimizer.engine.buckets:
        if bucket.ahead is not None and bucket.ahead.future is not None:
            bucket.ahead.future.result()


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert all(value.isfinite().all() for value in one.values())


def both(limits: Sequence[float], between: Between = finished, travelling: bool = False, **how: Any) -> int:
    """Train with and without updates ahead, compare by bits, and return how many were kept."""
    found, kept = trained(limits, ahead=True, between=between, travelling=travelling, **how)
    expected, none = trained(limits, ahead=False, between=between, travelling=travelling, **how)
    assert none == 0
    assert_same(found, expected)
    return kept


def buckets() -> int:
    layout: Layout = made(ahead=True).layout
    return sum(bucket.updates_ahead for bucket in layout.buckets)


SLOW = pytest.mark.slow
WHERE = [
    (False, Delayed),
    (True, RaceDetector),
    *(pytest.param(*w, marks=SLOW) for w in ((True, Delayed), (False, RaceDetector))),
]


@pytest.mark.parametrize(("travelling", "transfer"), WHERE)
def test_all_are_kept_where_nothing_is_clipped_and_none_where_all_is(
    travelling: bool, transfer: type[Transfer]
) -> None:
    assert both([LOOSE] * 3, transfer=transfer, travelling=travelling) == 3 * buckets() > 0
    assert both([TIGHT] * 3, transfer=transfer, travelling=travelling) == 0


def random_steps(seed: int, steps: int) -> int:
    """The worker is as far as it happens to be when the norm is known."""
    draw = Random(seed)
    limits = [draw.choice([LOOSE, LOOSE, TIGHT]) for _ in range(steps)]
    slow = [draw.random() < 0.5 for _ in limits]
    nan_at = draw.choice([None, None, draw.randrange(steps)])
    return both(limits, lambda at, *rest: finished(at, *rest) if slow[at] else None, seed % 2 > 0, nan_at=nan_at)


def test_clipped_at_random_steps() -> None:
    assert random_steps(0, 10) > 0


@pytest.mark.slow
@pytest.mark.rare
def test_two_hundred_random_patterns() -> None:
    assert sum(random_steps(seed, 6) for seed in range(200)) > 200


def test_the_update_after_a_clipped_one_is_not_made_ahead() -> None:
    """It is likely to be clipped, too."""
    assert both([LOOSE, TIGHT, LOOSE, LOOSE]) == 2 * buckets()


def test_gradients_that_are_not_finite_change_nothing() -> None:
    assert both([LOOSE] * 3, nan_at=1) == 2 * buckets()


def test_what_changes_between_backward_and_step_counts() -> None:
    def slower(step: int, model: Any, optimizer: StowOptimizer) -> None:
        finished(step, model, optimizer)
        if step == 1:
            optimizer.param_groups[0]["lr"] = LR / 3

    assert both([LOOSE] * 3, slower) == 2 * buckets()


def forget_one(model: Any, optimizer: StowOptimizer) -> None:
    next(model.parameters()).grad = None


def begin_again(model: Any, optimizer: StowOptimizer) -> None:
    optimizer.zero_grad()
    model(**tokens("gpt2", 6)[5]).loss.backward()


def write(model: Any, optimizer: StowOptimizer) -> None:
    params = list(model.parameters())
    with optimizer.present(params), torch.no_grad():
        for param in params:
            param.mul_(0.5)


def evaluate(model: Any, optimizer: StowOptimizer) -> None:
    with torch.no_grad():
        model(**tokens("gpt2", 1)[0])


def write_state(model: Any, optimizer: StowOptimizer) -> None:
    for param in model.parameters():
        optimizer.state[param]["exp_avg"].zero_()


@pytest.mark.parametrize("travelling", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("act", [forget_one, begin_again, write, evaluate, write_state])
def test_what_is_done_between_backward_and_step(act: Callable[..., None], travelling: bool) -> None:
    def once(step: int, model: Any, optimizer: StowOptimizer) -> None:
        if step == 1:
            act(model, optimizer)

    both([LOOSE] * 3, once, travelling, transfer=RaceDetector)


@pytest.mark.parametrize("travelling", [False, pytest.param(True, marks=SLOW)])
def test_discarded_and_made_again_from_the_same_graph(travelling: bool) -> None:
    """No forward comes between, which would have dropped the updates that read the discarded gradients."""
    moves, model = RaceDetector(), build("gpt2", dtype=torch.bfloat16)
    plan = made(ahead=True, travelling=travelling)
    optimizer = stow(model, plan, None, AdamW(lr=LR), transfer=moves, beside=True)
    loss = model(**tokens("gpt2", 1)[0]).loss
    loss.backward(retain_graph=True)
    finished(0, model, optimizer)
    optimizer.zero_grad()
    loss.backward()
    optimizer.close()
    assert moves.races == []


def test_views_of_state_stay_those_of_the_state() -> None:
    """Who has read ``optimizer.state`` may write to it, as in plain torch: its memory is not exchanged any more."""

    held: list[Tensor] = []

    def hold(step: int, model: Any, optimizer: StowOptimizer) -> None:
        if step == 1:
            held[:] = [optimizer.state[param]["exp_avg"] for param in model.parameters()]
        if step == 2:
            assert all(view.any() for view in held)
            for view in held:
                view.zero_()

    both([LOOSE] * 4, hold)


def test_saved_and_loaded(tmp_path: Path) -> None:
    """A save between two steps has the state that was kept, whichever memory it is in."""

    def reload(step: int, model: Any, optimizer: StowOptimizer) -> None:
        finished(step, model, optimizer)
        if step in (1, 2):
            optimizer.zero_grad()
            optimizer.save(tmp_path / str(step))
            if step == 2:
                optimizer.load(tmp_path / "1")
            model(**tokens("gpt2", 1)[0]).loss.backward()

    both([LOOSE] * 4, reload)
