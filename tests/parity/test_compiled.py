"""Compiled blocks: the bits of plain training with the same compiled blocks, wherever weights rest; compiled once.

Quick cases are traced and partitioned (``aot_eager``); what inductor generates runs in the slow ones.
"""

from collections.abc import Iterator
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from deepstow.strategies.core.compose import compose
from deepstow.strategies.core.facts import UnitKind
from deepstow.strategies.core.peak import backward_peak
from deepstow.strategies.core.plan import Kind
from deepstow.strategies.engine import stow
from deepstow.strategies.engine.forward.checkpointing import checkpoint_blocks
from deepstow.strategies.engine.forward.compiled import compile_blocks, compiled
from deepstow.strategies.engine.tensors.parameters import AbsentParameter
from deepstow.trainer.errors import CountingError
from deepstow.trainer.machine.probe import probe
from deepstow.trainer.planning.plan_for import plan_for
from deepstow.trainer.run.building import options
from deepstow.trainer.run.callbacks.plan_check import count_saved
from tests.helpers.doubles import RaceDetector, Vacant
from tests.helpers.engine import LAYOUTS, STEPS, differences, plain, plan_of, stowed
from tests.helpers.models import Net, build, tokens
from tests.helpers.tiny import run_config

MACHINE = probe()


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Nothing that another test has compiled counts."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def made(kind: Any, backend: str, policy: str = "none", dtype: torch.dtype = torch.float32) -> Any:
    """A model with compiled blocks; ``full``: each runs again in backward."""
    model: Any = build(kind, dtype=dtype)
    if hasattr(model, "config"):
        model.config.use_cache = False  # as in a run; with a cache each block is another one, by its number
    compile_blocks(model, backend)
    if policy == "full":
        checkpoint_blocks(model, {name: () for name, module in model.named_modules() if compiled(module)})
    return model


def graphs() -> int:
    """How many blocks were compiled so far."""
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize(
    ("layout", "dtype", "policy"),
    [("host, travelling", torch.float32, "full"), ("mixed", torch.bfloat16, "none")],
    ids=str,
)
def test_bits_of_plain_compiled_blocks(layout: str, dtype: torch.dtype, policy: str) -> None:
    """Weights travel in homes that are NaN when they are left; four blocks are compiled once, for both models."""
    batches = tokens("llama", 2 * STEPS)
    expected = plain(made(Net, "aot_eager", dtype=dtype), batches, accumulation=2, max_norm=0.05)
    assert graphs() == 1
    model = made(Net, "aot_eager", policy, dtype)
    plan = plan_of(model, accumulation=2, max_norm=0.05, **LAYOUTS[layout])
    found = stowed(model, plan, batches, accumulation=2, max_norm=0.05, transfer=Vacant())
    assert differences(expected, found) == []
    assert graphs() == 1


def test_no_race_and_nothing_unannounced() -> None:
    model = made(Net, "aot_eager")
    optimizer = stow(model, plan_of(model, **LAYOUTS["mixed"]), transfer=RaceDetector())
    for batch in tokens("llama", STEPS):
        loss = model(**batch).loss
        assert all(type(param) is not nn.Parameter for param in model.parameters()), "as the engine had them"
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.engine.unannounced == 0
    assert optimizer.engine.transfer.races == []  # type: ignore[attr-defined]


def test_eager_without_gradients() -> None:
    """Evaluations run rows of any length, and compile nothing."""
    model = made(Net, "aot_eager")
    with torch.no_grad():
        model(**tokens("llama", 1)[0])
    assert graphs() == 0


def test_from_a_config() -> None:
    """Hugging Face's Trainer is not told, which would compile the whole model; rows have one length."""
    assert run_config().training.compile_backend is None
    config = run_config(torch_compile_mode="default")
    assert config.training.compile_backend == "inductor"
    assert not [key for key in config.training.arguments() if "compile" in key]
    given: Any = None
    rows = options(config, given, SimpleNamespace(pad_token_id=0))["data_collator"]  # type: ignore[arg-type]
    assert rows([{"input_ids": [1, 2], "labels": [1, 2]}])["input_ids"].shape == (1, config.data.max_length)


def test_an_old_graph_is_refused() -> None:
    """Its weights have been updated; compiled code saves them where torch and the engine count writes."""
    for weights in ("resident", "travelling"):
        model = made(Net, "aot_eager")
        optimizer = stow(model, plan_of(model, site="device", weights=weights))
        first, second = (model(**batch).loss for batch in tokens("llama", 2))
        first.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.drain()
        with pytest.raises(RuntimeError, match=r"updated since the forward|modified by an inplace operation"):
            second.backward()
        optimizer.close()


def test_a_weight_that_is_away_is_not_compiled_over() -> None:
    model = made(Net, "aot_eager")
    optimizer = stow(model, plan_of(model, site="host", weights="travelling"))
    own = compiled(model.layers[0])
    assert own is not None and any(isinstance(param, AbsentParameter) for param in model.layers[0].parameters())
    with pytest.raises(RuntimeError, match=r"layers\.0\..* is away"):
        own(torch.zeros(1, 32))
    optimizer.close()


def test_a_block_that_cannot_be_compiled_whole() -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return self.up(x)

    model = made(lambda: Net(Breaks), "inductor")
    with pytest.raises(CountingError, match="Breaks: "):
        plan_for(model, batch=tokens("llama", 1)[0], max_grad_norm=None, machine=MACHINE)
    with pytest.raises(ValueError, match="replaced already"):
        compile_blocks(model)


class Gated(nn.Module):
    """Its products of activations are recomputed by the partitioner, and saved by eager torch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def test_saved_bytes_are_those_of_the_partitioner() -> None:
    """Counted on fake tensors: what compiled blocks really save, which is less than eager ones do here."""
    batch = {name: one.clone() for name, one in tokens("llama", 1)[0].items()}
    eager = plan_for(Net(Gated), eval_rows=0, batch=batch, max_grad_norm=None, machine=MACHINE).facts
    model = made(lambda: Net(Gated), "inductor")
    facts = plan_for(model, eval_rows=0, batch=batch, max_grad_norm=None, machine=MACHINE).facts
    for unit in (unit for unit in facts.units if unit.kind is UnitKind.BLOCK):
        other = eager.unit(unit.name)
        assert unit.choices is not None and unit.choices.operators == (), "kept as one"
        assert unit.saved_bytes < other.saved_bytes
        assert unit.temporaries is not None and other.temporaries is not None
        assert unit.temporaries.backward > 1.5 * other.temporaries.backward, "all gradients are there at once"
    torch._dynamo.reset()
    model = made(lambda: Net(Gated), "aot_eager")  # generates nothing, and saves the same
    with count_saved(model) as storages:
        model(**batch)
    assert sum(unit.saved_bytes for unit in facts.units) == sum(storages.values())


def peak_of(model: Any, batch: Any) -> int:
    """The most bytes that torch's allocator has given out in forward and backward, more than before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        model(**batch).loss.backward()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.slow
def test_what_inductor_generates() -> None:
    """Plain, and with weights that travel, recomputed or not: the same bits, which are not
    those of eager blocks; one compilation, and what it saves is what was counted.
    """
    kind = "llama"
    batches = [{name: one.clone() for name, one in each.items()} for each in tokens(kind, STEPS)]
    expected = plain(made(kind, "inductor"), batches, max_norm=0.05)
    assert graphs() == 1
    for policy in ("none", "full"):
        model = made(kind, "inductor", policy)
        found = stowed(model, plan_of(model, max_norm=0.05, **LAYOUTS["host, travelling"]), batches, max_norm=0.05)
        assert differences(expected, found) == [], policy
    assert graphs() == 1
    assert differences(expected, plain(build(kind), batches, max_norm=0.05)) != []
    facts = plan_for(made(kind, "inductor"), eval_rows=0, batch=batches[0], max_grad_norm=None, machine=MACHINE).facts
    model = made(kind, "inductor")
    with count_saved(model) as storages:
        loss = model(**batches[0]).loss
    assert sum(unit.saved_bytes for unit in facts.units) == pytest.approx(sum(storages.values()), rel=0.03)
    loss.backward()
    model.zero_grad()
    plan = compose({}, facts)
    grads = [plan.num_bytes(unit.name, Kind.GRAD) for unit in facts.units]
    measured = peak_of(model, batches[0])
    assert 0.6 * backward_peak(plan.kept(), grads) < measured < 1.03 * backward_peak(plan.kept(), grads)
