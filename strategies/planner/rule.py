"""The placement rule: use the device first, and move no more than is too much.

A *frame* says where optimizer state rests and where gradients wait. Frames go from what moves the least to what moves
the most, one bucket at a time:

1. optimizer state to the host, where the CPU updates it; last units first, since backward finishes them first. With
   one micro-batch per update their gradients wait on the host as well.
2. gradients of those buckets to the host; last units first.

In a frame that is too large weights may travel (``travel.py``): those of blocks, and of embedding and head, as far as
they must. Of the first frame that fits as it is, and of frames before it with travelling weights, the one is taken
whose simulated step is the shortest; without known rates the first that fits, or the last one with travelling weights.
Then, where rates are known, the simulator shares the updates of what rests on the host between the CPU and the link
(``sites.py``).

Never moved are weights of buckets that are small (a copy costs its latency and saves nothing) and of those that more
than half of the blocks use (they would come back for every block); nor do their gradients wait on the host. A bucket
whose state rests on the device keeps its weight there too, unless both are forced.

Refused: budgets that nothing fits into; the message says what would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from strategies.core.facts import Facts, Home, UnitKind
from strategies.core.layout import Bucket, Layout, Site, aligned
from strategies.core.protocol import Refusal
from strategies.core.render import human
from strategies.core.sizes import written
from strategies.planner import travel
from strategies.planner.addresses import arena_bytes, packed, travelling
from strategies.planner.buckets import block_bytes, form
from strategies.planner.greedy import DoesNotFit
from strategies.planner.sites import balanced, cheapest

SMALL = 8  # a bucket of less than this part of a block, per unit, is not worth a copy
FRAMES = 6  # frames with travelling weights that are priced
KEY = "strategies.offload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user asked for. Budgets in bytes; ``gpu_memory`` and ``host_memory`` as they were written.

    ``prefetch`` is how many steps ahead of its use a weight comes at most; None: as early as memory allows.
    """

    device_bytes: int
    host_bytes: int
    gpu_memory: object
    host_memory: object
    bucket_bytes: int | None = None
    prefetch: int | None = None
    in_backward: bool = False
    site: Literal["auto", "device", "host", "streamed"] = "auto"
    weights: Literal["auto", "resident", "streamed"] = "auto"
    gradients: Literal["auto", "device", "host"] = "auto"


@dataclass(frozen=True, slots=True)
class _Frame:
    """How many buckets have their state on the host, and how many of those their gradients too."""

    hosted: int
    parked: int


def choose(facts: Facts, wishes: Wishes, saved_bytes: int) -> Layout:
    """The layout that is simulated to be the fastest, with ``saved_bytes`` kept on the device for backward.

    Raises:
        Refusal: nothing fits.
    """
    search = _Search(facts, wishes)
    first = search.best(saved_bytes)
    if wishes.site != "auto":
        return first
    tried = [first]
    with suppress(Refusal):  # no room for visiting state
        tried.append(search.best(saved_bytes + search.visit_bytes))
    return cheapest(facts, [balanced(facts, layout, search.fits(saved_bytes)) for layout in tried])


class _Search:
    """The frames of the rule and what each of them needs."""

    def __init__(self, facts: Facts, wishes: Wishes) -> None:
        self._facts, self._wishes = facts, wishes
        self._buckets = form(facts, wishes.bucket_bytes)
        movable = _Movable(facts, wishes.bucket_bytes)
        streams = wishes.weights == "streamed"
        of_blocks = movable.blocks(self._buckets)
        self._blocks = self._free(of_blocks, even_if=streams)
        self._ends = self._free(movable.ends(self._buckets))
        self._hosted_always = set(self._blocks) if streams and wishes.site == "auto" else set()
        self._passing = set(movable.passing(self._buckets))
        trainable = [index for index, bucket in enumerate(self._buckets) if bucket.group is not None]
        self._hostable = [i for i in trainable if i not in self._hosted_always] if wishes.site == "auto" else []
        early = wishes.gradients == "host" or (wishes.gradients == "auto" and facts.run.accumulation == 1)
        self._parks_early = early
        self._empty = Layout(
            buckets=(),
            units=tuple(unit.name for unit in facts.units),
            in_backward=wishes.in_backward,
            accumulation=facts.run.accumulation,
            max_grad_norm=facts.run.max_grad_norm,
            moments=facts.run.moments,
        )
        largest = max((self._buckets[index].num_elements for index in of_blocks), default=0)
        self.visit_bytes = self._empty.visit_slots * 4 * (facts.run.moments + 1) * largest  # a master visits, too

    def best(self, saved_bytes: int) -> Layout:
        """The fastest layout that fits.

        Raises:
            Refusal: nothing fits.
        """
        room = self._wishes.device_bytes - saved_bytes
        frames = list(self.frames())
        streams = self._wishes.weights == "streamed"
        layouts = [self._streamed(frame) if streams else self.layout(frame) for frame in frames]
        first = next((i for i, layout in enumerate(layouts) if sizes(layout)[Home.DEVICE] <= room), None)
        fitting = [] if first is None else [layouts[first]]
        if not streams:
            fitting += self._with_travelling(frames[: len(frames) if first is None else first], room)
        elif first is None:
            fitting += self._with_travelling(frames[-1:], room)
        if not fitting:
            raise _no_device(self._wishes, saved_bytes + self._least(frames), saved_bytes)
        within = [layout for layout in fitting if sizes(layout)[Home.HOST] <= self._wishes.host_bytes]
        if not within:
            raise _no_host(self._wishes, min(sizes(layout)[Home.HOST] for layout in fitting))
        return cheapest(self._facts, within)

    def _with_travelling(self, frames: Sequence[_Frame], room: int) -> Iterator[Layout]:
        """Frames in which weights travel as far as they must; a few of those that fit, the last one first."""
        known = self._facts.machine.rates is not None and self._facts.run.forward_flops > 0
        some = spread(frames, FRAMES) if known else frames[-1:]
        for frame in reversed(some):
            layout, movable = self.layout(frame), self._movable(frame)
            rest = arena_bytes(layout)[Home.DEVICE] - weights(layout, movable)
            if not movable:
                continue
            try:
                yield travel.fitted(self._facts, layout, movable, room - rest, self._wishes.prefetch)
            except DoesNotFit:
                continue

    def _least(self, frames: Sequence[_Frame]) -> int:
        """Device bytes of the smallest layout there is."""
        found = []
        for frame in (frames[0], frames[-1]):
            layout, movable = self.layout(frame), self._movable(frame)
            rest = arena_bytes(layout)[Home.DEVICE] - weights(layout, movable)
            found.append(rest + travel.least(self._facts, layout, movable))
        return min(found)

    def _streamed(self, frame: _Frame) -> Layout:
        return travel.window(self.layout(frame), self._blocks, self._wishes.prefetch)

    def _movable(self, frame: _Frame) -> list[int]:
        """Buckets whose weights may travel."""
        forced = self._wishes.weights == "streamed"
        sites = self._sites(frame)
        blocks = [index for index in self._blocks if forced or sites[index] is not Site.DEVICE]
        return blocks + [index for index in self._ends if sites[index] is not Site.DEVICE]

    def _free(self, movable: list[int], *, even_if: bool = False) -> list[int]:
        """Those of ``movable`` whose state may rest where their weight does not."""
        if self._wishes.weights == "resident":
            return []
        bound = self._wishes.site == "device" and not even_if
        return [index for index in movable if not bound or self._buckets[index].group is None]

    def frames(self) -> Iterator[_Frame]:
        """From what moves the least to what moves the most."""
        frame = _Frame(0, 0)
        yield frame
        for hosted in range(1, len(self._hostable) + 1):
            yield (frame := replace(frame, hosted=hosted))
        for parked in range(1, len(self._parkable(frame)) + 1):
            yield replace(frame, parked=parked)

    def _parkable(self, frame: _Frame) -> list[int]:
        """Buckets whose gradients may wait at either home, in order."""
        if self._wishes.gradients != "auto":
            return []
        sites = self._sites(frame)
        free = {Site.STREAMED} if self._parks_early else {Site.STREAMED, Site.HOST}
        return [index for index, site in enumerate(sites) if site in free and index in self._passing]

    def _sites(self, frame: _Frame) -> list[Site]:
        forced = None if self._wishes.site == "auto" else Site(self._wishes.site)
        hosted = self._hosted_always | set(self._hostable[len(self._hostable) - frame.hosted :])
        return [
            Site.NONE if bucket.group is None else forced or (Site.HOST if index in hosted else Site.DEVICE)
            for index, bucket in enumerate(self._buckets)
        ]

    def layout(self, frame: _Frame) -> Layout:
        """All buckets as ``frame`` places them, every weight resident."""
        sites = self._sites(frame)
        parkable = self._parkable(frame)
        down = set(parkable[len(parkable) - frame.parked :])
        if self._parks_early:
            early = {Site.HOST, Site.STREAMED} if self._wishes.gradients == "host" else {Site.HOST}
            down |= {index for index, site in enumerate(sites) if site in early and index in self._passing}
        buckets = tuple(
            replace(bucket, site=sites[i], parks=Home.HOST if i in down else Home.DEVICE)
            for i, bucket in enumerate(self._buckets)
        )
        return replace(self._empty, buckets=buckets)

    def fits(self, saved_bytes: int) -> Callable[[Layout], bool]:
        """Says whether a layout is within both budgets."""

        def within(layout: Layout) -> bool:
            total = sizes(layout)
            device = total[Home.DEVICE] + saved_bytes
            return device <= self._wishes.device_bytes and total[Home.HOST] <= self._wishes.host_bytes

        return within


def sizes(layout: Layout) -> dict[Home, int]:
    """Bytes of both arenas."""
    total = arena_bytes(layout)
    total[Home.DEVICE] += packed(travelling(layout)).arena
    return total


def weights(layout: Layout, indices: Sequence[int]) -> int:
    """Bytes of the weights of these buckets."""
    return sum(aligned(layout.buckets[index].weight_bytes) for index in indices)


def spread(frames: Sequence[_Frame], number: int) -> list[_Frame]:
    """At most so many of ``frames``, evenly, the last among them."""
    if len(frames) <= number:
        return list(frames)
    return [frames[(index + 1) * len(frames) // number - 1] for index in range(number)]


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
        self._stack = next(iter(stacks), "")

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
        """Indices of large buckets of embedding and head that nothing uses while blocks run."""
        if not self._has_ends:
            return []
        return [
            index
            for index, bucket in enumerate(buckets)
            if not any(map(self._is_block, bucket.units))
            and self._is_large(bucket)
            and not any(map(self._is_around_blocks, bucket.params))
        ]

    def _is_around_blocks(self, param: str) -> bool:
        """Whether the module that owns the parameter contains the blocks, so that it is in use while they are."""
        owner = param.rpartition(".")[0]
        return not owner or f"{self._stack}.".startswith(f"{owner}.")

    def _is_block(self, unit: str) -> bool:
        return self._kinds[unit] is UnitKind.BLOCK

    def _is_large(self, bucket: Bucket) -> bool:
        return bucket.weight_bytes / len(bucket.units) >= self._worth

    def _by_few_blocks(self, bucket: Bucket) -> bool:
        return all(map(self._is_block, bucket.units)) and 2 * len(bucket.units) <= self._num_blocks


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
