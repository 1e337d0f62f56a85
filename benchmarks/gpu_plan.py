"""What a plan predicts and what is measured: peaks of memory, seconds of a step. Prints one line of JSON.

    python -m benchmarks.gpu_plan --model 6.7b --gpu-memory 24GiB [--length 2048]

The model is one of the bench's, trained by its contender ``Ours`` in rows of one, blocks recomputed; in bf16 on an
accelerator. ``--model largest``: a Llama of 4096 by 11008 with as many blocks as can be planned for this device and
host.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from benchmarks.harness import child, work
from benchmarks.harness.work import MODELS, Shape, Work
from strategies.core.protocol import Refusal
from strategies.engine.memory import accelerator
from trainer.planning.plan_for import plan_for

LARGEST = 120  # blocks: more than 128 GiB of host memory hold


def largest(given: argparse.Namespace) -> str:
    """The name of the model with the most blocks that can be planned, found by bisection."""
    low, high = 1, LARGEST
    while high - low > 1:
        blocks = (low + high) // 2
        try:
            with torch.device("meta"):
                model = child.llama(todo(_with(blocks), given.length))
            plan_for(model, batch=(1, given.length), max_grad_norm=1.0, gpu_memory=given.gpu_memory)
            low = blocks
        except Refusal:
            high = blocks
    return _with(low)


def _with(blocks: int) -> str:
    name = f"{blocks} blocks"
    MODELS[name] = Shape(4096, 11008, blocks, 32, 32000, rows=1, length=2048)  # type: ignore[index]
    return name


def todo(model: str, length: int) -> Work:
    """Three steps of one row."""
    dtype = "fp32" if accelerator.current() is None else "bf16"
    return work.work(model, rows=1, length=length, dtype=dtype, recompute=True, steps=3, warmup=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="6.7b")
    parser.add_argument("--gpu-memory", default="24GiB")
    parser.add_argument("--length", type=int, default=2048)
    given = parser.parse_args()
    name = largest(given) if given.model == "largest" else given.model
    found: dict[str, Any] = {"model": name, "params": MODELS[name].num_params}
    found |= child.run(todo(name, given.length), "contenders:Ours", {"gpu_memory": given.gpu_memory})
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
