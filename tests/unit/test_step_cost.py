"""The cost of a step, against arithmetic that a person can do."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from deepstow.strategies.core.compose import compose, in_order
from deepstow.strategies.core.facts import (
    NO_WORK,
    Choices,
    Compression,
    Facts,
    Operator,
    Param,
    Precision,
    Rates,
    Tier,
    UnitKind,
    Work,
)
from deepstow.strategies.core.layout import Item, Site
from deepstow.strategies.core.on_disk import disk_bytes, rewritten_bytes
from deepstow.strategies.core.plan import Plan
from deepstow.strategies.core.protocol import MemoryRefusal
from deepstow.strategies.core.registry import find
from deepstow.strategies.core.validate import validate
from deepstow.strategies.planner.addresses import place
from deepstow.strategies.planner.network import gather_rate, leaving, sums_slowdown
from deepstow.strategies.planner.problem import Link, Problem, Tick, Weight
from deepstow.strategies.planner.step_cost import (
    StepCost,
    _together,
    evictions_of,
    plan_cost,
    problem_of,
    unit_flops,
    unit_seconds,
)
from deepstow.strategies.planner.tasks import Resource, build_tasks
from deepstow.strategies.planner.weight_schedule import ASSUMED
from deepstow.strategies.report import full_report
from deepstow.trainer.run.checkpoints.saving import estimated_bytes
from tests.helpers.fakes import GPU, choosing
from tests.helpers.layouts import facts_of

FAST = replace(
    ASSUMED, gemm_fp32_flops_per_s=1e12, gemm_bf16_flops_per_s=1e12, up_bytes_per_s=1e12, down_bytes_per_s=1e12,
    duplex_factor=1.0, link_latency_s=0.0, dram_bytes_per_s=1e12, update_fp32_params_per_s=1e15,
    update_bf16_params_per_s=1e15, device_bytes_per_s=1e18, launch_s=0.0,
)  # fmt: skip
BLOCK = 1 << 20  # elements


def known(rates: Rates | None = FAST, blocks: int = 4, **run: Any) -> Facts:
    names = ("embedding", *(f"layers.{index}" for index in range(blocks)), "head")
    params = (Param(f"{name}.weight", name, BLOCK, "float32", 0) for name in names)
    run = {"forward_flops": 5 * 10**12, "max_grad_norm": 1.0, **run}
    return facts_of(*params, machine=replace(GPU, rates=rates), **run)


def planned(about: Facts, **offload: Any) -> Any:
    return compose({"offload": find("offload").model_validate({"host_memory": "1TiB", **offload})}, about)


def priced_of(plan: Plan) -> StepCost:
    cost = plan_cost(plan)
    assert cost is not None
    return cost


def test_with_free_copies_and_updates_a_step_is_its_compute() -> None:
    for options in ({"site": "device"}, {"site": "host"}, {"site": "host", "weights": "streamed"}):
        priced = priced_of(planned(known(), **options))
        assert priced.compute_seconds == pytest.approx(15.0)  # 5 s forward, twice that backward
        assert priced.seconds == pytest.approx(15.0, rel=1e-3)
        assert priced.outcome.binds is Resource.COMPUTE


@pytest.mark.parametrize(
    ("more", "method", "sent"),
    [({}, None, 4.0), ({"zero": {"stage": 1}}, None, 4.0), ({}, "topk", 0.08), ({"zero": {"stage": 1}}, "topk", 0.08)],
)
def test_gradients_that_two_ranks_send(more: dict[str, Any], method: Any, sent: float) -> None:
    """Bytes per element: in a ring all of a gradient, of spans half and the other half of a parameter that is cut, and
    under top-k 8 of each hundredth. Coding costs nothing here."""
    fast = replace(FAST, net_bytes_per_s=1e6)
    how = None if method is None else Compression(method, 0.01, 4, 10)
    about = known(fast, world_size=2, compression=how, stowed=True)
    options = {"site": "device", "weights": "resident", "host_memory": "1TiB"}
    strategies = {name: find(name).model_validate(each) for name, each in {"offload": options, **more}.items()}
    layout = compose(strategies, about).layout
    assert layout is not None
    found = {weight.update.exchange_bytes for weight in problem_of(about, layout, fast).weights if weight.update}
    assert [each / BLOCK for each in found] == [pytest.approx(sent, rel=1e-2)]


@pytest.mark.parametrize(("here", "rate", "wait"), [(4, 1e9, 1e-3), (2, 2e8, 1e-2)])
def test_tensor_ranks_sum_hidden_states_around_divided_layers(here: int, rate: float, wait: float) -> None:
    """Four ranks send 3/4 of the hidden states out and back for each sum, between two machines over a card per rank;
    a block that runs again does one of them more, whether Transformers runs it again or ``recompute`` does.
    """
    net = {"net_bytes_per_s": 1e9, "net_latency_s": 1e-3, "net_across_bytes_per_s": 1e8, "net_across_latency_s": 1e-2}
    more = {"hidden_size": 1 << 20, "sums": (2, 5, 1), "stowed": True, "world_size": 4}
    rates = replace(FAST, **net)
    units = known().units
    work = Work(flops=10**9)
    choices = Choices(input_bytes=0, running_bytes=0, operators=(Operator("linear", 1, work),), rest=NO_WORK)
    blocks = [replace(unit, saved_bytes=1 << 20, choices=choices) for unit in units]

    def passes(tensor: int, *, again: bool = False, **run: Any) -> float:
        about = known(rates, tensor=tensor, **{**more, **run})
        kept = (replace(unit, again=work) if again and unit.kind is UnitKind.BLOCK else unit for unit in blocks)
        about = replace(about, units=tuple(kept), machine=replace(about.machine, ranks=here))
        return sum(map(sum, unit_seconds(about, rates)))

    run = known(rates, **more).run
    once = 2 * (0.75 * run.micro_batch * run.sequence * (1 << 20) * run.precision.element_bytes / rate + 2 * wait)
    assert passes(4) - passes(1) == pytest.approx(4 * 7 * once)
    assert passes(4, again=True) - passes(1, again=True) == pytest.approx(4 * 8 * once)
    assert passes(4, recomputes=True) - passes(1, recomputes=True) == pytest.approx(4 * 8 * once)
    assert passes(4, stowed=False) == passes(1, stowed=False), "DeepSpeed's engine: the search prices them"


@pytest.mark.parametrize(("ranks", "drives"), [(1, 1), (2, 1), (1, 2)])
def test_ranks_of_a_machine_share_its_disks(ranks: int, drives: int) -> None:
    """A drive is as fast whatever there is beside it, and several have equal parts of the state."""
    rates = replace(FAST, disk_read_bytes_per_s=2e6 / drives, disk_write_bytes_per_s=1e6 / drives).shared_by(ranks)
    about = known(rates, blocks=8, world_size=ranks)
    about = replace(about, machine=replace(about.machine, ranks=ranks))
    sizes = {"host_memory": f"{128 * ranks}MiB", "disk_memory": f"{64 * ranks}MiB"}
    disk = ["/fast", "/other"][:drives]
    plan = planned(about, site="host", disk=disk, **sizes)
    assert plan.layout is not None and disk_bytes(plan.layout) == 64 << 20
    cost = priced_of(plan)
    assert cost.seconds == pytest.approx(ranks * (64 << 20) * (1 / 2e6 + 1 / 1e6), rel=1e-3)
    (line,) = full_report.disk_lines(plan, cost)
    speed = f"read 0.002 GB/s, written 0.001{' by 2 drives together' if drives == 2 else ''}"
    assert f"{64 * ranks}.0 MiB of" in line
    assert f"{speed} (assumed; deepstow doctor --rates --disk {' '.join(disk)} measures)" in line
    days = "10,417" if drives == 1 else "20,833"
    assert f"0.0024 TB written per hour (a drive that is rated for 600 TB lasts {days} days)" in line
    with pytest.raises(MemoryRefusal, match=r"24\.0 MiB too much"):
        planned(about, site="host", disk=disk, **sizes | {"disk_memory": f"{32 * ranks}MiB"})


def test_a_frozen_base_is_read_twice_per_pass() -> None:
    """Of weights that leave; what has no room on the device and on the host."""
    slow = replace(FAST, disk_read_bytes_per_s=1e6)
    names = ("embedding", *(f"layers.{index}" for index in range(16)), "head")
    params = [Param(f"{name}.base", name, BLOCK, "float32", None) for name in names]
    params += [Param(f"{name}.adapter", name, 1024, "float32", 0) for name in names]
    for accumulation in (1, 2):
        about = facts_of(
            *params,
            machine=replace(GPU, rates=slow),
            forward_flops=10**9,
            max_grad_norm=0.0,
            accumulation=accumulation,
            adapters=True,
        )
        given = {"gpu_memory": "24MiB", "host_memory": "36MiB", "weights": "streamed", "site": "device"}
        plan = planned(about, disk="/fast", disk_memory="64MiB", **given)
        there = [bucket for bucket in plan.layout.buckets if bucket.weight_on_disk and not bucket.resident]
        assert sum(bucket.weight_bytes for bucket in there) == disk_bytes(plan.layout) >= 32 << 20
        cost = priced_of(plan)
        ends = 2 * sum(b.weight_bytes for b in there[-3:])  # the last ones are there when backward begins
        assert 0 <= 2 * disk_bytes(plan.layout) * accumulation / 1e6 - cost.seconds <= 2 * ends * accumulation / 1e6
        (line,) = full_report.disk_lines(plan, cost)
        assert "MiB of frozen weights, read in forward and in backward; read 0.001 GB/s (assumed" in line
        assert "optimizer state" not in line and "written" not in line
    with pytest.raises(MemoryRefusal):
        planned(about, disk="/fast", disk_memory="1MiB", **given)


def test_trained_weights_are_written_once_and_read_after_that() -> None:
    """In forward and in backward, but for those that are there when backward begins."""
    names = ("embedding", *(f"layers.{index}" for index in range(16)), "head")
    params = [Param(name, name, BLOCK, "bfloat16", 0) for name in names]
    machine = replace(GPU, rates=FAST)
    about = facts_of(*params, machine=machine, forward_flops=10**9, max_grad_norm=0.0, precision=Precision.BF16)
    given = {"gpu_memory": "24MiB", "host_memory": "52MiB", "weights": "streamed", "site": "host"}
    plan = planned(about, disk="/fast", disk_memory="1GiB", gradients="passing", **given)
    there = [bucket for bucket in plan.layout.buckets if rewritten_bytes(bucket)]
    problem = problem_of(plan.facts, plan.layout, FAST)
    tasks = build_tasks(problem, list(evictions_of(problem, plan.layout)), 4)
    writes = [task for task in tasks if task.label.startswith("write weight ") and task.iteration == 2]
    reads = [task for task in tasks if task.label.startswith("read weight ") and task.iteration == 2]
    size = sum(task.num_bytes for task in writes)
    assert size == sum(bucket.weight_bytes for bucket in there) > 16 << 20
    assert 0 <= 2 * size - sum(task.num_bytes for task in reads) <= 3 * there[0].weight_bytes
    for task in writes:
        assert task.label.replace("write", "read") in [later.label for later in task.then]
    (line,) = full_report.disk_lines(plan, plan_cost(plan))
    assert "MiB of weights, read in forward and in backward and written once per step: " in line


def test_a_checkpoint_has_state_in_fp32_wherever_it_rests() -> None:
    """On the disk, which is not counted among the host's memory, or in fewer bits."""
    about = known(FAST, blocks=8)
    ways: tuple[dict[str, Any], ...] = (
        {"site": "device"},
        {"site": "host", "disk": "/fast", "disk_memory": "64MiB", "host_memory": "128MiB"},
        {"moments": "int8"},
    )
    sizes = [estimated_bytes(planned(about, **way), adapters=False) for way in ways]
    assert sizes == [12 * about.num_params] * 3


@pytest.mark.parametrize(
    ("rates", "run", "seconds"),
    [
        ({}, {"recomputes": True}, 15.0 + 4),  # four of the five seconds of forward are the blocks'
        ({"device_bytes_per_s": 6 * BLOCK * 28.0}, {}, 15.0 + 1),
        ({"launch_s": 1.0}, {}, 15.0 + 6 * 4),  # six buckets of one parameter, four kernels each
    ],
    ids=["recomputation", "the device's memory", "launches"],
)
def test_what_takes_time_on_the_device(rates: dict[str, float], run: dict[str, Any], seconds: float) -> None:
    priced = priced_of(planned(known(replace(FAST, **rates), **run), site="device"))
    assert priced.seconds == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("rates", "resources", "seconds"),
    [
        ({"update_fp32_params_per_s": BLOCK / 10}, [Resource.CPU], 60.0),  # 10 s per bucket, six buckets
        ({"up_bytes_per_s": 4.0 * BLOCK, "down_bytes_per_s": 4.0 * BLOCK}, [Resource.UP, Resource.DOWN], 6.0),
    ],
    ids=["a slow CPU", "a slow link"],
)
def test_what_takes_time_on_the_host(rates: dict[str, float], resources: list[Resource], seconds: float) -> None:
    priced = priced_of(planned(known(replace(FAST, **rates)), site="host"))
    assert priced.seconds >= seconds
    assert [priced.outcome.busy[each] for each in resources] == [pytest.approx(seconds, rel=0.05)] * len(resources)
    assert (priced.outcome.binds is Resource.CPU) is (resources == [Resource.CPU])


def test_without_rates_or_layout_there_is_no_price() -> None:
    assert plan_cost(planned(known(None), site="host")) is None
    assert plan_cost(Plan.baseline(known())) is None
    assert full_report.to_json(planned(known(None), site="host"), None)["simulated"] is None


def test_a_stage_alone_and_beside_others() -> None:
    """Of three stages and four micro-batches two more pass while the first one waits."""
    plan = planned(known(), site="host")
    cost = priced_of(plan)
    stage = replace(plan, facts=replace(plan.facts, run=replace(plan.facts.run, stages=3, accumulation=4)))
    alone = f"simulated step of this stage: 15 s alone, {15 + 2 / 4 * cost.compute_seconds:.3g} s if all take as long, "
    assert full_report.headline(stage, cost).startswith(alone)


def test_a_device_is_no_faster_than_the_host_launches_its_operators() -> None:
    rates = replace(FAST, launch_s=0.1)
    plan = planned(known(rates), site="device")
    for launches, seconds, said in ((9, 15.0, False), (20, 5 + 10 + 4 * (1 + 2), True)):
        units = [replace(unit, launches=launches * (unit.kind is UnitKind.BLOCK)) for unit in plan.facts.units]
        about = replace(plan.facts, units=tuple(units))
        assert sum(map(sum, unit_seconds(about, rates))) == pytest.approx(seconds)
        text = full_report.text(replace(plan, facts=about), None)
        assert ("20 operators of layers.0: launched in 2e+03 ms, computed in 1e+03 ms; a larger" in text) == said
        counted = replace(about, units=tuple(replace(unit, launches_back=3 * unit.launches) for unit in units))
        assert sum(map(sum, unit_seconds(counted, rates))) == pytest.approx(
            5 + 10 + 4 * (1 + 4) if said else 15 + 4 * 0.7
        )
        on_cpu = replace(about, machine=replace(about.machine, name="cpu"))
        assert sum(map(sum, unit_seconds(on_cpu, rates))) == pytest.approx(15.0)


def test_a_unit_is_no_faster_than_the_device_reads_and_writes_what_it_touches() -> None:
    """One second of products forward and two back; of what is touched as much at 1 TB/s, or five times."""
    rates = replace(FAST, device_bytes_per_s=1e12)
    for touched, block in ((10**12, 3.0), (5 * 10**12, 5.0 + 10.0)):
        rest = Work(touched_bytes=touched)
        units = [choosing(unit, rest=rest) if unit.kind is UnitKind.BLOCK else unit for unit in known().units]
        seconds = unit_seconds(replace(known(rates), units=tuple(units)), rates)
        assert sum(seconds[1]) == pytest.approx(block) and sum(seconds[-1]) == pytest.approx(3.0)


def test_quantised_weights_are_unpacked_for_each_product() -> None:
    """Half a byte of each read and four written: forward, backward, and where forward runs again."""
    rates = replace(FAST, device_bytes_per_s=1e6)

    def seconds(packed: int, again: Work) -> float:
        about = known(rates)
        blocks = [
            replace(unit, num_trainable=0, again=again, quantised=packed, quantised_bytes=packed // 2)
            for unit in about.units
        ]
        return sum(unit_seconds(replace(about, units=tuple(blocks), params=()), rates)[1])

    for again, times in ((Work(), 2), (Work(flops=1), 3)):
        assert seconds(BLOCK, again) - seconds(0, again) == pytest.approx(times * 4.5 * BLOCK / 1e6)


def test_operations_follow_the_weights_that_products_read() -> None:
    assert unit_flops(known()) == [0.0, *[1e12] * 5]
    tied = known()
    table = replace(tied.params[0], users=("head",))
    assert unit_flops(replace(tied, params=(table, *tied.params[1:])))[-1] == pytest.approx(2 / 6 * 5e12)


def test_sums_between_machines() -> None:
    """Two machines of eight ranks. In a ring a gradient of 16 B leaves each machine once, but for what is there, over
    eight cards: 15/8 B of each rank. Straight to its owners each rank sends 8 B away, at a byte per second. Where
    machines are fast enough, or there is one, both ways take as long as the links inside.
    """
    shared = {"machine": replace(GPU, ranks=8), "run": replace(known().run, world_size=16)}
    slow, fast, one = (
        (replace(known(), **shared), replace(FAST, net_bytes_per_s=100.0, net_across_bytes_per_s=1.0)),
        (replace(known(), **shared), replace(FAST, net_bytes_per_s=1.0, net_across_bytes_per_s=100.0)),
        (replace(known(), run=shared["run"]), replace(FAST, net_bytes_per_s=1.0, net_across_bytes_per_s=0.01)),
    )
    seconds = {
        reduction: [15 / gather_rate(*each) * sums_slowdown(*each, reduction) for each in (slow, fast, one)]
        for reduction in ("exact", "fast")
    }
    assert seconds == {"exact": pytest.approx([8.0, 15.0, 15.0]), "fast": pytest.approx([15 / 8, 15.0, 15.0])}
    assert [leaving(slow[0], each) for each in ("exact", "fast")] == pytest.approx([8 / 16, 15 / 8 / 16])
    about, rates = slow[0], replace(FAST, net_bytes_per_s=1e8, net_across_bytes_per_s=1e6)
    about = replace(about, machine=replace(about.machine, rates=rates))
    chosen = {"buffers": find("buffers")(), "zero": find("zero").model_validate({"stage": 3})}
    plans, costs = {}, {}
    for each in ("exact", "fast"):
        offload = find("offload").model_validate({"host_memory": "1TiB", "site": "device", "reduction": each})
        plans[each] = compose({"offload": offload, **chosen}, about)
        costs[each] = priced_of(plans[each])
    gradients = 6 * 4 * BLOCK / 15 / 1e6  # each is one parameter, cut, and goes once more for its norm
    slower = costs["exact"].outcome.busy[Resource.NET] - costs["fast"].outcome.busy[Resource.NET]
    assert slower == pytest.approx((8 - 15 / 8) * gradients)
    advice = in_order({"offload": find("offload").model_validate({}), **chosen})["offload"].suggest(plans["exact"])
    assert any(line.startswith("  strategies.offload.reduction: fast (adds in another order): ") for line in advice)


def test_slots_and_shared_addresses_reach_the_simulator() -> None:
    plan = planned(known(blocks=8), site="host", weights="streamed")
    problem = problem_of(plan.facts, plan.layout, FAST)
    slots = [weight.update.grad_slot for weight in problem.weights if weight.update]
    assert None not in slots and len(set(slots)) < len(slots)
    addresses = place(plan.layout)
    spots = [addresses.of(bucket.name, Item.WEIGHT) for bucket in plan.layout.buckets]
    for weight, spot in zip(problem.weights, spots, strict=True):
        shared = {index for index, other in enumerate(spots) if other is not spot and other.overlaps(spot)}
        assert set(weight.overlapping) == shared
    assert any(weight.overlapping for weight in problem.weights)


# Host updates shared between the CPU and the link: only where it is simulated to be faster, and fits.
# Four blocks' updates take the CPU 4 s; forward takes 5 s, backward 10 s; a state crosses the link in a tenth of that.
SLOW_CPU = replace(FAST, update_fp32_params_per_s=BLOCK / 10)


def sites_of(plan: Plan) -> list[Site]:
    return [bucket.site for bucket in plan.layout.buckets]


def tight(rates: Any) -> Plan:
    """A budget into which the state of most buckets does not fit."""
    return planned(known(rates, blocks=8), gpu_memory=f"{BLOCK * 4 * 26 >> 20}MiB")


def test_a_slow_cpu_gives_work_to_the_link_within_the_budget() -> None:
    shared, alone = tight(SLOW_CPU), tight(None)
    assert Site.STREAMED in sites_of(shared) and Site.STREAMED not in sites_of(alone)
    before, after = priced_of(replace(alone, facts=shared.facts)), priced_of(shared)
    assert after.seconds < 0.9 * before.seconds
    assert shared.peak(Tier.DEVICE) <= BLOCK * 4 * 26
    assert validate(shared.layout, shared.addresses, shared.facts.params) == []


def test_a_fast_cpu_and_a_site_that_was_asked_for_keep_their_work() -> None:
    assert Site.STREAMED not in sites_of(tight(FAST))
    assert set(sites_of(planned(known(SLOW_CPU, blocks=8), site="host"))) == {Site.HOST}


@pytest.mark.parametrize(("rate", "seconds"), [(1000.0, 2.0), (15.0, 2.0), (10.0, 2.5), (5.0, 4.0)])
def test_two_works_share_a_memory(rate: float, seconds: float) -> None:
    """One second with 10 bytes beside two seconds with 10 bytes: 15 bytes per second, then 5."""
    assert _together((1.0, 10), (2.0, 10), rate) == pytest.approx(seconds)


@pytest.mark.parametrize(("there", "leaves"), [((0, 1), True), ((3, 4), True), ((1, 3), False)])
def test_a_weight_leaves_if_another_needs_its_bytes_meanwhile(there: tuple[int, int], leaves: bool) -> None:
    """At the start of the next iteration as well; it is used at ticks 1 and 2 of four."""
    weights = (Weight("one", 1, (1, 2), overlapping=(1,)), Weight("other", 1, (there[0],)))
    problem = Problem(ticks=(Tick("tick", 1.0, 0),) * 4, weights=weights, link=Link(0.0, 1.0, 1.0), budget=2)
    layout: Any = SimpleNamespace(buckets=[SimpleNamespace(resident_ticks=(each,)) for each in ((1, 3), there)])
    assert [each.gap.weight for each in evictions_of(problem, layout)] == [0] * leaves
