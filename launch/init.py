"""Write the first config for a task, a model and a card, with comments, fitted by the planner. It asks nothing.

Tasks: sft (all weights), lora and qlora (adapters), pretrain, dpo, kto, orpo, reward, classification, embedding,
seq2seq. The last line says what to type next.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from errno import ENOENT
from os import strerror
from pathlib import Path

from deepstow.launch import cli
from deepstow.strategies.state.commit import refuse_unwritable, replace_file
from deepstow.trainer.errors import ConfigError, ExitCode, nearest, write_line

NAMES = (
    "sft", "lora", "qlora", "pretrain", "dpo", "kto", "orpo", "reward", "classification", "embedding", "seq2seq",
)  # fmt: skip
ROWS = "my.jsonl"  # of nobody's, until somebody puts rows there


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = cli.explained(cli.Parser(), "init", __doc__)
    add = parser.add_argument
    add("task", nargs="?", default="sft", metavar="TASK", help=f"one of {', '.join(NAMES)} (default sft)")
    add("--model", required=True, metavar="NAME_OR_FOLDER", help="a saved model, or a name on the Hugging Face hub")
    add("--data", metavar="FILE", help=f"rows to train on, or a data set of the hub (default {ROWS}, to be written)")
    add("--card", metavar="CARD", help="fit it to this card, as in rtx4090 (default: this machine)")
    add("--out", type=Path, default=Path("mine.yaml"), metavar="FILE", help="the config (default mine.yaml)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = parse(words)
    return cli.answered(lambda: begin(arguments, shlex.join(["deepstow", "init", *words])))


def begin(given: argparse.Namespace, command: str) -> int:
    """Write the config and say what to do with it. Returns the exit code."""
    refuse(given)
    from deepstow.trainer.machine.probe import probe
    from deepstow.trainer.machine.profiles import profile
    from deepstow.trainer.run import first_config

    if given.data is not None:
        first_config.refuse_missing(given.data)
    machine = probe() if given.card is None else profile(given.card)
    if not given.model.strip():
        raise ConfigError("--model '': name a folder, or a model on the Hugging Face hub")
    request = first_config.Asked(given.task, given.model, given.data or ROWS, given.out, machine)
    first = first_config.first_config(request, command, lambda line: write_line(line, sys.stderr))
    with cli.file_of("--out", given.out):
        replace_file(given.out, first.text)
    write_line(f"{given.out}: {first.said}")
    if given.data is None and not Path(ROWS).exists():
        write_line(
            f"{given.out}: put your rows into {ROWS}, or name them in data.path; deepstow docs data has their forms"
        )
    words = ["train", "--config", str(given.out)] if first.fitted else ["fit", "--config", str(given.out)]
    words += ["--profile", given.card] if given.card and not first.fitted else []
    write_line(f"next:       {shlex.join(['deepstow', *words])}")
    return ExitCode.FINISHED


def refuse(given: argparse.Namespace) -> None:
    """Raise ConfigError for what is known at once to be wrong."""
    if given.task not in NAMES:
        raise ConfigError(f"{given.task}: no such task; there are {', '.join(NAMES)}{nearest(given.task, NAMES)}")
    out = given.out
    if out.exists():
        raise ConfigError(f"--out {out}: is there already; name another file")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: {strerror(ENOENT)}")
    with cli.file_of("--out", out):
        refuse_unwritable(out)


if __name__ == "__main__":
    sys.exit(main())
