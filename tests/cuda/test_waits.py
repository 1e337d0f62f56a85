"""No step makes the host wait for the device: in a loop of one's own, under every strategy of one process.

Steps are watched after the first few, in which kernels choose their ways and buffers are made. A loop that asks for a
number waits; these ask for none. What a GradScaler asks for is listed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepstow.strategies.engine import AdamW, stow
from deepstow.strategies.engine.forward.checkpointing import recompute
from deepstow.strategies.engine.transfer.transfer import AcceleratorTransfer
from deepstow.trainer.planning.plan_for import plan_for
from tests.helpers.engine import DECAY, LR, plan_of
from tests.helpers.grid import batches_on
from tests.helpers.models import build
from tests.helpers.releases import needs_scratch
from tests.helpers.waits import Wait, beyond, watched
from tests.parity.test_disk_weights import base

DEVICE = "cuda:0"
BF16 = torch.bfloat16
FIRST, STEPS = 3, 3
SCALER = {
    ("torch/amp/grad_scaler.py", "_maybe_opt_step"): "whether the step is skipped",
    ("torch/amp/grad_scaler.py", "unscale_"): "its scale is made on the host, for the device",
}


@dataclass(frozen=True)
class Case:
    """A layout by its wishes (``plan_of``), or ``asked`` of the planner; and the loop."""

    wishes: Mapping[str, Any] = field(default_factory=dict)
    asked: Mapping[str, Any] | None = None
    dtype: torch.dtype = torch.float32
    max_norm: float = 0.0
    accumulation: int = 1
    kind: str | Callable[[], nn.Module] = "llama"
    scaled: bool = False

    def plan(self, model: nn.Module) -> Any:
        known: dict[str, Any] = {"accumulation": self.accumulation}
        if self.asked is None:
            return plan_of(model, max_norm=self.max_norm, debug=False, **known, **self.wishes)
        given = {"update_in_backward": False, **self.asked} if self.scaled else self.asked
        return plan_for(model, max_grad_norm=self.max_norm, batch=(2, 8), **known, **given)


def travels(site: str, **more: Any) -> dict[str, Any]:
    return {"site": site, "weights": "travelling", "park": "host", "prefetch": 1, **more}


CASES = {
    "resident": Case({"site": "device"}),
    "resident, clipped": Case({"site": "device"}, max_norm=0.05),
    "host, in backward": Case(travels("host", in_backward=True)),
    "host, deferred": Case(travels("host")),
    "host, clipped": Case(travels("host"), max_norm=0.05),
    "host, accumulated": Case(travels("host"), max_norm=0.05, accumulation=3),
    "host, passing": Case(travels("host", in_backward=True, passing=True)),
    "streamed, in backward": Case(travels("streamed", in_backward=True)),
    "streamed, clipped": Case(travels("streamed", bucket="half"), max_norm=0.05),
    "streamed, accumulated": Case(travels("streamed", prefetch=0), max_norm=0.05, accumulation=3),
    "mixed": Case({"site": "mixed", "weights": "some", "park": "host"}, max_norm=0.05),
    "bf16, host": Case(travels("host"), dtype=BF16, max_norm=0.05),
    "bf16, streamed": Case(travels("streamed"), dtype=BF16, max_norm=0.05),
    "bf16, rounded": Case(travels("host", rounds=True, moments_as="bf16"), dtype=BF16, max_norm=0.05),
    "int8 moments": Case(travels("host", moments_as="int8"), max_norm=0.05),
    "bf16 moments": Case(travels("host", moments_as="bf16"), max_norm=0.05),
    "fp16": Case(asked={"site": "streamed", "weights": "streamed"}, scaled=True, max_norm=0.05),
    "fp8": Case(asked={"weights": "streamed", "frozen_weights": "fp8", "prefetch": 1}, kind=base),
    "full recompute": Case(asked={"site": "streamed", "weights": "streamed", "recompute": {"policy": "full"}}),
    "selective": Case(asked={"site": "host", "weights": "streamed", "recompute": {"policy": "selective"}}),
    "saved tensors on the host": Case(
        asked={"site": "host", "weights": "streamed", "recompute": {"policy": "full", "activation_offloading": True}}
    ),
    "chunked loss": Case(asked={"site": "host", "weights": "streamed", "cross_entropy": {"chunked": True}}),
    "disk": Case(travels("host", weights_there=True)),
}


def waits(case: Case, folder: Path | None = None) -> list[Wait]:
    """Of some steps of this case, after the first ones."""
    model = base(case.dtype) if case.kind is base else build(case.kind, dtype=case.dtype)
    if folder is not None:
        case = Case(**{**case.__dict__, "wishes": {**case.wishes, "disk": [str(folder)]}})
    plan = case.plan(model)
    moves = AcceleratorTransfer(torch.device(DEVICE))
    if case.asked and "recompute" in case.asked:
        recompute(model, plan, moves, DEVICE)
    optimizer = stow(model, plan, rule=AdamW(lr=LR, weight_decay=DECAY), device=DEVICE, transfer=moves)
    scaler = torch.amp.GradScaler("cuda", 2.0**10, enabled=case.scaled)
    kind: Any = "llama" if case.kind is base else case.kind
    batches = batches_on(DEVICE, kind, case.accumulation)

    def step() -> None:
        for batch in batches:
            with torch.autocast("cuda", torch.float16, enabled=case.scaled):
                loss = model(**batch).loss / case.accumulation
            scaler.scale(loss).backward()
        if case.scaled:
            scaler.unscale_(optimizer)
        if case.max_norm:
            optimizer.clip_grad_norm_(case.max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for _ in range(FIRST):
        step()
    with watched() as found:
        for _ in range(STEPS):
            step()
    assert optimizer.skipped == 0
    optimizer.close()
    return found


@pytest.mark.parametrize("name", CASES)
@needs_scratch
def test_no_step_waits(name: str, tmp_path: Path) -> None:
    found = waits(CASES[name], tmp_path if name == "disk" else None)
    assert beyond(found, SCALER) == []
