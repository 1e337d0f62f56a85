"""What a step of the memory engine takes of the host beyond plain training: hooks, movement, events, updates.

    OMP_NUM_THREADS=1 python -m deepstow.benchmarks.host_overhead [--layers 48] [--rounds 15] [--steps 3]

A Llama so small that kernels take next to nothing, with many layers of many parameters, on the CPU, whose copies are
made when they are issued. All sides take turns in every round; figures are medians of a round's seconds per step, and
of the differences from plain training in the same round, per layer and per parameter.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from deepstow.strategies.engine import AdamW, stow
from deepstow.strategies.report.table import table
from deepstow.trainer.planning.plan_for import plan_for

SIDES: Mapping[str, Mapping[str, Any] | None] = {
    "plain": None,
    "plain again": None,
    "resident": {"site": "device"},
    "resident, host": {"site": "host"},
    "streamed": {"site": "host", "weights": "streamed"},
    "streamed state": {"site": "streamed", "weights": "streamed"},
}
ROWS = 1
LENGTH = 8
NORM = 1.0


def side(layers: int, offload: Mapping[str, Any] | None) -> Callable[[], None]:
    """What makes a step, clipped."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 64}
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_hidden_layers=layers, use_cache=False))
    ids = torch.arange(1, ROWS * LENGTH + 1).view(ROWS, LENGTH)
    optimizer: Any
    if offload is None:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    else:
        optimizer = stow(model, plan_for(model, batch=(ROWS, LENGTH), max_grad_norm=NORM, **offload), rule=AdamW())

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        if offload is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        else:
            optimizer.clip_grad_norm_(NORM)
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(step: Callable[[], None], steps: int) -> float:
    """Of this process's CPU, per step: other processes do not count."""
    gc.collect()
    began = time.process_time()
    for _ in range(steps):
        step()
    return (time.process_time() - began) / steps


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, value in (("layers", 48), ("rounds", 15), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    torch.set_num_threads(1)
    sides = {name: side(given.layers, offload) for name, offload in SIDES.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for step in sides.values():
        seconds(step, 2)
    for number in range(given.rounds):
        for name in list(sides)[:: 1 - 2 * (number % 2)]:
            times[name].append(seconds(sides[name], given.steps))
    rows = []
    for name, side_s in times.items():
        extra = [took - plain for took, plain in zip(side_s, times["plain"], strict=True)]
        low, high = sorted(extra)[len(extra) // 4], sorted(extra)[-1 - len(extra) // 4]
        quartiles = [f"{1e6 * extra_s / given.layers:.0f}" for extra_s in (median(extra), low, high)]
        rows.append((name, f"{1e3 * median(side_s):.1f}", *quartiles, f"{1e6 * median(extra) / given.layers / 9:.0f}"))
    title = ("side", "ms per step", "us per layer more than plain", "quartile", "quartile ", "us per parameter")
    print("\n".join(table(title, rows, markdown=True)))


if __name__ == "__main__":
    main()
