"""Exact solvers for small cases and checks of any case, to compare the heuristics with.

``best_gaps`` evaluates every set of gaps (2 ** gaps of them), each with its reloads as early as memory allows.
``all_issues`` evaluates every issue vector too. ``pack`` branches over packings in which each piece lies at 0 or on a
piece that is there with it, placed in order of offset; it is fine for about ten pieces.

``complaints`` and ``packing_errors`` check plans and packings directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product

from strategies.planner.greedy import issue
from strategies.planner.packing import Packing, Piece
from strategies.planner.packing import pack as quick
from strategies.planner.problem import Eviction, Gap, Problem, memory
from strategies.planner.simulate import reload_period


def best_gaps(problem: Problem) -> float:
    """The shortest period of all sets of gaps; infinite if none fits."""
    plans = (issue(problem, gaps) for gaps in _sets(problem))
    return min((reload_period(problem, plan) for plan in plans if plan is not None), default=float("inf"))


def all_issues(problem: Problem) -> float:
    """The shortest period of all sets of gaps with all ticks to issue their reloads at."""
    found = float("inf")
    for gaps in _sets(problem):
        for steps in product(*(range(gap.after + 2, gap.before + 1) for gap in gaps)):
            plan = [Eviction(gap, step) for gap, step in zip(gaps, steps, strict=True)]
            if max(memory(problem, plan)) <= problem.budget:
                found = min(found, reload_period(problem, plan))
    return found


def complaints(problem: Problem, evictions: Sequence[Eviction]) -> list[str]:
    """Everything wrong with a plan: gaps that are none, issues outside their gap, too much memory."""
    known = set(problem.gaps)
    found = [f"{e.gap}: not a gap of this problem" for e in evictions if e.gap not in known]
    found += [f"{e.gap}: issued at {e.issue}" for e in evictions if not e.gap.after < e.issue <= e.gap.before]
    if len({eviction.gap for eviction in evictions}) < len(evictions):
        found.append("a gap is evicted twice")
    if found:
        return found
    return [
        f"{tick.name}: {here} bytes, {here - problem.budget} too much"
        for tick, here in zip(problem.ticks, memory(problem, evictions), strict=True)
        if here > problem.budget
    ]


def packing_errors(pieces: Sequence[Piece], offsets: Sequence[int], arena: int, align: int = 1) -> list[str]:
    """Everything wrong with ``offsets`` in an arena of so many bytes, by comparing every pair."""
    found = []
    for index, (piece, offset) in enumerate(zip(pieces, offsets, strict=True)):
        if offset < 0 or offset + piece.num_bytes > arena:
            found.append(f"piece {index}: lies outside the arena")
        if offset % align:
            found.append(f"piece {index}: is not aligned")
        for other, theirs in enumerate(offsets[:index]):
            overlap = theirs < offset + piece.num_bytes and offset < theirs + pieces[other].num_bytes
            if overlap and any(a < d and c < b for a, b in piece.spans for c, d in pieces[other].spans):
                found.append(f"piece {index} overlaps piece {other}")
    return found


def _sets(problem: Problem) -> Iterator[tuple[Gap, ...]]:
    for number in range(len(problem.gaps) + 1):
        yield from combinations(problem.gaps, number)


def pack(pieces: Sequence[Piece]) -> Packing:
    """The smallest arena."""
    best = quick(pieces)
    met = [
        [any(a < d and c < b for a, b in piece.spans for c, d in other.spans) for other in pieces] for piece in pieces
    ]

    def branch(offsets: dict[int, int], lowest: int) -> None:
        nonlocal best
        if len(offsets) == len(pieces):
            arena = max(offset + pieces[index].num_bytes for index, offset in offsets.items())
            best = Packing(tuple(offsets[index] for index in range(len(pieces))), arena, best.bound)
        for index, piece in enumerate(pieces):
            below = (offset + pieces[other].num_bytes for other, offset in offsets.items() if met[index][other])
            offset = max(below, default=0)
            fits = lowest <= offset and offset + piece.num_bytes < best.arena
            if index not in offsets and fits and best.arena > best.bound:
                branch({**offsets, index: offset}, offset)

    branch({}, 0)
    return best
