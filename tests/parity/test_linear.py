"""Training over other routes than torch's, alone and with every other strategy, against plain training on two ranks.

What is fastest here may be native everywhere, which would prove nothing; so the routes are chosen by timings that are
made up and handed to ``adaptive`` as its file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from strategies.core.linears import LEGAL, Gemm, Route, Routes, Timed
from strategies.core.registry import find
from strategies.planner import gemm_routes
from tests.helpers.releases import needs_stage_3
from tests.parity.test_strategies import GPT2, LLAMA, RANKS, STEPS
from trainer.config.sections import RunConfig
from trainer.dist.ranks import Ranks
from trainer.dist.spawn import run_world
from trainer.machine import gemm_timing
from trainer.machine.probe import probe
from trainer.planning.facts import gather, run_facts
from trainer.planning.from_config import plan_of
from trainer.run.order import make_model, make_trainer
from trainer.verify.differences import compare
from trainer.verify.verify import random_run, shrink, train, without_strategies

CASES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama, accumulation": (
        LLAMA | {"tie_word_embeddings": True},
        {"max_grad_norm": 0.0, "gradient_accumulation_steps": 3},
    ),
    "gpt2, checkpointing": (GPT2, {"max_grad_norm": 0.0, "gradient_checkpointing": True}),
    "llama, bf16": (LLAMA, {"max_grad_norm": 0.0, "bf16": True, "gradient_accumulation_steps": 2}),
}
COPIES = Routes(Route.COPY, Route.COPY, Route.LEFT)
TURNED = Routes(Route.FLIP, Route.RIGHT, Route.FLIP)
plain_results: dict[str, dict[str, torch.Tensor]] = {}


def config_of(case: str, strategies: Mapping[str, Mapping[str, Any]], folder: Path) -> RunConfig:
    model, training = CASES[case]
    made = {name: find(name).model_validate(options) for name, options in strategies.items()}
    config = RunConfig.model_validate(
        {
            "model": {"config": model, "tokenizer": "none"},
            "data": {"path": "random tokens"},
            "training": {"output_dir": "unused", "learning_rate": 1e-2, **training},
            "strategies": made,
        }
    )
    return shrink(config, folder, STEPS)


def with_routes(config: RunConfig, wanted: Routes, file: Path, ranks: int = RANKS) -> RunConfig:
    """``config`` with a file of timings by which ``wanted`` is the fastest."""
    machine = probe()
    threads = None if ranks == 1 else max(1, machine.usable_cores // ranks)
    shapes = gemm_routes.shapes_of(gather(config, ranks, ranks, machine))
    assert shapes
    seconds = tuple((gemm, route, 1.0 if route is wanted.of(gemm) else 2.0) for gemm in Gemm for route in LEGAL[gemm])
    timings = [Timed(shape, seconds, 0.1) for shape in shapes]
    gemm_timing.save(file, gemm_timing.place_of(machine, threads), timings)
    plan = plan_of(config, Ranks(0, 0, ranks, ranks), machine)
    assert set(gemm_routes.chosen(plan).values()) == {wanted} and len(gemm_routes.chosen(plan)) == len(
        plan.facts.linears
    )
    return config


def plain(case: str, folder: Path) -> dict[str, torch.Tensor]:
    if case not in plain_results:
        plain_results[case] = run_world(RANKS, train, without_strategies(config_of(case, {}, folder)))["weights"]
    return plain_results[case]


def check(case: str, config: RunConfig, folder: Path) -> None:
    """Equal to the largest of the tolerances that the strategies declare."""
    known = run_facts(config, RANKS)
    tolerance = max(strategy.parity(known).tolerance for strategy in config.strategies.values())
    found = run_world(RANKS, train, config)["weights"]
    worst = max((difference.relative for difference in compare(plain(case, folder), found)), default=0.0)
    assert worst <= tolerance


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "wanted"), [*((case, COPIES) for case in CASES), ("llama, accumulation", TURNED)], ids=str
)
def test_alone(case: str, wanted: Routes, tmp_path: Path) -> None:
    """The other cases take the turned routes together with other strategies below."""
    config = config_of(case, {"linear": {"cache": str(tmp_path / "linear.json")}}, tmp_path)
    check(case, with_routes(config, wanted, tmp_path / "linear.json"), tmp_path)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("other", "wanted", "case"),
    [
        ({"zero": {"stage": 1}}, COPIES, "llama, bf16"),
        ({"zero": {"stage": 2}}, COPIES, "llama, accumulation"),
        pytest.param({"zero": {"stage": 3}}, TURNED, "gpt2, checkpointing", marks=needs_stage_3),
        ({"offload": {"site": "host", "weights": "streamed"}}, TURNED, "gpt2, checkpointing"),
        ({"offload": {"site": "streamed"}, "buffers": {"debug": True}}, TURNED, "llama, bf16"),
    ],
    ids=str,
)
def test_together(other: dict[str, Any], wanted: Routes, case: str, tmp_path: Path) -> None:
    """Second copies go with weights that stay whole; without them every other route goes with everything."""
    strategies = {"linear": {"cache": str(tmp_path / "linear.json")}, **other}
    config = config_of(case, strategies, tmp_path)
    check(case, with_routes(config, wanted, tmp_path / "linear.json"), tmp_path)


def kinds_of_layers(ranks: Ranks, config: RunConfig) -> list[list[Any]]:
    """Names and classes of the layers of a built model, and whether its weights are those of the untouched one."""
    from strategies.engine.forward.routed_linear import Routed

    run = random_run(config, ranks)
    make_trainer(run)  # reads the arguments
    model, stock = make_model(run), make_model(random_run(without_strategies(config), ranks))
    same = model.state_dict().keys() == stock.state_dict().keys() and all(
        torch.equal(value, stock.state_dict()[name]) and value.is_contiguous()
        for name, value in model.state_dict().items()
    )
    routed = [module for module in model.modules() if isinstance(module, Routed)]
    copies = sum(module._routes.copies for module in routed)
    return [[len(routed), copies, same, all(type(m).__name__.startswith("Routed") for m in routed)]]


@pytest.mark.ranks
def test_the_layers_of_a_run_are_routed_and_its_state_dict_is_as_it_was(tmp_path: Path) -> None:
    """What is compared above is not the stock layer with itself."""
    config = config_of("gpt2, checkpointing", {"linear": {"cache": str(tmp_path / "linear.json")}}, tmp_path)
    config = with_routes(config, COPIES, tmp_path / "linear.json", ranks=1)
    ((layers, copies, same, named),) = run_world(1, kinds_of_layers, config)
    assert layers == copies == 9 and same and named  # two blocks of four, and the head


def linear_after_training(ranks: Ranks, config: RunConfig) -> bool:
    """Whether ``torch.nn.functional.linear`` is torch's own after training."""
    train(ranks, config)
    original: Any = torch._C._nn.linear
    return torch.nn.functional.linear is original


@pytest.mark.ranks
@needs_stage_3
def test_stage_3_leaves_nothing_patched(tmp_path: Path) -> None:
    """DeepSpeed would replace the function for the whole process, and with it every layer that stays native."""
    strategies = {"linear": {"cache": str(tmp_path / "linear.json")}, "zero": {"stage": 3}}
    config = config_of("llama, accumulation", strategies, tmp_path)
    config = with_routes(config, TURNED, tmp_path / "linear.json", ranks=1)
    assert run_world(1, linear_after_training, config) is True


def copies_made(ranks: Ranks, config: RunConfig) -> list[int]:
    """How often each layer's second copy was made in a training run."""
    from strategies.engine.forward.routed_linear import Routed

    trainer = make_trainer(random_run(config, ranks))
    try:
        trainer.train()
        layers: Any = trainer.accelerator.unwrap_model(trainer.model_wrapped).modules()
        return [layer._copy.tensor._version for layer in layers if isinstance(layer, Routed)]
    finally:
        trainer.accelerator.free_memory()


@pytest.mark.ranks
@pytest.mark.parametrize("other", [{}, {"zero": {"stage": 2}}], ids=str)
def test_copies_are_made_once_per_optimizer_step(other: dict[str, Any], tmp_path: Path) -> None:
    """Not once per micro-batch, of which there are three, and not less often."""
    strategies = {"linear": {"cache": str(tmp_path / "linear.json")}, **other}
    config = config_of("llama, accumulation", strategies, tmp_path)
    made = run_world(1, copies_made, with_routes(config, COPIES, tmp_path / "linear.json", ranks=1))
    assert len(made) == 15 and set(made) == {STEPS}  # seven layers in each of two blocks, and the head
