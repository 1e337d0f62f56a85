"""Predicted against measured: what is counted, when, and what is written."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import TrainerControl, TrainerState

from deepstow.strategies.core.facts import UnitTimes
from deepstow.strategies.core.layout import PAGE_BYTES
from deepstow.strategies.core.plan import RUN, Plan, Stow, Tier
from deepstow.strategies.engine.memory import accelerator
from deepstow.trainer.machine.block_timing import median_of
from deepstow.trainer.run.callbacks import plan_check
from deepstow.trainer.run.callbacks.plan_check import Comparison, PlanCheck
from tests.helpers import layouts
from tests.helpers.fakes import CPU, block, facts


class Square(torch.nn.Module):
    """Saves its input of 4 bytes per element, and its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum()


def check_of(folder: Path, *, recomputes: bool = False) -> PlanCheck:
    plan = Plan.baseline(facts(block("model.layers.0", 8, saved_bytes=64)))
    return PlanCheck(plan, folder, json.dumps({"rows": []}), recomputes=recomputes)


def saved(check: PlanCheck) -> list[Comparison]:
    return [each for each in check.compared() if each.owner == "saved for backward"]


def test_only_the_first_step_is_counted(tmp_path: Path) -> None:
    """And of what it saves neither the model's weights nor, where blocks are recomputed, anything."""
    check, model = check_of(tmp_path), Square()
    for step in (0, 1, 2):
        with check.counting(model, step):
            for _ in range(1 + step):
                model(torch.ones(8, requires_grad=True))
        assert [(each.predicted, each.measured) for each in saved(check)] == [(64, 32)]
    recomputing = check_of(tmp_path, recomputes=True)
    with recomputing.counting(model, 0):
        model(torch.ones(8, requires_grad=True))
    assert saved(recomputing) == []


class Rows(Square):
    """Takes a batch as a language model does."""

    def forward(self, x: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)


def test_rows_that_need_no_mask_are_compared_with_such(tmp_path: Path) -> None:
    full, short = torch.ones(2, 3), torch.tensor([[1, 1, 1], [1, 1, 0]])
    one, two = torch.arange(3).expand(2, 3), torch.tensor([[0, 1, 2], [0, 1, 0]])
    cases: list[tuple[dict[str, torch.Tensor], int]] = [({"attention_mask": full}, 48), ({"attention_mask": short}, 64)]
    cases += [({"position_ids": one}, 48), ({"position_ids": two}, 64), ({}, 48)]
    for batch, foretold in cases:
        check, model = check_of(tmp_path), Rows()
        check._without_mask = partial(dict.fromkeys, [unit.name for unit in check._plan.facts.units], 48)
        with check.counting(model, 0):
            model(torch.ones(8, requires_grad=True), **batch)
        assert saved(check)[0].predicted == foretold and not model._forward_pre_hooks


def test_rows_shorter_than_the_plan_s_are_said(tmp_path: Path, capsys: Any) -> None:
    for tokens, said in ((3, True), (check_of(tmp_path)._plan.facts.run.sequence, False)):
        check, model = check_of(tmp_path), Rows()
        with check.counting(model, 0):
            model(torch.ones(8, requires_grad=True), input_ids=torch.ones(2, tokens))
        state = TrainerState(global_step=2, is_world_process_zero=True)
        check.on_step_end(None, state, TrainerControl())  # type: ignore[arg-type]
        assert ("have 3 tokens; the plan" in capsys.readouterr().out) == said


def test_written_once_after_step_two(tmp_path: Path, capsys: Any) -> None:
    check = check_of(tmp_path)
    with check.counting(Square(), 0):
        Square()(torch.ones(8, requires_grad=True))
    (tmp_path / "plan.txt").write_text("the plan\n")
    for step in (1, 2, 3):
        state = TrainerState(global_step=step, is_world_process_zero=True)
        check.on_step_end(None, state, TrainerControl())  # type: ignore[arg-type]
    title, *printed = capsys.readouterr().out.splitlines()
    assert title == "measured after step 2:" and [line[:16].strip() for line in printed] == ["process memory"]
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["measured"][0]["owner"] == "saved for backward"
    assert written["rows"] == []
    whole = (tmp_path / "plan.txt").read_text().splitlines()
    assert whole[:2] == ["the plan", ""] and whole[2] == "plan against run, after step 2"
    assert len(whole) == 5 + len(written["measured"])  # names of columns, dashes
    assert Comparison("x", 110, 100).cells() == ("x", "110 B", "100 B", "+10.0 %")
    assert Comparison("x", 1, 0).error == 0.0
    assert Comparison("x", 110, 100).words == "100 B; planned: 110 B, 10% more"
    assert Comparison("x", 1.0, 2.0, "seconds").words == "2 s; simulated: 1 s, 50% less"
    assert Comparison("x", 1001, 1000).words == "1000 B, as planned"


def test_memory_of_other_ranks_that_a_process_maps_counts_as_its_own(tmp_path: Path) -> None:
    check = check_of(tmp_path)
    alone = {each.owner: each.predicted for each in check.compared()}["process, peak"]
    if accelerator.kind() is None:  # the process holds both homes
        assert alone == check._plan.peak(Tier.HOST) + check._plan.peak(Tier.DEVICE)
    bucket = layouts.bucket("b", "layers.0", 1024, shards=4, resident_ticks=((0, 1), (1, 2)))
    shared = replace(layouts.layout(bucket), common_host=True)
    check._plan = check._plan.amend([Stow(unit=RUN, reason="", layout=shared)], by="offload")
    rows = {each.owner: each.predicted for each in check.compared()}
    assert rows["process, peak"] == alone + 3 * PAGE_BYTES


def test_the_median_of_the_first_steps_counts(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """And of a run that ends before the last timed step those that it has made."""
    clock = iter([0.0, 9.0, 10.0, 11.0, 20.0, 22.0])  # step 2 takes 9 s, step 3 takes 1 s, step 4 takes 2 s
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    monkeypatch.setattr(plan_check, "plan_cost", lambda plan: SimpleNamespace(seconds=1.0))
    check = check_of(tmp_path)
    check._plan, check._timed = Plan.baseline(facts(machine=CPU)), range(2, 9)
    for step in (1, 2, 3, 4):
        check.on_step_begin(None, TrainerState(global_step=step - 1), None, model=Square())
        check.on_step_end(None, TrainerState(global_step=step, is_world_process_zero=True), None)
    check.on_train_end(None, TrainerState(global_step=4, is_world_process_zero=True), None)
    *_, title, row = capsys.readouterr().out.splitlines()
    assert (title, row) == ("measured in steps 2 to 4:", "time per step   2 s; simulated: 1 s, 50% less")
    monkeypatch.setattr(plan_check, "plan_cost", lambda plan: None)
    check.on_train_end(None, TrainerState(global_step=4, is_world_process_zero=True), None)
    assert capsys.readouterr().out == "measured in steps 2 to 4: 2 s per step, 8 tokens/s\n", "also without rates"


def test_the_median_of_each_unit_counts() -> None:
    found = [UnitTimes((i, 1), (1, 10 * i), (i, i), "") for i in (3.0, 1.0, 2.0)]
    assert median_of(found) == UnitTimes((2.0, 1), (1, 20.0), (2.0, 2.0), "")
