"""Recomputation in numbers: bytes kept and operations done again, counted before the run and measured in it."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from deepstow.strategies.core.compose import compose
from deepstow.strategies.core.facts import Facts
from deepstow.strategies.core.layout import PAGE_BYTES
from deepstow.strategies.core.plan import Plan, Tier
from deepstow.strategies.core.registry import find
from deepstow.strategies.engine.forward.checkpointing import checkpointed, room_of
from deepstow.trainer.machine.probe import probe
from deepstow.trainer.model.counting import flop_formulas
from deepstow.trainer.planning.plan_for import plan_for
from deepstow.trainer.run.callbacks.plan_check import count_saved
from tests.helpers.models import causal, padded
from tests.memory.test_temporaries import MODELS

MACHINE = probe()
POLICIES = ("none", "selective", "full", "auto")
HOSTED = ("selective, on the host", "full, on the host")
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    **{name: {"policy": name} for name in POLICIES},
    **{name: {"policy": name.partition(",")[0], "activation_offloading": True} for name in HOSTED},
}


def model_of(name: str, attention: str, dtype: torch.dtype = torch.float32) -> Any:
    kind, options = MODELS[name]
    return causal(kind, attention, dtype, **options, use_cache=False)


@cache
def facts_of(name: str, attention: str, dtype: torch.dtype) -> Facts:
    """Counted once for all policies."""
    model = model_of(name, attention, dtype)
    return plan_for(model, eval_rows=0, batch=padded(64), accumulation=2, max_grad_norm=None, machine=MACHINE).facts


def plan_of(facts: Facts, policy: str) -> Plan:
    """``auto`` under a budget half way between everything and nothing."""
    if policy == "auto":
        low, high = (decided(facts, name).peak(Tier.DEVICE) for name in ("full", "none"))
        facts = replace(facts, machine=replace(facts.machine, device_bytes=(low + high) // 2))
    return decided(facts, policy)


def decided(facts: Facts, policy: str) -> Plan:
    return compose({"recompute": find("recompute")(**OPTIONS[policy])}, facts)


def recomputed(name: str, attention: str, policy: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Plan]:
    model, plan = model_of(name, attention, dtype), plan_of(facts_of(name, attention, dtype), policy)
    find("recompute")(**OPTIONS[policy]).apply(model, plan)
    model(**padded(64)).loss.backward()  # the first forward only looks
    return model, plan


def test_the_host_has_room_for_what_waits_there() -> None:
    for policy in HOSTED:
        model, plan = recomputed("gpt2", "eager", policy, torch.bfloat16)
        room = room_of(model)
        assert room is not None and room.num_refused == 0
        keeps = [plan.keep(unit.name) for unit in plan.facts.units]
        assert [bool(keep.hosted) for keep in keeps] == [False, True, True, True, False, False]  # not the last block
        model(**padded(64))
        sent = sum(keep.hosted_bytes for keep in keeps)
        assert sent <= max(end for end, _ in room._slots) <= plan.hosted_bytes()
        assert plan.hosted_bytes() - sent <= sum(2048 * len(keep.hosted) + PAGE_BYTES for keep in keeps if keep.hosted)
        assert plan.peak(Tier.HOST) == plan.facts.machine.runtime_host_bytes + plan.hosted_bytes()
        assert room._memory is not None and room._memory.nbytes == plan.hosted_bytes()


@pytest.mark.parametrize("policy", ["none", "auto", HOSTED[0]])
def test_the_plan_check_counts_the_same(policy: str) -> None:
    model, plan = model_of("llama", "sdpa"), plan_of(facts_of("llama", "sdpa", torch.float32), policy)
    find("recompute")(**OPTIONS[policy]).apply(model, plan)
    predicted = sum(plan.saved_bytes(unit.name) for unit in plan.facts.units)
    for _ in range(2):  # the first forward keeps nothing, and is counted as if it did
        with count_saved(model) as storages:
            model(**padded(64))
        assert sum(storages.values()) == pytest.approx(predicted, rel=0.01)
    assert all(found.watch is None for module in model.modules() if (found := checkpointed(module)))


@pytest.mark.parametrize(("name", "attention"), [("llama", "sdpa"), ("gpt2", "eager")])
def test_operations_of_backward_are_exact(name: str, attention: str) -> None:
    def flops(policy: str) -> tuple[int, int, Plan]:
        model, plan = recomputed(name, attention, policy)
        with FlopCounterMode(display=False, custom_mapping=flop_formulas()) as forward:
            loss = model(**padded(64)).loss
        with FlopCounterMode(display=False, custom_mapping=flop_formulas()) as backward:
            loss.backward()
        return forward.get_total_flops(), backward.get_total_flops(), plan

    forward, backward, _ = flops("none")
    if attention == "eager":
        assert backward == 2 * forward, "each product has two gradients of its own size"
    for policy in POLICIES[1:]:
        again, more, plan = flops(policy)
        expected = sum(plan.keep(unit.name).again.flops for unit in plan.facts.units)
        assert (again, more) == (forward, backward + expected), policy
        blocks = [unit for unit in plan.facts.units if unit.choices]
        if policy == "selective":
            scores = 2 * 2 * 64 * 64 * 64 * len(blocks)  # batch, tokens squared, width: nothing else is multiplied
            materialised = attention == "eager" or name == "gpt2"  # no fused kernel of the CPU has dropout
            assert expected == materialised * scores
        if policy == "full":
            per_block = sum(operator.work.flops for operator in blocks[0].choices.operators)
            assert expected == per_block * len(blocks)
