"""Runs read back from their folders: one on a screen, two beside each other."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from rich.text import Text

from deepstow.launch import compare, watch
from deepstow.trainer.run import history

ROOT = Path(__file__).resolve().parents[2]

TRAINING = {"output_dir": "runs/one", "learning_rate": 0.1, "seed": 42}


def run(folder: Path, losses: list[Any], over: bool = False, **training: Any) -> Path:
    """A folder as a run leaves it: a loss each tenth step, one evaluation, and a line that was cut."""
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({"training": TRAINING | training}))
    records = [
        {"step": 10 * at, "loss": loss, "tokens_per_s": 100.0 * at, "host_peak_bytes": 2**30, "eta_s": 65.0}
        for at, loss in enumerate(losses, start=1)
    ]
    records += [{"step": 30, "eval_loss": 2.5}, *([{"step": 30, "train_loss": 3.0}] if over else [])]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 40, "lo')
    return folder


def test_a_run_on_one_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "one", [8.0, 4.0, "nan", 2.0], max_steps=1000)
    link = {"owner": "link up, step 2", "predicted": 2**20, "measured": 2**20 - 2**18}
    (folder / "plan.json").write_text(json.dumps({"measured": [link]}))
    assert watch.main([str(folder)]) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        f"{folder}  step 40 of 1,000 (4%)  1m05s left",
        "  loss      █▃ ▁ 8.000 -> 2.000",
        "  eval loss ▁    2.500 -> 2.500",
        "  tokens/s  ▁▃▅█ 400.0",
        "  host           1.0 GiB at its peak",
        "  link up, step 2: 768.0 KiB per step, 1.0 MiB foretold",
    ], "whole, however narrow a pipe is taken to be"
    assert watch.main([str(run(tmp_path / "over", [8.0], over=True))]) == 0
    assert "step 30  training is over" in capsys.readouterr().out, "and nobody knows of an export"
    (tmp_path / "over" / "exit.json").write_text(json.dumps({"code": 0}))
    assert watch.main([str(tmp_path / "over")]) == 0
    assert "step 30  finished" in capsys.readouterr().out


def test_it_is_watched_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal: each second anew, with what was written meanwhile; what others named is no markup."""
    folder, seen = run(tmp_path / "a [red]name", [8.0, 4.0]), io.StringIO()
    written = iter([{"step": 40, "loss": 2.0}, {"step": 50, "train_loss": 3.0}])

    def meanwhile(seconds: float) -> None:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(f"\n{json.dumps(next(written))}\n")

    monkeypatch.setattr(watch.time, "sleep", meanwhile)
    monkeypatch.setattr(watch, "Console", lambda: Console(file=seen, force_terminal=True, width=150))
    assert watch.main([str(folder)]) == 0
    shown = Text.from_ansi(seen.getvalue()).plain
    states = [line.split("step ")[1].strip() for line in shown.splitlines() if "a [red]name  step" in line]
    assert list(dict.fromkeys(states)) == ["30  1m05s left", "40  1m05s left", "50  training is over"]
    assert "8.000 -> 4.000" in shown and "8.000 -> 2.000" in shown
    assert watch.main([str(folder), "--once"]) == 0


def test_the_total_of_steps() -> None:
    """By the config, or by how far a step has come in an epoch; else nothing is said."""

    def total(training: Any, *records: dict[str, Any]) -> int | None:
        return history.History(Path(), {"training": training}, [*records]).total()

    near = {"step": 40, "epoch": 40 / 334}
    assert total({"max_steps": 1000}, near) == 1000
    assert total({"max_steps": -1, "num_train_epochs": 3.0}, {"step": 1, "epoch": 0.5}, near) == 3 * 334
    assert total({}, {"step": 40, "epoch": 0.1198}) == 3 * 334, "rounded, and Hugging Face's number of epochs"
    for unknown in ([], [{"step": 40}], [{"step": 0, "epoch": 0}], [{"step": 4, "epoch": "nan"}]):
        assert total({"num_train_epochs": 2}, *unknown) is None
    assert total(None) is None and total({"num_train_epochs": "x"}, near) is None


def test_a_long_curve_is_means_of_its_parts() -> None:
    assert len(history.spark([(step, float(step)) for step in range(6001)])) == 59
    assert history.spark([(1, 1.0), (2, 3.0), (3, 9.0), (4, 9.0)], width=2) == "▁█"


def test_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = run(tmp_path / "one", [8.0, 4.0, 2.0])
    two = run(tmp_path / "two", [8.0, 4.0, 2.0000001], output_dir="runs/two", learning_rate=0.2)
    assert compare.main([str(one), str(two), "--plot", str(tmp_path / "curves.png")]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[2].split()[1:] == ["30", "2.0000", "2.5000", "200", "-", "-", "1.0", "GiB"]
    assert "losses differ from step 30 on: 2.0 and 2.0000001" in lines
    assert [line.split() for line in lines if "training." in line] == [["training.learning_rate", "0.1", "0.2"]]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = history.draw([history.read(one), history.read(two)]).axes
    curves = {line.get_label(): (*line.get_xdata(), *line.get_ydata()) for line in axes.lines}
    assert curves == {
        f"{one}: loss": (10, 20, 30, 8.0, 4.0, 2.0),
        f"{one}: eval loss": (30, 2.5),
        f"{two}: loss": (10, 20, 30, 8.0, 4.0, 2.0000001),
        f"{two}: eval loss": (30, 2.5),
    }
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("optimizer steps", "loss (nats per token)")
    other = yaml.safe_load((one / "config.yaml").read_text()) | {"export": {"format": "onnx"}}
    other["strategies"] = {"recompute": {"policy": "full", "every": 2}, "linear": {}}
    (two / "config.yaml").write_text(yaml.safe_dump(other))
    assert compare.main([str(one), str(two)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "not set" in line]
    assert rows == [
        ["export.format", "not", "set", '"onnx"'],
        ["strategies.linear", "not", "set", "{}"],
        ["strategies.recompute.every", "not", "set", "2"],
        ["strategies.recompute.policy", "not", "set", '"full"'],
    ], "a row for each key"
    same = run(tmp_path / "same", [8.0, 4.0, 2.0])
    assert compare.main([str(one), str(same)]) == 0
    said = capsys.readouterr().out
    assert "the same losses to the last digit, at all 3 steps" in said and "no setting differs" in said


def test_what_is_no_run_or_no_picture_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert watch.main([str(tmp_path)]) == 3
    assert f"{tmp_path}: no run's folder, with config.yaml and metrics.jsonl: " in capsys.readouterr().err
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "metrics.jsonl")
    assert watch.main([str(tmp_path / "pipe")]) == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"not a regular file: '{tmp_path}/pipe/metrics.jsonl'" in said
    one, two = (str(run(tmp_path / name, [1.0])) for name in ("one", "two"))
    assert compare.main([one, two, "--plot", str(tmp_path / "curves.xyz")]) == 2
    assert "--plot" in capsys.readouterr().err
    assert watch.main([str(run(tmp_path / "odd", [None, "x", 2.0]))]) == 0
    assert "2.000 -> 2.000" in capsys.readouterr().out


def test_comparing_loads_no_transformers(tmp_path: Path) -> None:
    """It reads two logs, and what configs say: of a default that one alone has written down nothing is known."""
    folders = [
        str(run(tmp_path / name, [8.0, 4.0], **more)) for name, more in (("one", {}), ("two", {"adam_beta1": 0.9}))
    ]
    heavy = {"torch", "transformers", "peft", "datasets", "accelerate", "numpy", "matplotlib"}
    code = (
        f"import sys; from deepstow.launch.compare import main; code = main({folders!r}); "
        f"print('LOADED', sorted({heavy!r} & sys.modules.keys())); sys.exit(code)"
    )
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines()[-1] == "LOADED []" and "training.adam_beta1  not set" in ran.stdout
