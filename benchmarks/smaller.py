"""What do the ways to a smaller model cost, of one saved model, healed for as many steps each?

    python -m benchmarks.smaller --teacher runs/quickstart/export --config configs/quickstart.yaml --out FOLDER

Each way is a run of ``launch/train.py`` on the config with the saved model in the place of its own; more ``key=value``
changes follow and are for all. ``--only`` takes some of the ways. Perplexity is of the run's evaluation rows, before
the first step and after the last; bytes are those of the exported weights. Tokens per second are of forward passes of
the export as stock Transformers loads it, in this process, the best of three: on a machine that does other things they
say little. A line of JSON for each export is in FOLDER/rows.jsonl, and a table in FOLDER/table.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from strategies.core.sealed import read
from trainer.run.further import KIND

ROOT = Path(__file__).resolve().parents[1]
ROWS, TOKENS, TIMES = 4, 128, 3
WAYS: dict[str, list[str]] = {
    "none": ["quantize={formats: [int8, nf4]}"],
    "magnitude 50 %": ["prune={method: magnitude, sparsity: 0.5}"],
    "2:4": ["prune={method: '2:4'}"],
    "channels 25 %": ["prune={method: structured, sparsity: 0.25, parts: [channels]}"],
    "channels 25 %, taught": ["prune={method: structured, sparsity: 0.25, parts: [channels]}", "distill={teacher: T}"],
    "heads 50 %": ["prune={method: structured, sparsity: 0.5, parts: [heads]}"],
    "layers 34 %": ["prune={method: structured, sparsity: 0.34, parts: [layers]}"],
}
HEADS = ("way", "export", "parameters", "bytes", "perplexity before", "after", "tokens/s")


def command(config: str, teacher: str, way: str, folder: Path, steps: int, more: Sequence[str]) -> list[str]:
    """The run of a way."""
    fixed = [f"training.{key}={value}" for key, value in {
        "max_steps": steps, "output_dir": folder, "eval_strategy": "steps", "eval_steps": steps,
        "eval_on_start": "true", "save_strategy": "no",
    }.items()]  # fmt: skip
    own = ["model.config=null", "model.tokenizer=null", f"model.name_or_path={teacher}"]
    asked = [each.replace("teacher: T", f"teacher: {teacher}") for each in WAYS[way]]
    return [sys.executable, "launch/train.py", "--config", config, *own, *fixed, *more, *asked]


def measured(way: str, folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each export of a run."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    costs = [record["eval_perplexity"] for record in records if "eval_perplexity" in record]
    exact = transformers.AutoModelForCausalLM.from_pretrained(folder / "export")
    size = sum(each.numel() for each in exact.parameters())
    for export in [folder / "export", *sorted(folder.glob("export-*"))]:
        ends = (costs[0], costs[-1]) if export.name == "export" else read(export, KIND).about["perplexity"]
        weights = sum(path.stat().st_size for path in export.glob("*.safetensors"))
        yield dict(zip(HEADS, (way, export.name, size, weights, *ends, speed(export)), strict=True))


@torch.no_grad()
def speed(export: Path) -> float:
    """Tokens per second of forward."""
    model = transformers.AutoModelForCausalLM.from_pretrained(export).eval()
    ids = (torch.arange(ROWS * TOKENS) * 7919 % model.get_input_embeddings().num_embeddings).view(ROWS, TOKENS)
    seconds = []
    for _ in range(TIMES + 1):  # the first one warms up
        began = time.perf_counter()
        model(ids)
        seconds.append(time.perf_counter() - began)
    return ROWS * TOKENS / min(seconds[1:])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """In Markdown."""
    lines = [[f"{row[key]:,.1f}" if isinstance(row[key], float) else f"{row[key]:,}" if isinstance(row[key], int)
              else row[key] for key in HEADS] for row in rows]  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in (HEADS, ["---"] * len(HEADS), *lines)) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ways one after the other; a row is written as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="a saved model, with its tokenizer")
    parser.add_argument("--config", required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = list[dict[str, Any]]()
    for number, way in enumerate(arguments.only):
        folder = arguments.out / f"run-{number}"
        run = command(arguments.config, arguments.teacher, way, folder, arguments.steps, arguments.overrides)
        with (arguments.out / f"run-{number}.log").open("w") as log:
            log.write(f"{' '.join(run)}\n")
            log.flush()
            done = subprocess.run(run, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            print(f"{way}: ended with {done.returncode}, see {log.name}")
            continue
        rows += measured(way, folder)
        (arguments.out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (arguments.out / "table.md").write_text(table(rows))
    print(table(rows))
    return 0 if len({row["way"] for row in rows}) == len(arguments.only) else 1


if __name__ == "__main__":
    sys.exit(main())
