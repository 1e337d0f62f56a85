"""Out of memory: what each cure frees follows from the plan, and the largest comes first."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepstow.strategies.core.facts import Operator, Work
from deepstow.strategies.core.plan import Plan
from deepstow.strategies.engine.memory.arena import OutOfMemoryError
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.stopping import Stop
from deepstow.trainer.run import session
from deepstow.trainer.run.oom import cures, explain, is_shortage
from tests.helpers.fakes import block, choosing, facts
from tests.helpers.tiny import run_config


def plan_of(**run: Any) -> Plan:
    blocks = [block(index, num_params=1000, saved_bytes=1 << 20) for index in range(4)]
    product = Operator("linear 0", 1 << 18, Work(flops=1))
    units = [choosing(unit, product, input_bytes=1 << 10, stream_bytes=1 << 10) for unit in blocks]
    return Plan.baseline(facts(*units, hidden_size=16, sequence=32, **run))


def test_the_largest_comes_first() -> None:
    full_host, full = (
        "strategies: {recompute: {policy: full, activation_offloading: true}}",
        "strategies: {recompute: {policy: full}}",
    )
    selective = "strategies: {recompute: {policy: selective}}"
    plan = plan_of(micro_batch=4)
    found = dict(cures(run_config(), plan))
    assert found[full_host] == (3 << 20) - (2 << 10)  # the last block's input is there, and one arrives
    assert found[full] == (3 << 20) - (4 << 10)  # three of four blocks, less the inputs
    assert found[selective] == (3 << 20) - (4 << 10) - (3 << 18)  # and less what three of them keep
    assert found["training: {per_device_train_batch_size: 2, gradient_accumulation_steps: 2}"] == 2 << 20
    lines = explain(run_config(), plan, OutOfMemoryError("the device arena needs 1 TiB"))
    assert lines[0] == "out of memory: the device arena needs 1 TiB"
    assert any(line.startswith("predicted peak per rank") for line in lines)
    assert any(line.startswith("measured peak so far, host: ") for line in lines)
    assert any(line.startswith("saved for backward on the device: 4.0 MiB") for line in lines)
    advised = lines[lines.index("what would free memory on the device, the most first:") + 1 :]
    order = [full_host, full, selective, "training: {per_device_train_batch_size: 2, gradient_accumulation_steps: 2}"]
    assert [line.strip().rpartition(": ")[0] for line in advised[:4]] == order


def test_one_row_is_shortened_and_what_is_on_is_not_advised() -> None:
    assert "data.max_length: 16" in dict(cures(run_config(), plan_of(micro_batch=1)))
    found = dict(cures(run_config(gradient_checkpointing=True), plan_of(micro_batch=4)))
    assert found and not any("recompute" in change for change in found)


def test_what_counts_as_shortage() -> None:
    for error in (MemoryError(), OutOfMemoryError("the host arena needs 1 TiB"), torch.OutOfMemoryError("CUDA")):
        assert is_shortage(error)
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_shortage(caught.value), "torch says so on this machine"


@pytest.mark.parametrize(("error", "code"), [(MemoryError("no more"), 11), (RuntimeError("a bug"), 1)])
def test_a_run_that_ends_for_want_of_memory_says_so(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the function that every run goes through."""

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(session, "prepare", lambda *_: SimpleNamespace(plan=plan_of(micro_batch=4)))
    monkeypatch.setattr(session, "train", fails)
    assert session.in_group(run_config(), Ranks(), Stop()) == code
    shown = capsys.readouterr().err
    assert ("out of memory: no more" in shown) is (code == 11)
    assert ("the most first:" in shown) is (code == 11)
