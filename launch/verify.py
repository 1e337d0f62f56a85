"""Prove on a shrunk copy of your model that the strategies in a config train exactly as plain training does.

    python launch/verify.py --config configs/quickstart.yaml

Prints `bitwise equal` (exit code 0), or the largest difference per tensor and whether the strategies declared it
(exit code 0 within the declared tolerance, 1 beyond).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer.config import load
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.config.sections import RunConfig


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments of the command line; ``overrides`` are ``dotted.key=value``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", metavar="FILE", required=True, help="the run's YAML file")
    parser.add_argument("--ranks", type=int, metavar="N", help="default: the GPUs of this machine, or 2 without one")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="optimizer steps (default 4)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the config")
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command. Returns the exit code."""
    arguments = parse(argv)
    try:
        config = load(arguments.config, arguments.overrides)
        return report(config, arguments.ranks, arguments.steps)
    except UserError as error:
        print("\n".join(error.lines), file=sys.stderr)
        return error.code


def report(config: RunConfig, ranks: int | None, steps: int) -> int:
    """Train twice, compare, print."""
    import torch

    from trainer.facts import run_facts
    from trainer.verify import verify

    num_ranks = ranks or torch.cuda.device_count() or 2
    names = ", ".join(config.strategies) or "none"
    print(f"training a shrunk copy twice, {steps} steps on {num_ranks} ranks: plain, and with strategies {names}")
    differences = verify(config, num_ranks, steps)
    if not differences:
        print("bitwise equal")
        return 0
    for found in differences:
        print(f"{found.name}: {found.num_different:,} of {found.num_elements:,} differ, at most {found.relative:.1e}")
    facts = run_facts(config, num_ranks, accelerated=torch.cuda.is_available())
    declared = [strategy.parity(facts) for strategy in config.strategies.values()]
    tolerance = max(parity.tolerance for parity in declared)
    worst = differences[0].relative
    if worst <= tolerance:
        print(f"equal within the declared {tolerance:.0e}: {'; '.join(p.reason for p in declared if p.reason)}")
        return 0
    print(f"NOT equal: {worst:.1e} of the largest weight, {tolerance:.0e} is declared")
    return 1


if __name__ == "__main__":
    sys.exit(main())
