"""Are tensor parallel steps in 1, 2, 4 and 8 chunks as fast, one against the other, as predicted? Over a slow link.

    python -m benchmarks.chunks --megabits 200 --rounds 3 --out FOLDER                       (as root; needs ip and tc)

Each of two ranks is in a network namespace, whose interface the kernel limits (``two_level.machines``). They take
forward and backward of a small Llama, AutoTP's way and in chunks, in turn; the seconds of a round are those of the
slower rank. What the prediction knows is measured before, on both ranks at a time: forward and backward of the blocks
with as many rows as a chunk has and without sums, and a sum of as many bytes, of several that follow each other. To it
come the seconds of what is not in blocks. The least of several measurements counts, since others run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.two_level import machines, said_by_first, write
from strategies.backends import chunked, tensor_shards
from strategies.planner.hybrid.chunks import LATER, Passes

CHUNKS, ROWS, TOKENS, REPEATED = (1, 2, 4, 8), 8, 128, 9
MODEL: Any = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 4}
SUBLAYERS = 2 * MODEL["num_hidden_layers"]


def divided(chunks: int | None) -> Any:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**MODEL, vocab_size=512))
    tensor_shards.divide(model, 2, tied=False)
    if chunks is not None:
        chunked.start(model, [chunks] * SUBLAYERS, tensor_shards.group())
    return model


def step(model: Any, rows: int) -> tuple[float, float]:
    """Seconds of forward and backward, on the slower rank."""
    ids = torch.randint(0, 512, (rows, TOKENS), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    dist.barrier()
    began = time.perf_counter()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    between = time.perf_counter()
    loss.backward()
    took = torch.tensor([between - began, time.perf_counter() - between], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took[0]), float(took[1])


def summed(num_bytes: int) -> float:
    """Seconds of one of several sums."""
    flats = [torch.ones(num_bytes // 4) for _ in range(4 * ROWS * TOKENS * MODEL["hidden_size"] * 4 // num_bytes)]
    dist.barrier()
    began = time.perf_counter()
    begun = [dist.all_reduce(flat, async_op=True) for flat in flats]
    for each in begun:
        assert each is not None
        each.wait()
    took = torch.tensor((time.perf_counter() - began) / len(flats), dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def tables() -> tuple[Passes, float]:
    """What is measured before, the least of several times in turn; and the seconds outside of blocks."""
    model, real, bare = divided(1), chunked.all_reduce, divided(None)
    bare.model.layers = torch.nn.ModuleList()
    bare.model.config.num_hidden_layers = bare.config.num_hidden_layers = 0
    found: dict[int, list[tuple[float, ...]]] = {many: [] for many in CHUNKS}
    for _ in range(REPEATED):
        for many in CHUNKS:
            rows = ROWS // many
            chunked.all_reduce = lambda *_, **__: SimpleNamespace(wait=lambda: None)  # type: ignore[attr-defined]
            times = *step(model, rows), *step(bare, rows)
            chunked.all_reduce = real  # type: ignore[attr-defined]
            found[many].append((*times, summed(rows * TOKENS * MODEL["hidden_size"] * 4)))
    least = {many: [min(each) for each in zip(*times, strict=True)] for many, times in found.items()}
    forward: dict[int, tuple[float, float, float]] = {}
    backward: dict[int, tuple[float, float, float]] = {}
    for many, (ahead, back, *once, exchange) in least.items():
        forward[many] = ((ahead - once[0]) / SUBLAYERS, exchange, 0.0)
        back = (back - once[1]) / SUBLAYERS
        backward[many] = ((1 - LATER) * back, exchange, LATER * back)
    return Passes([forward] * SUBLAYERS, [backward] * SUBLAYERS), sum(least[1][2:4])


def work(rank: int, rounds: int) -> None:
    """One rank; the first prints what it measured, and the seconds of each round, by candidate."""
    from deepspeed import comm

    os.environ |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29521", "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ["LOCAL_RANK"] = "0"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    comm.init_distributed("gloo", auto_mpi_discovery=False)
    models = {"AutoTP": divided(None)} | {f"{many} chunks": divided(many) for many in CHUNKS}
    for model in models.values():
        step(model, ROWS)
    known, outside = tables()
    if rank == 0:
        print(json.dumps({"forward": known.forward[0], "backward": known.backward[0], "outside": outside}))
        for many in CHUNKS:
            seconds = known.seconds([many] * SUBLAYERS) + outside
            print(json.dumps({"candidate": f"{many} chunks", "predicted": round(seconds, 3)}), flush=True)
    for number in range(rounds):
        for name, model in models.items():
            seconds = sum(step(model, ROWS))
            if rank == 0:
                print(json.dumps({"candidate": name, "round": number, "seconds": round(seconds, 3)}), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabits", type=float, default=200.0, help="Mbit/s that a rank sends")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        work(given.rank, given.rounds)
        return
    with machines(given.megabits, 10000.0, 2) as names:
        said = said_by_first("benchmarks.chunks", names)
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    expected = {line["candidate"]: line["predicted"] for line in found if "predicted" in line}
    measured: dict[str, list[float]] = {}
    for line in found:
        if "seconds" in line:
            measured.setdefault(line["candidate"], []).append(line["seconds"])
    order = sorted(expected, key=lambda name: min(measured[name]))
    lines: list[Any] = [{"limit in Mbit/s": given.megabits, "measured before": found[0]}]
    lines += [
        {"candidate": name, "least": min(times), "predicted": expected.get(name), "measured": times}
        for name, times in measured.items()
    ]
    lines.append({"predicted order is the measured one": order == sorted(expected, key=expected.__getitem__)})
    write(lines, given.out)


if __name__ == "__main__":
    main()
