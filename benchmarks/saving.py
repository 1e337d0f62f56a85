"""What a checkpoint costs training: written beside it and sealed, against a save that training waits for.

    python benchmarks/saving.py --megabytes 600 --rounds 5

Trains a Llama of that size (weights and Adam's moments) for one step. Then each round computes the same forwards and
backwards four times: without a save; after a save that waits until everything is on the disk and renames it, without
a manifest; the same with the waiting on a thread beside the computation; and after the run's own save, which is sealed
on that thread (hashes, a look for values that are not finite, a manifest). Prints medians, how long training stands
still, and what hashes and the look at the values take alone.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from strategies.core.commit import sync
from strategies.core.sealed import damage, read
from trainer.config.load import load_tree
from trainer.dist.ranks import Ranks
from trainer.run import order, saving
from trainer.run.manifest import KIND, About, Manifest
from trainer.verify.verify import random_run

HIDDEN = 512
LAYER = 4 * HIDDEN**2 + 3 * HIDDEN * 4 * HIDDEN  # parameters


def main() -> None:
    """The whole script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", type=int, default=12, help="forwards and backwards between two saves")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    took: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        trainer = trained(Path(name), arguments.megabytes)
        compute = computing(trainer, arguments.beside)
        compute()

        def save() -> None:
            took.setdefault("stands still", []).append(timed(lambda: trainer._save_checkpoint(trainer.model, None)))

        for _ in range(arguments.rounds):
            took.setdefault("no save", []).append(timed(compute))
            took.setdefault("sealed", []).append(timed(lambda: (save(), compute(), trainer.settle())))
            with mock.patch.multiple(saving, seal=synced, manifest_of=unlooked):
                took.setdefault("only synced", []).append(timed(lambda: (save(), trainer.settle(), compute())))
                took.setdefault("synced beside", []).append(timed(lambda: (save(), compute(), trainer.settle())))
            del took["stands still"][-2:]
        trainer._save_checkpoint(trainer.model, None)
        trainer.settle()
        (place,) = Path(name).glob("run/checkpoint-*")
        took["hashed alone"] = [timed(lambda: damage(place, read(place, KIND)))]
        took["values alone"] = [timed(lambda: saving.all_finite(place, ()))]
        size = sum(num_bytes for num_bytes, _ in read(place, KIND).files.values())
    for what, times in took.items():
        print(f"{what:13}  {statistics.median(times):6.2f} s   ({', '.join(f'{each:.2f}' for each in times)})")
    mean = {what: statistics.mean(times) for what, times in took.items()}
    added = (f"{mean[what] - mean['no save']:.2f} s {what}" for what in ("only synced", "synced beside", "sealed"))
    print(f"{size / 1e6:.0f} MB: a save adds on average {', '.join(added)}")


def computing(trainer: Any, count: int) -> Callable[[], None]:
    """``count`` forwards and backwards."""
    batch = {"input_ids": torch.ones(1, 128, dtype=torch.long), "labels": torch.ones(1, 128, dtype=torch.long)}

    def compute() -> None:
        for _ in range(count):
            trainer.model(**batch).loss.backward()
            trainer.model.zero_grad()

    return compute


def trained(folder: Path, megabytes: int) -> Any:
    """A trainer after one step, with a checkpoint of about that size."""
    model = {
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "num_attention_heads": 8,
        "vocab_size": 256, "num_hidden_layers": max(1, round(megabytes * 1e6 / 12 / LAYER)),
    }  # fmt: skip
    training = {"output_dir": str(folder / "run"), "max_steps": 1, "save_strategy": "no", "report_to": ["none"]}
    tree = {
        "model": {"config": model, "tokenizer": "none"},
        "data": {"path": "random tokens", "max_length": 16},
        "training": {**training, "per_device_train_batch_size": 1, "use_cpu": True},
    }
    trainer: Any = order.make_trainer(random_run(load_tree(tree), Ranks()))
    trainer.train()
    return trainer


def timed(work: Callable[[], object]) -> float:
    """The seconds that ``work`` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def synced(draft: Path, kind: str, about: object) -> None:
    """Only wait until everything is on the disk."""
    for path in [*draft.rglob("*"), draft]:
        sync(path)


def unlooked(run: About, step: int, *rest: object) -> Manifest:
    """A manifest without a look at the values."""
    return Manifest(step=step, finite=True, run=run)


if __name__ == "__main__":
    main()
