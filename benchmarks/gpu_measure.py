"""What a machine with an accelerator is, and what a plan predicts beside what is measured. Prints lines of JSON.

    python -m deepstow.benchmarks.gpu_measure --pin 1,40
    python -m deepstow.benchmarks.gpu_measure --model 6.7b --gpu-memory 24GiB [--length 2048]

With ``--pin``: names, sizes, and seconds to map, pin and unpin so many GiB, one after the other. With ``--model``: a
model of the bench, trained by its contender ``Ours`` in rows of one, blocks recomputed; in bf16 on an accelerator.
``--model largest`` is a Llama of 4096 by 11008 with as many blocks as can be planned for this device and host.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import time
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import torch

from deepstow.benchmarks.harness import child, work
from deepstow.benchmarks.harness.work import Work
from deepstow.strategies.core.protocol import Refusal
from deepstow.strategies.engine.memory import accelerator
from deepstow.strategies.engine.memory.arena import PIECE_BYTES, HostMemory
from deepstow.trainer.planning.plan_for import plan_for

QUERY = "name,driver_version,pcie.link.gen.max,pcie.link.width.max,memory.total,clocks.max.sm"
LARGEST = 120  # blocks: more than 128 GiB of host memory hold


def about() -> dict[str, Any]:
    """Names, sizes, versions."""
    found, device = child.surroundings(), accelerator.current()
    if device is not None:
        free, total = torch.accelerator.get_memory_info(device)
        found |= {"context_bytes": total - free, "software": accelerator.row_of(device).software()}
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv"]
        found["nvidia_smi"] = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return found


def pinning(gib: float) -> dict[str, Any]:
    """Seconds to map memory and, where there is a device, to pin and unpin it; ``doctor.py --rates`` times copies."""
    size, device, stamps = int(gib * (1 << 30)), accelerator.current(), [time.perf_counter()]
    pages = HostMemory(size, device or torch.device("cpu"), "this measurement")
    stamps.append(time.perf_counter())
    found: dict[str, Any] = {"gib": gib, "map_s": stamps[1] - stamps[0]}
    if device is None:
        return found
    pages.pin(range(0, size, PIECE_BYTES))
    stamps.append(time.perf_counter())
    registrations = len(pages.borders) + 1
    pages.release()
    unpin_s = time.perf_counter() - stamps[2]
    return found | {"pin_s": stamps[2] - stamps[1], "registrations": registrations, "unpin_s": unpin_s}


def largest(gpu_memory: str, length: int) -> str:
    """The name of the model with the most blocks that can be planned, found by bisection."""

    def too_large(blocks: int) -> bool:
        try:
            with torch.device("meta"):
                model = child.llama(todo(f"{blocks} blocks", length))
            plan_for(model, batch=(1, length), max_grad_norm=1.0, gpu_memory=gpu_memory)
        except Refusal:
            return True
        return False

    return f"{bisect_left(range(2, LARGEST), True, key=too_large) + 1} blocks"


def todo(model: str, length: int) -> Work:
    """Three steps of one row."""
    dtype = "fp32" if accelerator.current() is None else "bf16"
    return work.work(model, rows=1, length=length, dtype=dtype, recompute=True, steps=3, warmup=1)


def measured(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What the command line asks for."""
    if given.pin:
        yield about()
        yield from (pinning(float(gib)) for gib in given.pin.split(","))
    if given.model:
        name = largest(given.gpu_memory, given.length) if given.model == "largest" else given.model
        found = {"model": name, "params": work.shape_of(name).num_params}
        yield found | child.run(todo(name, given.length), "contenders:Ours", {"gpu_memory": given.gpu_memory})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pin", metavar="GIB,...", help="describe the machine, and pin so much")
    parser.add_argument("--model", help="train it as planned")
    parser.add_argument("--gpu-memory", default="24GiB")
    parser.add_argument("--length", type=int, default=2048)
    for line in measured(parser.parse_args()):
        print(json.dumps(line), flush=True)
