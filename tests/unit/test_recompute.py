"""The strategy decides, and shares the decision with offload; what is kept is named by what operators do."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepstow.strategies.core.compose import compose
from deepstow.strategies.core.facts import Facts, Operator, Param, Rates, Unit, Work
from deepstow.strategies.core.layout import Item
from deepstow.strategies.core.plan import NONE, Plan, Tier
from deepstow.strategies.core.protocol import Refusal
from deepstow.strategies.core.registry import find
from deepstow.strategies.engine.forward.checkpointing import (
    Names,
    OutputRecorder,
    checkpoint_blocks,
    checkpointed,
    draws,
)
from deepstow.strategies.planner.step_cost import plan_cost
from deepstow.strategies.report import full_report
from deepstow.strategies.report.plan_table import rows, table
from tests.helpers.fakes import GPU, block, choosing, embedding, facts, head
from tests.helpers.marks import slowly
from tests.unit.test_step_cost import FAST

MIB = 1 << 20
PRODUCT, SCORES = Operator("linear 0", 2 * MIB, Work(flops=10**9)), Operator("scores 0", 3 * MIB, Work(flops=10**7))
REST = Work(touched_bytes=4 * MIB)


def about(blocks: int = 4, *, rates: Rates | None = None, device_bytes: int = 1 << 40, **run: Any) -> Facts:
    """Blocks that save 9 MiB: one of input, two of a product, three of scores, three of the rest."""
    made = [
        choosing(block(i, MIB, 9 * MIB), PRODUCT, SCORES, input_bytes=MIB, rest=REST, stream_bytes=MIB)
        for i in range(blocks)
    ]
    units: list[Unit] = [embedding(MIB), *made, head(MIB, MIB)]
    params = tuple(Param(f"{unit.name}.weight", unit.name, MIB, "float32", 0) for unit in units)
    known = facts(*units, **{"accumulation": 2, "forward_flops": 5 * 10**9, **run})
    machine = replace(GPU, rates=rates, device_bytes=device_bytes)
    return replace(known, machine=machine, params=params)


def planned(known: Facts, offload: Any = None, **options: Any) -> Any:
    """Options of ``recompute``; with those of ``offload`` beside it."""
    given = {"recompute": options} | ({"offload": offload} if offload else {})
    return compose({name: find(name).model_validate(each) for name, each in given.items()}, known)


def policies(plan: Plan) -> list[str]:
    return [plan.keep(unit.name).policy for unit in plan.facts.units[1:-1]]


# --- deciding --------------------------------------------------------------------------------------------------------


def test_what_policies_keep() -> None:
    sizes = {name: planned(about(), policy=name).saved_bytes("layers.1") for name in ("none", "selective", "full")}
    assert sizes == {"none": 9 * MIB, "selective": 3 * MIB, "full": MIB}
    assert planned(about()).keep("layers.0").policy == "selective"
    assert policies(planned(about(5), policy="full", every=2)) == ["full", NONE, "full", NONE, "full"]


@pytest.mark.parametrize("waiting", [14, 35, 37])
def test_auto_stays_within_the_device(waiting: int) -> None:
    state = Plan.baseline(about()).states(Tier.DEVICE)
    budget = int((state + waiting * MIB) / 0.9) + 1
    plan = planned(about(device_bytes=budget), policy="auto")
    assert plan.peak(Tier.DEVICE) <= state + waiting * MIB + 1
    assert (policies(plan) == [NONE] * 4) is (waiting >= 37)
    # What cannot fit has the lowest peak: either the last block and the head, or the last block with its input.
    assert planned(about(device_bytes=MIB), policy="auto").saved_peak() == 13 * MIB


def test_refused_and_idle() -> None:
    with pytest.raises(Refusal, match=r"strategies\.recompute\.every = 2: auto chooses the blocks itself"):
        planned(about(), policy="auto", every=2)
    assert planned(about(), policy="none").idle["recompute"] == "policy: none keeps everything"
    assert "could be recomputed" in planned(facts(), policy="full").idle["recompute"]
    for policy, cure in (("none", "write selective or full"), ("auto", "it weighs that itself; write auto")):
        with pytest.raises(Refusal, match=rf"strategies\.recompute\.activation_offloading = true: .*{cure}"):
            planned(about(), policy=policy, activation_offloading=True)


# --- on the host -----------------------------------------------------------------------------------------------------


def hosted(plan: Plan) -> list[int]:
    return [plan.keep(unit.name).hosted_bytes // MIB for unit in plan.facts.units[1:-1]]


def test_all_that_is_kept_waits_on_the_host() -> None:
    plan = planned(about(), policy="selective", activation_offloading=True)
    assert hosted(plan) == [3, 3, 3, 0]
    assert [plan.saved_bytes(unit.name) // MIB for unit in plan.facts.units[1:-1]] == [0, 0, 0, 3]
    # The last block runs again, and what the one before it has on the host arrives.
    assert plan.saved_peak() == (9 + 1) * MIB + 3 * MIB
    places = 3 * 2 * 4 * 512
    assert plan.hosted_bytes() == 9 * MIB + places
    assert plan.peak(Tier.HOST) == 9 * MIB + places
    assert hosted(planned(about(5), policy="full", every=2, activation_offloading=True)) == [1, 0, 1, 0, 0]
    assert hosted(planned(about(), policy="full")) == [0] * 4
    rows = [row for row in full_report.to_json(plan, None)["rows"] if row["tensors"] == "saved for backward"]
    assert [(row["tier"], row["num_bytes"] // MIB) for row in rows[:4]] == [*[("host", 3)] * 3, ("device", 3)]
    assert "what is kept waits on the host" in table(plan)


def test_auto_sends_what_would_not_fit_otherwise() -> None:
    """Without offload: the link carries nothing else."""
    state = Plan.baseline(about()).states(Tier.DEVICE)
    rates = replace(FAST, up_bytes_per_s=1e9, down_bytes_per_s=1e9, device_bytes_per_s=1e9)
    budget = int((state + 12 * MIB) / 0.9) + 1  # all inputs would take 13 MiB with a block that runs again
    known = about(rates=rates, device_bytes=budget)
    assert planned(known, policy="auto", activation_offloading=False).peak(Tier.DEVICE) > state + 12 * MIB
    plan = planned(known, policy="auto")
    assert plan.peak(Tier.DEVICE) <= state + 12 * MIB + 1 and sum(hosted(plan)) > 0
    small = planned(replace(known, machine=replace(known.machine, host_bytes=MIB)), policy="auto")
    assert sum(hosted(small)) == 0
    without = planned(replace(known, machine=replace(known.machine, rates=None)), policy="auto")
    assert sum(hosted(without)) == 0  # nobody knows whether the link has room


@pytest.mark.parametrize(("link", "sends"), [(1e9, True), (1e5, False)])
def test_auto_weighs_the_link(link: float, sends: bool) -> None:
    """Products are dear, so a fast link is worth its while, with half the host's room as well; a slow one is not."""
    rates = replace(FAST, gemm_fp32_flops_per_s=1e11, up_bytes_per_s=link, down_bytes_per_s=link)
    state = Plan.baseline(about(8)).states(Tier.DEVICE)
    known = about(8, rates=rates, device_bytes=int((state + 22 * MIB) / 0.9) + 1)
    plan = planned(known, policy="auto")
    room = plan.peak(Tier.HOST) // 2
    half = planned(replace(known, machine=replace(known.machine, host_bytes=room)), policy="auto")
    assert half.peak(Tier.HOST) <= room
    for each in (plan, half):
        assert (sum(hosted(each)) > 0) is sends
        assert each.peak(Tier.DEVICE) <= state + 22 * MIB + 1


@pytest.mark.parametrize(("link", "mib", "sends"), [(1e10, 40, True), slowly(1e8, 60, False)])
def test_with_offload_the_simulator_says_whether_the_link_has_room(link: float, mib: int, sends: bool) -> None:
    """A fast link carries products and inputs, and saves making them again; a slow one is busy with weights."""
    rates = replace(FAST, gemm_fp32_flops_per_s=1e11, up_bytes_per_s=link, down_bytes_per_s=link)
    given: dict[str, Any] = {"host_memory": "1TiB", "gpu_memory": mib * MIB, "accumulation": "micro_batches"}
    seconds = {}
    for allowed in ("auto", False):
        plan = planned(about(8, rates=rates), policy="auto", activation_offloading=allowed, offload=given)
        priced = plan_cost(plan)
        assert priced is not None and plan.peak(Tier.DEVICE) <= mib * MIB
        seconds[allowed] = priced.seconds
        assert (sum(hosted(plan)) > 0) is (sends and allowed == "auto")
    assert seconds["auto"] <= seconds[False] * (0.9 if sends else 1)


def test_the_host_must_hold_it() -> None:
    given = {"host_memory": "1TiB", "accumulation": "micro_batches"}
    plan = planned(about(8, rates=FAST), policy="full", activation_offloading=True, offload=given)
    assert plan.addresses is not None and plan.hosted_bytes() > 7 * MIB
    assert plan.peak(Tier.HOST) == plan.addresses.num_bytes(Tier.HOST)
    assert plan.addresses.of("", Item.SAVED).num_bytes == plan.hosted_bytes()
    assert sum(row.num_bytes for row in rows(plan) if row.tier is Tier.HOST) == plan.peak(Tier.HOST)

    def peak(host_memory: Any) -> int:
        given = {"site": "host", "gpu_memory": "1GiB", "host_memory": host_memory}
        return planned(about(8), policy="full", activation_offloading=True, offload=given).peak(Tier.HOST)

    enough = peak("1TiB")
    assert peak(enough) == enough
    with pytest.raises(Refusal, match="host_memory"):
        peak(enough - MIB)


# --- together with offload -------------------------------------------------------------------------------------------


def test_what_is_open_is_decided_again() -> None:
    plan = planned(about(rates=FAST), policy="auto", offload={"host_memory": "1TiB"})
    assert {plan.answers["Keep", f"layers.{i}"][1] for i in range(4)} == {"offload"}
    assert policies(plan) == [NONE] * 4  # there is room for all
    fixed = planned(about(rates=FAST), policy="full", offload={"host_memory": "1TiB"})
    assert {fixed.answers["Keep", f"layers.{i}"][1] for i in range(4)} == {"recompute"}


def test_without_rates_offload_comes_first() -> None:
    def chosen(mib: int, policy: str = "auto") -> list[str]:
        return policies(planned(about(12), policy=policy, offload={"host_memory": "1TiB", "gpu_memory": mib * MIB}))

    assert chosen(200) == [NONE] * 12
    with pytest.raises(Refusal):  # all that is saved does not fit, however much is moved
        chosen(90, "none")
    assert 0 < sum(policy != NONE for policy in chosen(90)) < 12
    with pytest.raises(Refusal, match="gpu_memory"):
        chosen(9)


# --- shown -----------------------------------------------------------------------------------------------------------


def test_the_report_has_bytes_and_milliseconds_per_policy() -> None:
    plan = planned(about(rates=replace(FAST, device_bytes_per_s=1e9)), policy="full", every=2)
    rows = {row["policy"]: row for row in full_report.recompute_rows(plan)}
    assert [rows[name]["kept_bytes"] for name in rows] == [36 * MIB, 12 * MIB, 4 * MIB, 20 * MIB]
    assert rows["full"]["freed_bytes"] == 32 * MIB
    assert rows["this plan"]["blocks"] == 2
    assert rows["full"]["seconds"] == pytest.approx(2 * 4 * (4 * MIB / 1e9 + 1.01e9 / 1e12))
    sent = planned(about(), policy="selective", activation_offloading=True)
    row = full_report.recompute_rows(sent)[-1]
    assert [row[name] // MIB for name in ("kept_bytes", "hosted_bytes", "freed_bytes")] == [3, 9, 33]
    assert "9.0 MiB" in full_report.text(sent, None).splitlines()[-1]
    assert full_report.to_json(planned(about(), policy="full"), None)["recompute"][1]["seconds"] is None


# --- names -----------------------------------------------------------------------------------------------------------


class Watched(nn.Module):
    """A linear layer, explicit attention, and a product with a stack of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.experts = nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        weights = (y @ y.transpose(1, 2)).softmax(-1)
        return (weights @ y) @ self.experts


def test_names_follow_what_operators_do() -> None:
    found: list[str] = []

    class Listing(OutputRecorder):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append(self._names.of(func, args, kwargs or {}) or "")
            return func(*args, **(kwargs or {}))

    block = Watched()
    with Listing(block, (), (), learns=False):
        block(torch.randn(2, 3, 4))
    assert list(filter(None, found)) == ["linear 0", "scores 0", "softmax 0", "attention 0", "linear 1"]


def test_fused_attention_with_dropout_is_not_kept() -> None:
    """On a GPU its random numbers would be missing when later ones are replayed."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    for dropout in (0.0, 0.1):
        assert bool(Names(nn.Identity()).of(flash, (None, None, None, dropout), {})) is not bool(dropout)
        assert draws(flash, (None, None, None), {"dropout_p": dropout}) is bool(dropout)


def test_attention_to_several_documents_is_one_operator() -> None:
    """So what is kept for a row of two, which is counted, is kept for rows of any number."""
    flash, product = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, torch.ops.aten.mm.default
    names = Names(nn.Identity())
    found = [names.of(func, (torch.empty(1, 1),) * 3, {}) for func in (flash, flash, product, flash)]
    assert found == ["attention 0", "attention 0", "linear 0", "attention 1"]


class InPlace(nn.Module):
    """Adds to its product in place, out of autograd's sight, as DeepSpeed's linear layer of stage 3 does; or out of
    torch's, which counts no writes of foreign kernels.
    """

    class Add(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, foreign: bool) -> Tensor:
            ctx.save_for_backward(x, weight)
            out = x @ weight.t()
            if foreign:
                out.numpy()[...] += 1
            else:
                out += 1
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            x, weight = ctx.saved_tensors
            return grads[0] @ weight, grads[0].t() @ x, None

    def __init__(self, foreign: bool) -> None:
        super().__init__()
        self.foreign = foreign
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.Add.apply(torch.tanh(self.first(x)), self.second.weight, self.foreign))


@pytest.mark.parametrize("foreign", [False, True])
def test_what_is_written_to_in_place_is_not_kept(foreign: bool) -> None:
    def grads(kept: Sequence[str] | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = InPlace(foreign)
        if kept is not None:
            checkpoint_blocks(model, {"": kept})
        for _ in range(3):
            model(torch.randn(2, 4, requires_grad=True)).sum().backward()
        found = checkpointed(model)
        assert found is None or found._written == frozenset({"linear 1"} & set(kept or ()))
        return [param.grad for param in model.parameters() if param.grad is not None]

    for kept in ([], ["linear 0"], ["linear 0", "linear 1"]):
        assert all(torch.equal(one, two) for one, two in zip(grads(None), grads(kept), strict=True))
