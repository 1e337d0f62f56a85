"""Call other people's code in a forked copy of this process, so that its side effects stay in the copy.

A dataset may count its calls, draw random numbers and cache, in places that nobody could list and undo: a generator in
a closure, a queue, the state of a compiled library. A ``DataLoader`` with workers calls it in the same way.

A fork shares file offsets; those of files open for reading are restored. Not undone: writes to files, to shared memory
and over connections. Accelerators cannot be used.
"""

from __future__ import annotations

import fcntl
import io
import multiprocessing
import os
import pickle
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from trainer.errors import first_line

T = TypeVar("T")


class ForkError(RuntimeError):
    """The call failed in the fork; the message is the type and the first line of its exception."""


def in_fork(work: Callable[[], T], seconds: float = 60.0) -> T:
    """The result of ``work()`` in a fork, which must be possible to pickle.

    Raises:
        ForkError: it failed, took longer than ``seconds``, or the process ended.
    """
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(work, send), daemon=True)
    with receive, _restored_offsets():
        process.start()
        send.close()
        try:
            if not receive.poll(seconds):  # a lock that another thread held when forking is never released
                raise ForkError(f"no answer within {seconds:g} seconds")
            fine, answer = pickle.loads(receive.recv_bytes())
        except EOFError:
            raise ForkError("the process that was forked for it has ended") from None
        finally:
            process.kill()
            process.join()
    if not fine:
        raise ForkError(answer)
    found: T = answer
    return found


def _answer(work: Callable[[], Any], send: Any) -> None:
    """Run ``work`` in the fork and send its result."""
    torch.set_num_threads(1)  # a fork has no thread pool
    answer = io.BytesIO()
    try:
        _Pickler(answer).dump((True, work()))
    except BaseException as error:
        answer = io.BytesIO(pickle.dumps((False, first_line(error))))
    send.send_bytes(answer.getvalue())


class _Pickler(pickle.Pickler):
    """Pickles small views of large tensors without the rest of their storage."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            return NotImplemented
        if value.untyped_storage().nbytes() <= value.nbytes:
            return NotImplemented
        return value.detach().clone().__reduce_ex__(pickle.DEFAULT_PROTOCOL)


@contextmanager
def _restored_offsets() -> Iterator[None]:
    """Restore the offsets of files that are open for reading."""
    offsets: dict[int, int] = {}
    for number in [int(file.name) for file in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):  # the descriptor that listed the folder is closed by now
            reads = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            if reads and stat.S_ISREG(os.fstat(number).st_mode):
                offsets[number] = os.lseek(number, 0, os.SEEK_CUR)
    try:
        yield
    finally:
        for number, offset in offsets.items():
            with suppress(OSError):
                os.lseek(number, offset, os.SEEK_SET)
