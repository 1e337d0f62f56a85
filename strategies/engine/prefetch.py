"""Prefetch: weights and updates of the next scopes are started while the current one computes.

The order of scopes is a guess from the last forward. A wrong guess makes weights late, never wrong: every scope settles
and fetches its own buckets when it is entered (``engine.py``).

Nothing is started that would take memory from a bucket in use, from one that is needed sooner, or from an update under
way; and an offloaded weight comes no earlier than the plan says, since until then its address belongs to others.
Residents come as soon as they are computed. Where ranks share buckets, bringing one is a collective, in the same order
on all: so a bucket is due when the plan says so, however far the worker is, and its update is waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import torch

from deepstow.strategies.engine.buckets.bucket_state import BucketState, Pending
from deepstow.strategies.engine.module_hooks import Scope
from deepstow.strategies.engine.residency import Residency
from deepstow.strategies.engine.updating.updates import Updates


class Prefetch:
    """Starts copies and updates ahead of their use."""

    def __init__(self, scopes: list[Scope], residency: Residency, updates: Updates) -> None:
        self._residency = residency
        self._updates = updates
        self._order = list(scopes)  # as in the last forward
        self._entered: list[Scope] = []  # in this forward
        self._at = -1  # index in the order
        self.rounds = False  # several micro-batches take turns in each scope (``layers_first.py``)

    def begin(self) -> None:
        if self._entered:
            self._order = self._entered
        self._entered = []
        self._at = -1

    def in_forward(self, scope: Scope) -> None:
        """Forward has come to ``scope``: start what the rest of it needs."""
        if self.rounds and scope in self._entered:
            return  # another micro-batch came first
        self._entered.append(scope)
        later = range(self._at + 1, len(self._order))
        self._at = next((i for i in later if self._order[i] is scope), self._at)
        next_pass = reversed(self._order) if torch.is_grad_enabled() else self._order
        self._start(self._order[self._at + 1 :], self._here, next_pass)

    def begin_backward(self) -> None:
        """A backward begins, perhaps not the first since the last forward."""
        self._order = self._entered or self._order
        self._entered = []
        self._at = len(self._order)

    def come_back_to(self, scope: Scope) -> None:
        if self._entered:
            self.begin_backward()
        earlier = range(min(self._at, len(self._order)) - 1, -1, -1)
        self._at = next((i for i in earlier if self._order[i] is scope), self._at)

    def in_backward(self) -> None:
        later = self._order[: max(self._at, 0)][::-1]
        self._start([scope for scope in later if scope.saves_weights], self._here, self._order, backward=True)

    def entered(self) -> list[BucketState]:
        """The buckets of the scopes that this forward has entered."""
        return [bucket for scope in self._entered for bucket in scope.buckets]

    def used(self) -> set[int]:
        """The buckets, by index, of the scopes of this forward."""
        return {bucket.index for scope in self._order for bucket in scope.buckets}

    def to_come(self) -> set[int]:
        """Those of the scope that backward has come to, and of the scopes that it has not reached."""
        return {bucket.index for scope in self._order[: self._at + 1] for bucket in scope.buckets}

    def in_step(self) -> None:
        self._start(self._order, None, ())

    @property
    def _here(self) -> Scope | None:
        return self._order[self._at] if 0 <= self._at < len(self._order) else None

    def _start(
        self, scopes: Sequence[Scope], here: Scope | None, after: Iterable[Scope], *, backward: bool = False
    ) -> None:
        """Start what ``scopes``, which come after ``here``, need, up to the first that cannot be started yet. What they
        and those ``after`` them need of the disk is read ahead.
        """
        self._start_first(scopes, here, backward=backward)
        self._residency.expect(bucket for scope in chain(scopes, after) for bucket in scope.buckets)

    def _start_first(self, scopes: Iterable[Scope], here: Scope | None, *, backward: bool) -> None:
        ticks = 0
        sooner: set[int] = set()  # not set[int](), which torch 2.11 does not trace where somebody compiles the model
        for scope in scopes:
            ticks += here is not None and (here.is_block or scope.is_block)  # between blocks scopes share one tick
            here = scope
            for bucket in scope.buckets:
                early = bucket.spec.resident and not bucket.is_shared
                is_due = not bucket.settled if early else ticks <= bucket.leads[backward]
                if is_due and not self._start_one(bucket, sooner):
                    return
                sooner.add(bucket.index)

    def _start_one(self, bucket: BucketState, sooner: set[int]) -> bool:
        """Start the update or the copy of ``bucket``. False: it has to wait, and so does all that comes after it."""
        if bucket.pending is Pending.HOST:
            if bucket.future is None or not (bucket.is_shared or bucket.future.done()):
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
