"""The table of ``launch/plan.py --fit``: which ways of training a model fit into a machine, and what to write for each.

A row is a plan. Its bytes are the plan's predicted peaks; if the planner refused it, the bytes that it said are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from strategies.core.facts import Home
from strategies.core.sizes import human
from strategies.report.table import table

HEADER = ("fits", "training", "ranks", "device", "host", "step", "lines, in place of these sections of the config")
UNKNOWN = "-"
SAME = 0.1  # relative difference of simulated seconds for which no strategy is worth writing


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRow:
    """One way of training."""

    whole: bool = True  # all weights are trained, not adapters
    strategies: tuple[str, ...] = ()  # names of those that save memory
    given: bool = False  # the config as it is, whatever they are
    ranks: int = 1
    needed: Mapping[Home, int] = field(default_factory=dict)  # bytes on one rank; a home is left out if not known
    missing: Mapping[Home, int] = field(default_factory=dict)  # bytes beyond what may be used, where any are
    refused: str = ""  # why there is no plan, if it is not for memory
    seconds: float | None = None  # of a simulated step; None: unknown, or it does not fit
    write: tuple[str, ...] = ()  # lines of YAML, one per section; none: the config as it is

    @property
    def training(self) -> str:
        return "this config" if self.given else " + ".join(("full" if self.whole else "LoRA", *self.strategies))

    @property
    def fits(self) -> bool:
        return not self.missing and not self.refused

    @property
    def says(self) -> str:
        if self.refused:
            return "no: refused"
        return "yes" if self.fits else f"no: {self.lacks}"

    @property
    def lacks(self) -> str:
        return ", ".join(f"{home.value} lacks {human(size)}" for home, size in self.missing.items())

    def needs(self, home: Home) -> str:
        return human(self.needed[home]) if home in self.needed else UNKNOWN


def lines(rows: Sequence[FitRow]) -> list[str]:
    """The answer, then one row per way of training; further lines to write are below their row."""
    common = [line for line in rows[0].write if all(line in row.write for row in rows)]
    cells = [cell for row in rows for cell in _cells(row, common)]
    always = [f"in every row: {line}" for line in common]
    return [*answers(rows), "", *table(HEADER, cells, {"ranks", "device", "host", "step"}), *always]


def _cells(row: FitRow, common: Sequence[str]) -> Iterator[tuple[str, ...]]:
    needed = (row.needs(home) for home in (Home.DEVICE, Home.HOST))
    seconds = UNKNOWN if row.seconds is None else f"{row.seconds:.3g} s"
    own = [line for line in row.write if line not in common]
    first, *others = (f"({row.refused})",) if row.refused else own or ("as it is",)
    yield (row.says, row.training, str(row.ranks), *needed, seconds, first)
    for line in others:
        yield ("", "", "", "", "", "", line)


def answers(rows: Sequence[FitRow]) -> Iterator[str]:
    """One line on training all weights, and one on adapters: what fits on as many ranks as there are, or what would."""
    for whole, what in ((True, "full fine-tuning"), (False, "LoRA")):
        some = [row for row in rows if row.whole is whole]
        if some:
            yield _answer(what, some)


def _answer(what: str, rows: Sequence[FitRow]) -> str:
    least = min(row.ranks for row in rows)
    fitting = [row for row in rows if row.fits]
    here = [row for row in fitting if row.ranks == least]
    if here:
        known = [row.seconds for row in here if row.seconds is not None]
        fast = [row for row in here if row.seconds is None or row.seconds <= min(known) * (1 + SAME)]
        best = fast[0]
        seconds = "" if best.seconds is None else f", {best.seconds:.3g} s per step (simulated)"
        return f"{what} fits: {best.training}{seconds}"
    near = [row for row in rows if row.missing and row.ranks == least]
    short = ""
    if near:
        # With fewer strategies the planner may have given up at one memory before it looked at the other.
        best = max(near, key=lambda row: (len(row.strategies), -sum(row.missing.values())))
        short = f"; nearest is {best.training}, {best.lacks}"
    more = f"; on {fitting[0].ranks} ranks {fitting[0].training} fits" if fitting else ""
    return f"{what} does not fit on {least} rank{'s' * (least > 1)}{short}{more}"
