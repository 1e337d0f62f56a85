"""Micro-batches one by one, and layers first: simulated steps, or measured ones on this machine.

    python -m deepstow.benchmarks.layers_first              # the table of docs/strategies/offload.md
    python -m deepstow.benchmarks.layers_first --large      # that of benchmarks/records/layers-first.md, in minutes
    python -m deepstow.benchmarks.layers_first --measure    # 45 M, streamed, 8 micro-batches of 256 tokens, in turn

Simulated is a Llama-3 8B that trains 65,536 tokens per step beside a host of 192 GiB. ``bound`` is the largest of what
compute, the link and the CPU do; a step cannot be shorter. Measured are medians over rounds in which each contender
begins anew, after a step that does not count; plain is torch's own loop with its weights on the same device.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import torch

from deepstow.benchmarks.harness.child import llama
from deepstow.benchmarks.harness.work import work
from deepstow.strategies.core.on_disk import disk_bytes
from deepstow.strategies.core.plan import Tier
from deepstow.strategies.core.sizes import human
from deepstow.strategies.engine import AdamW, stow
from deepstow.strategies.planner.step_cost import plan_cost
from deepstow.strategies.planner.tasks import Resource
from deepstow.trainer.config.load import load_tree
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import TooLargeError
from deepstow.trainer.machine.probe import Machine
from deepstow.trainer.machine.profiles import profile, sized
from deepstow.trainer.planning.from_config import plan_of
from deepstow.trainer.planning.plan_for import plan_for

ORDERS = ("micro_batches", "layers")


class Case(NamedTuple):
    """A machine, GiB of its device and of its host, tokens of a row, rows of a micro-batch, and micro-batches."""

    profile: str
    device: int
    host: int = 192
    length: int = 4096
    rows: int = 1
    micro_batches: int = 16
    clips: bool = True  # else gradients pass, and trained weights may rest on the disk


SMALL = [
    Case("rtx5090-pcie5", 28),
    Case("rtx5090-pcie5", 28, length=2048, rows=4, micro_batches=8),
    Case("h100-pcie5", 28),
    Case("rtx4090-pcie4", 22),
]
LARGE = [
    Case("rtx5090-pcie5", 24, 224),
    Case("h100-pcie5", 24, 224),
    Case("rtx4090-pcie4", 22, 224),
    Case("rtx5090-pcie5", 24, 288),
    Case("rtx5090-pcie5", 24, 192),
    Case("rtx5090-pcie5", 24, 128, clips=False),
]
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64
}  # fmt: skip
# Of what is measured: micro-batches, tokens of a row, steps.
COUNT = 8
LENGTH = 256
STEPS = 3


def simulated(*, large: bool) -> Iterator[str]:
    """The rows of the table."""
    line = "{:<15}{:<8}{:<9}{:<13}{:<15}{}".format
    figures = "{:>9} {:>9}  {:<18}{:>9}  {}".format
    names = figures("seconds", "tokens/s", "of the bound", "host peak", "disk")
    yield line("profile", "device", "host", "rows", "order", names)
    for case, order in product(LARGE if large else SMALL, ORDERS):
        shape = f"{case.micro_batches} x {case.rows} x {case.length}"
        row = partial(line, case.profile, f"{case.device} GiB", f"{case.host} GiB", shape, order)
        try:
            plan = plan_of(load_tree(_tree(case, order, large=large)), Ranks(), _machine(case))
        except TooLargeError as refused:
            yield row(f"refused: {refused}")
            continue
        cost = plan_cost(plan)
        assert cost is not None and plan.layout is not None
        busiest = max(Resource, key=lambda each: cost.outcome.busy[each])
        bound = f"{cost.seconds / cost.outcome.busy[busiest]:.3f} of {busiest.value}"
        rate = case.length * case.rows * case.micro_batches / cost.seconds
        host, disk = human(plan.peak(Tier.HOST)), human(disk_bytes(plan.layout))
        yield row(figures(f"{cost.seconds:.2f} s", f"{rate:,.0f}", bound, host, disk))


def _machine(case: Case) -> Machine:
    return sized(profile(case.profile), None, case.host << 30)


def _tree(case: Case, order: str, *, large: bool) -> dict[str, Any]:
    rows = {"per_device_train_batch_size": case.rows, "gradient_accumulation_steps": case.micro_batches}
    offload = {"gpu_memory": f"{case.device}GiB", "host_memory": f"{case.host}GiB", "accumulation": order}
    passing = {} if case.clips else {"gradients": "passing"}
    disk = {"disk": tempfile.gettempdir(), "disk_memory": "1TiB"} if large else {}
    return {
        "model": {"config": LLAMA_70B if large else LLAMA_8B, "tokenizer": "none"},
        "data": {"path": "rows.jsonl", "max_length": case.length, "packing": True},
        "training": {
            "output_dir": "runs/none",
            "max_steps": 10,
            "bf16": True,
            "max_grad_norm": float(case.clips),
            **rows,
        },
        "strategies": {"offload": {**offload, **disk, **passing}, "recompute": {"policy": "auto"}},
    }


def seconds(contender: str) -> float:
    """Of a step, after one that does not count."""
    task = work("45m", rows=1, length=LENGTH, accumulation=COUNT)
    model = llama(task).train()
    ids = torch.randint(0, task.shape.vocab, (COUNT, 1, LENGTH), generator=torch.Generator().manual_seed(1))
    losses = [partial(lambda each: model(input_ids=each, labels=each).loss / COUNT, row) for row in ids]
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
    step_s = (time.perf_counter() - began) / STEPS
    if contender != "plain":
        optimizer.close()
    return step_s


def measured(rounds: int) -> Iterator[str]:
    """A row for each contender."""
    times: dict[str, list[float]] = {name: [] for name in ("plain", *ORDERS)}
    for _ in range(rounds):
        for name, walls in times.items():
            walls.append(seconds(name))
    yield f"45 M, {COUNT} x 1 x {LENGTH} tokens, fp32, {torch.get_num_threads()} threads, {rounds} rounds"
    for name, walls in times.items():
        ratio = median(times["plain"]) / median(walls)
        yield f"{name:<15}{median(walls):6.3f} s ({min(walls):.3f} to {max(walls):.3f}), {ratio:.3f} of plain's speed"


def main() -> int:
    """Print the table. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="on this machine, instead of simulated steps")
    parser.add_argument("--large", action="store_true", help="70B with a disk, which takes minutes")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    for line in measured(given.rounds) if given.measure else simulated(large=given.large):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
