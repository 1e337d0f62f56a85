"""How a checkpoint gets on the disk: all ranks write a draft; one seals it, beside training, and deletes older ones.

    draft emptied by the writer ┆ every rank writes ┆ training goes on                              ┆ settled
                             together          together   writer: sync, hash, manifest, rename, delete  together

Hugging Face writes into ``checkpoint-N`` itself, without waiting for the disk, and deletes older checkpoints after
that: a power cut leaves empty files and no older checkpoint. Here the draft, ``checkpoints.writing``, gets the name
``checkpoint-N`` when all of it is on the disk and its manifest, written last, is too. Only then older checkpoints are
deleted. That takes longer than writing and needs nothing of the model, so a thread does it.

Invariant. A folder ``checkpoint-N`` is complete from the moment it has that name. If a rank cannot write, all ranks
learn it (``OSError``), at the latest when they settle, and nothing else on the disk has changed. A kill loses at most
what was trained since the save before the newest one began.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch.distributed
from safetensors import SafetensorError, safe_open

from deepstow.strategies.core.layout import ITEM_BYTES
from deepstow.strategies.core.plan import Kind, Plan
from deepstow.strategies.core.sizes import human
from deepstow.strategies.planner.lossy import kept_bytes
from deepstow.strategies.state.commit import inside, put_in_place, remove
from deepstow.strategies.state.sealed import seal
from deepstow.trainer.machine.probe import disk_free_bytes
from deepstow.trainer.run.appended import Mounted
from deepstow.trainer.run.checkpoints import checkpoint, disk
from deepstow.trainer.run.checkpoints.checkpoint import KIND, Manifest

T = TypeVar("T")
THREADS = 4  # that look for values that are not finite


@contextmanager
def draft(output_dir: Path, needed: int, *, writes: bool, mounted: Mounted | None = None) -> Iterator[Path]:
    """An empty folder for all ranks to write into, each step inside ``together``; a collective at its beginning.

    It is deleted if the block fails; otherwise it stays for ``commit``. That it cannot be emptied, or that there is no
    space for as many bytes as are ``needed``, is an OSError on all ranks; also if ``mounted`` is not what is in
    ``output_dir``. ``writes``: this rank empties and deletes it, the first one, or the first of each machine.
    """
    folder = output_dir / checkpoint.WRITING

    def empty() -> None:
        if writes:
            if mounted is not None:
                mounted.refuse_other()
            checkpoint.clear(output_dir)
            if why := shortage(output_dir, needed):
                raise OSError(errno.ENOSPC, why)
            folder.mkdir()

    together(empty)
    try:
        yield folder
    except BaseException:
        if writes:
            remove_quietly(folder)
        raise


class Save(NamedTuple):
    """A save that is being sealed: its folder, the best checkpoint before it, and the lines to say when it is over."""

    folder: Path
    best: str | None
    sealing: Future[list[str]]


def beside(work: Callable[[], T]) -> Future[T]:
    """Do ``work`` on a thread of its own, which ends with it, and the process not before. That no thread can be started
    is the error of its result.
    """
    pool = ThreadPoolExecutor(1, "seal")
    try:
        future = pool.submit(work)
    except RuntimeError as error:
        future = Future()
        future.set_exception(error)
    pool.shutdown(wait=False)
    return future


def remove_quietly(folder: Path) -> None:
    """Delete a draft if that is possible; the next save does it otherwise."""
    with suppress(OSError):
        remove(folder)


def commit(written: Path, folder: Path, manifest: Callable[[], Manifest]) -> None:
    """Seal what all ranks have ``written``, give it its name, and delete the rest of the draft. May raise OSError."""
    try:
        seal(written, KIND, manifest().model_dump(mode="json"))
        put_in_place(written, folder)
    finally:
        remove_quietly(written.parent)


def all_finite(folder: Path, buffers: Collection[str]) -> bool:
    """Whether every value in the safetensors files of ``folder`` is finite. Masks among the ``buffers`` may not be."""
    with ThreadPoolExecutor(THREADS, "finite") as pool:
        files = (path for path in inside(folder) if path.suffix == ".safetensors")
        return all(pool.map(lambda path: _is_finite(path, buffers), files))


def _is_finite(path: Path, buffers: Collection[str]) -> bool:
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            if tensor.is_floating_point() and name not in buffers and tensor.numel():
                low, high = tensor.aminmax()  # a NaN makes both NaN
                if not (low.isfinite() and high.isfinite()):
                    return False
    return True


def together(work: Callable[[], T]) -> T:
    """Do ``work`` on every rank; if some could not write, all raise an OSError with the words of the first."""
    done: list[T] = []
    failed: tuple[int, str, str | None] | None = None
    try:
        done.append(work())
    except Exception as error:
        if not of_the_disk(error):
            raise
        error = disk.found(error) or error
        number, said_by = getattr(error, "errno", None), getattr(error, "strerror", None)
        failed = (number or errno.EIO, said_by or str(error), getattr(error, "filename", None))
    failures = [failed]
    if torch.distributed.is_initialized():
        failures = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(failures, failed)
    first = next((failure for failure in failures if failure is not None), None)
    if first is not None:
        raise OSError(*first)
    return done[0]


def of_the_disk(error: Exception) -> bool:
    """Whether an error says that the disk fails, or that memory to look at it is short."""
    kinds = OSError | SafetensorError | MemoryError
    is_one = isinstance(error, kinds) or isinstance(error.__cause__, kinds)  # which reading it back has met
    return is_one or "can't start new thread" in str(error) or disk.found(error) is not None


# --- space -----------------------------------------------------------------------------------------------------------


def shortage(folder: Path, needed: int) -> str | None:
    """Why no checkpoint of ``needed`` bytes fits into ``folder`` now; None if one does, or if that cannot be seen."""
    try:
        free = disk_free_bytes(folder)
    except OSError:
        return None
    if free >= needed:
        return None
    return f"a checkpoint takes about {human(needed)}, and the disk of {folder} has {human(free)} free"


def size_of(folder: Path) -> int:
    """Bytes of all files in ``folder``; 0 if it cannot be looked at."""
    try:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except OSError:
        return 0


def estimated_bytes(plan: Plan, *, adapters: bool) -> int:
    """What a checkpoint of this plan takes: weights (of adapters alone, if there are), and the optimizer's state.

    Where layers are divided over ranks, what is not divided counts for each of them, so it is rather too much. A stage,
    or a rank with some of the experts, stands for as much of the model as it has parameters of it.
    """
    facts = plan.facts
    divided = facts.run.model_params and (facts.run.tensor == 1 or facts.run.stages > 1)
    times = facts.run.model_params / facts.num_params if divided else facts.run.tensor

    def over_ranks(kind: Kind) -> int:
        rank_bytes = sum(plan.num_bytes(unit.name, kind) * plan.share(unit.name, kind).shards for unit in facts.units)
        return int(times * rank_bytes)

    weights, state = over_ranks(Kind.PARAM), over_ranks(Kind.MASTER) + over_ranks(Kind.MOMENT)
    if (layout := plan.layout) is not None:  # in a checkpoint state is in fp32, wherever it rests and however
        sizes = [(bucket, sum(bucket.sizes)) for bucket in layout.buckets]
        numbers = [(layout.moments + b.low_precision) * size for b, size in sizes if b.group is not None]
        weights = int(times * sum(ITEM_BYTES[bucket.dtype] * size for bucket, size in sizes))
        state = int(times * 4 * sum(numbers))
    return (facts.num_trainable * 4 if adapters else weights) + state + facts.run.copies * kept_bytes(facts)
