"""The command ``deepstow``: one word for each script in this folder, with the same code behind it.

    deepstow train --config my.yaml
    deepstow fit --model my-folder

``deepspeed``, ``torchrun`` and ``accelerate launch`` start ranks from a file: give them the checkout's
``launch/train.py``. This module imports nothing heavy, so that help is immediate.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import logging
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from errno import EISDIR, ENAMETOOLONG, ENOENT
from importlib import import_module
from importlib.metadata import version
from os import strerror
from pathlib import Path
from typing import NoReturn, TypeVar

from deepstow.trainer.errors import MEANINGS, ConfigError, ExitCode, UserError, nearest, printable, report

# peft imports it, and it advises a faster kernel each time, used or not. Every command imports this module first.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

P = TypeVar("P", bound=argparse.ArgumentParser)
COMMANDS = {
    "init": "write a first config for a task, a model and a card",
    "train": "train as a config file says",
    "plan": "does a run fit, how fast is it, what rests where: before a byte is spent",
    "fit": "which ways of training a model fit into a machine; writes one as a config",
    "search": "the best way to use many ranks",
    "cost": "what a whole run takes: operations, days, money, energy",
    "verify": "compare training with the strategies to plain training, or a checkpoint with its hashes",
    "doctor": "is this machine ready, and how fast is it",
    "bench": "measure against plain torch, DeepSpeed and FSDP2 on this machine",
    "watch": "a run on one screen while it trains",
    "compare": "two runs: settings that differ, speed, memory, losses and their curves",
    "chat": "talk to the model that a run has exported",
    "docs": "print a page of the documentation, or list them",
    "import": "make a config from that of DeepSpeed, Transformers, TRL, Accelerate, Axolotl or LLaMA-Factory",
}
FILES = {"import": "import_config"}  # of commands whose names cannot be a module's
EXAMPLES = {
    "init": ("lora --model my-folder --data my.jsonl --card rtx4090", "dpo --model my-folder --out dpo.yaml"),
    "train": ("--config my.yaml training.learning_rate=1e-4", "--ranks 2 --config quickstart"),
    "plan": ("--config my.yaml --profile rtx4090-pcie4", "--config my.yaml --full"),
    "fit": ("--model my-folder --profile rtx4090-pcie4", "--config my.yaml --gpu-memory 24GiB --write fits.yaml"),
    "search": ("--config my.yaml --ranks 64 --profile h100-sxm-pcie5", "--config my.yaml --ranks 8 --lossy"),
    "cost": (
        "--config my.yaml --tokens 15B --profile rtx4090-pcie4",
        "--config my.yaml --ranks 64 --tokens 1T --price-per-gpu-hour 2.5",
    ),
    "verify": ("--config my.yaml", "--checkpoint runs/mine/checkpoint-400"),
    "doctor": ("", "--rates"),
    "bench": ("offload --model 45m", "linear --model 45m --tokens 64"),
    "watch": ("runs/mine", "runs/mine --once"),
    "compare": ("runs/one runs/two", "runs/one runs/two --plot curves.png"),
    "chat": ("runs/mine", 'runs/mine --prompt "What is a list?"'),
    "docs": ("", "fit"),
    "import": ("axolotl.yaml --out mine.yaml", "-- deepspeed train.py --deepspeed ds.json --learning_rate 1e-4"),
}
OF_OTHERS = (ExitCode.FINISHED, ExitCode.FAILED, ExitCode.CONFIG, ExitCode.DATA)  # of the commands that do not train
DOCS = "pages: deepstow docs; every key of a config: deepstow docs config, or deepstow train --schema"


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one line."""

    def error(self, message: str) -> NoReturn:
        """End the process with exit code 2."""
        self.exit(ExitCode.CONFIG, printable(f"{self.prog}: {message}") + "\n")


def explained(parser: P, name: str, doc: str | None) -> P:
    """``parser`` with what each command says of itself: purpose, two examples, exit codes, where the docs are."""
    codes = MEANINGS if name == "train" else OF_OTHERS
    examples = [f"  deepstow {name} {example}".rstrip() for example in EXAMPLES[name]]
    exit_codes = "exit codes: " + ", ".join(f"{int(code)} {MEANINGS[code]}" for code in codes)
    parser.prog, parser.description = f"deepstow {name}", (doc or "").splitlines()[0]
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(("examples:", *examples, exit_codes, DOCS))
    return parser


def moved(name: str, words: Sequence[str], options: Mapping[str, tuple[str, bool]]) -> str:
    """The line for an option of an earlier version that is a command now, or one of it; empty if none is given.

    Args:
        options: the command, and whether it has an option of the same name.
    """
    for word in words:
        option = word.partition("=")[0]
        if option in options:
            command, stays = options[option]
            remaining = shlex.join(argument for argument in words if stays or argument != word)
            return f"deepstow {name} {option} is a command of its own: deepstow {command} {remaining}".rstrip()
    return ""


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """What the command line says; ends the process if there is an unknown option, and says how keys are written."""
    arguments, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        close = nearest(unknown[0].partition("=")[0], (f"--{name.replace('_', '-')}" for name in vars(arguments)), 0.7)
        how = close or "; a key of the config is written without dashes, as in training.learning_rate=1e-4"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{how}")
    return arguments


def needs_config(words: Sequence[str]) -> str:
    """The answer to a command line without a config, whose other ``words`` may name it."""
    files = (word for word in words if word.endswith((".yaml", ".yml")))
    return f"--config FILE is required; try --config {next(files, 'quickstart')}"


def answered(work: Callable[[], int | None]) -> int:
    """The exit code of ``work``; what the user can mend is printed without a traceback."""
    try:
        return work() or ExitCode.FINISHED
    except UserError as error:
        report(error)
        return error.code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except OSError as error:
        if error.errno != ENAMETOOLONG:
            raise
        report(ConfigError(f"{str(error.filename)[:40]}...: {strerror(ENAMETOOLONG)}"))
        return ExitCode.CONFIG


@contextmanager
def file_of(option: str, path: Path) -> Iterator[None]:
    """Inside, an error of reading or writing the file that ``option`` names is a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}") from None


def refuse_paths(**paths: Path | None) -> None:
    """Raise ConfigError for the file of an option that cannot be written, before anything that takes time."""
    for option, path in paths.items():
        if path is not None and path.is_dir():
            raise ConfigError(f"--{option} {path}: {strerror(EISDIR)}")
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"--{option} {path}: {strerror(ENOENT)}")


def refuse_picture(path: Path | None) -> None:
    """Raise ConfigError for what ``--plot`` cannot draw into, before anything that takes time."""
    from deepstow.trainer.planning import picture

    refuse_paths(plot=path)
    if path is not None and (why := picture.cannot(path)):
        raise ConfigError(f"--plot {path}: {why}")


def seldom_collect() -> None:
    """Hardly look for cycles, and not at the end: imports and planning make many small objects that stay."""
    gc.set_threshold(1_000_000)
    atexit.register(gc.freeze)


def whole() -> Parser:
    """The parser of the first word. The module of a command has the parser of the others, and is imported for it."""
    parser = Parser("deepstow", epilog=f"deepstow COMMAND --help says more\n{DOCS}")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--version", action="version", version=f"deepstow {version('deepstow')}")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND", required=True)
    for name, purpose in COMMANDS.items():
        commands.add_parser(name, help=purpose)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first word names. Returns its exit code."""
    first, *words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    parser = whole()
    if not first.startswith("-") and first not in COMMANDS:
        parser.error(f"{first}: no such command; there are {', '.join(COMMANDS)}{nearest(first, COMMANDS)}")
    command = parser.parse_args([first]).command
    if command in ("plan", "fit", "search", "cost"):
        seldom_collect()
    code: int = import_module(f"deepstow.launch.{FILES.get(command, command)}").main(words)
    return code


if __name__ == "__main__":
    sys.exit(main())
