"""What the planner makes of real budgets trains with the bits of plain training: sites, stays, addresses as they come.

The other grids use layouts made by hand. Here machines differ, so that the planner weighs: a slow CPU gives work to the
link, a slow link keeps weights at home.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn

from deepstow.strategies.core.compose import compose
from deepstow.strategies.core.facts import Facts
from deepstow.strategies.core.layout import Site, ticks_of, uses
from deepstow.strategies.core.plan import Plan, Tier
from deepstow.strategies.core.protocol import Refusal
from deepstow.strategies.core.registry import find
from deepstow.strategies.planner.weight_schedule import ASSUMED
from deepstow.trainer.planning.plan_for import plan_for
from tests.helpers.doubles import Delayed, RaceDetector
from tests.helpers.engine import STEPS, least
from tests.helpers.models import build, tokens
from tests.helpers.sides import both_sides, train

SHARES = (0.6, 0.35, 0.25)  # of what training takes with everything on the device
BALANCED = replace(  # with launches nothing else would count, since the model is so small
    ASSUMED, gemm_fp32_flops_per_s=1e10, up_bytes_per_s=1e9, down_bytes_per_s=1e9, link_latency_s=1e-6,
    update_fp32_params_per_s=2e8, device_bytes_per_s=1e11, launch_s=0.0,
)  # fmt: skip
MACHINES = {
    "balanced": BALANCED,
    "slow cpu": replace(BALANCED, update_fp32_params_per_s=1e7),
    "slow link": replace(BALANCED, up_bytes_per_s=5e7, down_bytes_per_s=5e7),
}


def facts_of(model: Any, machine: str, loop: dict[str, Any]) -> Facts:
    known = plan_for(
        model,
        eval_rows=0,
        batch=(2, 8),
        accumulation=loop["accumulation"],
        max_grad_norm=loop["max_norm"],
        site="device",
    ).facts
    here = replace(known.machine, rates=MACHINES[machine], device_bytes=1 << 40, host_bytes=1 << 40)
    return replace(known, run=replace(known.run, forward_flops=32 * known.num_params), machine=here)


def planned(known: Facts, budget: int | str, site: str = "auto") -> Plan:
    offload = find("offload").model_validate({"gpu_memory": budget, "host_memory": "1TiB", "site": site})
    return compose({"offload": offload, "buffers": find("buffers").model_validate({"debug": True})}, known)


CLIPPED: dict[str, Any] = {"accumulation": 1, "max_norm": 0.05}
TWICE: dict[str, Any] = {"accumulation": 2, "max_norm": 0.0}


@pytest.mark.parametrize(
    ("model", "machine", "loop"),
    [
        pytest.param("llama", "slow cpu", CLIPPED, id="slow cpu-clipped"),
        pytest.param("words", "balanced", CLIPPED, id="many words-balanced-clipped"),
    ],
)
def test_every_budget_trains_the_same_bits(model: str, machine: str, loop: dict[str, Any]) -> None:
    make, batches = partial(build, model), tokens(model, STEPS * loop["accumulation"])
    script = partial(train, batches=batches, passes=(loop["accumulation"],))
    known = facts_of(make(), machine, loop)
    most = planned(known, "1TiB", site="device").peak(Tier.DEVICE)
    sites, travelling, fitted, direct = set[Site](), 0, 0, 0
    for number, share in enumerate(SHARES):
        try:
            plan = planned(known, int(share * most))
        except Refusal:
            continue
        assert plan.layout is not None and plan.peak(Tier.DEVICE) <= int(share * most)
        sites |= {bucket.site for bucket in plan.layout.buckets}
        travelling += any(not bucket.resident for bucket in plan.layout.buckets)
        direct += any(bucket.grad_direct for bucket in plan.layout.buckets)
        fitted += 1
        how: dict[str, Any] = {"max_norm": loop["max_norm"], "transfer": (Delayed, RaceDetector)[number % 2]}
        both_sides(make, script, [lambda _, plan=plan: plan], beside=True, **how)
    assert fitted >= 2 and travelling >= 1
    assert Site.HOST in sites and (direct > 0 or model != "words")
    if loop["max_norm"]:  # without clipping the CPU's updates are hidden here, and the device's are not
        assert Site.DEVICE in sites, "the planner had something to decide"
    if machine == "slow cpu":
        assert Site.STREAMED in sites


class Computing(nn.Embedding):
    """Backward reads its weight."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.weight.square().mean()


@pytest.mark.parametrize("kind", [nn.Embedding, Computing])
def test_an_embedding_that_backward_reads_is_there_for_it(kind: type[nn.Embedding]) -> None:
    """At the least memory, where it travels; the others are looked up only, and not brought."""

    def made() -> Any:
        model: Any = build("words")
        model.model.embed_tokens.__class__ = kind
        return model

    plan = least(made(), batch=(2, 8), max_grad_norm=0.05)
    assert plan.layout is not None
    embedding = plan.layout.buckets[0]
    assert embedding.looked_up is (kind is nn.Embedding) and not embedding.resident
    assert (plan.layout.num_ticks - 1 in uses(embedding, ticks_of(plan.layout.units))) is (kind is Computing)
    script = partial(train, batches=tokens("words", STEPS))
    both_sides(made, script, [lambda _: plan], max_norm=0.05, beside=True)
