"""How a checkpoint gets on the disk: all ranks write a draft, one seals it, gives it its name, and deletes older ones.

    draft emptied by the writer ┆ every rank writes ┆ synced, hashed, manifest, renamed, older ones deleted ┆ all go on
                             together             together                                             together

Problem. Hugging Face writes into ``checkpoint-N`` itself, file by file and without waiting for the disk, and deletes
older checkpoints after that. A power cut then leaves empty files and no older checkpoint.

So Hugging Face is told another folder, ``checkpoints.writing``. What is in it gets the name ``checkpoint-N`` when all
of it is on the disk and its manifest, written last, is too. Only then older checkpoints are deleted.

Invariant. A folder ``checkpoint-N`` is complete from the moment it has that name. If a rank cannot write, all ranks
learn it (``OSError``), and nothing else on the disk has changed.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed
from safetensors import SafetensorError

from strategies.core.commit import put_in_place, remove
from strategies.core.sealed import seal
from trainer.errors import ExitCode, UserError
from trainer.run import checkpoint
from trainer.run.manifest import KIND, About, Manifest


class NotSaved(UserError, OSError):
    """A checkpoint could not be written; older ones are as they were. The same on every rank."""

    code = ExitCode.DISK


THREADS = 4  # that look for values that are not finite


@contextmanager
def draft(output_dir: Path, *, writes: bool) -> Iterator[Path]:
    """An empty folder for all ranks to write into, each step inside ``together``; a collective at its beginning.

    Args:
        writes: whether this rank empties the folder and deletes what is left in it: the first one, or the first of
            each machine.

    Raises:
        OSError: on every rank, if the folder cannot be emptied.
    """
    folder = output_dir / checkpoint.WRITING
    together(lambda: _emptied(output_dir, folder) if writes else None)
    try:
        yield folder
    finally:
        if writes:
            remove_quietly(folder)


def of_the_disk(error: Exception) -> bool:
    """Whether an error says that a file could not be written; torch and safetensors have types of their own for it."""
    return isinstance(error, OSError | SafetensorError) or "PytorchStreamWriter" in str(error)


def _emptied(output_dir: Path, folder: Path) -> None:
    checkpoint.clear(output_dir)
    folder.mkdir(parents=True)


def remove_quietly(folder: Path) -> None:
    """Delete a draft if that is possible; the next save does it otherwise."""
    try:
        remove(folder)
    except OSError:
        return


def commit(written: Path, folder: Path, manifest: Manifest) -> None:
    """Seal what all ranks have ``written`` and give it its name.

    Raises:
        OSError: it cannot be synced, read or renamed.
    """
    seal(written, KIND, manifest.model_dump(mode="json"))
    put_in_place(written, folder)


def manifest_of(run: About, step: int, written: Path, loss: float | None, buffers: Collection[str]) -> Manifest:
    """The manifest of what was ``written``; it is finite if all weights and moments are, and the last ``loss`` is."""
    finite = loss is None or abs(loss) < float("inf")
    return Manifest(step=step, finite=finite and all_finite(written, buffers), run=run)


def all_finite(folder: Path, buffers: Collection[str]) -> bool:
    """Whether every value in the safetensors files of ``folder`` is finite. Masks among the ``buffers`` may not be."""
    files = sorted(folder.rglob("*.safetensors"))
    with ThreadPoolExecutor(THREADS, "finite") as pool:
        return all(pool.map(lambda path: _is_finite(path, buffers), files))


def _is_finite(path: Path, buffers: Collection[str]) -> bool:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            if tensor.is_floating_point() and name not in buffers and tensor.numel():
                low, high = tensor.aminmax()  # a NaN makes both NaN
                if not (low.isfinite() and high.isfinite()):
                    return False
    return True


def together(work: Callable[[], Any]) -> None:
    """Do ``work`` on every rank and wait for the others; that one could not write is raised on all of them.

    Raises:
        OSError: the words of the first rank that could not.
    """
    failed: tuple[int, str, str | None] | None = None
    try:
        work()
    except (OSError, RuntimeError, SafetensorError) as error:
        if not of_the_disk(error):
            raise
        number, said_by = getattr(error, "errno", None), getattr(error, "strerror", None)
        failed = (number or errno.EIO, said_by or str(error), getattr(error, "filename", None))
    said = [failed]
    if torch.distributed.is_initialized():
        said = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(said, failed)
    first = next((each for each in said if each is not None), None)
    if first is not None:
        raise OSError(*first)
