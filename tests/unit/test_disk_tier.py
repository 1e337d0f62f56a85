"""Room on the disk is looked for once per machine, for all ranks that are on it."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.dist.ranks import Ranks
from trainer.run import machines

HERE, THERE = (0, 500), (2, 1 << 60)  # the first rank of a machine, and what one of its ranks needs


class Together:
    """Another rank of this machine, and one of another."""

    def gathered(self, mine: tuple[int, int]) -> list[tuple[int, int]]:
        return [mine, HERE, THERE]

    def by_some(self, does: bool, work: Any) -> None:
        if does:
            work()


def test_room_is_for_all_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()
    machine = SimpleNamespace(rates=None)
    layout, facts = SimpleNamespace(disk=("/fast", "/other")), SimpleNamespace(machine=machine)
    plan: Any = SimpleNamespace(layout=layout, facts=facts)
    config: Any = SimpleNamespace(error=lambda key, value, what: RuntimeError(f"{key} = {value}: {what}"))

    def full(folders: tuple[str, ...], num_bytes: int) -> None:
        asked.append(num_bytes)
        raise ValueError(f"{folders[1]}: full")

    monkeypatch.setattr(machines, "agreement", lambda *_: nullcontext(Together()))
    monkeypatch.setattr(machines, "file_bytes", lambda layout: 1000)
    monkeypatch.setattr(machines, "StripedFile", full)
    with pytest.raises(RuntimeError, match=r"strategies.offload.disk = /fast, /other: /other: full"):
        machines.refuse_without_room(config, Ranks(0, 0, 3, 2), plan, pytest.fail)
    machines.refuse_without_room(config, Ranks(1, 1, 3, 2), plan, pytest.fail)
    assert asked == [1500]


@pytest.mark.parametrize("measured", ["", "on one", "on both"])
def test_folders_on_one_drive_are_said(measured: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless they were measured together, as they are."""
    folders = str(tmp_path), str(tmp_path.parent)
    about = {"": "", "on one": folders[0], "on both": ", ".join(folders)}[measured]
    machine = SimpleNamespace(rates=SimpleNamespace(disk_folder=about))
    plan: Any = SimpleNamespace(layout=SimpleNamespace(disk=folders), facts=SimpleNamespace(machine=machine))
    monkeypatch.setattr(machines, "agreement", lambda *_: nullcontext(Together()))
    monkeypatch.setattr(machines, "file_bytes", lambda layout: 1000)
    monkeypatch.setattr(machines, "StripedFile", lambda *_: SimpleNamespace(close=lambda: None))
    said = list[str]()
    machines.refuse_without_room(SimpleNamespace(), Ranks(0, 0, 3, 2), plan, said.append)
    assert [f"{', '.join(folders)}: on 1 file system" in line for line in said] == [True] * (measured != "on both")
