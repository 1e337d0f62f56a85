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


def test_a_slow_cpu_gives_work_to_the_link_within_the_budget() -> None:
    shared, alone = tight(SLOW_CPU), tight(None)
    assert shared.layout is not None and shared.addresses is not None
    assert Site.STREAMED in sites_of(shared) and Site.STREAMED not in sites_of(alone)
    before, after = plan_cost(replace(alone, facts=shared.facts)), plan_cost(shared)
    assert before is not None and after is not None and after.seconds < 0.9 * before.seconds
    assert shared.peak(Home.DEVICE) <= BLOCK * 4 * 26
    assert validate(shared.layout, shared.addresses, shared.facts.params) == []


def test_a_fast_cpu_and_a_site_that_was_asked_for_keep_their_work() -> None:
    assert Site.STREAMED not in sites_of(tight(FAST))
    assert set(sites_of(planned(known(SLOW_CPU, blocks=8), site="host"))) == {Site.HOST}
