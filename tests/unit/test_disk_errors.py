"""Errors of a disk are known by what libraries raise, and errors of the code are not taken for them."""

import errno
from pathlib import Path

import pytest
from safetensors import SafetensorError

from deepstow.trainer.run.checkpoints import disk
from tests.helpers.tiny import LLAMA, run_config


def of_a_library(inner: Exception) -> Exception:
    outer = OSError("Can't load the tokenizer of 'x'")
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.EIO, "Input/output error", "/elsewhere"), errno.EIO),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), errno.EDQUOT),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/runs/mine/checkpoint-2"), errno.ENOENT),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/runs"), errno.ENOENT),
        (PermissionError(errno.EACCES, "Permission denied", b"/runs/mine/x"), errno.EACCES),
        (SafetensorError("Error while serializing: I/O error: File too large (os error 27)"), errno.EFBIG),
        (Exception("Read-only file system (os error 30)"), errno.EROFS),
        (RuntimeError("[enforce fail at inline_container.cc:747] . open file failed with strerror: Read-only file "
                      "system"), errno.EROFS),
        (RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"), errno.EIO),
        (RuntimeError("unable to mmap 8 bytes from file </runs/x>: Permission denied (13)"), errno.EACCES),
        (RuntimeError("basic_ios::clear: iostream error"), errno.EIO),
        (OSError("Memory mapping file failed: Input/output error"), errno.EIO),
        (of_a_library(OSError(errno.EIO, "Input/output error")), errno.EIO),
        (OSError("Error no file named model.safetensors found in directory /runs/mine/export"), disk.UNKNOWN),
    ],
)  # fmt: skip
def test_what_is_a_disks(error: Exception, number: int) -> None:
    found = disk.found(error, Path("/runs/mine"))
    assert found is not None and found.errno == number


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "my-notes.txt"),  # of a metric of the user's
        FileNotFoundError(errno.ENOENT, "No such file or directory", "/runs/mine-too/x"),
        PermissionError(errno.EPERM, "Operation not permitted"),  # of a signal
        RuntimeError("unable to mmap 8 bytes from file </runs/mine/x>: Cannot allocate memory (12)"),
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        SafetensorError("Error while deserializing header: invalid header"),
        ValueError("No space left on device, said a template"),
        OSError("502 Bad Gateway"),
        KeyError("loss"),
    ],
)
def test_what_is_not(error: Exception) -> None:
    assert disk.found(error, Path("/runs/mine"), Path("notes"), Path("my")) is None


def test_the_line_says_file_reason_and_cure(tmp_path: Path) -> None:
    config = run_config(LLAMA, output_dir=tmp_path)
    for number, said in (
        (errno.ENOSPC, "/x is full; make room, and start again"),
        (errno.EROFS, "/x: why; mount it for writing; a disk that has failed is mounted so, and start again"),
        (errno.EIO, "/x: why; look at the disk, and start again"),
    ):
        assert disk.line(OSError(number, "why", "/x"), config) == said
    exporting = disk.line(OSError(errno.ENOSPC, "why"), config, doing="export: ", lost="no export was made: ")
    assert exporting == f"export: the disk of {tmp_path} is full; no export was made: make room, and start again"
