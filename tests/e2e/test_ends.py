"""What a run of two ranks says about its end while the first one exports, whatever ends which of them."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.commands import Job, Server, write_config
from tests.e2e.interrupted import ended, ranks_of, until

pytestmark = pytest.mark.ranks

SCRIPT = "tests/e2e/held_export.py"


def held(server: Server, folder: Path, num_ranks: int, **variables: str) -> Job:
    """A run whose first rank is in the export."""
    config = write_config(folder, training={"max_steps": 2})
    flag = folder / "held"
    job = server.start(num_ranks, ["--config", str(config)], folder, script=SCRIPT, HELD=str(flag), **variables)
    until(lambda: flag.exists() and flag.read_text(), job, "in the export")
    time.sleep(0.5)  # a rank that would not wait ends in this time
    assert not (folder / "run" / "exit.json").exists() and not (folder / "run" / "export").exists()
    return job


def test_killed_while_it_exports(server: Server, tmp_path: Path) -> None:
    """As the kernel does where memory is short. The others say that it died; nobody says that the run is finished."""
    job = held(server, tmp_path, 2)
    os.kill(ranks_of(job)[0], signal.SIGKILL)
    job.wait().check(-signal.SIGKILL).quiet()
    assert ended(tmp_path / "config.yaml") == (15, 2) and not (tmp_path / "run" / "export").exists()


def test_an_export_that_fails(server: Server, tmp_path: Path) -> None:
    """The cause is what the run says, also where another rank, which was asked to stop, is the first to end."""
    job = held(server, tmp_path, 2, HOW="full")
    os.kill(ranks_of(job)[1], signal.SIGTERM)
    until(lambda: "SIGTERM: training is over" in job.text, job, "asked")
    (tmp_path / "held").unlink()
    result = job.wait().quiet()
    full = f"export: {tmp_path / 'run' / 'export.writing'} is full; no export was made"
    assert result.code in (14, 15) and full in result.err
    assert ended(tmp_path / "config.yaml") == (14, 2) and not (tmp_path / "run" / "export").exists()


def test_ctrl_c_while_it_exports(server: Server, tmp_path: Path) -> None:
    """All ranks get it from a terminal; the export is finished, and so is the run."""
    job = held(server, tmp_path, 2)
    for pid in ranks_of(job):
        os.kill(pid, signal.SIGINT)
    until(lambda: "SIGINT: training is over, the export is finished first" in job.text, job, "answered")
    (tmp_path / "held").unlink()
    job.wait().check().quiet()
    assert ended(tmp_path / "config.yaml") == (0, 2) and (tmp_path / "run" / "export" / "manifest.json").exists()
