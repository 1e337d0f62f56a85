"""Saved tensors on the host, on machines that need not be here: our plans with and without them, simulated.

    python benchmarks/activations.py --out benchmarks/records/NAME [--profiles rtx4090-pcie4,h100-pcie5]

A 7 B Llama in bf16 with AdamW and clipping, rows of 2,048 tokens. In every column weights, gradients and state are
placed by the same planner; the columns differ in where saved tensors are kept. All times are simulated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.simulated import arguments, record
from strategies.core.compose import compose
from strategies.core.facts import Facts, Home
from strategies.core.plan import Plan
from strategies.core.protocol import Refusal
from strategies.core.registry import find
from strategies.planner.step_cost import plan_cost
from trainer.config.load import load
from trainer.machine.profiles import profile
from trainer.planning.facts import gather

ROOT = Path(__file__).resolve().parent.parent
ROWS = (1, 2, 4, 8, 16, 32)
BUDGETS: Mapping[str, tuple[int, ...]] = {"rtx4090-pcie4": (16, 21), "h100-pcie5": (20, 40, 71)}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "all kept": {"policy": "none"},
    "selective": {"policy": "selective"},
    "full": {"policy": "full"},
    "full, inputs on the host": {"policy": "full", "activation_offloading": True},
    "auto without the host": {"policy": "auto", "activation_offloading": False},
    "auto": {"policy": "auto"},
}


@dataclass(frozen=True)
class Case:
    """One machine, tokens per step and budget, with our plan for each way of keeping saved tensors; None: none fits."""

    machine: str
    tokens: int
    budget: int
    plans: Mapping[str, Plan | None]

    def seconds(self, way: str) -> float | None:
        """Simulated."""
        plan = self.plans[way]
        cost = plan_cost(plan) if plan is not None else None
        return None if cost is None else cost.seconds

    def hosted_bytes(self) -> int:
        """On the host, as ``auto`` has it."""
        plan = self.plans["auto"]
        return plan.hosted_bytes() if plan is not None else 0


def planned(known: Facts, options: Mapping[str, Any], budget: int) -> Plan | None:
    """Our plan; the host is large enough for every column, so that columns differ in nothing else."""
    strategies = {"recompute": options, "offload": {"gpu_memory": f"{budget}GiB", "host_memory": "1TiB"}}
    try:
        return compose({name: find(name).model_validate(given) for name, given in strategies.items()}, known)
    except Refusal:
        return None


def cases(machines: list[str]) -> Iterator[Case]:
    """All of them, in order."""
    for name in machines:
        for rows in ROWS:
            size = f"training.per_device_train_batch_size={rows}"
            known = gather(load(ROOT / "configs" / "recompute.yaml", [size]), 1, 1, profile(name))
            for budget in BUDGETS[name]:
                yield Case(name, rows * 2048, budget, {way: planned(known, o, budget) for way, o in WAYS.items()})


def row(case: Case) -> list[str]:
    """Cells of the table."""
    seconds = {way: case.seconds(way) for way in WAYS}
    ours = seconds["auto"]
    sends_nothing = (seconds[way] for way in WAYS if way not in ("auto", "full, inputs on the host"))
    least = min((value for value in sends_nothing if value is not None), default=None)
    gain = "" if ours is None else "only so" if least is None else f"{ours / least:.3f}"
    return [
        case.machine,
        f"{case.tokens:,}",
        f"{case.budget} GiB",
        *("-" if value is None else f"{value:.3f}" for value in seconds.values()),
        f"{case.hosted_bytes() / (1 << 30):.1f} GiB",
        gain,
    ]


def as_json(case: Case) -> dict[str, Any]:
    """For the record."""

    def of(plan: Plan | None) -> dict[str, Any] | None:
        cost = plan_cost(plan) if plan is not None else None
        if plan is None or cost is None:
            return None
        keeps = [plan.keep(unit.name) for unit in plan.facts.units]
        return {
            **cost.to_json(),
            "blocks_recomputed": sum(keep.recomputes for keep in keeps),
            "blocks_on_host": sum(bool(keep.hosted) for keep in keeps),
            "hosted_bytes": plan.hosted_bytes(),
            "device_peak_bytes": plan.peak(Home.DEVICE),
            "host_peak_bytes": plan.peak(Home.HOST),
        }

    return {
        "machine": case.machine,
        "tokens_per_step": case.tokens,
        "budget_gib": case.budget,
        "ways": {way: of(plan) for way, plan in case.plans.items()},
    }


def main() -> None:
    """Write table.md and cases.json into the folder, with progress."""
    given = arguments(__doc__ or "", "--profiles", ",".join(BUDGETS))
    head = ["machine", "tokens per step", "budget", *WAYS, "auto has on the host", "auto / best that sends nothing"]
    record(given.out, head, cases(given.profiles.split(",")), row, as_json)


if __name__ == "__main__":
    main()
