"""Where the loss is computed by chunks, and what that changes in the plan: plain numbers."""

from dataclasses import replace
from typing import Any

from deepstow.strategies.core.compose import compose
from deepstow.strategies.core.facts import Facts, InChunks, Temporaries
from deepstow.strategies.core.peak import Saved, backward_peak, forward_peak
from deepstow.strategies.core.plan import CHUNKS, NONE, Plan, Tier
from deepstow.strategies.core.registry import find
from tests.helpers.fakes import block, embedding, head
from tests.helpers.fakes import facts as facts_with

MIB = 1 << 20
WORTH = 16 * MIB  # logits: 64 MiB in fp32
NATIVE, CHUNKED = Temporaries(8000, 12_000, 12_000), Temporaries(100, 500, 600)


def facts(logits: int = WORTH) -> Facts:
    last = replace(head(40, 4000), temporaries=NATIVE, in_chunks=InChunks(logits, 2000, CHUNKED))
    return facts_with(embedding(10, 1000), block(0, 20, 2000), block(1, 30, 3000), last)


def plan_of(given: Facts, **options: Any) -> Plan:
    return compose({"cross_entropy": find("cross_entropy").model_validate(options)}, given)


def test_large_logits_are_taken_by_chunks() -> None:
    plan = plan_of(facts())
    assert plan.keep("head").policy == CHUNKS and not plan.keep("head").recomputes
    assert plan.saved_bytes("head") == 2000
    assert plan.saved_peak() == 1000 + 2000 + 3000 + 2000 + 500
    native = plan_of(facts(), chunked=False)
    assert native.saved_peak() == 1000 + 2000 + 3000 + 4000 + 12_000
    assert native.peak(Tier.DEVICE) - plan.peak(Tier.DEVICE) == 2000 + 12_000 - 600  # what has landed is in it


def test_small_logits_are_not_unless_told() -> None:
    plan = plan_of(facts(WORTH - 1))
    assert plan.keep("head").policy == NONE
    assert plan.idle["cross_entropy"].endswith("chunked: true insists")
    assert plan_of(facts(WORTH - 1), chunked=True).keep("head").policy == CHUNKS
    assert "leaves the loss" in plan_of(facts(), chunked=False).idle["cross_entropy"]
    assert "does not compute its loss" in plan_of(facts_with()).idle["cross_entropy"]


def test_recomputation_is_chosen_with_the_head_as_it_is() -> None:
    """With native numbers of the head nothing would fit."""
    given = facts()
    tight = replace(given, machine=replace(given.machine, device_bytes=20_000))
    strategies = {
        "cross_entropy": find("cross_entropy")(),
        "recompute": find("recompute").model_validate({"policy": "auto"}),
    }
    assert compose(strategies, tight).keep("head").policy == CHUNKS


def test_temporaries_along_backward() -> None:
    """The last of two units saves 8 after 1; of its gradients 2 have landed while its temporaries are the most."""
    units = [Saved(1, 1), Saved(8, 8, temporaries=Temporaries(5, 20, 22))]
    assert [backward_peak(units, [0, landed]) - (8 + 1 + 20) for landed in (0, 1, 7)] == [0, 1, 2]
    assert forward_peak(units) == 1 + 8 + 5


def test_what_waits_on_the_host_is_leaving_in_the_next_forward() -> None:
    units = [Saved(1, 50, hosted=20), Saved(1, 50, hosted=20), Saved(3, 3, temporaries=Temporaries(4, 0, 0))]
    assert forward_peak(units) == max(50, 1 + 50 + 20, 1 + 1 + 3 + 20 + 4)
