"""Training over other routes than torch's, alone and with every other strategy, against plain training on two ranks.

What is fastest here may be native everywhere, which would prove nothing; so the routes are chosen by timings that are
made up and handed to ``adaptive`` as its file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from deepstow.strategies.core.linears import LEGAL, Route, Routes
from deepstow.strategies.core.registry import find
from deepstow.strategies.planner import gemm_routes
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.machine import gemm_timing
from deepstow.trainer.machine.probe import probe
from deepstow.trainer.planning.facts import gather
from deepstow.trainer.planning.from_config import plan_of
from deepstow.trainer.run.order import make_model, make_trainer
from deepstow.trainer.verify.verify import random_run, train, without_strategies
from tests.helpers.releases import needs_stage_3
from tests.parity.test_strategies import RANKS, STEPS, config_of, equal

# Of ``test_strategies.CASES``.
ACCUMULATED, CHECKPOINTED, BF16 = (
    "fp32/llama tied, accumulation 3", "fp32/gpt2 with dropout, checkpointing", "bf16/llama",
)  # fmt: skip
COPIES = Routes(Route.COPY, Route.COPY, Route.LEFT)
TURNED = Routes(Route.FLIP, Route.RIGHT, Route.FLIP)


def routed(
    case: str, wanted: Routes, folder: Path, ranks: int = RANKS, **others: Mapping[str, Any]
) -> tuple[RunConfig, dict[str, Any]]:
    """A config and its strategies, with a file of timings by which ``wanted`` is the fastest."""
    file, machine = folder / "linear.json", probe()
    given = {"linear": {"cache": str(file)}, **others}
    strategies = {name: find(name).model_validate(options) for name, options in given.items()}
    config = config_of(case, strategies, folder)
    threads = None if ranks == 1 else max(1, machine.usable_cores // ranks)
    shapes = gemm_routes.shapes_of(gather(config, ranks, ranks, machine))
    timing = {f"{gemm} {route}": 2.0 for gemm, routes in LEGAL.items() for route in routes} | {"copy": 0.1}
    timing |= {f"{gemm} {route}": 1.0 for gemm, route in wanted._asdict().items()}
    gemm_timing.save(file, gemm_timing.place_of(machine, threads), {str(shape): timing for shape in shapes})
    plan = plan_of(config, Ranks(0, 0, ranks, ranks), machine)
    chosen = gemm_routes.chosen(plan)
    assert set(chosen.values()) == {wanted} and len(chosen) == len(plan.facts.linears)
    return config, strategies


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("others", "wanted", "case"),
    [
        ({}, COPIES, ACCUMULATED),
        ({}, COPIES, CHECKPOINTED),
        ({}, TURNED, ACCUMULATED),
        ({"zero": {"stage": 2}}, COPIES, BF16),
        pytest.param({"zero": {"stage": 3}}, TURNED, CHECKPOINTED, marks=needs_stage_3),
        ({"offload": {"site": "host", "weights": "streamed"}}, TURNED, CHECKPOINTED),
        ({"offload": {"site": "streamed"}, "buffers": {"debug": True}}, TURNED, BF16),
    ],
    ids=str,
)
def test_as_plain_training(others: dict[str, Any], wanted: Routes, case: str, tmp_path: Path) -> None:
    """Second copies go with weights that stay whole; without them every other route goes with everything."""
    _, strategies = routed(case, wanted, tmp_path, **others)
    equal(case, strategies, tmp_path)


def of_layers(ranks: Ranks, config: RunConfig) -> dict[str, Any]:
    """How often the copy of each routed layer is made in training, and whether the weights of the model, before that,
    are those of an untouched one."""
    from deepstow.strategies.engine.forward.routed_linear import Routed

    trainer = make_trainer(random_run(config, ranks))
    model, stock = trainer.model, make_model(random_run(without_strategies(config), ranks))
    same = model.state_dict().keys() == stock.state_dict().keys() and all(
        torch.equal(value, stock.state_dict()[name]) and value.is_contiguous()
        for name, value in model.state_dict().items()
    )
    try:
        trainer.train()
        layers: Any = trainer.accelerator.unwrap_model(trainer.model_wrapped).modules()
        made = [layer._copy.tensor._version for layer in layers if isinstance(layer, Routed)]
    finally:
        trainer.accelerator.free_memory()
    return {"same": same, "made": made}


@pytest.mark.ranks
def test_layers_are_routed_and_copies_are_made_once_per_optimizer_step(tmp_path: Path) -> None:
    """What is compared above is not the stock layer with itself. Not once per micro-batch, of which there are three."""
    config, _ = routed(ACCUMULATED, COPIES, tmp_path, ranks=1, zero={"stage": 2})
    # Seven layers in each of two blocks, and the head.
    wanted = {"same": True, "made": [STEPS] * 15}
    assert run_world(1, of_layers, config) == wanted


def linear_after_training(ranks: Ranks, config: RunConfig) -> bool:
    """Whether ``torch.nn.functional.linear`` is torch's own after training."""
    train(ranks, config)
    original: Any = torch._C._nn.linear
    return torch.nn.functional.linear is original


@pytest.mark.ranks
@needs_stage_3
def test_stage_3_leaves_nothing_patched(tmp_path: Path) -> None:
    """DeepSpeed would replace the function for the whole process, and with it every layer that stays native."""
    config, _ = routed(ACCUMULATED, TURNED, tmp_path, ranks=1, zero={"stage": 3})
    assert run_world(1, linear_after_training, config) is True
