"""Simulated, not measured: our plans over the cards of one machine, against models of DeepSpeed's ZeRO with offload.

    python benchmarks/simulated_ranks.py --profile rtx4090-pcie4 --out benchmarks/records/DATE_simulated-ranks

Llama shapes of 13, 34 and 70 B on 8 cards of 24 GB in a machine with 1 TiB; bf16, blocks recomputed, gradients clipped;
2,048 tokens per row. The host is a server's, with the memory and cores of the profile ``h100-pcie5``. Exchanges cross
it, since such cards have no peer access. As in ``simulated.py``, a policy's model is an upper bound for the policy: all
copies and exchanges at the speed of their roads, no software overhead.

    ZeRO-2 offload   weights on every card; each rank's part of the gradients goes down, the CPU updates it after
                     backward, and the new weights go up and to the others before the next forward
    ZeRO-3 offload   the same with weights on the host, in parts, gathered one layer ahead of their use
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import peer_models
from benchmarks.simulated import GIB, ROOT, Entry, arguments, as_problem, best_of, ours, record, update_costs
from strategies.core.facts import Facts, Home
from strategies.core.registry import find
from strategies.core.sizes import SHARE, human
from strategies.planner.problem import Problem
from trainer.config.load import load
from trainer.machine.profiles import profile
from trainer.planning.facts import gather

CARDS, HOST_BYTES = 8, 1 << 40
MODELS = {
    "13B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
    "34B": {"hidden_size": 7168, "intermediate_size": 20480, "num_hidden_layers": 60, "num_attention_heads": 56},
    "70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}
ROWS = (1, 2, 4)  # of 2,048 tokens, for each card
POLICIES = ("ZeRO-2 offload", "ZeRO-3 offload")
HEAD = ("model", "tokens per step", "stage 1", "stage 2", "stage 3", "binds", "host per card", *POLICIES, "best / ours")


def one_layer_ahead(problem: Problem, costs: peer_models.UpdateCosts) -> peer_models.Policy:
    """ZeRO-3 offload: MegaTrain's order of copies, with the bytes that DeepSpeed keeps per parameter."""
    return replace(peer_models.mega_train(problem, costs), host_bytes=16, gives_up="")


def policies(known: Facts) -> dict[str, peer_models.Policy | None]:
    """Each policy's model; None if it does not fit."""
    rates = known.machine.rates
    assert rates is not None
    budget = SHARE * known.machine.device_bytes / GIB
    problem, costs = as_problem(known, budget, ways=known.run.world_size), update_costs(rates)
    found = (
        best_of([partial(peer_models.zero_offload, problem, costs)]),
        best_of([partial(one_layer_ahead, problem, costs)]),
    )
    return dict(zip(POLICIES, found, strict=True))


def cases(machine: Any) -> Iterator[Entry]:
    """All of them, in order."""
    server = asdict(profile("h100-pcie5").rates)
    of_host = ("dram_bytes_per_s", "update_fp32_params_per_s", "update_bf16_params_per_s")
    rates = replace(machine.rates, **{name: server[name] for name in of_host})
    machine = replace(machine, host_total_bytes=HOST_BYTES, host_available_bytes=HOST_BYTES, rates=rates)
    for model, shape in MODELS.items():
        changes = [f"model.config.{name}={value}" for name, value in shape.items()]
        for rows in ROWS:
            size = f"training.per_device_train_batch_size={rows}"
            options = ["strategies.offload.gpu_memory=auto", "strategies.zero.stage=3"]
            config = load(ROOT / "configs" / "offload.yaml", [*changes, size, *options])
            known = gather(config, CARDS, CARDS, machine)
            stages = {
                stage: ours(known, {**config.strategies, "zero": find("zero").model_validate({"stage": stage})})
                for stage in (1, 2, 3)
            }
            yield entry(model, rows * 2048 * CARDS, stages, policies(known))


def entry(model: str, tokens: int, stages: dict[int, Any], others: dict[str, peer_models.Policy | None]) -> Entry:
    """A case, with our plan of each stage that fits and the policies' seconds."""
    seconds = [f"{found[1].seconds:.2f}" if found else "-" for found in stages.values()]
    theirs = [f"{policy.seconds:.2f}" if policy else "-" for policy in others.values()]
    fitting = [found for found in stages.values() if found]
    best = min(fitting, key=lambda found: found[1].seconds, default=None)
    cells, peers = ["", "", ""], [policy.seconds for policy in others.values() if policy]
    if best is not None:
        lead = f"{min(peers) / best[1].seconds:.2f}" if peers else ""
        cells = [best[1].outcome.binds.value, human(best[0].peak(Home.HOST)), lead]
    return [model, f"{tokens:,}", *seconds, *cells[:2], *theirs, cells[2]], {
        "model": model,
        "tokens_per_step": tokens,
        "ours": {
            str(stage): found
            and {
                **found[1].to_json(),
                "peak_bytes": found[0].peak(Home.DEVICE),
                "host_bytes": found[0].peak(Home.HOST),
            }
            for stage, found in stages.items()
        },
        "policies": {name: policy and policy.to_json() for name, policy in others.items()},
    }


def main() -> None:
    """Write table.md and cases.json into the folder, with progress."""
    given = arguments(__doc__ or "", "--profile", "rtx4090-pcie4")
    record(given.out, HEAD, cases(profile(given.profile)))


if __name__ == "__main__":
    main()
