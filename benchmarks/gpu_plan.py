"""What a plan predicts and what is measured: peaks of memory, seconds of a step. Prints one line of JSON.

    python -m benchmarks.gpu_plan --model 6.7b --gpu-memory 24GiB [--length 2048] [--device cpu]

The model is one of the bench's, trained by its contender ``Ours`` in rows of one. ``--model largest``: a Llama of 4096
by 11008 with as many blocks as can be planned for this device and host.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch

from benchmarks.harness import child, work
from benchmarks.harness.contenders import Ours
from benchmarks.harness.work import MODELS, Shape, Work
from strategies.core.plan import Home
from strategies.core.protocol import Refusal
from strategies.engine.memory import accelerator
from strategies.planner.step_cost import plan_cost
from trainer.planning.plan_for import plan_for
from trainer.run.callbacks import host_peak_bytes

LARGEST = 120  # blocks: more than 128 GiB of host memory hold


def largest(given: argparse.Namespace) -> str:
    """The name of the model with the most blocks that can be planned, found by bisection."""
    low, high = 1, LARGEST
    while high - low > 1:
        blocks = (low + high) // 2
        try:
            with torch.device("meta"):
                model = child.llama(todo(_with(blocks), given))
            plan_for(model, batch=(1, given.length), max_grad_norm=1.0, gpu_memory=given.gpu_memory)
            low = blocks
        except Refusal:
            high = blocks
    return _with(low)


def _with(blocks: int) -> str:
    name = f"{blocks} blocks"
    MODELS[name] = Shape(4096, 11008, blocks, 32, 32000, rows=1, length=2048)  # type: ignore[index]
    return name


def todo(model: str, given: argparse.Namespace) -> Work:
    """Three steps of one row, blocks recomputed."""
    dtype = "fp32" if given.device == "cpu" else "bf16"
    return work.work(model, rows=1, length=given.length, dtype=dtype, recompute=True, steps=3, warmup=1)


def measured(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Plan the model, train it, and compare."""
    of_steps, device = todo(name, given), torch.device(given.device)
    began = time.perf_counter()
    model = child.llama(of_steps).train()
    built_s, began = time.perf_counter() - began, time.perf_counter()
    trained = Ours(of_steps, model, device, gpu_memory=given.gpu_memory)
    stowed_s = time.perf_counter() - began
    plan, cost = trained.plan, plan_cost(trained.plan)
    found = {
        "model": name, "params": sum(p.numel() for p in model.parameters()), "gpu_memory": given.gpu_memory,
        "built_s": built_s, "stowed_s": stowed_s,
        **child.timed(of_steps, trained, child.tokens(of_steps, device), device),
        "predicted_step_s": cost.seconds if cost else None, "predicted_device_bytes": plan.peak(Home.DEVICE),
        "predicted_host_bytes": plan.peak(Home.HOST), "host_peak_bytes": host_peak_bytes(),
        "arena_bytes": [trained.optimizer.device_bytes, trained.optimizer.host_bytes],
    }  # fmt: skip
    if device.type != "cpu":
        free, total = torch.accelerator.get_memory_info()
        found |= {
            "allocated_peak_bytes": torch.accelerator.max_memory_allocated(),
            "reserved_peak_bytes": torch.accelerator.max_memory_reserved(),
            "context_bytes": total - free - torch.accelerator.memory_reserved(),
        }
    return found


def main() -> int:
    """The whole command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="6.7b")
    parser.add_argument("--gpu-memory", default="24GiB")
    parser.add_argument("--length", type=int, default=2048)
    kind = accelerator.kind()
    parser.add_argument("--device", default=kind, required=kind is None, help="default: the accelerator")
    given = parser.parse_args()
    name = largest(given) if given.model == "largest" else given.model
    print(json.dumps(measured(name, given)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
