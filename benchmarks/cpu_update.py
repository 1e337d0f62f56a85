"""AdamW on host memory: is torch's kernel or DeepSpeed's faster? ``python benchmarks/cpu_update.py --out FOLDER``

The kernels update flat fp32 buffers, with fp32 gradients in one call, and with bf16 gradients in chunks, so that the
scratch buffer stays in cache: widen the gradient, multiply by the clip factor, update, round the weight to bf16.
(Neither kernel reads bf16 gradients with fp32 weights.) Every round runs every case once, so that a disturbance affects
all alike; the best round counts. *Held up* is the longest time that the main thread could not run Python while another
thread ran the update: a kernel that keeps the interpreter lock shows its whole duration there. DeepSpeed's kernel takes
part if it is compiled, or with ``--build``. Each call appends a run to ``record.json`` and rewrites ``table.md``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs where the package is not installed, too

from trainer.dist.deepspeed_ops import CPU_ADAM, cache_folder
from trainer.machine.probe import cores

LR, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.1
STEP = torch.tensor(3.0)
WHOLE = "fp32, whole"
BYTES = 28  # per parameter: weight and two moments read and written, and an fp32 gradient, or bf16 in and bf16 out
Update = Callable[[], None]
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def torch_kernel(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    """The kernel of ``torch.optim.AdamW(fused=True)``, without its Python wrapper, like the other one."""
    options: dict[str, Any] = {"lr": LR, "beta1": BETA1, "beta2": BETA2, "eps": EPS, "weight_decay": DECAY}
    torch._fused_adamw_([p], [g], [m], [v], [], [STEP], amsgrad=False, maximize=False, **options)


def deepspeed_kernel(build: bool) -> Kernel | None:
    """The kernel of DeepSpeedCPUAdam; None if it is not compiled and ``build`` is false."""
    if not build and not (cache_folder() / CPU_ADAM.name / f"{CPU_ADAM.name}.so").exists():
        return None
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    adam = DeepSpeedCPUAdam([torch.zeros(1)], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY)

    def update(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
        adam.ds_opt_adam.adam_update(adam.opt_id, 3, LR, BETA1, BETA2, EPS, DECAY, True, p, g, m, v)

    return update


def cases(n: int, kernels: dict[str, Kernel]) -> list[tuple[str, str, Update]]:
    """(gradients and chunk, name of the kernel, update) of each case; all share the same buffers."""
    p, m, v, g = torch.randn(n), torch.zeros(n), torch.zeros(n), torch.randn(n).mul_(1e-2)
    low, out, scratch, factor = g.bfloat16(), torch.zeros(n, dtype=torch.bfloat16), torch.zeros(n), torch.tensor(0.7)

    def chunked(kernel: Kernel, size: int) -> None:
        for at in range(0, n, size):
            part = slice(at, min(n, at + size))
            wide = scratch[: part.stop - at]
            wide.copy_(low[part]).mul_(factor)
            kernel(p[part], wide, m[part], v[part])
            out[part].copy_(p[part])

    sizes = [(f"bf16, chunks of 2^{k}", 1 << k) for k in (14, 16, 18, 20, 22)] + [("bf16, whole", n)]
    return [
        (label, name, functools.partial(chunked, kernel, size) if size else functools.partial(kernel, p, g, m, v))
        for name, kernel in kernels.items()
        for label, size in [(WHOLE, 0), *sizes]
    ]


def held_up(update: Update) -> float:
    """Seconds of the longest pause of this thread's Python while another thread runs the update."""
    worker, seen = threading.Thread(target=update), [time.perf_counter()]
    worker.start()
    while worker.is_alive():
        seen.append(time.perf_counter())
        time.sleep(0)
    return max(b - a for a, b in itertools.pairwise([*seen, time.perf_counter()]))


def measure(n: int, rounds: int, kernels: dict[str, Kernel]) -> list[dict[str, Any]]:
    """The best round of every case, with one thread and with one per core."""
    rows: dict[tuple[str, str, int], list[float]] = {}
    todo = [(*case, team) for case in cases(n, kernels) for team in sorted({1, cores()[1]})]
    for _ in range(rounds):
        for gradients, kernel, update, team in todo:
            torch.set_num_threads(team)
            began = time.perf_counter()
            update()
            seconds = time.perf_counter() - began
            pause = held_up(update) if gradients == WHOLE else 0.0
            best = rows.get((gradients, kernel, team), [seconds, pause])
            rows[gradients, kernel, team] = [min(best[0], seconds), min(best[1], pause)]
    names = ("gradients", "kernel", "threads", "seconds", "held_up")
    return [dict(zip(names, (*key, *best), strict=True)) for key, best in rows.items()]


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown: a row per case, then which kernel is faster."""
    head = ["gradients", "kernel", "threads", *(f"run {i + 1}, G/s" for i in range(len(runs))), "GB/s", "held up, ms"]
    lines, best = [head, ["---"] * len(head)], dict[tuple[str, int, str], float]()
    for same in zip(*(run["rows"] for run in runs), strict=True):
        case = (same[0]["gradients"], same[0]["threads"], same[0]["kernel"])
        speeds = [run["params"] / row["seconds"] / 1e9 for run, row in zip(runs, same, strict=True)]
        best[case] = max(speeds)
        pause = f"{min(row['held_up'] for row in same) * 1e3:.1f}" if case[0] == WHOLE else ""
        cells = [case[0], case[2], str(case[1]), *(f"{x:.2f}" for x in speeds)]
        lines.append([*cells, f"{max(speeds) * BYTES:.0f}", pause])
    end = "DeepSpeed's kernel is not compiled here; --build compiles it."
    if ratio := [best[g, t, "torch"] / best[g, t, "deepspeed"] for g, t, k in best if k == "deepspeed"]:
        end = f"torch is faster by over 5 % in {sum(x > 1.05 for x in ratio)} of {len(ratio)} cases, DeepSpeed in "
        end += f"{sum(x < 0.95 for x in ratio)}; torch's speed is {min(ratio):.2f} to {max(ratio):.2f} of DeepSpeed's."
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{end}\n"


def main() -> None:
    """Measure one run, add it to the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of record.json and table.md")
    parser.add_argument("--params", type=int, default=40_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--build", action="store_true", help="compile DeepSpeed's kernel if need be: about 50 s")
    asked = parser.parse_args()
    other = deepspeed_kernel(asked.build)
    kernels = {"torch": torch_kernel} | ({"deepspeed": other} if other else {})
    run: dict[str, Any] = {"began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "command": sys.argv}
    run |= {"torch": torch.__version__, "vectors": torch.backends.cpu.get_cpu_capability(), "cores": cores()[1]}
    run |= {"params": asked.params, "rounds": asked.rounds, "load": os.getloadavg()[0]}
    run["rows"] = measure(asked.params, asked.rounds, kernels)
    asked.out.mkdir(parents=True, exist_ok=True)
    record = asked.out / "record.json"
    runs = [*(json.loads(record.read_text()) if record.exists() else []), run]
    record.write_text(json.dumps(runs, indent=1) + "\n")
    (asked.out / "table.md").write_text(table(runs))
    print(table(runs), end="")


if __name__ == "__main__":
    main()
