"""Facts and strategies made by hand: integers in, plan out."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import PrivateAttr

from deepstow.strategies.core import compatibility
from deepstow.strategies.core.compose import in_order
from deepstow.strategies.core.facts import (
    NO_WORK,
    Choices,
    Facts,
    MachineFacts,
    Operator,
    Precision,
    RunFacts,
    Unit,
    UnitKind,
    Work,
)
from deepstow.strategies.core.plan import Decision, Plan
from deepstow.strategies.core.protocol import BITWISE, Parity, Phase, Requirement, Strategy
from deepstow.strategies.core.registry import rules

GPU = MachineFacts("test gpu", device_bytes=1 << 40, host_bytes=1 << 40)
CPU = MachineFacts("cpu", device_bytes=1 << 40, host_bytes=1 << 40)


def run_facts(**changes: Any) -> RunFacts:
    """One rank, fp32, no accumulation, unless changed."""
    plain: dict[str, Any] = {
        "micro_batch": 2, "sequence": 8, "accumulation": 1, "max_grad_norm": 0.0, "precision": Precision.FP32,
        "world_size": 1,
    }  # fmt: skip
    return RunFacts(**plain | changes)


def facts(*units: Unit, machine: MachineFacts = GPU, **run: Any) -> Facts:
    """Facts of ``units``; without any, an embedding, two blocks and a head of easy sizes."""
    return Facts(
        units or (embedding(10, 1000), block(0, 20, 2000), block(1, 30, 3000), head(40, 4000)),
        run_facts(**run),
        machine,
    )


def embedding(num_params: int, saved_bytes: int = 0) -> Unit:
    return Unit("embedding", UnitKind.EMBEDDING, num_params, num_params, saved_bytes)


def block(index: int, num_params: int, saved_bytes: int = 0, num_trainable: int | None = None) -> Unit:
    trainable = num_params if num_trainable is None else num_trainable
    return Unit(f"layers.{index}", UnitKind.BLOCK, num_params, trainable, saved_bytes)


def choosing(
    unit: Unit, *operators: Operator, input_bytes: int = 0, rest: Work = NO_WORK, stream_bytes: int = 0
) -> Unit:
    """``unit`` with what may be kept of it; while it runs again its input is there as well."""
    running = unit.saved_bytes + input_bytes
    return replace(unit, choices=Choices(input_bytes, running, operators, rest, stream_bytes))


def head(num_params: int, saved_bytes: int = 0) -> Unit:
    return Unit("head", UnitKind.HEAD, num_params, num_params, saved_bytes)


class Fake(Strategy):
    """Base of test strategies: answers with what it was made from."""

    examples = ({},)
    _answer: Callable[[Facts, Plan], Iterable[Decision]] = PrivateAttr()

    def parity(self, run: RunFacts) -> Parity:
        return BITWISE

    def decide(self, facts: Facts, plan: Plan) -> Iterable[Decision]:
        return self._answer(facts, plan)


def fake(
    phase: Phase,
    answer: Callable[[Facts, Plan], Iterable[Decision]] | Iterable[Decision],
    requires: frozenset[Requirement] = frozenset(),
) -> Strategy:
    """A strategy of ``phase`` that gives these decisions, or what the function makes of facts and plan."""
    made: Fake = type("Made", (Fake,), {"phase": phase, "requires": requires, "__module__": __name__})()
    if callable(answer):
        made._answer = answer
    else:
        given = tuple(answer)
        made._answer = lambda facts, plan: given
    return made


def refusals_of(name: str, strategies: Mapping[str, Any], run: RunFacts) -> list[str]:
    """The lines of the strategy ``name`` beside the others, and those of all rules."""
    ruled = compatibility.refusals(rules(strategies), strategies, run)
    return [str(each) for each in (*ruled, *in_order(strategies)[name].refusals(run))]
