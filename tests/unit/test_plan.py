"""The plan on integers: total, immutable, independent of order, and the bytes that follow from it."""

import itertools
import json
import re
from dataclasses import replace

import pytest

from deepstow.strategies.core.compose import compose
from deepstow.strategies.core.facts import MachineFacts, Precision
from deepstow.strategies.core.plan import (
    RUN,
    Conflict,
    Decision,
    EngineSet,
    Keep,
    Kind,
    Plan,
    Reserve,
    Share,
    Tier,
    When,
)
from deepstow.strategies.core.protocol import Idle, Phase
from deepstow.strategies.core.registry import find
from deepstow.strategies.report import full_report, plan_table
from deepstow.strategies.report.plan_table import table
from tests.helpers.fakes import block, embedding, facts, fake, head


def share(unit: str, kind: Kind, shards: int = 2, reason: str = "test", tier: Tier = Tier.DEVICE) -> Share:
    return Share(unit=unit, reason=reason, kind=kind, shards=shards, element_bytes=4, tier=tier)


def reserve(owner: str, num_bytes: int, tier: Tier = Tier.DEVICE, when: When = When.ALWAYS) -> Reserve:
    return Reserve(unit=RUN, reason="", owner=owner, num_bytes=num_bytes, tier=tier, when=when)


def engine_set(key: str, value: int | str, reason: str = "test") -> EngineSet:
    return EngineSet(unit=RUN, reason=reason, key=key, value=value)


# The baseline


def test_baseline_bytes() -> None:
    """Autocast keeps fp32 parameters, so plain training takes the same bytes in every precision."""
    plan = Plan.baseline(facts(precision=Precision.BF16, moments=1))
    assert {kind: plan.total(kind) for kind in Kind} == {
        Kind.PARAM: 4 * 100, Kind.GRAD: 4 * 100, Kind.MASTER: 0, Kind.MOMENT: 4 * 100
    }  # fmt: skip


@pytest.mark.parametrize(("shards", "params"), [(1, 6 * 4 + 14 * 2), (3, 2 * 4 + 5 * 2)])
def test_frozen_parameters_have_a_size_of_their_own(shards: int, params: int) -> None:
    """Each kind of them is divided over the ranks and rounded up; nothing else is kept of frozen ones."""
    plan = Plan.baseline(facts(block(0, 20, num_trainable=6), trained_bytes=4, frozen_bytes=2))
    divided = (replace(plan.share("layers.0", kind), shards=shards) for kind in (Kind.PARAM, Kind.GRAD))
    plan = plan.amend(divided, by="test")
    assert {kind: plan.num_bytes("layers.0", kind) for kind in Kind} == {
        Kind.PARAM: params, Kind.GRAD: 24 // shards, Kind.MASTER: 0, Kind.MOMENT: 48
    }  # fmt: skip


# Amending


def test_amend_leaves_the_plan_as_it_was() -> None:
    plan = Plan.baseline(facts())
    before = dict(plan.answers)
    changed = plan.amend([share("head", Kind.PARAM, shards=3)], by="a")
    assert plan.answers == before
    assert (plan.num_bytes("head", Kind.PARAM), changed.num_bytes("head", Kind.PARAM)) == (160, 4 * 14), "rounded up"
    with pytest.raises(TypeError):
        plan.answers[("Impl", "head")] = changed.answers[("Impl", "head")]  # type: ignore[index]  # must be refused


def test_different_answers_are_a_conflict_that_names_both() -> None:
    first, second = (engine_set("zero_optimization.stage", stage) for stage in (1, 2))
    plan = Plan.baseline(facts()).amend([first], by="abc")
    about = r"both decide engineset of zero_optimization\.stage, differently: remove one"
    with pytest.raises(Conflict, match=rf"strategies\.abc and strategies\.xyz {about}") as caught:
        plan.amend([second], by="xyz")
    assert caught.value.second == "xyz"
    assert plan.amend([replace(first, reason="the same for another reason")], by="xyz").answers[first.slot][1] == "xyz"


def test_one_strategy_that_contradicts_itself_is_refused() -> None:
    plan = Plan.baseline(facts())
    with pytest.raises(AssertionError, match="twice"):
        plan.amend([share("head", Kind.PARAM, 2), share("head", Kind.PARAM, 4)], by="a")


# Composing


def test_the_order_in_the_config_is_irrelevant() -> None:
    zero = find("zero").model_validate({"stage": 2})
    several = {
        "zero": zero,
        "keep": fake(Phase.KEEP, [Keep(unit="layers.0", reason="r", policy="full", saved_bytes=7)]),
        # See what the others decided: bytes after sharding, and what the first by name has reserved.
        "one": fake(Phase.BUFFER, lambda _, plan: [reserve("one", plan.total(Kind.MOMENT))]),
        "two": fake(Phase.BUFFER, lambda _, plan: [reserve("two", len(plan.reserves(Tier.DEVICE)))]),
    }
    plans = [compose(dict(order), facts(world_size=2)) for order in itertools.permutations(several.items())]
    assert len({table(plan) for plan in plans}) == 1
    assert len({json.dumps(full_report.to_json(plan, None)) for plan in plans}) == 1
    assert full_report.to_json(plans[0], None)["totals"]["device"]["gradients"] == plans[0].total(Kind.GRAD) > 0
    *_, one, two = plans[0].reserves(Tier.DEVICE)
    assert (one.num_bytes, two.num_bytes) == (400, len(plans[0].reserves(Tier.DEVICE)) - 1)


def test_a_later_phase_decides_again_only_what_was_left_open() -> None:
    left_open = Keep(unit="head", reason="", policy="x", saved_bytes=1, open=True)
    again = replace(left_open, saved_bytes=2, open=False)
    second = fake(Phase.WHERE, [again])
    plan = compose({"first": fake(Phase.KEEP, [left_open]), "second": second}, facts())
    assert plan.answers[again.slot] == (again, "second")
    with pytest.raises(TypeError, match="second may not decide Keep"):
        compose({"first": fake(Phase.KEEP, [replace(left_open, open=False)]), "second": second}, facts())


def test_idle_strategies_are_listed_with_their_reason() -> None:
    def nothing_here(*_: object) -> list[Decision]:
        raise Idle("one rank has nobody to share with")

    plan = compose({"lonely": fake(Phase.WHO, nothing_here), "mute": fake(Phase.HOW, [])}, facts())
    assert dict(plan.idle) == {"lonely": "one rank has nobody to share with", "mute": "decided nothing"}
    assert "idle: strategies.lonely: one rank has nobody to share with" in table(plan).splitlines()


# Peaks as labelled sums, in bytes


def test_peak_without_and_with_accumulation() -> None:
    plan = Plan.baseline(facts())
    params, moments = 4 * (10 + 20 + 30 + 40), 8 * (10 + 20 + 30 + 40)
    # When backward stands at the head, all that forward saved is alive, and the head's gradient.
    saved, head_grad = 1000 + 2000 + 3000 + 4000, 4 * 40
    assert plan.peak(Tier.DEVICE) == params + moments + saved + head_grad
    assert plan.states(Tier.DEVICE) == params + moments + 4 * 100
    assert plan.peak(Tier.HOST) == 0
    assert Plan.baseline(facts(accumulation=3)).peak(Tier.DEVICE) == params + moments + saved + 4 * 100


def test_peak_in_the_middle_of_backward() -> None:
    plan = Plan.baseline(facts(embedding(1, 1), block(0, 1, 5000), block(1, 1000, 1), head(1, 10)))
    params, moments = 4 * 1003, 8 * 1003
    saved, grads = 1 + 5000, 4 * (1 + 1000 + 1)  # at layers.0: its own gradient and those behind it
    # One unit earlier: one byte more is saved, one parameter's gradient is not there yet.
    assert plan.peak(Tier.DEVICE) == params + moments + saved + grads


def test_reserves_at_the_step_meet_gradients_but_not_saved_tensors() -> None:
    standing = 4 * 100 + 8 * 100  # parameters and moments
    backward, grads = 10_000 + 4 * 40, 4 * 100

    def peak(*reserves: Reserve) -> int:
        return Plan.baseline(facts()).amend(reserves, by="a").peak(Tier.DEVICE)

    always, small = reserve("always", 50), reserve("small", 60, when=When.STEP)
    large = reserve("large", 20_000, when=When.STEP)
    assert peak(always) == standing + 50 + backward
    assert peak(always, small) == standing + 50 + backward
    assert peak(always, small, large) == standing + 50 + grads + 60 + 20_000


def test_what_rests_on_the_host_counts_there() -> None:
    machine = MachineFacts("gpu", 1 << 30, 1 << 30, runtime_host_bytes=7)
    plan = Plan.baseline(facts(machine=machine, accumulation=2))
    moved: list[Decision] = [reserve("pinned", 11, Tier.HOST)]
    for name, kind in itertools.product(("layers.0", "head"), (Kind.MOMENT, Kind.GRAD)):
        moved.append(replace(plan.share(name, kind), tier=Tier.HOST))
    plan = plan.amend(moved, by="a")
    moments_there, grads_there = 8 * (20 + 40), 4 * (20 + 40)
    moments_here, grads_here = 8 * (10 + 30), 4 * (10 + 30)
    runtime, pinned, params, saved = 7, 11, 4 * 100, 10_000
    assert plan.peak(Tier.HOST) == runtime + pinned + moments_there + grads_there
    assert plan.peak(Tier.DEVICE) == params + moments_here + grads_here + saved
    assert plan.states(Tier.HOST) == moments_there + grads_there


# What it says


def test_explain_says_every_answer_in_words_with_who_and_why() -> None:
    plan = Plan.baseline(facts()).amend([share("head", Kind.PARAM, reason="a half each")], by="zero")
    first, _, _, *rows, backward, computed = plan_table.explained(plan, "head")
    assert first == "head: 40 parameters, 40 of them trained"
    assert [row.split("  ")[0] for row in rows] == ["parameters", "gradients", "moments", "saved for backward"]
    assert re.split("  +", rows[0]) == ["parameters", "device", "1/2", "80 B", "zero", "a half each"]
    assert backward == "backward: uses all that forward saved [baseline: all kept]"
    assert computed.startswith("computed: native [baseline: ")
    both = plan.amend([replace(plan.keep("head"), saved_bytes=1)], by="a")
    assert both.decided_by(("Share", "head", "PARAM"), ("Keep", "head")) == "a, zero"
