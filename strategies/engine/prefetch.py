"""Prefetch: weights and updates of the next scopes are started while the current one computes.

The order of scopes is a guess from the last forward. A wrong guess makes weights late, never wrong: every scope settles
and fetches its own buckets when it is entered (``engine.py``).

Invariant. Nothing is started that would take memory from a bucket in use, from one that is needed sooner, or from an
update under way; and an offloaded weight comes no earlier than the plan says, since until then its address belongs to
other buckets. New weights of residents, which have their home, come as soon as they are computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from strategies.engine.bucket_state import BucketState, Pending
from strategies.engine.module_hooks import Scope
from strategies.engine.residency import Residency
from strategies.engine.updates import Updates


@dataclass(frozen=True, slots=True)
class Upcoming:
    """A scope that is expected to be entered in so many ticks, in forward or in backward."""

    scope: Scope
    ticks: int
    backward: bool


class ScopeOrder:
    """Which scopes come next, as in the last forward."""

    def __init__(self, scopes: list[Scope]) -> None:
        self._order = list(scopes)
        self._entered: list[Scope] = []  # in this forward
        self._at = -1

    def begin(self) -> None:
        """A forward begins."""
        if self._entered:
            self._order = self._entered
        self._entered, self._at = [], -1

    def enter_forward(self, scope: Scope) -> None:
        """Forward has come to ``scope``."""
        self._entered.append(scope)
        later = [i for i in range(self._at + 1, len(self._order)) if self._order[i] is scope]
        self._at = later[0] if later else self._at

    def enter_backward(self, scope: Scope) -> None:
        """Backward has come to ``scope``."""
        if self._entered:
            self._order, self._entered, self._at = self._entered, [], len(self._entered)
        earlier = [i for i in range(min(self._at, len(self._order)) - 1, -1, -1) if self._order[i] is scope]
        self._at = earlier[0] if earlier else self._at

    def after_forward(self) -> Iterator[Upcoming]:
        """The rest of forward, then all of backward if gradients are on."""
        later = list(_upcoming(self._order[self._at + 1 :], self._here))
        yield from later
        if torch.is_grad_enabled():
            yield from _upcoming(self._order[::-1], None, 1 + (later[-1].ticks if later else 0), backward=True)

    def after_backward(self) -> Iterator[Upcoming]:
        """The rest of backward."""
        yield from _upcoming(self._order[: max(self._at, 0)][::-1], self._here, backward=True)

    def from_start(self) -> Iterator[Upcoming]:
        """All of the next forward."""
        yield from _upcoming(self._order, None)

    @property
    def _here(self) -> Scope | None:
        return self._order[self._at] if 0 <= self._at < len(self._order) else None


def _upcoming(
    scopes: Iterable[Scope], here: Scope | None, ticks: int = 0, *, backward: bool = False
) -> Iterator[Upcoming]:
    """``scopes`` and in how many ticks they come; consecutive scopes outside of blocks share one tick."""
    for scope in scopes:
        ticks += here is not None and (here.is_block or scope.is_block)
        here = scope
        yield Upcoming(scope, ticks, backward)


class Prefetch:
    """Starts copies and updates ahead of their use."""

    def __init__(self, scopes: list[Scope], residency: Residency, updates: Updates) -> None:
        self.order = ScopeOrder(scopes)
        self._residency, self._updates = residency, updates

    def start(self, expected: Iterable[Upcoming]) -> None:
        """Start what ``expected`` needs, in that order, up to the first that cannot be started yet."""
        sooner: set[int] = set()
        for upcoming in expected:
            for bucket in upcoming.scope.buckets:
                if bucket.spec.resident:
                    wanted = not bucket.settled
                else:
                    wanted = upcoming.ticks <= bucket.leads[upcoming.backward]
                if wanted and not self._start(bucket, sooner):
                    return
                sooner.add(bucket.index)

    def _start(self, bucket: BucketState, sooner: set[int]) -> bool:
        """Start the update or the copy of ``bucket``. False: it has to wait, and so does all that comes after it."""
        if bucket.pending is Pending.HOST:
            if bucket.future is None or not bucket.future.done():
                return False
            self._updates.settle(bucket)
        if not bucket.present or bucket.pending is Pending.DEVICE:
            for other in bucket.overlapping:
                if other.pending is Pending.VISITING or (other.present and (other.open or other.index in sooner)):
                    return False
        if bucket.pending is Pending.DEVICE:
            if not self._updates.may_begin(bucket):
                return False
            self._updates.begin(bucket)
        elif not bucket.present:
            self._residency.fetch(bucket)
        return True
