"""A run whose gradients are not finite ends: when, with which words, and with which checkpoint left."""

import math
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deepstow.strategies.engine.buckets.bucket_state import Scale
from deepstow.strategies.engine.transfer.transfer import Event, Transfer
from deepstow.strategies.engine.updating.clipping import NonFiniteError, SkippedSteps
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.errors import ExitCode
from tests.helpers.moves import made
from tests.helpers.tiny import LLAMA, run_config
from tests.helpers.worlds import run_counted
from tests.unit.test_trainer import UNEVEN

pytestmark = pytest.mark.ranks
OFFLOAD = {"offload": {"site": "host", "weights": "streamed"}}
PIPELINE = {"pipeline": {"stages": 2, "schedule": "gpipe"}}
BOTH = {**PIPELINE, **OFFLOAD}
ALONE = {"collectives": {"local_steps": 2}}


def train(ranks: Ranks, config: RunConfig, bad_from: int, where: str) -> dict[str, Any]:
    """Train until something is not finite from step ``bad_from`` on; what was said, and what is left."""
    from deepstow.trainer.run.callbacks.nonfinite import NonFinite

    trainer = made(ranks, config, UNEVEN)

    def spoil(value: Any) -> Any:
        return value * float("nan") if trainer.state.global_step + 1 >= bad_from else value

    block = trainer.model.model.layers[1]
    if not hasattr(block, "mlp"):
        pass  # another stage has it
    elif where == "weight":
        torch.nn.init.constant_(block.mlp.down_proj.weight, float("nan"))
    elif where == "output":
        block.mlp.register_forward_hook(lambda module, inputs, output: spoil(output))
    elif where == "gradient" or ranks.is_first:
        block.mlp.register_forward_hook(
            lambda module, inputs, output: output.requires_grad and output.register_hook(spoil) and None
        )
    said = ""
    try:
        trainer.train()
    except NonFinite as error:
        (said,) = error.lines
        assert error.code is ExitCode.NON_FINITE
    trainer.accelerator.free_memory()
    names = sorted(path.parent.name for path in Path(config.training.output_dir).glob("checkpoint-*/manifest.json"))
    return {"said": said, "steps": trainer.state.global_step, "checkpoints": names}


@pytest.mark.parametrize(
    ("strategies", "ranks", "step", "checkpoint"),
    [({}, 1, 3, 2), ({"zero": {"stage": 2}}, 2, 3, 2), (OFFLOAD, 2, 3, 4), (BOTH, 2, 3, 4)],
    ids=["plain", "stage 2 on two ranks", "offload on two ranks", "offload in two stages"],
)
def test_the_run_ends(tmp_path: Path, strategies: dict[str, Any], ranks: int, step: int, checkpoint: int) -> None:
    """Plain training and ZeRO at once, the engine after three skipped steps; the newest checkpoint is finite."""
    config = run_config(
        LLAMA, output_dir=tmp_path, strategies=strategies, max_steps=20, save_strategy="steps", save_steps=1,
        save_total_limit=2, logging_steps=1, per_device_train_batch_size=2,
    )  # fmt: skip
    found = run_counted(ranks, train, config, step, "output")
    assert found["said"].startswith(f"step {step}: ")
    assert "not finite first: the output of model.layers.1.mlp. Nothing was saved since" in found["said"]
    assert f"checkpoint-{checkpoint} is the last checkpoint. Lower training.learning_rate" in found["said"]
    # Losses of steps that the engine skips are not finite, so of those two the one before them is kept as well.
    assert (
        found["checkpoints"]
        == [f"checkpoint-{number}" for number in range(min(2, checkpoint - 1), checkpoint + 1)][
            -3 if "offload" in strategies else -2 :
        ]
    )
    weights = load_file(tmp_path / f"checkpoint-{checkpoint}" / "model.safetensors")
    assert all(weight.isfinite().all() for weight in weights.values())


@pytest.mark.parametrize(
    ("strategies", "ranks", "where"),
    [
        (OFFLOAD, 1, "gradient"),
        (PIPELINE, 2, "gradient"),
        (ALONE, 2, "gradient of the first rank"),
    ],
    ids=["offload", "two stages", "one rank that trains alone"],
)
def test_a_gradient_alone(tmp_path: Path, strategies: dict[str, Any], ranks: int, where: str) -> None:
    """Forward is finite: the first gradient of backward is named. All ranks end, also those whose own are finite."""
    config = run_config(LLAMA, output_dir=tmp_path, strategies=strategies, max_steps=9, per_device_train_batch_size=2)
    found = run_counted(ranks, train, config, 1, where)
    assert "not finite first: the gradient of model.layers.1.mlp.down_proj.weight. " in found["said"]
    assert "there is no checkpoint yet" in found["said"]


def test_a_weight_and_the_loss_in_the_log(tmp_path: Path) -> None:
    config = run_config(LLAMA, output_dir=tmp_path, max_steps=9, logging_steps=1, per_device_train_batch_size=2)
    found = run_world(1, train, config, 1, "weight")
    assert "step 1: " in found["said"] and "first: the weight model.layers.1.mlp.down_proj.weight. " in found["said"]
    assert '"loss": "nan"' in (tmp_path / "metrics.jsonl").read_text().splitlines()[0]


def test_one_bad_step_ends_nothing_with_the_engine(tmp_path: Path) -> None:
    config = run_config(LLAMA, output_dir=tmp_path, strategies=OFFLOAD, max_steps=4, per_device_train_batch_size=2)
    found = run_world(1, train, config, 3, "output")
    assert found["said"] == "" and found["steps"] == 4


def test_overflows_count_when_the_scale_is_at_its_minimum() -> None:
    """The scaler has skipped the update, and has halved its scale since."""
    from deepstow.trainer.run.callbacks.nonfinite import NonFinite, StopNonFinite

    for scale, stowed, skipped in product((32768.0, 1.0, 0.5), (None, "the engine"), (True, False)):
        scaler = SimpleNamespace(get_scale=lambda scale=scale: scale)
        accelerator = SimpleNamespace(scaler=scaler, last_norm=math.inf)
        accelerator.optimizer_step_was_skipped = skipped
        args, state = SimpleNamespace(fp16=True, world_size=1), SimpleNamespace(global_step=1)
        trainer = SimpleNamespace(accelerator=accelerator, stowed=stowed, last_loss=1.0, state=state)
        trainer.log = lambda record: None
        trainer.not_finite = lambda step, what: NonFinite(f"{step}: {what}")
        stop: Any = StopNonFinite(trainer)
        ends = skipped and scale < 1.0
        with pytest.raises(NonFinite, match="2: the gradient norm is inf") if ends else nullcontext():
            stop.on_pre_optimizer_step(args, state, None)
            stop.on_optimizer_step(args, state, None)


class Late(Transfer):
    """A device that is far behind: no event has passed unless somebody waits for it."""

    waited = 0

    def done(self, event: Event | None) -> bool:
        return False

    def host_wait(self, *events: Event | None) -> None:
        self.waited += len(events)


def bad() -> Scale:
    known: Any = None
    return Scale(None, torch.ones(()), torch.ones(2), known)


@pytest.mark.parametrize("among_ranks", [True, False])
def test_ranks_wait_for_the_result_so_that_all_stop_in_the_same_step(among_ranks: bool) -> None:
    transfer = Late()
    steps = SkippedSteps(transfer, among_ranks=among_ranks)
    for _ in range(2):
        steps.add(bad(), {"weight": torch.tensor(float("nan"))})
        steps.refuse()
    steps.add(bad(), {"weight": torch.tensor(float("nan"))})
    if among_ranks:
        with pytest.raises(NonFiniteError, match="the gradient of weight is not finite"):
            steps.refuse()
        assert transfer.waited == 3
    else:
        steps.refuse()
        assert steps.skipped == transfer.waited == 0, "alone nobody waits for the device"
