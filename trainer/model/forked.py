"""Call other people's code in a forked copy of this process: whatever it uses up is used up in the copy.

A dataset may count what it gave, draw random numbers and cache, anywhere within it and in ways that nobody could list
and undo: a generator in a closure, a queue, a compiled library's own state. In a fork all of it is a copy, large
tensors and tables share their memory until somebody writes to them, and only the answer comes back. A ``DataLoader``
with workers calls datasets and collators in the same way.

A fork shares the places in open files; they are put back, in files that are open for reading. Not undone: what is
written to files, to shared memory, and over connections. Accelerators cannot be used.
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
SECONDS = 60.0


class AsideError(RuntimeError):
    """What was called has failed in the fork; the message is its exception's type and first line."""


def aside(work: Callable[[], T], seconds: float = SECONDS) -> T:
    """What ``work()`` returns, by pickle.

    Raises:
        AsideError: it failed, took longer than ``seconds``, or the process ended.
    """
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(work, send), daemon=True)
    with receive, _places_in_files():
        process.start()
        send.close()
        try:
            if not receive.poll(seconds):  # a lock that a thread of this process held is never given back in a fork
                raise AsideError(f"no answer within {seconds:g} seconds")
            fine, answer = pickle.loads(receive.recv_bytes())
        except EOFError:
            raise AsideError("the process that was forked for it has ended") from None
        finally:
            process.kill()
            process.join()
    if not fine:
        raise AsideError(answer)
    found: T = answer
    return found


def _answer(work: Callable[[], Any], send: Any) -> None:
    """In the fork."""
    torch.set_num_threads(1)  # the threads of the pool are not there
    answer = io.BytesIO()
    try:
        _Pickler(answer).dump((True, work()))
    except BaseException as error:
        answer = io.BytesIO(pickle.dumps((False, first_line(error))))
    send.send_bytes(answer.getvalue())


class _Pickler(pickle.Pickler):
    """Of a small view of a large tensor only the view."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            return NotImplemented
        if value.untyped_storage().nbytes() <= value.nbytes:
            return NotImplemented
        return value.detach().clone().__reduce_ex__(pickle.DEFAULT_PROTOCOL)


@contextmanager
def _places_in_files() -> Iterator[None]:
    """Where this process reads on in files is the same afterwards."""
    places: dict[int, int] = {}
    for number in [int(file.name) for file in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):  # the one that listed the folder is closed again
            reads = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            if reads and stat.S_ISREG(os.fstat(number).st_mode):
                places[number] = os.lseek(number, 0, os.SEEK_CUR)
    try:
        yield
    finally:
        for number, place in places.items():
            with suppress(OSError):
                os.lseek(number, place, os.SEEK_SET)
