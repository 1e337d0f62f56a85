"""Saves that find no space, modes of files, the port at which ranks meet: each on its own, without a run."""

import errno
import os
import socket
import stat
from collections import namedtuple
from pathlib import Path

import pytest
from safetensors import SafetensorError

from strategies.core.commit import same_modes
from trainer.dist.ranks import Ranks
from trainer.dist.store import LOOPBACK, listening, loopback_interface
from trainer.errors import ConfigError
from trainer.run import finished, saves, saving
from trainer.run.saves import Saves

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("error", "of_the_disk"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (
            RuntimeError("[enforce fail at inline_container.cc:858] . PytorchStreamWriter failed writing file data/3"),
            True,
        ),
        (MemoryError(), True),  # a copy of what is saved does not fit: the next save may
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_what_libraries_say_of_a_full_disk(error: Exception, of_the_disk: bool) -> None:
    assert saving.of_the_disk(error) is of_the_disk


def test_a_checkpoint_takes_as_much_as_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Saves(tmp_path)
    monkeypatch.setattr(saves.shutil, "disk_usage", lambda path: Usage(1 << 30, 0, 5000))
    assert known.shortage() is None, "of the first nothing is known, so it is tried"
    assert known.shortage(estimate=5001) is not None
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / "weights").write_bytes(bytes(5000))
    known.succeeded(tmp_path / "checkpoint-4")
    assert known.shortage() is None
    (tmp_path / "checkpoint-4" / "more").write_bytes(bytes(1))
    known.succeeded(tmp_path / "checkpoint-4")
    assert known.shortage() == f"a checkpoint takes about 4.9 KiB, and the disk of {tmp_path} has 4.9 KiB free"


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_all_files_have_the_mode_of_the_umask(tmp_path: Path, umask: int) -> None:
    former = os.umask(umask)
    try:
        (tmp_path / "inner").mkdir()
        for name in ("weights", "inner/other"):
            (tmp_path / name).write_text("x")
            (tmp_path / name).chmod(0o600)
        (tmp_path / "inner" / "link").symlink_to("/etc/passwd")
        same_modes(tmp_path)
    finally:
        os.umask(former)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "weights", tmp_path / "inner" / "other")}
    assert modes == {0o666 & ~umask}
    assert len([*tmp_path.iterdir()]) == 2


def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as other:
        other.bind((LOOPBACK, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            listening(port)
    assert caught.value.lines == (
        f"port {port} is in use by another program: give the launcher another one (--master_port)",
    )
    handle = listening(0)
    with socket.socket(fileno=handle) as bound:
        assert bound.getsockname()[0] == LOOPBACK
    assert loopback_interface() is not None and Ranks().world_size == 1


def test_an_export_says_of_which_step_it_is(tmp_path: Path) -> None:
    from strategies.core.sealed import seal
    from tests.helpers.tiny import LLAMA, run_config

    config = run_config(LLAMA, output_dir=tmp_path, max_steps=6)
    assert finished.export_of(tmp_path / "export") is None
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "model.safetensors").write_bytes(b"weights")
    seal(tmp_path / "export", "export", finished.about(config, 6))
    said = finished.export_of(tmp_path / "export")
    assert said is not None and finished.is_over(config, 6, said)
    assert not finished.is_over(config, 5, said), "another checkpoint is resumed"
    longer = run_config(LLAMA, output_dir=tmp_path, max_steps=8)
    assert not finished.is_over(longer, 6, said)
    (tmp_path / "export" / "model.safetensors").write_bytes(b"weighty")
    assert finished.export_of(tmp_path / "export") is None
