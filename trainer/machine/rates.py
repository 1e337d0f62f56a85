"""How fast this machine is, measured in under a minute: what ``deepstow doctor --rates`` runs.

    GEMM     products of the shapes of a transformer's linear layers, on the device, in fp32 and bf16
    link     copies as the engine makes them (its transfer and streams, pinned memory), up, down, and both at once, from
             64 KiB to 256 MiB; ``fit_line`` turns them into a latency and an asymptotic rate
    memory   scaling a large buffer in place: DRAM by all cores, and the device's memory
    update   the engine's AdamW on host memory, in the engine's chunk size and with its worker's threads, while this
             thread launches operators on the device without pause, as a training loop does
    together the same update while copies run in both directions: what all of them get of DRAM
    launch   one small operator after the other on the device, without waiting for it
    disk     only of folders that are named: the engine's own stores
    network  as many ranks as there are devices, or two processes without an accelerator, make the two exchanges of the
             engine (``strategies/engine/ranks/shares.py``). Counted are the bytes that one rank sends while it receives
             as many, of the slower kind. Between machines nothing is measured: one does not know the others.

A plan lets updates and copies run together, so DRAM counts with what they reach together if they slow each other down.
Without an accelerator two ordinary buffers stand in for the link, one core copies between them, and DRAM counts with
its own rate. Copies cycle through buffers larger than the caches, because a bucket of the engine is in no cache either.
Two threads next to other work can lose nine tenths of their speed, so the CPU time of other processes is printed.
"""

from __future__ import annotations

import itertools
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deepstow.strategies.core.facts import HOST_UPDATE_BYTES, Rates
from deepstow.strategies.core.formats import HOST_CHUNK
from deepstow.strategies.core.on_disk import folder_of, part_bytes
from deepstow.strategies.core.sizes import human
from deepstow.strategies.engine.memory import accelerator
from deepstow.strategies.engine.memory.arena import HostMemory
from deepstow.strategies.engine.memory.tiers import Striped
from deepstow.strategies.engine.transfer.transfer import Stream, transfer_for
from deepstow.strategies.engine.transfer.worker import Worker, spare_cores
from deepstow.strategies.engine.updating.optim import AdamW, Operands
from deepstow.strategies.state.commit import refuse_unwritable
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import WorldError, run_world
from deepstow.trainer.machine.probe import cores, host_memory, others_cpu_s, peak_flops, probe
from deepstow.trainer.machine.profiles import StoredRates, key_of, save

Say = Callable[[str], None]
Shape = tuple[int, int, int]  # rows (tokens), summed, columns

MIB = 1 << 20
DEVICE_SHAPES: tuple[Shape, ...] = ((4096, 4096, 4096), (8192, 4096, 4096), (8192, 4096, 14336))
CPU_SHAPES: tuple[Shape, ...] = ((512, 1024, 1024), (1024, 1024, 4096), (1024, 2048, 5632))
DUPLEX_BYTES = MIB  # the smallest copies that are made in both directions at once
QUEUE_S = 5e-3  # a device gets this much work at a time, so that launching it and waiting for it do not count
SLOWED = 0.95  # less than this part of what works reach alone: they slow each other down
LAUNCHED = 200  # operators that are launched for one timing
CALL_BYTES, MOST_COPIES = 32 * MIB, 64  # copies are timed in rounds of this many bytes, or this many copies
ON_CPU = 2  # processes that stand for ranks where there is no accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Seconds for each number, and sizes."""

    seconds: float = 0.4
    link_seconds: float = 0.15
    smallest_bytes: int = MIB // 16
    largest_bytes: int = 256 * MIB
    num_params: int = 24 * MIB
    network_bytes: int = 64 * MIB
    disk_seconds: float = 5.0
    shapes: tuple[Shape, ...] = ()  # empty: those that suit the device


FULL = Effort()


class Stopwatch(NamedTuple):
    """Times work by repeating it for a share of the total time."""

    effort: Effort
    device: torch.device

    def seconds(self, work: Callable[[], object], share_s: float | None = None) -> float:
        """The lower quartile of the durations of ``work``, each until the device is idle."""
        once = timer(work, self.device, QUEUE_S if self.device.type != "cpu" else 0.0)
        share_s = self.effort.seconds if share_s is None else share_s
        samples, began_s = [once()], time.perf_counter()
        while time.perf_counter() - began_s < share_s:
            samples.append(once())
        return lower_quartile(samples)


def measure_gemm(clock: Stopwatch, say: Say, precision: str, dtype: torch.dtype) -> list[tuple[Shape, float]]:
    """Shape and flop/s of each product."""
    device, products = clock.device, []
    for shape in clock.effort.shapes or (CPU_SHAPES if device.type == "cpu" else DEVICE_SHAPES):
        rows, summed, columns = shape
        left = torch.randn(rows, summed, device=device).to(dtype)
        right = torch.randn(columns, summed, device=device).to(dtype).t()  # as nn.Linear keeps it
        out = torch.empty(rows, columns, device=device, dtype=dtype)
        rate = 2 * rows * summed * columns / clock.seconds(partial(torch.mm, left, right, out=out))
        say(f"  {precision} {' x '.join(map(str, shape))}: {rate / 1e12:.4g} Tflop/s")
        products.append((shape, rate))
    return products


def copier(device: torch.device, num_bytes: int, up: Worker, down: Worker) -> Callable[..., None]:
    """A function that issues ``count`` copies of ``size`` bytes on each of some streams, by the engine's transfer
    between buffers of ``num_bytes``; without streams ``up`` and ``down`` make them.
    """
    pinned = device.type != "cpu"
    host = [torch.ones(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    remote = [torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    ends = {Stream.UP: (remote[0], host[0], up), Stream.DOWN: (host[1], remote[1], down)}
    transfer = transfer_for(device)
    if pinned:
        torch.accelerator.synchronize(device)  # the buffers are filled on another stream than they are copied on

    @cache
    def rounds(stream: Stream, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Slices of ``size`` bytes from all over the buffers, going on where the last copy ended."""
        target, source, _ = ends[stream]
        starts = range(0, num_bytes - size + 1, max(size, num_bytes // 512))
        return itertools.cycle([(target[start : start + size], source[start : start + size]) for start in starts])

    def copy(stream: Stream, size: int, times: int) -> None:
        for target, source in itertools.islice(rounds(stream, size), times):
            transfer.copy(stream, target, source)

    def issue(size: int, count: int, *streams: Stream) -> None:
        if pinned:
            for stream in streams * count:  # alternating, so that both streams have work from the start
                copy(stream, size, 1)
            return
        for future in [ends[stream][2].submit(0, partial(copy, stream, size, count)) for stream in streams]:
            future.result()

    return issue


def measure_link(clock: Stopwatch, say: Say) -> tuple[float, dict[str, list[tuple[int, float]]]]:
    """Copy all sizes; the duplex factor (median over the sizes), and (bytes, seconds) of up, down and both at once."""
    effort, device = clock.effort, clock.device
    most_bytes = min(effort.largest_bytes, host_memory().available_bytes // 16)
    sizes = [effort.smallest_bytes]
    while sizes[-1] * 2 <= most_bytes:
        sizes.append(sizes[-1] * 2)
    points: dict[str, list[tuple[int, float]]] = {"up": [], "down": [], "both": []}
    factors = []
    with closing(Worker(1)) as up, closing(Worker(1)) as down:  # they stand in for the link where there is none
        issue = copier(device, sizes[-1], up, down)

        def seconds(size: int, *streams: Stream) -> float:
            count = max(1, min(MOST_COPIES, CALL_BYTES // size))
            return clock.seconds(partial(issue, size, count, *streams), effort.link_seconds) / count

        for size in sizes:
            up_s, down_s = seconds(size, Stream.UP), seconds(size, Stream.DOWN)
            points["up"].append((size, up_s))
            points["down"].append((size, down_s))
            line = f"  {size / MIB:8.4g} MiB  up {size / up_s / 1e9:6.2f} GB/s  down {size / down_s / 1e9:6.2f}"
            if size >= min(DUPLEX_BYTES, sizes[-1]):
                both_s = seconds(size, Stream.UP, Stream.DOWN)
                points["both"].append((size, both_s))
                factors.append(duplex_factor(up_s, down_s, both_s))
                line += f"  both at once {2 * size / both_s / 1e9:6.2f} together, each keeps {factors[-1]:.0%}"
            say(line)
    return statistics.median(factors), points


def host_update(num_params: int, *, mixed: bool, at_once: bool = True) -> Callable[[], None]:
    """A clipped AdamW step on host memory, done as the engine's ``Updates`` does it. ``mixed``: gradients are bf16 and
    converted in a scratch buffer; the new bf16 weights overwrite the gradients. Not ``at_once``: a call for each chunk.
    """
    master = torch.randn(num_params)
    first = torch.zeros(num_params)
    second = torch.zeros(num_params)
    grads = torch.randn(num_params).mul_(1e-2)
    weights = grads.bfloat16()
    source = weights.clone() if mixed else grads  # the new weights must not become the next gradients
    scratch = torch.zeros(HOST_CHUNK)
    factor = torch.tensor(1.0)
    step = torch.tensor(0.0)
    rule = AdamW()
    group = rule.defaults()

    def update() -> None:
        with torch.no_grad():
            parts = [slice(start, min(num_params, start + HOST_CHUNK)) for start in range(0, num_params, HOST_CHUNK)]
            calls = [
                Operands(
                    [master[chunk]],
                    [scratch[: chunk.stop - chunk.start] if mixed else source[chunk]],
                    [[first[chunk]], [second[chunk]]],
                    [step],
                    [source[chunk]] if mixed else [],
                )
                for chunk in parts
            ]
            for batch in [calls] if at_once else [[call] for call in calls]:
                rule.update_all(batch, group, factor)
            if mixed:
                weights.copy_(master)

    return update


def beside_launches(submit: Callable[[], Future[None]], launch: Callable[[], object]) -> None:
    """Make an update, which ``submit`` begins, while this thread launches operators."""
    running = submit()
    while not running.done():
        launch()
    running.result()


def measure_together(clock: Stopwatch, submit: Callable[[], Future[None]], update_s: float) -> float:
    """Bytes per second of DRAM while updates of ``effort.num_params``, which ``submit`` begins and which take
    ``update_s`` alone, and copies in both directions run together.
    """
    effort = clock.effort
    size, updates = min(effort.largest_bytes, CALL_BYTES), 1 + int(effort.seconds / update_s)
    with closing(Worker(1)) as up, closing(Worker(1)) as down:
        issue = copier(clock.device, size, up, down)
        began_s, copied = time.perf_counter(), 0
        running = [submit() for _ in range(updates)]
        while not running[-1].done():
            seconds_per_call(partial(issue, size, 1, Stream.UP, Stream.DOWN), clock.device)
            copied += 2 * size
        spent_s = time.perf_counter() - began_s
    return (copied + HOST_UPDATE_BYTES * updates * effort.num_params) / spent_s


def shared_dram(alone: float, link: float, update: float, together: float) -> float:
    """Bytes per second of DRAM: ``together``, if that is less than copies (``link``) and updates reach by themselves;
    otherwise nothing was slowed down, and it is at least its own rate, ``alone``.
    """
    return together if together < SLOWED * (link + update) else max(alone, together)


def measure_and_store(path: Path, say: Say, disk: Sequence[str] = ()) -> StoredRates:
    """Measure this machine, its current device and what ``disk`` names, and store the rates in ``path``. Raises
    OSError if it cannot be written, which is tried before measuring; ValueError: a place is none for the state.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    refuse_unwritable(path)
    key, date = key_of(probe()), time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime())
    disk_rates = disk_rates_of(disk, say) if disk else {}
    others_s, began_s = others_cpu_s(), time.perf_counter()
    rates, points = measure(say, FULL)
    spent_s = (time.perf_counter() - began_s) * cores()[1]
    others_share = max(0.0, (others_cpu_s() - others_s) / spent_s)
    # Ranks are processes of their own, which are not others.
    rates = replace(rates, net_bytes_per_s=measure_network(FULL.network_bytes, FULL.seconds, say))
    rates = replace(rates, **disk_rates)
    stored = StoredRates(rates, date, others_share, key=key, points=points)
    save(path, stored)
    return stored


def disk_rates_of(places: Sequence[str], say: Say) -> dict[str, Any]:
    """The fields of ``Rates`` about drives."""
    read, write, overlap = measure_drives(places, FULL.disk_seconds, say)
    rates = {"disk_read_bytes_per_s": read, "disk_write_bytes_per_s": write, "disk_overlap": overlap}
    return {**rates, "disk_folder": ", ".join(places)}


def measure(say: Say, effort: Effort) -> tuple[Rates, dict[str, Any]]:
    """The rates, and the measurements that they were fitted to."""
    device = accelerator.current() or torch.device("cpu")
    clock, on_cpu = Stopwatch(effort, device), device.type == "cpu"
    say(f"matrix products on {'the CPU' if on_cpu else accelerator.name_of(device)}")
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    products = dict(dtypes)
    peaks = {} if on_cpu else peak_flops(accelerator.name_of(device))
    if "fp16" in peaks and "bf16" not in peaks:  # torch computes bf16 otherwise there, which is a rate of its own
        products["fp16"] = torch.float16
    gemm = {precision: measure_gemm(clock, say, precision, dtype) for precision, dtype in products.items()}
    say("no accelerator: copies between two buffers, one core each" if on_cpu else "link, pinned memory")
    duplex, copies = measure_link(clock, say)
    up, down = fit_line(copies["up"]), fit_line(copies["down"])
    latency_s = max(up.latency_s, down.latency_s)
    gb_per_s = up.bytes_per_s / 1e9, down.bytes_per_s / 1e9
    say(f"  fitted: {latency_s * 1e6:.1f} us, then up {gb_per_s[0]:.2f} GB/s, down {gb_per_s[1]:.2f}")
    memory = measure_memory(clock, say)
    update, small = dict[str, float](), torch.zeros(1, device=device)
    threads = None if on_cpu else spare_cores()
    say(f"AdamW on host memory, {threads or torch.get_num_threads()} threads")
    with closing(Worker(threads)) as worker:
        for precision in dtypes:
            submit = partial(worker.submit, 0, host_update(effort.num_params, mixed=precision == "bf16"))
            update_s = clock.seconds(partial(beside_launches, submit, partial(small.add_, 1.0)))
            update[precision] = effort.num_params / update_s
            say(f"  {precision} gradients: {update[precision] / 1e9:.3g} G parameters/s")
        memory["together"] = measure_together(clock, submit, update_s)
    link = duplex * sum(fit.bytes_per_s for fit in (up, down))
    dram = shared_dram(memory["dram"], link, HOST_UPDATE_BYTES * update["bf16"], memory["together"])
    say(f"  beside copies in both directions: {memory['together'] / 1e9:.3g} GB/s of DRAM by all of them")
    launch_s = clock.seconds(lambda: [small.add_(1.0) for _ in range(LAUNCHED)], effort.link_seconds) / LAUNCHED
    say(f"launching an operator: {launch_s * 1e6:.3g} us")
    rates = Rates(
        gemm_fp32_flops_per_s=statistics.median(rate for _, rate in gemm["fp32"]),
        gemm_bf16_flops_per_s=statistics.median(rate for _, rate in gemm["bf16"]),
        gemm_fp16_flops_per_s=statistics.median(rate for _, rate in gemm["fp16"]) if "fp16" in gemm else None,
        up_bytes_per_s=up.bytes_per_s,
        down_bytes_per_s=down.bytes_per_s,
        duplex_factor=duplex,
        link_latency_s=latency_s,
        launch_s=launch_s,
        dram_bytes_per_s=memory["dram"] if on_cpu else dram,
        update_fp32_params_per_s=update["fp32"],
        update_bf16_params_per_s=update["bf16"],
        device_bytes_per_s=memory["device"],
        origin="measured",
    )
    return rates, {"gemm": gemm, "link": copies, "memory": memory}


def measure_memory(clock: Stopwatch, say: Say) -> dict[str, float]:
    """Bytes per second of DRAM and of the device's memory."""

    def scaling(device: torch.device, num_bytes: int, submit: Callable[[Callable[[], object]], object]) -> float:
        buffer = torch.ones(num_bytes // 4, device=device)  # is read and written
        return 2 * num_bytes / clock.seconds(lambda: submit(lambda: buffer.mul_(1.0)))

    usable, num_bytes = cores()[1], min(clock.effort.largest_bytes, host_memory().available_bytes // 8)
    with closing(Worker(usable)) as every:
        dram = scaling(torch.device("cpu"), num_bytes, lambda work: every.submit(0, work).result())
    rates = {"dram": dram, "device": dram}
    if clock.device.type != "cpu":
        rates["device"] = scaling(clock.device, clock.effort.largest_bytes, lambda work: work())
    say(f"DRAM {dram / 1e9:.1f} GB/s by {usable} cores")
    say(f"device memory {rates['device'] / 1e9:.1f} GB/s" + (", the same" if clock.device.type == "cpu" else ""))
    return rates


def measure_network(num_bytes: int, seconds: float, say: Say) -> float | None:
    """Bytes per second that a rank sends while it receives as many, from buffers of ``num_bytes`` and ``seconds`` for
    each of the two kinds of exchange; None if there is one device, or ranks do not start.
    """
    count = torch.accelerator.device_count() if accelerator.kind() else min(ON_CPU, cores()[1])
    if count < 2 or not num_bytes:
        return None
    say(f"exchanges of {count} ranks, {num_bytes / MIB:.4g} MiB each")
    try:
        gather, scatter = run_world(count, exchange, num_bytes, seconds, deepspeed=False)
    except WorldError as error:
        say(f"  not measured: {str(error).splitlines()[-1]}")
        return None
    say(f"  gathered {gather / 1e9:.3g} GB/s, sent to owners {scatter / 1e9:.3g}")
    return float(min(gather, scatter))


def exchange(ranks: Ranks, num_bytes: int, seconds: float) -> list[float]:
    """On each rank: the rates of gathering and of sending spans to their owners."""
    device = accelerator.current() or torch.device("cpu")
    share = num_bytes // 4 // ranks.world_size
    whole, received = (torch.ones(share * ranks.world_size, device=device) for _ in range(2))
    span = whole[ranks.rank * share : (ranks.rank + 1) * share]

    def rate(work: Callable[[], object]) -> float:
        seconds_per_call(work, device)
        times = torch.tensor(max(1.0, seconds / seconds_per_call(work, device)), device=device)
        dist.broadcast(times, 0)  # all ranks do it equally often
        samples = [seconds_per_call(work, device) for _ in range(int(times))]
        return 4 * share * (ranks.world_size - 1) / lower_quartile(samples)

    gathering = rate(lambda: dist.all_gather_into_tensor(whole, span))
    return [gathering, rate(lambda: dist.all_to_all_single(received, whole))]


PIECE = 64 << 20
MOST_BYTES = 4 << 30  # of the file, or a quarter of what is free


def measure_drives(places: Sequence[str], seconds: float, say: Say) -> tuple[float, float, float]:
    """Bytes per second that each of ``places`` reads, and writes, for so many seconds, and how much of both it does at
    once (1: either or, 2: each as if it were alone). Raise ValueError: one cannot have such a file.

    The engine's own stores (``strategies/engine/memory/tiers.py``), which go past the page cache, are filled in large
    pieces, which does not count: drives write fast until a cache of theirs is full, and what was never written is not
    read from the disk. Then they are written again, read, and both at once by two threads, several drives together.
    What they sustain for hours may still be less.
    """
    folders = [folder for folder in map(folder_of, places) if Path(folder).is_dir()]
    free = min((shutil.disk_usage(folder).free for folder in folders), default=MOST_BYTES)
    pieces, stride = max(2, min(MOST_BYTES, free // 4) // PIECE), part_bytes(PIECE, len(places))
    with closing(Striped(places, pieces * stride, checked=False)) as file:  # checksums are made beside moves
        say(f"the disk of {', '.join(places)}: {human(pieces * PIECE)}, past the page cache")
        source, target = (HostMemory(PIECE, torch.device("cpu"), "a piece of the file").memory for _ in range(2))
        source.random_()

        def rate(move: Callable[[Tensor, int], None], memory: Tensor, first: int = 0) -> float:
            began_s = time.perf_counter()
            for number in itertools.count(1):
                move(memory, (first + number) % pieces * stride)
                if (spent_s := time.perf_counter() - began_s) > seconds:
                    break
            return number * PIECE / spent_s

        for index in range(pieces):
            file.write(source, index * stride)
        write, read = rate(file.write, source), rate(file.read, target)
        with ThreadPoolExecutor(2) as pool:
            begun = pool.submit(rate, file.read, target), pool.submit(rate, file.write, source, pieces // 2)
            reading, writing = (future.result() for future in begun)
    giga = 1e9
    at_once = f"{reading / giga:.3g} and {writing / giga:.3g}"
    say(f"  read {read / giga:.3g} GB/s, written {write / giga:.3g}; both at once {at_once}")
    return read / len(places), write / len(places), max(1.0, min(2.0, reading / read + writing / write))


# --- times, and what they say of a link ------------------------------------------------------------------------------


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
    for (size, seconds), (other_size, other_seconds) in itertools.combinations(points, 2):
        slope = (other_seconds - seconds) / (other_size - size) if other_size != size else 0.0
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
