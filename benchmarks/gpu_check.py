"""What is asked of a machine with an accelerator, in parts that end in time and lose nothing.

    python benchmarks/gpu_check.py PART --out FOLDER [--seconds 480] [--known results.jsonl] [--rehearse]

A part is a list of steps, most valuable first; ``PARTS`` says which. Each step is a process under a limit of its own,
then killed with all that it started; faulthandler says where it was. What a step finds it prints as lines of
JSON, and each is written into ``results.jsonl`` as it comes. A step that ended well is not run again where ``--known``
holds its end. No step begins that the part has no time for. The table comes last, and everything is in one tar.

``--rehearse``: the same steps with the smallest models, on any machine; what fails there would have failed here.
"""

from __future__ import annotations

import argparse
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
TAR_BYTES = 16 << 20  # what may come back
LARGEST_FILE = 2 << 20
GRACE_S = 10  # for faulthandler to speak
PEERS = ("ours-budget", "deepspeed-zero2", "superoffload", "deepspeed-zero3", "fsdp2", "torchao")


@dataclass(frozen=True, slots=True)
class Step:
    """A command and its limit."""

    name: str
    limit_s: float
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Size:
    """What differs between the machine and the rehearsal: names of models, numbers of cases, options."""

    large: str
    small: str
    cases: int
    grid: int
    budgets: tuple[str, ...]
    peer_budget: str
    tokens: Mapping[str, str]
    length: str
    device: tuple[str, ...]  # options; without them the accelerator is taken


REAL = Size("6.7b", "1.3b", 20, 120, ("12GiB", "24GiB", "60GiB"), "24GiB",
            {"8k": "8192", "2k": "2048", "16k": "16384", "32k": "32768"}, "2048", ())  # fmt: skip
REHEARSED = Size("tiny", "tiny", 1, 4, ("1500KiB", "4MiB", "64MiB"), "1500KiB",
                 {"8k": "64", "2k": "32", "16k": "96", "32k": "128"}, "32", ("--device", "cpu"))  # fmt: skip


def machine(size: Size, out: Path) -> Iterator[Step]:
    """(a) What the machine is, and how fast its parts are."""
    pinned = "1,40" if size is REAL else "0.01"
    yield Step("machine", 120, ("-m", "benchmarks.gpu_machine", "--gib", pinned))
    yield Step("doctor", 60, ("launch/doctor.py", "--json", str(out / "doctor.json")))
    yield Step("rates", 120, ("launch/doctor.py", "--rates", "--out", str(out / "rates.json")))
    yield Step("build", 300, ("launch/doctor.py", "--build"))


def engine(size: Size, out: Path) -> Iterator[Step]:
    """(b) Bits: plain training against itself, real widths, then the grid with pauses on the streams."""
    script = ("-m", "benchmarks.gpu_engine", *size.device, "--out", str(out))
    yield Step("real widths", 200, (*script, "--wide", str(size.cases), "--cases", "0"))
    yield Step("grid", 220, (*script, "--wide", "0", "--cases", str(size.grid)))
    yield Step("saved on the host", 200, (*script, "--wide", "0", "--cases", "0", "--saved"))


def planned(size: Size, out: Path) -> Iterator[Step]:
    """(c) Predicted against measured, at three budgets."""
    for budget in size.budgets:
        command = ("-m", "benchmarks.gpu_plan", "--model", size.large, "--gpu-memory", budget, "--length", size.length)
        yield Step(f"{size.large} in {budget}", 150, (*command, *size.device))


def _offload(size: Size, model: str, subject: str, tokens: str, out: Path) -> tuple[str, ...]:
    dtype = "bf16" if size is REAL else "fp32"
    return (
        "launch/bench.py", "offload", "--model", model, "--dtype", dtype, "--tokens", size.tokens[tokens], "--length",
        size.length, "--recompute", "--rounds", "1", "--steps", "3", "--subjects", subject, "--gpu-memory",
        size.peer_budget, "--out", str(out / f"{model}-{tokens}-{subject}"),
    )  # fmt: skip


def peers(size: Size, out: Path) -> Iterator[Step]:
    """(d) The strongest point first: 8k tokens per step, clipping, 24 GiB; one subject per step."""
    for subject in PEERS:
        yield Step(f"{size.large}, 8k, {subject}", 150, _offload(size, size.large, subject, "8k", out))
    for subject in ("plain", "ours-resident"):
        yield Step(f"{size.small}, 8k, {subject}", 90, _offload(size, size.small, subject, "8k", out))


def more_peers(size: Size, out: Path) -> Iterator[Step]:
    """(d) The other points."""
    for model in dict.fromkeys((size.large, size.small)):
        for tokens in ("2k", "16k", "32k"):
            for subject in ("ours-budget", "deepspeed-zero2", "deepspeed-zero3"):
                yield Step(f"{model}, {tokens}, {subject}", 150, _offload(size, model, subject, tokens, out))


def linear(size: Size, out: Path) -> Iterator[Step]:
    """(e) Routes of linear layers."""
    dtypes, tokens = ("bf16", "2048,8192") if size is REAL else ("fp32", "4")
    options = ("--dtypes", dtypes, "--tokens", tokens, "--step-model", size.small, "--out", str(out / "linear"))
    more = ("--seconds", "0.5", "--steps", "8") if size is REAL else ("--seconds", "1", "--models", "gpt2-xl")
    yield Step("linear", 400, ("launch/bench.py", "linear", *options, *more))


def recompute(size: Size, out: Path) -> Iterator[Step]:
    """(f) Keeping less for backward."""
    tokens = "4096" if size is REAL else "64"
    names = "plain,ours-selective,ours-selective-host,ours-full,ours-auto-50,hf-checkpointing,hf-checkpointing-host"
    for attention in ("sdpa", "eager"):
        yield Step(
            f"recompute, {attention}",
            220,
            ("launch/bench.py", "recompute", "--model", size.small, "--tokens", tokens, "--attention", attention,
             "--rounds", "1", "--subjects", names, "--out", str(out / attention)),
        )  # fmt: skip


def largest(size: Size, out: Path) -> Iterator[Step]:
    """(g) The largest model that trains, exactly, in this device and this host."""
    budget = "76GiB" if size is REAL else "64MiB"
    command = ("-m", "benchmarks.gpu_plan", "--model", "largest" if size is REAL else "tiny", "--gpu-memory", budget)
    yield Step("largest", 400, (*command, "--length", size.length, *size.device))


PARTS: Mapping[str, Callable[[Size, Path], Iterator[Step]]] = {
    "machine": machine,
    "engine": engine,
    "plan": planned,
    "peers": peers,
    "more-peers": more_peers,
    "linear": linear,
    "recompute": recompute,
    "largest": largest,
}


class Results:
    """Lines of JSON, written as they come."""

    def __init__(self, path: Path, known: Path | None) -> None:
        self._path = path
        self.done = set[tuple[str, str]]()
        self.ends: list[dict[str, Any]] = []
        for line in known.read_text().splitlines() if known is not None and known.exists() else ():
            row = json.loads(line)
            if row.get("rc") == 0:
                self.done.add((row["part"], row["step"]))

    def write(self, row: Mapping[str, Any]) -> None:
        """One more, at once."""
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if "rc" in row:
            self.ends.append(dict(row))


def run(part: str, step: Step, limit_s: float, out: Path, results: Results) -> None:
    """One step, to its end or its limit."""
    log = out / f"{step.name.replace(' ', '-').replace(',', '')}.txt"
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": f"{REPO}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", *step.command], cwd=REPO, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    watch = threading.Timer(limit_s, _end, [process])
    watch.start()
    last = ""
    assert process.stdout is not None
    with log.open("w") as file:
        for line in process.stdout:
            file.write(line)
            file.flush()
            last = line.strip() or last
            if line.startswith("{"):
                results.write({"part": part, "step": step.name, "found": json.loads(line)})
    rc = process.wait()
    watch.cancel()
    _kill(process)
    seconds = time.monotonic() - began
    row = {"part": part, "step": step.name, "rc": rc, "seconds": round(seconds, 1), "limit_s": limit_s, "last": last}
    results.write(row)
    print(f"{step.name}: exit {rc} after {seconds:.0f} s of {limit_s:.0f}", flush=True)


def _end(process: subprocess.Popen[str]) -> None:
    """Where is it? Then it is killed, with all that it started."""
    process.send_signal(signal.SIGABRT)
    time.sleep(GRACE_S)
    _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def table(ends: Sequence[Mapping[str, Any]], left: Sequence[str]) -> str:
    """What ran, and what did not."""
    rows = [f"{end['part']:<12} {end['step']:<34} exit {end['rc']:>4} {end['seconds']:>7.1f} s  {end['last'][:80]}"
            for end in ends]  # fmt: skip
    return "\n".join([*rows, *(f"not run, no time left: {name}" for name in left)])


def packed(out: Path, part: str) -> Path:
    """Everything in one file that is not too large to come back; what is left out is named."""
    target = out.parent / f"gpu-{part}.tar.gz"
    left_out = [path for path in out.rglob("*") if path.is_file() and path.stat().st_size > LARGEST_FILE]
    (out / "left_out.txt").write_text("".join(f"{path.relative_to(out)}\n" for path in left_out))
    with tarfile.open(target, "w:gz") as tar:
        tar.add(out, arcname=part, filter=lambda info: info if info.size <= LARGEST_FILE else None)
    if target.stat().st_size > TAR_BYTES:
        with tarfile.open(target, "w:gz") as tar:
            tar.add(out.parent / "results.jsonl", arcname="results.jsonl")
    return target


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command; 1 where a step failed or was not run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=[*PARTS, "all"])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs/gpu-check")))
    parser.add_argument("--known", type=Path, default=REPO / "benchmarks" / "records" / "gpu" / "results.jsonl")
    parser.add_argument("--seconds", type=float, default=480.0, help="for the part (default 480)")
    parser.add_argument("--rehearse", action="store_true", help="the smallest models, on any machine")
    given = parser.parse_args(argv)
    given.out.mkdir(parents=True, exist_ok=True)
    size = REHEARSED if given.rehearse else REAL
    results = Results(given.out / "results.jsonl", None if given.rehearse else given.known)
    deadline, left = time.monotonic() + given.seconds, []
    for part in PARTS if given.part == "all" else [given.part]:
        out = given.out / part
        out.mkdir(exist_ok=True)
        for step in PARTS[part](size, out):
            limit_s = min(step.limit_s, deadline - time.monotonic() - GRACE_S)
            if (part, step.name) in results.done:
                print(f"{step.name}: recorded already", flush=True)
            elif limit_s < step.limit_s / 4:
                left.append(step.name)
            else:
                run(part, step, limit_s, out, results)
        packed(out, part)
    print(table(results.ends, left), flush=True)
    return int(bool(left) or any(end["rc"] for end in results.ends))


if __name__ == "__main__":
    sys.exit(main())
