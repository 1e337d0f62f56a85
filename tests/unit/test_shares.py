"""Host updates shared between the CPU and the link: only where it is simulated to be faster, and fits."""

from dataclasses import replace
from typing import Any

from strategies.core.layout import Site
from strategies.core.plan import Home, Plan
from strategies.core.validate import validate
from strategies.planner.step_cost import plan_cost
from tests.unit.test_step_cost import BLOCK, FAST, known, planned

# Four blocks' updates take the CPU 4 s; forward takes 5 s, backward 10 s; a state crosses the link in a tenth of that.
SLOW_CPU = replace(FAST, update_fp32_params_per_s=BLOCK / 10)


def sites_of(plan: Plan) -> list[Site]:
    assert plan.layout is not None
    return [bucket.site for bucket in plan.layout.buckets]


def tight(rates: Any) -> Plan:
    """A budget into which the state of most buckets does not fit."""
    return planned(known(rates, blocks=8), gpu_memory=f"{BLOCK * 4 * 26 >> 20}MiB")


def test_a_slow_cpu_gives_work_to_the_link() -> None:
    shared = tight(SLOW_CPU)
    alone = tight(None)
    assert Site.STREAMED in sites_of(shared)
    assert Site.STREAMED not in sites_of(alone)
    before = plan_cost(replace(alone, facts=shared.facts))
    after = plan_cost(shared)
    assert before is not None
    assert after is not None
    assert after.seconds < 0.9 * before.seconds


def test_what_is_shared_is_within_the_budget() -> None:
    plan = tight(SLOW_CPU)
    assert plan.layout is not None
    assert plan.addresses is not None
    assert plan.peak(Home.DEVICE) <= BLOCK * 4 * 26
    assert validate(plan.layout, plan.addresses, plan.facts.params) == []


def test_a_fast_cpu_keeps_its_work() -> None:
    assert Site.STREAMED not in sites_of(tight(FAST))


def test_a_site_that_was_asked_for_stays() -> None:
    plan = planned(known(SLOW_CPU, blocks=8), site="host")
    assert set(sites_of(plan)) == {Site.HOST}
