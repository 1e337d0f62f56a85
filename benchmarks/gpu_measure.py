"""What a machine with an accelerator is, and what one contender of the bench does on it. Prints lines of JSON.

    python -m deepstow.benchmarks.gpu_measure --grow 110GiB
    python -m deepstow.benchmarks.gpu_measure --rates [--known results.jsonl ...]
    python -m deepstow.benchmarks.gpu_measure --pin 1,40
    python -m deepstow.benchmarks.gpu_measure --model 6.7b --gpu-memory 24GiB [--subject superoffload] [--profile FILE]

``--grow`` touches host memory until so much is free, or no more comes: that of a virtual machine may start small.
``--rates`` makes sure that plans here find measured rates: those of this machine that are stored, or else those that
``results.jsonl`` has of the same machine, or else they are measured. ``--pin``: names, sizes, and seconds to map, pin
and unpin so many GiB, one after the other. ``--model``: a model of the bench, with recomputed blocks, in bf16 on an
accelerator. ``--profile`` adds one step under torch's profiler, after the result is printed. ``--model largest`` is a
Llama of 4096 by 11008 with as many blocks as the contender's own plan takes; if it fails, the next smaller ones follow.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import time
import traceback
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from deepstow.benchmarks.harness import child, processes, record, work
from deepstow.benchmarks.harness.child import Batches
from deepstow.benchmarks.harness.contenders import Trained, Unavailable
from deepstow.benchmarks.harness.work import BUDGET, Contender, Work
from deepstow.launch import cli
from deepstow.strategies.core.protocol import Refusal
from deepstow.strategies.core.sizes import OVERHEAD_BYTES
from deepstow.strategies.engine.memory import accelerator
from deepstow.strategies.engine.memory.arena import PIECE_BYTES, HostMemory
from deepstow.trainer.machine import profiles, rates
from deepstow.trainer.machine.probe import GIB, host_memory, probe
from deepstow.trainer.planning.plan_for import plan_for

QUERY = "name,driver_version,pcie.link.gen.max,pcie.link.width.max,memory.total,clocks.max.sm"
LARGEST = 120  # blocks: more than 128 GiB of host memory hold
SMALLER, TRIES = 0.95, 3  # of the blocks, if so many fail
LEFT_BYTES = 3 * GIB  # of free host memory, that is not touched
GREW = 1.02  # times as much is free as before: it may grow further
MIB = 1 << 20
QUICK = rates.Effort(seconds=0.01, link_seconds=0.01, largest_bytes=MIB, num_params=MIB, shapes=((64, 64, 64),))
SHOWN = 12  # kernels of a profile, those that take the most


def about() -> dict[str, Any]:
    """Names, sizes, versions."""
    facts, device = child.surroundings(), accelerator.current()
    if device is not None:
        free, total = torch.accelerator.get_memory_info(device)
        facts |= {"context_bytes": total - free, "software": accelerator.row_of(device).software()}
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv"]
        facts["nvidia_smi"] = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return facts


def grown(enough: int) -> dict[str, Any]:
    """Touch host memory until ``enough`` bytes are free, or no more comes; how much was free each time."""
    began_s, free = time.perf_counter(), [host_memory().available_bytes]
    while free[-1] < enough and (len(free) == 1 or free[-1] > GREW * free[-2]):
        touched = []
        while host_memory().available_bytes > LEFT_BYTES + GIB:
            touched.append(torch.empty(GIB, dtype=torch.uint8).fill_(1))
        del touched
        free.append(host_memory().available_bytes)
    return {"free_bytes": free, "enough_bytes": enough, "grow_s": time.perf_counter() - began_s}


def settled_rates(known: Sequence[Path], *, quick: bool) -> dict[str, Any]:
    """The rates of this machine that plans find, measured if there are none, and where they are from. ``quick``:
    as a rehearsal measures them, in seconds, to no use.
    """
    path, key = profiles.stored_at(), profiles.key_of(probe())
    stored, origin = profiles.load(path, key), "stored here"
    if stored.rates is None and (earlier := rates_in(known, key)) is not None:
        stored, origin = earlier, "put back"
        profiles.save(path, stored)
    if stored.rates is None:
        say, origin = partial(print, flush=True), "measured"
        if quick:
            stored = profiles.StoredRates(rates.measure(say, QUICK)[0], "a rehearsal", key=key)
            profiles.save(path, stored)
        else:
            stored = rates.measure_and_store(path, say)
    assert stored.rates is not None
    print(profiles.one_line(stored.rates), flush=True)
    return {"rates_file": profiles.FILE.dump_python(stored, mode="json"), "origin": origin}


def rates_in(known: Sequence[Path], here: profiles.MachineKey) -> profiles.StoredRates | None:
    """The newest rates of this machine in files of results, which need not exist; None if they have none."""
    lines = [line for path in known if path.exists() for line in path.read_text().splitlines()]
    files = [row["found"]["rates_file"] for row in map(json.loads, lines) if "rates_file" in row.get("found", {})]
    return next((profiles.FILE.validate_python(file) for file in reversed(files) if file["key"] == here), None)


def pinning(gib: float) -> dict[str, Any]:
    """Seconds to map memory and, where there is a device, to pin and unpin it; ``doctor.py --rates`` times copies."""
    size = int(gib * GIB)
    device = accelerator.current()
    stamps = [time.perf_counter()]
    pages = HostMemory(size, device or torch.device("cpu"), "this measurement")
    stamps.append(time.perf_counter())
    result: dict[str, Any] = {"gib": gib, "map_s": stamps[1] - stamps[0]}
    if device is None:
        return result
    pages.pin(range(0, size, PIECE_BYTES))
    stamps.append(time.perf_counter())
    registrations = len(pages.borders) + 1
    pages.release()
    unpin_s = time.perf_counter() - stamps[2]
    return result | {"pin_s": stamps[2] - stamps[1], "registrations": registrations, "unpin_s": unpin_s}


def largest(given: argparse.Namespace, budget: int) -> int:
    """The most blocks that can be planned, found by bisection: by the plan that the contender makes, but without
    rates, which takes seconds. The memory of the weights is not touched.
    """
    machine = replace(probe(), origin="profile", rates=None)
    tensors = budget - OVERHEAD_BYTES.get(machine.device_kind, 0)
    options = {"gpu_memory": tensors, "host_memory": given.host_memory, "machine": machine}

    def too_large(blocks: int) -> bool:
        todo = work_of(given, f"{blocks} blocks")
        try:
            plan_for(child.llama(todo, filled=False), batch=(todo.rows, todo.length), max_grad_norm=1.0, **options)
        except Refusal:
            return True
        return False

    return bisect_left(range(2, given.most_blocks), True, key=too_large) + 1


def largest_trained(given: argparse.Namespace, contender: Contender, budget: int) -> Iterator[dict[str, Any]]:
    """Train the largest model that is planned, in a process of its own, and smaller ones until one does not fail."""
    blocks = largest(given, budget)
    for _ in range(TRIES):
        todo = work_of(given, f"{blocks} blocks")
        result = processes.child({"work": asdict(todo), "contender": asdict(contender)}, sys.stderr)
        yield {"model": todo.model, "params": todo.shape.num_params, "contender": contender.label, **result}
        blocks = int(SMALLER * blocks)
        if "failed" not in result or not blocks:
            return


def work_of(given: argparse.Namespace, model: str) -> Work:
    """Three steps after one; in bf16 on an accelerator."""
    dtype = "fp32" if accelerator.current() is None else "bf16"
    host = given.host_memory if given.host_memory == "auto" else work.memory("--host-memory", given.host_memory)
    shared = {"dtype": dtype, "recompute": True, "steps": given.steps, "warmup": 1, "host_memory": host}
    return work.work(model, rows=given.rows, length=given.length, **shared)


def profiled(trained: Trained, batches: Batches, path: Path) -> dict[str, Any]:
    """One step under torch's profiler: seconds that each stream of the device was busy, and the longest kernels."""
    trained.drain()
    began_s = time.perf_counter()
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profiler:
        child.step(trained, batches[0])
        trained.drain()
        if trained.device.type != "cpu":
            torch.accelerator.synchronize()
        wall_s = time.perf_counter() - began_s
    profiler.export_chrome_trace(str(path))
    with gzip.open(path, "rt") as trace:
        events = [
            row for row in json.load(trace)["traceEvents"] if row.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        ]
    spans, longest = defaultdict[str, list[tuple[float, float]]](list), Counter[str]()
    for row in events:
        spans[str(row["args"].get("stream"))].append((row["ts"], row["ts"] + row["dur"]))
        longest[row["name"][:80]] += row["dur"]
    busy = {stream: {"events": len(times), "busy_s": union(times) / 1e6} for stream, times in spans.items()}
    kernels = {name: us / 1e6 for name, us in longest.most_common(SHOWN)}
    return {"profiled_s": wall_s, "streams": busy, "kernels_s": kernels}


def union(spans: Sequence[tuple[float, float]]) -> float:
    """The length of what ``spans`` cover."""
    covered, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered


def show(found: dict[str, Any]) -> None:
    """A line of JSON, at once."""
    print(json.dumps(found), flush=True)


def trained(given: argparse.Namespace, contender: Contender) -> int:
    """Train, print the result as soon as it is there, then profile. Returns the exit code."""
    todo = work_of(given, given.model)
    told = {"model": given.model, "params": todo.shape.num_params, "contender": given.subject, "tokens": todo.tokens}

    def then(result: dict[str, Any], trained: Trained, batches: Batches) -> None:
        show(told | result)
        if given.profile:
            show(profiled(trained, batches, given.profile))

    try:
        child.run(todo, contender, then)
    except Unavailable as error:
        show(told | {"failed": child.reason(error)})
    except Exception as error:
        traceback.print_exc()
        show(told | {"failed": child.reason(error)})
        return 1
    return 0


def measured(given: argparse.Namespace) -> int:
    """What the command line asks for; the exit code."""
    if given.grow:
        show(grown(work.memory("--grow", given.grow)))
    if given.rates:
        show(settled_rates(given.known, quick=given.quick))
    if given.pin:
        show(about())
        for gib in given.pin.split(","):
            show(pinning(float(gib)))
    if not given.model:
        return 0
    device = accelerator.current()
    beside = OVERHEAD_BYTES.get(device.type, 0) if device is not None and given.tensors else 0
    budget = work.memory("--gpu-memory", given.gpu_memory) + beside
    (contender,) = work.contenders([given.subject], [str(budget)])
    record.refuse_unmeasured(child.surroundings(), [contender])
    if given.model != "largest":
        others = [kernel for name, kernel in SDPBackend.__members__.items() if name not in ("ERROR", "CUDNN_ATTENTION")]
        with sdpa_kernel(others) if given.without_cudnn else nullcontext():
            return trained(given, contender)
    result: dict[str, Any] = {}
    for result in largest_trained(given, contender, budget):
        show(result)
    return int("failed" in result)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--grow", metavar="SIZE", help="touch host memory until so much is free, or no more comes")
    arguments.add_argument("--rates", action="store_true", help="make sure that plans find measured rates here")
    arguments.add_argument("--quick", action="store_true", help="with --rates: for a rehearsal")
    arguments.add_argument("--known", type=Path, nargs="*", default=[], metavar="FILE", help="results with rates")
    arguments.add_argument("--pin", metavar="GIB,...", help="describe the machine, and pin so much")
    arguments.add_argument("--model", help="train it")
    arguments.add_argument("--subject", default=BUDGET.label, help="who trains (default ours-budget)")
    arguments.add_argument("--gpu-memory", default="24GiB", help="that the process may use")
    arguments.add_argument("--tensors", action="store_true", help="--gpu-memory is of tensors only")
    arguments.add_argument("--host-memory", default="auto", help="that ours may use")
    arguments.add_argument("--rows", type=int, default=1)
    arguments.add_argument("--length", type=int, default=2048)
    arguments.add_argument("--steps", type=int, default=3)
    arguments.add_argument("--most-blocks", type=int, default=LARGEST, help="of the largest model")
    arguments.add_argument("--profile", type=Path, metavar="FILE", help="a trace of one more step, as .json.gz")
    arguments.add_argument("--without-cudnn", action="store_true", help="attention by other kernels than cuDNN's")
    return arguments


if __name__ == "__main__":
    sys.exit(cli.answered(lambda: measured(parser().parse_args())))
