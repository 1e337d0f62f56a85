"""Training over other routes than torch's, alone and with other strategies, against plain training on two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from deepstow.strategies.core.registry import find
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.run.building import make_model, make_trainer
from deepstow.trainer.verify.verify import random_run, train, without_strategies
from tests.helpers.releases import needs_stage_3
from tests.parity.test_strategies import config_of, equal

ACCUMULATED = "fp32/llama tied, accumulation 3"  # of ``test_strategies.CASES``


def strategies_of(transpose: str, **others: Any) -> dict[str, Any]:
    given = {"linear": {"transpose": transpose}, **others}
    return {name: find(name).model_validate(options) for name, options in given.items()}


@pytest.mark.ranks
def test_as_plain_training(tmp_path: Path) -> None:
    """``test_strategies.py`` has it beside the others, in fp32."""
    equal("bf16/llama", strategies_of("right", offload={"site": "streamed"}), tmp_path)


def of_layers(ranks: Ranks, config: RunConfig) -> dict[str, Any]:
    """How many layers are routed, and whether the weights of the model are those of an untouched one."""
    from deepstow.strategies.engine.forward.routed_linear import Routed

    trainer = make_trainer(random_run(config, ranks))
    model, stock = trainer.model, make_model(random_run(without_strategies(config), ranks)).model
    same = model.state_dict().keys() == stock.state_dict().keys() and all(
        torch.equal(value, stock.state_dict()[name]) and value.is_contiguous()
        for name, value in model.state_dict().items()
    )
    trainer.accelerator.free_memory()
    return {"same": same, "routed": sum(isinstance(layer, Routed) for layer in model.modules())}


@pytest.mark.ranks
def test_all_layers_are_routed(tmp_path: Path) -> None:
    """What is compared above is not the stock layer with itself: seven layers in each of two blocks, and the head."""
    config = config_of(ACCUMULATED, strategies_of("flip", zero={"stage": 2}), tmp_path)
    assert run_world(1, of_layers, config) == {"same": True, "routed": 15}


def linear_after_training(ranks: Ranks, config: RunConfig) -> bool:
    """Whether ``torch.nn.functional.linear`` is torch's own after training."""
    train(ranks, config)
    original: Any = torch._C._nn.linear
    return torch.nn.functional.linear is original


@pytest.mark.ranks
@needs_stage_3
def test_stage_3_leaves_nothing_patched(tmp_path: Path) -> None:
    """DeepSpeed would replace the function for the whole process, and with it every layer that stays native."""
    config = config_of(ACCUMULATED, strategies_of("flip", zero={"stage": 3}), tmp_path)
    assert run_world(1, linear_after_training, config) is True
