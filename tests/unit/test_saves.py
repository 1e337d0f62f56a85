"""Saves that find no space, modes of files, the port at which ranks meet: each on its own, without a run."""

import errno
import os
import shutil
import socket
import stat
from collections import namedtuple
from pathlib import Path

import pytest
from safetensors import SafetensorError

from deepstow.strategies.state.commit import same_modes
from deepstow.trainer.distributed.ranks import LOOPBACK, Ranks, listening, loopback_interface
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.run.checkpoints import saving

Usage = namedtuple("Usage", "total used free")


def test_what_libraries_say_of_a_full_disk() -> None:
    assert saving.of_the_disk(OSError(errno.ENOSPC, "No space left on device"))
    assert saving.of_the_disk(SafetensorError("while serializing: I/O error: No space left on device (os error 28)"))
    failed = "[enforce fail at inline_container.cc:858] . PytorchStreamWriter failed writing file data/3"
    assert saving.of_the_disk(RuntimeError(failed))
    assert saving.of_the_disk(MemoryError()), "a copy of what is saved does not fit: the next save may"
    assert not saving.of_the_disk(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_a_checkpoint_takes_as_much_as_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 30, 0, 5000))
    assert saving.shortage(tmp_path / "absent", 0) is None, "of the first nothing is known, so it is tried"
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "weights").write_bytes(bytes(5000))
    assert saving.shortage(tmp_path, saving.size_of(tmp_path)) is None
    (tmp_path / "more").write_bytes(bytes(1))
    line = f"a checkpoint takes about 4.9 KiB, and the disk of {tmp_path} has 4.9 KiB free"
    assert saving.shortage(tmp_path, saving.size_of(tmp_path)) == line


@pytest.mark.parametrize("umask", [0o022, 0o077])
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
