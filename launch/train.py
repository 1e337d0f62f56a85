"""Train as a config file says.

    deepstow train --ranks 2 --config quickstart [training.learning_rate=1e-4 ...]

``deepspeed``, ``torchrun``, ``accelerate launch`` and ``python`` start this file as well. Nothing heavy is imported
before the config is checked; if something is wrong with it, one rank prints that, and the exit code is 2.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from deepstow.launch import cli
from deepstow.launch.shipped import load
from deepstow.trainer.config.load import json_schema
from deepstow.trainer.distributed import launcher
from deepstow.trainer.distributed.exit_file import ExitFile
from deepstow.trainer.distributed.ranks import GRACE_S, Ranks, from_environment, settle_environment
from deepstow.trainer.distributed.stopping import Phase, Stop, Stopped
from deepstow.trainer.errors import ExitCode, UserError, report, write_line, write_nothing
from deepstow.trainer.machine.probe import cores


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments of the command line; ``overrides`` are ``dotted.key=value``."""
    parser = cli.explained(cli.Parser(), "train", __doc__)
    parser.add_argument("--config", metavar="FILE", help="the run's YAML file")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="start so many processes on this machine, one per device"
    )
    parser.add_argument("--show-sample", action="store_true", help="print one tokenised row of the data and stop")
    parser.add_argument("--data-report", action="store_true", help="print how long rows are, what is dropped, and stop")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="with --data-report: draw it (.png, .svg, .pdf)")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of config files and stop")
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # from the launcher
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the config")
    arguments = cli.parsed(parser, argv)
    if not arguments.config and not arguments.schema:
        parser.error(cli.needs_config(arguments.overrides))
    if arguments.plot and not arguments.data_report:
        parser.error("--plot is for --data-report; deepstow plan --plot draws the step")
    if arguments.ranks and (arguments.show_sample or arguments.data_report):
        parser.error("--ranks: the data is shown by one process; leave it out")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command. Returns the exit code (``deepstow.trainer.errors.ExitCode``)."""
    arguments = parse(argv)
    if arguments.schema:
        print(json.dumps(json_schema(), indent=2))
        return 0
    if arguments.ranks is not None:
        return cli.answered(lambda: start(arguments))
    return of_rank(arguments)


def start(arguments: argparse.Namespace) -> int:
    """Start the ranks that are asked for, and wait for them. Returns the exit code."""
    launcher.refuse(arguments.ranks)
    config = load(arguments.config, arguments.overrides, write_nothing)
    if arguments.ranks == 1:
        return of_rank(arguments)
    if not config.training.use_cpu:
        launcher.refuse_more_than_devices(arguments.ranks)
    words = ["--config", arguments.config, *arguments.overrides]
    return launcher.run(arguments.ranks, "deepstow.launch.train", words)


def of_rank(arguments: argparse.Namespace) -> int:
    """The run, as one of its ranks, or the only one. Returns the exit code."""
    ranks = from_environment()
    ended, code = ExitFile(ranks.rank, ranks.world_size), int(ExitCode.FAILED)
    try:
        code = listening(arguments, ranks, Stop(ended))
    finally:
        ended.write(code)
    return code


def listening(arguments: argparse.Namespace, ranks: Ranks, listener: Stop) -> int:
    """``train`` while requests to stop are noted."""
    code: int | None = None
    try:
        with listener.listening() as stop:
            code = train(arguments, ranks, stop)
    except Stopped as stopped:
        write_line(stopped.line, sys.stderr)
        return stopped.code
    except KeyboardInterrupt:  # before the run begins to look for it, or when it is over
        if code is None:
            if ranks.is_first:
                began = listener.phase is not Phase.PREPARING
                write_line(f"interrupted {'while the run ended' if began else 'before training began'}", sys.stderr)
            return ExitCode.INTERRUPTED
    assert code is not None
    return code


def train(arguments: argparse.Namespace, ranks: Ranks, stop: Stop) -> int:
    """Check the config, then run, or show the data. Returns the exit code."""
    shows = arguments.show_sample or arguments.data_report
    try:
        say = write_line if ranks.is_first else write_nothing
        config = load(arguments.config, arguments.overrides, say)
        cli.refuse_picture(arguments.plot)
        if not shows:
            stop.ended.folder = Path(config.training.output_dir)
        settle_environment(ranks, cores()[1])
        from deepstow.trainer.planning.kernel_choice import settled
        from deepstow.trainer.run import checks, data, session

        config = settled(config, ranks.world_size, here=True, say=say)
        if not shows:
            return session.run(config, ranks, stop)
        checks.check(checks.Before.MEETING, config=config, ranks=ranks)
        if ranks.is_first:
            with config.placing():
                data.show_sample(config) if arguments.show_sample else data.show_data(config, arguments.plot)
        return 0
    except UserError as error:
        stop.leave()
        if ranks.is_first:
            report(error)
        else:
            time.sleep(GRACE_S)  # so that the launcher reports the first rank's exit code
        return error.code


if __name__ == "__main__":
    sys.exit(main())
