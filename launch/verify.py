"""Check that the strategies of a config train like plain training, or that a checkpoint is what was written.

The exit code is 0 if they are equal within the tolerance that the strategies declare. With offload the copy gets so
little memory that it moves what the plan of the real run moves; if nothing moves, nothing is claimed (exit code 1).
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deepstow.launch import cli
from deepstow.launch.shipped import load
from deepstow.strategies.core.plan import Plan
from deepstow.strategies.core.protocol import LOSSY
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.errors import ExitCode, write_line

if TYPE_CHECKING:
    from deepstow.trainer.verify.verify import Check, Difference

NOTHING = "so nothing is shown about strategies.offload"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments of the command line; ``overrides`` are ``dotted.key=value``."""
    parser = cli.explained(cli.Parser(), "verify", __doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--config", metavar="FILE", help="the run's YAML file")
    which.add_argument("--checkpoint", metavar="FOLDER", type=Path, help="compare its files with its manifest")
    parser.add_argument("--ranks", type=int, metavar="N", help="default: this machine's devices, or 2 without one")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="optimizer steps (default 4)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the config")
    return cli.parsed(parser, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command. Returns the exit code."""
    arguments = parse(argv)
    if arguments.checkpoint is not None:
        return of_checkpoint(arguments.checkpoint)
    return cli.answered(lambda: report(load(arguments.config, arguments.overrides), arguments.ranks, arguments.steps))


def of_checkpoint(folder: Path) -> int:
    """Compare a checkpoint with its manifest and print the result; returns the exit code."""
    from deepstow.strategies.core.sizes import human
    from deepstow.strategies.state import sealed
    from deepstow.trainer.run.checkpoints import checkpoint

    try:
        seal, about = checkpoint.read(folder)
    except sealed.Damaged as damaged:
        write_line(f"{folder}: damaged: {damaged}" if folder.is_dir() else f"{folder}: there is no such folder")
        return ExitCode.FAILED
    lines = checkpoint.damage(folder, seal, about)
    for line in lines:
        write_line(f"{folder}: damaged: {line}")
    if lines:
        return ExitCode.FAILED
    size = human(sum(file.bytes for file in seal.files.values()))
    names = ", ".join(about.run.config.get("strategies", {})) or "none"
    write_line(
        f"{folder}: good: step {about.step}, {len(seal.files)} files, {size}; {about.run.world_size} rank(s), "
        f"strategies {names}; its values are {'finite' if about.finite else 'NOT all finite'}"
    )
    return ExitCode.FINISHED


def report(config: RunConfig, ranks: int | None, steps: int) -> int:
    """Plan the run as it is, train the copy, compare and print the result; returns the exit code."""
    import torch

    from deepstow.strategies.engine.memory import accelerator
    from deepstow.trainer.planning.kernel_choice import settled
    from deepstow.trainer.verify import verify

    warnings.filterwarnings("ignore", r"`\w+` is deprecated and will be removed in v6", FutureWarning)  # from peft
    num_ranks = ranks or (torch.accelerator.device_count() if accelerator.kind() is not None else 2)
    config = settled(config, num_ranks, here=True, say=print)
    real = verify.real_plan(config, num_ranks)
    if real.layout is not None:
        return of_engine(config, real, num_ranks, steps)
    names = ", ".join(config.strategies) or "none"
    write_line(f"training a shrunk copy twice, {steps} steps on {num_ranks} ranks: plain, and with strategies {names}")
    differences = verify.verify(config, num_ranks, steps)
    return conclude(differences, *declared(config, num_ranks))


def of_engine(config: RunConfig, real: Plan, num_ranks: int, steps: int) -> int:
    """Check a run with the memory engine: what the real plan moves has to move in the copy, too."""
    from deepstow.trainer.model.shrink import features, moves
    from deepstow.trainer.verify.verify import Offloaded

    assert real.layout is not None
    tolerance, reasons = declared(config, num_ranks)
    if tolerance == LOSSY:
        write_line(f"nothing to verify, since training is not meant to equal plain training: {reasons}")
        return ExitCode.FAILED
    todo = Offloaded(config, real, num_ranks, steps, tolerance)
    if not todo.copies:
        write_line(
            f"nothing can move in a copy of this model under these options, {NOTHING}: leave its site and weights at "
            "auto, or leave strategies.offload out"
        )
        return ExitCode.FAILED
    to_show = features(real.layout) if moves(real.layout) else frozenset[str]()
    plan = ", ".join(sorted(to_show)) or "all stays on the device, nothing would move; the copy is made to move"
    write_line(f"the plan of this config: {len(real.layout.buckets)} buckets; {plan}")
    names = ", ".join(config.strategies)
    write_line(f"training a shrunk copy, {steps} steps on {num_ranks} ranks, with strategies {names}")
    checks = []
    for check in todo.checks():
        write_line(line(check))
        checks.append(check)
    beyond = [check for check in checks if _worst(check.differences) > check.tolerance]
    if beyond:
        return conclude(beyond[0].differences, beyond[0].tolerance, reasons)
    if not all(check.moved.up_bytes or check.moved.down_bytes for check in checks):
        write_line(
            f"nothing crossed the link in a run in which something should have, {NOTHING}: please report the config"
        )
        return ExitCode.FAILED
    if missing := to_show.difference(*(check.moved.shows for check in checks)):
        write_line(f"NOT shown, since it does not occur in the copy: {', '.join(sorted(missing))}")
        return ExitCode.FAILED
    return conclude([difference for check in checks for difference in check.differences], tolerance, reasons)


def declared(config: RunConfig, num_ranks: int) -> tuple[float, str]:
    """The tolerance that the strategies declare for comparisons with plain training, and the reasons."""
    from deepstow.strategies.core.compose import in_order
    from deepstow.strategies.core.facts import Precision
    from deepstow.strategies.engine.memory import accelerator
    from deepstow.trainer.planning.facts import run_facts
    from deepstow.trainer.verify.verify import rounds_to_16_bits

    facts = run_facts(config, num_ranks, accelerated=accelerator.kind() is not None)
    if rounds_to_16_bits(config) and facts.precision is Precision.FP32:
        facts = replace(facts, precision=Precision.BF16)
    parities = [strategy.parity(facts) for strategy in in_order(config.strategies).values()]
    reasons = "; ".join(parity.reason for parity in parities if parity.reason)
    return max((parity.tolerance for parity in parities), default=0.0), reasons


def conclude(differences: Sequence[Difference], tolerance: float, reasons: str) -> int:
    """Print the tensors that differ and the conclusion; returns the exit code."""
    for tensor in differences:
        write_line(
            f"{tensor.name}: {tensor.num_different:,} of {tensor.num_elements:,} differ, at most {tensor.relative:.1e}"
        )
    worst = _worst(differences)
    if tolerance == LOSSY:
        write_line(f"NOT equal, and not meant to be, {worst:.1e} of the largest weight: {reasons}")
        return ExitCode.FAILED
    if not differences:
        write_line("bitwise equal")
    elif worst <= tolerance:
        write_line(f"equal within the declared {tolerance:.0e}: {reasons}")
    else:
        write_line(f"NOT equal: {worst:.1e} of the largest weight, {tolerance:.0e} is declared")
    return ExitCode.FINISHED if worst <= tolerance else ExitCode.FAILED


def _worst(differences: Sequence[Difference]) -> float:
    return max((difference.relative for difference in differences), default=0.0)


def line(check: Check) -> str:
    """One run of the copy: its options, what it moved, and how it compares."""
    from deepstow.strategies.core.sizes import human

    moved = check.moved
    options = ", ".join(f"{name} {value}" for name, value in check.options.items())
    result = "bitwise equal" if not check.differences else f"{len(check.differences)} tensors differ"
    return (
        f"{options}: weights of {moved.num_left} of {moved.num_buckets} buckets travelled; "
        f"{', '.join(moved.shows)}; {human(moved.up_bytes)} up and {human(moved.down_bytes)} down the link; "
        f"against {check.against}: {result}"
    )


if __name__ == "__main__":
    sys.exit(main())
