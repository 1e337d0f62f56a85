"""DeepSpeed's extensions: a machine that cannot build them hears of it before anything is prepared."""

import os
from pathlib import Path

import pytest

from deepstow.launch.train import main
from deepstow.trainer.distributed import deepspeed_ops
from deepstow.trainer.errors import ExitCode
from tests.e2e.commands import write_config


@pytest.fixture
def slim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a compiler on which nothing has been built; the file of a config that needs ZeRO."""
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    return write_config(tmp_path, strategies={"zero": {"stage": 2}})


def test_zero_without_a_compiler_is_one_line(slim: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(slim)]) == ExitCode.CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("strategies.zero: DeepSpeed has to compile collectives between ranks on CPUs")
    assert line.endswith("apt-get install g++, or train without it, as with strategies.offload")
    assert not (slim.parent / "run").exists(), "nothing was prepared"


def test_what_is_built_needs_no_compiler(slim: Path) -> None:
    built = deepspeed_ops.cache_folder() / deepspeed_ops.SHM.name
    built.mkdir(parents=True)
    (built / f"{deepspeed_ops.SHM.name}.so").touch()
    deepspeed_ops.refuse_what_cannot_be_built()


@pytest.mark.parametrize("what", ["lock", "buffer"])
@pytest.mark.usefixtures("slim")
def test_what_a_killed_run_has_left_goes(what: str, tmp_path: Path) -> None:
    """Torch would wait for whoever holds a lock; whoever builds has it open. Buffers are memory."""
    lock = deepspeed_ops.cache_folder() / deepspeed_ops.SHM.name / "lock"
    mine, others = (tmp_path / f"deepspeed_allreduce_buffer_{user}_127.0.0.1_29500_0" for user in (os.getuid(), 12345))
    file = lock if what == "lock" else mine
    lock.parent.mkdir(parents=True)
    others.touch()
    os.utime(others, (0, 0))

    def clear() -> None:
        deepspeed_ops.clear_abandoned_builds()
        deepspeed_ops.clear_abandoned_buffers(tmp_path)

    held = os.open(file, os.O_CREAT | os.O_EXCL)  # as torch's FileBaton does
    os.utime(file, (0, 0))
    clear()
    assert file.exists(), "somebody has it"
    os.close(held)
    os.utime(file)
    clear()
    assert file.exists(), "somebody may have begun just now"
    os.utime(file, (0, 0))
    clear()
    clear()
    assert not file.exists() and others.exists()
