"""The checks to run on a machine with an accelerator, in parts that end in time and lose nothing that was found.

    python benchmarks/gpu_check.py PART --out FOLDER [--seconds 480] [--known results.jsonl] [--rehearse]

A part (see ``PARTS``) is a list of steps, the most valuable first. Each step is a process with its own time limit; at
the limit faulthandler prints where it was, and the process is killed with all that it started. Lines of JSON that a
step prints are copied into ``results.jsonl`` at once. A step that succeeded according to ``--known`` is not run again,
and no step starts that the part has no time left for. At the end a table is printed and the part's folder is packed
into one tar.

``--rehearse`` runs the same steps with the smallest models on any machine, to find mistakes before time on a GPU is
spent.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
LARGEST_FILE = 2 << 20  # larger files stay on the machine
GRACE_S = 10  # for faulthandler to print the stacks
PEERS = ("ours-budget", "deepspeed-zero2", "superoffload", "deepspeed-zero3", "fsdp2", "torchao")


@dataclass(frozen=True, slots=True)
class Step:
    """A command for Python, and how long it may run."""

    name: str
    limit_s: float
    command: tuple[str, ...]


def step(name: str, limit_s: float, words: str, *more: str) -> Step:
    return Step(name, limit_s, (*words.split(), *more))


def models(real: bool) -> tuple[str, str]:
    """The large model and the small one."""
    return ("6.7b", "1.3b") if real else ("tiny", "tiny")


def machine(real: bool, out: Path) -> Iterator[Step]:
    """(a) What the machine is, and how fast its parts are."""
    yield step("machine", 120, f"-m deepstow.benchmarks.gpu_measure --pin {'1,40' if real else '0.01'}")
    yield step("doctor", 60, "launch/doctor.py --json", str(out / "doctor.json"))
    yield step("rates", 120, "launch/doctor.py --rates --out", str(out / "rates.json"))
    yield step("build", 300, "launch/doctor.py --build")


def engine(real: bool, out: Path) -> Iterator[Step]:
    """(b) Exactness: models of a real width, the grid with pauses on the streams, saved tensors on the host."""
    script = "-m deepstow.benchmarks.gpu_engine" + ("" if real else " --device cpu")
    yield step("real widths", 200, f"{script} --wide {20 if real else 1} --cases 0")
    yield step("grid", 220, f"{script} --wide 0 --cases {120 if real else 4}")
    yield step("saved on the host", 200, f"{script} --wide 0 --cases 0 --saved")


def planned(real: bool, out: Path) -> Iterator[Step]:
    """(c) Predicted against measured memory and time, at three budgets."""
    model, length = models(real)[0], 2048 if real else 32
    for budget in ("12GiB", "24GiB", "60GiB") if real else ("1500KiB", "4MiB", "64MiB"):
        words = f"-m deepstow.benchmarks.gpu_measure --model {model} --gpu-memory {budget} --length {length}"
        yield step(f"{model} in {budget}", 150, words)


def _offload(real: bool, model: str, rows: int, names: Sequence[str], limit_s: float, out: Path) -> Iterator[Step]:
    """One contender per step; rows of 2,048 tokens."""
    dtype, length, budget = ("bf16", 2048, "24GiB") if real else ("fp32", 32, "1500KiB")
    work = f"--model {model} --dtype {dtype} --rows {rows} --length {length} --recompute --rounds 1 --steps 3"
    for name in names:
        words = f"launch/bench.py offload {work} --subjects {name} --gpu-memory {budget} --out"
        yield step(f"{model}, {2 * rows}k, {name}", limit_s, words, str(out / f"{model}-{2 * rows}k-{name}"))


def peers(real: bool, out: Path) -> Iterator[Step]:
    """(d) The peers where they are strongest: 8k tokens per step, clipping, 24 GiB."""
    large, small = models(real)
    yield from _offload(real, large, 4, PEERS, 150, out)
    yield from _offload(real, small, 4, ("plain", "ours-resident"), 90, out)


def more_peers(real: bool, out: Path) -> Iterator[Step]:
    """(d) Other numbers of tokens."""
    for model in dict.fromkeys(models(real)):
        for rows in (1, 8, 16):
            yield from _offload(real, model, rows, ("ours-budget", "deepspeed-zero2", "deepspeed-zero3"), 150, out)


def linear(real: bool, out: Path) -> Iterator[Step]:
    """(e) Routes of linear layers."""
    work = "--dtype bf16 --tokens 8192 --rounds 2" if real else "--tokens 64 --rounds 1"
    words = f"launch/bench.py linear --model {models(real)[1]} {work} --accumulation 2 --out"
    yield step("linear", 400, words, str(out / "linear"))


def recompute(real: bool, out: Path) -> Iterator[Step]:
    """(f) What forward keeps for backward."""
    names = "plain,ours-selective,ours-selective-host,ours-full,ours-auto-50,hf-checkpointing,hf-checkpointing-host"
    work = f"--model {models(real)[1]} --tokens {4096 if real else 64} --rounds 1 --subjects {names}"
    for attention in ("sdpa", "eager"):
        words = f"launch/bench.py recompute {work} --attention {attention} --out"
        yield step(f"recompute, {attention}", 220, words, str(out / attention))


def compute(real: bool, out: Path) -> Iterator[Step]:
    """(h) Attention, compiled blocks, fused kernels; rows packed of four documents."""
    work = "--dtype bf16 --rows 1 --length 4096" if real else "--rows 1 --subjects plain,plain-varlen,ours-streamed"
    words = f"launch/bench.py compute --model {models(real)[1]} {work} --documents 4 --rounds 1 --steps 3 --out"
    yield step("compute", 470, words, str(out / "compute"))


def largest(real: bool, out: Path) -> Iterator[Step]:
    """(g) The largest model that can be trained exactly on this device and host."""
    options = "largest --gpu-memory 76GiB --length 2048" if real else "tiny --gpu-memory 64MiB --length 32"
    yield step("largest", 400, f"-m deepstow.benchmarks.gpu_measure --model {options}")


PARTS: Mapping[str, Callable[[bool, Path], Iterator[Step]]] = {
    "machine": machine, "engine": engine, "plan": planned, "peers": peers, "more-peers": more_peers, "linear": linear,
    "recompute": recompute, "largest": largest, "compute": compute,
}  # fmt: skip


def succeeded(known: Path) -> set[tuple[str, str]]:
    """Part and step of each success in a ``results.jsonl``, which need not exist."""
    rows = map(json.loads, known.read_text().splitlines() if known.exists() else ())
    return {(row["part"], row["step"]) for row in rows if row.get("rc") == 0}


def run(part: str, step: Step, limit_s: float, out: Path) -> dict[str, Any]:
    """Run a step to its end or its limit. Returns its line of ``results.jsonl``, which also gets what it finds."""
    log = out / f"{step.name.replace(' ', '-').replace(',', '')}.txt"
    began, last = time.monotonic(), ""
    environment = {**os.environ, "PYTHONPATH": f"{REPO}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", *step.command], cwd=REPO, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    timer = threading.Timer(limit_s, _end, [process])
    timer.start()
    assert process.stdout is not None
    with log.open("w", buffering=1) as file, (out.parent / "results.jsonl").open("a", buffering=1) as results:
        for line in process.stdout:
            file.write(line)
            last = line.strip() or last
            if line.startswith("{"):
                results.write(json.dumps({"part": part, "step": step.name, "found": json.loads(line)}) + "\n")
        rc = process.wait()
        timer.cancel()
        _kill(process)
        seconds = round(time.monotonic() - began, 1)
        row = {"part": part, "step": step.name, "rc": rc, "seconds": seconds, "limit_s": limit_s, "last": last}
        results.write(json.dumps(row) + "\n")
    print(f"{step.name}: exit {rc} after {seconds:.0f} s of {limit_s:.0f}", flush=True)
    return row


def _end(process: subprocess.Popen[str]) -> None:
    """Let faulthandler print the stacks, then kill the process with all that it started."""
    process.send_signal(signal.SIGABRT)
    time.sleep(GRACE_S)
    _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def packed(out: Path, part: str) -> None:
    """Pack the part's folder into a tar beside it; the names of files that are too large go into ``left_out.txt``."""
    left_out = [path for path in out.rglob("*") if path.is_file() and path.stat().st_size > LARGEST_FILE]
    (out / "left_out.txt").write_text("".join(f"{path.relative_to(out)}\n" for path in left_out))
    with tarfile.open(out.parent / f"gpu-{part}.tar.gz", "w:gz") as tar:
        tar.add(out, arcname=part, filter=lambda info: info if info.size <= LARGEST_FILE else None)


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command; 1 if a step failed or was not run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=[*PARTS, "all"])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs/gpu-check")))
    parser.add_argument("--known", type=Path, default=REPO / "benchmarks" / "records" / "gpu" / "results.jsonl")
    parser.add_argument("--seconds", type=float, default=480.0, help="for the part (default 480)")
    parser.add_argument("--rehearse", action="store_true", help="the smallest models, on any machine")
    given = parser.parse_args(argv)
    known = set[tuple[str, str]]() if given.rehearse else succeeded(given.known)
    deadline, ends, left = time.monotonic() + given.seconds, [], []
    for part in PARTS if given.part == "all" else [given.part]:
        out = given.out / part
        out.mkdir(parents=True, exist_ok=True)
        for step in PARTS[part](not given.rehearse, out):
            limit_s = min(step.limit_s, deadline - time.monotonic() - GRACE_S)
            if (part, step.name) in known:
                print(f"{step.name}: recorded already", flush=True)
            elif limit_s < step.limit_s / 4:
                left.append(step.name)
            else:
                ends.append(run(part, step, limit_s, out))
        packed(out, part)
    for end in ends:
        print(f"{end['part']:<12} {end['step']:<34} exit {end['rc']:>4} {end['seconds']:>7.1f} s  {end['last'][:80]}")
    for name in left:
        print(f"not run, no time left: {name}", flush=True)
    return int(bool(left) or any(end["rc"] for end in ends))


if __name__ == "__main__":
    sys.exit(main())
