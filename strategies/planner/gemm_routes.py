"""Choose a route for each product of each linear layer: by counting bytes or by measured times. No torch here.

``minimal`` counts how often the weight is read or written across its rows in one optimizer step of m micro-batches:

    one weight, stored O x I   by forward: m times, or 2 m with recomputation
    only the copy, I x O       by dgrad: m times, and once to write the copy, unless that replaces a cast
    weight and copy            by neither, but once to write the copy

(For a weight stored I x O, exchange forward and dgrad.) wgrad does not read the weight. A tie keeps the layer native.

``fastest`` adds up the measured seconds of an optimizer step, without a copy and with one that forward and dgrad share.
A route must gain more than ``MARGIN``, and so must the layer, in which a Python function costs ``ROUTING_S``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from strategies.core.facts import Facts, UnitKind
from strategies.core.linears import NATIVE, Gemm, Linear, Route, Routes, Shape, Timed
from strategies.core.plan import Impl, Plan

MARGIN = 0.03  # smaller gains may reverse in the next measurement
ROUTING_S = 15e-6  # of a forward and backward; 13 measured on two cores of an Intel Xeon, 8 x 8 weights


def uses_of(linear: Linear, accumulation: int) -> dict[Gemm, int]:
    """How often each product runs in one optimizer step."""
    micro = accumulation * linear.calls
    return {
        Gemm.FORWARD: micro * (2 if linear.recomputed else 1),
        Gemm.DGRAD: micro * linear.passes_back,
        Gemm.WGRAD: micro * linear.trains,
    }


def minimal(linear: Linear, accumulation: int) -> Routes:
    """The routes with the fewest passes across the weight's rows; native among equals."""
    uses, written = uses_of(linear, accumulation), int(linear.trains)  # a frozen weight is copied only once in a run
    across, along = Gemm.FORWARD, Gemm.DGRAD
    if linear.shape.stored == "in_out":
        across, along = along, across
    passes = {
        NATIVE: uses[across],
        replace(NATIVE, **{across: Route.COPY}): written,
        Routes(forward=Route.COPY, dgrad=Route.COPY): uses[along] + (0 if linear.casts else written),
    }
    return min(passes, key=lambda routes: passes[routes])


def fastest(linear: Linear, accumulation: int, timed: Timed, *, copies: bool) -> Routes:
    """The routes with the fewest seconds per optimizer step, if they gain more than the margin; ``copies`` allows a
    second copy of the weight.
    """
    uses = uses_of(linear, accumulation)
    step_s = {NATIVE: seconds(NATIVE, linear, accumulation, timed)}
    best = NATIVE
    for allowed in (False, True) if copies else (False,):
        taken = Routes(**{gemm: _fastest(timed.of(gemm), allowed) for gemm in Gemm if uses[gemm]})
        step_s[taken] = seconds(taken, linear, accumulation, timed)
        if step_s[best] - step_s[taken] > MARGIN * step_s[NATIVE]:
            best = taken
    return best


def seconds(routes: Routes, linear: Linear, accumulation: int, timed: Timed) -> float:
    """Seconds of one layer in one optimizer step: products, routing, writing the copy. KeyError for untimed routes."""
    uses = uses_of(linear, accumulation)
    total = sum(uses[gemm] * timed.of(gemm)[routes.of(gemm)] for gemm in Gemm if uses[gemm])
    total += 0.0 if routes == NATIVE else uses[Gemm.FORWARD] * ROUTING_S
    return total + (timed.refresh_s if routes.copies and linear.trains else 0.0)


def _fastest(by_route: dict[Route, float], copy: bool) -> Route:
    route = min((each for each in by_route if copy or each is not Route.COPY), key=by_route.__getitem__)
    return route if by_route[route] < (1 - MARGIN) * by_route[Route.NATIVE] else Route.NATIVE


def shapes_of(facts: Facts) -> list[Shape]:
    """Every shape once, the one with the most work first, so that a spent budget leaves out the least important."""
    work: Counter[Shape] = Counter()
    for linear in facts.linears:
        work[linear.shape] += linear.calls * linear.shape.rows * linear.shape.inputs * linear.shape.outputs
    return [shape for shape, _ in work.most_common()]


def chosen(plan: Plan) -> dict[str, Routes]:
    """The routes of the layers that are not native, by dotted path in the model."""
    decisions = [decision for decision, _ in plan.answers.values() if isinstance(decision, Impl)]
    return {_path(plan.facts, each.unit, name): routes for each in decisions for name, routes in each.routes}


def _path(facts: Facts, unit: str, name: str) -> str:
    return f"{unit}.{name}" if facts.unit(unit).kind is UnitKind.BLOCK else name


def lines(plan: Plan) -> Iterator[str]:
    """The chosen routes for people, one line per shape; no lines if every layer is native."""
    facts, routes = plan.facts, chosen(plan)
    if not routes:
        return
    stay = len(facts.linears) - len(routes)
    yield f"linear layers: {len(routes)} take other routes than torch's, {stay} stay as they are"
    groups: dict[tuple[Shape, Routes], list[Linear]] = {}
    for linear in facts.linears:
        if taken := routes.get(_path(facts, linear.unit, linear.name)):
            groups.setdefault((linear.shape, taken), []).append(linear)
    timings = {timed.shape: timed for timed in facts.timings}
    for (shape, taken), alike in groups.items():
        gain = ""
        if timed := timings.get(shape):
            native, now = (seconds(each, alike[0], facts.run.accumulation, timed) for each in (NATIVE, taken))
            gain = f"; measured {native * 1e3:.3g} -> {now * 1e3:.3g} ms per step ({now / native - 1:+.1%})"
        yield f"  {shape}, x{len(alike)}: {taken}{gain}"
