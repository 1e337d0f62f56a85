"""The doctor's judgement on made-up facts, and one real examination."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from launch import doctor
from launch.doctor import CPU_ADAM, Row, Status
from trainer.machine.probe import GIB, Memory

SCRIPT = Path(doctor.__file__)


def test_packages_against_their_ranges() -> None:
    assert doctor.package_row("torch>=2.11,<2.14", "2.13.0+cpu", optional=False) == Row(
        Status.OK, "torch", "2.13.0+cpu"
    )
    old = doctor.package_row("torch>=2.11,<2.14", "2.9.1", optional=False)
    assert old.status is Status.FAIL and "needs" in old.value and "'torch>=2.11,<2.14'" in old.cure
    assert doctor.package_row("psutil>=5.9", "", optional=False).value.startswith("missing")
    assert doctor.package_row("peft>=0.18", "", optional=True).status is Status.WARN


def test_pyproject_is_read_whole() -> None:
    names = [row.name for row in doctor.package_rows(doctor.REPO / "pyproject.toml")]
    assert names[0] == "python" and {"torch", "deepspeed", "transformers", "peft"} <= set(names)


def test_python_and_tools(tmp_path: Path) -> None:
    assert doctor.python_row((3, 11, 7), ">=3.11,<3.13").status is Status.OK
    assert doctor.python_row((3, 10, 1), ">=3.11,<3.13").status is Status.FAIL
    assert doctor.compiler_row(None, "").status is Status.FAIL
    assert doctor.compiler_row("/usr/bin/c++", "c++ 12").status is Status.OK
    assert doctor.ninja_row("/usr/bin/ninja", tmp_path / "ninja").status is Status.OK
    assert doctor.ninja_row(None, tmp_path / "ninja").cure == doctor.INSTALL
    (tmp_path / "ninja").touch()
    assert doctor.ninja_row(None, tmp_path / "ninja").status is Status.OK


def test_a_package_that_does_not_load_is_a_row() -> None:
    assert doctor.import_row("json").status is Status.OK
    row = doctor.import_row("no_such_package")
    assert row.status is Status.FAIL and "ModuleNotFoundError" in row.value


def test_devices() -> None:
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar 5\nGCC version: 12"
    assert doctor.driver_version(version) == "550.54.15"
    assert doctor.driver_version("") is None

    def statuses(build: str, driver: str | None, *memory: Memory) -> list[Status]:
        return [row.status for row in doctor.device_rows(build, driver, ["card"] * len(memory), list(memory))]

    assert statuses("CPU", None) == [Status.OK, Status.OK]
    assert statuses("CPU", "550.54.15")[0] is statuses("XPU 20250301", "550.54.15")[0] is Status.WARN
    assert statuses("XPU 20250301", None, Memory(80 * GIB, 79 * GIB)) == [Status.OK] * 3
    assert statuses("CUDA 12.8", "550.54.15") == [Status.OK, Status.OK, Status.FAIL]
    assert statuses("CUDA 12.8", "550.54.15", Memory(80 * GIB, 79 * GIB), Memory(80 * GIB, 9 * GIB))[2:] == [
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
    assert doctor.op_row(CPU_ADAM, folder, torch_folder, preinstalled=True).status is Status.OK
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


def test_a_failed_build_is_a_row(tmp_path: Path) -> None:
    broken = doctor.Op("no_such_op", "NoSuchBuilder", "no time", "nothing")
    row = doctor.build_op(broken, tmp_path)
    assert row is not None and row.status is Status.FAIL and "NoSuchBuilder" in row.value


def test_room() -> None:
    assert doctor.shm_row(64 * 2**20).status is Status.WARN
    assert doctor.shm_row(2 * GIB).status is Status.OK
    assert doctor.host_row(Memory(64 * GIB, 1 * GIB)).status is Status.WARN
    assert [doctor.disk_row(Path("runs"), gib * GIB // 2).status for gib in (1, 10, 100)] == [
        Status.FAIL,
        Status.WARN,
        Status.OK,
    ]
    assert doctor.limit_row("open files", "-n", 1024, 4096).cure == "ulimit -n 4096"
    assert doctor.limit_row("open files", "-n", resource.RLIM_INFINITY, 4096).value == "unlimited"


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


def test_help_loads_no_torch() -> None:
    code = (
        "import sys\nfrom launch.doctor import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'deepspeed', 'psutil'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=10)
    assert "--build" in done.stdout


@pytest.mark.ranks
def test_one_real_examination(tmp_path: Path) -> None:
    report = tmp_path / "doctor.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", str(report)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode in (0, 1), done.stderr
    assert "\nready" in done.stdout if done.returncode == 0 else "\nnot ready, to fix: " in done.stdout
    assert "Setting accelerator" not in done.stdout + done.stderr
    rows = json.loads(report.read_text())["rows"]
    assert [row["name"] for row in rows][:2] == ["python", "torch"] and len(rows) > 20
