"""A benchmark: plain training, this project's ways and the peers, on the same work. Themes differ in their subjects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.harness import processes, record
from benchmarks.harness.work import Contender, Work
from trainer.errors import ExitCode


def compare(
    work: Work,
    subjects: Sequence[Contender],
    rounds: int,
    out: Path,
    command: str,
    say: Callable[[str], None] = print,
    theme: str = "offload",
) -> ExitCode:
    """Run it all. The record is written after every run, so that what was measured before an interrupt is kept.

    Raises:
        ConfigError: there is no room for the record in ``out``.
    """
    around = processes.surroundings()
    folder = record.new_folder(out, theme, around["hardware"])
    say(f"{len(subjects)} subjects, {rounds} rounds; {record.conditions(work, rounds, around)}")
    runs: list[processes.Run] = []
    code, text = ExitCode.FINISHED, ""
    try:
        for run in processes.measure(work, subjects, rounds, folder / "logs", say):
            runs.append(run)
            text = record.write(folder, command, work, rounds, around, runs)
    except KeyboardInterrupt:
        say("interrupted; these runs had ended")
        code = ExitCode.INTERRUPTED
    say(f"\n{text}\nrecord: {folder}")
    return code
