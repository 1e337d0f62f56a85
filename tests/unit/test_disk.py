"""The model of a disk that ``make faults`` uses: what a program has not synced may be gone, and no more than that."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.helpers.disk import Data, Loss, Names, Recorded, record


def traces() -> bool:
    """Whether strace is installed and allowed, which it is not in every container."""
    command = ["strace", "-f", "-o", os.devnull, "true"]
    return (
        shutil.which("strace") is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


pytestmark = pytest.mark.skipif(
    not traces(), reason="strace, which reads the system calls, is not there or not allowed"
)

PROGRAM = """
import os, threading
from pathlib import Path
root = Path({root!r})
def sync(path):
    handle = os.open(path, os.O_RDONLY); os.fsync(handle); os.close(handle)
(root / "draft").mkdir()
(root / "draft" / "safe").write_bytes(b"weights")
(root / "draft" / "unsafe").write_bytes(b"weights")
thread = threading.Thread(target=sync, args=(root / "draft" / "safe",))
thread.start(); thread.join()
sync(root / "draft")
(root / "draft").rename(root / "checkpoint")
sync(root)
with (root / "log").open("a") as log:
    log.write("one"); log.flush(); log.write("two")
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("disk")
    root = folder / "root"
    root.mkdir()
    command = [sys.executable, "-S", "-c", PROGRAM.format(root=str(root))]
    return record(command, root, folder / "calls", folder, dict(os.environ))


END = {"checkpoint": None, "checkpoint/safe": b"weights", "checkpoint/unsafe": b"weights", "log": b"onetwo"}


@pytest.mark.parametrize(
    ("data", "names", "changed"),
    [
        (Data.KEPT, Names.KEPT, {}),
        (Data.LOST, Names.KEPT, {"checkpoint/unsafe": b"", "log": b""}),
        (Data.ZEROS, Names.KEPT, {"checkpoint/unsafe": bytes(7), "log": bytes(6)}),
        (Data.LOST, Names.LOST, {"checkpoint/unsafe": b"", "log": ...}),
    ],
)
def test_what_was_not_synced_may_be_gone(
    recorded: Recorded, data: Data, names: Names, changed: dict[str, object]
) -> None:
    found = recorded.after(len(recorded.calls), Loss(data, names))
    assert found == {name: content for name, content in {**END, **changed}.items() if content is not ...}


def test_a_name_that_was_not_synced_may_be_the_former_one(recorded: Recorded) -> None:
    """Before the last sync of the folder the rename may be on the disk or not, and the draft's own name too."""
    states = [recorded.after(cut, Loss(Data.KEPT, Names.LOST)) for cut in recorded.cuts()]
    assert states[0] == {} and sum("checkpoint" in state for state in states) < sum(
        "checkpoint" in recorded.after(cut, Loss(Data.KEPT, Names.KEPT)) for cut in recorded.cuts()
    )
    assert all(state.get("checkpoint/safe") == b"weights" for state in states if "checkpoint" in state)
