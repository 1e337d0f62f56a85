"""What all ranks decide together, apart from training: a group of its own on the CPU, for numbers and short texts.

Some decisions depend on what only one rank knows: a signal, a full disk, another config on one machine. A rank that
acted alone would leave the others waiting in a collective.

Invariant. Every rank calls the same methods in the same order, at places that training itself makes all ranks pass (the
start, the end of a step, a save). So a call waits no longer than the next collective of training would, ends with an
error as that would when a rank has died, and never meets one of training's. The group is gloo's, so that the host does
not wait for the device. With one rank nothing is sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from deepstow.strategies.state.sealed import digest_of
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError, ExitCode, UserError

T = TypeVar("T")
DAY_S, WEEK_S = 24 * 3600, 7 * 24 * 3600  # for what the first rank may do while the others wait


class Agreement:
    """The group; None of it for one rank."""

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def be_patient(self) -> None:
        """From here on calls wait for a week, as others do while the first rank exports. All ranks say so at once."""
        if self._group is not None:
            self._group.set_timeout(timedelta(seconds=WEEK_S))

    def any(self, flag: bool) -> bool:
        """Whether any rank says yes; a collective."""
        if self._group is None:
            return flag
        flagged = torch.tensor(int(flag))
        dist.all_reduce(flagged, dist.ReduceOp.MAX, group=self._group)
        return bool(flagged.item())

    def gathered(self, value: T) -> list[T]:
        """What each rank says; a collective."""
        if self._group is None:
            return [value]
        values = [value] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def on_first(self, work: Callable[[], T]) -> T:
        """What ``work`` returns, or the UserError that it raises, on the first rank, on all of them; a collective."""
        return self.by_some(self._group is None or dist.get_rank(self._group) == 0, work)[0]

    def by_some(self, does: bool, work: Callable[[], T]) -> list[T]:
        """What ``work`` returns on each rank that ``does`` it, in their order, on all ranks; a collective. All raise
        the UserError of the first of them that failed.
        """
        if self._group is None:
            return [work()]
        own_result: tuple[Any, ...] = ()  # or what was returned, or the lines and the code of an error
        try:
            own_result = (work(),) if does else ()
        except UserError as error:
            own_result = (error.lines, error.code)
        results: list[Any] = self.gathered(own_result)
        for result in results:
            if len(result) > 1:
                raise _Told(*result)
        return [result[0] for result in results if result]

    def refuse_different(self, config: Mapping[str, Any]) -> None:
        """Raise ConfigError, naming keys and values, if ranks have other configs (as dotted keys); a collective."""
        if len(set(self.gathered(digest_of(config)))) > 1:
            raise ConfigError(differences(self.gathered({key: json.dumps(value) for key, value in config.items()})))


class _Told(UserError):
    """A user's error of one rank, on all of them."""

    def __init__(self, lines: Iterable[str], code: ExitCode) -> None:
        super().__init__(lines)
        self.code = code


def differences(configs: list[Mapping[str, str]]) -> str:
    """One line that names the keys in which a rank differs from the first, and who has which value."""
    shown = []
    for key in sorted(set().union(*configs)):
        values = [config.get(key, "not set") for config in configs]
        differing = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if differing is not None:
            shown.append(f"{key} = {values[0]} on rank 0, {values[differing]} on rank {differing}")
    return (
        f"the ranks were started with different configs: {'; '.join(shown)}; start all with the same file and overrides"
    )


@contextmanager
def agreement(ranks: Ranks, timeout_s: int) -> Iterator[Agreement]:
    """The group of all ranks, while it is open. With one rank there is none."""
    if ranks.world_size == 1:
        yield Agreement()
        return
    opened = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    meeting = Agreement(opened)
    dist.barrier(group=opened)  # who has nothing to agree on would close it while others still connect
    try:
        yield meeting
    finally:
        group, meeting._group = meeting._group, None
        dist.destroy_process_group(group)


def first_then_all(ranks: Ranks, work: Callable[[], T]) -> T:
    """Run ``work`` on the first rank of each machine, then on the others, which find its files.

    The others wait for a week, since tokenising can take hours. An error on any machine is raised on every rank.
    """
    results: list[T] = []
    with agreement(ranks, WEEK_S) as together:
        together.by_some(ranks.is_first_local, lambda: results.append(work()))
    return results[0] if results else work()
