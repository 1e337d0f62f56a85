"""Worlds of ranks that find their models counted."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.planning.facts import counted


def run_counted(num_ranks: int, work: Callable[..., Any], *args: Any, **how: Any) -> Any:
    """``run_world``. The model of every config in ``args`` is counted here, once, and not by each of the ranks."""
    for config in _configs(args) if num_ranks > 1 else ():
        counted(config)
    return run_world(num_ranks, work, *args, **how)


def _configs(value: Any) -> Iterator[RunConfig]:
    if isinstance(value, RunConfig):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _configs(each)
