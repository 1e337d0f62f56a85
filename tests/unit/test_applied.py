"""What strategies do to a model is logged as they do it, one line for all units to which the same is done."""

import logging

import pytest

from strategies.core.applied import LOGGER, log_applied, shown_by
from strategies.engine import stow
from strategies.engine.forward.checkpointing import recompute
from tests.helpers.models import build
from trainer.planning.plan_for import plan_for


def test_units_of_one_effect_share_a_line() -> None:
    lines: list[str] = []
    with shown_by(lines.append):
        log_applied("some", [("a", "kept"), ("b", "gone"), ("c", "kept"), ("d", "kept")])
    assert lines == ["some: a to d (3): kept", "some: b: gone"]
    log_applied("some", [("a", "kept")])
    assert len(lines) == 2 and LOGGER.handlers == [] and LOGGER.level == logging.NOTSET


def test_a_stowed_and_recomputed_model(caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama")
    plan = plan_for(model, max_grad_norm=1.0, batch=(2, 16), weights="streamed", recompute={"policy": "selective"})
    with caplog.at_level(logging.INFO, logger="deepstow"):
        recompute(model, plan)
        optimizer = stow(model, plan, device="cpu")
    optimizer.close()
    said = [record.getMessage() for record in caplog.records]
    blocks = [unit.name for unit in plan.facts.units if plan.keep(unit.name).recomputes]
    assert len(blocks) > 1 and any(
        line.startswith(f"recompute: {blocks[0]} to {blocks[-1]} ({len(blocks)}): selective, keeps its input, ")
        for line in said
    )
    assert plan.layout is not None
    for site in {bucket.site for bucket in plan.layout.buckets}:
        assert any(line.startswith("stow: ") and line.endswith(f"update site {site.value}") for line in said)
