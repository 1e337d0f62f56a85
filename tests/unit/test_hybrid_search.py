"""The search over degrees: its account is the plan's, it returns what pricing everything would, and it is monotone."""

from dataclasses import replace
from itertools import permutations, product
from random import Random
from typing import Any

import pytest

from deepstow.strategies.core.compose import compose
from deepstow.strategies.core.facts import (
    Compression,
    Facts,
    MachineFacts,
    Operator,
    Param,
    Precision,
    Rates,
    Temporaries,
    Unit,
    UnitKind,
    Work,
)
from deepstow.strategies.core.plan import Kind, Tier
from deepstow.strategies.core.registry import find
from deepstow.strategies.planner.cuts import Schedule
from deepstow.strategies.planner.engine_bytes import boundary_bytes
from deepstow.strategies.planner.hybrid import keys
from deepstow.strategies.planner.hybrid.account import Account, Bytes, state_bytes
from deepstow.strategies.planner.hybrid.degrees import Degrees, Model, Models, Size, Stowed, is_possible
from deepstow.strategies.planner.hybrid.search import POLICIES, Answer, Options, hybrid
from deepstow.strategies.planner.hybrid.step_seconds import (
    Pricing,
    StageSeconds,
    in_order,
    last_backwards,
    least_seconds,
)
from deepstow.strategies.planner.network import Cluster, Wire
from deepstow.strategies.planner.weight_schedule import ASSUMED
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.machine.profiles import profile
from deepstow.trainer.planning.hybrid import cluster_of
from tests.helpers.fakes import block, choosing, embedding, facts, head

RATES = replace(
    ASSUMED, gemm_fp32_flops_per_s=1e12, gemm_bf16_flops_per_s=1e13, up_bytes_per_s=2e10, down_bytes_per_s=2e10,
    dram_bytes_per_s=5e10, update_fp32_params_per_s=1e9, update_bf16_params_per_s=1e9, device_bytes_per_s=1e12,
)  # fmt: skip
WIDE = 1 << 50
KB, MB = 1000, 10**6


def model(blocks: int = 8, *, device: int = WIDE, rates: Rates = RATES, **run: Any) -> Facts:
    """A model of equal blocks that can be recomputed, in bf16, and a head that costs as much as two of them."""
    kept = [Operator("linear a", 6 * KB, Work(200 * MB)), Operator("linear b", 9 * KB, Work(300 * MB))]
    rest = Work(0, 30 * KB)
    units: list[Unit] = [replace(embedding(40 * KB + 1, 500), temporaries=Temporaries(100, 90 * KB, 90 * KB))]
    for index in range(blocks):
        whole = choosing(block(index, 20 * KB + 3, 40 * KB), *kept, input_bytes=4 * KB, rest=rest)
        units.append(replace(whole, temporaries=Temporaries(5 * KB, 30 * KB, 50 * KB)))
    units.append(replace(head(40 * KB + 1, 25 * KB), temporaries=Temporaries(60 * KB, 30 * KB, 100 * KB)))
    machine = MachineFacts("test gpu", device, WIDE, 1 << 20, rates)
    plain = {"precision": Precision.BF16, "hidden_size": 64, "micro_batch": 1}
    return facts(*units, machine=machine, **plain | {"forward_flops": (blocks + 2) * 500 * MB} | run)


def share(whole: Facts, micro_batch: int, tensor: int) -> Facts:
    """What a tensor rank has of ``whole``, by division."""
    units = tuple(
        replace(
            unit,
            num_params=unit.num_params // tensor,
            num_trainable=unit.num_trainable // tensor,
            saved_bytes=unit.saved_bytes * micro_batch // tensor,
        )
        for unit in whole.units
    )
    flops = whole.run.forward_flops * micro_batch // tensor
    return replace(whole, units=units, run=replace(whole.run, micro_batch=micro_batch, forward_flops=flops))


def known(whole: Facts) -> dict[Size, Facts]:
    return {Size(size, tensor): share(whole, size, tensor) for size in (1, 2) for tensor in (1, 2, 4)}


def cluster(ranks: int = 16, *, rate: float = 1e9) -> Cluster:
    return Cluster(ranks, min(8, ranks), Wire(10 * rate, 1e-6), Wire(rate, 2e-6))


@pytest.mark.parametrize("accelerated", [True, False])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_with_one_stage_and_tensor_rank_the_account_is_the_plan(precision: Precision, accelerated: bool) -> None:
    whole = model(5, precision=precision)
    if not accelerated:
        whole = replace(whole, machine=replace(whole.machine, name="cpu"))
    account = Account(Models({Size(): whole}))
    for stage, policy, micro_batches, ranks in product((0, 1, 2, 3), ("none", "selective", "full"), (1, 2), (1, 7)):
        run = replace(whole.run, accumulation=micro_batches, world_size=ranks)
        chosen = {"zero": {"stage": stage}, "recompute": {"policy": policy}}
        strategies = {name: find(name).model_validate(options) for name, options in chosen.items()}
        plan = compose(strategies, replace(whole, run=run))
        found = account.of(Degrees(data=ranks, zero=stage, recompute=policy, micro_batches=micro_batches))
        assert found == Bytes(plan.peak(Tier.DEVICE), plan.peak(Tier.HOST)), (stage, policy, run)


def test_a_stage_has_what_is_in_flight_and_what_it_receives() -> None:
    whole = model(8)
    four = Degrees(stages=4, micro_batches=6)
    parts = Model(whole).parts(4)
    account = Account(Models({Size(): whole}, {Size(): whole}))
    middle = [account.of_stage(four, stage, parts[stage]).device for stage in (1, 2)]
    # The same blocks: what one micro-batch saves is there once more.
    assert middle[0] - middle[1] == 2 * 40 * KB
    lean = Account(Models({Size(): whole}))
    # Elsewhere with masters, and buffers for the three in flight; here all six on each side, and plain fp32.
    sizes = [
        sum(state_bytes(Model(whole).units(parts[1]), whole.run, four, kind, plain=plain) for kind in Kind)
        for plain in (True, False)
    ]
    assert middle[0] - lean.of_stage(four, 1, parts[1]).device == sizes[0] - sizes[1] + 2 * (6 - 3) * boundary_bytes(
        whole.run
    )
    assert account.of(four).device == max(account.of_stage(four, at, part).device for at, part in enumerate(parts))
    assert boundary_bytes(whole.run) == 1 * 8 * 64 * 2


def test_copies_of_a_stage_hold_a_part_of_its_moments() -> None:
    whole = model(8)
    parts, account = Model(whole).parts(2), Account(Models({Size(): whole}, {Size(): whole}))
    degrees = Degrees(stages=2, data=4, micro_batches=2)
    apart, shared = (
        [state_bytes(Model(whole).units(parts[0]), whole.run, each, kind, plain=True) for kind in Kind]
        for each in (degrees, replace(degrees, zero=1))
    )
    moments = list(Kind).index(Kind.MOMENT)
    assert shared[moments] < 0.26 * apart[moments]
    assert [*shared[:moments], *shared[moments + 1 :]] == [*apart[:moments], *apart[moments + 1 :]]
    assert account.of(replace(degrees, zero=1)).device < account.of(degrees).device


def lossy(ranks: int) -> dict[str, Compression]:
    return {each.words.split(",")[0]: each for each in keys.lossy(model(world_size=ranks))}


@pytest.mark.parametrize("accelerated", [True, False])
def test_a_lossy_exchange_takes_the_bytes_of_its_plan(accelerated: bool) -> None:
    whole = model(5, world_size=4, largest_param=7 * KB)
    if not accelerated:
        whole = replace(whole, machine=replace(whole.machine, name="cpu"))
    account = Account(Models({Size(): whole}, {Size(): whole}))
    for how, policy, micro_batches in product(lossy(4).values(), ("none", "full"), (1, 2)):
        degrees = Degrees(data=4, recompute=policy, micro_batches=micro_batches, exchange=how)
        chosen = {name: find(name).model_validate(each) for name, each in keys.strategies_of(degrees).items()}
        run = replace(whole.run, accumulation=micro_batches)
        plan = compose(chosen, chosen["collectives"].narrowed(replace(whole, run=run), 0))
        assert account.of(degrees) == Bytes(plan.peak(Tier.DEVICE), plan.peak(Tier.HOST)), (how, policy)


def test_what_a_lossy_exchange_takes() -> None:
    """The part of the bytes that is sent; with coding, which nothing hides; of local steps nothing is hidden."""
    whole, on = model(), Cluster(8, 1, Wire(1e9), Wire(1e6))
    fast = replace(RATES, gemm_bf16_flops_per_s=1e30, device_bytes_per_s=1e30, launch_s=0.0)

    def seconds(rates: Rates, how: Compression | None, on: Cluster = on) -> float:
        models = Models({Size(): replace(whole, machine=replace(whole.machine, rates=rates))}, {Size(): whole})
        return Pricing(models, on, rates).price(Degrees(data=8, exchange=how)).seconds

    once, how = on.all_reduce_seconds(4 * whole.num_params, 8), lossy(8)
    # Both sides of each matrix, four times: of table and head one has 64 numbers, blocks are squares of 64.
    sides = 4 * (2 * (64 + (40 * KB + 1) / 64) + 8 * 2 * (20 * KB + 3) / 64) / whole.num_params
    parts = {"bf16": 1 / 2, "int8": 33 / 128, "powersgd": sides, "fp32": 1 / 20}
    assert {name: seconds(fast, each) / once for name, each in how.items()} == pytest.approx(parts)
    coded = replace(fast, device_bytes_per_s=1e6)
    roomy, numbers = Cluster(8, 1, Wire(1e30), Wire(1e30)), 4 * whole.num_params / 1e6
    found = {name: seconds(coded, each, roomy) - seconds(coded, None, roomy) for name, each in how.items()}
    assert found == pytest.approx(
        {"bf16": 3 * numbers, "int8": 16 * numbers, "powersgd": 12 * numbers, "fp32": 3 * numbers / 20}
    )
    slow = replace(fast, gemm_bf16_flops_per_s=1e8)
    both = replace(slow, device_bytes_per_s=1e6)
    assert seconds(both, how["bf16"], roomy) == pytest.approx(seconds(both, None, roomy) + 3 * numbers), (
        "after backward"
    )
    alone = seconds(slow, None, roomy)
    assert seconds(slow, how["fp32"]) == pytest.approx(alone + once / 20)
    assert seconds(slow, how["bf16"]) < alone + once / 4, "sent under backward"


def nothing_refused(degrees: Degrees) -> None:
    """Whatever some engine could run."""


def priced(whole: Facts, on: Cluster, options: Options, sequences: int = 32) -> Answer:
    return hybrid(known(whole), on, sequences, options, known(whole))


@pytest.mark.parametrize(("device", "rate"), [(WIDE, 1e9), (1_000_000, 1e7), (800_000, 1e9)])
def test_the_search_returns_what_pricing_everything_would(
    device: int, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options(nothing_refused, lossy=tuple(lossy(16).values()))
    found = priced(model(device=device), cluster(rate=rate), options)
    bounds, least = [], Pricing.least

    def noted(self: Pricing, degrees: Degrees) -> float:
        bounds.append(least(self, degrees) <= self.price(degrees).seconds * (1 + 1e-12))
        return 0.0

    monkeypatch.setattr(Pricing, "least", noted)
    everything = priced(model(device=device), cluster(rate=rate), options)
    assert found.best == everything.best and found.priced < everything.priced == everything.fitting
    assert all(bounds), "a bound is not more than the price"


def test_lossy_exchanges_are_offered_where_they_are_asked_for() -> None:
    options = Options(lossy=tuple(lossy(16).values()))
    exact, found = priced(model(), cluster(rate=1e7), Options()), priced(model(), cluster(rate=1e7), options)
    assert not exact.lossy and all(each.degrees.exchange is None for each in exact.best)
    assert found.exact is not None and found.exact.order == exact.best[0].order
    assert [each.degrees.exchange for each in found.lossy] == [*options.lossy]
    best = [each for each in found.best if each.degrees.exchange is not None]
    assert found.best[0] in best and found.best[0].price.seconds < exact.best[0].price.seconds
    assert found.best[0].degrees in [each.degrees for each in found.lossy]
    for each in best:
        assert each.degrees.data == 16 and each.degrees.offload is Stowed.NOTHING
    sixteen = keys.refused(replace(model().run, trained_bytes=2), {})
    why = [sixteen(each.degrees) for each in best]
    assert all(each is not None and "16 bits already" in each.cure for each in why)


def test_the_nearest_of_the_faster_are_named_where_others_fit() -> None:
    answer = priced(model(device=400_000), cluster(), Options())
    assert answer.best and answer.nearest
    models = Models(known(model()))
    for each in answer.nearest:
        assert max(each.device, each.host) > 0
        assert Pricing(models, cluster(), RATES).least(each.degrees) < answer.best[0].price.seconds
    assert not priced(model(), cluster(), Options()).nearest, "all of them fit"


def test_nothing_fits() -> None:
    answer = priced(model(device=1000), cluster(), Options())
    assert not answer.best and 0 < len(answer.nearest) <= 3
    lacks = [each.device for each in answer.nearest]
    assert lacks == sorted(lacks)
    account = Account(Models(known(model())))
    assert account.of(answer.nearest[0].degrees).device == lacks[0] + 900
    small = replace(model(), machine=replace(model().machine, host_bytes=1000))
    (first, *_) = priced(small, cluster(), Options(offloads=(Stowed.STATE,))).nearest
    assert first.device == 0 and account.of(first.degrees).host == first.host + 900


def test_every_row_uses_all_ranks_and_the_whole_batch_and_is_refused_by_nobody() -> None:
    answer = priced(model(device=900_000), cluster(), Options())
    assert len(answer.best) == 10 == len({each.degrees for each in answer.best})
    for found in answer.best:
        degrees = found.degrees
        assert degrees.ranks == 16 and degrees.data * degrees.micro_batch * degrees.micro_batches == 32
        assert is_possible(degrees, 8) and keys.refused(model().run, {})(degrees) is None
        assert found.bytes.device <= 0.9 * 900_000
        assert sum(found.price.parts.values()) == pytest.approx(found.price.seconds)
    # As little is recomputed and offloaded as fits: none of either for nothing.
    for found, other in permutations([each.degrees for each in answer.best], 2):
        if replace(found, recompute="", offload=Stowed.NOTHING) == replace(other, recompute="", offload=Stowed.NOTHING):
            more = POLICIES.index(found.recompute) - POLICIES.index(other.recompute)
            levels = list(Stowed)
            assert more * (levels.index(found.offload) - levels.index(other.offload)) < 0
    assert {each.refusal.key for each in answer.left} >= {"strategies.tensor.degree", "strategies.zero.stage"}


IMPOSSIBLE = (
    Degrees(tensor=16),
    Degrees(stages=2, zero=2),
    Degrees(zero=2, offload=Stowed.WEIGHTS),
    Degrees(zero=3, offload=Stowed.STATE),
    Degrees(data=2, offload=Stowed.STATE, exchange=lossy(2)["int8"]),
)
REFUSED = (
    (Degrees(tensor=2, data=2, zero=3), "strategies.zero.stage"),
    (Degrees(tensor=2), "strategies.zero.stage"),
    (Degrees(stages=2, tensor=2, micro_batches=4, offload=Stowed.STATE), "strategies.tensor.degree"),
    (Degrees(stages=4, micro_batches=2), "training.gradient_accumulation_steps"),
)
FINE = (
    Degrees(data=2, zero=3, recompute="selective"),
    Degrees(tensor=2, data=2, zero=2, recompute="full"),
    Degrees(tensor=2, zero=1, recompute="selective"),
    Degrees(stages=2, data=2, zero=1, micro_batches=4, offload=Stowed.STATE),
    Degrees(stages=2, tensor=2, micro_batches=4, recompute="selective"),
    Degrees(tensor=2, zero=1, offload=Stowed.STATE),
)


def test_what_cannot_be_run() -> None:
    run = model().run
    assert not any(is_possible(degrees, 8) for degrees in IMPOSSIBLE)
    assert all(is_possible(degrees, 8) for degrees in (*FINE, *(degrees for degrees, _ in REFUSED)))
    refused = keys.refused(run, {})
    assert [each.key for degrees, _ in REFUSED if (each := refused(degrees))] == [key for _, key in REFUSED]
    assert [refused(degrees) for degrees in FINE] == [None] * len(FINE)
    tied = keys.refused(replace(run, tied=True), {})(FINE[3])
    assert tied is not None and "tied head" in tied.cure
    beside = {"linear": find("linear")()}  # what is left as it is refuses, too
    assert keys.refused(run, beside)(FINE[1]) is not None and keys.refused(run, beside)(FINE[0]) is None
    assert keys.refused(replace(run, optim="adafactor"), {})(FINE[1]) is not None
    in_slices, staged = keys.refused(replace(run, in_slices=True), {}), Degrees(stages=2, tensor=2, micro_batches=4)
    why = in_slices(staged)
    assert why is not None and why.key == "strategies.tensor.sequence_parallel"
    assert in_slices(replace(staged, stages=1, zero=1)) is None is refused(staged)


def test_the_volumes_of_zero_per_step() -> None:
    """In units of the parameters: 2, 2, M + 1 and 3 M, hidden or not. Compute takes no time here, so nothing is."""
    fast = replace(RATES, gemm_bf16_flops_per_s=1e30, device_bytes_per_s=1e30, launch_s=0.0)
    whole, many = model(rates=fast), 4
    on = Cluster(8, 8, Wire(1e6))
    pricing = Pricing(Models({Size(): whole}), on, fast)
    once = on.gather_seconds(2 * whole.num_params, 8)
    seconds = [pricing.price(Degrees(data=8, zero=stage, micro_batches=many)).seconds / once for stage in range(4)]
    # The last unit's gradients come after the others: a tenth of the units.
    assert seconds == pytest.approx([2 * 1.0, 2.0, many + 1, 3 * many], rel=0.11)


def test_what_tensor_ranks_exchange() -> None:
    """In gathers of the hidden states of a block: sums are two of them; slices are gathered again in backward."""
    on = Cluster(2, 2, Wire(1e6))
    found = {}
    for how in ({}, {"sums": (2, 5, 1)}, {"in_slices": True}):
        part = share(model(**how), 1, 2)
        once = 8 * on.gather_seconds(boundary_bytes(part.run), 2)
        pricing = Pricing(Models({Size(tensor=2): part}), on, RATES)
        prices = [pricing.price(Degrees(tensor=2, zero=1, recompute=policy)) for policy in POLICIES]
        seconds = pricing.stages(Degrees(tensor=2, zero=1))[0].seconds
        assert how != {"sums": (2, 5, 1)} or seconds.backward > 2 * seconds.forward, "backward sums more"
        found[" ".join(how)] = [round(price.parts["tensor exchanges"] / once, 6) for price in prices]
    # none, selective, full; of Megatron, AutoTP and slices
    assert found == {"": [8, 8, 12], "sums": [14, 14, 16], "in_slices": [10, 12, 13]}


def test_what_ranks_of_a_row_exchange() -> None:
    """Heads four times per block and pass, once more where blocks run again; the state is shared by all copies."""
    on, degrees = Cluster(4, 4, Wire(1e6)), Degrees(data=2, sequence=2, zero=1)
    pricing = Pricing(Models({degrees.size: model(slices=2)}), on, RATES)
    once = 8 * 4 * boundary_bytes(model().run) / 4 / 1e6
    found = {policy: pricing.price(replace(degrees, recompute=policy)) for policy in POLICIES}
    assert [round(each.parts["sequence exchanges"] / once, 6) for each in found.values()] == [2, 3, 3]
    alone = Pricing(Models({Size(): model()}), on, RATES).price(Degrees(data=4, zero=1))
    assert found["none"].parts["compute"] == pytest.approx(alone.parts["compute"])
    assert found["none"].parts["update"] == pytest.approx(alone.parts["update"])


def test_what_ranks_of_experts_exchange() -> None:
    """Rows both ways in each pass, with no product to hide them; weights among the ranks that have the same ones."""
    fast = replace(RATES, gemm_bf16_flops_per_s=1e30, device_bytes_per_s=1e30, launch_s=0.0)
    whole, of_layer = model(rates=fast, num_experts=8, experts_per_token=2, apart=8 * 10 * KB), 10 * KB
    experts = [Param(f"{unit.name}: experts", unit.name, of_layer, "float32", 0) for unit in whole.units[1:-1]]
    rest = [
        Param(unit.name, unit.name, unit.num_params - of_layer * (unit.kind is UnitKind.BLOCK), "float32", 0)
        for unit in whole.units
    ]
    whole = replace(whole, params=(*rest, *experts))
    on, degrees = Cluster(8, 4, Wire(1e6), Wire(1e5)), Degrees(data=8, experts=4, zero=1)
    pricing = Pricing(Models({degrees.size: whole}), on, fast)
    once = 8 * 2 * (2 * boundary_bytes(whole.run) * 3 / 4) / 1e6
    found = {policy: pricing.price(replace(degrees, recompute=policy)) for policy in POLICIES}
    assert [round(each.parts["expert exchanges"] / once, 6) for each in found.values()] == [2, 3, 3]
    apart = on.gather_seconds(2 * whole.run.apart, 2, 4, 10)
    assert apart > 0.1 * found["none"].parts["update"]
    rest_s = on.gather_seconds(2 * (whole.num_params - whole.run.apart), 8, messages=10)
    assert found["none"].parts["update"] == pytest.approx(apart + rest_s)


def test_rows_and_experts_are_divided_in_one_stage_without_tensor_ranks() -> None:
    """Beside these they are refused, and neither is looked at."""
    whole, seen = model(), list[Degrees]()
    sizes = known(whole) | {Size(sequence=2): whole, Size(experts=4): whole}
    hybrid(sizes, cluster(), 48, Options(refused=seen.append))
    apart = [each for each in seen if each.sequence > 1 or each.experts > 1]
    assert {each.size for each in apart} == {Size(sequence=2), Size(experts=4)}
    assert {(each.stages, each.tensor, each.ranks, each.copies) for each in apart} == {(1, 1, 16, 16)}
    assert all(each.data * each.micro_batches == 48 for each in apart)
    refused = keys.refused(whole.run, {})
    for other in ({"tensor": 2, "zero": 1}, {"stages": 2, "micro_batches": 4}):
        for divided in ({"sequence": 2}, {"experts": 2}):
            assert refused(Degrees(data=4, **other)) is None
            assert refused(Degrees(data=4, **other, **divided)) is not None
    assert is_possible(Degrees(sequence=8), 8) and not is_possible(Degrees(sequence=8), 4)


def test_a_gather_takes_a_latency_per_hop_and_the_slower_of_two_rates() -> None:
    on = Cluster(16, 8, Wire(10.0, 0.1), Wire(2.0, 0.5))
    assert on.gather_seconds(80, 8, messages=3) == pytest.approx(3 * 7 * 0.1 + 7 / 8 * 80 / 10)
    assert on.gather_seconds(160, 16) == pytest.approx(15 * 0.5 + 15 / 16 * 160 / 10)  # eight cards are faster than one
    assert on.gather_seconds(160, 4, 4) == pytest.approx(3 * 0.5 + 3 / 4 * 160 / 4)  # two ranks of a group on a machine
    assert on.all_reduce_seconds(160, 16) == pytest.approx(2 * (4 * 0.5 + 15 / 16 * 160 / 10))
    rates = profile("h100-sxm-pcie5").rates
    published = cluster_of(rates, Ranks(world_size=256, local_world_size=8), None) if rates else on
    reached = 255 / 256 * (2 << 30) / published.gather_seconds(2 << 30, 256)
    assert reached == pytest.approx(200e9, rel=0.01), "an all-gather among H100, NVIDIA/nccl issue 1218"


def test_what_compute_does_not_hide_across_machines() -> None:
    """ZeRO 3 takes the sum of compute and exchange there; in a machine, or at the hopeful end, the longer one."""
    whole = model()
    size, models, several = 2 * whole.num_params, Models({Size(): whole}), Cluster(8, 4, Wire(4e9), Wire(1e9, 1e-9))
    degrees = Degrees(data=8, zero=3)

    def seconds(on: Cluster, zero: int = 3) -> float:
        return Pricing(models, on, RATES).price(replace(degrees, zero=zero)).seconds

    alone = Pricing(models, Cluster(8, 8, Wire(1e30)), RATES).price(degrees).seconds
    exchanged = 3 * several.gather_seconds(size, 8, messages=10)
    assert seconds(several) == pytest.approx(alone + exchanged)
    hopeful, careful = several.either_way()
    assert seconds(hopeful) < seconds(several) < seconds(careful)
    assert seconds(replace(several, hidden=1.0)) == pytest.approx(seconds(Cluster(8, 8, Wire(4e9))), rel=1e-3)
    assert Cluster(8, 8, Wire(4e9), Wire(1.0)).either_way() == ()


def test_a_place_that_the_network_decides_is_marked() -> None:
    """Whoever has no mark keeps to the order of those without one, at both ends; and both kinds are there."""
    answer = priced(model(), replace(cluster(), across=Wire(1e9, 5e-6)), Options())
    assert {found.settled for found in answer.best} == {found.assumed for found in answer.best} == {True, False}
    for end in range(2):
        seconds = [found.between[end] for found in answer.best]
        assert seconds != sorted(seconds)
        settled = [found.between[end] for found in answer.best if found.settled]
        assert settled == sorted(settled) and len(settled) > 2
    assert all(found.between[0] <= found.price.seconds <= found.between[1] for found in answer.best)
    kept = {found.degrees for found in answer.firsts} == {answer.best[0].degrees}
    assert answer.best[0].settled <= kept
    inside = priced(model(), cluster(8), Options())
    assert not inside.firsts and all(found.settled and not found.assumed for found in inside.best)


def test_offload_is_for_what_does_not_fit_otherwise() -> None:
    small = model(device=1_200_000)
    best = priced(small, cluster(2), Options(policies=("full",))).best
    assert best and all(each.degrees.offload is not Stowed.NOTHING for each in best)
    roomy = priced(model(), cluster(2), Options()).best
    assert all(each.degrees.offload is Stowed.NOTHING for each in roomy)
    assert best[0].bytes.host > roomy[0].bytes.host


@pytest.mark.parametrize(
    ("degrees", "strategies"),
    [
        (Degrees(data=8, zero=3, recompute="full"), {"zero": {"stage": 3}, "recompute": {"policy": "full"}}),
        (Degrees(stages=4), {"pipeline": {"stages": 4, "schedule": "1f1b"}}),
        (
            Degrees(stages=4, tensor=2),
            {"pipeline": {"stages": 4, "schedule": "1f1b"}, "tensor": {"degree": 2}, "zero": {"stage": 0}},
        ),
        (Degrees(tensor=2, zero=1), {"zero": {"stage": 1}, "tensor": {"degree": 2}}),
        (Degrees(data=2, exchange=lossy(2)["int8"]), {"collectives": {"compress": "int8"}}),
        (Degrees(data=2, exchange=lossy(2)["fp32"]), {"collectives": {"local_steps": 20}}),
        (Degrees(offload=Stowed.STATE), {"offload": {"gpu_memory": "20GiB"}}),
    ],
)
def test_degrees_are_written_as_strategies(degrees: Degrees, strategies: dict[str, Any]) -> None:
    tree = {"training": {"gradient_checkpointing": True}, "strategies": {"zero": {"stage": 2}, "linear": {}}}
    tree["strategies"]["offload"] = {"gpu_memory": "20GiB", "site": "device"}
    found = keys.written(degrees, tree)
    assert found["strategies"] == {"linear": {}} | strategies
    assert found["training"] == {
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
    }


# The clock of a pipeline: equal stages by the closed form, what is in flight, and what must hold for any stages


def test_equal_stages_take_the_closed_form_and_have_so_many_in_flight() -> None:
    """Stage i of p has p - i micro-batches at most; each runs every micro-batch forward, then backward."""
    for stages in range(1, 6):
        for micro_batches in (1, 2, 3, 4, 5, 8, 13):
            same = [StageSeconds(1.0, 2.0)] * stages
            assert last_backwards(same, micro_batches)[0] == (micro_batches + stages - 1) * 3
            assert least_seconds(same, micro_batches) == (micro_batches + stages - 1) * 3
            for stage in range(stages):
                tasks = [(back, number) for at, back, number in in_order(stages, micro_batches) if at == stage]
                inside, most = set(), 0
                for backward, number in tasks:
                    inside = inside - {number} if backward else inside | {number}
                    most = max(most, len(inside))
                assert most == Schedule.ONE_F_ONE_B.in_flight(stage, stages, micro_batches)
                assert most == min(micro_batches, stages - stage)
                assert len(tasks) == len(set(tasks)) == 2 * micro_batches and not inside


def test_a_slow_boundary_sends_one_after_the_other() -> None:
    """Activations are there at 4, 7 and 10; gradients, made at 9, 12 and 14, are back at 12, 15 and 18."""
    stages = [StageSeconds(1.0, 1.0, 3.0), StageSeconds(1.0, 1.0), StageSeconds(1.0, 1.0)]
    assert last_backwards(stages, 3) == [19.0, 14.0, 13.0]


def test_no_schedule_is_faster_than_the_bound_and_nothing_faster_makes_it_slower() -> None:
    slower = 0
    for seed in range(40):
        random = Random(f"stages {seed}")
        count = random.randint(2, 6)
        most = (3.0, 3.0, 0.5)
        stages = [StageSeconds(*(random.uniform(one / 6, one) for one in most)) for _ in range(count)]
        micro_batches = random.randint(1, 12)
        ends = last_backwards(stages, micro_batches)
        assert max(ends) == ends[0] >= least_seconds(stages, micro_batches) * (1 - 1e-12)
        for index, stage in enumerate(stages):
            for name in ("forward", "backward", "send"):
                faster = [*stages]
                faster[index] = replace(stage, **{name: getattr(stage, name) * 0.7})
                after = last_backwards(faster, micro_batches)
                assert after[0] <= ends[0], (seed, index, name)
                slower += after[0] < ends[0]
    assert slower > 80
