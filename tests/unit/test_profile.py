"""A profile of some steps: what is written, what it shows, and that training has the same bits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deepstow.strategies.planner.simulate import TraceEvent
from deepstow.strategies.planner.tasks import Resource
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.run.callbacks.profile import measured
from tests.helpers.moves import Kind, made

STRATEGIES = {
    "offload": {"site": "host", "weights": "streamed", "prefetch": 0},
    "recompute": {"policy": "selective", "activation_offloading": True},
}


def trained(folder: Path, steps: list[int] | None, strategies: Any = STRATEGIES) -> Any:
    """The trainer after four steps."""
    given: dict[str, Any] = {} if steps is None else {"profile": {"steps": steps}}
    kind = Kind(1, strategies, {"num_train_epochs": 1.0, "save_strategy": "no", **given})
    folder.mkdir()
    trainer = made(Ranks(), kind.config(folder, -1))
    trainer.train()
    return trainer


def names_in(path: Path) -> set[str]:
    ranges = [each for each in json.loads(path.read_text())["traceEvents"] if each.get("cat") == "user_annotation"]
    return {each["name"] for each in ranges}


def test_copies_and_waits_have_names_and_the_bits_are_the_same(tmp_path: Path) -> None:
    alone, ours = trained(tmp_path / "plain", None), trained(tmp_path / "ours", [2, 3])
    weights = alone.model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in ours.model.state_dict().items())
    names = names_in(tmp_path / "ours" / "profile" / "steps-2-3-rank-0.json")
    assert {
        "step 2", "step 3", "compute: forward model.layers.0", "compute: backward", "cpu: update model.layers.0",
        "up: weight copy model.layers.0", "down: parked gradient model.layers.0", "down: saved tensors",
        "up: saved tensors", "wait: compute for up", "wait: host for down",
    } <= names  # fmt: skip
    assert not {"step 1", "step 4", "up: memory", "down: memory"} & names
    assert (tmp_path / "ours" / "profile" / "step.png").is_file()
    steps = json.loads((tmp_path / "ours" / "profile" / "step.json").read_text())["traceEvents"]
    assert {"update model.layers.0", "weight copy model.layers.0", "saved tensors"} <= {one["name"] for one in steps}
    engine = ours.stowed.engine
    assert "backward" not in vars(ours.accelerator) and "copy" not in vars(engine.transfer)
    assert "_on_host" not in vars(engine.updates)


def test_a_run_that_ends_in_the_middle_and_one_that_is_past_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of plain training, which has no engine."""
    trained(tmp_path / "early", [4, 9], {})
    assert {"step 4", "compute: backward"} <= names_in(tmp_path / "early" / "profile" / "steps-4-9-rank-0.json")
    assert "simulated and measured step" in capsys.readouterr().out
    trainer = made(Ranks(), Kind(1, {}, {"profile": {"steps": [2, 2]}}).config(tmp_path / "late", 3))
    (tmp_path / "late" / "profile").write_text("no folder")
    (profile,) = (each for each in trainer.callback_handler.callbacks if type(each).__name__ == "Profile")
    trainer.state.global_step = 1
    profile.on_train_begin(trainer.args, trainer.state, trainer.control)
    assert capsys.readouterr().out.endswith("training.profile: not taken: the run goes on after step 1\n")
    profile._write(None)  # the disk is full, as it were
    assert "training.profile: " in (said := capsys.readouterr().out) and "not written" in said


def event(cat: str, name: str, ts: int, dur: int, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid}


def test_what_a_gpu_did() -> None:
    """Of the step of median length, kernels and copies by the name around them; what runs over its end is cut."""
    trace = [
        event("user_annotation", "step 10", 0, 10),
        event("user_annotation", "step 11", 1000, 400),
        event("user_annotation", "step 12", 2000, 5000),
        event("user_annotation", "compute: forward b0", 1000, 5),
        event("user_annotation", "cpu: update b1", 1100, 50, tid=2),
        event("user_annotation", "wait: compute for up", 1010, 1),
        event("gpu_user_annotation", "compute: forward b0", 1010, 100, tid=7),
        event("gpu_user_annotation", "up: weight copy b0", 1020, 30, tid=20),
        event("gpu_user_annotation", "compute: update b0", 1300, 200, tid=7),
        event("kernel", "gemm", 1020, 40, tid=7),
        event("kernel", "gemm", 1200, 40, tid=7),
        event("kernel", "adam", 1350, 100, tid=7),
        event("kernel", "ncclDevKernel_AllGather", 1250, 10, tid=9),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1025, 20, tid=20),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 1210, 20, tid=21),
        event("kernel", "gemm", 5000, 40, tid=7),
    ]
    seconds, found = measured(trace)
    assert seconds == pytest.approx(400e-6)
    assert [(each.resource, each.label, round(each.start * 1e6), round(each.end * 1e6)) for each in found] == [
        (Resource.CPU, "update b1", 100, 150),
        (Resource.COMPUTE, "forward b0", 20, 60),
        (Resource.UP, "weight copy b0", 25, 45),
        (Resource.COMPUTE, "backward", 200, 240),
        (Resource.DOWN, "backward", 210, 230),
        (Resource.NET, "backward", 250, 260),
        (Resource.COMPUTE, "update b0", 350, 400),
    ]
    assert all(isinstance(each, TraceEvent) for each in found)
