"""Block times: what the marks mean, what they hold for, and that a plan uses them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepstow.launch.plan import main
from deepstow.strategies.core.facts import Facts, UnitKind, UnitTimes
from deepstow.strategies.engine.forward.blocks import find_blocks
from deepstow.strategies.planner.step_cost import plan_cost, unit_seconds
from deepstow.trainer.machine import block_timing
from deepstow.trainer.machine.block_timing import UnitClock
from tests.helpers.models import build, tokens
from tests.helpers.tiny import LLAMA
from tests.unit.test_step_cost import FAST, known, planned

TIMES = UnitTimes((1.0, 0.0), (2.0, 3.0), (4.0, 5.0), "measured by hand")


class Counted(UnitClock):
    """A clock on which every mark is a second later than the one before."""

    def _now(self) -> float:
        return float(len(self.marks))


def timed(recompute: bool = False, **changes: Any) -> Counted:
    model: Any = build("llama")
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for name, param in model.named_parameters():
        param.requires_grad_(changes.get("trains", lambda name: True)(name))
    clock = Counted(model, find_blocks(model), torch.device("cpu"))
    (batch,) = tokens("llama", 1)
    before = hooks_of(model)
    with clock.timing():
        for _ in range(2):
            loss = model(**batch).loss
            with torch.no_grad():
                model(**batch)  # of a metric, say
            loss.backward()
    assert hooks_of(model) == before
    return clock


def hooks_of(model: nn.Module) -> list[int]:
    return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


@pytest.mark.parametrize("recompute", [False, True])
def test_marks_stand_at_the_borders_of_blocks(recompute: bool) -> None:
    """Forward in order, then backward in reverse; what is recomputed, or has no gradients, marks nothing."""
    clock = timed(recompute)
    names = list(clock.blocks)
    forward = [mark for name in names for mark in (("in", name), ("out", name))]
    backward = [mark for name in reversed(names) for mark in (("backward", name), ("done", name))]
    begins, ends = [("start", ""), ("embedded", names[0])], [("head", names[-1]), ("end", "")]
    assert [mark[:2] for mark in clock.marks] == 2 * [*begins, *forward, *ends, *backward]
    assert clock.seconds() == UnitTimes((1.0, block_timing.LEAST), (1.0, 1.0), (1.0, 1.0), "")


def test_where_micro_batches_take_turns_only_a_turn_counts() -> None:
    """Layers first, two micro-batches and two blocks, with the seconds at which each mark stands."""
    clock = Counted(nn.Identity(), {}, torch.device("cpu"))
    clock.marks = [
        ("start", "", 0), ("embedded", "0", 1), ("start", "", 1), ("embedded", "0", 2),
        ("in", "0", 9), ("out", "0", 11), ("in", "0", 11), ("out", "0", 13),  # weights are waited for before the first
        ("in", "1", 20), ("out", "1", 22), ("in", "1", 22), ("out", "1", 24),
        ("head", "1", 24), ("end", "", 27), ("head", "1", 32), ("end", "", 35),  # backward of each head follows it
        ("backward", "1", 40), ("backward", "1", 44), ("done", "1", 48), ("backward", "0", 60),
        ("done", "1", 64), ("backward", "0", 64),
    ]  # fmt: skip
    assert clock.seconds() == UnitTimes((1.0, block_timing.LEAST), (2.0, 4.0), (3.0, 5.0), "")
    heads = [("head", "1", 24), ("end", "", 27), ("head", "1", 27), ("end", "", 30)]
    clock.marks[12:16] = heads  # and come back together
    found = clock.seconds()
    assert found is not None and found.head == pytest.approx((3.0, 5.0))


def test_what_is_not_trained_is_not_timed() -> None:
    """A frozen embedding leaves the first block out, whose backward has no end that is seen."""
    clock = timed(trains=lambda name: "embed" not in name)
    found = clock.seconds()
    assert found is not None and found.block == (1.0, 1.0)
    clock.marks = [mark for mark in clock.marks if mark[0] not in ("backward", "done")]
    assert clock.seconds() is None


def test_what_was_computed_again_is_taken_off_and_added_as_counted() -> None:
    plain, again = known(FAST), known(FAST, recomputes=True)
    measured = block_timing.without_again(replace(TIMES, block=(2.0, 6.0)), again)
    assert measured.block == (2.0, 4.0)
    assert block_timing.without_again(TIMES, plain) == TIMES
    block = next(i for i, unit in enumerate(again.units) if unit.kind is UnitKind.BLOCK)
    assert unit_seconds(replace(again, unit_times=measured), FAST)[block] == (2.0, 6.0)
    assert unit_seconds(replace(plain, unit_times=measured), FAST)[block] == (2.0, 4.0)
    priced = plan_cost(planned(replace(plain, unit_times=TIMES), site="device"))
    assert priced is not None and priced.compute_seconds == pytest.approx(1 + 4 * 5 + 9)
    assert priced.origin == "assumed; blocks: measured by hand"


def test_stored_for_the_same_run_on_the_same_device_only(tmp_path: Path) -> None:
    facts = known(FAST)
    assert block_timing.read(tmp_path, facts) is None
    block_timing.store(tmp_path, facts, TIMES)
    assert block_timing.read(tmp_path, facts) == TIMES
    assert block_timing.read(tmp_path, facts, "unit_times") is None
    block_timing.store(tmp_path, replace(facts, unit_times=TIMES))
    assert block_timing.read(tmp_path, facts) == TIMES, "a plan written again keeps what was measured"
    assert block_timing.read(tmp_path, facts, "unit_times") == TIMES
    others = [
        replace(facts, run=replace(facts.run, micro_batch=9)),
        replace(facts, run=replace(facts.run, sequence=9)),
        replace(facts, machine=replace(facts.machine, name="another")),
        known(FAST, blocks=3),
    ]
    for other in others:
        assert block_timing.read(tmp_path, other) is None
        same_model = other.units == facts.units and other.machine.name == facts.machine.name
        assert bool(block_timing.unused(tmp_path, other)) is same_model, "said where they are lost"
    assert block_timing.unused(tmp_path, facts) == ""
    assert json.loads((tmp_path / block_timing.FILE).read_text())["units"]
    for broken in ("[]", "{}", '{"for": 1, "measured": {}}', "{"):
        (tmp_path / block_timing.FILE).write_text(broken)
        assert block_timing.read(tmp_path, facts) is None


def test_the_command_measures_and_the_next_plan_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    folder = tmp_path / "run"
    model = {"config": {**LLAMA, "num_hidden_layers": 4}, "tokenizer": "none"}
    content = {
        "model": model,
        "data": {"path": "pydoc", "max_length": 16},
        "training": {"output_dir": str(folder), "max_steps": 1},
        "strategies": {"offload": {}},
    }
    config.write_text(json.dumps(content))  # YAML takes JSON
    assert main(["--config", str(config), "--measure"]) == 0
    said = capsys.readouterr()
    assert "measured, and kept in" in said.out and "  block      forward " in said.out
    assert said.err.count("measuring 3 blocks, round ") == block_timing.ROUNDS + 1
    written = json.loads((folder / block_timing.FILE).read_text())
    assert min(written["measured"]["block"]) > block_timing.LEAST
    assert main(["--config", str(config), "--json", str(tmp_path / "plan.json")]) == 0
    known = json.loads((tmp_path / "plan.json").read_text())["facts"]["unit_times"]
    assert known is not None and known["block"] == written["measured"]["block"]
    (tmp_path / "file").write_text("")
    for change, words in [
        ("strategies.offload=null", "and none of them is on"),
        (f"training.output_dir={tmp_path / 'file'}", "is a file; name another folder"),
    ]:
        capsys.readouterr()
        assert main(["--config", str(config), "--measure", change]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert words in line


def test_tensor_ranks_time_their_part_of_a_block_by_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has half of the heads and channels, and so have the blocks that are timed."""
    config, built = tmp_path / "run.yaml", list[int]()
    content = {
        "model": {"config": {**LLAMA, "num_hidden_layers": 4}, "tokenizer": "none"},
        "data": {"path": "pydoc", "max_length": 16},
        "training": {"output_dir": str(tmp_path / "run"), "per_device_train_batch_size": 4},
        "strategies": {"tensor": {"degree": 2, "chunks": "auto"}},
    }
    config.write_text(json.dumps(content))

    def measure(make: Any, facts: Facts, device: Any, say: Any, chunks: tuple[int, ...]) -> UnitTimes:
        built.extend(param.numel() for name, param in make(1).named_parameters() if ".layers." in name)
        (part, *_) = (unit.num_params for unit in facts.units if unit.kind is UnitKind.BLOCK)
        assert sum(built) == part and chunks == (1, 2, 4)
        return replace(TIMES, chunks={each: (2.0 + each, 3.0) for each in chunks})

    monkeypatch.setattr(block_timing, "measure", measure)
    assert main(["--config", str(config), "--world-size", "2", "--measure"]) == 0 and built
    kept = json.loads((tmp_path / "run" / block_timing.FILE).read_text())["measured"]
    assert block_timing.TIMES.validate_python(kept).chunks == {each: (2.0 + each, 3.0) for each in (1, 2, 4)}
