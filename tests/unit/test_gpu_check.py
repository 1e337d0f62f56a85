"""The campaign on a GPU: limits hold, results are there at once, nothing runs twice, bars are computed right."""

import json
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from deepstow.benchmarks import gpu_bars, gpu_check, gpu_engine, gpu_measure
from deepstow.benchmarks.gpu_check import Call, Step
from deepstow.launch import bench

SAYS = "print('{\"case\": 1}', flush=True); print('{no JSON'); print('words'); "
HANGS = (
    "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); print('{\"pid\": %d}' % p.pid, flush=True); "
)


def part(call: Call) -> Iterator[Step]:
    yield Step("good", 20, ("-c", SAYS))
    yield Step("fails", 20, ("-c", SAYS + "raise SystemExit(3)"))
    yield Step("hangs", 2, ("-c", HANGS + "time.sleep(600)"))
    yield Step("large", 20, ("-c", f"open({str(call.out / 'large.bin')!r}, 'wb').write(bytes(3 << 20))"))
    yield Step("too long", 4000, ("-c", "raise SystemExit('never')"))
    yield Step("prepares", 20, ("-c", SAYS), always=True, beside=True)


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
    assert ends.pop("hangs") < 0 and ends == {"good": 0, "fails": 3, "large": 0, "prepares": 0}
    child = next(row["found"]["pid"] for row in rows if row.get("found", {}).get("pid"))
    gone = not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert gone, "what a step started is gone with it"
    assert "Fatal Python error: Aborted" in (tmp_path / "some" / "hangs.txt").read_text(), "where it was"
    told = capsys.readouterr().out
    assert "not run, no time left: too long" in told
    table = {line.split("  ")[1]: line for line in told.splitlines() if line.startswith("some  ")}
    assert "not finished after 2 s" in table["hangs"] and "left out: no time for it" in table["too long"]
    with tarfile.open(tmp_path / "gpu-some.tar.gz") as tar:
        names = tar.getnames()
    assert "some/hangs.txt" in names and "some/large.bin" not in names
    assert (tmp_path / "some" / "left_out.txt").read_text() == "large.bin\n"


def test_what_is_recorded_is_not_run_again(driven: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = tmp_path / "known.jsonl"
    end = {"part": "some", "rc": 0, "seconds": 1.0, "limit_s": 20.0, "last": ""}
    rows = [{**end, "step": step} for step in ("good", "hangs", "large", "too long")]
    known.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert gpu_check.main(["some", "--out", str(tmp_path / "out"), "--known", str(known)]) == 1
    assert {row["step"] for row in lines(tmp_path / "out") if "rc" in row} == {"fails", "prepares"}
    assert "good: recorded already" in capsys.readouterr().out
    known.unlink()
    gpu_check.main(["some", "--out", str(tmp_path / "out"), "--known", str(known), "--seconds", "30"])
    again = [row["step"] for row in lines(tmp_path / "out") if "rc" in row]
    assert again.count("prepares") == 2 and again.count("good") == 1, "what this folder has is known, too"


@pytest.mark.slow
@pytest.mark.parametrize("real", [True, False])
def test_commands_are_accepted_and_fit_into_nine_minutes(
    real: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistyped option would be found only after the GPU has been waited for."""
    monkeypatch.setattr(bench, "settle_environment", lambda *given: None)
    monkeypatch.setattr(bench.record, "answer", lambda *given: 0)
    commands = []
    for steps in gpu_check.PARTS.values():
        found = list(steps(Call(real, tmp_path, (tmp_path / "results.jsonl",))))
        assert sum(step.limit_s for step in found if not step.beside) <= 600, "most take less than their limits"
        assert len({step.name for step in found}) == len(found)
        commands += [step.command for step in found]
    benched = [command[1:] for command in commands if command[0] == "launch/bench.py"]
    assert {command[0] for command in benched} == {"linear", "recompute", "compute"}
    assert [command for command in benched if bench.main(command)] == []
    measured = [command[2:] for command in commands if command[1] == "deepstow.benchmarks.gpu_measure"]
    for command in measured:
        given = gpu_measure.parser().parse_args(command)
        assert not given.model or gpu_measure.work.contenders([given.subject], [given.gpu_memory])
    assert len(measured) > 20
    engine = [command[2:] for command in commands if command[1] == "deepstow.benchmarks.gpu_engine"]
    assert [bool(gpu_engine.trials(gpu_engine.parser().parse_args(command))) for command in engine] == [True] * 4


# --- rates ---------------------------------------------------------------------------------------------------------


# --- bars ----------------------------------------------------------------------------------------------------------


def ran(seconds: float, **settings: float) -> dict[str, Any]:
    """What two steps of a contender leave."""
    told = {"tokens_per_s": 8192 / seconds, "measured_s": 2 * seconds, "step_s": [0.0, 0.0], "settings": settings}
    return told | {"gpu_memory": 100, "reserved_peak_bytes": 90, "context_bytes": 12}


def test_bars() -> None:
    found = {
        "8k, ours-budget": ran(2.0, predicted_step_s=1.8),
        "8k, superoffload": ran(3.0),
        "8k, superoffload-host": ran(2.5),
        "16k, ours-budget": ran(4.0, predicted_step_s=3.2) | {"context_bytes": 10},
        "16k, plain": ran(3.9),
    }
    bars = {bar.name: (bar.value and round(bar.value, 3), bar.holds) for bar in gpu_bars.bars(found)}
    assert bars == {
        "8k: tokens/s over SuperOffload's": (1.25, False),
        "8k: tokens/s over ZeRO-2 offload's": (None, None),
        "16k: tokens/s over plain's, both recomputing": (0.975, True),
        "8k, ours-budget: predicted over measured step": (0.9, True),
        "8k, ours-budget: device memory over the budget": (1.02, False),
        "16k, ours-budget: predicted over measured step": (0.8, False),
        "16k, ours-budget: device memory over the budget": (1.0, True),
    }
