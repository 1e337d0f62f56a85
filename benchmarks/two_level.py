"""Are exchanges inside and across machines as fast, one against the other, as predicted? Two machines of two ranks.

    python -m benchmarks.two_level --across 100 --inside 600 --rounds 3 --out FOLDER        (as root; needs ip and tc)

Each machine is a network namespace. The kernel limits what its interface sends (``tc tbf``), and what its loopback
sends, over which its two ranks reach each other. All ranks exchange one message in a ring (torch's all-reduce), and in
phases with 1, 2 and 4 slices, in turn. The seconds of a round are the median of its repetitions on the slowest rank.
The prediction knows two rates, which are measured before: of a message that each rank swaps with its neighbour, and of
one with the rank at its place of the other machine, all at a time. Namespaces are removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from strategies.engine.ranks.two_level import TwoLevel
from strategies.planner.two_level import Machines

COUNT, HERE, SLICES = 2, 2, (1, 2, 4)
REPEATED, MIB = 3, 1 << 20


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def machines(across: float, inside: float, count: int = COUNT) -> Iterator[list[str]]:
    """Names of the namespaces; each has the address 10.77.0.(number + 1), and two limited interfaces."""
    names = [f"stow{number}" for number in range(count)]
    try:
        run("ip", "link", "add", "stowbr", "type", "bridge")
        run("ip", "link", "set", "stowbr", "up")
        for number, name in enumerate(names):
            run("ip", "netns", "add", name)
            run("ip", "link", "add", f"out{number}", "type", "veth", "peer", "name", "stow", "netns", name)
            run("ip", "link", "set", f"out{number}", "master", "stowbr", "up")
            within = ("ip", "netns", "exec", name)
            run(*within, "ip", "addr", "add", f"10.77.0.{number + 1}/24", "dev", "stow")
            for link, megabits in (("lo", inside), ("stow", across)):
                run(*within, "ip", "link", "set", link, "up")
                limits = ("rate", f"{megabits}mbit", "burst", "256kb", "latency", "500ms")
                run(*within, "tc", "qdisc", "add", "dev", link, "root", "tbf", *limits)
        yield names
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "del", name), capture_output=True, check=False)
        subprocess.run(("ip", "link", "del", "stowbr"), capture_output=True, check=False)


def said_by_first(module: str, names: Sequence[str]) -> str:
    """What the first rank prints. Each runs ``module`` with this process's arguments and its number, in a namespace."""
    command = [sys.executable, "-m", module, *sys.argv[1:], "--rank"]
    there = os.environ | {"GLOO_SOCKET_IFNAME": "stow", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *command, str(rank)],
            env=there, stdout=subprocess.PIPE if rank == 0 else None, text=True,
        )
        for rank, name in enumerate(names)
    ]  # fmt: skip
    said, _ = ranks[0].communicate()
    assert not any(rank.wait() for rank in ranks), "a rank has failed"
    return said


def write(lines: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Print ``lines``, and write them as ``results.jsonl``."""
    text = "\n".join(map(json.dumps, lines)) + "\n"
    print(text, end="")
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.jsonl").write_text(text)


def work(rank: int, num_bytes: int, rounds: int) -> None:
    """One rank; the first prints the seconds of each round, by candidate."""
    dist.init_process_group("gloo", init_method="tcp://10.77.0.1:29519", rank=rank, world_size=COUNT * HERE)
    flat = torch.ones(num_bytes // 4)
    ways: dict[str, Callable[[], Any]] = {"ring": partial(dist.all_reduce, flat)}
    for slices in SLICES:
        two_level = TwoLevel(HERE, slices)
        received = torch.empty(two_level.room(flat.numel()))
        ways[f"slices {slices}"] = partial(two_level.all_reduce, flat, received)
    for each in ways.values():
        each()  # connects the ranks
    for road, distance, share in (("inside", 1, HERE), ("across", HERE, COUNT * HERE)):
        some = flat[: flat.numel() // share]
        seconds = statistics.median(_seconds(partial(_swap, some, rank ^ distance), flat) for _ in range(REPEATED))
        if rank == 0:
            print(json.dumps({"road": road, "bytes_per_s": round(some.nbytes / seconds)}), flush=True)
    for number in range(rounds):
        for name, each in ways.items():
            seconds = statistics.median(_seconds(each, flat) for _ in range(REPEATED))
            if rank == 0:
                print(json.dumps({"candidate": name, "round": number, "seconds": round(seconds, 3)}), flush=True)
    dist.destroy_process_group()


def _swap(some: torch.Tensor, other: int) -> None:
    got = torch.empty_like(some)
    for each in (dist.isend(some, other), dist.irecv(got, other)):
        assert each is not None
        each.wait()
    some.copy_(got * COUNT * HERE)


def _seconds(exchange: Callable[[], Any], flat: torch.Tensor) -> float:
    flat.fill_(1.0)
    dist.barrier()
    began = time.perf_counter()
    exchange()
    took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    assert float(flat[0]) == float(flat[flat.numel() // COUNT // HERE - 1]) == COUNT * HERE
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def predicted(num_bytes: int, inside: float, across: float) -> Mapping[str, float]:
    """Seconds by candidate, where all ranks send so many bytes per second at a time."""
    known = Machines(COUNT, HERE, inside, across)
    return {"ring": known.flat(num_bytes)} | {f"slices {each}": known.phases(num_bytes, each) for each in SLICES}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--across", type=float, default=100.0, help="Mbit/s that a machine sends to the other")
    parser.add_argument("--inside", type=float, default=600.0, help="Mbit/s of its loopback")
    parser.add_argument("--mebibytes", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    num_bytes = given.mebibytes * MIB
    if given.rank is not None:
        work(given.rank, num_bytes, given.rounds)
        return
    with machines(given.across, given.inside) as names:
        said = said_by_first("benchmarks.two_level", [names[rank // HERE] for rank in range(COUNT * HERE)])
    found = [json.loads(line) for line in said.splitlines()]
    rates = {line["road"]: line["bytes_per_s"] for line in found if "road" in line}
    expected = predicted(num_bytes, **rates)
    measured = {name: [line["seconds"] for line in found if line.get("candidate") == name] for name in expected}
    order = sorted(measured, key=lambda name: statistics.median(measured[name]))
    lines: list[Any] = [{"limits in Mbit/s": [given.inside, given.across], "MiB": given.mebibytes, "measured": rates}]
    lines += [{"candidate": each, "measured": measured[each], "predicted": round(expected[each], 3)} for each in order]
    lines.append({"predicted order is the measured one": order == sorted(expected, key=lambda name: expected[name])})
    write(lines, given.out)


if __name__ == "__main__":
    main()
