"""Timing work on a device, and from times of copies to numbers of a link."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch


def seconds_per_call(work: Callable[[], object], device: torch.device | str, times: int = 1) -> float:
    """Seconds of ``work``, issued this many times before waiting until the device is idle."""
    began_s = time.perf_counter()
    for _ in range(times):
        work()
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)
    return (time.perf_counter() - began_s) / times


def timer(work: Callable[[], object], device: torch.device | str, least_s: float = 0.0) -> Callable[[], float]:
    """What times ``work``, which is warm then, as often in a row as takes ``least_s``; seconds of one."""
    run = partial(seconds_per_call, work, device)
    run()
    return partial(run, max(1, math.ceil(least_s / max(run(), 1e-9))))


def lower_quartile(samples: Sequence[float]) -> float:
    """What is sustained: the fastest run is not, and slow ones were disturbed."""
    return sorted(samples)[len(samples) // 4]


class LinkFit(NamedTuple):
    """A copy takes ``latency_s + bytes / bytes_per_s`` seconds."""

    latency_s: float
    bytes_per_s: float


def fit_line(points: Sequence[tuple[int, float]]) -> LinkFit:
    """Fit a line to points (bytes, seconds) of at least two sizes, else ValueError.

    Candidates are the lines through any two points, and through one point and the origin, with a latency of at least 0.
    The best has the least sum of ``abs(log(ratio))``: ratios, because sizes span three orders of magnitude and both
    ends count; not squared, so that one disturbed point does not bend the line.
    """
    if len({size for size, _ in points}) < 2:
        raise ValueError(f"{len(points)} points of one size; a line needs two sizes")
    lines = [(0.0, seconds / size) for size, seconds in points]
    for (size, seconds), (other, longer) in itertools.combinations(points, 2):
        slope = (longer - seconds) / (other - size) if other != size else 0.0
        lines.append((seconds - slope * size, slope))
    possible = [(latency, slope) for latency, slope in lines if latency >= 0 and slope > 0]

    def error(line: tuple[float, float]) -> float:
        return sum(abs(math.log((line[0] + line[1] * size) / seconds)) for size, seconds in points)

    latency, slope = min(possible, key=error)
    return LinkFit(latency, 1 / slope)


def duplex_factor(up_s: float, down_s: float, both_s: float) -> float:
    """The share of its rate that each direction keeps while both run, from the times alone and together; at most 1.

    Assumes that both run at this share until the shorter copy is done, and the longer one then at its full rate.
    """
    first, last = sorted((up_s, down_s))
    shared = both_s - (last - first)  # how long both ran
    return min(1.0, first / shared) if shared > 0 else 1.0
