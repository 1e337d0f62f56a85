"""Make a config from that of DeepSpeed, Transformers, TRL, Accelerate, Axolotl or LLaMA-Factory.

    deepstow import axolotl.yaml --out mine.yaml
    deepstow import train.sh ds_config.json
    deepstow import -- accelerate launch --config_file zero3.yaml sft.py --model_name_or_path X --dataset_name Y

A comment beside each key says what it was. Where a key does not train the same here, a line says which and why, nothing
is written, and the exit code is 2. With --anyway the config is written without it, and the lines as comments. Without
--out the config goes to standard output. The exit code is 2, too, if our check finds something to write or change.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from deepstow.launch import cli
from deepstow.strategies.state.commit import replace_file
from deepstow.trainer.config.check import check
from deepstow.trainer.config.importing.draft import differs
from deepstow.trainer.config.importing.finish import imported
from deepstow.trainer.config.importing.read import NAMES, read_all
from deepstow.trainer.errors import ConfigError, ExitCode, write_line


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments of the command line; ``command`` is what follows ``--``."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    parser = cli.explained(argparse.ArgumentParser(), "import", __doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="JSON, YAML, or a shell script with the command")
    parser.add_argument("--from", dest="kind", choices=NAMES, help="whose it is, where its keys leave that open")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the config into this file")
    parser.add_argument("--anyway", action="store_true", help="write it although it does not train the same")
    parser.add_argument("--overwrite", action="store_true", help="also if there is such a file")
    arguments = parser.parse_args(words[:cut])
    arguments.command = words[cut + 1 :]
    if not (arguments.files or arguments.command):
        parser.error("a FILE is required, or a command after --")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command. Returns the exit code."""
    arguments = parse(argv)
    return cli.answered(lambda: run(arguments))


def run(arguments: argparse.Namespace) -> int:
    """Read, write and list. Returns the exit code; raises ConfigError with a line for each key that is lost."""
    out = arguments.out
    if out and out.exists() and not arguments.overwrite:
        raise ConfigError(f"--out {out}: there is such a file; name another, or add --overwrite")
    draft = imported(read_all(arguments.files, arguments.command, arguments.kind))
    if draft.lost and not arguments.anyway:
        raise ConfigError([*map(differs, draft.lost), "nothing is written; --anyway writes it without these keys"])
    ranks = f" --ranks {draft.ranks}" if (draft.ranks or 1) > 1 else ""
    command = f"deepstow train{ranks} --config {out or 'FILE'}"
    if out is None:
        write_line(draft.text(command).removesuffix("\n"))
    else:
        with cli.file_of("--out", out):
            replace_file(out, draft.text(command))
        write_line("\n".join([f"{out}: written, {len(draft.values)} keys", *draft.remarks(), "", command]))
    return ExitCode.CONFIG if check(draft.tree()) else ExitCode.FINISHED


if __name__ == "__main__":
    sys.exit(main())
