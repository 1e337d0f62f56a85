"""The bench: its arithmetic, its refusals, its table. Every contender is run in ``tests/e2e/test_bench.py``."""

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from deepstow.benchmarks.harness import processes, record, work
from deepstow.benchmarks.harness.work import Contender
from deepstow.launch import bench
from deepstow.trainer.errors import ConfigError, ExitCode


def run(label: str, number: int, tokens_per_s: float, **more: Any) -> dict[str, Any]:
    """What a run reports."""
    told = {"host_peak_bytes": 1 << 30, "loss": 5.0, "notes": [], "others_share": 0.0}
    return {"label": label, "round": number, "wall_s": 1.0, "tokens_per_s": tokens_per_s, **told, **more}


def failed(label: str, number: int, reason: str) -> dict[str, Any]:
    return {"label": label, "round": number, "wall_s": 1.0, "failed": reason}


# --- the table ---------------------------------------------------------------------------------------------------


def cells(runs: list[dict[str, Any]]) -> list[list[str]]:
    """The rows of the table, without its head."""
    lines = record.table(runs).split("\n\n")[0].splitlines()
    assert len({len(line) for line in lines}) == 1, "aligned"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_ratios_are_taken_within_a_round() -> None:
    """The machine halves its speed in round 2: the ratio holds, that of the medians would not."""
    speeds = {"plain": [100.0, 50.0, 1234.4], "a": [90.0, 45.0]}
    runs = [run(name, number, speed) for name, some in speeds.items() for number, speed in enumerate(some)]
    plain, other = cells(runs)
    assert plain[:5] == ["plain", "100", "50 to 1,234", "1.000", "1.000 to 1.000"]
    assert other[:5] == ["a", "68", "45 to 90", "0.900", "0.900 to 0.900"]


def test_the_fastest_is_first_and_failures_are_last() -> None:
    """A contender that fails later keeps what was measured; without a plain run there are no ratios."""
    runs = [failed("x", 1, "not installed"), run("slow", 1, 1.0), run("fast", 1, 2.0, notes=["it does less"])]
    runs.append(failed("fast", 2, "gone"))
    assert cells(runs)[0] == ["fast", "2", "2 to 2", "n/a", "n/a", "n/a", "1.0 GiB", "n/a", "5.00000"]
    assert [row[:2] for row in cells(runs)[1:]] == [["slow", "1"], ["x", "failed"]]
    remarks = record.table(runs).split("\n\n")[1].splitlines()
    assert remarks == ["- fast: it does less", "- x failed: not installed", "- fast failed: gone"]


# --- the work ----------------------------------------------------------------------------------------------------


def test_peers_have_the_largest_budget_and_plain_has_all() -> None:
    found = work.contenders(["plain", "ours-resident", "ours-budget", "fsdp2"], ["2GiB", "1GiB"])
    assert [each.gpu_memory for each in found] == [None, None, 2 << 30, 1 << 30, 2 << 30]


@pytest.mark.parametrize(
    ("rates", "ignored", "told"),
    [
        ("", "", "the rates of this machine are not measured, and plans"),
        ("", "x.json is ignored: old; to measure again: y", "x.json is ignored: old, and plans"),
    ],
)
def test_plans_without_measured_rates_are_not_compared(rates: str, ignored: str, told: str) -> None:
    ours, around = work.contenders(["plain", "ours-host"]), {"rates": rates, "rates_ignored": ignored}
    with pytest.raises(ConfigError, match=rf"^{told} of ours .*: deepstow doctor --rates$"):
        record.refuse_unmeasured(around, ours)
    record.refuse_unmeasured(around, ours[:1])
    record.refuse_unmeasured(around | {"rates": "some"}, ours)


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("offload --model 45", "--model 45: must be one of tiny, 13m, 11m, 45m, 350m, 1.3b, 6.7b; did you mean '45m'?"),
        ("offload --rounds 0", "--rounds 0: must be a whole number >= 1"),
        ("offload --tokens 100 --length 64", "--tokens 100: must be rows x length x accumulation, here rows x 64 x 1"),
        ("offload --gpu-memory 16", "--gpu-memory 16: that is 16 bytes; write the unit, as in 20GiB"),
        ("offload --gpu-memory 16GiB --ranks 2", "--gpu-memory: ours-budget is for one rank; leave --ranks out"),
        ("offload --subjects ours-budget",
         "--subjects ours-budget: needs --gpu-memory, for example --gpu-memory 16GiB"),
        ("recompute --dropout 1", "--dropout 1: must be a number >= 0 and < 1, as in 0.1"),
        ("linear --tokens ,", "--tokens ,: must be a whole number >= 1"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_one_line(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(words.split()) == ExitCode.CONFIG
    assert capsys.readouterr().err == f"{told}\n"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("offload --subjects deepspeed-zero", ["--subjects deepspeed-zero: must be one of plain, ", "did you mean"]),
        ("offload --round 3", ["--round: no such option", "--gpu-memory", "did you mean '--rounds'?"]),
        ("", ["THEME"]),
    ],
)
def test_a_wrong_command_line_is_one_line(words: str, parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = bench.main(words.split())
    except SystemExit as end:  # by argparse
        code = end.code  # type: ignore[assignment]
    assert code == ExitCode.CONFIG
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and all(part in told for part in parts), told


# --- runs --------------------------------------------------------------------------------------------------------


def test_contenders_take_turns_and_an_interrupted_bench_keeps_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hardware = {"name": "cpu", "device_kind": "cpu", "usable_cores": 2}
    around = {"hardware": hardware, "versions": {"torch": "1", "deepspeed": "2"}, "rates": "some", "rates_ignored": ""}
    answer = {"tokens_per_s": 10.0, "host_peak_bytes": 1 << 30, "loss": 5.0, "notes": [], "others_share": 0.0}
    child = mock.Mock(side_effect=[around, *[answer] * 3, KeyboardInterrupt])
    monkeypatch.setattr(processes, "child", child)
    monkeypatch.setattr(bench, "settle_environment", lambda *given: None)
    words = f"offload --model tiny --rounds 2 --accumulation 2 --subjects plain,ours-streamed --out {tmp_path}"
    assert bench.main(words.split()) == ExitCode.INTERRUPTED
    (folder,) = tmp_path.iterdir()
    told = json.loads((folder / "record.json").read_text())
    assert told["command"] == f"deepstow bench {words}"
    assert told["work"]["tokens_per_step"] == 128 and told["versions"] == around["versions"]
    turns = [(run["round"], run["label"]) for run in told["runs"]]
    assert turns == [(1, "plain"), (1, "ours-streamed"), (2, "plain")]
    table = (folder / "table.md").read_text()
    assert table in capsys.readouterr().out and "| plain " in table and "| ours-streamed " in table
    assert (folder / "logs" / "plain-1.log").exists()


def test_what_fails_is_a_row_and_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child ends before it has imported anything."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    said: list[str] = []
    broken = Contender("broken", "contenders:Plain", {})
    runs = list(processes.measure(work.work("tiny"), [broken], 2, tmp_path, said.append))
    assert [run["failed"] for run in runs] == ["ended with code 1 without a result; see its log"]
    assert (tmp_path / "broken-1.log").is_file()
    assert said[0] == "round 1 of 2: broken" and said[1].startswith("  failed: ended with code 1")
