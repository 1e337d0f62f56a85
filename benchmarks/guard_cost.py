"""What it costs that backward cannot read a weight that is away (``strategies/engine/tensors/guard.py`` and
``bucket_state.py``).

    python benchmarks/guard_cost.py --out benchmarks/records/DATE_guard_HARDWARE

A Llama of the depth of a 1.3 B model and hardly any width, all of whose weights travel, so that a step is nothing but
Python and torch's dispatch. Forward and backward are timed in turn with guards around all blocks, with torch's counts
of writes and views that are followed (``parameters.py``), with the counts alone, and with nothing of it; the difference
of the first two, divided by the number of saved tensors, is the cost of one in a guard. Beside it
stands the simulated step of the 1.3 B model on named machines, under budgets where weights travel. All of this is the
host's time, which works ahead of a GPU; the shares are what they would be if none of it were hidden.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks.harness.child import surroundings
from strategies.core.compose import compose
from strategies.core.facts import UnitKind
from strategies.core.protocol import Refusal
from strategies.engine import StowOptimizer, stow
from strategies.engine.bucket_state import BucketState
from strategies.engine.module_hooks import ModuleHooks
from strategies.engine.tensors.parameters import PresentParameter
from strategies.planner.step_cost import plan_cost
from trainer.config.load import load
from trainer.machine.probe import probe
from trainer.machine.profiles import profile
from trainer.planning.facts import gather
from trainer.planning.plan_for import plan_for

ROOT = Path(__file__).resolve().parent.parent
LAYERS, ROUNDS, REPEATS = 24, 15, 15
MODES = ("nothing", "counts", "views", "guards")
SHAPE = {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": LAYERS, "num_attention_heads": 16}
MACHINES = {"rtx4090-pcie4": ("4GiB", "8GiB", "12GiB", "16GiB"), "h100-pcie5": ("4GiB", "8GiB", "12GiB", "16GiB")}


def model(checkpointing: bool) -> Any:
    """The depth of a 1.3 B Llama; all else as small as it may be."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=2, vocab_size=16
    )
    net = LlamaForCausalLM(config).train()
    if checkpointing:
        net.gradient_checkpointing_enable({"use_reentrant": False})
    return net


def one_step(net: Any, ids: Tensor, optimizer: StowOptimizer) -> float:
    """Seconds of forward and backward."""
    began = time.perf_counter()
    net(input_ids=ids, labels=ids).loss.backward()
    seconds = time.perf_counter() - began
    optimizer.zero_grad()
    return seconds


def saved(net: Any, ids: Tensor) -> int:
    """Tensors that autograd saves while blocks run in forward, one micro-batch."""
    count = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = net.model.embed_tokens(ids)
        rotary = net.model.rotary_emb(hidden, torch.arange(ids.shape[1])[None])
        before = count
        for block in net.model.layers:
            hidden = block(hidden, position_embeddings=rotary)
    return count - before


@contextmanager
def nets(scopes: Sequence[Any], mode: str) -> Iterator[None]:
    """The engine with what ``mode`` says, and what stands before it in ``MODES``."""
    count, guarded, kind = BucketState._count, ModuleHooks._guarded, BucketState.kind
    for scope in scopes:
        scope.guarded = True
    if mode != "guards":
        ModuleHooks._guarded = lambda self, scope: None  # type: ignore[method-assign]
    if mode in ("nothing", "counts"):
        BucketState.kind = PresentParameter  # type: ignore[assignment, misc]
    if mode == "nothing":
        BucketState._count = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        BucketState._count, ModuleHooks._guarded, BucketState.kind = count, guarded, kind  # type: ignore[method-assign, misc]


def measure(checkpointing: bool) -> dict[str, Any]:
    """Seconds of forward and backward by mode, the minimum of repeats; rounds in turn."""
    torch.set_num_threads(1)
    net, ids = model(checkpointing), torch.zeros(1, 4, dtype=torch.long)
    count = saved(model(False), ids)
    plan = plan_for(net, max_grad_norm=1.0, machine=probe(), site="host", weights="streamed")
    optimizer = stow(net, plan, device="cpu")
    scopes = optimizer.engine.borders._scopes
    rounds: list[dict[str, float]] = []
    one_step(net, ids, optimizer)
    for _ in range(ROUNDS):
        row = {}
        for mode in MODES:
            with nets(scopes, mode):
                row[mode] = min(one_step(net, ids, optimizer) for _ in range(REPEATS))
        rounds.append(row)
    guards = [row["guards"] - row["views"] for row in rounds]
    views = [row["views"] - row["counts"] for row in rounds]
    counts = [row["counts"] - row["nothing"] for row in rounds]
    return {
        "checkpointing": checkpointing,
        "saved_tensors": count,
        "rounds": rounds,
        "ns_per_tensor": [1e9 * each / count for each in guards],
        "nothing_s": statistics.median(row["nothing"] for row in rounds),
        "guards_s": statistics.median(guards),
        "views_s": statistics.median(views),
        "counts_s": statistics.median(counts),
    }


def simulated(found: Mapping[bool, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Steps of the 1.3 B model where weights travel, and what the nets would add if nothing of it were hidden."""
    rows = []
    shape = [f"model.config.{name}={value}" for name, value in SHAPE.items()]
    for machine, budgets in MACHINES.items():
        for checkpointing, cost in found.items():
            more = [*shape, f"training.gradient_checkpointing={str(checkpointing).lower()}"]
            config = load(ROOT / "configs" / "offload.yaml", more)
            known = gather(config, 1, 1, profile(machine))
            for budget in budgets:
                offload = config.strategies["offload"].model_copy(update={"gpu_memory": budget, "host_memory": "1TiB"})
                try:
                    plan = compose({**config.strategies, "offload": offload}, known)
                except Refusal:
                    continue
                priced, layout = plan_cost(plan), plan.layout
                assert priced is not None and layout is not None
                blocks = {unit.name for unit in known.units if unit.kind is UnitKind.BLOCK}
                travelling = {name for b in layout.buckets if not b.resident for name in b.units} & blocks
                part = len(travelling) / len(blocks) / priced.seconds
                rows.append(
                    {
                        "machine": machine,
                        "tokens": known.run.micro_batch * known.run.sequence,
                        "checkpointing": checkpointing,
                        "budget": budget,
                        "blocks_that_travel": len(travelling),
                        "simulated_step_s": priced.seconds,
                        "always_share": (cost["counts_s"] + cost["views_s"]) * part,
                        "guards_share": cost["guards_s"] * part,
                    }
                )
    return rows


def table(found: Mapping[bool, Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> str:
    """For people."""
    lines = []
    for checkpointing, cost in found.items():
        each = sorted(cost["ns_per_tensor"])
        lines.append(
            f"{'With' if checkpointing else 'Without'} checkpoints: {cost['saved_tensors']} saved tensors per "
            f"micro-batch in {LAYERS} blocks. Of {1e3 * cost['nothing_s']:.1f} ms, counts of writes cost "
            f"{1e3 * cost['counts_s']:.2f} ms, to follow views {1e3 * cost['views_s']:.2f} ms, guards "
            f"{1e3 * cost['guards_s']:.2f} ms more: {statistics.median(each):,.0f} ns per saved tensor (of {len(each)} "
            f"rounds: {each[0]:,.0f} to {each[-1]:,.0f})\n"
        )
    lines += [
        "| machine | tokens | checkpoints | budget | blocks that travel | simulated step, s | always, % | guards, % |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['machine']} | {row['tokens']:,} | {'yes' if row['checkpointing'] else 'no'} | {row['budget']} | "
        f"{row['blocks_that_travel']} | {row['simulated_step_s']:.3f} | {100 * row['always_share']:.2f} | "
        f"{100 * row['guards_share']:.2f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """The whole command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where table.md and record.json go")
    given = parser.parse_args()
    found = {checkpointing: measure(checkpointing) for checkpointing in (False, True)}
    rows = simulated(found)
    text = table(found, rows)
    print(text)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "table.md").write_text(text)
        (given.out / "record.json").write_text(
            json.dumps({**surroundings(), "measured": list(found.values()), "simulated": rows}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
