"""All ranks plan with the same memory, and alike; room on the disk is looked for once per machine."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepstow.strategies.core.layout import Layout, Site
from deepstow.strategies.core.on_disk import STORES, StoreKind, check_folders, folder_of, wear
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.machine.profiles import profile
from deepstow.trainer.run import machines
from tests.helpers.engine import plan_of
from tests.helpers.models import build

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
    monkeypatch.setattr(machines, "Striped", full)
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
    monkeypatch.setattr(machines, "Striped", lambda *_: SimpleNamespace(close=lambda: None))
    said = list[str]()
    machines.refuse_without_room(SimpleNamespace(), Ranks(0, 0, 3, 2), plan, said.append)
    assert [f"{', '.join(folders)}: on 1 file system" in line for line in said] == [True] * (measured != "on both")


def test_all_ranks_plan_with_the_least_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    other = (7 << 30, 1 << 20, 24 << 30)
    together = SimpleNamespace(gathered=lambda mine: [mine, other])
    monkeypatch.setattr(machines, "agreement", lambda *_: nullcontext(together))
    here = replace(profile("rtx4090-pcie4"), host_available_bytes=8 << 30, device_total_bytes=23 << 30)
    found = machines.agreed(Ranks(0, 0, 2, 2), here)
    assert (found.host_available_bytes, found.host_own_bytes, found.device_total_bytes) == (7 << 30, 0, 23 << 30)


def test_ranks_with_other_plans_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one bucket, or one unit that is recomputed."""

    def plan(layout: Layout, policy: str = "none") -> Any:
        keep = SimpleNamespace(policy=policy, kept=(), hosted=())
        return SimpleNamespace(
            layout=layout, facts=SimpleNamespace(units=[SimpleNamespace(name="0")]), keep=lambda _: keep
        )

    layout = plan_of(build("llama"), site="host").layout
    other = replace(layout, buckets=(replace(layout.buckets[0], site=Site.STREAMED), *layout.buckets[1:]))
    for theirs, refused in ((plan(layout), False), (plan(other), True), (plan(layout, "full"), True)):
        said = list[Any]()
        together = SimpleNamespace(gathered=lambda value, said=said: [said.append(value), *said][1:])
        monkeypatch.setattr(machines, "agreement", lambda *_, together=together: nullcontext(together))
        machines.refuse_other_plans(Ranks(0, 0, 2, 2), [theirs])
        with pytest.raises(ConfigError, match="rank 1 makes another plan") if refused else nullcontext():
            machines.refuse_other_plans(Ranks(0, 0, 2, 2), [plan(layout)])


def test_places_of_another_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep their scheme in messages, lie in folders if they do, and wear a drive if they say so."""
    monkeypatch.setitem(STORES, "zip", StoreKind("compressed"))  # type: ignore[arg-type]
    assert check_folders(["zip:///a", "zip:///b", "/a"]) and folder_of("zip:///a") == folder_of("/a") == "/a"
    assert wear(["/a"]) and not wear(["/a", "zip:///a"])
    with pytest.raises(ValueError, match="names zip:///a twice"):
        check_folders(["zip:///a", "zip:///a"])
    with pytest.raises(ValueError, match="there is no tier tar://; name a folder, or a place of zip://"):
        check_folders("tar:///a")
