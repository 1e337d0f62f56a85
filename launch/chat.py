"""Talk to the model that a run has exported, or to adapters on their base, with its chat template.

An empty line is not sent; ``/new`` forgets what was said, Ctrl-C ends an answer and Ctrl-D the talk.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deepstow.launch import cli
from deepstow.trainer.errors import ConfigError, ExitCode, UserError, nearest_file, report, write_line

if TYPE_CHECKING:
    from deepstow.trainer.run.exporting.talk import Talk

NO_TEMPLATE = "no chat template: what you type is continued as it is, each time anew; see: deepstow docs use"
HOW = "/new begins again, Ctrl-C ends an answer, Ctrl-D ends"
AGAIN = "/new"

LEAST_TEMPERATURE = 0.001  # below it the likeliest token has all of the probability, and numbers overflow


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = cli.explained(cli.Parser(), "chat", __doc__)
    add = parser.add_argument
    add("model", type=Path, metavar="RUN_OR_EXPORT", help="folder of a run, of its export, or of any saved model")
    add("--prompt", metavar="TEXT", help="answer this and end, without a terminal")
    add("--max-new-tokens", type=_count, default=512, metavar="N", help="of an answer, at most (default 512)")
    add("--temperature", type=_degree, default=0.0, metavar="X", help="default 0: the likeliest token each time")
    add("--device", metavar="NAME", help="cpu, cuda, cuda:1, ... (default: the accelerator, else the CPU)")
    return parser.parse_args(argv)


def _count(text: str) -> int:
    if (number := int(text) if text.isdecimal() else 0) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number >= 1")
    return number


def _degree(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if number != 0 and not LEAST_TEMPERATURE <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be 0, or a number from {LEAST_TEMPERATURE:g} on")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command. Returns the exit code."""
    arguments = parse(argv)
    return cli.answered(lambda: chat(arguments))


def chat(given: argparse.Namespace) -> int:
    """Load the model and answer. Returns the exit code."""
    if not given.model.exists():  # said before torch is there
        raise ConfigError(f"{given.model}: there is no such folder{nearest_file(given.model)}")
    from deepstow.trainer.run.exporting import talk

    place = talk.place_of(given.model)
    talk.model_in(place)
    device = talk.device_for(place, given.device)
    model, tokenizer = talk.opened(place, device)
    session = talk.Talk(model, tokenizer, given.max_new_tokens, given.temperature)
    if session.template is None:
        write_line(NO_TEMPLATE, sys.stderr)
    if given.prompt is not None:
        session.answer(given.prompt)
    else:
        write_line(f"{place.folder} on {device}: {HOW}", sys.stderr)
        converse(session)
    return ExitCode.FINISHED


def converse(session: Talk) -> None:
    """Answer line by line until the input ends."""
    if sys.stdin is None:
        raise ConfigError("there is no input to read; say it with --prompt")
    while True:
        try:
            prompt = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if prompt == AGAIN:
            session.messages = []
        elif prompt:
            try:
                session.answer(prompt)
            except KeyboardInterrupt:
                write_line("")
            except UserError as error:
                report(error)


if __name__ == "__main__":
    sys.exit(main())
