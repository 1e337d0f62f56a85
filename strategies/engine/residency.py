"""Presence: which bucket is in its home, and the copies that bring it there.

Eviction is free: the host's copy of a bucket that travels is current at all times (an update writes it back at once),
so leaving is nothing but hiding the parameters. Leaving is also lazy: a bucket stays until somebody wants its address.
Therefore the last blocks of forward are still present when backward begins with them, and are not fetched again.

[Note: moving in] UP, which alone moves in, waits for everything that has to do with its former tenants: their use
by COMPUTE (``used``) and the write-back that reads it (``stored``); a copy up that nobody used is UP's own. All rivals
are asked, not only the last tenant, since homes may overlap in part; waits already made cost nothing (``transfer.py``).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from strategies.engine.bucket_state import BucketState, Pending, Presence
from strategies.engine.transfer.transfer import Lane, Transfer


class Residency:
    """Moves buckets in and out of their homes.

    Args:
        debug: homes are filled with NaN before a bucket moves in, and every use checks who lives there.
    """

    def __init__(self, transfer: Transfer, *, debug: bool) -> None:
        self.transfer, self.debug = transfer, debug
        self._stamps: dict[int, tuple[str, int]] = {}

    def claim(self, held: BucketState) -> None:
        """Make ``held`` the tenant of its home; UP may write it afterwards. See [Note: moving in].

        Raises:
            RuntimeError: a rival is in use: the model uses together what the plan keeps apart.
        """
        for rival in held.overlapping:
            if rival.present:
                self._evict(rival, held)
        for former in (held, *held.overlapping):
            self.transfer.wait(Lane.UP, former.used, former.stored)
        held.presence = Presence.PRESENT
        held.generation += 1
        if self.debug:
            self._stamp(held)

    def _evict(self, held: BucketState, wanted_by: BucketState) -> None:
        """Hide the parameters; their bytes are on the host already."""
        if held.open:
            raise RuntimeError(
                f"{wanted_by.name} needs the address of {held.name}, which is in use: write a higher "
                f"strategies.offload.prefetch with weights: streamed (recomputing several blocks at once needs an "
                f"address for each of them)"
            )
        assert held.pending is not Pending.VISITING, f"{held.name} is being updated"
        self._vacate(held)

    def fetch(self, held: BucketState) -> None:
        """Copy the weights up from the host into their home."""
        assert held.copy is not None and held.settled, f"{held.name} has nothing to fetch"
        self.claim(held)
        self._bring(held, held.copy)

    def receive(self, held: BucketState, source: Tensor) -> None:
        """Copy updated weights from ``source`` on the host into the home of a resident bucket."""
        self.transfer.wait(Lane.UP, held.used)
        self._bring(held, source)

    def _bring(self, held: BucketState, source: Tensor) -> None:
        if self.debug:
            self.transfer.poison(Lane.UP, held.weight)
        self.transfer.copy(Lane.UP, held.weight, source)
        held.arrived = self.transfer.record(Lane.UP)
        held.presence = Presence.PRESENT

    def use(self, held: BucketState) -> None:
        """COMPUTE is about to use the home, and the parameters show it."""
        self.transfer.wait(Lane.COMPUTE, held.arrived)
        held.show()
        if self.debug:
            self._check(held)
            self.transfer.reads(Lane.COMPUTE, held.weight)

    def left(self, several: Iterable[BucketState]) -> None:
        """COMPUTE has been given everything that uses these homes for now."""
        event = None
        for held in several:
            event = event or self.transfer.record(Lane.COMPUTE)
            held.used = event
            if not held.open and not held.bucket.resident:
                held.cover()
                if self.transfer.eager and held.present and held.settled:
                    self._vacate(held)

    def _vacate(self, held: BucketState) -> None:
        held.leave()
        self.transfer.vacated(held.weight, held.used, held.stored, held.arrived)

    def _stamp(self, held: BucketState) -> None:
        for rival in held.overlapping:
            self._stamps.pop(rival.index, None)
        self._stamps[held.index] = (held.name, held.generation)

    def _check(self, held: BucketState) -> None:
        if held.bucket.resident:
            return
        stamp = self._stamps.get(held.index)
        assert stamp == (held.name, held.generation), f"{held.name} is used, but its home holds {stamp}"
