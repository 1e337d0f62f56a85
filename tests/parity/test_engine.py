"""The exactness gate of the memory engine: whatever is moved where and when, training has the bits of plain training.

A case is a row of a grid (``tests/helpers/grid.py``): a model, a loop and a layout. The rows are chosen so that any
two levels of the grid meet in one of them, in ``make test-all`` any three. Compared are all losses, norms, weights,
moments and update counts. Everything runs with the engine's own checks on.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch

from deepstow.strategies.core import layout
from deepstow.strategies.engine import AdamW, UpdateRule, stow
from deepstow.strategies.engine.updating import updates
from deepstow.strategies.engine.updating.optim import class_of
from tests.helpers.doubles import Delayed, Vacant
from tests.helpers.engine import DECAY, LAYOUTS, LR, STEPS, differences, plain, plan_of, stowed
from tests.helpers.grid import FORBIDDEN, FP32, IN_STAGES, expected, run, title
from tests.helpers.models import build, tokens
from tests.helpers.pairwise import Table

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


GRID = {**FP32.factors, "model": ("llama", "gpt2", "experts", "mixtral"), "dtype": tuple(DTYPES.values())}
NEVER = [*FORBIDDEN, (("dtype", torch.bfloat16), ("recompute", "reentrant"))]


def rows(factors: Mapping[str, Any], strength: int = 2) -> list[Any]:
    return [pytest.param(row, id=title(row)) for row in Table(factors, NEVER, strength).rows()]


@pytest.mark.parametrize("row", rows(GRID))
def test_bits(row: Any) -> None:
    """In bf16 against a loop that keeps fp32 masters and sums gradients in bf16."""
    assert run(row, row["dtype"]) == []


@pytest.mark.slow
@pytest.mark.parametrize("row", rows(GRID, 3))
def test_bits_any_three_levels(row: Any) -> None:
    assert run(row, row["dtype"]) == []


@pytest.mark.parametrize("row", rows(IN_STAGES.factors))
def test_several_micro_batches_under_way(row: Any) -> None:
    """As in a stage of a pipeline: forwards of later micro-batches run before the backward of an earlier one."""
    assert run(row) == []


def test_weights_come_ahead_in_a_backward_that_follows_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of a pipeline's step: none of them is late in the second one either."""
    model = build("llama")
    plan: Any = plan_of(model, site="device", weights="travelling", prefetch=1, accumulation=2)
    optimizer = stow(model, plan, None, AdamW(), transfer=Delayed(), beside=False)
    engine, late = optimizer.engine, list[int]()
    ensure = engine.ensure

    def counted(*buckets: Any) -> None:
        late[-1] += sum(not bucket.present for bucket in buckets)
        ensure(*buckets)

    monkeypatch.setattr(engine, "ensure", counted)
    late.append(0)
    losses = [model(**batch).loss for batch in tokens("llama", 2)]
    for loss in losses:
        late.append(0)
        engine.begin_backward()
        loss.backward()
    optimizer.close()
    assert late[1:] == [0, 0], late


def test_backward_does_not_bring_an_embedding() -> None:
    """It does not read it; the head is brought."""
    model = build("words")
    plan: Any = plan_of(model, site="host", weights="some", prefetch=3)
    optimizer = stow(model, plan, None, AdamW(), transfer=Vacant(), beside=False)
    first, *_, last = optimizer.engine.buckets
    loss = model(**tokens("words", 1)[0]).loss
    assert first.name == "embedding" and not first.present and not first.spec.resident
    for bucket in (first, last):
        bucket.params[0].register_hook(lambda grad, bucket=bucket: seen.append((bucket.name, bucket.present)))
    seen: list[tuple[str, bool]] = []
    loss.backward()
    optimizer.close()
    assert seen == [(last.name, True), ("embedding", False)]


# --- the test itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", GRID["model"])
def test_training_is_worth_comparing(model: str) -> None:
    """Weights that never move, and clipping that never triggers, would prove nothing."""
    loop = {"accumulation": 1, "groups": 1}
    tight = expected(model, False, "none", torch.float32, "cpu", max_norm=0.05, **loop)
    loose = expected(model, False, "none", torch.float32, "cpu", max_norm=1e6, **loop)
    off = expected(model, False, "none", torch.float32, "cpu", max_norm=0.0, **loop)
    assert min(tight.norms) > 0.05
    assert max(loose.norms) < 1e6
    assert differences(off, loose) == ["norms"]
    assert differences(off, tight)
    moved = [name for name, start in build(model).named_parameters() if not torch.equal(start, off.tensors[name])]
    counted = [name for name in moved if off.tensors[f"{name} step"] > 0]
    assert len(moved) > 0.8 * len(list(build(model).named_parameters()))
    assert moved == counted
    if model == "experts":
        assert {0, STEPS} < {int(off.tensors[f"{name} step"]) for name, _ in build(model).named_parameters()}


# --- other rules and schedules ---------------------------------------------------------------------------------------


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


FUSED, CLIPPED = {"fused": True}, {"max_norm": 0.05}
RULES: Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # torch's class, its options, the loop's
    "sgd, clipped": ("SGD", {}, CLIPPED),
    "sgd with momentum": ("SGD", {"momentum": 0.9, "nesterov": True}, CLIPPED),
    "fused sgd with momentum, in chunks": ("SGD", {"momentum": 0.9, **FUSED}, CLIPPED),
    "adamw as torch takes it by default": ("AdamW", {}, CLIPPED),
    # Each update is made with the rate that was set when ``step`` was called, in some layouts during backward.
    "a schedule": ("AdamW", FUSED, {"schedule": schedule}),
    # A parameter larger than a chunk is updated in several calls, and counted once.
    "in chunks": ("AdamW", FUSED, CLIPPED),
    "rmsprop, in chunks": ("RMSprop", {"momentum": 0.9, "centered": True}, CLIPPED),
    "adagrad, in chunks": ("Adagrad", {"lr_decay": 0.1}, CLIPPED),
    "adam with amsgrad": ("Adam", {"amsgrad": True}, {}),
    "lion, in chunks": ("Lion", {"betas": (0.9, 0.99)}, CLIPPED),
    "adadelta": ("Adadelta", {}, {}),
    "adamax": ("Adamax", {}, {}),
    "radam": ("RAdam", {}, {}),
}


def rules_and_layouts() -> Iterator[Any]:
    """Each in every fourth layout in turn."""
    for turn, rule in enumerate(RULES):
        for index, (known, where) in enumerate(LAYOUTS.items()):  # each site has two, so that it meets both dtypes
            if (turn + index) % 4 == 0:
                name = list(DTYPES)[index % 2]
                yield pytest.param(rule, where, DTYPES[name], id=f"{rule}, {known}, {name}")


@pytest.mark.parametrize(("rule", "where", "dtype"), rules_and_layouts())
def test_rules(rule: str, where: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, options, given = RULES[rule]
    options = {"lr": LR, "weight_decay": DECAY, **options}
    ours = UpdateRule(kind, **options)
    loop = {"max_norm": 0.0, "accumulation": 1, "groups": 2, **given}
    batches, model = tokens("gpt2", STEPS * loop["accumulation"]), build("gpt2", dtype=dtype)
    made = partial(class_of(kind), **options)
    wanted = plain(build("gpt2", dtype=dtype), batches, make=made, **loop)
    if "in chunks" in rule:
        monkeypatch.setattr(updates, "HOST_CHUNK", 192)
        for where_used in (layout, updates):
            monkeypatch.setattr(where_used, "SCRATCH_ELEMENTS", 384)
    planned = {name: value for name, value in loop.items() if name != "schedule"}
    in_backward = not loop["max_norm"] and (kind == "SGD" or dtype is torch.float32)
    plan = plan_of(model, moments=len(ours.names), in_backward=in_backward, **where, **planned)
    assert differences(wanted, stowed(model, plan, batches, rule=ours, transfer=Delayed(), **loop)) == []
