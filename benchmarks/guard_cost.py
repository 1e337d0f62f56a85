"""The cost of keeping backward from reading weights that are away (``strategies/engine/tensors/guard.py``,
``parameter_views.py``).

    python benchmarks/guard_cost.py --out benchmarks/records/DATE_guard_HARDWARE

Measured: forward and backward of a Llama as deep as a 1.3 B model and hardly any width, all of whose weights travel,
so that a step is nothing but Python and torch's dispatch. It runs in turn with guards around all blocks, with the
counts of writes and the views that are followed (``parameters.py``), with the counts alone, and with none of them.

Simulated: steps of the 1.3 B model on named machines under budgets where weights travel. The shares are the measured
host time over those steps, as if none of it were hidden behind the GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks.harness.child import surroundings
from strategies.core.compose import compose
from strategies.core.facts import UnitKind
from strategies.core.protocol import Refusal
from strategies.engine import StowOptimizer, stow
from strategies.engine.module_hooks import ModuleHooks
from strategies.engine.parameter_views import ParameterViews
from strategies.engine.tensors.parameters import PresentParameter
from strategies.planner.step_cost import plan_cost
from trainer.config.load import load
from trainer.machine.probe import probe
from trainer.machine.profiles import profile
from trainer.planning.facts import gather
from trainer.planning.plan_for import plan_for

ROOT = Path(__file__).resolve().parent.parent
LAYERS, ROUNDS, REPEATS = 24, 15, 15
MODES = ("nothing", "counts", "views", "guards")  # each includes those before it
SHAPE = {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": LAYERS, "num_attention_heads": 16}
MACHINES, BUDGETS = ("rtx4090-pcie4", "h100-pcie5"), ("4GiB", "8GiB", "12GiB", "16GiB")


def model(checkpointing: bool) -> Any:
    """A Llama as deep as one of 1.3 B parameters and as small as possible otherwise."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 16}
    net = LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, **sizes)).train()
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
    """How many tensors autograd saves while blocks run in the forward of a micro-batch."""
    packed: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(1) or tensor.detach(), lambda it: it):
        hidden = net.model.embed_tokens(ids)
        rotary = net.model.rotary_emb(hidden, torch.arange(ids.shape[1])[None])
        before = len(packed)
        for block in net.model.layers:
            hidden = block(hidden, position_embeddings=rotary)
    return len(packed) - before


@contextmanager
def only(mode: str) -> Iterator[None]:
    """Run the engine with what ``mode`` names and what comes before it in ``MODES``."""
    left_out = MODES[MODES.index(mode) + 1 :]
    with ExitStack() as stack:
        if "guards" in left_out:
            stack.enter_context(mock.patch.object(ModuleHooks, "_guarded", lambda self, scope: nullcontext()))
        if "views" in left_out:
            stack.enter_context(mock.patch.object(ParameterViews, "kind", PresentParameter))
        if "counts" in left_out:
            stack.enter_context(mock.patch.object(ParameterViews, "_count", lambda self: None))
        yield


def measure(checkpointing: bool) -> dict[str, Any]:
    """Seconds of forward and backward by mode, the minimum of repeats, in rounds; and what each mode adds."""
    torch.set_num_threads(1)
    net, ids = model(checkpointing), torch.zeros(1, 4, dtype=torch.long)
    count = saved(model(False), ids)
    plan = plan_for(net, max_grad_norm=1.0, machine=probe(), site="host", weights="streamed")
    optimizer = stow(net, plan, device="cpu")  # never steps, so guards stay around all blocks
    rounds: list[dict[str, float]] = []
    one_step(net, ids, optimizer)
    for _ in range(ROUNDS):
        rounds.append({})
        for mode in MODES:
            with only(mode):
                rounds[-1][mode] = min(one_step(net, ids, optimizer) for _ in range(REPEATS))
    more = {name: [row[name] - row[before] for row in rounds] for before, name in pairwise(MODES)}
    return {
        "checkpointing": checkpointing,
        "saved_tensors": count,
        "rounds": rounds,
        "ns_per_tensor": [1e9 * each / count for each in more["guards"]],
        "nothing_s": statistics.median(row["nothing"] for row in rounds),
        **{f"{name}_s": statistics.median(each) for name, each in more.items()},
    }


def simulated(cost: Mapping[str, Any], machine: str, budget: str) -> dict[str, Any] | None:
    """A step of the 1.3 B model, and the share that the measured cost would add; None if the budget is too small."""
    checkpointing = cost["checkpointing"]
    shape = [f"model.config.{name}={value}" for name, value in SHAPE.items()]
    shape.append(f"training.gradient_checkpointing={str(checkpointing).lower()}")
    config = load(ROOT / "configs" / "offload.yaml", shape)
    known = gather(config, 1, 1, profile(machine))
    offload = config.strategies["offload"].model_copy(update={"gpu_memory": budget, "host_memory": "1TiB"})
    try:
        plan = compose({**config.strategies, "offload": offload}, known)
    except Refusal:
        return None
    step, layout = plan_cost(plan), plan.layout
    assert step is not None and layout is not None
    blocks = {unit.name for unit in known.units if unit.kind is UnitKind.BLOCK}
    travelling = {name for b in layout.buckets if not b.resident for name in b.units} & blocks
    share = len(travelling) / len(blocks) / step.seconds
    return {
        "machine": machine,
        "tokens": known.run.micro_batch * known.run.sequence,
        "checkpointing": checkpointing,
        "budget": budget,
        "blocks_that_travel": len(travelling),
        "simulated_step_s": step.seconds,
        "always_share": (cost["counts_s"] + cost["views_s"]) * share,
        "guards_share": cost["guards_s"] * share,
    }


def table(costs: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> str:
    """The measured costs in words, the simulated steps as Markdown."""
    lines = []
    for cost in costs:
        each = sorted(cost["ns_per_tensor"])
        counts, views, guards = (f"{1e3 * cost[f'{mode}_s']:.2f} ms" for mode in MODES[1:])
        lines.append(
            f"{'With' if cost['checkpointing'] else 'Without'} checkpoints: {cost['saved_tensors']} saved tensors per "
            f"micro-batch in {LAYERS} blocks. Added to {1e3 * cost['nothing_s']:.1f} ms: counts of writes {counts}, "
            f"views {views}, guards {guards}, which is {statistics.median(each):,.0f} ns per saved tensor (of "
            f"{len(each)} rounds: {each[0]:,.0f} to {each[-1]:,.0f})\n"
        )
    lines.append(
        "| machine | tokens | checkpoints | budget | blocks that travel | simulated step, s | always | guards |"
    )
    lines.append("| --- " * 8 + "|")
    for row in rows:
        machine, tokens, checkpointing, budget, travelling, seconds, always, guards = row.values()
        start = f"| {machine} | {tokens:,} | {'yes' if checkpointing else 'no'} | {budget} | {travelling} | "
        lines.append(f"{start}{seconds:.3f} | {always:.2%} | {guards:.2%} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """The whole command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where table.md and record.json go")
    given = parser.parse_args()
    costs = [measure(checkpointing) for checkpointing in (False, True)]
    steps = [simulated(cost, machine, budget) for machine in MACHINES for cost in costs for budget in BUDGETS]
    rows = [step for step in steps if step is not None]
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "table.md").write_text(table(costs, rows))
    (given.out / "record.json").write_text(
        json.dumps({**surroundings(), "measured": costs, "simulated": rows}, indent=1)
    )
    print(table(costs, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
