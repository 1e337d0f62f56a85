"""Log what a strategy does to a model as it does it: one line for all units to which it does the same.

    recompute: layers.0 to layers.11 (12): selective, keeps aten.mm, aten.addmm

The lines go to the loggers ``deepstow.<strategy>`` at level INFO. A run of the commands writes those of its first rank
into plan.txt, and prints what modules warn of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from deepstow.strategies.core.layout import Bucket, Layout, Site

LOGGER = logging.getLogger("deepstow")


def log_applied(strategy: str, effects: Iterable[tuple[str, str]]) -> None:
    """Log pairs of a name, of a unit, bucket or layer, and what is done to it; one line for each different effect."""
    names: dict[str, list[str]] = {}
    for name, effect in effects:
        names.setdefault(effect, []).append(name)
    for effect, affected in names.items():
        shown = affected[0] if len(affected) == 1 else f"{affected[0]} to {affected[-1]} ({len(affected)})"
        LOGGER.getChild(strategy).info("%s: %s: %s", strategy, shown, effect)


def log_stowed(layout: Layout) -> None:
    """Log where the weights, gradients and updates of each bucket are from now on."""

    def effect(bucket: Bucket) -> str:
        weights = f"weights {'stay on the device' if bucket.resident else 'travel'}"
        if bucket.site is Site.NONE:
            return f"{weights}, frozen"
        return f"{weights}, gradients wait on the {bucket.grad_tier.value}, update site {bucket.site.value}"

    log_applied("stow", ((bucket.name, effect(bucket)) for bucket in layout.buckets))


@contextmanager
def shown_by(write: Callable[[str], None], level: int = logging.INFO) -> Iterator[None]:
    """Inside, ``write`` gets every line of this level."""

    class Writer(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno == level:
                write(record.getMessage())

    handler, former_level = Writer(), LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(former_level)
