"""The linear layers of well-known models, and what a table of their products says. No torch here.

A *case* is one shape at one number of tokens in one dtype. Its seconds are those of an optimizer step of so many
micro-batches: forward, dgrad and wgrad in each, and making the second copy once where one is kept.

Routes are chosen from one measurement and judged by another. ``best`` is chosen and judged by the second, so it is a
little better than anything that can be had: what the noise of the second favours counts for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from benchmarks.harness.work import choice, whole
from strategies.core.linears import Linear, Routes, Shape, Timed
from strategies.planner.gemm_routes import fastest, minimal, seconds, uses_of
from trainer.errors import ConfigError

Widths = tuple[int, int]  # inputs, outputs

# From the models' published configs: attention's projections (fused where the model fuses them), then the MLP's.
MODELS: Mapping[str, tuple[Widths, ...]] = {
    "opt-6.7b": ((4096, 4096), (4096, 16384), (16384, 4096)),
    "llama-7b": ((4096, 4096), (4096, 11008), (11008, 4096)),
    "bloom-7b": ((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096)),
    "gpt2-xl": ((1600, 4800), (1600, 1600), (1600, 6400), (6400, 1600)),
    "qwen2.5-3b": ((2048, 2048), (2048, 256), (2048, 11008), (11008, 2048)),
    "qwen3-8b": ((4096, 4096), (4096, 1024), (4096, 12288), (12288, 4096)),
    "llama-3-8b": ((4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096)),
}
TURNED = ("gpt2-xl",)  # Conv1D keeps inputs x outputs
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
EQUAL = 0.01  # nearer than this is neither better nor worse
WORTH = 0.05  # what somebody would want to find


@dataclass(frozen=True, slots=True)
class Case:
    """A shape and the models that have it."""

    shape: Shape
    models: tuple[str, ...]

    @property
    def layer(self) -> Linear:
        """A layer of this shape that trains like any other."""
        return Linear("layer", "unit", self.shape)


def cases(models: Sequence[str], tokens: Sequence[int], dtypes: Sequence[str]) -> list[Case]:
    """Every distinct shape of ``models`` at every number of tokens in every dtype, the fewest tokens first."""
    owners: dict[tuple[Widths, Literal["out_in", "in_out"]], list[str]] = {}
    for model in models:
        for widths in MODELS[model]:
            owners.setdefault((widths, "in_out" if model in TURNED else "out_in"), []).append(model)
    return [
        Case(Shape(rows, *widths, stored, DTYPES[dtype]), tuple(names))
        for rows in tokens
        for dtype in dtypes
        for (widths, stored), names in owners.items()
    ]


def wanted(models: str, tokens: str, dtypes: str) -> list[Case]:
    """The cases that a command line names; empty names mean all.

    Raises:
        ConfigError: a name or number that is not allowed.
    """

    def listed(text: str) -> list[str]:
        return [part.strip() for part in text.split(",") if part.strip()]

    names = [choice("--models", name, MODELS) for name in listed(models)] or list(MODELS)
    kinds = [choice("--dtypes", name, DTYPES) for name in listed(dtypes)] or list(DTYPES)
    rows = [whole("--tokens", text) for text in listed(tokens)]
    if not rows:
        raise ConfigError(f"--tokens {tokens}: must be whole numbers >= 1 with commas between them")
    return cases(list(dict.fromkeys(names)), sorted(set(rows)), list(dict.fromkeys(kinds)))


# --- judging ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """One case: the routes, and seconds per optimizer step by the second measurement."""

    case: Case
    minimal: Routes
    adaptive: Routes
    best: Routes
    native_s: float
    minimal_s: float
    adaptive_s: float
    best_s: float
    repeated: int = 0

    @property
    def suspicious(self) -> bool:
        """Whether it should be measured again: slower than native, or something better was not found."""
        return self.adaptive_s > (1 + EQUAL) * self.native_s or self.missed

    @property
    def promising(self) -> bool:
        """Whether something is more than ``WORTH`` faster than native."""
        return self.best_s < (1 - WORTH) * self.native_s

    @property
    def missed(self) -> bool:
        """Whether something promising exists and adaptive has found less than half of it."""
        return self.promising and self.native_s - self.adaptive_s < (self.native_s - self.best_s) / 2


def judge(case: Case, accumulation: int, chosen_by: Timed, judged_by: Timed, repeated: int = 0) -> Verdict:
    """Choose by one measurement, judge by the other."""
    uses = uses_of(case.layer, accumulation)
    adaptive = fastest(case.layer, accumulation, chosen_by, copies=True).routes
    counted = minimal(case.layer, accumulation)
    best = least(case.layer, accumulation, judged_by)

    def of(routes: Routes) -> float:
        known = all(routes.of(gemm) in judged_by.of(gemm) for gemm, _, _ in judged_by)
        return seconds(routes, uses, judged_by) if known else math.inf

    return Verdict(case, counted, adaptive, best, of(Routes()), of(counted), of(adaptive), of(best), repeated)


def least(layer: Linear, accumulation: int, timed: Timed) -> Routes:
    """The fastest of all combinations of routes, margins aside."""
    uses = uses_of(layer, accumulation)
    by = [list(timed.of(gemm)) for gemm in dict.fromkeys(gemm for gemm, _, _ in timed)]
    every = (Routes(forward, dgrad, wgrad) for forward in by[0] for dgrad in by[1] for wgrad in by[2])
    return min(every, key=lambda routes: seconds(routes, uses, timed))


def merged(first: Timed, second: Timed) -> Timed:
    """The lesser seconds of two measurements of one shape."""
    other = {(gemm, route): value for gemm, route, value in second}
    both = tuple((g, r, min(value, other[g, r])) for g, r, value in first if (g, r) in other)
    return Timed(first.shape, both, min(first.refresh_s, second.refresh_s), min(first.overhead_s, second.overhead_s))


# --- the table -------------------------------------------------------------------------------------------------------


def geometric_mean(values: Iterable[float]) -> float:
    """1.0 of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else 1.0


def shares(ratios: Sequence[float]) -> tuple[int, int, int]:
    """How many are better (below 1), equal within ``EQUAL``, and worse."""
    better = sum(ratio < 1 - EQUAL for ratio in ratios)
    worse = sum(ratio > 1 + EQUAL for ratio in ratios)
    return better, len(ratios) - better - worse, worse


HEAD = ("dtype", "tokens", "layer", "models", "native", "minimal", "adaptive", "best", "adaptive takes")


def table(verdicts: Sequence[Verdict]) -> str:
    """Markdown: one line per case, milliseconds natively and the ratio to it of the others; then the summary."""
    lines = [" | ".join(HEAD), " | ".join("---" for _ in HEAD)]
    for verdict in verdicts:
        shape, native = verdict.case.shape, verdict.native_s
        ratios = (f"{value / native:.3f}" for value in (verdict.minimal_s, verdict.adaptive_s, verdict.best_s))
        layer = f"{shape.inputs} -> {shape.outputs}" + (" turned" if shape.stored == "in_out" else "")
        takes = "native" if verdict.adaptive.native else str(verdict.adaptive)
        again = f" (measured {1 + verdict.repeated} times)" if verdict.repeated else ""
        cells = (shape.dtype, str(shape.rows), layer, ", ".join(verdict.case.models), f"{native * 1e3:.3f} ms", *ratios)
        lines.append(" | ".join((*cells, takes + again)))
    return "\n".join([*(f"| {line} |" for line in lines), "", *summary(verdicts)])


def summary(verdicts: Sequence[Verdict]) -> list[str]:
    """What the cases say together, in markdown; by dtype and over all."""
    groups = {"all": list(verdicts)}
    for verdict in verdicts:
        groups.setdefault(verdict.case.shape.dtype, []).append(verdict)
    lines = [
        "| cases | | better | equal | worse | geometric mean | worst |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, group in groups.items():
        for kind in ("minimal", "adaptive", "best"):
            ratios = [getattr(verdict, f"{kind}_s") / verdict.native_s for verdict in group]
            cells = (*shares(ratios), f"{geometric_mean(ratios):.3f}", f"{max(ratios, default=1):.3f}")
            lines.append(f"| {name}: {len(group)} | {kind} | {' | '.join(map(str, cells))} |")
    promising = [verdict for verdict in verdicts if verdict.promising]
    found = sum(not verdict.missed for verdict in promising)
    stay = sum(verdict.adaptive.native for verdict in verdicts)
    return [
        *lines,
        "",
        f"Seconds of an optimizer step relative to native. Adaptive leaves {stay} of {len(verdicts)} layers untouched. "
        f"In {len(promising)} cases something is more than {WORTH:.0%} faster than native, of which adaptive finds at "
        f"least half in {found}.",
    ]


def to_json(verdict: Verdict) -> dict[str, Any]:
    """Everything of a case."""
    taken = {name: str(getattr(verdict, name)) for name in ("minimal", "adaptive", "best")}
    times = {name: getattr(verdict, name) for name in ("native_s", "minimal_s", "adaptive_s", "best_s", "repeated")}
    return {"shape": asdict(verdict.case.shape), "models": list(verdict.case.models), **times, "routes": taken}
