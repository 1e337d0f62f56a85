"""Micro-batches one by one, and layers first: simulated steps, or measured ones on this machine.

    python -m deepstow.benchmarks.layers_first              # the table of docs/strategies/offload.md
    python -m deepstow.benchmarks.layers_first --measure    # 45 M, streamed, 8 micro-batches of 256 tokens, in turn

Simulated is a Llama-3 8B that trains 65,536 tokens per step beside a host of 192 GiB. ``bound`` is the largest of what
compute, the link and the CPU do; a step cannot be shorter. Measured are medians over rounds in which each contender
begins anew, after a step that does not count; plain is torch's own loop with its weights on the same device.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import torch

from deepstow.benchmarks.harness.child import llama
from deepstow.benchmarks.harness.work import work
from deepstow.strategies.engine import AdamW, stow
from deepstow.strategies.planner.step_cost import plan_cost
from deepstow.strategies.planner.tasks import Resource
from deepstow.trainer.config.load import load_tree
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.machine.profiles import profile, sized
from deepstow.trainer.planning.from_config import plan_of
from deepstow.trainer.planning.plan_for import plan_for

ORDERS = ("micro_batches", "layers")
CASES = (  # profile, GiB of the device, tokens of a row, rows of a micro-batch, micro-batches
    ("rtx5090-pcie5", 28, 4096, 1, 16),
    ("rtx5090-pcie5", 28, 2048, 4, 8),
    ("h100-pcie5", 28, 4096, 1, 16),
    ("rtx4090-pcie4", 22, 4096, 1, 16),
)
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip
HOST = 192 << 30
COUNT, LENGTH, STEPS = 8, 256, 3  # of what is measured


def simulated() -> Iterator[str]:
    """The rows of the table."""
    yield "profile        device  rows      order          seconds  tokens/s  of the bound"
    for name, gib, length, rows, count in CASES:
        for order in ORDERS:
            training = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": count, "bf16": True}
            tree = {
                "model": {"config": LLAMA_8B, "tokenizer": "none"},
                "data": {"path": "rows.jsonl", "max_length": length, "packing": True},
                "training": {"output_dir": "runs/none", "max_steps": 10, **training},
                "strategies": {
                    "offload": {"gpu_memory": f"{gib}GiB", "host_memory": "192GiB", "accumulation": order},
                    "recompute": {"policy": "auto"},
                },
            }
            cost = plan_cost(plan_of(load_tree(tree), Ranks(), sized(profile(name), None, HOST)))
            assert cost is not None
            busy = [cost.outcome.busy[each] for each in Resource]
            rate = length * rows * count / cost.seconds
            shape = f"{count} x {rows} x {length}"
            bound = cost.seconds / max(busy)
            yield f"{name:<15}{gib:>2} GiB  {shape:<12}{order:<15}{cost.seconds:6.2f} s {rate:9,.0f}{bound:10.3f}"


def seconds(contender: str) -> float:
    """Of a step, after one that does not count."""
    task = work("45m", rows=1, length=LENGTH, accumulation=COUNT)
    model = llama(task).train()
    ids = torch.randint(0, task.shape.vocab, (COUNT, 1, LENGTH), generator=torch.Generator().manual_seed(1))
    losses = [partial(lambda each: model(input_ids=each, labels=each).loss / COUNT, each) for each in ids]
    optimizer: Any
    if contender == "plain":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    else:
        plan = plan_for(
            model, max_grad_norm=1.0, batch=(1, LENGTH), accumulation=COUNT, order=contender, eval_rows=0,  # type: ignore[arg-type]
            site="host", weights="streamed",
        )  # fmt: skip
        optimizer = stow(model, plan, rule=AdamW(lr=1e-4))
    began = 0.0
    for number in range(STEPS + 1):
        if number == 1:
            began = time.perf_counter()
        if contender == "plain":
            for loss_of in losses:
                loss_of().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            optimizer.backward_all(losses)
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    found = (time.perf_counter() - began) / STEPS
    if contender != "plain":
        optimizer.close()
    return found


def measured(rounds: int) -> Iterator[str]:
    """A row for each contender."""
    times: dict[str, list[float]] = {name: [] for name in ("plain", *ORDERS)}
    for _ in range(rounds):
        for name, own in times.items():
            own.append(seconds(name))
    yield f"45 M, {COUNT} x 1 x {LENGTH} tokens, fp32, {torch.get_num_threads()} threads, {rounds} rounds"
    for name, own in times.items():
        ratio = median(times["plain"]) / median(own)
        yield f"{name:<15}{median(own):6.3f} s ({min(own):.3f} to {max(own):.3f}), {ratio:.3f} of plain's speed"


def main() -> int:
    """Print the table. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="on this machine, instead of simulated steps")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    for line in measured(given.rounds) if given.measure else simulated():
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
