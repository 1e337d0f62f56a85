"""Offload and buffers: one plan whose table adds up to the arenas, options as people write them, live models."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from pydantic import ValidationError
from torch import nn

from deepstow.strategies.core.compose import compose, in_order
from deepstow.strategies.core.facts import Facts, MachineFacts, Precision, Rates, Tier, UnitKind
from deepstow.strategies.core.formats import FORMATS, Format
from deepstow.strategies.core.layout import PAGE_BYTES, Site, common_bytes
from deepstow.strategies.core.plan import Kind, Plan
from deepstow.strategies.core.protocol import BITWISE, Refusal
from deepstow.strategies.core.registry import find
from deepstow.strategies.core.sizes import human, parse_bytes, written
from deepstow.strategies.core.validate import validate
from deepstow.strategies.planner.memory_rows import resting
from deepstow.strategies.planner.network import from_host
from deepstow.strategies.planner.weight_schedule import ASSUMED
from deepstow.strategies.report import full_report, plan_json
from deepstow.strategies.report.plan_json import PlanFile
from deepstow.strategies.report.plan_table import bucket_lines, rows, table
from deepstow.trainer.planning.plan_for import plan_for
from tests.helpers.fakes import CPU, block, facts, run_facts
from tests.helpers.layouts import random_facts, transformer
from tests.unit.test_placement_search import options

MIB, GIB = 1 << 20, 1 << 30


def offload(**options: Any) -> Any:
    return find("offload").model_validate(options)


def plan_of(known: Facts, *, debug: bool = False, stage: int = 0, **options: Any) -> Any:
    zero = {"zero": find("zero").model_validate({"stage": stage})} if stage else {}
    buffers = find("buffers").model_validate({"debug": debug})
    return compose({"offload": offload(**options), "buffers": buffers, **zero}, known)


def in_table(plan: Plan, tier: Tier) -> int:
    """The table's bytes at one tier, without what forward saves."""
    return sum(row.num_bytes for row in rows(plan) if row.tier is tier and row.tensors != "saved for backward")


# The plan


@settings(max_examples=20, deadline=None)
@given(random_facts(), options)
def test_the_table_adds_up_to_the_arenas_and_plan_json_has_all_of_it(known: Facts, asked: dict[str, Any]) -> None:
    size = asked["bucket_bytes"]
    if asked["shards"] > 1 and known.run.accumulation > 1:
        asked["gradients"] = "auto"  # over ranks they wait on the device
    known = replace(known, run=replace(known.run, world_size=asked["shards"]))
    given = {name: asked[name] for name in ("site", "weights", "gradients", "reduction")}
    given |= {"prefetch": "auto" if asked["prefetch"] is None else asked["prefetch"]}
    plan = plan_of(known, stage=3, bucket_size=f"{size}B" if size else "auto", **given)
    saved = sum(unit.saved_bytes for unit in known.units)
    assert in_table(plan, Tier.DEVICE) == plan.addresses.num_bytes(Tier.DEVICE)
    assert in_table(plan, Tier.HOST) == plan.addresses.num_bytes(Tier.HOST)
    assert plan.peak(Tier.DEVICE) == plan.addresses.num_bytes(Tier.DEVICE) + saved
    assert plan.peak(Tier.HOST) == plan.addresses.num_bytes(Tier.HOST) + known.machine.runtime_host_bytes
    assert validate(plan.layout, plan.addresses, known.params) == []
    written = json.dumps(full_report.to_json(plan, None))
    assert plan_json.problems(written) == []
    read = PlanFile.model_validate_json(written)
    assert (read.facts, read.layout, read.addresses()) == (plan.facts, plan.layout, plan.addresses)


def test_mixed_precision_on_the_host_by_hand() -> None:
    known = transformer(dtype="bfloat16", groups=False, precision=Precision.BF16)
    plan = plan_of(known, site="host")
    params = known.num_params
    assert [plan.total(kind, Tier.DEVICE) // params for kind in Kind] == [2, 0, 0, 0]
    assert plan.states(Tier.HOST) == (2 + 4 + 8) * params
    travelling = plan_of(known, site="host", weights="streamed")
    blocks = sum(unit.num_params for unit in known.units[1:-1])
    assert travelling.total(Kind.PARAM, Tier.HOST) == 2 * blocks
    reserves = {reserve.owner: reserve.num_bytes for reserve in travelling.reserves(Tier.DEVICE)}
    block_of_one = travelling.layout.buckets[1].weight_bytes  # type: ignore[union-attr]  # there is one
    assert reserves["device: slots for weights"] == 3 * block_of_one


def test_small_tensors_that_stay_are_shown_beside_those_that_leave() -> None:
    plan = plan_of(transformer(blocks=4), site="host", weights="streamed")
    parameters = [row for row in rows(plan) if row.unit == "layers.0" and row.tensors == "parameters"]
    assert [(row.tier, row.num_bytes) for row in parameters] == [(Tier.HOST, 4 * 12 * 64 * 64), (Tier.DEVICE, 4 * 64)]
    assert [row.reason for row in parameters] == ["fetched for use", "always present"]
    assert plan.share("layers.0", Kind.PARAM).tier is Tier.HOST


def test_offload_brings_its_buffers() -> None:
    assert list(in_order({"offload": offload()})) == ["cross_entropy", "offload", "buffers"]
    plan = compose({"offload": offload()}, transformer())
    assert plan.place is not None and not plan.place.debug
    debugged = plan_of(transformer(), debug=True)
    assert debugged.place is not None and debugged.place.debug
    assert plan.idle.keys() == {"cross_entropy"}
    assert "idle: strategies.cross_entropy: the model does not compute its loss by" in table(plan)
    alone = compose({"buffers": find("buffers").model_validate({})}, transformer())
    assert alone.idle == {"buffers": "nothing travels: strategies.offload is not on"}
    assert alone.layout is None and alone.addresses is None


def test_zero_beside_offload_shares_its_buckets() -> None:
    """In this engine; DeepSpeed's is not used. Of an even number of like parameters no span has more than a part."""
    known = transformer(world_size=2)

    def shared(stage: int, known: Facts = known, **options: Any) -> Plan:
        zero = find("zero").model_validate({"stage": stage})
        return compose({"offload": offload(**options), "zero": zero}, known)

    whole = plan_of(known, site="host", weights="streamed")
    assert shared(0, site="host", weights="streamed").layout == whole.layout
    third = shared(3, site="host", weights="streamed")
    assert third.engine() == {} and third.layout is not None and whole.layout is not None
    assert {bucket.shards for bucket in third.layout.buckets} == {2}
    assert third.total(Kind.MOMENT) == -(-whole.total(Kind.MOMENT) // 2)
    assert third.peak(Tier.HOST) < 0.7 * whole.peak(Tier.HOST)
    first = shared(1, site="host").layout
    assert first is not None and all(bucket.resident and bucket.shards == 2 for bucket in first.buckets)
    gradients = [shared(stage, site="device", weights="resident").total(Kind.GRAD) for stage in (1, 2, 3)]
    blocks = {unit.name for unit in known.units if unit.kind is UnitKind.BLOCK}
    matrices = sum(param.num_elements for param in known.params if param.unit in blocks and "norm" not in param.name)
    assert gradients[0] - gradients[1] == gradients[0] - gradients[2] == matrices // 2 * 4, "norms stay whole"
    several = replace(known, run=replace(known.run, accumulation=2))
    assert shared(2, several, site="device").total(Kind.GRAD) == gradients[0], "micro-batches are added first"
    with pytest.raises(Refusal, match="ranks that share the state, or the model, agree on a step first"):
        shared(3, update_in_backward=True)


def test_what_an_arena_has_beside_tensors_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """No row takes up what the others do not say: what is left is room between parameters."""
    some = {"site": "host", "host_memory": "2300KiB", "disk": "/", "disk_memory": "1GiB"}
    for asked in ({"site": "host"}, {"site": "streamed", "weights": "streamed"}, some):
        plan = plan_of(transformer(), **asked)
        assert plan.layout is not None
        on_disk = {bucket.on_disk for bucket in plan.layout.buckets}
        assert asked is not some or on_disk == {True, False}, "a part of it"
        left = [reserve.num_bytes for tier in Tier for reserve in plan.reserves(tier) if "alignment" in reserve.owner]
        assert sum(left) < 2 * PAGE_BYTES * len(plan.layout.buckets)
    monkeypatch.setitem(FORMATS, "six", Format(bits=6, uses=("moments",)))  # type: ignore[arg-type]
    moments = resting(plan.layout.buckets[1], replace(plan.layout, moments_as="six"), Kind.MOMENT)
    assert moments.num_bytes(1000) == 1500


def test_where_ranks_get_weights_from() -> None:
    """From the host that all of them are on, unless the network is faster; asked for across machines it is refused."""
    link = 24e9
    slow = replace(ASSUMED, up_bytes_per_s=link, dram_bytes_per_s=60e9, net_bytes_per_s=None)
    fast = replace(slow, net_bytes_per_s=10 * link)

    def common(rates: Rates | None, here: int, stage: int = 3, on: Mapping[str, Any] = {}, **options: Any) -> bool:
        known = transformer(world_size=4)
        known = replace(known, machine=replace(known.machine, rates=rates, ranks=here, **on))
        asked = {"weights": "streamed"} if stage == 3 else {}
        made = plan_of(known, stage=stage, site="host", **asked, **options).layout
        assert made is not None
        return common_bytes(made) > 0

    cpu, unordered = {"name": "cpu"}, {"in_order": False}
    assert common(slow, 4) and common(slow, 4, stage=1) and common(None, 4, on=cpu)
    assert common(fast, 4, gather="host") and common(None, 4, gather="host")
    assert not common(slow, 4, on=unordered) and not common(fast, 4) and not common(slow, 2) and not common(None, 4)
    assert not common(slow, 4, gather="network")
    refused: list[tuple[str, dict[str, Any]]] = [
        ("only on x86 may ranks read each other's memory", {"here": 4, "on": unordered}),
        ("4 ranks are on machines of 2 each; write auto or network", {"here": 2}),
        ("is of parts of weights, which ranks have with strategies.zero only", {"here": 4, "stage": 0}),
    ]
    for words, case in refused:
        with pytest.raises(Refusal, match=f"offload.gather = 'host': {words}"):
            common(slow, gather="host", **case)
    eight = replace(fast, net_bytes_per_s=link)  # peers as fast as the link: 7/8 over the one, or all over the other
    assert [from_host(replace(eight, net_bytes_per_s=share * link), 8) for share in (0.8, 0.9)] == [True, False]


@pytest.mark.parametrize("compared", [True, False])
def test_whether_drives_are_believed_is_in_the_plan(compared: bool) -> None:
    plan = plan_of(transformer(), disk="/fast", disk_memory="1GiB", disk_checksums=compared)
    assert plan.layout is not None and plan.layout.disk_checksums is compared


def test_refusals() -> None:
    passing: dict[str, Any] = {"gradients": "passing"}
    for words, keys, run in (
        ("disk = '/fast': how much of it", {"disk": "/fast"}, {}),
        ("disk_memory = '1GiB': of which disk", {"disk_memory": "1GiB"}, {}),
        ("gradients = 'passing': .*max_grad_norm: 0", passing, {"max_grad_norm": 1.0}),
        ("gradients = 'passing': .* update_in_backward: auto", passing | {"update_in_backward": False}, {}),
        ("gradients = 'passing': .* not fp16", passing, {"precision": Precision.FP16}),
        ("gradients = 'passing': is for what the CPU updates", passing | {"site": "streamed"}, {}),
        ("gradients = 'passing': is for weights that are their own", passing, {"precision": Precision.BF16}),
        ("gradients = 'passing': is for one rank, and there are 2", passing, {"world_size": 2}),
    ):
        with pytest.raises(Refusal, match=words):
            plan_of(transformer(**run), **keys)
    with pytest.raises(AssertionError, match="do not list them"):
        plan_of(facts(block(0, 10)))


def test_updates_start_in_backward_unless_they_wait_for_the_norm_or_the_scale_of_the_loss() -> None:
    cases = (("auto", 0.0, True), ("auto", 1.0, False), (False, 0.0, False))
    for asked, norm, expected in cases:
        for precision in (Precision.FP32, Precision.FP16):
            plan = plan_of(transformer(max_grad_norm=norm, precision=precision), update_in_backward=asked)
            assert plan.layout.in_backward is (expected and precision is Precision.FP32)


def test_parity() -> None:
    assert offload().parity(run_facts()) == BITWISE
    assert offload().parity(run_facts(precision=Precision.BF16)).tolerance > 0
    shared = offload().beside({"zero": find("zero").model_validate({"stage": 1})})
    assert shared.parity(run_facts(world_size=2)) == BITWISE
    assert (
        shared.parity(run_facts(world_size=4)).tolerance == offload().parity(run_facts(world_size=3)).tolerance == 1e-3
    )


def test_a_fast_reduction_needs_no_memory_to_receive_gradients() -> None:
    """And the plan says what it saves, and how far a sum may be from the exact one: 3 eps of fp32 on four ranks."""
    known, one = transformer(world_size=4), transformer()
    exact, fast = (plan_of(known, stage=3, site="host", reduction=each) for each in ("exact", "fast"))
    largest = max(bucket.weight_bytes for bucket in exact.layout.buckets)
    assert exact.peak(Tier.DEVICE) - fast.peak(Tier.DEVICE) == largest
    assert replace(fast.layout, reduction="exact") == exact.layout
    said = (
        f"which saves {human(largest)} of the device; a sum differs from the exact one by at most 3.6e-07 of the sizes"
    )
    assert said in bucket_lines(fast)[-1]
    assert bucket_lines(plan_of(one, stage=3, reduction="fast"))[-1].startswith("reduction: fast has no effect")


# Budgets


def machine(device: int, host: int, runtime: int = 0, name: str = "gpu") -> MachineFacts:
    return MachineFacts(name, device, host, runtime)


def test_budgets() -> None:
    roomy = machine(100 * GIB, 200 * GIB, 10 * GIB)

    def budgets(**options: Any) -> tuple[int, int]:
        request = offload(**options).request(transformer(machine=roomy))
        return request.device_bytes, request.host_bytes

    assert budgets() == (90 * GIB, 170 * GIB)
    assert budgets(gpu_memory=0.5, host_memory=0.5) == (50 * GIB, 90 * GIB)
    assert budgets(gpu_memory="20GiB", host_memory="30GiB") == (20 * GIB, 30 * GIB)
    assert budgets(gpu_memory=4096, host_memory="1.5KiB") == (4096, 1536)
    roomy = replace(roomy, ranks=4)  # a size is for all of them, and a share of each one's part is one of the whole
    assert budgets(host_memory="30GiB")[1] == 30 * GIB // 4 and budgets(host_memory=0.5)[1] == 90 * GIB


@pytest.mark.parametrize("local_steps", [0, 5])
def test_what_a_refusal_says_to_write_is_enough_for_all_ranks(local_steps: int) -> None:
    """Also for the outer weights of ranks that train alone, which are beside the engine's memory on the host."""
    known = transformer(world_size=4, machine=replace(machine(100 * GIB, GIB), ranks=4))
    others = {"collectives": find("collectives")(local_steps=local_steps)} if local_steps else {}
    known = replace(known, run=replace(known.run, stowed=True))
    known = others["collectives"].narrowed(known, 0) if others else known

    def planned(host_memory: str) -> Plan:
        return compose({"offload": offload(site="host", host_memory=host_memory), **others}, known)

    with pytest.raises(Refusal, match=r"too much for 256 B; write .* or more \(for 4 ranks\)") as caught:
        planned("1KiB")
    enough = str(caught.value).split("write ")[1].split(" or more")[0]
    plan = planned(enough)
    assert bool(local_steps) == any(each.owner == "collectives: outer state" for each in plan.reserves(Tier.HOST))
    assert 0 <= parse_bytes(enough) // 4 - plan.peak(Tier.HOST) < MIB


def test_both_homes_are_shown_on_a_machine_where_they_are_one_memory() -> None:
    assert "host (the same RAM): " in table(plan_of(transformer(machine=CPU), site="host"))
    alone = plan_of(transformer(machine=CPU))
    assert alone.layout is not None and {b.site for b in alone.layout.buckets} == {Site.DEVICE}, "nothing moves"
    assert offload().request(transformer(machine=CPU)).device_bytes == CPU.device_bytes


def test_sizes() -> None:
    sizes = {"20GiB": 20 * GIB, "512 MiB": 512 << 20, "20GB": 20 * 10**9, "1.5kb": 1500, "4096": 4096, "1tib": 1 << 40}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for text in ("", "GiB", "-5GiB", "5 apples", "5GiBs", "1e9", "12"):
        with pytest.raises(ValueError, match=r"must be a size, as in|write the unit, as in"):
            parse_bytes(text)
    assert parse_bytes("8388607TiB") < 1 << 63
    for text in ("8388608TiB", f"1{'0' * 22}TiB", "9" * 400):
        with pytest.raises(ValueError, match="no machine has as many bytes"):
            parse_bytes(text)
    for value in (0.0, 1.5, float("nan"), 0, 80, "80", "most", 1 << 63):
        with pytest.raises(ValidationError):
            offload(gpu_memory=value)
    for num_bytes in (1024, 1025, 10**6, 16 << 20, 10**12 + 1):  # what a refusal says to write
        assert num_bytes <= parse_bytes(written(num_bytes)) < num_bytes + max(1024, num_bytes // 15)


# Live models


def test_groups_that_cannot_be() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="bias requires a gradient and is in no parameter group"):
        plan_for(model, [model.weight], max_grad_norm=None)
    with pytest.raises(ValueError, match="weight is in more than one parameter group"):
        plan_for(model, [{"params": [model.weight, model.bias]}, {"params": [model.weight]}], max_grad_norm=None)
    with pytest.raises(ValueError, match=r"of shape \(3,\) is not in the model"):
        plan_for(model, [nn.Parameter(torch.zeros(3))], max_grad_norm=None)
    with pytest.raises(ValueError, match="no parameters to train"):
        plan_for(model, [], max_grad_norm=None)
    with pytest.raises(ValueError, match="dtype float64: use float32 or bfloat16"):
        plan_for(model.double(), max_grad_norm=None)


def test_over_ranks_micro_batches_are_summed_on_the_device() -> None:
    """Each rank adds up its own first, then the ranks are summed: both where the gradients are."""
    several = transformer(world_size=2, accumulation=3)
    layout = plan_of(several, site="host").layout
    assert layout is not None
    assert {bucket.grad_tier for bucket in layout.buckets} == {Tier.DEVICE}
    with pytest.raises(Refusal, match=r"strategies\.offload\.gradients"):
        plan_of(several, site="host", gradients="host")
