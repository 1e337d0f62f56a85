"""The placement rule: use the device first, and move no more than is too much.

In this order, one bucket at a time, until the device's budget holds everything:

1. optimizer state to the host, where the CPU updates it; last units first, since backward finishes them first. With
   one micro-batch per update their gradients wait on the host as well.
2. gradients of those buckets to the host; last units first.
3. weights of blocks travel through a ring of slots; first blocks first.
4. embedding and head share one place.

Then, where the machine's rates are known, the simulator shares the updates of what rests on the host between the CPU
and the link (``sites.py``).

Never moved are weights of buckets that are small (a copy costs its latency and saves nothing) and of those that more
than half of the blocks use (they would come back for every block); nor do their gradients wait on the host. A bucket
whose state rests on the device keeps its weight there too, unless both are forced.

Refused: budgets that nothing fits into; the message says what would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from strategies.core.facts import Facts, Home, UnitKind
from strategies.core.layout import Bucket, Layout, Need, Site, needs, scratch_bytes
from strategies.core.protocol import Refusal
from strategies.core.render import human
from strategies.core.sizes import written
from strategies.planner.addresses import arena_bytes
from strategies.planner.buckets import block_bytes, form
from strategies.planner.sites import balanced, cheapest

BLOCKS, ENDS = "blocks", "ends"  # names of rings
SLOTS = 3  # in use, arriving, and free for the next
SMALL = 8  # a bucket of less than this part of a block, per unit, is not worth a copy
KEY = "strategies.offload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user asked for. Budgets in bytes; ``gpu_memory`` and ``host_memory`` as they were written."""

    device_bytes: int
    host_bytes: int
    gpu_memory: object
    host_memory: object
    bucket_bytes: int | None = None
    slots: int | None = None
    prefetch: int = 1
    in_backward: bool = False
    site: Literal["auto", "device", "host", "streamed"] = "auto"
    weights: Literal["auto", "resident", "streamed"] = "auto"
    gradients: Literal["auto", "device", "host"] = "auto"


@dataclass(frozen=True, slots=True)
class _Step:
    """How far each of the four measures goes, in buckets; ``ends`` is all or nothing."""

    hosted: int
    parked: int
    travelling: int
    ends: bool


def choose(facts: Facts, wishes: Wishes, saved_bytes: int) -> Layout:
    """The layout that moves the least, with ``saved_bytes`` kept on the device for backward.

    Raises:
        Refusal: nothing fits, or too few slots.
    """
    search = _Search(facts, wishes)
    first = search.first_that_fits(saved_bytes)
    if wishes.site != "auto":
        return first
    tried = [first, *search.with_room_for_visits(saved_bytes)]
    return cheapest(facts, [balanced(facts, layout, search.fits(saved_bytes)) for layout in tried])


class _Search:
    """The steps of the rule and what each of them needs."""

    def __init__(self, facts: Facts, wishes: Wishes) -> None:
        self._wishes = wishes
        self._buckets = form(facts, wishes.bucket_bytes)
        self._cache: dict[tuple[int, Site, str | None, Home], tuple[Need, ...]] = {}
        movable = _Movable(facts, wishes.bucket_bytes)
        of_blocks = movable.blocks(self._buckets)
        self._largest = max((self._buckets[index].num_elements for index in of_blocks), default=0)
        self._blocks = self._free(of_blocks, even_if=wishes.weights == "streamed")
        self._ends = self._free(movable.ends(self._buckets))
        always = set(self._blocks) if wishes.weights == "streamed" and wishes.site == "auto" else set()
        self._hosted_always = always
        self._passing = set(movable.passing(self._buckets))
        trainable = [index for index, bucket in enumerate(self._buckets) if bucket.group is not None]
        self._hostable = [index for index in trainable if index not in always] if wishes.site == "auto" else []
        early = wishes.gradients == "host" or (wishes.gradients == "auto" and facts.run.accumulation == 1)
        self._parks_early = early
        self._least = least = least_slots(facts, [self._buckets[index] for index in self._blocks], wishes.prefetch)
        self._frame = Layout(
            buckets=(),
            rings={BLOCKS: wishes.slots or max(SLOTS, least), ENDS: movable.end_slots(self._buckets, self._ends)},
            prefetch=wishes.prefetch,
            in_backward=wishes.in_backward,
            accumulation=facts.run.accumulation,
            max_grad_norm=facts.run.max_grad_norm,
            moments=facts.run.moments,
        )

    def first_that_fits(self, saved_bytes: int) -> Layout:
        """The layout that moves the least.

        Raises:
            Refusal: nothing fits, or too few slots.
        """
        smallest: int | None = None
        for step in self.steps():
            totals = self.totals(step)
            device = totals[Home.DEVICE] + saved_bytes
            if device <= self._wishes.device_bytes:
                if totals[Home.HOST] > self._wishes.host_bytes:
                    raise _no_host(self._wishes, totals[Home.HOST])
                self.check_slots(step)
                return self.layout(step)
            smallest = device if smallest is None else min(smallest, device)
        assert smallest is not None
        raise _no_device(self._wishes, smallest, saved_bytes)

    def with_room_for_visits(self, saved_bytes: int) -> Iterator[Layout]:
        """The same with as much left free as visiting state takes; nothing, where that does not fit."""
        numbers = self._frame.moments + 1  # a master visits, too
        try:
            yield self.first_that_fits(saved_bytes + self._frame.visit_slots * 4 * numbers * self._largest)
        except Refusal:
            return

    def check_slots(self, step: _Step) -> None:
        """Nothing, if the buckets that travel have slots enough.

        Raises:
            Refusal: they have not.
        """
        slots, least = self._wishes.slots, self._least
        if slots is not None and slots < min(least, step.travelling):
            cure = f"a block and what is fetched ahead of it need {least} slots; write {least}, or a lower prefetch"
            raise Refusal(f"{KEY}.slots", slots, cure)

    def _free(self, movable: list[int], *, even_if: bool = False) -> list[int]:
        """Those of ``movable`` whose state may rest where their weight does not."""
        if self._wishes.weights == "resident":
            return []
        bound = self._wishes.site == "device" and not even_if
        return [index for index in movable if not bound or self._buckets[index].group is None]

    def steps(self) -> Iterator[_Step]:
        """From what moves the least to what moves the most."""
        forced = len(self._blocks) if self._wishes.weights == "streamed" else 0
        step = _Step(0, 0, forced, False)
        yield step
        for hosted in range(1, len(self._hostable) + 1):
            yield (step := replace(step, hosted=hosted))
        for parked in range(1, len(self._parkable(step)) + 1):
            yield (step := replace(step, parked=parked))
        for travelling in range(forced + 1, len(self._blocks) + 1):
            yield (step := replace(step, travelling=travelling))
        if self._ends:
            yield replace(step, ends=True)

    def _parkable(self, step: _Step) -> list[int]:
        """Buckets whose gradients may wait at either home, in order."""
        if self._wishes.gradients != "auto":
            return []
        sites = self._sites(step)
        free = {Site.STREAMED} if self._parks_early else {Site.STREAMED, Site.HOST}
        return [index for index, site in enumerate(sites) if site in free and index in self._passing]

    def _sites(self, step: _Step) -> list[Site]:
        forced = None if self._wishes.site == "auto" else Site(self._wishes.site)
        hosted = self._hosted_always | set(self._hostable[len(self._hostable) - step.hosted :])
        return [
            Site.NONE if bucket.group is None else forced or (Site.HOST if index in hosted else Site.DEVICE)
            for index, bucket in enumerate(self._buckets)
        ]

    def buckets(self, step: _Step) -> list[Bucket]:
        """All buckets as ``step`` places them."""
        sites = self._sites(step)
        parkable = self._parkable(step)
        down = set(parkable[len(parkable) - step.parked :])
        if self._parks_early:
            early = {Site.HOST, Site.STREAMED} if self._wishes.gradients == "host" else {Site.HOST}
            down |= {index for index, site in enumerate(sites) if site in early and index in self._passing}
        rings = dict.fromkeys(self._blocks[: step.travelling], BLOCKS)
        rings |= dict.fromkeys(self._ends if step.ends else (), ENDS)
        return [
            replace(bucket, site=sites[i], ring=rings.get(i), parks=Home.HOST if i in down else Home.DEVICE)
            for i, bucket in enumerate(self._buckets)
        ]

    def layout(self, step: _Step) -> Layout:
        """The layout of ``step``, with the rings that are in use."""
        buckets = tuple(self.buckets(step))
        used = {bucket.ring for bucket in buckets}
        rings = {name: slots for name, slots in self._frame.rings.items() if name in used}
        return replace(self._frame, buckets=buckets, rings=rings)

    def fits(self, saved_bytes: int) -> Callable[[Layout], bool]:
        """Says whether a layout is within both budgets."""

        def within(layout: Layout) -> bool:
            every = [need for bucket in layout.buckets for need in needs(bucket, layout)]
            totals = arena_bytes(every, layout, scratch_bytes(layout))
            device = totals[Home.DEVICE] + saved_bytes
            return device <= self._wishes.device_bytes and totals[Home.HOST] <= self._wishes.host_bytes

        return within

    def totals(self, step: _Step) -> dict[Home, int]:
        """Bytes of both arenas."""
        layout = replace(self._frame, buckets=tuple(self.buckets(step)))
        every = [need for index, bucket in enumerate(layout.buckets) for need in self._needs(index, bucket)]
        return arena_bytes(every, layout, scratch_bytes(layout))

    def _needs(self, index: int, bucket: Bucket) -> tuple[Need, ...]:
        key = (index, bucket.site, bucket.ring, bucket.parks)
        if key not in self._cache:
            self._cache[key] = tuple(needs(bucket, self._frame))
        return self._cache[key]


class _Movable:
    """Whose weights may travel."""

    def __init__(self, facts: Facts, bucket_bytes: int | None) -> None:
        self._kinds = {unit.name: unit.kind for unit in facts.units}
        self._num_blocks = sum(kind is UnitKind.BLOCK for kind in self._kinds.values())
        largest = block_bytes(facts)
        self._worth = min(largest, bucket_bytes or largest) / SMALL
        stacks = {unit.name.rpartition(".")[0] for unit in facts.units if unit.kind is UnitKind.BLOCK}
        # With several stacks of blocks the "head" holds what stands between them, and is not used at the end only.
        self._has_ends = len(stacks) == 1

    def blocks(self, buckets: Sequence[Bucket]) -> list[int]:
        """Indices of buckets that only blocks use, large enough, and used by few."""
        return [index for index, bucket in enumerate(buckets) if self._is_large(bucket) and self._by_few_blocks(bucket)]

    def passing(self, buckets: Sequence[Bucket]) -> list[int]:
        """Indices of buckets whose gradients may pass through a ring: large, and complete within a few blocks.

        The gradients of others are few and land all through backward; they would hold a slot all the time.
        """
        return [
            index
            for index, bucket in enumerate(buckets)
            if self._is_large(bucket) and (len(bucket.units) == 1 or self._by_few_blocks(bucket))
        ]

    def ends(self, buckets: Sequence[Bucket]) -> list[int]:
        """Indices of large buckets of embedding and head; none, where only one of the two has any."""
        if not self._has_ends:
            return []
        found = [
            index
            for index, bucket in enumerate(buckets)
            if len(bucket.units) == 1 and not self._is_block(bucket.units[0]) and self._is_large(bucket)
        ]
        return found if len({buckets[index].units for index in found}) > 1 else []

    def end_slots(self, buckets: Sequence[Bucket], ends: Sequence[int]) -> int:
        """As many as one of the ends needs at a time."""
        units = [buckets[index].units for index in ends]
        return max((units.count(unit) for unit in units), default=1)

    def _is_block(self, unit: str) -> bool:
        return self._kinds[unit] is UnitKind.BLOCK

    def _is_large(self, bucket: Bucket) -> bool:
        return bucket.weight_bytes / len(bucket.units) >= self._worth

    def _by_few_blocks(self, bucket: Bucket) -> bool:
        return all(map(self._is_block, bucket.units)) and 2 * len(bucket.units) <= self._num_blocks


def least_slots(facts: Facts, members: Sequence[Bucket], prefetch: int) -> int:
    """The fewest slots with which no bucket of a block evicts another, or one that is fetched ahead of it."""
    place = {unit.name: index for index, unit in enumerate(facts.units)}
    firsts = [min(place[unit] for unit in bucket.units) for bucket in members]
    lasts = [max(place[unit] for unit in bucket.units) for bucket in members]
    together = (
        later - index
        for index in range(len(members))
        for later in range(index, len(members))
        if firsts[later] <= lasts[index] + prefetch and firsts[index] <= lasts[later] + prefetch
    )
    return 1 + max(together, default=0)


def _forced(wishes: Wishes) -> str:
    names = [name for name in ("site", "weights", "gradients") if getattr(wishes, name) != "auto"]
    return "".join(f", or leave {KEY}.{name} at auto" for name in names)


def _no_device(wishes: Wishes, smallest: int, saved_bytes: int) -> Refusal:
    cure = (
        f"{human(smallest)} are needed, {human(saved_bytes)} of them for what forward saves, with everything moved to "
        f"the host that may be: {human(smallest - wishes.device_bytes)} too much for {human(wishes.device_bytes)}; "
        f"write {written(smallest)} or more, or a smaller training.per_device_train_batch_size{_forced(wishes)}"
    )
    return Refusal(f"{KEY}.gpu_memory", wishes.gpu_memory, cure)


def _no_host(wishes: Wishes, needed: int) -> Refusal:
    cure = (
        f"{human(needed)} of host memory are needed: {human(needed - wishes.host_bytes)} too much for "
        f"{human(wishes.host_bytes)}; write {written(needed)} or more if the machine has it, or a larger gpu_memory"
        f"{_forced(wishes)}"
    )
    return Refusal(f"{KEY}.host_memory", wishes.host_memory, cure)
