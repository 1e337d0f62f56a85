"""The plan in at most twelve lines, in words that need no page: whether it fits, how fast a step is and what it waits
for, what each strategy does, and what would make it faster. ``full_report.py`` has the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from deepstow.strategies.core.layout import Layout, Site
from deepstow.strategies.core.on_disk import disk_bytes
from deepstow.strategies.core.plan import BASELINE, CHUNKS, Decision, Keep, Kind, Place, Plan, Share, Stow, Tier
from deepstow.strategies.core.protocol import Axis
from deepstow.strategies.core.sizes import human
from deepstow.strategies.planner.budget import loading_bytes
from deepstow.strategies.planner.step_cost import cost_of, device_update, empty, plan_cost
from deepstow.strategies.planner.tasks import Resource
from deepstow.strategies.report.plan_table import order_of, tiers_of

MOST, MOST_STRATEGIES, MOST_EDITS = 12, 4, 3  # lines
LABEL = 16  # columns
LONGEST = 160  # characters of what a strategy says of itself
WORTH = 1.1  # times the peak, from which on what loading takes is said
BINDS = {
    Resource.COMPUTE: "compute",
    Resource.UP: "copies over the link to the device",
    Resource.DOWN: "copies over the link from the device",
    Resource.CPU: "weight updates on the host's CPU",
    Resource.NET: "the network between ranks",
    Resource.DISK: "the disk",
}
UPDATED = {
    Site.HOST: "on the CPU",
    Site.STREAMED: "on the device with state that visits it",
    Site.DEVICE: "on the device",
}
WORDS = {
    Kind.PARAM: "weights",
    Kind.GRAD: "gradients",
    Kind.MASTER: "optimizer state",
    Kind.MOMENT: "optimizer state",
}


@dataclass(frozen=True, slots=True)
class Step:
    """A simulated step: how long it takes, what has the largest part of its critical path, and how large that is."""

    seconds: float
    binds: Resource
    share: float
    rates: str  # where they are from


def simulated(plan: Plan) -> Step | None:
    """The step of ``plan``; of one that stows nothing, with all updates on the device after backward. None: over a
    network, or unknown rates.
    """
    cost = plan_cost(plan)
    rates = plan.facts.machine.rates
    run = plan.facts.run
    update_s = 0.0
    if cost is None:
        if rates is None or not run.forward_flops or run.world_size > 1:
            return None
        facts = plan.facts_as_kept()
        cost = cost_of(facts, empty(facts), rates)
        update_s = device_update(facts.num_trainable, rates)
    binds = cost.outcome.binds
    seconds = cost.seconds + update_s + cost.waits_s(run)
    path_s = cost.outcome.critical[binds] + update_s * (binds is Resource.COMPUTE)
    return Step(seconds, binds, path_s / seconds, cost.origin)


def lines(
    plans: Sequence[Plan],
    budgets: Mapping[Tier, int],
    *,
    advice: Sequence[str] = (),
    notes: Sequence[str] = (),
    asked: Collection[str] = (),
    more: str,
) -> list[str]:
    """The short plan.

    Args:
        plans: of the stages, in order; shown is the one that needs most of the device.
        budgets: bytes that one rank may have.
        advice: changes of the config that would make a step faster, the best first.
        notes: said as far as there is room.
        asked: names of strategies in the config, of which it is said that they have nothing to do.
        more: where the whole plan is.
    """
    plan = max(plans, key=lambda each: each.peak(Tier.DEVICE))
    lacking = missing(plan, budgets)
    head = [_title(plan, lacking), *_memory(plans, plan, budgets), _row("time per step", _step(plan))]
    effect_rows = [_row(name, words) for name, words in effects(plan, asked).items()]
    if len(effect_rows) > MOST_STRATEGIES:
        others = ", ".join(line.split()[0] for line in effect_rows[MOST_STRATEGIES - 1 :])
        effect_rows = [*effect_rows[: MOST_STRATEGIES - 1], _row("and also", others)]
    edits = [] if lacking else [line.strip() for line in advice[:MOST_EDITS]]
    faster = [_row("faster with" if number == 0 else "", edit) for number, edit in enumerate(edits)]
    room = MOST - 1 - len(head) - len(effect_rows) - len(faster)
    return [*head, *effect_rows, *faster, *(_row("note", note) for note in notes[:room]), _row("more", more)]


def missing(plan: Plan, budgets: Mapping[Tier, int]) -> dict[Tier, int]:
    """Bytes beyond what one rank may have, by tier. A CPU's device is its host memory, too."""
    peaks = {tier: plan.peak(tier) for tier in Tier}
    beyond = {tier: peaks[tier] - budgets[tier] for tier in Tier}
    if not plan.facts.machine.has_accelerator:
        beyond[Tier.HOST] = max(beyond[Tier.HOST], sum(peaks.values()) - plan.facts.machine.host_bytes)
    return {tier: size for tier, size in beyond.items() if size > 0}


def _row(label: str, words: str) -> str:
    return f"{label:<{LABEL}}{words}"


def _title(plan: Plan, lacking: Mapping[Tier, int]) -> str:
    facts, run = plan.facts, plan.facts.run
    answer = "it fits"
    if lacking:
        answer = "it does not fit: " + ", ".join(f"{tier.value} lacks {human(size)}" for tier, size in lacking.items())
        capacity = {Tier.DEVICE: facts.machine.device_bytes, Tier.HOST: facts.machine.host_bytes}
        if all(plan.peak(tier) <= capacity[tier] for tier in lacking):
            answer = "it may fit, with less to spare than is safe"
    size = _count(run.model_params or facts.num_params)
    trained = "" if facts.num_trainable == facts.num_params else f", {_count(facts.num_trainable)} of them trained"
    where = f"{run.grid.words} on {facts.machine.name}"
    precision = run.computes_in.value
    return f"plan: {answer}. {size} parameters{trained}, {precision}, {where}, {run.tokens_per_step:,} tokens per step"


def _count(params: int) -> str:
    return f"{params / 1e9:.3g} B" if params >= 1e9 else f"{params / 1e6:.3g} M"


def _memory(plans: Sequence[Plan], plan: Plan, budgets: Mapping[Tier, int]) -> Iterator[str]:
    """A line for each tier that a rank uses: its peak, and what it may have."""
    machine = plan.facts.machine
    ranks = " on each rank" if plan.facts.run.world_size > 1 else ""
    if len(plans) > 1:
        ranks = f" on each rank of stage {plan.facts.run.stage}, which needs most"
    for tier in tiers_of(plan):
        words = f"{human(plan.peak(tier))} of {human(budgets[tier])}{ranks}"
        if tier is Tier.DEVICE and not machine.has_accelerator:
            words += " (no accelerator: of this machine's own)"
        if tier is Tier.HOST and (loading := loading_bytes(plan)) > WORTH * plan.peak(tier):
            words += f"; up to {human(loading)} while the model is loaded"
        yield _row(f"{tier.value} memory", words)
    if plan.layout is not None and (size := disk_bytes(plan.layout)):
        yield _row("disk", f"{human(size)}{ranks} in {', '.join(plan.layout.disk)}")


def _step(plan: Plan) -> str:
    cost = simulated(plan)
    if cost is None:
        if plan.facts.machine.rates is None:
            return "not simulated: how fast this machine is was not measured; deepstow doctor --rates does that"
        return "not simulated for ranks that exchange gradients; deepstow search compares them"
    rate = plan.facts.run.tokens_per_step / cost.seconds
    return (
        f"{cost.seconds:.3g} s (simulated; rates: {cost.rates}), {rate:,.0f} tokens/s; "
        f"bound by {BINDS[cost.binds]} ({cost.share:.0%})"
    )


def _and(*parts: str) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


# --- what each strategy does -----------------------------------------------------------------------------------------


def effects(plan: Plan, asked: Collection[str] = ()) -> dict[str, str]:
    """What strategies do, by name; also of those that were ``asked`` for and have nothing to do."""
    decided: dict[str, list[Decision]] = {}
    for decision, by in plan.answers.values():
        if by != BASELINE:
            decided.setdefault(by, []).append(decision)
    by_name = {name: words for name, decisions in decided.items() if (words := _effect(plan, decisions))}
    if words := _recomputed(plan):
        by_name["recompute"] = words
    if plan.facts.cut is not None:
        stages = plan.facts.run.stages
        by_name[Axis.STAGES.value.split(".")[1]] = f"{stages} stages of layers, one behind the other, each on its ranks"
    stowing = [name for name, decisions in decided.items() if any(isinstance(decision, Stow) for decision in decisions)]
    ordered = {name: by_name[name] for name in (*stowing, *by_name) if name in by_name}
    return ordered | {name: f"nothing to do: {why}" for name, why in plan.idle.items() if name in asked}


def _effect(plan: Plan, decisions: Sequence[Decision]) -> str:
    """What one strategy's decisions come to; empty if it is all part of what another one does."""
    if any(isinstance(decision, Stow) for decision in decisions):
        assert plan.layout is not None
        return "; ".join(_stowed(plan, plan.layout))
    if any(isinstance(decision, Place) for decision in decisions):
        return ""
    if divided := {share.kind: share.shards for share in decisions if isinstance(share, Share) and share.shards > 1}:
        kinds = dict.fromkeys(WORDS[kind] for kind in Kind if kind in divided)
        return f"each of {max(divided.values())} ranks holds its part of {_and(*kinds)}"
    if chunks := [keep for keep in decisions if isinstance(keep, Keep) and keep.policy == CHUNKS]:
        freed = sum(plan.facts.unit(keep.unit).saved_bytes - keep.saved_bytes for keep in chunks)
        return f"the loss is computed by chunks, which frees {human(freed)} of the device"
    reasons = (decision.reason for decision in decisions if not isinstance(decision, Keep) and decision.reason)
    words = next(iter(dict.fromkeys(reasons)), "")
    return words if len(words) <= LONGEST else f"{words[: LONGEST - 3]}..."


def _stowed(plan: Plan, layout: Layout) -> Iterator[str]:
    """What rests on the host, and where weights are updated."""
    totals = Counter[str]()
    for kind, noun in WORDS.items():
        totals[noun] += plan.total(kind, Tier.HOST)
    parts = [f"{human(size)} of {noun}" for noun, size in totals.items() if size]
    where = "host and disk hold" if disk_bytes(layout) else "the host holds"
    yield f"{where} {_and(*parts)}" if parts else "all stays on the device"
    if (ranks := max(bucket.shards for bucket in layout.buckets)) > 1:
        yield f"each of {ranks} ranks holds its part of the state"
    sizes = Counter[Site]()
    for bucket in layout.buckets:
        sizes[bucket.site] += bucket.num_elements
    trained = sum(sizes[site] for site in UPDATED)
    shares = [f"{sizes[site] / trained:.0%} {words}" for site, words in UPDATED.items() if sizes[site]]
    if shares and parts:
        yield f"updates: {', '.join(shares)}"
    yield from order_of(plan)
    if layout.moments_as != "fp32" or any(bucket.rounds for bucket in layout.buckets):
        yield f"not exact: moments in {layout.moments_as}"


def _recomputed(plan: Plan) -> str:
    """What backward computes again, and what waits on the host instead."""
    blocks = [unit for unit in plan.facts.units if unit.choices is not None]
    keeps = {unit.name: plan.keep(unit.name) for unit in blocks}
    again = [unit for unit in blocks if keeps[unit.name].recomputes]
    if not again:
        return ""
    hosted = plan.hosted_bytes()
    freed = plan.facts.run.layerwise * sum(unit.saved_bytes - keeps[unit.name].saved_bytes for unit in again)
    waits = f"; {human(hosted)} wait on the host" if hosted else ""
    return f"backward computes parts of {len(again)} of {len(blocks)} layers again, which frees {human(freed)}{waits}"
