"""One rank on a simulated accelerator, in a process forked from one that has the imports and has loaded no device."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.state import DistributedType, PartialState

from deepstow.trainer.distributed.ranks import from_environment, process_group
from deepstow.trainer.distributed.spawn import PRELOAD
from tests.accelerator.conftest import COPIES_US, KERNELS_US, library
from tests.helpers.simulated import collectives


def started(places: Sequence[Mapping[str, str]], folder: Path, work: Callable[..., Any], *args: Any) -> None:
    """``work(*args)`` in a process for each of ``places``, which are what a launcher adds to the environment."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD[:1])  # not what tests add
    logs = [folder / f"log-{number}" for number in range(len(places))]
    processes = [
        context.Process(target=_begin, args=(dict(place), log, work, *args))
        for place, log in zip(places, logs, strict=True)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(200)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(codes) and None not in codes, [log.read_text()[-2000:] for log in logs]


def _begin(place: dict[str, str], log: Path, work: Callable[..., Any], *args: Any) -> None:
    for number in (1, 2):
        os.dup2(os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY), number)
    os.environ.update(place)
    work(*args)


def in_group(out: Path, work: Callable[..., Any]) -> None:
    """``work(ranks)`` in a group of all ranks on their hosts; the first one's result goes into a file."""
    torch.set_num_threads(1)
    ranks = from_environment()
    with process_group(ranks, 120, single=False):
        result = work(ranks)
        if ranks.is_first:
            torch.save(result, out)
        del result


def through_a_config(config: Path) -> None:
    """As ``launch/train.py``.

    Accelerate has a list of the kinds of device that may have several ranks; here it is told of one more.
    """
    from deepstow.launch.train import main

    library().delay(COPIES_US, KERNELS_US)
    collectives.register(library())
    state: Any = PartialState
    state._prepare_backend = lambda *_, **__: (collectives.NAME, DistributedType.MULTI_NPU)
    sys.exit(main(["--config", str(config)]))
