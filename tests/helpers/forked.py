"""Run a function in a fork of this process, whose peak of memory begins with what this one has."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

import torch

T = TypeVar("T")


def in_fork(work: Callable[[], T]) -> T:
    """The result of ``work()``; both are pickled."""
    # A fork has no pool of threads.
    with ProcessPoolExecutor(1, get_context("fork"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return pool.submit(work).result(timeout=300)
