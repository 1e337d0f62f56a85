"""The memory engine and saved tensors on the host, on an accelerator: exactness, and races with pauses on the streams.

    python -m benchmarks.gpu_engine --out folder [--wide 20] [--cases 120] [--saved] [--device cpu]

Sites that update on the device must equal plain training on the same device bit for bit. Where the CPU's kernel
updates, the largest difference is reported relative to the largest number of the tensor. Before each comparison plain
training is compared with itself: where that differs nothing can be said. ``--device cpu`` tries the script, and
``--device sim`` is the simulated accelerator of the tests, whose device and host have the same kernels. Each case is a
line of JSON, printed as it ends.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strategies.engine.checkpointing import recompute, room_of
from strategies.engine.memory import accelerator
from strategies.engine.transfer.transfer import AcceleratorTransfer, Delayed, Lane, Transfer, transfer_for
from tests.helpers import simulated
from tests.helpers.engine import Result
from tests.helpers.grid import BF16, FP32, both, noise, title
from tests.helpers.pairwise import Row
from tests.parity.test_recompute import POLICIES, decided, made, micro_batches, steps
from trainer.planning.plan_for import plan_for
from trainer.verify.differences import repeat_sums

LONGEST_PAUSE = 4096  # rows: about a millisecond, longer than any copy or kernel of these models
LONGEST_DELAYS_US = 300, 100  # of copies and kernels on the simulated device
ROW = 32  # elements, each with a thread of its own: the rest of the device stays free


@cache
def rows_of(device: torch.device) -> tuple[Tensor, Tensor]:
    """What pauses read and write. Never given back, for a pause may still run when its transfer is gone."""
    given, sums = (torch.zeros(LONGEST_PAUSE, ROW, dtype=torch.int64, device=device) for _ in range(2))
    return given, sums


class Paused(AcceleratorTransfer):
    """Each copy waits a random time on its stream before it starts: what relies on luck fails.

    A pause is a running sum down the rows, which few threads make one row after the other. A kernel that fills the
    device, as a matrix product does, would hold up compute as well, and then nobody would read too early.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._rows = rows_of(device)

    def _copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        length = random.randrange(1, LONGEST_PAUSE)
        given, sums = (rows[:length] for rows in self._rows)
        with self._stream(lane):
            torch.cumsum(given, 0, out=sums)
        super()._copy(lane, target, source)


def worst(expected: Result, found: Result) -> float:
    """Largest difference, relative to the largest number of the same tensor; 0.0 means every bit is equal."""
    largest = 0.0
    for name, first in expected.tensors.items():
        second = found.tensors[name]
        if not torch.equal(first, second):
            scale = first.abs().max().clamp_min(1e-12)
            largest = max(largest, float((first.float() - second.float()).abs().max() / scale), 1e-12)
    return largest


def wide(number: int) -> list[tuple[Row, torch.dtype]]:
    """Cases at a real width, half of them in bf16."""
    same = {"model": "wide", "bucket": "one", "accumulation": 1, "tied": False, "groups": 1, "prefetch": 2}
    found: list[tuple[Row, torch.dtype]] = []
    for dtype, clip, site, weights, park in product(
        (torch.bfloat16, torch.float32), ("tight", "in-backward"), ("device", "streamed", "host"),
        ("resident", "travelling"), ("device", "host"),
    ):  # fmt: skip
        if (site, park) != ("device", "host"):
            row = same | {"clip": clip, "site": site, "weights": weights, "park": park, "recompute": "none"}
            found.append((row | {"transfer": "at-once"}, dtype))
    random.Random(0).shuffle(found)
    return found[:number]


def try_case(row: Row, dtype: torch.dtype, device: str, *, pauses: bool) -> dict[str, Any]:
    """One case; an error is a result."""
    transfer: Transfer = transfer_for(torch.device(device))
    if pauses:
        transfer = Paused(torch.device(device)) if device != "cpu" else Delayed()
    started_s = time.perf_counter()
    record = {"case": title(row), "dtype": str(dtype), "pauses": pauses, "site": dict(row)["site"], "error": ""}
    try:
        record["noise"] = len(noise(row, dtype, device))
        record["worst"] = worst(*both(row, dtype, device, transfer))
    except Exception as error:  # the table shows it, the others still run
        record |= {"worst": float("inf"), "error": f"{type(error).__name__}: {error}"}
    return record | {"seconds": time.perf_counter() - started_s}


def saved_on_host(device: str) -> list[dict[str, Any]]:
    """Gradients with saved tensors on the host and without, against plain training with dropout: bit for bit."""
    batches = [{name: value.to(device) for name, value in batch.items()} for batch in micro_batches()]
    found = []
    for name, attention, dtype, policy in product(
        ("gpt2", "llama"), ("eager", "sdpa"), (torch.float32, torch.bfloat16), POLICIES
    ):
        record = {"case": f"{name} {attention}: {policy}", "dtype": str(dtype), "site": "device", "error": ""}
        try:
            plain, model = (made(name, True, attention, dtype).to(device) for _ in range(2))
            facts = plan_for(model, batch=micro_batches()[0], max_grad_norm=None).facts
            recompute(
                model, decided(facts, POLICIES[policy]), Paused(torch.device(device)) if device != "cpu" else None
            )
            pairs = zip(steps(plain, batches * 2), steps(model, batches * 2), strict=True)
            room = room_of(model)
            unequal = sum(not torch.equal(one[key], two[key]) for one, two in pairs for key in one)
            record |= {"worst": float(unequal), "refused": room.num_refused if room else 0}
        except Exception as error:  # the table shows it, the others still run
            record |= {"worst": float("inf"), "error": f"{type(error).__name__}: {error}"}
        found.append(record)
        print(json.dumps(record), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--wide", type=int, default=20, help="cases at a real width")
    parser.add_argument("--cases", type=int, default=120, help="of the grid, every other one with pauses")
    parser.add_argument("--saved", action="store_true", help="saved tensors on the host")
    kind = accelerator.kind()
    parser.add_argument("--device", default=kind, required=kind is None, help="default: the accelerator")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.device == simulated.NAME:
        simulated.load().delay(LONGEST_DELAYS_US[0], LONGEST_DELAYS_US[1])
    repeat_sums()
    cases = [(row, torch.float32) for row in FP32.rows()] + [(row, torch.bfloat16) for row in BF16.rows()]
    random.Random(0).shuffle(cases)
    todo = [*wide(arguments.wide), *cases[: arguments.cases]]
    records = []
    for number, (row, dtype) in enumerate(todo, start=1):
        records.append(try_case(row, dtype, arguments.device, pauses=number % 2 == 0))
        print(json.dumps(records[-1]), flush=True)
    records += saved_on_host(arguments.device) if arguments.saved else []
    counts = Counter(map(verdict, records))
    for record in records:
        if not verdict(record).endswith("ok"):
            print(f"{record['case']} {record['dtype']}: {record['worst']:.1e} {record['error']}")
    print("; ".join(f"{name}: {number}" for name, number in sorted(counts.items())))
    return 0 if all(name.endswith("ok") for name in counts) else 1


def verdict(record: Mapping[str, Any]) -> str:
    """What a case shows."""
    exact = record["site"] in ("device", "streamed")
    kind = "bit for bit" if exact else "host kernel"
    if record["error"]:
        return f"{kind}: error"
    if record.get("noise"):
        return f"{kind}: plain training differs from itself"
    return f"{kind}: {'ok' if record['worst'] <= (0.0 if exact else 1e-3) else 'DIFFERS'}"


if __name__ == "__main__":
    sys.exit(main())
