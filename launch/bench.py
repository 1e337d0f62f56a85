"""Measure this project against its peers on this machine.

    python launch/bench.py offload [--model 45m] [--tokens 64] [--gpu-memory 16GiB,24GiB]
    python launch/bench.py linear [--models gpt2-xl] [--tokens 16,64] [--dtypes bf16]
    python launch/bench.py recompute [--model 45m] [--attention eager] [--dropout 0.1]

``offload`` and ``recompute``: every contender does the same work in a fresh process, in turn, over several rounds.
``linear``: the matrix products of well-known models' linear layers over every route. The table is printed; the record
with every run's figures goes to a folder under benchmarks/records. The exit code is 0 even if a contender failed, which
is a row of the table, and 2 for a wrong option.
"""

from __future__ import annotations

import argparse
import difflib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs where the package is not installed, too

from benchmarks.harness import processes, record, shapes, work
from benchmarks.harness.linear import linear
from trainer.dist.ranks import Ranks, settle_environment
from trainer.errors import ConfigError, ExitCode, UserError
from trainer.machine.probe import cores

RECORDS = Path(__file__).resolve().parent.parent / "benchmarks" / "records"


class Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with the message of argparse."""
        raise ConfigError(message)


def parser() -> Parser:
    """One subcommand per theme. Values stay text and are checked by ``benchmarks.harness.work``."""
    whole = Parser(description=(__doc__ or "").splitlines()[0])
    themes = whole.add_subparsers(dest="theme", metavar="THEME", required=True)
    offload = themes.add_parser("offload", help="training with offload: memory and speed", allow_abbrev=False)
    add_work(offload, work.OFFLOAD)
    offload.add_argument("--recompute", action="store_true", help="every contender recomputes its blocks in backward")
    offload.add_argument("--gpu-memory", default="", metavar="SIZES", help="budgets for ours-budget: 16GiB,24GiB")
    again = themes.add_parser("recompute", help="keeping less for backward: memory and speed", allow_abbrev=False)
    add_work(again, work.RECOMPUTE)
    again.add_argument("--attention", default="sdpa", metavar="NAME", help=f"{', '.join(work.ATTENTIONS)} (sdpa)")
    again.add_argument("--dropout", default="0", metavar="P", help="of attention's probabilities (default 0)")
    _add_linear(themes)
    return whole


def add_work(one: Parser, contenders: Sequence[work.Contender]) -> None:
    """Add the options of the work and the contenders."""
    names = ", ".join(each.label for each in contenders)
    one.add_argument("--model", default="45m", metavar="NAME", help=f"{', '.join(work.MODELS)} (default 45m)")
    one.add_argument("--tokens", metavar="N", help="per optimizer step; determines the rows (default: the model's own)")
    one.add_argument("--rows", metavar="N", help="of a micro-batch")
    one.add_argument("--length", metavar="N", help="tokens of a row")
    one.add_argument("--accumulation", default="1", metavar="N", help="micro-batches per step (default 1)")
    one.add_argument("--dtype", default="fp32", metavar="NAME", help=f"{', '.join(work.DTYPES)} (default fp32)")
    one.add_argument("--steps", default="5", metavar="N", help="measured optimizer steps (default 5)")
    one.add_argument("--rounds", default="3", metavar="N", help="runs of each contender (default 3)")
    one.add_argument("--subjects", default="", metavar="NAMES", help=f"some of {names} (default: all)")
    one.add_argument("--out", type=Path, default=RECORDS, metavar="FOLDER", help="where the record's folder is made")


def _add_linear(themes: Any) -> None:
    two = themes.add_parser("linear", help="linear layers: which route is fastest", allow_abbrev=False)
    two.add_argument("--models", default="", metavar="NAMES", help=f"some of {', '.join(shapes.MODELS)} (default: all)")
    two.add_argument("--tokens", default="16,64,128", metavar="NUMBERS", help="of a micro-batch (default 16,64,128)")
    two.add_argument("--dtypes", default="", metavar="NAMES", help=f"some of {', '.join(shapes.DTYPES)} (default: all)")
    two.add_argument("--accumulation", default="4", metavar="N", help="micro-batches per step (default 4)")
    two.add_argument("--seconds", default="2", metavar="N", help="of each of two measurements of a case (default 2)")
    two.add_argument("--steps", default="10", metavar="N", help="rounds of training steps; 0: none (default 10)")
    two.add_argument("--step-model", default="45m", metavar="NAME", help=f"what they train: {', '.join(work.MODELS)}")
    two.add_argument("--out", type=Path, default=RECORDS, metavar="FOLDER", help="where the record's folder is made")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Raise ConfigError, with the closest option, for one that does not exist."""
    whole = parser()
    arguments, rest = whole.parse_known_args(argv)
    if rest:
        options = [f"--{name.replace('_', '-')}" for name in vars(arguments) if name != "theme"]
        near = difflib.get_close_matches(rest[0].split("=")[0], options, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{rest[0]}: no such option; there are {', '.join(options)}{hint}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command. Returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        given = parse(argv)
        command = shlex.join(["python", "launch/bench.py", *argv])
        if given.theme == "linear":
            return of_linear(given, command)
        todo, contenders = wanted(given)
        rounds = work.whole("--rounds", given.rounds)
        return compare(todo, contenders, rounds, given, command)
    except UserError as error:
        print("\n".join(error.lines), file=sys.stderr)
        return error.code


def say(text: str) -> None:
    """Print progress without buffering."""
    print(text, flush=True)


def compare(
    todo: work.Work, contenders: Sequence[work.Contender], rounds: int, given: argparse.Namespace, command: str
) -> ExitCode:
    """Run every contender in every round. The record is written after each run, so that an interrupt loses none.

    Raises:
        ConfigError: if no folder can be made in ``--out``.
    """
    around = processes.surroundings()
    folder = record.new_folder(given.out, given.theme, around["hardware"])
    say(f"{len(contenders)} contenders, {rounds} rounds; {record.conditions(todo, rounds, around)}")
    runs: list[processes.Run] = []
    code, text = ExitCode.FINISHED, ""
    try:
        for run in processes.measure(todo, contenders, rounds, folder / "logs", say):
            runs.append(run)
            text = record.write(folder, command, todo, rounds, around, runs)
    except KeyboardInterrupt:
        say("interrupted; the record has the runs that had ended")
        code = ExitCode.INTERRUPTED
    say(f"\n{text}\nrecord: {folder}")
    return code


def of_linear(given: argparse.Namespace, command: str) -> int:
    """The theme ``linear``; it measures in this process.

    Raises:
        ConfigError: a value that is not allowed.
    """
    cases = shapes.wanted(given.models, given.tokens, given.dtypes)
    accumulation, seconds = work.whole("--accumulation", given.accumulation), work.whole("--seconds", given.seconds)
    steps = work.whole("--steps", given.steps, least=0)
    model = work.choice("--step-model", given.step_model, work.MODELS)
    settle_environment(Ranks(), cores()[1])  # torch reads its threads from it
    return linear(cases, accumulation, seconds, steps, given.out, command, say, model)


def wanted(given: argparse.Namespace) -> tuple[work.Work, list[work.Contender]]:
    """The work and the contenders that the options ask for. Raise ConfigError for a value that is not allowed."""
    numbers = {name: getattr(given, name) for name in ("tokens", "rows", "length", "accumulation", "steps")}
    is_offload = given.theme == "offload"
    extra: dict[str, Any] = {"recompute": given.recompute} if is_offload else {}
    if not is_offload:
        extra["attention"] = work.choice("--attention", given.attention, work.ATTENTIONS)
        extra["dropout"] = work.part("--dropout", given.dropout)
    todo = work.work(
        work.choice("--model", given.model, work.MODELS),
        dtype=work.choice("--dtype", given.dtype, work.DTYPES),
        **extra,
        **{name: work.whole(f"--{name}", text) for name, text in numbers.items() if text is not None},
    )
    names = listed(given.subjects)
    if is_offload:
        return todo, work.contenders(names, listed(given.gpu_memory))
    return todo, work.contenders(names, theme=work.RECOMPUTE)


def listed(text: str) -> list[str]:
    """The parts between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


if __name__ == "__main__":
    sys.exit(main())
