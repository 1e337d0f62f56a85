"""Simulated, not measured: our plans on a named machine against models of other systems' policies, by one simulator.

    python benchmarks/simulated.py --profile h100-pcie5 --out benchmarks/records/DATE_simulated_h100-pcie5

Two Llama shapes, several token counts per step, several memory budgets; bf16, blocks recomputed, gradients clipped. A
policy's model has every copy at the speed of the link and no software overhead (``benchmarks/peer_models.py``): it
is an upper bound for the policy, not a measurement of its implementation. "-" does not fit.

Policies that wait for the norm are compared with our plan for a clipped step; those that update before it is known,
with our plan for a step that does not clip.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import peer_models
from strategies.core.compose import compose
from strategies.core.facts import Facts, Home, Rates, UnitKind
from strategies.core.layout import Site
from strategies.core.plan import Plan
from strategies.core.protocol import Refusal
from strategies.core.registry import find
from strategies.planner.greedy import DoesNotFit
from strategies.planner.problem import Problem, Weight
from strategies.planner.step_cost import TOUCHED_BYTES, StepCost, empty, plan_cost, problem_of
from strategies.report.table import table
from trainer.config.load import load
from trainer.machine.profiles import profile
from trainer.planning.facts import gather

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30
MODELS = {
    "6.7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "13B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
}
ROWS = (1, 2, 4, 8, 16)  # of 2,048 tokens
BUDGETS = (16, 24, 40, 70)
CLIPPED = ("ZeRO-Offload", "on demand", "MegaTrain", "whole buckets", "Twin-Flow", "ZenFlow, interval 1")
UNCLIPPED = ("SuperOffload", "prime-rl")  # updates begin before the norm is known
POLICIES = (*CLIPPED, *UNCLIPPED)
Entry = tuple[list[str], dict[str, Any]]  # one case: its row of the table, and its part of the record


def ours(known: Facts, strategies: Mapping[str, Any]) -> tuple[Plan, StepCost] | None:
    """Our plan with its simulated cost; None if nothing fits."""
    try:
        plan = compose(strategies, known)
    except Refusal:
        return None
    cost = plan_cost(plan)
    return None if cost is None else (plan, cost)


def as_problem(known: Facts, budget: float, ways: int = 1) -> Problem:
    """The policies' problem: whole units, and at each tick what forward and backward need besides, with our loss by
    chunks, and two blocks' gradients."""
    rates = known.machine.rates
    assert rates is not None
    problem = problem_of(known, empty(known), rates)
    count = len(known.units)
    weights = tuple(
        Weight(u.name, 2 * u.num_params, (i, 2 * count - 1 - i), ways=ways) for i, u in enumerate(known.units)
    )
    block = max(unit.num_params for unit in known.units if unit.kind is UnitKind.BLOCK)
    loss = compose({"cross_entropy": find("cross_entropy")()}, known)
    besides = loss.saved_peak() + 2 * (2 * block)
    ticks = tuple(replace(tick, num_bytes=besides) for tick in problem.ticks)
    return replace(problem, ticks=ticks, weights=weights, budget=int(budget * GIB))


def policies(known: Facts, budget: int) -> dict[str, peer_models.Policy | None]:
    """Each policy's model at its best; None if it does not fit."""
    rates = known.machine.rates
    assert rates is not None
    problem, costs = as_problem(known, budget), update_costs(rates)
    on_host = peer_models.placed(problem, costs, lambda _: Site.HOST)
    ratios = [part / 10 for part in range(11)]
    found = (
        best_of([partial(peer_models.zero_offload, problem, costs)]),
        best_of([partial(peer_models.on_demand, problem, costs)]),
        best_of([partial(peer_models.mega_train, problem, costs)]),
        best_of([partial(peer_models.whole_bucket, on_host, peer_models.JoinedUpdates)]),
        best_of([partial(peer_models.twin_flow, problem, costs, ratio) for ratio in ratios]),
        best_of([partial(peer_models.zen_flow, problem, costs)]),
        best_of([partial(peer_models.super_offload, problem, costs, ratio) for ratio in ratios]),
        best_of([partial(peer_models.prime_rl, problem, costs)]),
    )
    return dict(zip(POLICIES, found, strict=True))


def update_costs(rates: Rates) -> peer_models.UpdateCosts:
    """Of two bytes per parameter."""
    return peer_models.UpdateCosts(
        host=1 / (2 * rates.update_bf16_params_per_s), device=TOUCHED_BYTES / 2 / rates.device_bytes_per_s
    )


def best_of(makes: Iterable[Callable[[], peer_models.Policy]]) -> peer_models.Policy | None:
    """The fastest of the policies that fit; None if none does."""
    fitting = []
    for make in makes:
        with suppress(DoesNotFit):
            policy = make()
            if policy.fits:
                fitting.append(policy)
    return min(fitting, key=lambda policy: policy.seconds, default=None)


def cases(machine: Any) -> Iterator[Entry]:
    """All of them, in order."""
    for model, shape in MODELS.items():
        changes = [f"model.config.{name}={value}" for name, value in shape.items()]
        for rows in ROWS:
            size = f"training.per_device_train_batch_size={rows}"
            config = load(ROOT / "configs" / "offload.yaml", [*changes, size])
            known = gather(config, 1, 1, machine)
            for budget in (each for each in BUDGETS if each * GIB <= known.machine.device_bytes):
                limits = {"gpu_memory": f"{budget}GiB", "host_memory": "1TiB"}
                offload = config.strategies["offload"].model_copy(update=limits)
                strategies = {**config.strategies, "offload": offload}
                unclipped = replace(known, run=replace(known.run, max_grad_norm=0.0))
                others = policies(known, budget)
                yield entry(model, rows * 2048, budget, ours(known, strategies), ours(unclipped, strategies), others)


Found = tuple[Plan, StepCost] | None


def entry(
    model: str,
    tokens: int,
    budget: int,
    found: Found,
    unclipped: Found,
    others: Mapping[str, peer_models.Policy | None],
) -> Entry:
    """A case, with our plans if there are any and seconds by policy."""
    plan, cost = found or (None, None)
    free = unclipped[1] if unclipped else None
    cells = ["-", "", ""]
    if cost is not None:
        cells = [f"{cost.seconds:.2f}", f"{cost.compute_seconds:.2f}", cost.outcome.binds.value]
    cells += [_lead(cost, CLIPPED, others), f"{free.seconds:.2f}" if free else "-", _lead(free, UNCLIPPED, others)]
    theirs = [f"{policy.seconds:.2f}" if policy else "-" for policy in others.values()]
    return [model, f"{tokens:,}", f"{budget} GiB", *cells, *theirs], {
        "model": model,
        "tokens_per_step": tokens,
        "budget_gib": budget,
        "ours": cost.to_json() if cost else None,
        "ours_unclipped": free.to_json() if free else None,
        "peak_bytes": plan.peak(Home.DEVICE) if plan else None,
        "host_bytes": plan.peak(Home.HOST) if plan else None,
        "policies": {name: policy and policy.to_json() for name, policy in others.items()},
    }


def _lead(cost: StepCost | None, names: Sequence[str], others: Mapping[str, peer_models.Policy | None]) -> str:
    """How many times as long the best of the named policies takes."""
    fitting = [policy.seconds for name in names if (policy := others[name]) is not None]
    return f"{min(fitting) / cost.seconds:.2f}" if cost and fitting else ""


def record(out: Path, head: Sequence[str], cases: Iterable[Entry]) -> None:
    """Write ``cases.json`` after each case and ``table.md`` after the last one, with progress."""
    out.mkdir(parents=True, exist_ok=True)
    rows, made = [], []
    began = time.perf_counter()
    for row, case in cases:
        rows.append(row)
        made.append(case)
        print(f"{time.perf_counter() - began:6.1f} s  ", "  ".join(row), flush=True)
        (out / "cases.json").write_text(json.dumps(made, indent=1))
    (out / "table.md").write_text("\n".join(table(head, rows, markdown=True)) + "\n")


def arguments(doc: str, option: str, default: str) -> argparse.Namespace:
    """``--out`` and one option."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument(option, default=default)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    """Write table.md and cases.json into the folder, with progress."""
    given = arguments(__doc__ or "", "--profile", "h100-pcie5")
    columns = ["ours, s", "compute, s", "binds", "best of six / ours", "ours, not clipped, s", "best of two / ours"]
    head = ["model", "tokens per step", "budget", *columns, *POLICIES]
    record(given.out, head, cases(profile(given.profile)))


if __name__ == "__main__":
    main()
