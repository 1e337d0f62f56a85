"""No step of our Trainer makes the host wait for the device, but where logging asks for its numbers.

Whole runs of ``launch/train.py``. Steps are watched from the end of one to the end of another, after those that are
timed: their borders are waited for. What Transformers, Accelerate and torch's scaler of losses ask for is
listed, by the function that asks.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.accelerator.test_trainer import run
from tests.cuda.test_waits import SCALER
from tests.helpers.waits import Wait, beyond, watched

LISTED = {
    **SCALER,
    ("transformers/masking_utils.py", "_ignore_causal_mask_sdpa"): "whether a batch has padding; the collator knows it",
    ("transformers/masking_utils.py", "find_packed_sequence_indices"): "whether rows are packed; sdpa_varlen knows it",
    ("transformers/trainer.py", "_maybe_log_save_evaluate"): "the loss and the norm of a record",
}
OFFLOAD = {"site": "host", "weights": "streamed", "gradients": "host"}
RUNS: dict[str, dict[str, Any]] = {
    "plain": {"strategies": {}},
    "plain, bf16": {"strategies": {}, "bf16": True},
    "plain, fp16": {"strategies": {}, "fp16": True},
    "offload": {"strategies": {"offload": OFFLOAD}},
    "offload, not clipped": {"strategies": {"offload": OFFLOAD}, "max_grad_norm": 0.0},
    "offload, bf16": {"strategies": {"offload": OFFLOAD}, "bf16": True},
    "offload, fp16": {"strategies": {"offload": OFFLOAD}, "fp16": True},
    "streamed": {"strategies": {"offload": {**OFFLOAD, "site": "streamed"}}},
    "recompute": {"strategies": {"offload": OFFLOAD, "recompute": {"policy": "full"}}},
    "saved tensors on the host": {
        "strategies": {"offload": OFFLOAD, "recompute": {"policy": "selective", "activation_offloading": True}}
    },
    "linear": {"strategies": {"linear": {"transpose": "flip"}}},
    "buffers": {"strategies": {"offload": OFFLOAD, "buffers": {}}},
    "packed, by masks": {"strategies": {"offload": OFFLOAD}, "packing": True},
    "packed": {
        "strategies": {"offload": OFFLOAD},
        "packing": True,
        "bf16": True,
        "model": {"attn_implementation": "sdpa_varlen"},
    },
    "LoRA": {"strategies": {"offload": {"site": "host", "weights": "streamed"}}, "model": {"lora": {"r": 4}}},
}
STEPS = 3
TIMED = 3  # the last step that is timed, in place of the eighth


class Watcher(transformers.TrainerCallback):  # type: ignore[misc]
    """Watches the steps after those that are timed."""

    found: list[Wait] = []

    def __init__(self) -> None:
        self._watch = ExitStack()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == TIMED + 1:
            type(self).found = self._watch.enter_context(watched())
        if state.global_step == TIMED + 1 + STEPS:
            self._watch.close()


def waits(folder: Path, how: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[Wait]:
    monkeypatch.setattr("transformers.trainer.DEFAULT_CALLBACKS", [*transformers.trainer.DEFAULT_CALLBACKS, Watcher])
    monkeypatch.setattr("deepstow.trainer.run.callbacks.plan_check.LAST", TIMED)
    Watcher.found = []
    assert run(folder, **how, max_steps=TIMED + 1 + STEPS, logging_steps=TIMED + 2, save_strategy="no") == 0
    return Watcher.found


@pytest.mark.parametrize("name", RUNS)
def test_no_step_waits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = waits(tmp_path, RUNS[name], monkeypatch)
    assert not beyond(found, LISTED), "\n".join(beyond(found, LISTED))
    assert found, "a record was logged"
