"""The linear strategy: what is counted, what is chosen from timings, what the plan says; and what the facts see."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from deepstow.strategies.core.compose import compose
from deepstow.strategies.core.facts import Facts, Tier
from deepstow.strategies.core.linears import Gemm, Linear, Route, Routes, Shape, Timing
from deepstow.strategies.core.plan import Impl
from deepstow.strategies.core.protocol import BITWISE
from deepstow.strategies.core.registry import find
from deepstow.strategies.planner import gemm_routes
from deepstow.strategies.report import full_report
from deepstow.trainer.machine.probe import probe
from deepstow.trainer.model.counting import Counter
from deepstow.trainer.planning.facts import gather
from tests.helpers.fakes import facts, run_facts
from tests.helpers.tiny import MODELS, run_config

OWN, FORWARD, BOTH = Routes(), Routes(forward=Route.COPY), Routes(forward=Route.COPY, dgrad=Route.COPY)
SHAPE = Shape(rows=10, inputs=4, outputs=6, stored="out_in", dtype="float32")
WEIGHT = 4 * 6 * 4


def layer(**changes: Any) -> Linear:
    shape = replace(SHAPE, **{name: changes.pop(name) for name in list(changes) if name in Shape.__slots__})
    return replace(Linear("layers.0.mlp.up", "layers.0", shape), **changes)


def timed(**milliseconds: float) -> Timing:
    """Timings by product and route, as ``wgrad_left=9``; 10 natively unless given."""
    given = {"copy": 0.0, **{f"{gemm}_native": 10.0 for gemm in Gemm}, **milliseconds}
    return {name.replace("_", " "): value * 1e-3 for name, value in given.items()}


# --- minimal ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "accumulation", "expected"),
    [
        ({}, 1, OWN),  # a copy would be written as often as it is read
        ({}, 2, FORWARD),
        ({"recomputed": True}, 1, FORWARD),
        ({"trains": False}, 1, FORWARD),  # written once in a run
        ({"stored": "in_out"}, 2, Routes(dgrad=Route.COPY)),
        ({"stored": "in_out", "recomputed": True}, 1, OWN),  # forward reads it along; dgrad runs once
        ({"stored": "in_out", "passes_back": False}, 8, OWN),
    ],
)
def test_minimal(changes: dict[str, Any], accumulation: int, expected: Routes) -> None:
    assert gemm_routes.minimal(layer(**changes), accumulation) == expected


# --- adaptive --------------------------------------------------------------------------------------------------------


LEFT, FLIP = Routes(wgrad=Route.LEFT), Routes(forward=Route.FLIP)
SMALL = {f"{gemm}_native": 0.010 for gemm in Gemm}
QUICK = {f"{gemm}_flip": 0.001 for gemm in Gemm}
COPIED = timed(forward_copy=7, dgrad_copy=10, copy=4)  # 4 ms per step; forward gains 3 per use
FLIPPED = timed(forward_copy=7, forward_flip=7.1, copy=1)


@pytest.mark.parametrize(
    ("timings", "accumulation", "changes", "expected"),
    [
        (timed(wgrad_left=9.6), 1, {}, OWN),  # 4 % of the product, 1.3 % of the layer
        (timed(wgrad_left=9.0), 1, {}, LEFT),
        (timed(dgrad_left=8, dgrad_flip=7, dgrad_right=9), 1, {}, Routes(dgrad=Route.FLIP)),
        # Products that never run stay native.
        (timed(dgrad_flip=1, wgrad_flip=1), 1, {"passes_back": False, "trains": False}, OWN),
        # A Python function costs 15 us per forward, here the half of a micro-batch's products.
        (timed(**SMALL, forward_flip=0.001), 50, {}, OWN),
        (timed(**SMALL, **QUICK), 1, {}, Routes(*[Route.FLIP] * 3)),
        # The copy is judged on the sum of its uses.
        (COPIED, 1, {}, OWN),
        (COPIED, 2, {}, FORWARD),
        (COPIED, 1, {"recomputed": True}, FORWARD),
        (COPIED, 1, {"trains": False}, FORWARD),
        (timed(forward_copy=7, dgrad_copy=7, copy=4), 1, {}, BOTH),  # neither would pay alone
        # And competes with routes that need none.
        (FLIPPED, 1, {}, FLIP),
        (FLIPPED, 100, {}, FLIP),  # 0.09 is within the margin of 10
        (timed(forward_copy=6, forward_flip=7.1, copy=1), 100, {}, FORWARD),
    ],
)
def test_fastest(timings: Timing, accumulation: int, changes: dict[str, Any], expected: Routes) -> None:
    assert gemm_routes.fastest(layer(**changes), accumulation, timings, copies=True) == expected


# --- the plan --------------------------------------------------------------------------------------------------------


def known(*layers: Linear, **changes: Any) -> Facts:
    accumulation = changes.pop("accumulation", 1)
    return replace(facts(accumulation=accumulation), linears=layers or (layer(),), **changes)


def plan_of(options: Mapping[str, Any], given: Facts) -> Any:
    return compose({"linear": find("linear").model_validate(options)}, given)


def test_blocks_alike_stay_on_one_line_and_copies_are_counted() -> None:
    layers = (layer(), layer(unit="layers.1", name="layers.1.mlp.up"), layer(unit="head", name="lm_head"))
    plan = plan_of({"transpose": "minimal"}, known(*layers, accumulation=2))
    assert gemm_routes.chosen(plan) == dict.fromkeys(("layers.0.mlp.up", "layers.1.mlp.up", "lm_head"), FORWARD)
    assert [reserve.num_bytes for reserve in plan.reserves(Tier.DEVICE)] == [3 * WEIGHT]
    assert list(gemm_routes.lines(plan)) == [
        "linear layers: 3 take other routes than torch's, 0 stay as they are",
        "  4 -> 6, 10 tokens, float32, x3: forward copy, dgrad native, wgrad native",
    ]
    answers = [decision for decision, _ in plan.answers.values() if isinstance(decision, Impl)]
    assert {decision.unit: decision.routes for decision in answers}["layers.0"] == (("layers.0.mlp.up", FORWARD),)


def test_measured_gains_are_shown() -> None:
    plan = plan_of({}, known(timings={str(SHAPE): timed(wgrad_left=4)}))
    text = full_report.text(plan, None)
    assert "wgrad left; measured 30 -> 24 ms per step (-19.9%)" in text
    told = json.loads(json.dumps(full_report.to_json(plan, None)))
    assert told["linears"] == {"layers.0.mlp.up": {"forward": "native", "dgrad": "native", "wgrad": "left"}}
    assert told["facts"]["timings"][str(SHAPE)]["wgrad left"] == 0.004


@pytest.mark.parametrize(
    ("options", "changes", "reason"),
    [
        ({"transpose": "native"}, {}, "native leaves every layer as it is"),
        ({"transpose": "minimal"}, {}, "no copy would be read more often than written"),
        ({"transpose": "minimal"}, {"no_copies": "weights travel", "accumulation": 4}, "and weights travel"),
        ({}, {}, "1 of 1 shapes are not measured yet"),
        ({}, {"timings": {str(SHAPE): timed()}}, "all 1 shapes are fastest as they are (measured)"),
    ],
)
def test_nothing_to_do_is_said(options: dict[str, Any], changes: dict[str, Any], reason: str) -> None:
    plan = plan_of(options, known(**changes))
    assert reason in plan.idle["linear"]
    assert gemm_routes.chosen(plan) == {} and list(gemm_routes.lines(plan)) == [] and not plan.reserves(Tier.DEVICE)


@pytest.mark.parametrize(
    ("no_copies", "expected"), [("", Routes(Route.COPY, wgrad=Route.LEFT)), ("weights travel", LEFT)]
)
def test_adaptive_keeps_no_copies_where_weights_travel_and_leaves_shapes_not_reached(
    no_copies: str, expected: Routes
) -> None:
    timings = {str(SHAPE): timed(forward_copy=1, wgrad_left=4)}
    layers = (layer(), layer(name="layers.0.mlp.down", rows=20))
    plan = plan_of({}, known(*layers, timings=timings, no_copies=no_copies))
    assert gemm_routes.chosen(plan) == {"layers.0.mlp.up": expected}
    assert bool(plan.reserves(Tier.DEVICE)) is not bool(no_copies)


def test_parity_is_declared_by_mode() -> None:
    assert find("linear").model_validate({"transpose": "native"}).parity(run_facts(accumulation=3)) == BITWISE
    assert find("linear").model_validate({}).parity(run_facts()).tolerance == 1e-4


# --- facts -----------------------------------------------------------------------------------------------------------


def gathered(name: str, strategies: Mapping[str, Any] | None = None, **training: Any) -> Facts:
    data, options = {"max_length": 8}, {"linear": {}} | dict(strategies or {})
    config = run_config(MODELS[name], data=data, strategies=options, per_device_train_batch_size=2, **training)
    return gather(config, 1, 1, probe())


def test_layers_of_a_llama_are_listed() -> None:
    found = gathered("llama").linears
    first = [linear for linear in found if linear.unit == "model.layers.0"]
    assert [linear.name for linear in first][:2] == [f"model.layers.0.self_attn.{it}_proj" for it in "qk"]
    assert {linear.shape.rows for linear in found} == {16}
    assert [linear.name for linear in found if linear.unit == "head"] == ["lm_head"]
    assert all(linear.trains and linear.passes_back and not linear.recomputed and linear.calls == 1 for linear in found)
    assert gather(run_config(MODELS["llama"]), 1, 1, probe()).linears == (), "without the strategy"


def test_what_runs_how_often_is_seen() -> None:
    found = gathered("gpt2", gradient_checkpointing=True, bf16=True).linears
    blocks = [linear for linear in found if linear.unit != "head"]
    assert {linear.shape.stored for linear in blocks} == {"in_out"} and all(linear.recomputed for linear in blocks)
    assert {linear.shape.dtype for linear in found} == {"bfloat16"}
    (head,) = [linear for linear in found if linear.unit == "head"]
    assert head.shape.stored == "out_in" and not head.recomputed


def test_adapters_and_frozen_layers_are_seen() -> None:
    model = {"lora": {"target_modules": ["q_proj"]}}
    found = {linear.name: linear for linear in gathered("llama", model=model).linears}
    (base,) = [linear for name, linear in found.items() if "layers.0" in name and name.endswith("base_layer")]
    (down,) = [linear for name, linear in found.items() if "layers.0" in name and "lora_A" in name]
    assert not base.trains and not base.passes_back  # nothing before it trains
    assert down.trains and not down.passes_back
    (later,) = [linear for name, linear in found.items() if "layers.1" in name and name.endswith("base_layer")]
    assert later.passes_back and not later.trains


def test_copies_are_out_where_weights_are_split_or_travel() -> None:
    assert gathered("llama").no_copies == ""
    assert gathered("llama", {"zero": {"stage": 2}}).no_copies == ""
    assert "stage 3" in gathered("llama", {"zero": {"stage": 3}}).no_copies
    assert "offload" in gathered("llama", {"offload": {}}).no_copies


def test_the_input_of_a_reentrant_checkpoint_needs_a_gradient() -> None:
    """Its first forward runs without gradients, which says nothing about its second."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    for enabled, expected in ((True, False), (False, True)):
        with Counter(model) as counter, torch.set_grad_enabled(enabled):
            model(torch.zeros(3, 4))
        (found,) = counter.linears().values()
        assert found.passes_back is expected and found.shape.rows == 3
