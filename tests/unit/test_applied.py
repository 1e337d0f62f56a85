"""What strategies do to a model is logged as they do it, one line for all units to which the same is done."""

import logging

from deepstow.strategies.core.applied import LOGGER, shown_by
from deepstow.strategies.engine import stow
from deepstow.strategies.engine.forward.checkpointing import recompute
from deepstow.trainer.planning.plan_for import plan_for
from tests.helpers.models import build


def test_a_stowed_and_recomputed_model() -> None:
    model = build("llama")
    plan = plan_for(model, max_grad_norm=1.0, batch=(2, 16), weights="streamed", recompute={"policy": "selective"})
    said: list[str] = []
    with shown_by(said.append):
        recompute(model, plan)
        stow(model, plan, device="cpu").close()
    assert LOGGER.handlers == [] and LOGGER.level == logging.NOTSET
    blocks = [unit.name for unit in plan.facts.units if plan.keep(unit.name).recomputes]
    assert len(blocks) > 1 and any(
        line.startswith(f"recompute: {blocks[0]} to {blocks[-1]} ({len(blocks)}): selective, keeps its input, ")
        for line in said
    )
    assert plan.layout is not None
    for site in {bucket.site for bucket in plan.layout.buckets}:
        assert any(line.startswith("stow: ") and line.endswith(f"update site {site.value}") for line in said)
