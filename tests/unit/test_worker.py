"""The worker: the most urgent first, in a thread of its own with its own number of cores, errors to who waits."""

import threading
from collections.abc import Iterator

import pytest
import torch

from deepstow.strategies.engine.transfer.worker import Worker


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_what_forward_needs_first_is_done_first() -> None:
    """Whatever order it was submitted in; what is under way is finished before."""
    worker, gate, done = Worker(1), threading.Event(), list[int]()
    futures = [worker.submit(9, lambda: gate.wait(30))]
    for priority in (5, 1, 3, 1):
        futures.append(worker.submit(priority, lambda priority=priority: done.append(priority)))
    gate.set()
    for future in futures:
        future.result(30)
    worker.close()
    assert done == [1, 1, 3, 5]


def test_without_a_thread_work_is_done_at_once() -> None:
    worker = Worker(None)
    assert worker.submit(3, threading.get_ident).done()
    assert worker.submit(3, threading.get_ident).result() == threading.get_ident()
    worker.close()


def test_an_error_reaches_who_waits() -> None:
    for worker in (Worker(None), Worker(1)):
        with pytest.raises(ZeroDivisionError):
            worker.submit(0, lambda: 1 // 0).result(30)
        assert worker.submit(0, lambda: 7).result(30) == 7
        worker.close()


@pytest.mark.usefixtures("two_threads")
def test_its_cores_are_nobody_elses_default() -> None:
    """Torch makes the number of one thread the default of those that start later; backward runs in one of them."""
    worker, seen = Worker(1), list[int]()
    assert worker.submit(0, torch.get_num_threads).result(30) == 1
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    worker.close()
    assert seen == [2]
    assert torch.get_num_threads() == 2
