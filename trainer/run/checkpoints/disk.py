"""Errors of a disk: which they are, whoever raises them, and the line that is said of them.

Python, safetensors and tokenizers (Rust), Arrow and torch (C++) each say in their own way that a file cannot be read or
written. ``found`` knows them all. A mistake of the code's may have the same error: that a file is not there, or may not
be opened, is the disk's only where the file is one of the run's.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from datasets import config as datasets_config
from huggingface_hub.constants import HF_HOME
from safetensors import SafetensorError

from deepstow.trainer.errors import ExitCode
from deepstow.trainer.run.checkpoints.checkpoint import GOES_ON, complete

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig

FULL = (errno.ENOSPC, errno.EDQUOT)
DENIED = (errno.EACCES, errno.EPERM)
GONE = (errno.ENOENT, errno.ENOTDIR)
UNKNOWN = errno.ENODATA  # only said in words
# Of a disk, whatever the file; others also come of a name that is wrong.
ALWAYS = (*FULL, errno.EIO, errno.EROFS, errno.EFBIG, errno.ESTALE, errno.EUCLEAN, errno.ENODEV, errno.ENXIO)
IN_WORDS = re.compile(r"\(os error (\d+)\)|\[[Ee]rrno (\d+)\]")  # Rust's; Arrow's and Python's
BY_WORDS = {os.strerror(number): number for number in (*ALWAYS, *DENIED, *GONE)}
OF_TORCH = ("PytorchStreamWriter", "PytorchStreamReader", "inline_container", "iostream error", "Parent directory",
            "bytes from file <", "unable to open file")  # fmt: skip
NO_MEMORY = os.strerror(errno.ENOMEM)


def found(error: BaseException, *folders: Path) -> OSError | None:
    """``error`` with its number and file, if it says that the disk, or a file in ``folders``, fails; None otherwise."""
    number = _number(error)
    inner = error.__cause__ or (error.__context__ if isinstance(error, OSError) else None)
    if number is None and inner is not None and (first := found(inner, *folders)) is not None:
        return first  # for which a library has raised another one
    if number is None and isinstance(error, OSError):
        number = UNKNOWN  # of a library that has not found what it wants
    file = getattr(error, "filename", None)
    of_files = _is_of_files(error) or (number == errno.EACCES and file is None)
    if number is None or not (number in ALWAYS or of_files or _is_inside(file or str(error), folders)):
        return None
    if isinstance(error, OSError) and error.errno:
        return error
    reason = " ".join(str(error).split()) if number == UNKNOWN else os.strerror(number)
    return OSError(number, reason, file)


def _number(error: BaseException) -> int | None:
    """The errno that an error has, or that it says in words."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    text, of_files = str(error), _is_of_files(error)
    if (match := IN_WORDS.search(text)) and (of_files or isinstance(error, OSError | ValueError)):
        return int(match[1] or match[2])
    if not (of_files or isinstance(error, OSError)):
        return None
    return next((number for words, number in BY_WORDS.items() if words in text), errno.EIO if of_files else None)


def _is_of_files(error: BaseException) -> bool:
    """Whether a library that raises such an error was reading or writing a file."""
    of_torch = isinstance(error, RuntimeError) and any(word in str(error) for word in OF_TORCH)
    of_torch = of_torch and NO_MEMORY not in str(error)
    of_tokenizers = type(error) is Exception and "(os error " in str(error)
    of_safetensors = isinstance(error, SafetensorError) and any(word in str(error) for word in ("I/O error", *BY_WORDS))
    return of_torch or of_tokenizers or of_safetensors


def _is_inside(said: object, folders: Sequence[Path]) -> bool:
    """Whether a file, or what is said of one, is in one of the folders, or a folder above one."""
    text = os.fsdecode(said) if isinstance(said, str | bytes | os.PathLike) else ""
    path = os.path.abspath(text)  # noqa: PTH100 - nothing is looked at
    # A name of one word, as a folder `out`, may be part of any sentence.
    names = {str(form) for folder in folders for form in (folder, folder.absolute()) if len(form.parts) > 1}
    said_whole = (re.compile(rf"(?<![\w./-]){re.escape(name)}(?![\w.-])") for name in names)
    is_above = any(name.startswith(path.rstrip("/") + "/") for name in names)
    return is_above or any(name.search(text) or name.search(path) for name in said_whole)


def folders_of(config: RunConfig) -> list[Path]:
    """Where the files of a run are: its own folder, the checkpoint that it names, its data, its model, caches."""
    named = [config.training.output_dir, config.model.name_or_path, config.data.eval_path]
    named += [part.path for part in config.data.parts()]
    if isinstance(goes_on := config.training.resume_from_checkpoint, str):
        named.append(goes_on)
    cached = [HF_HOME, datasets_config.HF_DATASETS_CACHE, Path.home() / ".cache"]
    return [Path(place).expanduser() for place in (*named, *cached) if place]


def line(error: OSError, config: RunConfig, *, doing: str = "", lost: str = "") -> str:
    """What is said of an error that ``found`` has returned: file, reason and cure; ``doing`` what, and what is ``lost``
    by it.
    """
    number, folder = error.errno, Path(config.training.output_dir)
    place = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else f"the disk of {folder}"
    if number in FULL:
        problem, cure = f"{place} is full", "make room"
    elif number == errno.EFBIG:
        problem, cure = f"{place}: {error.strerror}", "allow larger files (ulimit -f)"
    elif number == errno.EROFS:
        problem, cure = f"{place}: {error.strerror}", "mount it for writing; a disk that has failed is mounted so"
    elif number in DENIED:
        problem, cure = f"{place}: {error.strerror}", "let this user read and write there"
    elif number in GONE:
        problem, cure = f"{place}: {error.strerror}", "bring back what was moved, or mount its disk"
    else:
        problem, cure = f"{place}: {error.strerror}", "look at the disk"
    return f"{doing}{problem}; {lost}{cure}, and {_again(folder)}"


def explained(error: Exception, config: RunConfig) -> tuple[ExitCode, str] | None:
    """The exit code and the line for an error of a disk, or of a file of the run; None if it is something else."""
    fails = found(error, *folders_of(config))
    return (ExitCode.DISK, line(fails, config)) if fails else None


def _again(folder: Path) -> str:
    try:
        saved = bool(complete(folder))
    except OSError:
        return "start again"
    return GOES_ON if saved else "start again"
