"""What became of the rows of each data set: how many, how long, what was dropped and why, what is there twice.

Counted while rows are tokenised, kept with them as ``report.json``, and shown by ``deepstow train --data-report``. What
is remembered of a row are 8 bytes in a file, by which duplicates are found; lengths are counted to three digits.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm

from deepstow.trainer.data.mapped import Numbers, among, twice
from deepstow.trainer.errors import DataError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Say = Callable[[str], None]

EMPTY = "empty"
UNTRAINED = "without a token that is trained on"
BEYOND = "whose first trained token is beyond data.max_length"
LONG = "longer than data.max_length"

MANY = 5  # a share of one in so many dropped rows is a warning
CURES = {
    EMPTY: "look at these rows, or at data.columns",
    UNTRAINED: "deepstow train --show-sample shows what is trained on",
    BEYOND: "raise data.max_length",
    LONG: "raise data.max_length, or write data.excess_length_strategy: truncate",
}

PATIENCE = 10_000  # rows still read after the first bad one, to report the others with it
MOST = 5  # lines, and further places in a line


class Document(NamedTuple):
    """A tokenised row: ids and labels of equal length, and the number of tokens that were cut off."""

    ids: list[int]
    labels: list[int]
    num_cut: int = 0


class Dropped(NamedTuple):
    """A row that is not trained on, and the tokens that it has."""

    why: str
    length: int = 0


# A row after each step: a Document, or why there is none, or a line about what is wrong.
Encoded = Document | Dropped | str


def by_cause(bad: Sequence[str]) -> list[str]:
    """Lines about bad rows, each ``place: what is wrong``, so that each thing that is wrong is said once."""
    places = dict[str, list[str]]()
    for line in bad:
        place, _, what = line.partition(": ")
        places.setdefault(what, []).append(place)
    lines = [f"{first}: {what}{_also(others)}" for what, (first, *others) in places.items()]
    return lines if len(lines) <= MOST else [*lines[:MOST], f"... and {len(lines) - MOST:,} more things that are wrong"]


def _also(places: Sequence[str]) -> str:
    more = f" and {len(places) - MOST:,} more" if len(places) > MOST else ""
    return f" (also {', '.join(places[:MOST])}{more})" if places else ""


@dataclass
class Tally:
    """The rows of one source. ``how`` says what becomes of those that are longer than ``max_length``."""

    name: str
    max_length: int
    how: str
    total: int | None = None  # that there are, for the progress bar
    rows: int = 0
    long: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    hashes: Numbers = field(default_factory=Numbers)

    def documents(self, results: Iterable[Encoded], say: Say) -> Iterator[Document]:
        """Yield documents; after the first bad row only collect further bad rows, and raise DataError with them."""
        bad: list[str] = []
        num_after_bad = 0
        spoken = time.monotonic()
        # On a terminal a bar, elsewhere a line every ten seconds.
        bar = tqdm(results, f"data: {self.name}", self.total, unit=" rows", leave=False, disable=None)
        for result in bar:
            if isinstance(result, str):
                bad.append(result)
            elif not bad:
                self._count(result)
                if isinstance(result, Document):
                    yield result
            num_after_bad += bool(bad)
            if num_after_bad > PATIENCE:
                break
            if bar.disable and time.monotonic() - spoken > 10:
                spoken = time.monotonic()
                say(f"data: {self.name}: {self.rows:,} rows tokenised")
        if bad:
            raise DataError(by_cause(bad))
        if not self.rows:
            total = self.dropped.total()
            what = f"all {total:,} rows are dropped: {self._dropped()}" if total else "there are no rows"
            raise DataError(f"{self.name}: {what}")
        say(f"data: {self.line()}")

    def _count(self, result: Document | Dropped) -> None:
        length = result.length if isinstance(result, Dropped) else len(result.ids) + result.num_cut
        unit = 1 << max(0, length.bit_length() - 10)
        self.lengths[length // unit * unit] += 1
        self.long += length > self.max_length
        if isinstance(result, Dropped):
            self.dropped[result.why] += 1
        else:
            self.rows += 1
            self.hashes.append(hash(tuple(result.ids)))

    def _dropped(self) -> str:
        return ", ".join(f"{number:,} {why}" for why, number in sorted(self.dropped.items()))

    def warning(self) -> str:
        """A line about many dropped rows, with the cure for most of them; empty if they are few."""
        dropped = self.dropped.total()
        if dropped * MANY <= dropped + self.rows:
            return ""
        ((most, _),) = self.dropped.most_common(1)
        what = f"{dropped:,} of {dropped + self.rows:,} rows are dropped"
        return f"data: {self.name}: {what}: {self._dropped()}; {CURES[most]}"

    def line(self) -> str:
        """All of it but the lengths."""
        notes = [f"dropped: {self._dropped()}"] if self.dropped else []
        if self.long and self.how != "drop":
            notes.append(f"{self.long:,} longer than {self.max_length:,} tokens ({self.how})")
        if again := twice(self.hashes.sorted()):
            notes.append(f"{again:,} duplicates")
        return "; ".join([f"{self.name}: {self.rows:,} rows tokenised", *notes])


def content(max_length: int, parts: Iterable[tuple[list[Tally], list[str]]]) -> dict[str, Any]:
    """What is kept: each source's tallies, and the lines about the files that were written."""
    sides, lines = zip(*parts, strict=True)
    sources = [
        {"line": tally.line(), "lengths": dict(sorted(tally.lengths.items()))} for side in sides for tally in side
    ]
    messages = [line for written in lines for line in written]
    hashes = [[tally.hashes.sorted() for tally in side] for side in sides]
    if len(hashes) == 2 and (shared := sum(among(numbers, hashes[1]) for numbers in hashes[0])):
        messages.append(f"data: {shared:,} of the evaluation documents are trained on, too")
    warnings = [line for side in sides for tally in side if (line := tally.warning())]
    return {"max_length": max_length, "sources": sources, "lines": messages, "warnings": warnings}


def text(report: Mapping[str, Any]) -> str:
    """The report as text, with a histogram of the lengths of each data set; bins double."""
    lines: list[str] = []
    limit = report["max_length"]
    for source in report["sources"]:
        lines += [source["line"], "", f"{'tokens':>19}  {'rows':>12}"]
        bins = binned(source["lengths"], 1)
        most = max(bins.values())
        for (low, high), number in bins.items():
            mark = f"  <- data.max_length {limit:,}" if low <= limit < high else ""
            bar = "#" * -(-40 * number // most)
            lines.append(f"{low:>7,} to {high - 1:>8,}  {number:>12,}  {bar}{mark}")
        lines.append("")
    return "\n".join([*lines, *report["lines"]])


def binned(lengths: Mapping[str, int], per_octave: int) -> dict[tuple[int, int], int]:
    """Rows by (least, first above) length, from the shortest to the longest, empty bins between them included."""
    counts: Counter[int] = Counter()
    for length, number in lengths.items():
        counts[math.floor(math.log2(max(1, int(length))) * per_octave)] += number
    edges = [math.ceil(2 ** (step / per_octave)) for step in range(min(counts), max(counts) + 2)]
    return {(low, high): counts[min(counts) + index] for index, (low, high) in enumerate(pairwise(edges)) if low < high}


def draw(report: Mapping[str, Any]) -> Figure:
    """The histograms as a picture, one below the other, over a logarithmic axis of lengths."""
    from deepstow.trainer.planning import picture

    sources, limit = report["sources"], report["max_length"]
    figure = picture.canvas(2.8 * len(sources))
    for axes, source in zip(figure.subplots(len(sources), 1, squeeze=False)[:, 0], sources, strict=True):
        bins = binned(source["lengths"], 4)
        edges = [low for low, _ in bins] + [list(bins)[-1][1]]
        axes.stairs(list(bins.values()), edges, fill=True, color=picture.PARTS[0], label="rows")
        axes.axvline(limit, color=picture.RED, label=f"data.max_length {limit:,}")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("length of a row (tokens)")
        axes.set_ylabel("rows")
        axes.set_title(picture.plain(source["line"]), loc="left", fontsize="medium")
        axes.legend()
    return figure
