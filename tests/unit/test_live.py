"""The run's screen in the lowest rows of its own terminal, seen on a pseudo terminal."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepstow.trainer.distributed.exit_file import ExitFile
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.run import live
from deepstow.trainer.run.live import Live, LowestRows
from tests.helpers.terminal import Terminal
from tests.helpers.tiny import LLAMA, run_config

RULE = "─" * 40


def say(terminal: Terminal, *lines: str) -> None:
    """As any process does that has the terminal."""
    for line in lines:
        os.write(terminal.end, f"{line}\n".encode())


def shows(rows: LowestRows, terminal: Terminal, *lines: str) -> None:
    rows.draw(lambda columns: lines)
    terminal.read()


def test_lines_stay_above_the_screen_in_their_order_and_all_is_given_back() -> None:
    terminal = Terminal(16, 40)
    rows = LowestRows(terminal.end)
    say(terminal, *(f"line {number}" for number in range(14)))
    shows(rows, terminal, "run", "loss")
    assert terminal.screen[-3:] == [RULE, "run", "loss"] and terminal.row == 12
    say(terminal, "of another process")
    shows(rows, terminal, "run", "loss", "host " + 50 * "x")  # one row more, and too long
    assert terminal.screen[-4:] == [RULE, "run", "loss", "host " + 34 * "x" + "x"]
    say(terminal, "traceback 1", "traceback 2")
    shows(rows, terminal, "end", "loss")  # it takes no fewer rows than before
    assert terminal.screen[-5:] == ["", RULE, "end", "loss", ""]
    os.write(terminal.end, b"half")
    rows.close()
    shows(rows, terminal, "not drawn any more")
    said = [f"line {number}" for number in range(14)] + ["of another process", "traceback 1", "traceback 2", "half"]
    assert terminal.shown() == said
    assert terminal.region == (0, 15) and terminal.column == 4
    say(terminal, " and the rest", *"abcdef")
    terminal.read()
    assert terminal.shown()[-7:] == ["half and the rest", *"abcdef"]


def test_a_terminal_of_another_size() -> None:
    terminal = Terminal(20, 40)
    rows = LowestRows(terminal.end)
    say(terminal, "one", "two")
    shows(rows, terminal, "run", "loss")
    for size in (30, 14, 40, 3, 22):
        terminal.resize(size, 40)
        shows(rows, terminal, "run", "loss")
        say(terminal, f"at {size}")
        terminal.read()
        if size > 3:
            assert terminal.screen[-3:] == [RULE, "run", "loss"], size
        assert [line for line in terminal.shown() if line in (RULE, "run", "loss")] == [RULE, "run", "loss"] * (
            size > 3
        )
    rows.close()
    terminal.read()
    assert terminal.shown() == ["one", "two", "at 30", "at 14", "at 40", "at 3", "at 22"]


def test_as_many_lines_as_there_is_room_for() -> None:
    terminal = Terminal(12, 40)
    shows(LowestRows(terminal.end), terminal, *"abcdefgh")
    assert terminal.screen == [*[""] * 6, RULE, *"abcde"]


def test_the_records_of_the_trainer_at_most_each_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, clock = Terminal(24, 160), SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(live.time, "monotonic", lambda: clock.now_s)
    view = Live(tmp_path / "run", LowestRows(terminal.end))
    state: Any = SimpleNamespace(max_steps=100, global_step=7, log_history=[])

    def after(seconds_s: float, step: int) -> str:
        clock.now_s += seconds_s
        state.global_step = step
        view.on_step_end(None, state, None)
        terminal.read()
        return next(line for line in terminal.screen if "step" in line)

    assert after(0.0, 7) == f"{tmp_path}/run  step 7 of 100 (7%)"
    state.log_history += [{"step": step, "loss": 9.0 - step, "eta_s": 65.0} for step in (2, 4, 8)]
    assert after(0.9, 8) == f"{tmp_path}/run  step 7 of 100 (7%)"
    assert after(0.1, 9) == f"{tmp_path}/run  step 9 of 100 (9%)  1m05s left"
    assert terminal.screen[-1] == "  loss       █▅▁  7.000 -> 1.000"
    view.on_train_end()
    terminal.read()
    assert terminal.shown() == [""]
    os.close(gone := os.dup(terminal.end))
    Live(tmp_path, LowestRows(gone)).on_step_end(None, state, None)  # nobody is there, and the run goes on


def test_where_nothing_can_be_drawn_that_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, ended, terminal = run_config(LLAMA, output_dir="runs/mine", live=True), ExitFile(), Terminal(11, 80)
    elsewhere = "in another terminal: deepstow watch runs/mine\n"
    monkeypatch.setenv("TERM", "xterm")

    def seen(kept: Any = config, rank: int = 0) -> tuple[int, str]:
        views = live.view(kept, Ranks(rank, rank, 2, 2), ended)
        return len(views), capsys.readouterr().out

    write = os.pipe()[1]
    for end, why in (
        (write, "standard output is no terminal"),
        (terminal.end, "the terminal has 11 rows, and 12 are needed"),
    ):
        monkeypatch.setattr(live, "LowestRows", lambda end=end: LowestRows(end))
        assert seen() == (0, f"training.live: {why}; {elsewhere}")
    terminal.resize(12, 80)
    monkeypatch.setenv("TERM", "dumb")
    assert seen() == (0, f"training.live: the terminal cannot keep rows apart (TERM); {elsewhere}")
    monkeypatch.setenv("TERM", "xterm")
    assert seen(rank=1) == seen(run_config(LLAMA)) == (0, "")
    (view,) = live.view(config, Ranks(), ended)
    view.on_train_begin(None, SimpleNamespace(max_steps=100, global_step=0, log_history=[]), None)
    terminal.read()
    assert terminal.screen[-1] == "runs/mine  step 0 of 100 (0%)"
    ended.write(13)  # as a thread does before it ends the process
    terminal.read()
    assert terminal.shown() == [""] and terminal.region == (0, 11)
