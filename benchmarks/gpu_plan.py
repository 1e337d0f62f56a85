"""A plan against what it meets: peaks of memory and seconds of steps, predicted and measured. One line of JSON.

    python -m benchmarks.gpu_plan --model 6.7b --gpu-memory 24GiB [--length 2048] [--device cpu]

The model is the bench's, with weights that cost no time to draw. ``largest``: a Llama of 4096 by 11008 with as many
blocks as the plan finds room for on this device and this host.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.harness import child, work
from benchmarks.harness.work import MODELS, Shape, Work
from strategies.core.plan import Home, Plan
from strategies.core.protocol import Refusal
from strategies.engine import AdamW, stow
from strategies.engine.memory import accelerator
from strategies.planner.step_cost import plan_cost
from trainer.planning.plan_for import plan_for
from trainer.run.callbacks import host_peak_bytes

STEPS, LARGEST = 3, 120  # blocks: beyond what 128 GiB of host memory hold


def todo(name: str, length: int, dtype: str) -> Work:
    """One row at a time, recomputed."""
    return replace(work.work(name, rows=1, length=length, dtype=dtype), recompute=True)


def plan_of(model: Any, given: argparse.Namespace) -> Plan:
    """A plan for micro-batches of this length."""
    ids = torch.zeros((1, given.length), dtype=torch.long)
    return plan_for(model, batch={"input_ids": ids, "labels": ids}, max_grad_norm=1.0, gpu_memory=given.gpu_memory)


def largest(given: argparse.Namespace) -> str:
    """The name of a model with the most blocks that can be planned; halving the difference."""
    low, high = 1, LARGEST
    while high - low > 1:
        blocks = (low + high) // 2
        name = _with(blocks)
        try:
            with torch.device("meta"):
                model = child.llama(todo(name, given.length, given.dtype))
            plan_of(model, given)
            low = blocks
        except Refusal:
            high = blocks
    return _with(low)


def _with(blocks: int) -> str:
    name = f"{blocks} blocks"
    MODELS[name] = Shape(4096, 11008, blocks, 32, 32000, rows=1, length=2048)  # type: ignore[index]
    return name


def measured(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Train a few steps."""
    began = time.perf_counter()
    model = child.llama(todo(name, given.length, given.dtype))
    model.train()
    built_s = time.perf_counter() - began
    plan = plan_of(model, given)
    accelerated = given.device != "cpu"
    began = time.perf_counter()
    optimizer = stow(model, plan, rule=AdamW(lr=1e-4), device=given.device)
    stowed_s, steps, losses = time.perf_counter() - began, [], []
    ids = torch.randint(MODELS[name].vocab, (1, given.length), device=given.device)
    for _ in range(STEPS):
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        steps.append(time.perf_counter() - began)
    optimizer.drain()
    priced = plan_cost(plan)
    found: dict[str, Any] = {
        "model": name, "params": sum(p.numel() for p in model.parameters()), "gpu_memory": given.gpu_memory,
        "built_s": built_s, "stowed_s": stowed_s, "step_s": steps, "losses": losses,
        "predicted_step_s": priced.seconds if priced else None, "predicted_device_bytes": plan.peak(Home.DEVICE),
        "predicted_host_bytes": plan.peak(Home.HOST), "host_peak_bytes": host_peak_bytes(),
        "arena_bytes": [optimizer.device_bytes, optimizer.host_bytes],
    }  # fmt: skip
    if accelerated:
        free, total = torch.accelerator.get_memory_info()
        found |= {
            "allocated_peak_bytes": torch.accelerator.max_memory_allocated(),
            "reserved_peak_bytes": torch.accelerator.max_memory_reserved(),
            "context_bytes": total - free - torch.accelerator.memory_reserved(),
        }
    optimizer.close()
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
    given.dtype = "fp32" if given.device == "cpu" else "bf16"
    name = largest(given) if given.model == "largest" else given.model
    print(json.dumps(measured(name, given)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
