"""Runs in which one file operation fails, or all from one on: whoever makes it, in Python, Rust or C++.

``failing.c`` is compiled and preloaded into a server of ranks. An undisturbed run tells its operations; a ``Fault``
names one of them, and the errno that it returns. ``Failing.complaints`` makes a run with it, and what has to follow.
"""

import ctypes
import errno
import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from deepstow.trainer.errors import MEANINGS, ExitCode
from deepstow.trainer.run.checkpoints.checkpoint import complete
from tests.e2e.commands import Result, Server, digest, metrics, write_config, write_jsonl

ERRNOS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOENT)
SCRIPT = "tests/helpers/failing_run.py"
LONGEST_S = 60.0  # of a run that takes one
STEPS, SAVED = 4, 2
MODEL = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
TRAINING = {
    "max_steps": STEPS, "save_strategy": "steps", "save_steps": SAVED, "save_total_limit": 1, "eval_strategy": "steps",
    "eval_steps": 2, "report_to": "tensorboard", "resume_from_checkpoint": "auto",
}  # fmt: skip
FOLLOWED = ("run", "data", "home")  # the run's folder, its data, and what it caches
STARTS = ("fresh", "killed", "over")
CODES = MEANINGS.keys() - {ExitCode.FAILED}


class Operation(NamedTuple):
    """The ``number``-th operation of a ``kind`` on a path, whose first part is a folder that is followed."""

    kind: str
    path: str
    number: int


class Fault(NamedTuple):
    """What fails how: once, or with all that may fail so in the same folder from then on."""

    at: Operation
    error: int
    for_good: bool

    def __str__(self) -> str:
        often = "for good" if self.for_good else "once"
        return f"{self.at.kind} {self.at.path} {self.at.number} {errno.errorcode[self.error]} {often}"


NONE = Fault(Operation("", "", 0), 0, False)


def make_config(case: Path) -> Path:
    """A training that does all that a run does with files, in a second."""
    draw, words = random.Random(0), ["the", "a", "model", "trains", "on", "text", "and", "learns"]
    rows = [{"text": " ".join(draw.choice(words) for _ in range(12))} for _ in range(12)]
    write_jsonl(case / "data" / "text.jsonl", rows)
    data = {"path": str(case / "data" / "text.jsonl"), "max_length": 24, "eval_fraction": 0.3}
    model = {"config": MODEL, "tokenizer": {"train": "bpe", "vocab_size": 300}}
    return write_config(case, model=model, data=data, training=TRAINING)


def operations(case: Path) -> list[tuple[Operation, int]]:
    """What the last run did, in order, with the errno that each was given, or 0."""
    lines = (line.split("\t") for line in (case / "operations").read_text().splitlines())
    return [(Operation(kind, path, int(number)), int(error)) for _, kind, path, number, error in lines]


def bits(run: Path) -> list[str]:
    """The export, and the state of the optimizer in the last checkpoint."""
    states = sorted((run / f"checkpoint-{STEPS}" / "optimizer").glob("*.safetensors"))
    return [digest(run / "export"), *(digest(path.parent) for path in states)]


class Failing:
    """A server of ranks whose runs can fail, and one that nothing failed in."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("cc") is None:
            pytest.skip("there is no C compiler, and what fails is a library in C")
        library, source = folder / "failing.so", Path(__file__).with_name("failing.c")
        command = ["cc", "-O1", "-fPIC", "-shared", "-w", "-o", str(library), str(source), "-ldl", "-lpthread"]
        subprocess.run(command, check=True)
        self._may = ctypes.CDLL(str(library)).failing_may
        self._server, self._case = Server(folder / "ranks", LD_PRELOAD=str(library)), folder / "case"
        self._faults: dict[str, list[Fault]] = {}
        self._kept = {"killed": folder / "killed", "over": folder / "over"}
        config = make_config(self._case)
        self._run(config, NONE, "training.save_total_limit=2").check().quiet()
        self._case.rename(self._kept["killed"])
        for name in (f"checkpoint-{STEPS}", "export"):
            shutil.rmtree(self._kept["killed"] / "run" / name)
        (self._kept["killed"] / "run" / "exit.json").unlink()
        self._run(make_config(self._case)).check().quiet()
        self._bits = bits(self._case / "run")
        self._case.rename(self._kept["over"])

    def close(self) -> None:
        self._server.close()

    def _run(self, config: Path, fault: Fault = NONE, *overrides: str) -> Result:
        case = config.parent
        roots = "\n".join(str(case / name) for name in FOLLOWED)
        at = {"roots": roots, "log": str(case / "operations"), "home": str(case / "home"), **fault.at._asdict()}
        said = json.dumps({**at, "error": fault.error, "for_good": int(fault.for_good)})
        (case / "operations").unlink(missing_ok=True)
        arguments = [said, "--config", str(config), *overrides]
        return self._server.start(1, arguments, case, script=SCRIPT).wait(LONGEST_S)

    def _begun(self, start: str) -> Path:
        """The config of a run that starts anew, goes on after its first checkpoint, or is over; always in one place."""
        if start != "fresh":
            shutil.copytree(self._kept[start], self._case, ignore=shutil.ignore_patterns("output", "operations"))
        return make_config(self._case)

    def may(self, fault: Fault) -> bool:
        """Whether an operation of this kind can return this errno."""
        return bool(self._may(fault.at.kind.encode(), fault.error))

    def faults(self, start: str) -> list[Fault]:
        """Each operation of an undisturbed run with each errno that it can return, once and for good."""
        if start not in self._faults:
            self._run(self._begun(start)).check().quiet()
            tried = [(at, error) for at, _ in operations(self._case) for error in ERRNOS]
            found = [Fault(at, error, for_good) for at, error in tried for for_good in (False, True)]
            self._faults[start] = [fault for fault in found if self.may(fault)]
            shutil.rmtree(self._case)
        return self._faults[start]

    def complaints(self, start: str, fault: Fault, code: int | None = None) -> list[str]:
        """What was not as it has to be, of a run with a ``fault``, which has to end with ``code`` if that is given, and
        of the one after it.
        """
        config = self._begun(start)
        said: list[str] = []
        try:
            result = self._run(config, fault)
            said += _after_fault(config.parent / "run", start, fault, result)
            if code not in (None, result.code):
                said.append(f"ended with {result.code}, not {code}: {result.text}")
            if not any(error for _, error in operations(config.parent)):
                said.append("nothing failed: the operation did not take place")
            again = self._run(config)
            if again.code:
                said.append(f"started again it ends with {again.code}: {again.text}")
            else:
                said += self._after_all(config.parent / "run")
        except AssertionError as error:  # a run that does not end
            said.append(str(error))
        shutil.rmtree(self._case)
        return [f"{start}: {fault}: {each}" for each in said]

    def _after_all(self, run: Path) -> Iterator[str]:
        if bits(run) != self._bits:
            yield "other bits than those of a run that nothing disturbed"
        steps = [record["step"] for record in metrics(run) if "loss" in record]
        if steps != list(range(1, STEPS + 1)):
            yield f"metrics.jsonl has the steps {steps}"


def _after_fault(run: Path, start: str, fault: Fault, result: Result) -> Iterator[str]:
    lines = [line for line in result.err.splitlines() if line]
    if "Traceback" in result.text or result.code not in CODES:
        yield f"ended with {result.code}: {result.text}"
    elif len(lines) != (1 if result.code else 0):
        yield f"ended with {result.code} and {len(lines)} lines of errors: {result.err}"
    file = run / "exit.json"
    of_its_own = any(name in fault.at.path for name in ("exit.json", "run.lock"))  # of a folder in use none is written
    hidden = fault.at.path.startswith("run") and (fault.for_good or of_its_own)
    if file.is_file():
        if (code := json.loads(file.read_text())["code"]) != result.code and not hidden:
            yield f"ended with {result.code}, and exit.json says {code}"
    elif run.is_dir() and not hidden:
        yield f"ended with {result.code}, and there is no exit.json"
    of_a_record = fault.at.kind in ("create", "write") and fault.at.path == "run/metrics.jsonl"
    if of_a_record and f"trained to step {STEPS}" not in result.out:
        yield f"a record has ended it: {result.text}"
    if start != "fresh":
        if not [each for each in complete(run) if each.step >= SAVED]:
            yield "the checkpoint is gone"
        if result.code == 0 and start == "killed" and "resuming from" not in result.out:
            yield f"it has started anew: {result.text}"
