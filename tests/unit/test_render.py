"""The table a person reads: every tensor has a row, every row has who and why, the totals say what is missing."""

import re
from dataclasses import replace

import pytest

from deepstow.strategies.core.compose import compose
from deepstow.strategies.core.facts import Facts, MachineFacts, Precision
from deepstow.strategies.core.plan import INPUT, RUN, EngineSet, Keep, Kind, Plan, Reserve, Tier
from deepstow.strategies.core.registry import find
from deepstow.strategies.core.sizes import human
from deepstow.strategies.report.plan_table import rows, summary, table
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.planning.from_config import refuse_impossible
from tests.helpers.fakes import CPU, GPU, block, embedding, facts, head


def zero(stage: int, known: Facts) -> Plan:
    return compose({"zero": find("zero").model_validate({"stage": stage})}, known)


def cells(plan: Plan) -> list[tuple[str, str, str]]:
    """Unit, tensors and who decided, for every row."""
    return [(row.unit, row.tensors, row.decided_by) for row in rows(plan)]


def test_every_unit_and_kind_has_a_row_with_who_decided_it() -> None:
    plan = zero(2, facts(precision=Precision.BF16, world_size=2))
    expected: list[tuple[str, str, str]] = []
    for unit in plan.facts.units:  # every size is different
        expected += [(unit.name, kind.value, "zero") for kind in Kind]
        expected += [(unit.name, "saved for backward", "baseline")]
    expected += [("zero: reduce bucket", "buffer, always", "zero")]
    expected += [("zero: fp32 gradients", "buffer, optimizer step", "zero")]
    assert cells(plan) == expected


def test_what_does_not_exist_has_no_row() -> None:
    plan = Plan.baseline(facts(embedding(10), block(0, 20, num_trainable=0)))
    assert [(unit, tensors) for unit, tensors, _ in cells(plan)] == [
        ("embedding", "parameters"),
        ("embedding", "gradients"),
        ("embedding", "moments"),  # fp32 has no separate masters
        ("layers.0", "parameters"),  # frozen
    ]


def test_blocks_fold_into_a_row_per_home_wherever_their_tensors_are() -> None:
    """Every other block rests on the host; the sizes of both rows are all there is."""
    plan = Plan.baseline(facts(embedding(10), *(block(index, 100) for index in range(32)), head(10)))
    moved = [
        replace(plan.share(f"layers.{index}", kind), tier=Tier.HOST)
        for index in range(1, 32, 2)
        for kind in (Kind.MOMENT, Kind.GRAD)
    ]
    lines = table(plan.amend(moved, by="offload")).splitlines()
    blocks = [line for line in lines if line.startswith("layers.")]
    assert [line.split("  ")[0] for line in blocks] == ["layers.0..31 x32", "layers.1..31 x16"]
    device, host = (re.split("  +", line)[3:] for line in blocks)
    assert device == [human(32 * 400), human(16 * 400), human(16 * 800), "baseline", "plain fp32"]
    assert host == [human(16 * 400), human(16 * 800), "offload", "plain fp32"]
    assert len(lines) < 15


# Totals


def with_memory(device: int, host: int, name: str = "gpu") -> Plan:
    """800 bytes of parameters, 800 of gradients, 1600 of moments, nothing saved; peak 3200."""
    plan = Plan.baseline(facts(block(0, 200), machine=MachineFacts(name, device, host)))
    return plan.amend([Reserve(unit=RUN, reason="", owner="pinned", num_bytes=100, tier=Tier.HOST)], by="a")


def test_totals_say_what_is_free_or_too_much() -> None:
    assert list(summary(with_memory(1 << 20, 1 << 10))) == [
        "predicted peak per rank, device: 3.1 KiB of 1.0 MiB (1020.9 KiB free); training state 3.1 KiB",
        "predicted peak per rank, host: 100 B of 1.0 KiB (924 B free); training state 0 B",
        "while the model is loaded, per rank, host: up to 800 B",
    ]
    device, host, *_ = summary(with_memory(3000, 60))
    assert "3.1 KiB of 2.9 KiB (200 B too much)" in device and "100 B of 60 B (40 B too much)" in host
    stage = Plan.baseline(facts(block(0, 200), stages=2, world_size=2, model_params=1000, largest_param=30))
    assert list(summary(stage))[-2:] == [
        "while the model is loaded, per rank, host: up to 920 B",  # its own, one by one
        "while the model is written, first rank, host: up to 240 B",  # the largest, twice
    ]
    split = EngineSet(unit=RUN, reason="", key="zero_optimization.stage", value=3)  # as it is made
    assert len(list(summary(with_memory(1 << 20, 1 << 10).amend([split], by="zero")))) == 2


def test_fused_experts_that_stay_as_they_are_are_said() -> None:
    packed = replace(block(0, 1000, num_trainable=0), quantised=100, quantised_bytes=50)
    plan = Plan.baseline(facts(packed, num_experts=4, frozen_bytes=2))
    assert sum(line.startswith("fused experts are not quantised: 1.8 KiB stay") for line in summary(plan)) == 1
    for dense in (facts(packed, frozen_bytes=2), facts(replace(packed, quantised=950), num_experts=4, frozen_bytes=2)):
        assert not any("experts" in line for line in summary(Plan.baseline(dense)))


def test_without_an_accelerator_the_device_is_the_host() -> None:
    lines = list(summary(Plan.baseline(facts(machine=CPU))))
    assert len(lines) == 1
    assert lines[0].startswith("predicted peak per rank, device (this machine's RAM): ")


def test_a_state_that_cannot_fit_ends_the_run_with_the_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_impossible(with_memory(3000, 1 << 20))
    assert str(caught.value) == (
        "the training state needs 3.1 KiB on each rank's device, which has 2.9 KiB: 200 B too much"
    )
    plan = Plan.baseline(facts(block(0, 200), machine=MachineFacts("gpu", 1 << 20, 1000)))
    on_host = plan.amend([replace(plan.share("layers.0", Kind.MOMENT), tier=Tier.HOST)], by="offload")
    with pytest.raises(ConfigError, match=r"needs 1\.6 KiB on each rank's host, which has 1000 B: 600 B too much"):
        refuse_impossible(on_host)


def test_places_on_the_host_are_as_certain_as_the_state() -> None:
    machine = replace(GPU, host_bytes=1000)
    plan = compose({}, facts(block(0, 8, 100), head(8), machine=machine))
    refuse_impossible(plan)
    sent = Keep(
        unit="layers.0", reason="", policy="full", saved_bytes=0, hosted=(INPUT,), hosted_bytes=machine.host_bytes
    )
    with pytest.raises(
        ConfigError, match=r"each rank's host.*write strategies\.recompute\.activation_offloading: false"
    ):
        refuse_impossible(plan.amend([sent], by="a test"))


def test_saved_tensors_are_an_estimate_and_end_nothing() -> None:
    known = facts(block(0, 200, saved_bytes=1 << 30), machine=MachineFacts("gpu", 3200, 0))
    plan = Plan.baseline(known)
    refuse_impossible(plan)
    assert "too much" in next(iter(summary(plan)))
    with pytest.raises(ConfigError):
        refuse_impossible(Plan.baseline(replace(known, machine=MachineFacts("gpu", 3199, 0))))


def test_human() -> None:
    texts = {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", -2048: "-2.0 KiB", 1 << 30: "1.0 GiB", 3 << 40: "3.00 TiB"}
    assert {num_bytes: human(num_bytes) for num_bytes in texts} == texts
