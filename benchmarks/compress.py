"""What compressed exchanges of gradients cost in quality, and gain over slow links: four ranks of data parallelism.

    python -m benchmarks.compress quality --steps 400 --seeds 3 --out FOLDER
    python -m benchmarks.compress speed --across 100 --steps 5 --out FOLDER                (as root; needs ip and tc)

Both train the quickstart's Llama (``--hidden`` makes it narrower) on the interpreter's own documentation, in a plain
loop with torch's DistributedDataParallel and the hooks of ``strategies.collectives``: AdamW, clipping at 1, a cosine.
``quality`` pairs the methods by seed, on one machine without limits: all have the same weights and rows, and the
perplexity on held-out rows is compared. ``speed`` gives each rank a network namespace, whose interface the kernel
limits in what it sends; seconds of a step are those of the slowest rank, bytes those that the first rank's interface
has sent, ``cpu_s`` the CPU seconds of all ranks, which another's work changes less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from math import exp, inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch.nn.parallel import DistributedDataParallel
from transformers import get_scheduler

from benchmarks.two_level import machines
from strategies.backends.compressed import Compressed
from strategies.backends.local_steps import LocalSteps
from strategies.core.compression import Compression
from strategies.core.registry import find
from trainer.config.load import load
from trainer.data.collate import Collator
from trainer.dist.ranks import Ranks
from trainer.model import build
from trainer.run import history
from trainer.run.order import read_data

RANKS, BATCH, LEARNING_RATE, WARMUP, LOG = 4, 1, 1e-3, 20, 20
WIDTHS = 12  # the quickstart has 6 heads, of an even width
CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
Methods = dict[str, Compression | None]
METHODS: Methods = {
    "none": None,
    "bf16": Compression("bf16", 1, 1, 10),
    "fp16": Compression("fp16", 1, 1, 10),
    "int8": Compression("int8", 1, 1, 10),
    "powersgd, rank 4": Compression("powersgd", 1, 4, 10),
    "topk, density 0.01": Compression("topk", 0.01, 1, 10),
    "topk, density 0.05": Compression("topk", 0.05, 1, 10),
    "onebit, from step 81": Compression("onebit", 1, 1, 80),
    "local_steps 20": Compression("none", 1, 1, 0, local_steps=20),
    "local_steps 20, int8": Compression("int8", 1, 1, 0, local_steps=20),
    "local_steps 20, averaged": Compression("none", 1, 1, 0, 20, outer_lr=1, outer_momentum=0),
}


def method(name: str) -> Compression | None:
    """One of METHODS, or as in ``powersgd rank=16 start=10``: options of strategies.collectives."""
    if name in METHODS:
        return METHODS[name]
    what, *options = name.split()
    given = dict(each.partition("=")[::2] for each in options)
    try:
        if unknown := given.keys() - {each.name for each in fields(Compression)}:
            raise argparse.ArgumentTypeError(f"{name!r}: there is no option {', '.join(sorted(unknown))}")
        how = TypeAdapter(Compression).validate_python({"density": 1, "rank": 1, "start": 10, **given, "method": what})
        numbers = {option: getattr(how, option) for option in given}
        find("collectives").model_validate({**numbers, "compress": what})  # knows what a number may be
        return how
    except ValidationError as error:
        first = error.errors()[0]
        raise argparse.ArgumentTypeError(f"{name!r}: {first['loc'][0]}: {first['msg']}") from None


class Work:
    """One rank: the data, and training with one method."""

    def __init__(self, rank: int, hidden: int, folder: Path) -> None:
        over = [f"training.output_dir={folder / 'data'}", "data.max_length=128"]
        over += [f"model.config.hidden_size={hidden}", f"model.config.intermediate_size={hidden * 8 // 3}"]
        self._rank, self._config = rank, load(CONFIG, over)
        for turn in range(2):  # the first rank makes the files that the others read
            if (rank == 0) == (turn == 0):
                tokenizer, prepared = read_data(self._config, Ranks(rank, rank, RANKS, RANKS), quiet=True)
            dist.barrier()
        pad: Any = tokenizer.pad_token_id
        self._collate = Collator(pad, packing=True)
        self._train: Any = prepared.train
        self._eval: Any = prepared.eval

    def _model(self, seed: int) -> Any:
        section = self._config.model
        return build.build(section, build.load_config(section, 2048), seed=seed, partitioned=False)

    def losses(self, method: Compression | None, seed: int, steps: int) -> Iterator[tuple[int, float]]:
        """Steps, of which the loss of this rank follows; the seconds of each are between two of them."""
        model = self.model = self._model(seed)
        alone = method is not None and method.local_steps > 0
        if not alone:
            model = DistributedDataParallel(model, find_unused_parameters=True)  # buckets stay as they are
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1, fused=True)
        if method is not None:
            exchange = LocalSteps(method) if alone else Compressed(method)
            exchange.follow(optimizer, self.model)
            if not alone:
                exchange.hang_on(model)
        schedule = get_scheduler("cosine", optimizer, min(WARMUP, steps // 4), steps)
        order = torch.randperm(len(self._train), generator=torch.Generator().manual_seed(seed)).tolist()
        for step in range(steps):
            rows = [order[(step * RANKS * BATCH + self._rank * BATCH + at) % len(order)] for at in range(BATCH)]
            loss = model(**self._collate([self._train[row] for row in rows])).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            yield step + 1, loss.item()

    @torch.no_grad()
    def eval_loss(self) -> float:
        """The mean over the tokens of the rows that are held out, of which each rank takes its part."""
        found = torch.zeros(2, dtype=torch.float64)
        for row in range(self._rank, len(self._eval), RANKS):
            batch = self._collate([self._eval[row]])
            count = int((batch["labels"][:, 1:] != -100).sum())
            found += torch.tensor([self.model(**batch).loss.item() * count, count], dtype=torch.float64)
        dist.all_reduce(found)
        return float(found[0] / found[1])


def quality(work: Work, methods: Methods, seeds: range, steps: int) -> Iterator[dict[str, Any]]:
    """Curves and the loss at the end, by method and seed."""
    for seed in seeds:
        for name, method in methods.items():
            curve, since = [], torch.zeros(1)
            for step, loss in work.losses(method, seed, steps):
                since += loss
                if step % LOG == 0:
                    dist.all_reduce(since)
                    curve.append([step, round(float(since) / LOG / RANKS, 4)])
                    since = torch.zeros(1)
            held_out = work.eval_loss()
            yield {"method": name, "seed": seed, "eval_loss": held_out, "perplexity": exp(held_out), "curve": curve}


def speed(work: Work, methods: Methods, rounds: range, steps: int) -> Iterator[dict[str, Any]]:
    """Seconds of a step on the slowest rank, and bytes that the first has sent in it, by method and round."""
    sent = Path("/sys/class/net/stow/statistics/tx_bytes")
    for number in rounds:
        for name, method in methods.items():
            at_once = None if method is None else replace(method, start=2)
            began, took, before, worked = time.perf_counter(), list[float](), 0, 0.0
            for step, _ in work.losses(at_once, 0, 3 + steps):
                if step == 3:
                    before, worked = int(sent.read_text()), time.process_time()
                took.append(time.perf_counter() - began)
                began = time.perf_counter()
            bytes_sent = (int(sent.read_text()) - before) / steps
            slowest = torch.tensor(statistics.mean(took[3:]))  # some steps exchange, and others do not
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds, cpu = float(slowest), torch.tensor((time.process_time() - worked) / steps)
            dist.all_reduce(cpu)
            tokens = RANKS * BATCH * 128
            yield {
                "method": name, "round": number, "s": seconds, "tokens_per_s": tokens / seconds, "sent": bytes_sent,
                "cpu_s": float(cpu),
            }  # fmt: skip


def summed_up(lines: list[dict[str, Any]], out: Path) -> None:
    """Medians by method, and a picture of the first seed's curves."""
    for name in dict.fromkeys(line["method"] for line in lines):
        of = [line for line in lines if line["method"] == name]
        plain = [line for line in lines if line["method"] == "none"]
        if not plain:
            print(json.dumps([{key: value for key, value in line.items() if key != "curve"} for line in of]))
        elif "perplexity" in of[0]:
            times = [one["perplexity"] / other["perplexity"] for one, other in zip(of, plain, strict=True)]
            every = ", ".join(f"{line['perplexity']:.1f}" for line in of)
            print(f"| {name} | {every} | {statistics.mean(times):.3f} ({min(times):.3f} to {max(times):.3f}) |")
        else:
            one, other = (statistics.median(line["s"] for line in some) for some in (of, plain))
            sent = statistics.median(line["sent"] for line in of) / 1e6
            print(f"| {name} | {sent:.3g} MB | {one:.2f} s | {other / one:.2f} |")
    curves = [line for line in lines if line.get("seed") == lines[0].get("seed", "")]
    if curves:
        records = [[{"step": step, "loss": loss} for step, loss in line["curve"]] for line in curves]
        runs = [history.History(Path(line["method"]), {}, of) for line, of in zip(curves, records, strict=True)]
        history.draw(runs, out / "curves.png")


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, Methods]:
    """Arguments of the command line, and the methods that they name."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["quality", "speed"])
    parser.add_argument("--across", type=float, default=100.0, help="Mbit/s that a rank sends to the others")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3, help="of quality; rounds of speed")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--methods", nargs="+", default=[*METHODS], metavar="NAME", help="'none', 'powersgd rank=16', ..."
    )
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    for name, step in {"steps": 1, "seeds": 1, "hidden": WIDTHS}.items():
        if (number := getattr(given, name)) < 1 or number % step:
            parser.error(f"--{name} {number}: must be a positive {f'multiple of {step}' if step > 1 else 'number'}")
    if not 0 < given.across < inf:
        parser.error(f"--across {given.across:g}: must be more than 0, and finite")
    try:
        methods = {name: method(name) for name in given.methods}
    except argparse.ArgumentTypeError as error:
        parser.error(f"--methods {error}; known are {', '.join(map(repr, METHODS))}, or as in 'powersgd rank=16'")
    return given, methods


def main() -> None:
    given, methods = parse()
    address = "10.77.0.1" if given.what == "speed" else "127.0.0.1"
    results = given.out / f"{given.what}.jsonl"
    if given.rank is not None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"tcp://{address}:29523", rank=given.rank, world_size=RANKS)
        seeds = range(given.first, given.first + given.seeds)
        work = Work(given.rank, given.hidden, given.out)
        for line in {"quality": quality, "speed": speed}[given.what](work, methods, seeds, given.steps):
            if given.rank == 0:
                with results.open("a") as file:
                    print(json.dumps(line), file=file)
        dist.destroy_process_group()
        return
    given.out.mkdir(parents=True, exist_ok=True)
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.compress", *sys.argv[1:], "--rank"]
    with machines(given.across, 10_000, RANKS) if given.what == "speed" else nullcontext() as names:
        within = [["ip", "netns", "exec", name] for name in names] if names else [[]] * RANKS
        there = os.environ | {"OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": "stow"} if names else {})
        ranks = [subprocess.Popen([*within[rank], *command, str(rank)], env=there) for rank in range(RANKS)]
        codes = [rank.wait() for rank in ranks]
        assert not any(codes), "a rank has failed"
    summed_up([json.loads(line) for line in results.read_text().splitlines()], given.out)


if __name__ == "__main__":
    main()
