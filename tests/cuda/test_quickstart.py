"""The quickstart and its variants by ``launch/train.py``: the bits of plain training of the same precision and rows,
resumed, exported and read again; and the planned peak of the device, evaluations and all.

Losses, norms and exported weights of a variant are compared with those of the plain run on this device. Without an
engine, Hugging Face's bf16 rounds elsewhere (docs/exactness.md): there the other run is the engine's with all on the
device. Of plain runs the losses are compared with the CPU's, whose kernels the fake has.
"""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deepstow.launch.train import main
from tests.e2e.commands import REPO, metrics

SMALL = {
    "model.config.hidden_size": 192, "model.config.intermediate_size": 512, "model.config.num_hidden_layers": 3,
    "training.max_steps": 4, "training.warmup_steps": 1, "training.logging_steps": 1, "training.save_steps": 2,
    "training.eval_steps": 4,
}  # fmt: skip
NEAR = 0.03  # of 20 MiB: numbers of 512 bytes each that no plan counts, and rows of an evaluation that are not full
BUDGET = "strategies.offload.gpu_memory"
PLAIN = {"strategies.offload": "null", "strategies.recompute": "null"}
ON_DEVICE = {"strategies.offload": "{site: device}"}
LORA = {"model.lora": "{r: 8, target_modules: all-linear}"}
ALIKE: dict[str, dict[str, Any]] = {  # what changes numbers, and is the same on both sides
    "fp32": {},
    "bf16": {"training.bf16": "true"},
    "fp16": {"training.fp16": "true"},
    "packed": {"data.packing": "true"},
    "LoRA": LORA,
    "not clipped": {"training.max_grad_norm": 0},
}
OTHERS = {"bf16": ON_DEVICE}  # that are compared with another run than the plain one
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "quickstart": ("fp32", {BUDGET: "20MiB"}),
    "offload": ("fp32", {BUDGET: "50MiB", "strategies.recompute": "null"}),
    "full recompute": ("fp32", {BUDGET: "20MiB", "strategies.recompute.policy": "full"}),
    "streamed": ("fp32", {BUDGET: "25MiB", "strategies.offload.site": "streamed"}),
    "bf16": ("bf16", {BUDGET: "20MiB"}),
    "fp16": ("fp16", {BUDGET: "34MiB"}),
    "packed": ("packed", {BUDGET: "20MiB"}),
    "LoRA": ("LoRA", {BUDGET: "20MiB"}),
    "passing": ("not clipped", {BUDGET: "20MiB", "strategies.offload.gradients": "passing"}),
    "disk": ("fp32", {BUDGET: "20MiB", "strategies.offload.disk_memory": "1GiB"}),
}


class Left:
    """What a run has left in ``folder``."""

    def __init__(self, folder: Path, changes: dict[str, Any]) -> None:
        gc.collect()  # of the run before
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        given = {**SMALL, "training.output_dir": folder, **changes}
        arguments = [f"{key}={value}" for key, value in given.items()]
        assert main(["--config", str(REPO / "configs/quickstart.yaml"), *arguments]) == 0
        self.peak = torch.accelerator.max_memory_allocated() - before
        compared = json.loads((folder / "plan.json").read_text())["measured"]
        planned = (each["predicted"] for each in compared if each["owner"] == "device, peak")
        self.planned = max(planned, default=0)  # of a run that has had a second step
        records = metrics(folder)
        self.steps = [(each["step"], each["loss"], each.get("grad_norm")) for each in records if "loss" in each]
        self.weights = load_file(folder / "export" / "model.safetensors")  # adapters are merged

    def unlike(self, other: "Left") -> list[str]:
        """What differs to the last bit, of the steps that both have logged."""
        number = min(len(self.steps), len(other.steps))
        found = [] if self.steps[-number:] == other.steps[-number:] else ["losses or norms"]
        found += sorted(self.weights.keys() ^ other.weights.keys())
        both = self.weights.keys() & other.weights.keys()
        return found + [name for name in both if not torch.equal(self.weights[name], other.weights[name])]


@pytest.fixture(scope="session")
def plainly(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Plain training on this device, once for all variants."""
    known: dict[str, Left] = {}

    def of(name: str) -> Left:
        if name not in known:
            known[name] = Left(tmp_path_factory.mktemp("plain"), {**PLAIN, **OTHERS.get(name, {}), **ALIKE[name]})
        return known[name]

    return of


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_has_the_bits_of_plain_training(name: str, plainly: Any, tmp_path: Path) -> None:
    """And takes the memory that is planned."""
    alike, changes = VARIANTS[name]
    changes = {**ALIKE[alike], **changes}
    if name == "disk":
        (tmp_path / "disk").mkdir()
        changes |= {"strategies.offload.disk": tmp_path / "disk"}
    found = Left(tmp_path / "run", changes)
    assert len(found.steps) == 4 and found.unlike(plainly(alike)) == []
    for each in (found, plainly(alike)):
        assert each.peak == pytest.approx(each.planned, rel=NEAR)


def test_resumed_in_the_middle(plainly: Any, tmp_path: Path) -> None:
    """In another process's place: a new session, from the checkpoint of step 2."""
    Left(tmp_path, {BUDGET: "20MiB", "training.max_steps": 2, "training.lr_scheduler_type": "constant"})
    resumed = {BUDGET: "20MiB", "training.lr_scheduler_type": "constant", "training.resume_from_checkpoint": "auto"}
    found = Left(tmp_path, resumed)
    whole = Left(tmp_path / "whole", {BUDGET: "20MiB", "training.lr_scheduler_type": "constant"})
    assert [step for step, *_ in found.steps] == [1, 2, 3, 4] and found.unlike(whole) == []


def test_moments_in_int8_train_nearly_the_same(plainly: Any, tmp_path: Path) -> None:
    found, wanted = Left(tmp_path, {BUDGET: "20MiB", "strategies.offload.moments": "int8"}), plainly("fp32")
    assert found.peak == pytest.approx(found.planned, rel=NEAR)
    assert found.unlike(wanted) != [], "the moments are rounded"
    for (_, loss, _), (_, other, _) in zip(found.steps, wanted.steps, strict=True):
        assert loss == pytest.approx(other, rel=1e-2)


@pytest.mark.parametrize("name", ["fp32", "packed"])
def test_plain_training_has_the_losses_of_the_cpu(name: str, plainly: Any, tmp_path: Path) -> None:
    there = plainly(name).steps
    here = Left(tmp_path, {**PLAIN, **ALIKE[name], "training.use_cpu": "true"}).steps
    assert [loss for _, loss, _ in there] == [loss for _, loss, _ in here]
