"""Two ways to train: a plain loop as anybody would write it, and the engine. What they leave is compared by bits.

In bf16 the plain loop keeps fp32 masters: gradients are summed in bf16, copied to the masters as fp32, clipped and
applied there, and the masters are rounded into the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepstow.strategies.core.compose import compose
from deepstow.strategies.core.facts import Facts, Param, Tier, UnitKind
from deepstow.strategies.core.layout import Bucket, Item, Layout, Site
from deepstow.strategies.core.optimizers import state_names
from deepstow.strategies.core.plan import Plan
from deepstow.strategies.core.protocol import MemoryRefusal
from deepstow.strategies.core.registry import find
from deepstow.strategies.core.validate import check
from deepstow.strategies.engine import AdamW, StowOptimizer, UpdateRule, stow
from deepstow.strategies.engine.transfer.transfer import Transfer
from deepstow.strategies.engine.updating.optim import KERNELS
from deepstow.strategies.planner import weight_schedule
from deepstow.strategies.planner.addresses import place
from deepstow.strategies.planner.buckets import block_bytes
from deepstow.trainer.machine.probe import probe
from deepstow.trainer.planning.plan_for import plan_for
from tests.helpers.doubles import RaceDetector

LR, DECAY = 1e-2, 0.1
LAYOUTS: Mapping[str, dict[str, Any]] = {  # each site with weights that stay and with weights that travel
    "device": {"site": "device"},
    "device, travelling": {"site": "device", "weights": "travelling", "prefetch": 1},
    "host": {"site": "host", "park": "host"},
    "host, travelling": {"site": "host", "weights": "travelling", "bucket": "half"},
    "streamed": {"site": "streamed", "park": "host", "prefetch": 2},
    "streamed, travelling": {"site": "streamed", "weights": "travelling", "prefetch": 0, "park": "host"},
    "mixed": {"site": "mixed", "weights": "some", "park": "host"},
}
STEPS = 3
Batches = Sequence[Mapping[str, Tensor]]
Schedule = Callable[[torch.optim.Optimizer], Any]  # makes a learning-rate scheduler
machine = cache(probe)


@dataclass(slots=True)
class Result:
    """What training leaves. ``tensors``: weight, step and state of every parameter, by its name and torch's names."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def numbers(self, losses: Iterable[Tensor], norms: Iterable[Tensor]) -> None:
        """Taken at the end: on a device whoever asks for a number waits for all that was issued before."""
        self.losses, self.norms = [loss.item() for loss in losses], [norm.item() for norm in norms]


def differences(expected: Result, found: Result) -> list[str]:
    """What is not equal to the last bit; weights that are not finite prove nothing and count as different."""
    wrong = [name for name in ("losses", "norms") if repr(getattr(expected, name)) != repr(getattr(found, name))]
    wrong += sorted(expected.tensors.keys() ^ found.tensors.keys())
    for name in expected.tensors.keys() & found.tensors.keys():
        first, second = expected.tensors[name], found.tensors[name]
        if first.dtype != second.dtype or not torch.equal(first, second) or not first.isfinite().all():
            wrong.append(name)
    return wrong


def groups_of(model: nn.Module, number: int) -> list[dict[str, Any]]:
    """The trained parameters, all alike, or vectors apart with a rate and a decay of their own."""
    trained = [param for param in model.parameters() if param.requires_grad]
    if number == 1:
        return [{"params": trained}]
    matrices = [param for param in trained if param.ndim > 1]
    vectors = [param for param in trained if param.ndim < 2]
    return [{"params": matrices}, {"params": vectors, "lr": LR / 3, "weight_decay": 0.0}]


def checkpointing(model: nn.Module, recompute: str) -> None:
    """Switch recomputation on, unless ``recompute`` is "none"."""
    if recompute != "none":
        enable: Any = model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": recompute == "reentrant"})


def masters_of(model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """What an optimizer updates in place of each trained parameter: fp32 copies of those of less."""
    trained = (param for param in model.parameters() if param.requires_grad)
    return {p: p if p.dtype is torch.float32 else nn.Parameter(p.detach().float()) for p in trained}


adamw = partial(torch.optim.AdamW, lr=LR, weight_decay=DECAY, fused=True)  # what the engine is compared with


def plain(
    model: nn.Module,
    batches: Batches,
    *,
    accumulation: int = 1,
    max_norm: float = 0.0,
    groups: int = 1,
    make: Callable[[Iterable[dict[str, Any]]], torch.optim.Optimizer] = adamw,
    schedule: Schedule | None = None,
) -> Result:
    """Train ``model`` as PyTorch's manual says."""
    result, losses, norms = Result(), list[Tensor](), list[Tensor]()
    masters = masters_of(model)
    mixed = [(param, master) for param, master in masters.items() if param is not master]
    made = [{**group, "params": [masters[p] for p in group["params"]]} for group in groups_of(model, groups)]
    optimizer = make(made)
    scheduler = schedule(optimizer) if schedule else None
    torch.manual_seed(5)
    for window in _windows(batches, accumulation):
        for batch in window:
            loss = model(**batch).loss / accumulation
            loss.backward()
            losses.append(loss.detach())
        for param, master in mixed:
            master.grad = None if param.grad is None else param.grad.float()
        if max_norm:
            norms.append(torch.nn.utils.clip_grad_norm_(masters.values(), max_norm))
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        if scheduler:
            scheduler.step()
        with torch.no_grad():
            for param, master in mixed:
                param.copy_(master)
    names = _state_names(optimizer)
    result.numbers(losses, norms)
    for name, param in model.named_parameters():
        result.tensors[name] = param.detach().cpu().clone()
        if param in masters:
            state = optimizer.state.get(masters[param], {})
            empty = torch.zeros_like(masters[param])
            for key in names:
                never = torch.zeros(()) if key == "step" else empty
                known = state.get(key, never)  # bitsandbytes counts in plain numbers
                result.tensors[f"{name} {key}"] = torch.as_tensor(known, dtype=torch.float32).detach().cpu().clone()
            result.tensors |= {f"{name} master": masters[param].detach().cpu().clone()} if mixed else {}
    return result


def stowed(
    model: nn.Module,
    plan: Plan | Made,
    batches: Batches,
    *,
    accumulation: int = 1,
    max_norm: float = 0.0,
    groups: int = 1,
    rule: UpdateRule | None = None,
    schedule: Schedule | None = None,
    transfer: Transfer | None = None,
    device: str = "cpu",
    tasks: Sequence[tuple[bool, int]] | None = None,
    process_group: Any = None,
    scaled: bool = False,
    layers: bool = False,
    keeps_heads: bool = False,
    draws: bool = False,
    seed: int = 5,
) -> Result:
    """Train ``model`` by the engine, as ``plan`` says. The model has its weights back afterwards.

    Args:
        tasks: of a step, as a pipeline's stage has them: whether it is a backward, and the micro-batch.
        process_group: if it is not the default one.
        scaled: losses are divided by the number of ranks.
        layers: all micro-batches of a step pass a layer before the next; ``plan`` is of one.
        draws: a forward draws random numbers, which only ``layers`` has to know.
    """
    result, losses, norms = Result(), list[Tensor](), list[Tensor]()
    rule = rule or AdamW(lr=LR, weight_decay=DECAY)
    transfer = transfer or Transfer()
    given: Any = plan
    # Copies at once stand for a machine whose device is its memory; there the caller computes host updates itself.
    beside = type(transfer) is not Transfer
    how: dict[str, Any] = {"device": device, "transfer": transfer, "beside": beside, "process_group": process_group}
    optimizer = stow(model, given, groups_of(model, groups), rule, **how)
    scheduler = schedule(optimizer) if schedule else None
    if layers:
        optimizer.set_layerwise(keeps_heads=keeps_heads, draws=draws)
    torch.manual_seed(seed)
    for window in _windows(batches, accumulation):
        waiting: dict[int, Tensor] = {}
        if layers:
            losses += optimizer.backward_all([partial(_loss_of, model, batch, accumulation) for batch in window])
        for backward, number in (
            () if layers else tasks or [(each, number) for number in range(len(window)) for each in (False, True)]
        ):
            if not backward:
                waiting[number] = model(**window[number]).loss / accumulation
                losses.append(waiting[number].detach())
                continue
            if tasks is not None:
                optimizer.engine.begin_backward()
            with optimizer.scaled_loss() if scaled else nullcontext(1) as count:
                (waiting.pop(number) / count).backward()
        if max_norm:
            norms.append(optimizer.clip_grad_norm_(max_norm).clone())
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
    result.numbers(losses, norms)
    weights = model.state_dict()
    result.tensors |= {name: weights[name].cpu().clone() for name, _ in model.named_parameters()}
    result.tensors |= shared_state(optimizer) if optimizer.is_shared else _own_state(model, optimizer)
    assert optimizer.skipped == 0
    optimizer.close()
    for name, param in model.named_parameters():
        assert torch.equal(param, result.tensors[name]), f"{name} is another one after close()"
    if isinstance(transfer, RaceDetector):
        assert transfer.races == []
    return result


def _loss_of(model: nn.Module, batch: Mapping[str, Tensor], accumulation: int) -> Tensor:
    loss: Tensor = model(**batch).loss / accumulation
    return loss


def _own_state(model: nn.Module, optimizer: StowOptimizer) -> dict[str, Tensor]:
    found, rule = dict[str, Tensor](), optimizer.engine.rule
    for name, param in model.named_parameters():
        if param.requires_grad:
            state = optimizer.state_of(param)
            shown = (
                *rule.names,
                *(("step",) if rule.kernel.counts else ()),
                *(("master",) if "master" in state else ()),
            )
            found |= {f"{name} {key}": state[key].cpu().clone() for key in shown}
    return found


def shared_state(optimizer: StowOptimizer) -> dict[str, Tensor]:
    """Counts, moments and masters of which each rank has a span, whole, by parameter and torch's name. A collective."""
    optimizer.drain()
    engine, found = optimizer.engine, dict[str, Tensor]()
    ranks: Any = engine.ranks
    group = ranks._hosts
    for bucket in engine.buckets:
        if bucket.spec.group is None:
            continue
        parts: dict[str, list[Tensor]] = {}
        for stretch in bucket.stretches():
            with stretch.at_hand():
                state = dict(zip(engine.rule.names, stretch.moments, strict=True))
                state |= {"master": stretch.master} if stretch.master is not None and bucket.spec.mixed else {}
                for key, span in state.items():
                    parts.setdefault(key, []).append(span.cpu().clone())
        spans = {key: torch.cat(some) for key, some in parts.items()}
        mine = torch.tensor([index in {piece.index for piece in bucket.pieces} for index in range(len(bucket.params))])
        counts = torch.where(mine, bucket.memory[Item.STEPS].cpu(), torch.zeros(len(mine)))
        torch.distributed.all_reduce(counts, torch.distributed.ReduceOp.MAX, group=group)
        whole = {key: torch.empty(bucket.spec.num_elements, dtype=span.dtype) for key, span in spans.items()}
        for key, span in spans.items():
            torch.distributed.all_gather_into_tensor(whole[key], span.cpu(), group=group)
        for index, name in enumerate(bucket.spec.params):
            found |= {f"{name} {key}": bucket.shaped(flat, index).clone() for key, flat in whole.items()}
            found |= {f"{name} step": counts[index]} if engine.rule.kernel.counts else {}
    return found


def _windows(batches: Batches, accumulation: int) -> list[Batches]:
    return [batches[start : start + accumulation] for start in range(0, len(batches), accumulation)]


def _state_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Torch's names; torch.optim.SGD counts nothing."""
    kind, defaults = type(optimizer).__name__, optimizer.defaults
    counts = ("step",) if KERNELS[kind].counts else ()
    return (*counts, *state_names(kind, defaults))


# --- plans -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Made:
    """What ``stow`` reads of a plan, for layouts that the planner does not make."""

    layout: Layout
    place: Any
    facts: Any

    @classmethod
    def of(cls, layout: Layout, params: Iterable[Param], ranks: int = 1, *, debug: bool = True) -> Made:
        """``layout`` at its addresses, if it is valid."""
        addresses = place(layout)
        check(layout, addresses, params)
        here = SimpleNamespace(addresses=addresses, debug=debug)
        run = SimpleNamespace(copies=ranks, adding_copies=ranks, two_level=0, layerwise=1)
        return cls(layout, here, SimpleNamespace(run=run, units=()))

    def hosted_bytes(self) -> int:
        """Nothing waits on the host."""
        return 0


def planned(facts: Facts, *, zero: Mapping[str, Any] | None = None, debug: bool = False, **offload: Any) -> Plan:
    """What ``plan_for`` makes of a model that has been counted."""
    options = {"gpu_memory": "auto", "host_memory": "auto", **offload}
    asked = {"offload": options, "buffers": {"debug": debug}} | ({} if zero is None else {"zero": zero})
    return compose({name: find(name).model_validate(given) for name, given in asked.items()}, facts)


def least(model: nn.Module, *, batch: Any = None, max_grad_norm: float | None, **known: Any) -> Plan:
    """The planner's plan at the smallest budget that it does not refuse."""
    counted = {name: known.pop(name) for name in ("machine", "world_size") if name in known}
    return least_of(plan_for(model, eval_rows=0, batch=batch, max_grad_norm=max_grad_norm, **counted).facts, **known)


def least_of(facts: Facts, **known: Any) -> Plan:
    """The same of a model that has been counted."""
    with pytest.raises(MemoryRefusal) as refused:
        planned(facts, gpu_memory="1KiB", **known)
    plan = planned(facts, gpu_memory=refused.value.needed, **known)
    assert plan.place is not None and plan.place.addresses.num_bytes(Tier.DEVICE) <= refused.value.needed
    return plan


def plan_of(
    model: nn.Module,
    *,
    site: str = "device",
    weights: str = "resident",
    bucket: str = "one",
    park: str = "device",
    prefetch: int | str = 2,
    in_backward: bool = False,
    accumulation: int = 1,
    max_norm: float = 0.0,
    groups: int = 1,
    moments: int = 2,
    ranks: int = 1,
    split: bool = True,
    gather: str = "network",
    reduction: str = "exact",
    direct: bool = False,
    visit_slots: int = 2,
    disk: Sequence[str] = (),
    weights_there: bool = False,
    moments_as: str = "fp32",
    rounds: bool = False,
    passing: bool = False,
    debug: bool = True,
) -> Made:
    """What the planner makes of these wishes; of those it has no word for, its layout changed by hand.

    Args:
        site: "device", "host", "streamed", or "mixed": all three in turn.
        weights: "resident", "travelling" (all that only blocks use), or "some": of those every other one, and
            embedding and head.
        bucket: "half" a block, "one", or "several".
        ranks: that share each bucket; ``split``: and the gradients that wait on the device; ``gather``: how they get
            each other's parts of weights; ``reduction``: how they add gradients.
        direct: gradients that wait on the host, for updates there, have no slot.
        moments_as: how moments rest; ``rounds``: weights in bf16 are their own masters.
        passing: gradients pass the host in slots.
        disk: folders, where the state of all buckets rests that are updated on the host, and frozen weights that
            travel; two slots for each. ``weights_there``: and the weights of all these that travel.
    """
    params = groups_of(model, groups)
    size = "auto"
    if bucket != "one":
        facts = plan_for(model, params, max_grad_norm=max_norm, machine=machine(), world_size=1).facts
        size = str(int({"half": 0.5, "several": 2}[bucket] * block_bytes(facts)))
    made = plan_for(
        model,
        params,
        accumulation=accumulation,
        world_size=ranks,
        zero={"stage": 3} if ranks > 1 else None,
        max_grad_norm=max_norm,
        moments=moments,
        machine=machine(),
        debug=True,
        site="device" if site == "mixed" else site,
        weights="resident" if weights == "resident" else "streamed",
        gradients=park,
        prefetch=prefetch,
        gather=gather if ranks > 1 else "auto",
        update_in_backward=in_backward,
        reduction=reduction,
        bucket_size=size,
    )
    assert made.layout is not None
    buckets = made.layout.buckets
    if site == "mixed":
        buckets = _in_turn(buckets, Tier.HOST if park == "host" else Tier.DEVICE, ranks)
    moving = _moving(buckets, made.facts, weights)
    of_blocks = _moving(buckets, made.facts, "travelling") if passing else []
    taking = {buckets[index].name for index in of_blocks if rounds or weights_there or not buckets[index].mixed}
    there = {b.name for b in buckets if disk and b.site is Site.HOST and b.state_bytes(moments) > 0}
    changes = (
        {
            "grad_split": b.grad_split and split,
            "grad_direct": (b.site, b.grad_tier) == (Site.HOST, Tier.HOST) if direct else b.grad_direct,
            "on_disk": (bool(disk) and b.site is Site.NONE) or b.name in there,
            "copy_on_disk": weights_there and b.name in there,
            "resident_ticks": (),
            "rounds": rounds and b.group is not None,
            "grad_taken": b.name in taking
            and b.site is Site.HOST
            and (accumulation == 1 or b.grad_tier is Tier.DEVICE),
        }
        for b in buckets
    )
    buckets = tuple(replace(b, **change) for b, change in zip(buckets, changes, strict=True))
    bare = replace(made.layout, buckets=buckets, visit_slots=visit_slots)
    bare = replace(bare, disk=tuple(disk), window_slots=2, window_elements=512, moments_as=moments_as)
    bare = weight_schedule.only_while_used(bare, moving, int(prefetch))
    return Made.of(bare, made.facts.params, ranks, debug=debug)


def _moving(buckets: Sequence[Bucket], facts: Facts, weights: str) -> list[int]:
    """The buckets whose weights travel, as ``plan_of`` has it."""
    blocks = {unit.name for unit in facts.units if unit.kind is UnitKind.BLOCK}
    of_blocks = [index for index, b in enumerate(buckets) if set(b.units) <= blocks]
    moving = {"resident": [], "travelling": of_blocks, "some": of_blocks[::2] + _ends(buckets, facts)}[weights]
    assert bool(moving) is (weights != "resident")
    return moving


def _ends(buckets: Sequence[Bucket], facts: Facts) -> list[int]:
    """Buckets of embedding and head that are not in use while blocks run."""
    stay = {param.name for param in facts.params if param.elsewhere}
    blocks = {unit.name for unit in facts.units if unit.kind is UnitKind.BLOCK}
    return [i for i, b in enumerate(buckets) if not blocks.intersection(b.units) and stay.isdisjoint(b.params)]


def _placed(bucket: Bucket, site: Site, grad_tier: Tier) -> Bucket:
    home = Tier.DEVICE if site is Site.DEVICE else grad_tier
    split = bucket.grad_split and site is not Site.HOST and home is Tier.DEVICE
    return replace(bucket, site=site, grad_tier=home, grad_split=split)


def _in_turn(buckets: Iterable[Bucket], grad_tier: Tier, ranks: int) -> tuple[Bucket, ...]:
    """All three sites. Over ranks a slot is one bucket's until backward has left it, so wide buckets have none."""
    sites = (Site.HOST, Site.DEVICE, Site.STREAMED)
    turn = {b.name: sites[index % 3] for index, b in enumerate(b for b in buckets if b.group is not None)}
    placed = (_placed(b, turn[b.name], grad_tier) if b.name in turn else b for b in buckets)
    return tuple(replace(b, grad_tier=Tier.DEVICE) if ranks > 1 and len(b.units) > 2 else b for b in placed)
