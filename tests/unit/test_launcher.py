"""``deepstow train --ranks N`` as a launcher: what its ranks are told, how it ends, and what it refuses."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from deepstow.launch import train
from deepstow.strategies.engine.memory import accelerator
from deepstow.trainer.distributed import launcher
from deepstow.trainer.distributed.ranks import Ranks, from_environment
from deepstow.trainer.errors import ConfigError

MODULE = """
import json, os, pathlib, signal, sys, time
here, rank = pathlib.Path(__file__).parent, int(os.environ["RANK"])
got = []
for each in (signal.SIGTERM, signal.SIGINT):
    signal.signal(each, lambda number, frame: (got.append(number), (here / f"got-{rank}").write_text(str(got[0]))))
(here / f"told-{rank}.tmp").write_text(json.dumps(dict(os.environ)))
(here / f"told-{rank}.tmp").rename(here / f"told-{rank}")
codes = [int(each) for each in sys.argv[1:]]
while codes[rank] < 0 and not got:  # until it is asked to end
    time.sleep(0.02)
sys.exit(abs(codes[rank]))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "a_rank.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in launcher.OF_LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def told(folder: Path, rank: int) -> dict[str, str]:
    import json

    found: dict[str, str] = json.loads((folder / f"told-{rank}").read_text())
    return found


def test_each_rank_is_told_its_place_and_all_the_same_port(folder: Path) -> None:
    assert launcher.run(2, "a_rank", ["0", "0"]) == 0
    first, second = (told(folder, rank) for rank in (0, 1))
    assert [from_environment(each) for each in (first, second)] == [Ranks(rank, rank, 2, 2) for rank in (0, 1)]
    assert first["MASTER_PORT"] == second["MASTER_PORT"] and first["MASTER_ADDR"] == "127.0.0.1"


def test_the_code_of_the_rank_that_failed_and_the_others_are_ended(folder: Path) -> None:
    assert launcher.run(2, "a_rank", ["-7", "11"]) == 11
    assert (folder / "got-0").read_text() == str(int(signal.SIGTERM))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on_to_every_rank(folder: Path, number: signal.Signals) -> None:
    def send() -> None:
        while not all((folder / f"told-{rank}").exists() for rank in (0, 1)):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    assert launcher.run(2, "a_rank", ["-10", "-10"]) == 10
    thread.join()
    assert [(folder / f"got-{rank}").read_text() for rank in (0, 1)] == [str(int(number))] * 2


def test_a_rank_that_a_signal_kills(folder: Path) -> None:
    (folder / "a_rank.py").write_text("import os\nos.kill(os.getpid(), 9)")
    assert launcher.run(1, "a_rank", []) == 137


def test_what_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"^--ranks 0: must be at least 1$"):
        launcher.refuse(0)
    with pytest.raises(ConfigError, match=r"^--ranks 2: a launcher has started this process \(RANK=0\); leave --ranks"):
        launcher.refuse(2, {"RANK": "0"})
    monkeypatch.setattr(accelerator, "kind", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    launcher.refuse_more_than_devices(1)
    with pytest.raises(
        ConfigError, match=r"^--ranks 2: each rank needs a device, and there is 1 here; write --ranks 1"
    ):
        launcher.refuse_more_than_devices(2)
    assert train.main(["--ranks", "2", "--config", "quickstart", "training.lr=1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not list(folder.glob("told*")), sys.argv


def test_so_many_ranks_that_the_machine_would_stand_still_are_refused() -> None:
    """Without devices: each rank is a process that imports torch."""
    with pytest.raises(ConfigError, match=r"--ranks 1000: this machine has \d+ cores.*write --ranks \d+, or fewer"):
        launcher.refuse_more_than_devices(1000)
