"""Saved tensors on the host, on machines that need not be here: our plans with and without them, simulated.

    python benchmarks/activations.py --out benchmarks/records/NAME [--profiles rtx4090-pcie4,h100-pcie5]

A 7 B Llama in bf16 with AdamW and clipping, rows of 2,048 tokens. In every column weights, gradients and state are
placed by the same planner; the columns differ in where saved tensors are kept. All times are simulated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.simulated import Entry, arguments, ours, record
from strategies.core.facts import Home
from strategies.core.plan import Plan
from strategies.core.registry import find
from strategies.planner.step_cost import StepCost
from trainer.config.load import load
from trainer.machine.profiles import profile
from trainer.planning.facts import gather

ROOT = Path(__file__).resolve().parent.parent
# Rows and GiB of the device, by machine.
CASES: Mapping[str, tuple[tuple[int, int], ...]] = {
    "rtx4090-pcie4": ((2, 21), (4, 21), (16, 16), (32, 21)),
    "h100-pcie5": ((2, 40), (4, 71), (16, 71)),
}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "all kept": {"policy": "none"},
    "selective": {"policy": "selective"},
    "full": {"policy": "full"},
    "full, inputs on the host": {"policy": "full", "activation_offloading": True},
    "auto without the host": {"policy": "auto", "activation_offloading": False},
    "auto": {"policy": "auto"},
}


def cases(machines: list[str]) -> Iterator[Entry]:
    """All of them, in order. The host is large enough for every column, so that columns differ in nothing else."""
    for name in machines:
        for rows, budget in CASES[name]:
            size = f"training.per_device_train_batch_size={rows}"
            known = gather(load(ROOT / "configs" / "recompute.yaml", [size]), 1, 1, profile(name))
            offload = find("offload").model_validate({"gpu_memory": f"{budget}GiB", "host_memory": "1TiB"})
            recompute = find("recompute").model_validate
            plans = {way: ours(known, {"recompute": recompute(o), "offload": offload}) for way, o in WAYS.items()}
            yield entry(name, rows * 2048, budget, plans)


def entry(machine: str, tokens: int, budget: int, plans: Mapping[str, tuple[Plan, StepCost] | None]) -> Entry:
    """A case, with our plan for each way of keeping saved tensors; None: none fits."""
    seconds = {way: found[1].seconds for way, found in plans.items() if found}
    sends_nothing = [seconds[way] for way in seconds if way not in ("auto", "full, inputs on the host")]
    auto = plans["auto"]
    gain = "" if auto is None else f"{seconds['auto'] / min(sends_nothing):.3f}" if sends_nothing else "only so"
    cells = [f"{seconds[way]:.3f}" if way in seconds else "-" for way in WAYS]
    hosted = f"{(auto[0].hosted_bytes() if auto else 0) / (1 << 30):.1f} GiB"
    return [machine, f"{tokens:,}", f"{budget} GiB", *cells, hosted, gain], {
        "machine": machine,
        "tokens_per_step": tokens,
        "budget_gib": budget,
        "ways": {way: as_json(*found) if found else None for way, found in plans.items()},
    }


def as_json(plan: Plan, cost: StepCost) -> dict[str, Any]:
    """For the record."""
    keeps = [plan.keep(unit.name) for unit in plan.facts.units]
    return {
        **cost.to_json(),
        "blocks_recomputed": sum(keep.recomputes for keep in keeps),
        "blocks_on_host": sum(bool(keep.hosted) for keep in keeps),
        "hosted_bytes": plan.hosted_bytes(),
        "device_peak_bytes": plan.peak(Home.DEVICE),
        "host_peak_bytes": plan.peak(Home.HOST),
    }


def main() -> None:
    """Write table.md and cases.json into the folder, with progress."""
    given = arguments(__doc__ or "", "--profiles", ",".join(CASES))
    head = ["machine", "tokens per step", "budget", *WAYS, "auto has on the host", "auto / best that sends nothing"]
    record(given.out, head, cases(given.profiles.split(",")))


if __name__ == "__main__":
    main()
