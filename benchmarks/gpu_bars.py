"""What the results of the campaign on a GPU come to: a row for each step, and which bars hold.

Bars compare runs of one call, which had the same machine: the exact step with peers that had the same
budget; what was predicted with what was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from deepstow.strategies.core.sizes import human
from deepstow.strategies.report.table import table

Found = Mapping[str, Any]  # what a run of a contender measured (``harness/child.py``)
OURS = "ours-budget"
PLAIN = "plain"
ZERO2 = "deepspeed-zero2"
SUPER = "superoffload", "superoffload-host"  # whose faster one counts
OVER_SUPER = 1.3
OVER_ZERO2 = 1.8
OF_PLAIN = 0.95
PREDICTED = 0.15  # relative difference of the predicted step from the measured one
HEAD = ("bar", "measured", "at least", "at most", "holds")
STEPS = ("part", "step", "exit", "seconds", "what it came to")


class Bar(NamedTuple):
    """A number that has to be from ``least`` to ``most``; None where it was not measured."""

    name: str
    value: float | None
    least: float = float("-inf")
    most: float = float("inf")

    @property
    def holds(self) -> bool | None:
        """Whether it does; None: not measured."""
        return None if self.value is None else self.least <= self.value <= self.most


def step_s(found: Found | None) -> float | None:
    """Seconds of a measured step."""
    return None if found is None or "measured_s" not in found else found["measured_s"] / len(found["step_s"])


def over(one: float | None, other: float | None) -> float | None:
    """A quotient of what was measured."""
    return one / other if one and other else None


def bars(found: Mapping[str, Found]) -> Iterator[Bar]:
    """All bars, of results by the names of steps: ``8k, plain`` and the like (``gpu_check.py``)."""

    def faster(tokens: str, *others: str) -> float | None:
        """How many times as fast as other contenders, the fastest of them."""
        steps_s = [seconds for other in others if (seconds := step_s(found.get(f"{tokens}, {other}")))]
        return over(min(steps_s, default=None), step_s(found.get(f"{tokens}, {OURS}")))

    yield Bar("8k: tokens/s over SuperOffload's", faster("8k", *SUPER), OVER_SUPER)
    yield Bar("8k: tokens/s over ZeRO-2 offload's", faster("8k", ZERO2), OVER_ZERO2)
    yield Bar("16k: tokens/s over plain's, both recomputing", faster("16k", PLAIN), OF_PLAIN)
    for name, run in found.items():
        if OURS in name and "settings" in run:
            predicted = over(run["settings"]["predicted_step_s"], step_s(run))
            yield Bar(f"{name}: predicted over measured step", predicted, 1 - PREDICTED, 1 + PREDICTED)
            if run.get("gpu_memory") and "reserved_peak_bytes" in run:
                used = run["reserved_peak_bytes"] + run["context_bytes"]
                yield Bar(f"{name}: device memory over the budget", used / run["gpu_memory"], most=1.0)


def costs(found: Mapping[str, Found]) -> Iterator[str]:
    """What is no bar, but was asked."""
    pair = over(step_s(found.get("without cuDNN's attention")), step_s(found.get("with cuDNN's attention")))
    if pair is not None:
        yield f"a step without cuDNN's attention, which training.full_determinism excludes: {pair:.3f} times as long"


def told(found: Found) -> str:
    """A result in few words."""
    if "failed" in found:
        return f"failed: {found['failed'][:120]}"
    if "tokens_per_s" in found:
        memory = found.get("reserved_peak_bytes") or found.get("device_peak_bytes")
        words = [f"{found['tokens_per_s']:,.0f} tokens/s", f"{step_s(found):.3f} s a step"]
        words += [f"{human(memory)} of the device"] if memory else []
        words += [f"{found['params'] / 1e6:,.1f} M parameters"] if "params" in found else []
        return ", ".join(words)
    if "free_bytes" in found:
        return f"free host memory: {' then '.join(map(human, found['free_bytes']))}"
    if "rates_file" in found:
        return f"rates: {found['origin']}"
    if "pin_s" in found:
        return f"{found['gib']:g} GiB pinned in {found['pin_s']:.1f} s, unpinned in {found['unpin_s']:.1f}"
    return ""


def summary(rows: Sequence[Mapping[str, Any]], left_out: Sequence[tuple[str, str]] = ()) -> str:
    """Tables of the lines of ``results.jsonl``, the newest of each step, and of steps that were left out."""
    ends = {(row["part"], row["step"]): row for row in rows if "rc" in row}
    results: dict[tuple[str, str], Found] = {}
    words_of: dict[tuple[str, str], str] = {}
    for row in rows:
        if words := told(row.get("found", {})):
            words_of[row["part"], row["step"]] = words
            results[row["part"], row["step"]] = row["found"]
    of_steps = []
    for key, end in ends.items():
        slow = end["rc"] < 0 and end["seconds"] >= end["limit_s"]
        last_line = f"not finished after {end['limit_s']:.0f} s" if slow else end["last"][:80]
        words = words_of.get(key, last_line)
        if end["rc"] and key in words_of and "failed" not in results[key]:
            words = f"{words}; then {last_line}"
        of_steps.append((*key, str(end["rc"]), f"{end['seconds']:.0f}", words))
    of_steps += [(*key, "", "", "left out: no time for it; call again") for key in left_out if key not in ends]
    by_name = {step: result for (_, step), result in results.items() if "tokens_per_s" in result}
    answers = {True: "yes", False: "NO", None: "not measured"}
    of_bars = [
        (bar.name, "" if bar.value is None else f"{bar.value:.3f}", _end(bar.least), _end(bar.most), answers[bar.holds])
        for bar in bars(by_name)
    ]
    return "\n".join([*table(STEPS, of_steps, ()), "", *table(HEAD, of_bars, ()), "", *costs(by_name)])


def _end(number: float) -> str:
    return f"{number:.2f}" if abs(number) < float("inf") else ""
