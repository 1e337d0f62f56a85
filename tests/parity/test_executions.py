"""Each way of making a step on two real ranks, through the Trainer, against plain training in one process: what a run
asks of an ``Execution`` (``trainer/execution``), in one table.

SGD with clipping is compared: Adam divides each gradient by its own size and would hide a wrong norm, and it enlarges
rounding. Rows have different numbers of trained tokens, so that losses are weighted; the last window of an epoch has
one micro-batch instead of two.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.distributed.ranks import Ranks
from tests.helpers.moves import (
    OFFLOAD,
    ROWS,
    UNEVEN,
    Kind,
    forget_run,
    made,
    offload,
    pipeline,
    plain,
    shared,
    staged,
    tensor,
)
from tests.helpers.moves import zero as zero_stage
from tests.helpers.releases import needs
from tests.helpers.tiny import MIXTRAL
from tests.helpers.worlds import run_counted

pytestmark = [pytest.mark.ranks, needs("experts")]
TOLERANCE = 2e-6
SGD: Mapping[str, Any] = {
    "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.05, "save_strategy": "no", "warmup_steps": 0,
    "weight_decay": 0.0, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
}  # fmt: skip
ROUTED = {**MIXTRAL, "output_router_logits": True, "router_aux_loss_coef": 0.1}
WAYS: Mapping[str, Kind] = {
    "data parallel": plain(2),
    "ZeRO 1": zero_stage(1, 2),
    "ZeRO 3": zero_stage(3, 2),
    "engine": offload(2),
    "engine, shared": shared(2),
    "engine, layers first": Kind(2, {"offload": {**OFFLOAD["offload"], "accumulation": "layers"}}),
    "pipeline": pipeline(2),
    "pipeline, engine": staged(2),
    "tensor": tensor(1),
    "sequence": Kind(2, {"sequence": {"degree": 2}}),
    "sequence, engine": Kind(2, {"sequence": {"degree": 2}, **OFFLOAD}),
    "experts, ZeRO 1": Kind(2, {"experts": {"degree": 2}, "zero": {"stage": 1}}, model=ROUTED),
}


def trained(ranks: Ranks, configs: Mapping[str, RunConfig]) -> dict[str, dict[str, Any]]:
    """What the first rank knows of each run."""
    found = {}
    for name, config in configs.items():
        trainer = made(ranks, config, some=UNEVEN[:18])
        try:
            trainer.train()
            history = trainer.state.log_history
            keys = ("loss", "grad_norm", "eval_loss", "experts_busiest")
            probe = {"input_ids": torch.tensor([ROWS[0]["input_ids"]])}
            found[name] = {
                **{key: [record[key] for record in history if key in record] for key in keys},
                "logits": trainer.logits_of(probe),
                "weights": {key: each.float().cpu() for key, each in trainer.whole_state().items()},
            }
        finally:
            trainer.accelerator.free_memory()
            forget_run()
    return found


def test_as_one_process(tmp_path: Path) -> None:
    def config(name: str, kind: Kind) -> RunConfig:
        return replace(kind, training={**SGD, **kind.training}).config(tmp_path / name, 4)

    # A router's loss is one of each micro-batch, so there both sides have the same ones.
    routed = Kind(model=ROUTED, training={"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4})
    wanted = run_counted(1, trained, {"dense": config("alone", Kind()), "routed": config("alone", routed)})
    configs = {name: config(name, kind) for name, kind in WAYS.items()}
    configs["tensor"] = configs.pop("tensor")  # the last: after it DeepSpeed divides all models of a process
    for name, got in run_counted(2, trained, configs).items():
        want = wanted["routed" if "experts" in name else "dense"]
        assert min(want["grad_norm"]) > 2 * SGD["max_grad_norm"], "clipping has to trigger"
        for key in ("loss", "grad_norm", "eval_loss"):
            assert got[key] == pytest.approx(want[key], rel=TOLERANCE), (name, key)
        assert torch.allclose(got["logits"], want["logits"], rtol=0, atol=1e-4), name
        assert got["weights"].keys() == want["weights"].keys(), name
        for key, weight in want["weights"].items():
            far = (got["weights"][key] - weight).abs().max() / weight.abs().max()
            assert float(far) < 5 * TOLERANCE, (name, key)
        assert bool(got["experts_busiest"]) is ("experts" in name), name
