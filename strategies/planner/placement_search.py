"""The placement search: use the device first, and offload only the excess, unless offloading more is faster.

``site_search.py`` finds a fast plan, in buckets of whole blocks and then in those whose copies are fastest, where it
starts at the plan of whole blocks as well. Where the budget is not much more than the least, also in the buckets that
need the least of the device: without them a larger budget had a plan that is 6 % slower. Without known rates: the first
placement that fits as it is, or the last one with offloaded weights.

Refused: budgets that nothing fits into. The least budgets are those of all placements, capacities of ``PARTS`` and
sites that the options leave open (``least_memory.py``); the message names the least, and writing it is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from math import inf

from deepstow.strategies.core.facts import Facts, Tier
from deepstow.strategies.core.layout import Layout
from deepstow.strategies.core.on_disk import hold_weights
from deepstow.strategies.core.protocol import MemoryRefusal, Refusal
from deepstow.strategies.core.sizes import human, written
from deepstow.strategies.planner.buckets import PARTS, block_bytes, capacity, typical_block_bytes
from deepstow.strategies.planner.least_memory import SAMPLE, Least, least_memory
from deepstow.strategies.planner.places import OffloadRequest, Places
from deepstow.strategies.planner.site_search import SiteSearch, fastest
from deepstow.strategies.planner.spill import off_disk, spilled

TIGHT = 2  # up to so many times the least, buckets that need the least are tried as well
KEY = "strategies.offload"


class PlacementSearch:
    """One search. The budgets less what forward saves are what the arenas may take.

    Args:
        saved_bytes: kept on the device for backward; ``hosted_bytes`` on the host, and what else others have there.
    """

    def __init__(self, facts: Facts, request: OffloadRequest, saved_bytes: int, hosted_bytes: int = 0) -> None:
        self._facts = facts
        self._request = request
        self._saved_bytes = saved_bytes
        self._hosted_bytes = hosted_bytes
        self._device_room = request.device_bytes - saved_bytes
        self._host_room = request.host_bytes - hosted_bytes
        self._ranks = max(1, facts.machine.ranks)
        self._knows_rates = facts.machine.rates is not None and facts.run.forward_flops > 0
        self._usual = Places(facts, request)
        self._search = self._of(self._usual)

    def best(self, *, brief: bool = False) -> Layout:
        """The layout with the fastest simulated step, or with ``brief`` that of ``quick``.

        Raises:
            Refusal: nothing fits.
        """
        quick = self.quick if brief and self._knows_rates else None
        layout = quick[0] if quick else self.found()
        if layout is None:
            raise self._refusal()
        return layout

    def found(self) -> Layout | None:
        """``best``; None if nothing fits, which takes less time than to say how much would be enough."""
        if all(
            places.least_bytes > self._device_room + self._host_room + self._request.disk_bytes
            for places in self._everything
        ):
            return None
        if not self._knows_rates:
            return self._first() or self._least_host()
        tight = self._device_room < TIGHT * _lower_bound(self._usual)
        searches = [*self._searches, *([self._of(self._smallest)] if tight else [])]
        plan = fastest(searches, self._device_room)
        return self._least_host() if plan is None else plan.layout

    @cached_property
    def quick(self) -> tuple[Layout, float] | None:
        """A layout and its simulated seconds, for comparisons: a mix, which takes a tenth of the time of ``found``. The
        rates must be known.
        """
        timed = self._search.quick(self._device_room)
        if timed is not None:
            return timed.layout, timed.seconds
        layout = self.found()
        return None if layout is None else (layout, self._search.seconds(layout))

    def estimated(self) -> float | None:
        """The estimated seconds per step, which take milliseconds to find; it may turn out not to fit. None if the
        machine's rates are unknown, or nothing may fit.
        """
        return self._search.promised(self._device_room) if self._knows_rates else None

    def _of(self, places: Places) -> SiteSearch:
        return SiteSearch(self._facts, self._request, places, self._host_room)

    def _first(self) -> Layout | None:
        """What moves the least of all that fits as it is; if nothing does, with offloaded weights."""
        tried = ladder = self._usual.ladder()
        if self._request.weights != "streamed":
            sizes = ((rung, self._usual.sizes(spilled(self._usual, rung, self._host_room))) for rung in ladder)
            fits = (rung for rung, size in sizes if size.device <= self._device_room and size.host <= self._host_room)
            tried = [*islice(fits, 1), ladder[-1], ladder[0]]
        layouts = (self._search.worked_out(placement, self._device_room) for placement in tried)
        return next((layout for layout in layouts if layout is not None), None)

    @cached_property
    def _searches(self) -> list[SiteSearch]:
        """In buckets of whole blocks, which are few, then in the usual ones."""
        block = typical_block_bytes(self._facts)
        if self._request.bucket_bytes is None and block:
            places = Places(self._facts, self._request, block)
            if len(places.buckets) != len(self._usual.buckets):
                return [self._of(places), self._search]
        return [self._search]

    # --- the least memory --------------------------------------------------------------------------------------------

    @cached_property
    def _smallest(self) -> Places:
        """Placements of the buckets that need the least of the device."""
        return min(self._others(), key=_lower_bound, default=self._usual)

    def _others(self, request: OffloadRequest | None = None) -> Iterator[Places]:
        """Placements of other buckets than the usual ones, if the request leaves them open, and of the usual ones
        without slots for embedding and head. Of many placements, only those of the smallest buckets, which need the
        smallest slots.
        """
        block, used_request = block_bytes(self._facts), request or self._request
        usual = capacity(self._facts) or block
        few = len(self._usual.ladder()) <= SAMPLE
        sizes = (block, *(-(-block // parts) for parts in PARTS), 1) if few else (1,)
        if self._request.bucket_bytes is not None or not block:
            sizes = ()
        for size in dict.fromkeys((*sizes, usual)):
            places = Places(self._facts, used_request, None if size == usual else size, direct=True)
            if places.direct or size != usual:
                yield places

    @property
    def _everything(self) -> Iterator[Places]:
        """All buckets and sites that the request leaves open."""
        yield self._usual
        yield from self._unusual

    @cached_property
    def _unusual(self) -> list[Places]:
        others = list(self._others())
        if self._request.site == "auto":
            streamed = replace(self._request, site="streamed")
            others += [Places(self._facts, streamed), *self._others(streamed)]
        return others

    def _least(self, families: Iterable[Places], tier: Tier, room: float = inf) -> Least | None:
        return least_memory(families, tier, room, all_leave=self._request.weights == "streamed")

    @cached_property
    def _here(self) -> Least | None:
        """What needs the least of the host within the budget of the device; None: that is too small for everything."""
        too_small = min(map(_lower_bound, self._everything)) > self._device_room
        return None if too_small else self._least(self._everything, Tier.HOST, self._device_room)

    def _least_host(self) -> Layout | None:
        """The layout that needs the least of the host, or of the device, if the search found none; None: neither fits.

        Packing may need more than was counted, so that with fewer copies on the host more of the device is needed.
        """
        if self._here is None:
            return None
        if self._here.num_bytes[Tier.HOST] <= self._host_room:  # and with less on the disk, if there is one
            search = self._of(self._here.places)
            layout = search.worked_out(self._here.placement, self._device_room) if self._request.disk else None
            return off_disk(self._here.layout, self._host_room) if layout is None else layout
        least = self._within_host
        return None if least is None or least.num_bytes[Tier.DEVICE] > self._device_room else least.layout

    # --- refusals ----------------------------------------------------------------------------------------------------

    def _refusal(self) -> Refusal:
        request = self._request
        if self._here is None:
            key, budget = f"{KEY}.gpu_memory", request.device_bytes
            find = (self._no_device, self._needed_device)
            return MemoryRefusal(key, request.gpu_memory, *find, tier=Tier.DEVICE, budget=budget)
        key, needed = f"{KEY}.host_memory", self._hosted_bytes + self._here.num_bytes[Tier.HOST]
        cure, budget = partial(self._no_host, needed), request.host_bytes
        return MemoryRefusal(key, request.host_memory, cure, lambda: needed, tier=Tier.HOST, budget=budget)

    @cached_property
    def _within_host(self) -> Least | None:
        """What needs the least of the device within the budget of the host, of everything."""
        return self._least(self._everything, Tier.DEVICE, self._host_room)

    @cached_property
    def _anywhere(self) -> Least:
        """The same; if the budget of the host is too small for all, without it."""
        least = self._within_host or self._least(self._everything, Tier.DEVICE)
        assert least is not None, "without limits there is a plan"
        return least

    def _needed_device(self) -> int:
        return self._saved_bytes + self._anywhere.num_bytes[Tier.DEVICE]

    def _no_device(self) -> str:
        needed, budget = self._needed_device(), self._request.device_bytes
        cure = (
            f"{human(needed)} are needed, {human(self._saved_bytes)} of them for forward and backward, with everything "
            f"on the host that may be there: {human(needed - budget)} too much for {human(budget)}; write "
            f"{written(needed)} or more, or a smaller training.per_device_train_batch_size{self._forced()}"
        )
        if self._within_host is None:
            host = written(self._ranks * (self._hosted_bytes + self._anywhere.num_bytes[Tier.HOST]))
            cure += f"; the host is too small as well: write {KEY}.host_memory: {host} too"
        return cure

    def _no_host(self, needed: int) -> str:
        hosted = self._hosted_bytes
        budget = self._request.host_bytes
        least = self._within_host
        device = inf if least is None else self._saved_bytes + least.num_bytes[Tier.DEVICE]
        for_others = f", {human(hosted)} of them for what other strategies keep there" if hosted else ""
        per_rank, of_all = (" on each rank", f" (for {self._ranks} ranks)") if self._ranks > 1 else ("", "")
        fits = device <= self._facts.machine.device_bytes
        alone = self._request.shards == self._facts.run.adding_copies == 1
        if (
            self._request.disk
            and hold_weights(self._request.disk)
            and alone
            and self._request.gradients == "auto"
            and self._request.site in ("auto", "host")
        ):
            per_rank += f" (weights may rest on the disk with {KEY}.gradients: passing and training.max_grad_norm: 0)"
        or_device = f", or {KEY}.gpu_memory: {written(int(device))}" if fits else ""
        return (
            f"{human(needed)} of host memory are needed{per_rank}{for_others}: {human(needed - budget)} too much for "
            f"{human(budget)}; write {written(self._ranks * needed)} or more{of_all} if the machine has it{or_device}"
            f"{self._forced()}"
        )

    def _forced(self) -> str:
        forced = [name for name in ("site", "weights", "gradients") if getattr(self._request, name) != "auto"]
        forced += ["bucket_size"] if self._request.bucket_bytes is not None else []
        return "".join(f", or leave {KEY}.{name} at auto" for name in forced if name not in self._request.decided)


def _lower_bound(placements: Places) -> int:
    """Device bytes with all on the host that may be there; if weights are packed without gaps, exactly."""
    sizes = placements.sizes(placements.ladder()[-1])
    return sizes.rest + min(sizes.weights, sizes.largest_unit + sizes.codes)
