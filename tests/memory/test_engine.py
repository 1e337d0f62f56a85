"""What the engine holds and moves, measured, against the plan: peak bytes on the device, bytes over the link.

Measured peak is the arena and all storages that operators of forward and backward make besides, by weak references. On
a CPU machine the arena is ordinary memory, and the same code fills it.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from deepstow.strategies.core.compose import compose
from deepstow.strategies.core.facts import Facts
from deepstow.strategies.core.plan import Plan, Tier
from deepstow.strategies.core.registry import find
from deepstow.strategies.engine import StowOptimizer, stow
from deepstow.strategies.engine.forward.checkpointing import recompute
from deepstow.strategies.planner.step_cost import traffic
from deepstow.strategies.planner.weight_schedule import ASSUMED
from deepstow.trainer.model.build import load_config
from deepstow.trainer.planning.plan_for import plan_for
from tests.helpers.engine import least_of, planned
from tests.helpers.live import Live
from tests.helpers.tiny import GPT2, LLAMA

ROWS, LENGTH = 2, 32
OPTIONS: tuple[dict[str, Any], ...] = (
    {"site": "device"},
    {"site": "host"},
    {"site": "host", "weights": "streamed", "prefetch": 2},
    {"site": "streamed", "weights": "streamed", "prefetch": 1},
    {"site": "streamed", "weights": "streamed", "gradients": "host"},
    {"site": "streamed"},
)
LEAST: dict[str, Any] = {"gpu_memory": "least"}  # embedding and head travel, and their gradients have no slots
MODELS: Mapping[str, dict[str, Any]] = {
    "llama": LLAMA | {"num_hidden_layers": 4, "tie_word_embeddings": False},
    "llama tied": LLAMA | {"num_hidden_layers": 4, "tie_word_embeddings": True},
    "gpt2": GPT2 | {"n_layer": 4},
    "many words": LLAMA | {"num_hidden_layers": 4, "tie_word_embeddings": False, "vocab_size": 4096},
}


@cache
def facts_of(name: str, dtype: torch.dtype, norm: float | None) -> Facts:
    """Counted once for all options."""
    return plan_for(model_of(MODELS[name]).to(dtype), eval_rows=0, batch=(ROWS, LENGTH), max_grad_norm=norm).facts


def plan_of(
    name: str,
    options: Mapping[str, Any],
    norm: float | None = 1.0,
    dtype: torch.dtype = torch.float32,
    *,
    together: int = 1,
    **others: Any,
) -> Plan:
    """``LEAST``: at the budget that a refusal names. ``others``: options of further strategies."""
    facts = facts_of(name, dtype, norm)
    facts = replace(facts, run=replace(facts.run, layerwise=together))
    if others:
        asked = {name: find(name).model_validate(given) for name, given in {"offload": options, **others}.items()}
        return compose(asked, facts)
    return least_of(facts) if options == LEAST else planned(facts, **options)


def model_of(config: Mapping[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    from deepstow.trainer.config.sections import ModelSection

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(load_config(ModelSection(config=dict(config), tokenizer="none")))


def train(model: Any, plan: Plan, steps: int = 3) -> tuple[StowOptimizer, int]:
    """Some steps; the optimizer, and the most that forward and backward of the last one made besides the arena."""
    optimizer = stow(model, plan, device="cpu")
    ids = torch.randint(1, 100, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0  # plan_for(batch=(rows, tokens)) counts padded rows
    live = Live()
    for step in range(steps):
        with live if step == steps - 1 else nullcontext():
            losses = [lambda: model(input_ids=ids, labels=ids, attention_mask=mask).loss] * plan.facts.run.layerwise
            optimizer.backward_all(losses)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.drain()
    return optimizer, live.peak


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("llama", options) for options in OPTIONS),
        ("llama tied", OPTIONS[3]),
        ("gpt2", OPTIONS[4]),
        ("many words", LEAST),
    ],
    ids=str,
)
def test_peak_on_the_device_is_what_the_plan_says(name: str, options: dict[str, Any]) -> None:
    """Never more than 1 % above the plan, and at most 2 % below it. At the least budget no gradient of embedding or
    head is there twice: without slots it has the memory in which backward made it.
    """
    model, plan = model_of(MODELS[name]), plan_of(name, options)
    assert plan.layout is not None and plan.addresses is not None
    direct = [bucket.name for bucket in plan.layout.buckets if bucket.grad_direct]
    assert direct == (["embedding", "head"] if options == LEAST else [])
    optimizer, besides = train(model, plan)
    measured = optimizer.device_bytes + besides
    assert optimizer.device_bytes + optimizer.host_bytes == sum(map(plan.addresses.num_bytes, Tier))
    assert 0.99 * measured <= plan.peak(Tier.DEVICE) <= 1.02 * measured
    assert [line.split()[0] for line in optimizer.engine.arena.owners()] == ["device", "host"]


@pytest.mark.parametrize(("name", "policy"), [("llama", "selective"), ("many words", None), ("many words", "full")])
def test_peak_where_micro_batches_take_turns(name: str, policy: str | None) -> None:
    """What each of four keeps, hidden states and their gradients between two layers, and of a layer all gradients."""
    others: Mapping[str, Any] = {} if policy is None else {"recompute": {"policy": policy}}
    plan = plan_of(name, {"site": "host", "weights": "streamed", "prefetch": 1}, together=4, **others)
    model = model_of(MODELS[name])
    recompute(model, plan)
    optimizer, besides = train(model, plan)
    optimizer.close()
    assert 0.97 * besides <= plan.saved_peak() <= 1.05 * besides


@pytest.mark.parametrize(
    ("options", "dtype", "norm"),
    [
        *((each, torch.bfloat16, 1.0) for each in OPTIONS),
        *((each, torch.float32, 1.0) for each in (*OPTIONS[2:4], LEAST)),
        *((each, torch.bfloat16, None) for each in (*OPTIONS[2:], {"site": "device", "weights": "streamed"})),
    ],
    ids=str,
)
def test_bytes_over_the_link_per_step(options: dict[str, Any], dtype: torch.dtype, norm: float | None) -> None:
    """Those that are predicted; without a norm updates start in backward."""
    name = "many words" if options == LEAST else "llama"
    model, plan = model_of(MODELS[name]).to(dtype), plan_of(name, options, norm, dtype)
    assert plan.layout is not None and plan.layout.in_backward is (norm is None)
    optimizer = stow(model, plan, device="cpu")
    transfer, ids = optimizer.engine.transfer, torch.ones((ROWS, LENGTH), dtype=torch.long)
    moved = []
    for _ in range(4):
        before = (transfer.bytes_up, transfer.bytes_down)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        moved.append((transfer.bytes_up - before[0], transfer.bytes_down - before[1]))
    assert moved[2] == moved[3] == traffic(plan.facts, plan.layout, plan.facts.machine.rates or ASSUMED)
    optimizer.close()
