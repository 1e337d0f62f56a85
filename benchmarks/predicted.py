"""What plans predict against what runs take, on this machine: bytes, and seconds of steps with updates beside compute.

    python benchmarks/predicted.py --out benchmarks/records/DATE_predicted_2-core-cpu

First the machine's rates are measured (``launch/doctor.py --rates``). Then each plan is run twice with
``launch/train.py``: the first run measures its blocks in steps 2 to 8, the second one is planned with them. Seconds
are those of the second run: its median over windows of a few steps, after the first. Predicted bytes are compared by
the run itself, after step 2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from strategies.report.table import table
from trainer.run.plan_check import LAST

ROOT = Path(__file__).resolve().parent.parent
PLANS = {
    "clipped, updated under the next forward": (),
    "not clipped, updated in backward": ("max_grad_norm=0",),
    "two micro-batches": ("gradient_accumulation_steps=2",),
}
RUN = ("warmup_steps=0", "eval_strategy=no", "eval_on_start=false", "save_strategy=no")
HEAD = ("plan", "", "predicted", "measured", "error")


def train(config: str, folder: Path, steps: int, window: int, training: Sequence[str]) -> str:
    """One run; returns what it printed."""
    options = (f"output_dir={folder}", f"max_steps={steps}", f"logging_steps={window}", *RUN, *training)
    command = [sys.executable, str(ROOT / "launch/train.py"), "--config", config, "strategies.offload.site=host"]
    command += [f"training.{option}" for option in options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(training)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def compared(folder: Path) -> Iterator[dict[str, Any]]:
    """Predicted and measured, by name: the bytes as the run compared them, and the seconds of a step."""
    plan = json.loads((folder / "plan.json").read_text())
    for row in plan["measured"]:
        if row["unit"] == "bytes":
            yield row
    run = plan["facts"]["run"]
    tokens = run["micro_batch"] * run["sequence"] * run["accumulation"] * run["world_size"]
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    windows = [tokens / row["tokens_per_s"] for row in logged if row.get("tokens_per_s")][1:]  # without the warm-up
    predicted, measured = plan["simulated"]["seconds"], statistics.median(windows)
    yield {
        "owner": "a step",
        "unit": "seconds",
        "predicted": predicted,
        "measured": measured,
        "error": predicted / measured - 1,
        "windows": windows,
        "least_seconds": plan["simulated"]["least_seconds"],
    }


def main() -> None:
    """Write table.md, results.json and the runs' logs into the folder, with progress."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default=str(ROOT / "configs/quickstart.yaml"), metavar="FILE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--window", type=int, default=5, metavar="STEPS", help="steps per logged window")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    doctor = [sys.executable, str(ROOT / "launch/doctor.py"), "--rates"]
    (given.out / "rates.log").write_text(subprocess.run(doctor, capture_output=True, text=True, check=False).stdout)
    results: dict[str, list[dict[str, Any]]] = {}
    for number, (name, training) in enumerate(PLANS.items()):
        with tempfile.TemporaryDirectory(prefix="deepstow-predicted-") as folder:
            for attempt, *limits in (("first", LAST, 1), ("second", given.steps, given.window)):
                print(f"{name}, {attempt} run", flush=True)
                log = given.out / f"run-{number}-{attempt}.log"
                log.write_text(train(given.config, Path(folder), *limits, training))
            results[name] = list(compared(Path(folder)))
        (given.out / "results.json").write_text(json.dumps(results, indent=1))
    rows = [(name, *_cells(row)) for name, found in results.items() for row in found]
    text = "\n".join(table(HEAD, rows, markdown=True))
    (given.out / "table.md").write_text(text + "\n")
    print(text)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    scale, unit = (1 << 20, "MiB") if row["unit"] == "bytes" else (1, "s")
    numbers = (f"{row[which] / scale:.4g} {unit}" for which in ("predicted", "measured"))
    return (row["owner"], *numbers, f"{100 * row['error']:+.1f} %")


if __name__ == "__main__":
    main()
