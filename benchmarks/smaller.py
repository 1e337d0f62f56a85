"""What do the ways to a smaller model cost, of one saved model, healed for as many steps each?

    python -m deepstow.benchmarks.smaller --teacher runs/quickstart/export --config configs/quickstart.yaml --out FOLDER

Each way is a run of ``launch/train.py`` on the config with the saved model in the place of its own; more ``key=value``
changes follow and are for all. The two students begin with random weights and half of its layers, and take the steps
of ``--student-steps``. ``--seeds`` are those of the order of the rows; held-out rows are the same for all. ``--only``
takes some of the ways: what FOLDER has already is not run again, so that parts can follow one another. ``none`` has
rows of int8_group and int4_group where torchao is installed, and "trained for 4 bits" is a way there, whose perplexity
before is of rounded weights.

Perplexity is of the run's evaluation rows, before the first step and after the last; bytes are those of the exported
weights. Tokens per second are of forward passes of the export as stock Transformers loads it, in this process, the
best of three: on a machine that does other things they say little. A line of JSON for each export is in
FOLDER/rows.jsonl; of all lines, a table is in FOLDER/table.md and a picture in FOLDER/smaller.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from deepstow.strategies.state.sealed import read
from deepstow.trainer.planning import picture
from deepstow.trainer.run.checkpoints.earlier import FURTHER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
ROWS = 4
TOKENS = 128
TIMES = 3
WAYS: dict[str, list[str]] = {
    "none": [f"quantize={{formats: [int8, nf4{', int8_group, int4_group' * bool(find_spec('torchao'))}]}}"],
    "magnitude 50 %": ["prune={method: magnitude, sparsity: 0.5}"],
    "2:4": ["prune={method: '2:4'}"],
    "channels 25 %": ["prune={method: structured, sparsity: 0.25, parts: [channels]}"],
    "channels 25 %, taught": ["prune={method: structured, sparsity: 0.25, parts: [channels]}", "distill={teacher: T}"],
    "heads 50 %": ["prune={method: structured, sparsity: 0.5, parts: [heads]}"],
    "layers 34 %": ["prune={method: structured, sparsity: 0.34, parts: [layers]}"],
    "student": [],
    "student, taught": ["distill={teacher: T, temperature: 2.0}"],
}
QAT = "trained for 4 bits"
if find_spec("torchao"):
    WAYS[QAT] = ["quantize={formats: [int4_group], qat: int4_group}"]
SIZES = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
         "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings")  # fmt: skip
HEADS = ("way", "export", "parameters", "bytes", "perplexity before", "after", "tokens/s")


def command(given: argparse.Namespace, way: str, seed: int, folder: Path) -> list[str]:
    """The run of a way."""
    steps = given.student_steps if way.startswith("student") else given.steps
    fixed = [f"training.{key}={value}" for key, value in {
        "max_steps": steps, "output_dir": folder, "eval_strategy": "steps", "eval_steps": steps,
        "eval_on_start": "true", "save_strategy": "no", "data_seed": seed,
    }.items()]  # fmt: skip
    keys = ["model.config=null", "model.tokenizer=null", f"model.name_or_path={given.teacher}"]
    if way.startswith("student"):
        saved = json.loads((Path(given.teacher) / "config.json").read_text())
        half = {key: saved[key] for key in SIZES} | {"num_hidden_layers": saved["num_hidden_layers"] // 2}
        keys = [f"model.config={json.dumps(half)}", f"model.tokenizer={given.teacher}"]
    way_options = [option.replace("teacher: T", f"teacher: {given.teacher}") for option in WAYS[way]]
    return [sys.executable, "launch/train.py", "--config", given.config, *keys, *fixed, *given.overrides, *way_options]


def measured(way: str, seed: int, folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each export of a run."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    costs = [record["eval_perplexity"] for record in records if "eval_perplexity" in record]
    exact = transformers.AutoModelForCausalLM.from_pretrained(folder / "export")
    size = sum(param.numel() for param in exact.parameters())
    for export in [folder / "export", *sorted(folder.glob("export-*"))]:
        ends = (costs[0], costs[-1]) if export.name == "export" else read(export, FURTHER).about["perplexity"]
        if export.name == "export" and way == QAT:  # the run evaluates rounded weights
            ends = (costs[0], read(folder / "export-int4_group", FURTHER).about["perplexity"][0])
        weights = sum(path.stat().st_size for path in export.glob("*.safetensors"))
        yield dict(zip(HEADS, (way, export.name, size, weights, *ends, speed(export)), strict=True)) | {"seed": seed}


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


def over_seeds(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each export of a way: the mean of each number, and all that were found after the last step."""
    alike: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        alike.setdefault((row["way"], row["export"]), []).append(row)
    means = ({key: runs[0][key] for key in HEADS[:4]} | {key: statistics.fmean(row[key] for row in runs)
             for key in HEADS[4:]} | {"each": [row["after"] for row in runs]} for runs in alike.values())  # fmt: skip
    return list(means)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """In Markdown, as means over the seeds, with the range of what is found after the last step."""
    lines = [[f"{row[key]:,.1f}" if isinstance(row[key], float) else f"{row[key]:,}" if isinstance(row[key], int)
              else row[key] for key in HEADS] + [f"{min(after := row['each']):.1f} to {max(after):.1f}, {len(after)}"]
             for row in over_seeds(rows)]  # fmt: skip
    heads = (*HEADS, "range of after, seeds")
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *lines)) + "\n"


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """A line for each export: bytes and tokens per second as bars, perplexity after the last step as a dot per seed."""
    means = over_seeds(rows)
    names, places = [f"{row['way']}, {row['export']}" for row in means], range(len(means))
    figure = picture.canvas(1.2 + picture.ROW * len(means))
    size, perplexity, speed = figure.subplots(1, 3, sharey=True)
    size.barh(places, [row["bytes"] / 1e6 for row in means], color=picture.COLOURS["forward"])
    speed.barh(places, [row["tokens/s"] for row in means], color=picture.COLOURS["forward"])
    for place, row in enumerate(means):
        perplexity.plot(row["each"], [place] * len(row["each"]), "o", color=picture.COLOURS["backward"])
    size.set_yticks(places, names)
    size.invert_yaxis()
    size.set_xlabel("weights (MB)")
    perplexity.set_xlabel("perplexity, a dot per seed")
    speed.set_xlabel("forward (tokens/s)")
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ways one after the other; a row is written as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="a saved model, with its tokenizer")
    parser.add_argument("--config", required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--student-steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_args(argv)
    given.out.mkdir(parents=True, exist_ok=True)
    path, failed = given.out / "rows.jsonl", 0
    rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    finished = {(row["way"], row["seed"]) for row in rows}
    for way, seed in ((way, seed) for seed in given.seeds for way in given.only if (way, seed) not in finished):
        folder = given.out / f"run-{list(WAYS).index(way)}-{seed}"
        run = command(given, way, seed, folder)
        with (given.out / f"{folder.name}.log").open("w") as log:
            log.write(f"{' '.join(run)}\n")
            log.flush()
            result = subprocess.run(run, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False)
        if result.returncode:
            failed += 1
            print(f"{way}: ended with {result.returncode}, see {log.name}")
            continue
        rows += measured(way, seed, folder)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (given.out / "table.md").write_text(table(rows))
        picture.save(draw(rows), given.out / "smaller.png")
    print(table(rows))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
