"""Runs with optimizer state, or weights, on the disk: one that is killed, or loses its file, goes on from its
checkpoint to the same bits, and leaves nothing on the disk.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.commands import MODEL, Job, Server, digest
from tests.e2e.interrupted import checkpoints, config_in, ranks_of, start, until
from tests.helpers.releases import needs_scratch

pytestmark = [pytest.mark.ranks, pytest.mark.slow, needs_scratch]


STEPS = 200  # some seconds, so that it still runs when its first checkpoint has been seen


def config_of(
    folder: Path, disk: Path, steps: int, host: str = "1900KiB", strategies: dict[str, Any] | None = None
) -> Path:
    """The host has no room for the blocks' state, which rests in ``disk``, or in each folder in it."""
    offload: dict[str, Any] = {
        "site": "host", "weights": "streamed", "bucket_size": "16KiB",
        "disk": sorted(map(str, disk.iterdir())) or str(disk), "disk_memory": "10MiB",
    }  # fmt: skip
    return config_in(
        folder,
        {"offload": offload | {"host_memory": host}} | (strategies or {}),
        max_steps=steps,
        save_steps=4,
        max_grad_norm=0.5,
    )


def file_of(job: Job, disk: Path, *processes: int) -> Path:
    """The largest file without a name, by way of the process that has it open: one of these, or any of the job's."""
    handles = (
        handle
        for process in processes or [job.pid, *ranks_of(job)]
        for handle in Path(f"/proc/{process}/fd").iterdir()
        if str(handle.readlink()).startswith(f"{disk}/") and handle.stat().st_size
    )
    return max(handles, key=lambda handle: handle.stat().st_size)


def damage(file: Path) -> None:
    """Flip nine bytes in each page of what others have open, as a drive does."""
    with file.open("r+b", buffering=0) as drive:
        for start in range(2048, file.stat().st_size, 4096):
            drive.seek(start)
            flipped = bytes(byte ^ 0xFF for byte in drive.read(9))
            drive.seek(start)
            drive.write(flipped)


@pytest.fixture(scope="module")
def whole(server: Server, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of what the run exports that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "disk").mkdir()
    server.run(1, config_of(folder, folder / "disk", STEPS)).check().quiet()
    assert "of optimizer state, read and written once per step" in (folder / "run" / "plan.txt").read_text()
    return digest(folder / "run" / "export")


@pytest.mark.parametrize("how", ["killed", "bytes are flipped"])
def test_goes_on_to_the_same_bits(how: str, whole: str, server: Server, tmp_path: Path) -> None:
    """With two drives, and the bits of one."""
    disk = tmp_path / "disk"
    for folder in (drives := [disk / "one", disk / "other"]):
        folder.mkdir(parents=True)
    other = config_of(tmp_path / "other", disk, STEPS)
    job = start(server, 1, other)
    until(lambda: 4 in checkpoints(other), job, "saved", 120.0)
    assert sorted(disk.rglob("*")) == drives
    if how == "killed":
        job.kill()
    else:
        damage(file_of(job, drives[1]))
        ended = job.wait()
        assert ended.code == 14, ended.text
        (said,) = [line for line in ended.err.splitlines() if "the disk tier" in line]
        why = "at byte [0-9]+ of the file the drive has not what was written"
        assert re.search(
            f"the disk tier in {drives[1]}: .* could not be read: {why}; training.resume_from_checkpoint=auto goes on",
            said,
        )
        assert "Traceback" not in ended.text
    assert not (other.parent / "run" / "export").exists(), "it was over before"
    assert sorted(disk.rglob("*")) == drives
    found = server.run(1, other, "training.resume_from_checkpoint=auto").check()
    assert len(found.lines("resuming from ")) == 1
    assert digest(other.parent / "run" / "export") == whole


def test_a_frozen_base(server: Server, tmp_path: Path) -> None:
    """The run loses its file, says so and ends; then it goes on with the bits of one without a disk, and exports."""
    zero: dict[str, Any] = {"zero": {"stage": 3}}
    (disk := tmp_path / "disk").mkdir()
    lora = "model.lora={r: 4, target_modules: all-linear, export: merged}"
    usual: dict[str, Any] = {"model": MODEL | {"num_hidden_layers": 8}, "max_steps": 60, "max_grad_norm": 0.5}
    plain = config_in(tmp_path / "plain", {"offload": {}} | zero, **usual)
    server.run(2, plain, lora).check()
    offload = {"weights": "streamed", "bucket_size": "16KiB", "host_memory": "1100KiB"}
    offload |= {"disk": str(disk), "disk_memory": "10MiB"}
    config = config_in(tmp_path / "one", {"offload": offload} | zero, save_steps=4, **usual)
    job = start(server, 2, config, lora)
    until(lambda: 4 in checkpoints(config), job, "saved", 120.0)
    frozen = " of 2 ranks' frozen weights, read in forward and in backward"
    assert frozen in (config.parent / "run" / "plan.txt").read_text()
    os.truncate(file_of(job, disk), 0)
    ended = job.wait()
    assert ended.code == 14, ended.text
    assert [line for line in ended.err.splitlines() if "of weights could not be read: " in line], ended.text
    assert "Traceback" not in ended.text and list(disk.iterdir()) == []
    found = server.run(2, config, lora, "training.resume_from_checkpoint=auto").check()
    assert len(found.lines("resuming from ")) == 1
    assert digest(config.parent / "run" / "export") == digest(plain.parent / "run" / "export")


def test_a_folder_is_refused_before_anything_is_made(server: Server, tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", tmp_path, 20)
    for value, words in {
        f"{tmp_path}/none": "no such folder",
        f"[{tmp_path},/dev/shm]": "shm: is in memory (tmpfs), so it would save none; name a folder on a local disk",
    }.items():
        found = server.run(1, config, f"strategies.offload.disk={value}").check(2).quiet()
        assert "strategies.offload.disk = " in found.err and found.err.rstrip().endswith(words)
    assert not (config.parent / "run").exists()
