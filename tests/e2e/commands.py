"""Start the commands as a user does, or faster on ranks that are forked, and look at what they leave behind."""

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deepstow.trainer.distributed.ranks import unused_port

REPO = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PYTHON = str(BIN / "python")
TRAIN = "launch/train.py"
STOPPED_S = 2.0  # between two looks: this process, and the machine with it, stood still

MODEL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "attention_dropout": 0.1,
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What a command said, its exit code, and of a job of the server how much memory its largest rank has had."""

    code: int
    out: str
    err: str
    seconds: float
    peak_mib: int = 0

    @property
    def text(self) -> str:
        return self.out + self.err

    def lines(self, beginning: str) -> list[str]:
        return [line for line in self.text.splitlines() if line.startswith(beginning)]

    def check(self, code: int = 0) -> "Result":
        """This result, if the command ended with ``code`` and without a death in its output."""
        assert self.code == code, f"exit code {self.code}, not {code}\n--- out\n{self.out}\n--- err\n{self.err}"
        assert "terminate called" not in self.text, self.text
        return self

    def quiet(self) -> "Result":
        assert "Traceback" not in self.text, self.text
        return self


def environment(**more: str) -> dict[str, str]:
    """Ours without what a launcher or another test may have left in it."""
    dropped = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    dropped |= {"OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    path = f"{BIN}{os.pathsep}{kept.get('PATH', os.defpath)}"
    return {**kept, "PATH": path, "HF_HUB_OFFLINE": "1", **more}


class Job:
    """A command that runs in a session of its own, so that all of it can be killed at once."""

    def __init__(
        self, pid: int, out: Path, err: Path, poll: Callable[[], int | None], peak_mib: Callable[[], int] = lambda: 0
    ) -> None:
        self.pid, self.poll, self._out, self._err, self._began_s = pid, poll, out, err, time.monotonic()
        self._peak_mib = peak_mib

    @property
    def text(self) -> str:
        """What it has said so far."""
        return self._out.read_text() + self._err.read_text()

    def kill(self) -> None:
        """SIGKILL for every process of the session's group, as a machine that goes down."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait_gone(10.0)

    def orphans(self) -> list[str]:
        """Living processes of the job's group."""
        try:
            os.killpg(self.pid, 0)  # to look at every process of the machine takes longer
        except ProcessLookupError:
            return []
        found = subprocess.run(["ps", "-eo", "pgid=,pid=,stat=,args="], capture_output=True, text=True, check=True)
        rows = [line.split(None, 3) for line in found.stdout.splitlines()]
        return [" ".join(row) for row in rows if row[0] == str(self.pid) and not row[2].startswith("Z")]

    def wait_gone(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while self.orphans():
            assert time.monotonic() < deadline_s, f"still there after {timeout_s} s: {self.orphans()}"
            self.poll()
            time.sleep(0.05)

    def wait(self, timeout_s: float = 400.0) -> Result:
        """Its end; AssertionError, with the Python stacks of a job of the server, if that is not in sight in time."""
        deadline_s = (before_s := time.monotonic()) + timeout_s
        while (code := self.poll()) is None:
            stopped_s = (now_s := time.monotonic()) - before_s
            deadline_s, before_s = deadline_s + (stopped_s if stopped_s > STOPPED_S else 0.0), now_s
            if now_s > deadline_s:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGQUIT)
                time.sleep(1.0)
                self.kill()
                said = "\n".join([*self._err.read_text().splitlines()[-60:], *self._out.read_text().splitlines()[-20:]])
                raise AssertionError(f"not over after {timeout_s} s\n{said}")
            time.sleep(0.02)
        seconds = time.monotonic() - self._began_s
        self.wait_gone(10.0)
        return Result(code, self._out.read_text(), self._err.read_text(), seconds, self._peak_mib())


def started(command: Sequence[str], folder: Path, **variables: str) -> Job:
    """Any program."""
    out, err = _outputs(folder)
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(
            list(command), stdout=stdout, stderr=stderr, stdin=subprocess.DEVNULL, cwd=REPO,
            env=environment(**variables), start_new_session=True,
        )  # fmt: skip
    return Job(process.pid, out, err, process.poll)


class Server:
    """See ``ranks_server.py``: the one that reads from ``pipe``, for all that ask there, started by the first.

    ``variables`` are in the environment of all that it starts.
    """

    def __init__(self, pipe: Path, **variables: str) -> None:
        first, self._process = True, None
        try:
            os.mkfifo(pipe)
        except FileExistsError:
            first = False
        self._pipe = os.open(pipe, os.O_RDWR)  # which waits for no reader
        if first:
            self._process = subprocess.Popen(
                [PYTHON, str(Path(__file__).with_name("ranks_server.py")), str(pipe)], cwd=REPO, start_new_session=True,
                env=environment(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR", DS_ACCELERATOR="cpu", **variables),
                stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def start(
        self,
        num_ranks: int,
        arguments: Sequence[str],
        folder: Path,
        *,
        to_the_end: bool = False,
        script: str = TRAIN,
        **variables: str,
    ) -> Job:
        """``script`` on ranks of the server."""
        out, err = _outputs(folder)
        own, port = out.parent, str(unused_port())
        rank = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_PORT": port}
        ranks = [
            rank | variables | {"RANK": str(i), "LOCAL_RANK": str(i), "MASTER_ADDR": "127.0.0.1"}
            for i in range(num_ranks)
        ]
        job = {"environments": ranks, "arguments": list(arguments), "script": script}
        (own / "job").write_text(json.dumps(job | {"to_the_end": to_the_end}))
        os.write(self._pipe, f"{own}\n".encode())
        deadline_s = time.monotonic() + 120.0
        while not (own / "pid").exists():
            gone = self._process is not None and self._process.poll() is not None
            assert time.monotonic() < deadline_s and not gone, "the server of ranks does not answer"
            time.sleep(0.005)
        pid, told = int((own / "pid").read_text()), own / "code"
        ended: Callable[[], list[int]] = lambda: [int(word) for word in told.read_text().split()]  # noqa: E731
        return Job(pid, out, err, lambda: ended()[0] if told.exists() else None, lambda: ended()[1])

    def run(self, num_ranks: int, config: Path, *overrides: str, to_the_end: bool = False) -> Result:
        arguments = ["--config", str(config), *overrides]
        return self.start(num_ranks, arguments, config.parent, to_the_end=to_the_end).wait()

    def close(self) -> None:
        """It ends when the last one has done this."""
        os.close(self._pipe)


def _outputs(folder: Path) -> tuple[Path, Path]:
    own = folder / "output" / f"{time.monotonic_ns()}"
    own.mkdir(parents=True)
    for name in ("out", "err"):
        (own / name).touch()
    return own / "out", own / "err"


def run(command: Sequence[str], folder: Path, timeout_s: float = 400.0, **variables: str) -> Result:
    """A program, to its end."""
    return started(command, folder, **variables).wait(timeout_s)


def launcher(name: str, num_ranks: int) -> list[str]:
    """What stands before ``launch/train.py`` on the command line."""
    port, script = str(unused_port()), str(BIN / name)
    if name == "deepspeed":
        return [script, "--master_port", port, "--num_gpus", str(num_ranks)]
    if name == "torchrun":
        return [script, "--master-port", port, "--nproc-per-node", str(num_ranks)]
    if name == "accelerate":
        # Without a GPU, Accelerate starts several ranks only when told that there are several GPUs.
        kind = "--cpu" if num_ranks == 1 else "--multi_gpu"
        return [script, "launch", kind, "--main_process_port", port, "--num_processes", str(num_ranks)]
    assert name == "python" and num_ranks == 1
    return [script]


def write_text_data(path: Path, num_rows: int = 40) -> Path:
    """Sentences of chosen words, always the same ones."""
    draw = random.Random(0)
    said = "the a model trains on text and learns what comes next in every line of data it reads from disk"
    words = said.split()
    rows = [" ".join(draw.choice(words) for _ in range(draw.randint(20, 40))) for _ in range(num_rows)]
    return write_jsonl(path, [{"text": row} for row in rows])


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_config(folder: Path, **sections: Mapping[str, Any]) -> Path:
    """A tiny pretraining run in ``folder/run``; each section is merged into the one here, None takes a key back."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, dict[str, Any]] = {
        "model": {"config": MODEL, "tokenizer": {"train": "bpe", "vocab_size": 512}},
        "data": {"path": str(folder / "text.jsonl"), "max_length": 64},
        "training": {
            "output_dir": str(folder / "run"), "learning_rate": 1e-2, "per_device_train_batch_size": 2,
            "max_steps": 4, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        },
        "strategies": {},
    }  # fmt: skip
    for name, section in sections.items():
        config[name] |= section
        config[name] = {key: value for key, value in config[name].items() if value is not None}
    if config["data"]["path"] == str(folder / "text.jsonl"):
        write_text_data(folder / "text.jsonl")
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def digest(export: Path) -> str:
    """sha256 over all tensors of an export: names, shapes, bytes."""
    from safetensors.torch import load_file

    total = hashlib.sha256()
    for path in sorted(export.glob("*.safetensors")):
        for name, tensor in sorted(load_file(path).items()):
            total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            total.update(tensor.contiguous().view(-1).numpy().tobytes())
    return total.hexdigest()
