"""Which route each product of each linear layer takes. Pure: timings come in as numbers.

Problem. A BLAS may be much slower when it reads an operand across its rows, and every linear layer has such operands.

Arithmetic, per optimizer step of m micro-batches, for a weight of |W| bytes stored outputs x inputs:
    as it is          forward reads it across its rows: f |W|, f = m, or 2 m with recomputation
    a turned copy     dgrad does instead: m |W|; and the copy is written once: |W|, nothing where it replaces a cast
    both              neither: |W| for writing the copy
wgrad reads one of its operands across in all three. ``minimal`` counts and takes the least; a tie keeps the layer.

``fastest`` counts nothing but seconds: those of each product over each route, times how often it runs, plus making the
copy as often as the weight changes. Forward and dgrad share the copy, so it is judged on their sum.

A layer with routes is Python where torch's own is C++, so its products together must gain more than that costs.

Invariant. A route that is not at least ``MARGIN`` and ``LEAST_S`` faster than torch's own is not taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from strategies.core.facts import Facts, UnitKind
from strategies.core.linears import LEGAL, Gemm, Linear, Route, Routes, Shape, Timed
from strategies.core.plan import Impl, Plan

MARGIN = 0.03  # of the native time: below that the next measurement may say the opposite
LEAST_S = 5e-6


@dataclass(frozen=True, slots=True)
class Uses:
    """How often each product of a layer runs in one optimizer step, and how often its weight changes."""

    forward: int
    dgrad: int
    wgrad: int
    refresh: int

    def of(self, gemm: Gemm) -> int:
        return {Gemm.FORWARD: self.forward, Gemm.DGRAD: self.dgrad, Gemm.WGRAD: self.wgrad}[gemm]


@dataclass(frozen=True, slots=True)
class Choice:
    """Routes of a layer, and its seconds per optimizer step natively and so; 0 where nothing was measured."""

    routes: Routes
    native_s: float = 0.0
    chosen_s: float = 0.0


def uses_of(linear: Linear, accumulation: int) -> Uses:
    """Frequencies of one optimizer step. A frozen weight is turned once in a run, which counts as never."""
    micro = accumulation * linear.calls
    return Uses(
        forward=micro * (2 if linear.recomputed else 1),
        dgrad=micro if linear.passes_back else 0,
        wgrad=micro if linear.trains else 0,
        refresh=int(linear.trains),
    )


# --- counted ---------------------------------------------------------------------------------------------------------


def transposed_bytes(linear: Linear, accumulation: int) -> dict[Routes, int]:
    """Bytes of operands read or written across their rows in one optimizer step, for each way to store the weight."""
    uses, shape = uses_of(linear, accumulation), linear.shape
    weight = shape.weight_bytes
    across = shape.outputs if shape.stored == "out_in" else shape.inputs  # of gradient or input: wgrad reads it so
    wgrad = uses.wgrad * shape.rows * across * weight // (shape.inputs * shape.outputs)
    first, second = (uses.forward, uses.dgrad) if shape.stored == "out_in" else (uses.dgrad, uses.forward)
    own, other = Routes(), Routes(forward=Route.COPY, dgrad=Route.COPY)
    both = Routes(forward=Route.COPY) if shape.stored == "out_in" else Routes(dgrad=Route.COPY)
    written = uses.refresh * weight
    return {
        own: first * weight + wgrad,
        both: written + wgrad,
        other: second * weight + (0 if linear.casts else written) + wgrad,
    }


def minimal(linear: Linear, accumulation: int) -> Routes:
    """The storage with the fewest transposed bytes; the first of equals."""
    counted = transposed_bytes(linear, accumulation)
    return min(counted, key=lambda routes: counted[routes])


# --- measured --------------------------------------------------------------------------------------------------------


def fastest(linear: Linear, accumulation: int, timed: Timed, *, copies: bool) -> Choice:
    """The routes with the fewest seconds per optimizer step, beyond the margin.

    Args:
        copies: a second copy of the weight may be kept.
    """
    uses = uses_of(linear, accumulation)
    alone = {gemm: _fastest_alone(timed.of(gemm)) if uses.of(gemm) else Route.NATIVE for gemm in Gemm}
    native_s = seconds(Routes(), uses, timed)
    plain = Routes(alone[Gemm.FORWARD], alone[Gemm.DGRAD], alone[Gemm.WGRAD])
    best = Choice(plain, native_s, seconds(plain, uses, timed))
    shared = _with_copy(plain, uses, timed) if copies else None
    if shared is not None:
        changed = [gemm for gemm in (Gemm.FORWARD, Gemm.DGRAD) if shared.of(gemm) is Route.COPY]
        at_stake = sum(uses.of(gemm) * timed.of(gemm)[Route.NATIVE] for gemm in changed)
        least = max(MARGIN * at_stake, LEAST_S * sum(uses.of(gemm) for gemm in changed))
        shared_s = seconds(shared, uses, timed)
        if best.chosen_s - shared_s > least:
            best = Choice(shared, native_s, shared_s)
    pays = native_s - best.chosen_s > max(MARGIN * native_s, LEAST_S * uses.forward)
    return best if pays else Choice(Routes(), native_s, native_s)


def seconds(routes: Routes, uses: Uses, timed: Timed) -> float:
    """Of one optimizer step, for all products of one layer."""
    products = sum(uses.of(gemm) * timed.of(gemm)[routes.of(gemm)] for gemm in Gemm if uses.of(gemm))
    overhead_s = 0.0 if routes.native else uses.forward * timed.overhead_s
    return products + overhead_s + (uses.refresh * timed.refresh_s if routes.copies else 0.0)


def _fastest_alone(by_route: Mapping[Route, float]) -> Route:
    """Of the routes that need no second copy."""
    native = by_route[Route.NATIVE]
    route = min((route for route in by_route if route is not Route.COPY), key=lambda route: by_route[route])
    return route if native - by_route[route] > max(MARGIN * native, LEAST_S) else Route.NATIVE


def _with_copy(plain: Routes, uses: Uses, timed: Timed) -> Routes | None:
    """``plain`` with the copy wherever it is faster; None where it nowhere is."""
    faster = {
        gemm: Route.COPY
        for gemm in (Gemm.FORWARD, Gemm.DGRAD)
        if uses.of(gemm) and timed.of(gemm).get(Route.COPY, float("inf")) < timed.of(gemm)[plain.of(gemm)]
    }
    if not faster:
        return None
    return replace(plain, **{gemm.value: route for gemm, route in faster.items()})


def legal(gemm: Gemm, *, copies: bool) -> tuple[Route, ...]:
    """The routes that a product may take."""
    return tuple(route for route in LEGAL[gemm] if copies or route is not Route.COPY)


# --- shown -----------------------------------------------------------------------------------------------------------


def shapes_of(facts: Facts) -> list[Shape]:
    """Every shape once, the one with the most work first: should time run out, the rest matters least."""
    work: dict[Shape, int] = {}
    for linear in facts.linears:
        work[linear.shape] = work.get(linear.shape, 0) + linear.calls * linear.shape.flops
    return sorted(work, key=lambda shape: -work[shape])


def unmeasured(facts: Facts) -> list[Shape]:
    """Shapes without timings."""
    known = {timed.shape for timed in facts.timings}
    return [shape for shape in shapes_of(facts) if shape not in known]


def path_of(facts: Facts, unit: str, name: str) -> str:
    """The dotted path of a layer in the model."""
    return f"{unit}.{name}" if facts.unit(unit).kind is UnitKind.BLOCK else name


def chosen(plan: Plan) -> dict[str, Routes]:
    """Routes by dotted path, of the layers that do not stay as they are."""
    found: dict[str, Routes] = {}
    for decision, _ in plan.answers.values():
        if isinstance(decision, Impl):
            found |= {path_of(plan.facts, decision.unit, name): routes for name, routes in decision.routes}
    return found


def lines(plan: Plan) -> Iterator[str]:
    """The chosen routes for people, one line per shape; nothing where every layer stays as it is."""
    routes, missing = chosen(plan), len(unmeasured(plan.facts))
    if not routes:
        return
    timings = {timed.shape: timed for timed in plan.facts.timings}
    groups: dict[tuple[Shape, Routes], list[Linear]] = {}
    for linear in plan.facts.linears:
        taken = routes.get(path_of(plan.facts, linear.unit, linear.name), Routes())
        groups.setdefault((linear.shape, taken), []).append(linear)
    left = sum(len(group) for (_, taken), group in groups.items() if taken.native)
    yield f"linear layers: {len(routes)} take other routes than torch's, {left} stay as they are"
    for (shape, taken), group in groups.items():
        if taken.native:
            continue
        gain = ""
        if shape in timings:
            uses = uses_of(group[0], plan.facts.run.accumulation)
            native, now = (seconds(each, uses, timings[shape]) for each in (Routes(), taken))
            gain = f"; measured {native * 1e3:.3g} -> {now * 1e3:.3g} ms per step ({now / native - 1:+.1%})"
        yield f"  {shape}, x{len(group)}: {taken}{gain}"
    if timings and missing:
        words = "shape is not measured and stays" if missing == 1 else "shapes are not measured and stay"
        yield f"  {missing} {words} native"
