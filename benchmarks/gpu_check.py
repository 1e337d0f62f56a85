"""The campaign on a machine with an accelerator: three calls, which end in time and lose nothing that was found.

    python -m deepstow.benchmarks.gpu_check PART --out FOLDER [--seconds 540] [--known FILE] [--rehearse [--patience 4]]

A part (see ``PARTS``) is a list of steps, the most valuable first. Each step is a process with its own time limit; at
the limit faulthandler prints where it was, and the process is killed with all that it started. Lines of JSON that a
step prints are copied into ``results.jsonl`` at once. A step that succeeded according to that file or to ``--known`` is
not run again, unless a machine has to be prepared by it. No step starts that has less than half of its time left. At
the end a table says what was found and which bars hold (``gpu_bars.py``), and the part's folder is packed into one tar.

``--rehearse`` runs the same steps with the smallest models on any machine, to find mistakes before time on a GPU is
spent. Its rates are kept apart from those of the machine.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepstow.benchmarks import gpu_bars
from deepstow.trainer.distributed.ranks import Ranks, settle_environment
from deepstow.trainer.machine.probe import cores

REPO = Path(__file__).resolve().parent.parent
BEGAN_S = time.monotonic()
LARGEST_FILE = 2 << 20  # larger files stay on the machine
GRACE_S = 10  # for faulthandler to print the stacks
ENDING_S = 15  # to kill what is left, and to pack
RECORDED = REPO / "benchmarks" / "records" / "gpu" / "results.jsonl"
HOST = "104GiB"  # of 128: plans for 6.7 B take 79 to 89, and loading the model 13 beside that


@dataclass(frozen=True, slots=True)
class Step:
    """A command for Python, and how long it may run. ``always``: it prepares the machine, which may be another one each
    time; ``beside``: the next steps run while it does.
    """

    name: str
    limit_s: float
    command: tuple[str, ...]
    always: bool = False
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """``real`` or with the smallest models; ``out``: the part's folder; ``known``: files of earlier results."""

    real: bool
    out: Path
    known: tuple[Path, ...]
    patience: float = 1.0  # times as long as their limits may steps take


def step(name: str, limit_s: float, words: str, *more: str, **how: bool) -> Step:
    return Step(name, limit_s, (*words.split(), *more), **how)


BUILD = (
    "from deepspeed.ops.op_builder import CPUAdamBuilder; from deepstow.trainer.distributed import deepspeed_ops; "
    "deepspeed_ops.clear_abandoned_builds(); CPUAdamBuilder().load(verbose=True)"
)
MEASURE, ENGINE = "-m deepstow.benchmarks.gpu_measure", "-m deepstow.benchmarks.gpu_engine"


def prepared(call: Call, grow_s: float) -> Iterator[Step]:
    """Host memory that is there, and rates where plans look for them."""
    yield step("memory", grow_s, f"{MEASURE} --grow {'112GiB' if call.real else '64MiB'}", always=True)
    how = "" if call.real else "--quick "
    yield step("rates", 80, f"{MEASURE} --rates {how}--known", *map(str, call.known), always=True)


def built(limit_s: float) -> Step:
    """DeepSpeed's extension for the update on the host, which peers use, compiled while other steps run."""
    return step("build", limit_s, "-c", BUILD, always=True, beside=True)


def contender(call: Call, tokens: int, name: str, limit_s: float, words: str = "") -> Step:
    """One contender at 6.7 B in rows of 2,048 tokens, blocks recomputed."""
    work, budget = "--model 6.7b --length 2048", f"--gpu-memory 24GiB --host-memory {HOST}"
    if not call.real:
        work, budget = "--model tiny --length 32", "--gpu-memory 4MiB --tensors"
        budget = budget if name in (gpu_bars.OURS, gpu_bars.PLAIN) else "--gpu-memory 2GiB"  # buckets as they are
    title = f"{tokens}k, {name}{f' {words.strip()}' if words else ''}".replace(" --gpu-memory", " in")
    words = f"{MEASURE} {work} {budget} --rows {tokens // 2} --subject {name} {words}"
    return step(title, limit_s, words)


def exactness(call: Call) -> Iterator[Step]:
    """The machine; exactness with pauses on the streams while DeepSpeed's extension is built; noise; attention."""
    seconds, few, widths = ((90, 30, 45, 45), 6, "") if call.real else ((20, 10, 10, 10), 1, " --model llama")
    yield from prepared(call, 50)
    yield step("machine", 70, f"{MEASURE} --pin {'1,40' if call.real else '0.01,0.02'}")
    yield built(240)
    yield step("grid", 110, f"{ENGINE} --wide 0 --cases {120 if call.real else 4} --seconds {seconds[0]}")
    yield step("noise", 50, f"{ENGINE} --wide {few} --cases {10 * few} --noise --seconds {seconds[1]}{widths}")
    yield step("saved on the host", 65, f"{ENGINE} --wide 0 --cases 0 --saved --seconds {seconds[2]}")
    yield step("real widths", 65, f"{ENGINE} --wide {20 if call.real else 1} --cases 0 --seconds {seconds[3]}{widths}")
    model = f"--model {'1.3b --rows 4' if call.real else 'tiny --length 32'} --subject plain --steps 8"
    yield step("with cuDNN's attention", 40, f"{MEASURE} {model}")
    yield step("without cuDNN's attention", 40, f"{MEASURE} {model} --without-cudnn")


def eight(call: Call) -> Iterator[Step]:
    """6.7 B at 8k tokens in 24 GiB: ours, with one profiled step, beside the peers that are strongest there."""
    yield from prepared(call, 30)
    yield built(150)
    yield contender(call, 8, "plain", 65)
    profile = f"--profile {call.out / 'step.json.gz'}"
    yield replace(contender(call, 8, "ours-budget", 125, profile), name="8k, ours-budget")
    yield contender(call, 8, "superoffload", 90)
    yield contender(call, 8, "superoffload-host", 105)
    yield contender(call, 8, "deepspeed-zero2", 105)


def sixteen(call: Call) -> Iterator[Step]:
    """6.7 B at 16k tokens: ours beside plain; ours in 12 GiB; FSDP2, torchao."""
    yield from prepared(call, 40)
    yield contender(call, 16, "ours-budget", 120)
    yield contender(call, 16, "plain", 70)
    yield contender(call, 8, "ours-budget", 115, "--gpu-memory 12GiB" if call.real else "--gpu-memory 2MiB")
    yield contender(call, 16, "fsdp2", 105)
    yield contender(call, 16, "torchao", 50)


def linear(call: Call) -> Iterator[Step]:
    """Routes of linear layers."""
    yield from prepared(call, 40)
    work = "1.3b --dtype bf16 --tokens 8192 --rounds 2" if call.real else "tiny --tokens 64 --rounds 1"
    words = f"launch/bench.py linear --model {work} --accumulation 2 --out"
    yield step("linear", 400, words, str(call.out / "linear"))


def recompute(call: Call) -> Iterator[Step]:
    """What forward keeps for backward."""
    yield from prepared(call, 40)
    names = "plain,ours-selective,ours-selective-host,ours-full,ours-auto-50,hf-checkpointing,hf-checkpointing-host"
    work = f"{'1.3b --tokens 4096' if call.real else 'tiny --tokens 64'} --rounds 1 --subjects {names}"
    for attention in ("sdpa", "eager"):
        words = f"launch/bench.py recompute --model {work} --attention {attention} --out"
        yield step(f"recompute, {attention}", 220, words, str(call.out / attention))


def compute(call: Call) -> Iterator[Step]:
    """Attention, compiled blocks, fused kernels; rows packed of four documents."""
    yield from prepared(call, 40)
    work = "1.3b --dtype bf16 --length 4096" if call.real else "tiny --subjects plain,plain-varlen,ours-streamed"
    words = f"launch/bench.py compute --model {work} --rows 1 --documents 4 --rounds 1 --steps 3 --out"
    yield step("compute", 400, words, str(call.out / "compute"))


def largest(call: Call) -> Iterator[Step]:
    """The largest model that can be trained exactly on this device and host."""
    yield from prepared(call, 40)
    room = f"--gpu-memory 76GiB --host-memory {HOST}"
    if not call.real:  # one block fits, two do not
        room = "--gpu-memory 1536MiB --tensors --host-memory 9GiB --length 32 --most-blocks 3"
    yield step("largest", 400, f"{MEASURE} --model largest {room}")


PARTS: Mapping[str, Callable[[Call], Iterator[Step]]] = {
    "1": exactness, "2": eight, "3": sixteen, "linear": linear, "recompute": recompute, "largest": largest,
    "compute": compute,
}  # fmt: skip


def results_in(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The lines of files of results, which need not exist."""
    return [json.loads(line) for path in files if path.exists() for line in path.read_text().splitlines()]


def succeeded(rows: Sequence[Mapping[str, Any]]) -> set[tuple[str, str]]:
    """Part and step of each success."""
    return {(row["part"], row["step"]) for row in rows if row.get("rc") == 0}


def run(part: str, step: Step, limit_s: float, out: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run a step to its end or its limit. Returns its line of ``results.jsonl``, which also gets what it finds."""
    log = out / f"{step.name.replace(' ', '-').replace(',', '')}.txt"
    began, last = time.monotonic(), ""
    process = subprocess.Popen(
        [sys.executable, *step.command], cwd=REPO, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    with contextlib.suppress(OSError):  # if memory runs out, the step is killed and not this process
        Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
    timer = threading.Timer(limit_s, _end, [process])
    timer.start()
    assert process.stdout is not None
    with log.open("w", buffering=1) as file, (out.parent / "results.jsonl").open("a", buffering=1) as results:
        for line in process.stdout:
            file.write(line)
            last = line.strip() or last
            if (finding := _found(line)) is not None:
                results.write(json.dumps({"part": part, "step": step.name, "found": finding}) + "\n")
        rc = process.wait()
        timer.cancel()
        _kill(process, signal.SIGKILL)
        seconds = round(time.monotonic() - began, 1)
        row = {"part": part, "step": step.name, "rc": rc, "seconds": seconds, "limit_s": limit_s, "last": last}
        results.write(json.dumps(row) + "\n")
    print(f"{step.name}: exit {rc} after {seconds:.0f} s of {limit_s:.0f}", flush=True)
    return row


def _found(line: str) -> dict[str, Any] | None:
    """A line of JSON; None for other lines, as those of libraries."""
    try:
        finding = json.loads(line) if line.startswith("{") else None
    except ValueError:
        return None
    return finding if isinstance(finding, dict) else None


def _end(process: subprocess.Popen[str]) -> None:
    """Let faulthandler print the stacks, then kill the process with all that it started."""
    _kill(process, signal.SIGABRT)
    time.sleep(GRACE_S)
    _kill(process, signal.SIGKILL)


def _kill(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def packed(out: Path, part: str) -> None:
    """Pack the part's folder into a tar beside it; the names of files that are too large go into ``left_out.txt``."""
    left_out = [path for path in out.rglob("*") if path.is_file() and path.stat().st_size > LARGEST_FILE]
    (out / "left_out.txt").write_text("".join(f"{path.relative_to(out)}\n" for path in left_out))
    with tarfile.open(out.parent / f"gpu-{part}.tar.gz", "w:gz") as tar:
        tar.add(out, arcname=part, filter=lambda info: info if info.size <= LARGEST_FILE else None)


def around(given: argparse.Namespace) -> dict[str, str]:
    """The environment of the steps. A rehearsal's home is its own, so that its rates are nobody's."""
    settle_environment(Ranks(), cores()[1])
    variables = {**os.environ, "PYTHONPATH": f"{REPO}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    variables["PYTHONFAULTHANDLER"] = "1"
    if given.rehearse:
        variables.setdefault("TORCH_EXTENSIONS_DIR", str(Path.home() / ".cache" / "torch_extensions" / "rehearsal"))
        variables["HOME"] = str(given.out / "home")
        (given.out / "home").mkdir(parents=True, exist_ok=True)
    return variables


def part_run(
    part: str, call: Call, deadline: float, done: set[tuple[str, str]], environment: Mapping[str, str]
) -> bool:
    """Run the steps of a part that are not done. False: one failed, or was left out."""
    fine, beside = True, list[threading.Thread]()
    ends: list[dict[str, Any]] = []
    for step in PARTS[part](call):
        most_s = call.patience * step.limit_s
        limit_s = min(most_s, deadline - time.monotonic() - ENDING_S)
        if (part, step.name) in done and not step.always:
            print(f"{step.name}: recorded already", flush=True)
        elif limit_s < most_s / 2:
            print(f"not run, no time left: {step.name}", flush=True)
            fine = False
        elif step.beside:
            thread = threading.Thread(
                target=lambda one=step, most=limit_s: ends.append(run(part, one, most, call.out, environment))
            )
            thread.start()
            beside.append(thread)
        else:
            ends.append(run(part, step, limit_s, call.out, environment))
    for thread in beside:
        thread.join()
    return fine and not any(end["rc"] for end in ends)


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command; 1 if a step failed or was not run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=[*PARTS, "all"])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check"))
    parser.add_argument("--known", type=Path, default=RECORDED, help="results of earlier calls")
    parser.add_argument("--seconds", type=float, default=540.0, help="for the call (default 540)")
    parser.add_argument("--rehearse", action="store_true", help="the smallest models, on any machine")
    parser.add_argument("--patience", type=float, default=1.0, metavar="X", help="times as long may each step take")
    given = parser.parse_args(argv)
    given.out = given.out.resolve()
    deadline = time.monotonic() + given.seconds if argv is not None else BEGAN_S + given.seconds
    own_results = given.out / "results.jsonl"
    known = (own_results,) if given.rehearse else (given.known, own_results)
    environment, fine = around(given), True
    calls = {
        part: Call(not given.rehearse, given.out / part, known, given.patience)
        for part in (PARTS if given.part == "all" else [given.part])
    }
    for part, call in calls.items():
        call.out.mkdir(parents=True, exist_ok=True)
        fine &= part_run(part, call, deadline, succeeded(results_in(known)), environment)
    every = [(part, step.name) for part, call in calls.items() for step in PARTS[part](call)]
    text = gpu_bars.summary(results_in(known), every)
    (given.out / "summary.txt").write_text(text + "\n")
    print(f"\n{text}", flush=True)
    for part, call in calls.items():
        packed(call.out, part)
    return int(not fine)


if __name__ == "__main__":
    sys.exit(main())
