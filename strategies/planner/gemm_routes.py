"""Choose a route for each product of each linear layer: by counting bytes or by measured times.

A second copy costs one pass over the weight per optimizer step, and forward and dgrad share it. A measured route must
gain more than ``MARGIN``, and so must the layer, in which a Python function costs ``ROUTING_S``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from deepstow.strategies.core.facts import Facts
from deepstow.strategies.core.linears import NATIVE, Gemm, Linear, Route, Routes, Shape, Timing
from deepstow.strategies.core.plan import Impl, Plan

MARGIN = 0.03  # smaller gains may reverse in the next measurement
ROUTING_S = 15e-6  # of a forward and backward; 13 measured on two cores of an Intel Xeon, 8 x 8 weights


def uses_of(linear: Linear, accumulation: int) -> dict[Gemm, int]:
    """How often each product runs in one optimizer step."""
    per_micro_batch = (1 + linear.recomputed, linear.passes_back, linear.trains)
    return {gemm: accumulation * linear.calls * each for gemm, each in zip(Gemm, per_micro_batch, strict=True)}


def minimal(linear: Linear, accumulation: int) -> Routes:
    """The routes with the fewest passes across the weight's rows; native among equals."""
    across = Gemm.FORWARD if linear.shape.stored == "out_in" else Gemm.DGRAD
    pays = uses_of(linear, accumulation)[across] > linear.trains  # a frozen weight is copied only once in a run
    return NATIVE._replace(**{across: Route.COPY}) if pays else NATIVE


def fastest(linear: Linear, accumulation: int, timing: Timing, *, copies: bool) -> Routes:
    """The routes with the fewest seconds per optimizer step, if they gain more than the margin; ``copies`` allows a
    second copy of the weight.
    """
    uses, best = uses_of(linear, accumulation), NATIVE
    native_s = best_s = seconds(NATIVE, linear, accumulation, timing)
    for allowed in (False, True) if copies else (False,):
        taken = Routes(**{gemm: _fastest(gemm, timing, allowed) for gemm in Gemm if uses[gemm]})
        taken_s = seconds(taken, linear, accumulation, timing)
        if best_s - taken_s > MARGIN * native_s:
            best, best_s = taken, taken_s
    return best


def _fastest(gemm: Gemm, timing: Timing, copy: bool) -> Route:
    timed = {route: timing[key] for route in Route if (key := f"{gemm} {route}") in timing}
    route = min((each for each in timed if copy or each is not Route.COPY), key=timed.__getitem__)
    return route if timed[route] < (1 - MARGIN) * timed[Route.NATIVE] else Route.NATIVE


def seconds(routes: Routes, linear: Linear, accumulation: int, timing: Timing) -> float:
    """Seconds of one layer in one optimizer step: products, routing, writing the copy. KeyError for untimed routes."""
    uses = uses_of(linear, accumulation)
    total = sum(uses[gemm] * timing[f"{gemm} {route}"] for gemm, route in zip(Gemm, routes, strict=True) if uses[gemm])
    total += 0.0 if routes == NATIVE else uses[Gemm.FORWARD] * ROUTING_S
    return total + (timing["copy"] if Route.COPY in routes and linear.trains else 0.0)


def shapes_of(facts: Facts) -> list[Shape]:
    """Every shape once, the one with the most work first, so that a spent budget leaves out the least important."""
    work: Counter[Shape] = Counter()
    for linear in facts.linears:
        work[linear.shape] += linear.calls * linear.shape.rows * linear.shape.inputs * linear.shape.outputs
    return [shape for shape, _ in work.most_common()]


def chosen(plan: Plan) -> dict[str, Routes]:
    """The routes of the layers that are not native, by dotted path in the model."""
    decisions = (decision for decision, _ in plan.answers.values() if isinstance(decision, Impl))
    return {name: routes for decision in decisions for name, routes in decision.routes}


def lines(plan: Plan) -> Iterator[str]:
    """The chosen routes for people, one line per shape; no lines if every layer is native."""
    facts, routes = plan.facts, chosen(plan)
    if routes:
        stay = len(facts.linears) - len(routes)
        yield f"linear layers: {len(routes)} take other routes than torch's, {stay} stay as they are"
    groups: dict[tuple[Shape, Routes], list[Linear]] = {}
    for linear in facts.linears:
        if linear.name in routes:
            groups.setdefault((linear.shape, routes[linear.name]), []).append(linear)
    for (shape, taken), alike in groups.items():
        gain = ""
        if timing := facts.timings.get(str(shape)):
            native, now = (seconds(each, alike[0], facts.run.accumulation, timing) for each in (NATIVE, taken))
            gain = f"; measured {native * 1e3:.3g} -> {now * 1e3:.3g} ms per step ({now / native - 1:+.1%})"
        yield f"  {shape}, x{len(alike)}: {taken}{gain}"
