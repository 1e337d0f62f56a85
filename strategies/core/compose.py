"""Composing: the baseline, then the answers of every strategy in the order of phases, make one plan.

The order in the config has no influence. A strategy may only give the answers of its phase, so that the reader of its
file knows what it can change. Two answers depend on more: keys of DeepSpeed's config are set by strategies that require
its engine, and what forward keeps may be decided again where the first answer is ``open``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from deepstow.strategies.core import compatibility
from deepstow.strategies.core.facts import Facts, Precision, RunFacts
from deepstow.strategies.core.grid import grid_of
from deepstow.strategies.core.plan import (
    BASELINE,
    RUN,
    Decision,
    EngineSet,
    Impl,
    Keep,
    Kind,
    Place,
    Plan,
    Reserve,
    Share,
    Stow,
)
from deepstow.strategies.core.protocol import Axis, Idle, Phase, Refusal, Requirement, Strategy
from deepstow.strategies.core.registry import find, rules

ANSWERS: Mapping[Phase, tuple[type[Decision], ...]] = {
    Phase.HOW: (Impl, Reserve),
    Phase.WHO: (Share, Reserve),
    Phase.KEEP: (Keep,),
    Phase.WHERE: (Share, Stow),
    Phase.BUFFER: (Place, Reserve),
}
ORDER = tuple(Phase)


def in_order(strategies: Mapping[str, Strategy]) -> dict[str, Strategy]:
    """``strategies``, and those that they imply, in the order of deciding: by phase and name. Those that another one
    takes over are not among them; where two would, the one that decides last does.
    """
    complete = dict(strategies)
    waiting = list(complete.values())
    spared = {name for strategy in waiting for name in strategy.spares}
    while waiting:
        for name, options in waiting.pop().implies.items():
            if name not in complete and name not in spared:
                complete[name] = find(name).model_validate(options)
                waiting.append(complete[name])
    ordered = sorted(complete.items(), key=lambda item: (ORDER.index(item[1].phase), item[0]))
    for name, strategy in reversed(ordered):
        if others := {covered: complete.pop(covered) for covered in strategy.takes_over if covered in complete}:
            complete[name] = strategy.beside(others)
    return dict(sorted(complete.items(), key=lambda item: (ORDER.index(item[1].phase), item[0])))


def requirements_of(strategies: Mapping[str, Strategy]) -> frozenset[Requirement]:
    """What ``strategies`` and those that they imply require."""
    return frozenset(requirement for strategy in in_order(strategies).values() for requirement in strategy.requires)


def casts(strategies: Mapping[str, Strategy], precision: Precision) -> bool:
    """Whether weights are in the dtype of compute. In fp16 they are DeepSpeed's only: the memory engine keeps them in
    fp32, with torch's autocast and GradScaler, as plain training does.
    """
    required = requirements_of(strategies)
    engine_is_ours = precision is Precision.FP16 and Requirement.DEEPSPEED not in required
    return Requirement.COMPUTE_DTYPE in required and precision is not Precision.FP32 and not engine_is_ours


def degrees(strategies: Mapping[str, Strategy]) -> dict[Axis, int]:
    """Over how many ranks the model is divided along each axis."""
    return {axis: count for strategy in strategies.values() for axis, count in strategy.divides().items()}


def refusals(strategies: Mapping[str, Strategy], run: RunFacts) -> Iterator[Refusal]:
    """Every option of ``strategies`` that cannot work in such a run, whatever the model and the machine are."""
    try:
        grid_of(run.world_size, stages=run.stages, tensor=run.tensor, slices=run.slices)
    except ValueError as error:
        axis = max(degrees(strategies), key=lambda axis: degrees(strategies)[axis])
        yield Refusal(axis.value, degrees(strategies)[axis], str(error))
    yield from compatibility.refusals(rules(strategies), strategies, run)
    for strategy in in_order(strategies).values():
        yield from strategy.refusals(run)


def compose(strategies: Mapping[str, Strategy], facts: Facts) -> Plan:
    """The plan of ``strategies`` (by config name) for ``facts``. Raise Conflict if two of them answer one question
    differently, Refusal if options cannot work with these facts, TypeError if an answer is not the strategy's to give.
    """
    for refusal in refusals(strategies, facts.run):
        raise refusal
    by: Callable[[Facts], Plan] = partial(_composed, strategies)
    for strategy in in_order(strategies).values():
        by = partial(strategy.planned, by)
    return by(facts)


def _composed(strategies: Mapping[str, Strategy], facts: Facts) -> Plan:
    plan = Plan.baseline(facts)
    idle: dict[str, str] = {}
    for name, strategy in in_order(strategies).items():
        try:
            decisions = list(strategy.decide(facts, plan))
        except Idle as nothing_to_do:
            idle[name] = str(nothing_to_do)
            continue
        for decision in decisions:
            _check_answer(name, strategy, decision, plan)
        if not decisions:
            idle[name] = "decided nothing"
        plan = plan.amend(decisions, by=name)
    plan = plan.amend(_sums_over_ranks(plan), by=BASELINE)
    return replace(plan, idle=MappingProxyType(idle))


def _sums_over_ranks(plan: Plan) -> Iterator[Reserve]:
    """What torch's DistributedDataParallel holds, which sums the gradients of whole models where nothing else does."""
    run = plan.facts.run
    alone = run.compression is not None and run.compression.local_steps
    if run.copies > 1 and plan.layout is None and not plan.engine() and plan.facts.cut is None and not alone:
        yield Reserve(
            unit=RUN,
            reason="gradients are copied into buckets and summed over the ranks there",
            owner="data parallel: buckets",
            num_bytes=plan.total(Kind.GRAD) - run.apart * run.trained_bytes,
        )


def _check_answer(name: str, strategy: Strategy, decision: Decision, plan: Plan) -> None:
    """Raise TypeError if this question is not one that ``strategy`` answers."""
    allowed = ANSWERS[strategy.phase]
    if isinstance(decision, EngineSet):
        its_own = Requirement.DEEPSPEED in strategy.requires
    elif isinstance(decision, Keep) and strategy.phase is not Phase.KEEP:
        its_own = plan.keep(decision.unit).open
    else:
        its_own = isinstance(decision, allowed)
    if not its_own:
        names = ", ".join(kind.__name__ for kind in allowed)
        raise TypeError(
            f"strategies.{name} may not decide {type(decision).__name__}: its phase, {strategy.phase.name}, "
            f"answers {names}"
        )
