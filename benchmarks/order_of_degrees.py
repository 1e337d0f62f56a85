"""Does the search order degrees as they are measured? Two or four ranks, on machines made of network namespaces.

    sudo python -m benchmarks.order_of_degrees --ranks 4 --megabits 200 --rounds 3 --out FOLDER

Each rank has a namespace, an interface of its own, and a launcher (``torchrun --nnodes``). The kernel limits what
each interface sends (``tc tbf``) to the given rate, so collectives and pipelines meet a real slow network.
Four candidates train the same model on the same global batch; the seconds of a step are the median of the last ones.

The prediction is the search's price (``strategies/planner/hybrid``) for these degrees, with the same rate.
Its rate of matrix products is calibrated on as many single ranks that train side by side without a network, since they
share the cores. Needs root, ``ip`` and ``tc``. Namespaces are removed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from strategies.core.facts import Rates
from strategies.planner.hybrid.cluster import Cluster, Wire
from strategies.planner.hybrid.degrees import Degrees
from strategies.planner.hybrid.parts import Models
from strategies.planner.hybrid.step_seconds import Pricing
from trainer.config.load import load
from trainer.dist.ranks import Ranks
from trainer.machine.probe import probe
from trainer.planning.tensor_parts import Shares

REPO = Path(__file__).resolve().parents[1]
STEPS, SKIPPED, SEQUENCES, MICRO = 8, 3, 32, 2
CONFIG = """
model:
  config: {{model_type: llama, hidden_size: 256, intermediate_size: 688, num_hidden_layers: 8, num_attention_heads: 4,
    num_key_value_heads: 4, max_position_embeddings: 512, tie_word_embeddings: false}}
  tokenizer: {{train: bpe, vocab_size: 2048}}
data: {{path: pydoc, max_length: 128, packing: true}}
training: {{output_dir: {folder}, max_steps: {steps}, per_device_train_batch_size: {micro}, logging_steps: 1,
  gradient_accumulation_steps: {accumulation}, save_strategy: 'no', report_to: none, use_cpu: true}}
strategies: {strategies}
"""
Candidates = Mapping[str, tuple[Degrees, str]]  # with the strategies to write
OF_FOUR: Candidates = {
    "data 4": (Degrees(data=4, micro_batch=MICRO, micro_batches=4), "{}"),
    "pipeline 2 x data 2": (
        Degrees(stages=2, data=2, micro_batch=MICRO, micro_batches=8, last_blocks=4),
        "{pipeline: {stages: 2, blocks: [4, 4]}}",
    ),
    "pipeline 4": (
        Degrees(stages=4, micro_batch=MICRO, micro_batches=16, last_blocks=2),
        "{pipeline: {stages: 4, blocks: [2, 2, 2, 2]}}",
    ),
    "tensor 2 x data 2": (
        Degrees(tensor=2, data=2, micro_batch=MICRO, micro_batches=8),
        "{tensor: {degree: 2}, zero: {stage: 0}}",
    ),
}
OF_TWO: Candidates = {
    "data 2": (Degrees(data=2, micro_batch=MICRO, micro_batches=8), "{}"),
    "ZeRO 2 x data 2": (Degrees(data=2, zero=2, micro_batch=MICRO, micro_batches=8), "{zero: {stage: 2}}"),
    "pipeline 2": (
        Degrees(stages=2, micro_batch=MICRO, micro_batches=16, last_blocks=4),
        "{pipeline: {stages: 2, blocks: [4, 4]}}",
    ),
    "tensor 2": (
        Degrees(tensor=2, micro_batch=MICRO, micro_batches=16),
        "{tensor: {degree: 2}, zero: {stage: 0}}",
    ),
}


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def machines(count: int, megabits: float) -> Iterator[list[str]]:
    """Names of the namespaces; each has the address 10.77.0.(number + 1), and a limited interface."""
    names = [f"stow{number}" for number in range(count)]
    try:
        run("ip", "link", "add", "stowbr", "type", "bridge")
        run("ip", "link", "set", "stowbr", "up")
        for number, name in enumerate(names):
            run("ip", "netns", "add", name)
            run("ip", "link", "add", f"out{number}", "type", "veth", "peer", "name", "stow", "netns", name)
            run("ip", "link", "set", f"out{number}", "master", "stowbr", "up")
            inside = ("ip", "netns", "exec", name)
            run(*inside, "ip", "addr", "add", f"10.77.0.{number + 1}/24", "dev", "stow")
            for link in ("lo", "stow"):
                run(*inside, "ip", "link", "set", link, "up")
            limits = ("rate", f"{megabits}mbit", "burst", "256kb", "latency", "500ms")
            run(*inside, "tc", "qdisc", "add", "dev", "stow", "root", "tbf", *limits)
        yield names
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "del", name), capture_output=True, check=False)
        subprocess.run(("ip", "link", "del", "stowbr"), capture_output=True, check=False)


def train(names: list[str], out: Path, strategies: str, accumulation: int, *, together: bool = True) -> float:
    """Seconds of a step, the median of the last ones. ``together``: one job of all ranks, else one of each."""
    started = []
    for number, name in enumerate(names):
        folder = out if together else out / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "config.yaml"
        config.write_text(
            CONFIG.format(
                folder=folder / "run", steps=STEPS, micro=MICRO, accumulation=accumulation, strategies=strategies
            )
        )
        where = ["--nnodes", str(len(names)), "--node_rank", str(number), "--master_addr", "10.77.0.1"]
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "1", "--master_port", "29517"]
        command = [sys.executable, *launcher, *(where if together else []), "launch/train.py", "--config", str(config)]
        names_of_links = {"GLOO_SOCKET_IFNAME": "stow" if together else "lo", "OMP_NUM_THREADS": "1"}
        log = (folder / f"log-{number}.txt").open("w")
        started.append(
            subprocess.Popen(
                ["ip", "netns", "exec", name, *command],
                cwd=REPO, env=os.environ | names_of_links | {"PYTHONPATH": str(REPO)}, stdout=log, stderr=log,
            )
        )  # fmt: skip
    codes = [process.wait() for process in started]
    assert not any(codes), f"{out}: exit codes {codes}; see log-0.txt"
    return max(seconds(folder / "run") for folder in ([out] if together else [out / str(n) for n in range(len(names))]))


def seconds(run_folder: Path) -> float:
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    found = [line["tokens"] / line["tokens_per_s"] for line in lines if "tokens_per_s" in line]
    return statistics.median(found[SKIPPED:])


def predicted(out: Path, candidates: Candidates, alone: float, megabits: float) -> dict[str, float]:
    """Seconds by candidate, with compute as fast as single ranks were, side by side."""
    count = next(iter(candidates.values()))[0].ranks
    path = out / "model.yaml"
    path.write_text(CONFIG.format(folder=out / "x", steps=1, micro=MICRO, accumulation=4, strategies="{}"))
    ranks = Ranks(world_size=count, local_world_size=count)  # so that tensor ranks are counted, too
    shares = Shares(load(str(path), []), ranks, probe(), lambda line: None)
    known, staged = shares.by_tensor(SEQUENCES)[0], shares.in_stages([MICRO])
    whole = known[MICRO, 1]
    flops = 3 * whole.run.forward_flops * 4  # four micro-batches, forward and backward
    rates = Rates(
        gemm_fp32_flops_per_s=flops / alone, gemm_bf16_flops_per_s=None, up_bytes_per_s=1e10, down_bytes_per_s=1e10,
        duplex_factor=1.0, link_latency_s=0.0, dram_bytes_per_s=1e10, update_fp32_params_per_s=1e9,
        update_bf16_params_per_s=1e9, device_bytes_per_s=1e10, origin="measured",
    )  # fmt: skip
    wire = Wire(megabits * 1e6 / 8)
    pricing = Pricing(Models(known, staged), Cluster(count, 1, wire, wire), rates)
    return {name: pricing.price(degrees).seconds for name, (degrees, _) in candidates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=4)
    parser.add_argument("--megabits", type=float, default=200.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    candidates = OF_FOUR if given.ranks == 4 else OF_TWO
    measured: dict[str, list[float]] = {name: [] for name in candidates}
    with machines(given.ranks, given.megabits) as names:
        alone = train(names, given.out / "alone", "{}", 4, together=False)
        expected = predicted(given.out, candidates, alone, given.megabits)
        for turn in range(given.rounds):
            for name, (degrees, strategies) in candidates.items():
                folder = given.out / f"{turn}-{name.replace(' ', '-')}"
                measured[name].append(train(names, folder, strategies, degrees.micro_batches))
                show({"candidate": name, "round": turn, "seconds": round(measured[name][-1], 3)}, given.out)
    order = sorted(candidates, key=lambda name: statistics.median(measured[name]))
    show({"alone": round(alone, 3), "megabits": given.megabits}, given.out)
    for name in order:
        rounds = [round(each, 3) for each in measured[name]]
        show({"candidate": name, "measured": rounds, "predicted": round(expected[name], 3)}, given.out)
    agrees = order == sorted(candidates, key=lambda name: expected[name])
    show({"order": order, "predicted order is the measured one": agrees}, given.out)


def show(line: Mapping[str, Any], out: Path) -> None:
    print(json.dumps(line), flush=True)
    with (out / "results.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
