"""The driver of the checks on a GPU: limits hold, results are there at once, nothing runs twice."""

import json
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from deepstow.benchmarks import gpu_check
from deepstow.benchmarks.gpu_check import Step
from deepstow.launch import bench

SAYS = "print('{\"case\": 1}', flush=True); print('words'); "
HANGS = (
    "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); print('{\"pid\": %d}' % p.pid, flush=True); "
)


def part(real: bool, out: Path) -> Iterator[Step]:
    yield Step("good", 20, ("-c", SAYS))
    yield Step("fails", 20, ("-c", SAYS + "raise SystemExit(3)"))
    yield Step("hangs", 2, ("-c", HANGS + "time.sleep(600)"))
    yield Step("large", 20, ("-c", f"open({str(out / 'large.bin')!r}, 'wb').write(bytes(3 << 20))"))
    yield Step("too long", 4000, ("-c", "raise SystemExit('never')"))


@pytest.fixture
def driven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "PARTS", {"some": part})
    monkeypatch.setattr(gpu_check, "GRACE_S", 0.5)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_limits_results_and_what_is_left(driven: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert gpu_check.main(["some", "--out", str(tmp_path), "--seconds", "100"]) == 1
    assert time.monotonic() - began < 60
    rows = lines(tmp_path)
    assert [(row["step"], row["found"]) for row in rows if "found" in row][:2] == [
        ("good", {"case": 1}),
        ("fails", {"case": 1}),
    ]
    ends = {row["step"]: row["rc"] for row in rows if "rc" in row}
    assert ends.pop("hangs") < 0 and ends == {"good": 0, "fails": 3, "large": 0}
    child = next(row["found"]["pid"] for row in rows if row.get("found", {}).get("pid"))
    gone = not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert gone, "what a step started is gone with it"
    assert "Fatal Python error: Aborted" in (tmp_path / "some" / "hangs.txt").read_text(), "where it was"
    told = capsys.readouterr().out
    assert "not run, no time left: too long" in told and "exit    3" in told
    with tarfile.open(tmp_path / "gpu-some.tar.gz") as tar:
        names = tar.getnames()
    assert "some/hangs.txt" in names and "some/large.bin" not in names
    assert (tmp_path / "some" / "left_out.txt").read_text() == "large.bin\n"


def test_what_is_recorded_is_not_run_again(driven: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = tmp_path / "known.jsonl"
    rows = [{"part": "some", "step": step, "rc": 0} for step in ("good", "hangs", "large", "too long")]
    known.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert gpu_check.main(["some", "--out", str(tmp_path / "out"), "--known", str(known)]) == 1
    assert [row["step"] for row in lines(tmp_path / "out") if "rc" in row] == ["fails"]
    assert "good: recorded already" in capsys.readouterr().out


@pytest.mark.parametrize("real", [True, False])
def test_commands_of_the_bench_are_accepted(real: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistyped option would be found only after the GPU has been waited for."""
    monkeypatch.setattr(bench, "settle_environment", lambda *given: None)
    monkeypatch.setattr(bench.record, "answer", lambda *given: 0)
    steps = [step for steps in gpu_check.PARTS.values() for step in steps(real, Path("out"))]
    commands = [step.command[1:] for step in steps if step.command[0] == "launch/bench.py"]
    assert {command[0] for command in commands} == {"offload", "linear", "recompute", "compute"}
    assert [command for command in commands if bench.main(command)] == []
