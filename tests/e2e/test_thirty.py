"""Five runs of two ranks in a row, or thirty by `make thirty`, to the interpreter's own end: code 0, no last words.

What this guards against came in one run of eight; see [Note: closing gloo] in ``trainer/distributed/ranks.py``. The
ranks are forked from a process that has done its imports (``ranks_server.py``), so a run takes a second or two; with
``DEEPSTOW_LAUNCHER=torchrun`` (or ``deepspeed``) they are started by that launcher instead.
"""

import os
from pathlib import Path

import pytest

from deepstow.trainer.distributed.deepspeed_ops import SHM, cache_folder
from tests.e2e.commands import TRAIN, Server, launcher, run, write_config

pytestmark = [pytest.mark.slow, pytest.mark.ranks]

LAUNCHER = os.environ.get("DEEPSTOW_LAUNCHER", "")
RUNS = int(os.environ.get("DEEPSTOW_RUNS", "5"))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("thirty"), training={"max_steps": 2}, strategies={"zero": {"stage": 2}})


@pytest.mark.rare
@pytest.mark.parametrize("number", range(RUNS))
def test_ends_well(number: int, server: Server, config: Path) -> None:
    stage = ["strategies.zero=null"] if number % 2 else []
    if LAUNCHER:
        found = run([*launcher(LAUNCHER, 2), TRAIN, "--config", str(config), *stage], config.parent)
    else:
        found = server.run(2, config, *stage, to_the_end=True)
    found.check().quiet()
    assert found.lines("run folder: ")


def test_begins_where_a_build_was_killed(server: Server, config: Path) -> None:
    """A build of DeepSpeed's that was killed has left its lock; torch alone would wait for it for ever."""
    lock = cache_folder() / SHM.name / "lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.touch()
    os.utime(lock, (0, 0))
    try:
        server.run(2, config).check()
        assert not lock.exists()
    finally:
        lock.unlink(missing_ok=True)
