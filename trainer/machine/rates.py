"""How fast this machine is, measured in under a minute: what ``launch/doctor.py --rates`` runs.

    GEMM     products of the shapes of a transformer's linear layers, on the device, in fp32 and bf16
    link     copies as the engine makes them (its transfer and streams, pinned memory), up, down, and both at once, from
             64 KiB to 256 MiB; ``fit_line`` makes latency and asymptote of them
    memory   scaling a large buffer in place: DRAM by one core and by all, and the device's memory
    update   the engine's AdamW on host memory, in its stretches and in its worker's threads

Without an accelerator the link is a stand-in, and its lines say so: one core copies between two ordinary buffers.

Every number is made of as many repetitions as fit into its share of the time, after one that does not count; the
lower quartile of their seconds counts: what is now and then possible is not sustained, and what others disturb is not
the machine. Copies go round in buffers larger than the caches, because a bucket of the engine is in no cache either.
Two threads beside other work can lose nine tenths of their speed (a kernel's threads wait for the slowest of them), and
no statistic mends that, so the processor time of others is counted, and said.

The fits are pure functions on plain numbers.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strategies.core.facts import Rates
from strategies.engine.memory import accelerator
from strategies.engine.optim import AdamW, Operands
from strategies.engine.transfer.transfer import Lane, transfer_for
from strategies.engine.updates import HOST_CHUNK
from strategies.engine.worker import Worker, spare_cores
from trainer.machine.probe import cores, host_memory, others_cpu_s, probe
from trainer.machine.profiles import Stored, key_of, save, unfinished

Say = Callable[[str], None]
Shape = tuple[int, int, int]  # rows (tokens), summed, columns

MIB = 1 << 20
DEVICE_SHAPES: tuple[Shape, ...] = ((4096, 4096, 4096), (8192, 4096, 4096), (8192, 4096, 14336))
CPU_SHAPES: tuple[Shape, ...] = ((512, 1024, 1024), (1024, 1024, 4096), (1024, 2048, 5632))
LONGEST_GEMM_S = 2.0  # a shape that would take longer is left out
DUPLEX_BYTES = MIB  # the smallest copies that are made in both directions at once
QUEUE_S = 5e-3  # a device gets this much work at a time, so that starting it and waiting for it do not count
CALL_BYTES, MOST_COPIES = 32 * MIB, 64  # copies are timed in rounds of this many bytes, or this many copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured: seconds for each number, sizes, and when every number gets no more than one repetition."""

    seconds: float = 0.4
    link_seconds: float = 0.15
    hurry_after_s: float = 40.0
    smallest_bytes: int = MIB // 16
    largest_bytes: int = 256 * MIB
    num_params: int = 24 * MIB
    shapes: tuple[Shape, ...] = ()  # () is the device's


FULL = Effort()


# --- fits --------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """Seconds of a copy are ``latency_s + bytes / bytes_per_s``."""

    latency_s: float
    bytes_per_s: float


def fit_line(points: Sequence[tuple[int, float]]) -> Line:
    """Of all lines through two of the points (bytes, seconds), or one and the origin, the one nearest to all of them.

    Near by ratio, because sizes span three orders of magnitude and both ends count; ratios are summed and not squared,
    so that a disturbed point does not bend the line. The latency is not negative.

    Raises:
        ValueError: fewer than two sizes.
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
    return Line(latency, 1 / slope)


def duplex_factor(up_s: float, down_s: float, both_s: float) -> float:
    """What is left of either rate while both directions run, from the times alone and together; at most 1.

    The direction that is done first ran at ``factor`` all the time; the other one that long, then at its full rate.
    """
    first, last = sorted((up_s, down_s))
    shared = both_s - (last - first)  # how long both ran
    return min(1.0, first / shared) if shared > 0 else 1.0


# --- clock -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Clock:
    """Repeats work for a share of the time."""

    effort: Effort
    device: torch.device
    began_s: float = field(default_factory=time.perf_counter)

    def seconds(self, work: Callable[[], object], share_s: float | None = None) -> float:
        """The lower quartile of the durations of ``work``, which is over when the device is idle."""
        share_s = self.effort.seconds if share_s is None else share_s
        hurried = self.elapsed_s > self.effort.hurry_after_s
        self._once(work)
        first_s = self._once(work)
        if hurried:
            return first_s
        times = max(1, int(QUEUE_S / first_s)) if self.device.type != "cpu" else 1
        samples, began_s = [self._once(work, times)], time.perf_counter()
        while time.perf_counter() - began_s < share_s:
            samples.append(self._once(work, times))
        return sorted(samples)[len(samples) // 4]

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.began_s

    def _once(self, work: Callable[[], object], times: int = 1) -> float:
        """Seconds of ``work``, issued this many times before the device is waited for."""
        began_s = time.perf_counter()
        for _ in range(times):
            work()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return (time.perf_counter() - began_s) / times


@contextlib.contextmanager
def workers(*threads: int | None) -> Iterator[list[Worker]]:
    """Workers of the engine, with this many threads each; None works in the caller's."""
    team = [Worker(each) for each in threads]
    try:
        yield team
    finally:
        for worker in team:
            worker.close()


# --- device ------------------------------------------------------------------------------------------------------


def measure_gemm(clock: Clock, dtype: torch.dtype) -> Iterator[tuple[Shape, float]]:
    """(shape, flop/s) for each shape that does not take too long."""
    device = clock.device
    shapes = clock.effort.shapes or (CPU_SHAPES if device.type == "cpu" else DEVICE_SHAPES)
    rate = 0.0
    for rows, summed, columns in shapes:
        flops = 2 * rows * summed * columns
        if rate and flops / rate > LONGEST_GEMM_S:
            return
        left = torch.randn(rows, summed, device=device).to(dtype)
        right = torch.randn(columns, summed, device=device).to(dtype).t()  # as nn.Linear keeps it
        out = torch.empty(rows, columns, device=device, dtype=dtype)

        def work(left: Tensor = left, right: Tensor = right, out: Tensor = out) -> None:
            torch.mm(left, right, out=out)

        rate = flops / clock.seconds(work)
        yield (rows, summed, columns), rate


def measure_scaling(clock: Clock, device: torch.device, num_bytes: int, worker: Worker) -> float:
    """Bytes per second read and written by ``worker`` while it scales a buffer in place."""
    buffer = torch.ones(num_bytes // 4, device=device)
    return 2 * num_bytes / clock.seconds(lambda: worker.submit(0, lambda: buffer.mul_(1.0)).result())


# --- link --------------------------------------------------------------------------------------------------------


class Link:
    """Buffers on both sides, and the engine's transfer between them."""

    def __init__(self, device: torch.device, num_bytes: int, team: Sequence[Worker]) -> None:
        pinned = device.type != "cpu"
        host = [torch.ones(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        there = [torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._ends = {Lane.UP: (there[0], host[0]), Lane.DOWN: (host[1], there[1])}
        self._transfer = transfer_for(device)
        self._team = None if pinned else dict(zip((Lane.UP, Lane.DOWN), team, strict=True))
        self.num_bytes = num_bytes
        if pinned:
            torch.accelerator.synchronize(device)  # the buffers are filled on another stream than they are copied on

    def seconds(self, clock: Clock, size: int, *lanes: Lane) -> float:
        """Of one copy of ``size`` bytes in each of ``lanes``, in a row of such copies."""
        count = max(1, min(MOST_COPIES, CALL_BYTES // size))
        rounds = {lane: itertools.cycle(self._cuts(lane, size)) for lane in lanes}

        def copy(lane: Lane, times: int) -> None:
            for target, source in itertools.islice(rounds[lane], times):
                self._transfer.copy(lane, target, source)

        def issue() -> None:
            if self._team is None:  # in turns, so that both streams have work from the start
                for lane in lanes * count:
                    copy(lane, 1)
                return
            for future in [self._team[lane].submit(0, partial(copy, lane, count)) for lane in lanes]:
                future.result()

        return clock.seconds(issue, clock.effort.link_seconds) / count

    def _cuts(self, lane: Lane, size: int) -> list[tuple[Tensor, Tensor]]:
        """Places all over the buffers, so that what was copied last is in no cache."""
        target, source = self._ends[lane]
        stride = max(size, self.num_bytes // 512)
        starts = range(0, self.num_bytes - size + 1, stride)
        return [(target[start : start + size], source[start : start + size]) for start in starts]


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Both directions alone, what both leave of each other, and (bytes, seconds) of every copy by kind."""

    up: Line
    down: Line
    duplex_factor: float
    points: dict[str, list[tuple[int, float]]]


def measure_link(clock: Clock, say: Say) -> LinkRates:
    """Copies of all sizes. The factor is the median over the sizes."""
    effort, device = clock.effort, clock.device
    most_bytes = min(effort.largest_bytes, host_memory().available_bytes // 16)
    sizes = [effort.smallest_bytes]
    while sizes[-1] * 2 <= most_bytes:
        sizes.append(sizes[-1] * 2)
    points: dict[str, list[tuple[int, float]]] = {"up": [], "down": [], "both": []}
    factors = []
    with workers(*(1, 1) if device.type == "cpu" else ()) as team:
        link = Link(device, sizes[-1], team)
        for size in sizes:
            up_s, down_s = (link.seconds(clock, size, lane) for lane in (Lane.UP, Lane.DOWN))
            points["up"].append((size, up_s))
            points["down"].append((size, down_s))
            line = f"  {size / MIB:8.4g} MiB  up {size / up_s / 1e9:6.2f} GB/s  down {size / down_s / 1e9:6.2f}"
            if size >= min(DUPLEX_BYTES, sizes[-1]):
                both_s = link.seconds(clock, size, Lane.UP, Lane.DOWN)
                points["both"].append((size, both_s))
                factors.append(duplex_factor(up_s, down_s, both_s))
                line += f"  both at once {2 * size / both_s / 1e9:6.2f} together, each keeps {factors[-1]:.0%}"
            say(line)
    return LinkRates(fit_line(points["up"]), fit_line(points["down"]), statistics.median(factors), points)


# --- update ------------------------------------------------------------------------------------------------------


def measure_update(clock: Clock, worker: Worker, *, mixed: bool) -> float:
    """Parameters per second of a clipped AdamW step on host memory, as ``Updates`` in the runtime makes it.

    Args:
        mixed: bf16 gradients go through scratch, and the new weights go to bf16 over the gradients.
    """
    num_params = clock.effort.num_params
    master, first, second = torch.randn(num_params), torch.zeros(num_params), torch.zeros(num_params)
    grads = torch.randn(num_params).mul_(1e-2)
    parked = grads.bfloat16() if mixed else grads
    source = parked.clone() if mixed else grads  # the new weights must not become the next gradients
    scratch, factor, step = torch.zeros(HOST_CHUNK), torch.tensor(1.0), torch.tensor(0.0)
    rule = AdamW()
    group = rule.defaults()

    def update() -> None:
        with torch.no_grad():
            for start in range(0, num_params, HOST_CHUNK):
                part = slice(start, min(num_params, start + HOST_CHUNK))
                grad = source[part]
                if mixed:
                    grad = scratch[: part.stop - part.start].copy_(grad)
                torch._foreach_mul_([grad], factor)
                rule.update(Operands([master[part]], [grad], [[first[part]], [second[part]]], [step]), group, None)
            if mixed:
                parked.copy_(master)

    return num_params / clock.seconds(lambda: worker.submit(0, update).result())


# --- the whole ---------------------------------------------------------------------------------------------------


def measure_and_store(path: Path, say: Say, effort: Effort | None = None) -> Stored:
    """Measure this machine and its current device into ``path``; ``say`` takes the lines of progress.

    Raises:
        OSError: the file cannot be written, which is tried first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished(path).touch()
    key, date = key_of(probe()), time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime())
    others_s, began_s = others_cpu_s(), time.perf_counter()
    rates, points = measure(say, effort)
    spent_s = (time.perf_counter() - began_s) * cores()[1]
    stored = Stored(rates, date, max(0.0, (others_cpu_s() - others_s) / spent_s))
    save(path, key, stored, points)
    return stored


def measure(say: Say, effort: Effort | None = None) -> tuple[Rates, dict[str, Any]]:
    """The rates, and what they were taken from."""
    effort = FULL if effort is None else effort
    device = accelerator.current() or torch.device("cpu")
    clock, on_cpu = Clock(effort, device), device.type == "cpu"
    say(f"matrix products on {'the CPU' if on_cpu else accelerator.name_of(device)}")
    gemm: dict[str, list[tuple[Shape, float]]] = {"fp32": [], "bf16": []}
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for shape, rate in measure_gemm(clock, dtype):
            say(f"  {precision} {' x '.join(map(str, shape))}: {rate / 1e12:.4g} Tflop/s")
            gemm[precision].append((shape, rate))
    say("no accelerator: copies between two buffers, one core each" if on_cpu else "link, pinned memory")
    link = measure_link(clock, say)
    latency_s = max(link.up.latency_s, link.down.latency_s)
    say(
        f"  fitted: {latency_s * 1e6:.1f} us, then up {link.up.bytes_per_s / 1e9:.2f} GB/s, "
        f"down {link.down.bytes_per_s / 1e9:.2f}"
    )
    memory = measure_memory(clock, say)
    update = {}
    threads = None if on_cpu else spare_cores()
    say(f"AdamW on host memory, {threads or torch.get_num_threads()} threads")
    with workers(threads) as (worker,):
        for precision in ("fp32", "bf16"):
            update[precision] = measure_update(clock, worker, mixed=precision == "bf16")
            say(f"  {precision} gradients: {update[precision] / 1e9:.3g} G parameters/s")
    rates = Rates(
        gemm_fp32_flops_per_s=statistics.median(rate for _, rate in gemm["fp32"]),
        gemm_bf16_flops_per_s=statistics.median(rate for _, rate in gemm["bf16"]),
        up_bytes_per_s=link.up.bytes_per_s,
        down_bytes_per_s=link.down.bytes_per_s,
        duplex_factor=link.duplex_factor,
        link_latency_s=latency_s,
        dram_bytes_per_s=memory["dram"],
        update_fp32_params_per_s=update["fp32"],
        update_bf16_params_per_s=update["bf16"],
        device_bytes_per_s=memory["device"],
        origin="measured",
    )
    return rates, {"gemm": gemm, "link": link.points, "memory": memory}


def measure_memory(clock: Clock, say: Say) -> dict[str, float]:
    """Bytes per second of DRAM by one core and by all (``dram`` is the larger), and of the device's memory."""
    usable, num_bytes = cores()[1], min(clock.effort.largest_bytes, host_memory().available_bytes // 8)
    host, found = torch.device("cpu"), {}
    with workers(1, usable, None) as (one, every, caller):
        found["dram_one_core"] = measure_scaling(clock, host, num_bytes, one)
        found["dram_all_cores"] = measure_scaling(clock, host, num_bytes, every)
        found["dram"] = max(found.values())
        found["device"] = found["dram"]
        if clock.device.type != "cpu":
            found["device"] = measure_scaling(clock, clock.device, clock.effort.largest_bytes, caller)
    say(f"DRAM {found['dram_one_core'] / 1e9:.1f} GB/s by one core, {found['dram_all_cores'] / 1e9:.1f} by {usable}")
    say(f"device memory {found['device'] / 1e9:.1f} GB/s" + (", the same" if clock.device.type == "cpu" else ""))
    return found
