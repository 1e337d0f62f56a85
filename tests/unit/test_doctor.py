"""The doctor's judgement on made-up facts, and one real examination."""

import json
import os
import resource
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from deepstow.launch import doctor
from deepstow.launch.doctor import CPU_ADAM, Row, Status
from deepstow.trainer.machine.probe import GIB, Memory


def test_packages_against_their_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0+cpu", "numpy": "1.9.1"}

    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError
        return versions[name]

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    pyproject = tmp_path / "pyproject.toml"
    pyproject.write_text(
        '[project]\nrequires-python = "<3.11"\ndependencies = ["torch>=2.11,<2.14", "numpy>=2", "psutil>=5.9"]\n'
        'optional-dependencies.lora = ["peft>=0.18"]\n'
    )
    python, torch, numpy, psutil, peft = doctor.package_rows(pyproject)
    assert python.status is Status.FAIL and "needs <3.11" in python.cure
    assert torch == Row(Status.OK, "torch", "2.13.0+cpu")
    assert (numpy.status, numpy.value) == (Status.FAIL, "1.9.1, needs >=2") and "'numpy>=2'" in numpy.cure
    assert (psutil.status, psutil.value) == (Status.FAIL, "missing, needs >=5.9")
    assert (peft.status, peft.value) == (Status.WARN, "missing, needs >=0.18, for LoRA")


def test_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "compiler", lambda: sys.executable)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    found, ninja = doctor.toolchain_rows()
    assert found.status is Status.OK and found.value == f"Python {doctor.platform.python_version()}  {sys.executable}"
    assert ninja == Row(Status.OK, "ninja", "/usr/bin/ninja")
    monkeypatch.setattr(doctor, "compiler", lambda: None)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert [(row.status, row.cure) for row in doctor.toolchain_rows()] == [
        (Status.FAIL, "apt-get install g++"),
        (Status.FAIL, "make setup"),
    ]


def test_a_package_that_does_not_load_is_a_row() -> None:
    assert doctor.import_row("json").status is Status.OK
    row = doctor.import_row("no_such_package")
    assert row.status is Status.FAIL and "ModuleNotFoundError" in row.value


def test_the_cures_of_an_installed_package_name_no_file_of_the_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "PROJECT", tmp_path / "pyproject.toml")
    monkeypatch.setattr(doctor, "declared", lambda pyproject: (">=3.99", ["no-such-package>=1"], []))
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    rows = [*doctor.package_rows(doctor.PROJECT), *doctor.toolchain_rows(), doctor.import_row("no_such_package")]
    cures = [row.cure for row in rows if row.status is Status.FAIL]
    assert len(cures) >= 4 and not [cure for cure in cures if "make " in cure or "constraints" in cure]


def test_devices() -> None:
    driver = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar 5\nGCC version: 12"
    assert [row.value for row in doctor.device_rows("CPU", driver, [], [])] == ["CPU", "NVIDIA 550.54.15"]

    def statuses(build: str, driver: str, *memory: Memory) -> list[Status]:
        return [row.status for row in doctor.device_rows(build, driver, ["card"] * len(memory), list(memory))]

    assert statuses("CPU", "") == [Status.OK, Status.OK]
    assert statuses("CPU", driver)[0] is statuses("XPU 20250301", driver)[0] is Status.WARN
    assert statuses("XPU 20250301", "", Memory(80 * GIB, 79 * GIB)) == [Status.OK] * 3
    assert statuses("CUDA 12.8", driver) == [Status.OK, Status.OK, Status.FAIL]
    assert statuses("CUDA 12.8", driver, Memory(80 * GIB, 79 * GIB), Memory(80 * GIB, 9 * GIB))[2:] == [
        Status.OK,
        Status.WARN,
    ]


def test_ops_built_missing_stale_foreign_and_locked(tmp_path: Path) -> None:
    torch_folder, folder = tmp_path / "torch", tmp_path / "cache/cpu_adam"
    torch_folder.mkdir()
    (torch_folder / "version.py").touch()
    library = folder / "cpu_adam.so"

    def row() -> Row:
        return doctor.op_row(CPU_ADAM, folder, torch_folder)

    assert row().status is Status.WARN and "not built" in row().value and "--build" in row().cure
    folder.mkdir(parents=True)
    library.touch()
    (folder / "build.ninja").write_text("cflags = -isystem /elsewhere/torch/include")
    assert "another torch" in row().value
    (folder / "build.ninja").write_text(f"cflags = -isystem {torch_folder}/include")
    assert row().status is Status.OK
    os.utime(library, (0, 0))
    assert "another torch" in row().value
    (folder / "lock").touch()
    assert row().status is Status.WARN and f"rm {folder / 'lock'}" in row().cure


def test_a_failed_build_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho ninja starts\necho "ImportError: $2"\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(doctor.sys, "executable", str(python))
    row = doctor.build_op(doctor.Op("no_such_op", "NoSuchBuilder", "no time", "nothing"), tmp_path)
    assert row is not None and row.status is Status.FAIL and "build failed: ImportError" in row.value
    assert "import NoSuchBuilder as Builder" in row.value and row.cure.startswith(f"{python} -c ")


def test_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def statuses(free_bytes: int, files: int) -> list[Status]:
        monkeypatch.setattr(doctor, "host_memory", lambda: Memory(64 * GIB, 4 * free_bytes))
        monkeypatch.setattr(doctor, "disk_free_bytes", lambda folder: free_bytes)
        monkeypatch.setattr(doctor.resource, "getrlimit", lambda limit: (files, files))
        cores, *rows, locked = doctor.room_rows(Path("runs"))
        assert [cores.name, locked.name] == ["cores", "locked memory"]
        return [row.status for row in rows]

    ok, warn, fail = Status.OK, Status.WARN, Status.FAIL
    assert statuses(100 * GIB, resource.RLIM_INFINITY) == [ok, ok, ok, ok]
    assert statuses(10 * GIB, 4096) == [ok, ok, warn, ok]
    assert statuses(GIB // 2, 1024) == [warn, warn, fail, warn]


def test_summary() -> None:
    fine, warned, failed = (
        Row(Status.OK, "a", "1"),
        Row(Status.WARN, "b", "2", "mend b"),
        Row(Status.FAIL, "c", "3", "mend c"),
    )
    assert str(failed) == "FAIL c                   3"
    assert doctor.summary([fine]) == ["ready"]
    assert doctor.summary([fine, warned]) == ["ready", "would help:", "  b: mend b"]
    assert doctor.summary([warned, failed]) == ["not ready, to fix: 1", "  c: mend c", "would help:", "  b: mend b"]


def test_a_file_that_cannot_be_written_is_said_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--json", str(tmp_path / "none/doctor.json")]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err == f"--json {tmp_path / 'none/doctor.json'}: No such file or directory\n"


def test_one_real_examination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "settle_environment", lambda ranks, cores: None)  # of this process
    report = tmp_path / "doctor.json"
    code = doctor.main(["--json", str(report)])
    assert ("\nready" if code == 0 else "\nnot ready, to fix: ") in capsys.readouterr().out
    rows = json.loads(report.read_text())["rows"]
    assert [row["name"] for row in rows][:2] == ["python", "torch"] and len(rows) > 20
