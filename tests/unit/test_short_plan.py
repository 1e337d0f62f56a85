"""The short plan: at most twelve lines, and each number is the plan's."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from deepstow.strategies.core.plan import Kind, Plan, Tier
from deepstow.strategies.core.sizes import human
from deepstow.strategies.planner.step_cost import cost_of, empty, plan_cost
from deepstow.strategies.report import short_plan
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.machine.profiles import profile
from deepstow.trainer.planning.from_config import budgets, plans_of, short
from tests.helpers.fakes import CPU, facts
from tests.helpers.tiny import LLAMA, run_config
from tests.unit.test_step_cost import FAST, known, planned

ROOM = {Tier.DEVICE: 1 << 50, Tier.HOST: 1 << 50}
ADVICE = [f"  training.key{number}: about +{number}% tokens per second" for number in (1, 2, 3, 4)]


def said(plan: Plan, budgets: Any = ROOM, **more: Any) -> list[str]:
    return short_plan.lines([plan], budgets, **{"more": "plan.txt", **more})


def row(lines: Sequence[str], label: str) -> str:
    (found,) = (line[short_plan.LABEL :] for line in lines if line[: short_plan.LABEL].strip() == label)
    return found


def test_every_number_is_the_plan_s() -> None:
    plan = planned(known(FAST), site="host")
    cost = plan_cost(plan)
    assert cost is not None
    lines = said(plan, {Tier.DEVICE: 10 << 30, Tier.HOST: 20 << 30})
    assert lines[0].startswith("plan: it fits. 6.29 M parameters, fp32, 1 rank on test gpu, ")
    assert row(lines, "device memory") == f"{human(plan.peak(Tier.DEVICE))} of 10.0 GiB"
    assert row(lines, "host memory").startswith(f"{human(plan.peak(Tier.HOST))} of 20.0 GiB")
    rate = plan.facts.run.tokens_per_step / cost.seconds
    assert row(lines, "time per step").startswith(f"{cost.seconds:.3g} s (simulated; rates: ")
    assert f"{rate:,.0f} tokens/s; bound by compute (" in row(lines, "time per step")
    state = sum(plan.total(kind, Tier.HOST) for kind in (Kind.MASTER, Kind.MOMENT))
    assert f"{human(state)} of optimizer state; updates: 100% on the CPU" in row(lines, "offload")


def test_a_step_that_moves_nothing_has_its_updates() -> None:
    """Which take 28 bytes per parameter of the device's memory; and is unknown without rates, or over ranks."""
    about = known(rates := replace(FAST, device_bytes_per_s=1e8))
    step = short_plan.simulated(Plan.baseline(about))
    update_s = 28 * about.num_trainable / 1e8
    assert step is not None and update_s > 1.0 and step.share == pytest.approx(1.0)
    assert step.seconds == pytest.approx(cost_of(about, empty(about), rates).seconds + update_s)
    assert short_plan.simulated(Plan.baseline(known(None))) is None
    assert "doctor --rates" in row(said(Plan.baseline(known(None))), "time per step")
    over = Plan.baseline(known(FAST, world_size=2))
    assert short_plan.simulated(over) is None and "deepstow search" in row(said(over), "time per step")


def test_at_most_twelve_lines_whatever_there_is_to_say() -> None:
    plan = planned(known(FAST), site="host")
    many = {f"strategy{number}": f"does {number}" for number in range(9)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(short_plan, "effects", lambda plan, asked: many)
        lines = said(plan, advice=ADVICE, notes=[f"note {number}" for number in range(9)])
    assert len(lines) == 12 and lines[-1] == f"{'more':<16}plan.txt"
    assert row(lines, "and also") == ", ".join(list(many)[3:])
    edits = [line[16:] for line in lines if "about +" in line]
    assert edits == [each.strip() for each in ADVICE[:3]] and row(lines, "faster with") == edits[0]
    few = said(plan, notes=["first", "second"])
    assert [line[16:] for line in few if line.startswith("note ")] == ["first", "second"]


def test_what_does_not_fit_is_said_first_and_by_how_much() -> None:
    plan = planned(known(FAST), site="host")
    tight = {Tier.DEVICE: plan.peak(Tier.DEVICE) - (1 << 20), Tier.HOST: 1 << 50}
    assert said(plan, tight)[0].startswith("plan: it may fit, with less to spare than is safe. ")
    small = replace(plan.facts.machine, device_bytes=plan.peak(Tier.DEVICE) - (1 << 20))
    lines = said(replace(plan, facts=replace(plan.facts, machine=small)), tight, advice=ADVICE)
    assert lines[0].startswith("plan: it does not fit: device lacks 1.0 MiB. ")
    assert not any("about +" in line for line in lines), "faster is not what is needed"


def test_without_an_accelerator_both_memories_are_one() -> None:
    plan = Plan.baseline(facts(machine=replace(CPU, device_bytes=1 << 30, host_bytes=1 << 30)))
    lines = said(plan)
    assert row(lines, "device memory").endswith("(no accelerator: of this machine's own)")
    assert not any(line.startswith("host memory") for line in lines)
    short_by = plan.peak(Tier.DEVICE) + plan.peak(Tier.HOST) - 7
    small = replace(plan, facts=replace(plan.facts, machine=replace(CPU, device_bytes=1 << 30, host_bytes=short_by)))
    assert short_plan.missing(small, ROOM) == {Tier.HOST: 7}


def test_the_budgets_are_those_of_the_config() -> None:
    """Beside them what Python has on the host; without a strategy that has any, nine tenths."""
    card = profile("rtx4090-pcie4")
    given = {"offload": {"gpu_memory": "64MiB", "host_memory": "3GiB", "site": "host"}}
    for strategies, device, host in ((given, 64 << 20, 3 << 30), ({}, 0, 0)):
        config = run_config(LLAMA, strategies=strategies, data={"path": "pydoc", "max_length": 16}, bf16=True)
        (plan,) = plans_of(config, Ranks(), card)
        own, found = plan.facts.machine, budgets(config, plan)
        assert found[Tier.DEVICE] == (device or int(0.9 * (own.device_bytes + own.device_overhead_bytes)))
        assert found[Tier.HOST] == (host + own.runtime_host_bytes if host else int(0.9 * own.host_bytes))
    assert short(config, [plan], [], [], more="x").lacks == ""
    tiny = replace(plan, facts=replace(plan.facts, machine=replace(own, device_bytes=1 << 10)))
    assert re.search("short of what is safe: the device .*deepstow fit", short(config, [tiny], [], [], more="x").lacks)
