"""Composing: baseline, then every strategy in the order of its phase, into one plan.

The order in the config file has no influence. A strategy may only give the kinds of answer that belong to its
phase; that is a promise to the reader of a strategy file, checked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from strategies.core.facts import Facts
from strategies.core.plan import Decision, EngineSet, Impl, Keep, Place, Plan, Reserve, Rest, Share, Stow, Travel
from strategies.core.protocol import Idle, Phase, Strategy
from strategies.core.registry import find

ANSWERS: Mapping[Phase, tuple[type[Decision], ...]] = {
    Phase.HOW: (Impl, Reserve, EngineSet),
    Phase.WHO: (Share, Reserve, EngineSet),
    Phase.KEEP: (Keep, EngineSet),
    Phase.WHERE: (Share, Rest, Travel, Stow, Keep, EngineSet),
    Phase.WHEN: (Travel, EngineSet),
    Phase.BUFFER: (Reserve, Place, EngineSet),
}
ORDER = tuple(Phase)


def in_order(strategies: Mapping[str, Strategy]) -> list[tuple[str, Strategy]]:
    """By phase, then by name: the order of deciding."""
    return sorted(strategies.items(), key=lambda item: (ORDER.index(item[1].phase), item[0]))


def with_implied(strategies: Mapping[str, Strategy]) -> dict[str, Strategy]:
    """``strategies`` and, with their default options, those that they cannot do without."""
    whole = dict(strategies)
    waiting = list(whole.values())
    while waiting:
        for name in waiting.pop().implies:
            if name not in whole:
                whole[name] = find(name)()
                waiting.append(whole[name])
    return whole


def compose(strategies: Mapping[str, Strategy], facts: Facts) -> Plan:
    """The plan of ``strategies`` (by config name) for ``facts``.

    Raises:
        Conflict: two strategies answer one question differently.
        Refusal: a strategy's options cannot work with these facts.
    """
    plan = Plan.baseline(facts)
    idle: dict[str, str] = {}
    for name, strategy in in_order(with_implied(strategies)):
        try:
            decisions = list(strategy.decide(facts, plan))
        except Idle as nothing_to_do:
            idle[name] = str(nothing_to_do)
            continue
        allowed = ANSWERS[strategy.phase]
        for decision in decisions:
            assert isinstance(decision, allowed), f"{name} may not decide {type(decision).__name__}"
        if not decisions:
            idle[name] = "decided nothing"
        plan = plan.amend(decisions, by=name)
    return replace(plan, idle=MappingProxyType(idle))
