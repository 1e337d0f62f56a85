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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import peer_models
from benchmarks.peer_models import Policy, UpdateCosts
from strategies.core.compose import compose
from strategies.core.facts import Facts, Home, MachineFacts, UnitKind
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

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "offload.yaml"
GIB = 1 << 30
MODELS = {
    "6.7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "13B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
}
ROWS = (1, 2, 4, 8, 16)  # of 2,048 tokens
BUDGETS = (16, 24, 40, 70)
RATIOS = [part / 10 for part in range(11)]
Make = Callable[[Problem, UpdateCosts], Policy]


def _whole_bucket(problem: Problem, costs: UpdateCosts) -> Policy:
    placed = peer_models.placed(problem, costs, lambda _: Site.HOST)
    return peer_models.whole_bucket(placed, peer_models.JoinedUpdates)


CLIPPED: Mapping[str, Sequence[Make]] = {  # of each policy the settings among which the best one is taken
    "ZeRO-Offload": [peer_models.zero_offload],
    "on demand": [peer_models.on_demand],
    "MegaTrain": [peer_models.mega_train],
    "whole buckets": [_whole_bucket],
    "Twin-Flow": [partial(peer_models.twin_flow, ratio=ratio) for ratio in RATIOS],
    "ZenFlow, interval 1": [peer_models.zen_flow],
}
UNCLIPPED: Mapping[str, Sequence[Make]] = {  # updates begin before the norm is known
    "SuperOffload": [partial(peer_models.super_offload, ratio=ratio) for ratio in RATIOS],
    "prime-rl": [peer_models.prime_rl],
}
HEAD = (
    "model", "tokens per step", "budget", "ours, s", "compute, s", "binds", "best of six / ours",
    "ours, not clipped, s", "best of two / ours", *CLIPPED, *UNCLIPPED,
)  # fmt: skip


def as_problem(known: Facts, budget: float) -> tuple[Problem, UpdateCosts]:
    """The policies' problem: whole units, and at each tick what forward and backward need besides, with our loss by
    chunks, and two blocks' gradients."""
    rates = known.machine.rates
    assert rates is not None
    problem = problem_of(known, empty(known), rates)
    count = len(known.units)
    weights = tuple(Weight(u.name, 2 * u.num_params, (i, 2 * count - 1 - i)) for i, u in enumerate(known.units))
    block = max(unit.num_params for unit in known.units if unit.kind is UnitKind.BLOCK)
    loss = compose({"cross_entropy": find("cross_entropy")()}, known)
    besides = loss.saved_peak() + 2 * (2 * block)
    ticks = tuple(replace(tick, num_bytes=besides) for tick in problem.ticks)
    costs = UpdateCosts(
        host=1 / (2 * rates.update_bf16_params_per_s), device=TOUCHED_BYTES / 2 / rates.device_bytes_per_s
    )
    return replace(problem, ticks=ticks, weights=weights, budget=int(budget * GIB)), costs


def ours(known: Facts, strategies: Mapping[str, Any]) -> tuple[Plan, StepCost] | None:
    """Our plan with its simulated cost; None if nothing fits."""
    with suppress(Refusal):
        plan = compose(strategies, known)
        cost = plan_cost(plan)
        return None if cost is None else (plan, cost)
    return None


def best_of(makes: Sequence[Make], problem: Problem, costs: UpdateCosts) -> Policy | None:
    """The fastest of the policies that fit; None if none does."""
    fitting = []
    for make in makes:
        with suppress(DoesNotFit):
            policy = make(problem, costs)
            if policy.fits:
                fitting.append(policy)
    return min(fitting, key=lambda policy: policy.seconds, default=None)


def cases(machine: MachineFacts) -> Iterator[dict[str, Any]]:
    """The record of each case."""
    for (model, shape), rows in product(MODELS.items(), ROWS):
        changes = [f"model.config.{name}={value}" for name, value in shape.items()]
        config = load(CONFIG, [*changes, f"training.per_device_train_batch_size={rows}"])
        known = gather(config, 1, 1, machine)
        unclipped = replace(known, run=replace(known.run, max_grad_norm=0.0))
        for budget in (each for each in BUDGETS if each * GIB <= known.machine.device_bytes):
            limits = {"gpu_memory": f"{budget}GiB", "host_memory": "1TiB"}
            strategies = {**config.strategies, "offload": config.strategies["offload"].model_copy(update=limits)}
            given = as_problem(known, budget)
            others = {name: best_of(makes, *given) for name, makes in {**CLIPPED, **UNCLIPPED}.items()}
            plan, cost = ours(known, strategies) or (None, None)
            free = ours(unclipped, strategies)
            yield {
                "model": model,
                "tokens_per_step": rows * 2048,
                "budget_gib": budget,
                "ours": cost and cost.to_json(),
                "ours_unclipped": free and free[1].to_json(),
                "peak_bytes": plan and plan.peak(Home.DEVICE),
                "host_bytes": plan and plan.peak(Home.HOST),
                "policies": {name: policy and policy.to_json() for name, policy in others.items()},
            }


def row(case: Mapping[str, Any]) -> list[str]:
    """A case as a row of the table."""
    cost, free, others = case["ours"], case["ours_unclipped"], case["policies"]

    def lead(cost: Mapping[str, Any] | None, names: Mapping[str, object]) -> str:
        """How many times as long the best of the named policies takes."""
        fitting = [others[name]["seconds"] for name in names if others[name]]
        return f"{min(fitting) / cost['seconds']:.2f}" if cost and fitting else ""

    found = [case["model"], f"{case['tokens_per_step']:,}", f"{case['budget_gib']} GiB"]
    found += [f"{cost['seconds']:.2f}", f"{cost['compute_seconds']:.2f}", cost["binds"]] if cost else ["-", "", ""]
    found += [lead(cost, CLIPPED), f"{free['seconds']:.2f}" if free else "-", lead(free, UNCLIPPED)]
    return found + [f"{policy['seconds']:.2f}" if policy else "-" for policy in others.values()]


def main() -> None:
    """Write ``cases.json`` after each case and ``table.md`` after the last one, with progress."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", default="h100-pcie5")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    made, began = [], time.perf_counter()
    for case in cases(profile(given.profile)):
        made.append(case)
        print(f"{time.perf_counter() - began:6.1f} s  ", "  ".join(row(case)), flush=True)
        (given.out / "cases.json").write_text(json.dumps(made, indent=1))
    (given.out / "table.md").write_text("\n".join(table(HEAD, map(row, made), markdown=True)) + "\n")


if __name__ == "__main__":
    main()
