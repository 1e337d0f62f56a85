"""Exactness of the memory engine and of saved tensors on the host, on an accelerator, with pauses on the streams.

    python -m deepstow.benchmarks.gpu_engine [--wide 20] [--cases 120] [--saved] [--noise] [--device cpu] [--seconds 90]

Where the device updates, the result must equal plain training on the same device bit for bit. Where the CPU's kernel
updates, the largest difference relative to the tensor's largest number is reported. Before each comparison plain
training is compared with itself: if that differs, the case says nothing. All of this is with kernels whose sums have
one order (``training.full_determinism``). ``--noise`` instead compares plain training with itself alone, with the
kernels that a run takes by default. Without an accelerator the CPU is the device;
``--device sim`` uses the simulated accelerator of the tests, whose device and host have the same kernels. Each case is
printed as a line of JSON when it ends; after ``--seconds`` none begins.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import product
from math import inf
from typing import Any

import torch
from torch import Tensor

from deepstow.strategies.engine.forward.checkpointing import recompute, room_of
from deepstow.strategies.engine.memory import accelerator
from deepstow.strategies.engine.transfer.transfer import AcceleratorTransfer, Stream, Transfer, transfer_for
from deepstow.trainer.machine.repeated_sums import repeat_sums
from deepstow.trainer.planning.plan_for import plan_for
from tests.helpers import simulated
from tests.helpers.doubles import Delayed
from tests.helpers.engine import Result
from tests.helpers.grid import BF16, FORBIDDEN, FP32, both, noise, title
from tests.helpers.pairwise import Row, Table
from tests.parity.test_recompute import POLICIES, decided, made, micro_batches, steps

LONGEST_PAUSE = 4096  # rows: about a millisecond, longer than any copy or kernel of these models
LONGEST_DELAYS_US = 300, 100  # of copies and kernels on the simulated device
ROW = 32  # elements, one thread each, so that the rest of the device stays free


@cache
def rows_of(device: torch.device) -> tuple[Tensor, Tensor]:
    """Tensors that pauses read and write. Never freed: a pause may still run when its transfer is gone."""
    addends, sums = (torch.zeros(LONGEST_PAUSE, ROW, dtype=torch.int64, device=device) for _ in range(2))
    return addends, sums


class Paused(AcceleratorTransfer):
    """Delays each copy on its stream by a random time, so that a missing wait changes the result.

    A pause is a cumulative sum down the rows, which few threads compute row by row. A kernel that fills the device, as
    a matrix product does, would delay compute as well and so hide a read that comes too early.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._rows = rows_of(device)

    def _copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        length = random.randrange(1, LONGEST_PAUSE)
        addends, sums = (rows[:length] for rows in self._rows)
        with self.on(stream):
            torch.cumsum(addends, 0, out=sums)
        super()._copy(stream, target, source)


def worst(expected: Result, found: Result) -> float:
    """Largest difference, relative to the largest number of the same tensor; 0.0 means every bit is equal."""
    largest = 0.0
    for name, first in expected.tensors.items():
        second = found.tensors[name]
        if not torch.equal(first, second):
            scale = first.abs().max().clamp_min(1e-12)
            largest = max(largest, float((first.float() - second.float()).abs().max() / scale), 1e-12)
    return largest


def wide(number: int, model: str = "wide") -> list[tuple[Row, torch.dtype]]:
    """Cases at a real width, half of them in bf16."""
    same = {"model": model, "bucket": "one", "accumulation": 1, "tied": False, "groups": 1}
    same |= {"prefetch": 2, "ahead": False}
    varied = {
        "site": ("device", "streamed", "host"), "weights": ("resident", "travelling"), "park": ("device", "host"),
        "clip": ("tight", "in-backward"), "recompute": ("none",),
    }  # fmt: skip
    rows = Table(varied, FORBIDDEN, strength=len(varied)).rows()
    cases = list(product((same | row for row in rows), (torch.bfloat16, torch.float32)))
    random.Random(0).shuffle(cases)
    return cases[:number]


def paused(device: str) -> Transfer:
    return Delayed() if device == "cpu" else Paused(torch.device(device))


def tried(record: dict[str, Any], run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """``record`` with what ``run`` found, printed as a line of JSON; an error is a result, too."""
    started_s = time.perf_counter()
    try:
        record |= {"error": "", **run()}
    except Exception as error:  # the others still run
        record |= {"worst": float("inf"), "error": f"{type(error).__name__}: {error}"}
    record["seconds"] = time.perf_counter() - started_s
    print(json.dumps(record), flush=True)
    return record


def try_case(row: Row, dtype: torch.dtype, device: str, *, pauses: bool) -> dict[str, Any]:
    """A case of the grid."""

    def run() -> dict[str, Any]:
        transfer = paused(device) if pauses else transfer_for(torch.device(device))
        return {"noise": len(noise(row, dtype, device)), "worst": worst(*both(row, dtype, device, transfer))}

    return tried({"case": title(row), "dtype": str(dtype), "pauses": pauses, "site": row["site"]}, run)


def try_noise(row: Row, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Plain training against plain training, with the kernels that are selected; ``noise`` counts what differs."""
    return tried(
        {"case": title(row), "dtype": str(dtype), "site": "plain"},
        lambda: {"noise": len(differing := noise(row, dtype, device)), "first": differing[0] if differing else ""},
    )


def try_saved(name: str, attention: str, dtype: torch.dtype, policy: str, device: str) -> dict[str, Any]:
    """Gradients with saved tensors on the host; ``worst`` counts those that differ from plain training."""

    def run() -> dict[str, Any]:
        batches = [{name: value.to(device) for name, value in batch.items()} for batch in micro_batches()]
        plain, model = (made(name, True, attention, dtype).to(device) for _ in range(2))
        facts = plan_for(model, eval_rows=0, batch=micro_batches()[0], max_grad_norm=None).facts
        recompute(model, decided(facts, POLICIES[policy]), None if device == "cpu" else paused(device), device)
        pairs = zip(steps(plain, batches * 2), steps(model, batches * 2), strict=True)
        room = room_of(model)
        unequal = sum(not torch.equal(expected[key], actual[key]) for expected, actual in pairs for key in expected)
        return {"worst": float(unequal), "refused": room.num_refused if room else 0}

    return tried({"case": f"{name} {attention}: {policy}", "dtype": str(dtype), "site": "device"}, run)


def outcome(record: Mapping[str, Any]) -> str:
    """What a case shows."""
    if record["site"] == "plain":
        return f"default kernels: {'error' if record['error'] else 'repeats' if not record['noise'] else 'DIFFERS'}"
    exact = record["site"] in ("device", "streamed")
    kind = "bit for bit" if exact else "host kernel"
    if record["error"]:
        return f"{kind}: error"
    if record.get("noise"):
        return f"{kind}: plain training differs from itself"
    return f"{kind}: {'ok' if record['worst'] <= (0.0 if exact else 1e-3) else 'DIFFERS'}"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--wide", type=int, default=20, help="cases at a real width")
    arguments.add_argument("--model", default="wide", help="that has this width; a smaller one is for rehearsals")
    arguments.add_argument("--cases", type=int, default=120, help="of the grid, every other one with pauses")
    arguments.add_argument("--saved", action="store_true", help="saved tensors on the host")
    arguments.add_argument("--noise", action="store_true", help="plain training against itself, with default kernels")
    arguments.add_argument("--device", default=accelerator.kind() or "cpu", help="default: the accelerator, or the CPU")
    arguments.add_argument("--seconds", type=float, default=inf, help="after so many no case begins (default: all do)")
    return arguments


def trials(given: argparse.Namespace) -> Sequence[Callable[[], dict[str, Any]]]:
    """The cases that are asked for; each prints what it found."""
    cases = [(row, torch.float32) for row in FP32.rows()] + [(row, torch.bfloat16) for row in BF16.rows()]
    random.Random(0).shuffle(cases)
    todo = [*wide(given.wide, given.model), *cases[: given.cases]]
    if given.noise:
        return [partial(try_noise, *case, given.device) for case in todo]
    calls = [partial(try_case, *case, given.device, pauses=number % 2 == 1) for number, case in enumerate(todo)]
    if given.saved:
        saved = product(("gpt2", "llama"), ("eager", "sdpa"), (torch.float32, torch.bfloat16), POLICIES)
        calls += [
            partial(try_saved, name, attention, dtype, policy, given.device) for name, attention, dtype, policy in saved
        ]
    return calls


def main() -> int:
    """1 unless every case is ok. Of ``--noise`` any result is one, and only errors are not."""
    given = parser().parse_args()
    deadline_s = time.perf_counter() + given.seconds
    if given.device == simulated.NAME:
        simulated.load().delay(LONGEST_DELAYS_US[0], LONGEST_DELAYS_US[1])
    if not given.noise:
        repeat_sums()
    calls = trials(given)
    records = [trial() for trial in calls if time.perf_counter() < deadline_s]
    if len(records) < len(calls):
        print(f"no time for {len(calls) - len(records)} of {len(calls)} cases")
    return report(records)


def report(records: Sequence[Mapping[str, Any]]) -> int:
    """Print what is not as it should be, and how often each outcome was; the exit code, 1 if there is no record."""
    counts = Counter(map(outcome, records))
    for record in records:
        if not outcome(record).endswith(("ok", "repeats")):
            difference = record.get("first") or f"{record['worst']:.1e} {record['error']}"
            print(f"{record['case']} {record['dtype']}: {difference}")
    print("; ".join(f"{name}: {number}" for name, number in sorted(counts.items())) or "no case was tried")
    fine = all(name.endswith(("ok", "repeats")) or name == "default kernels: DIFFERS" for name in counts)
    return int(not counts or not fine)


if __name__ == "__main__":
    sys.exit(main())
