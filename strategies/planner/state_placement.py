"""Frames: where optimizer state rests, where gradients wait, and who updates; weights all at home.

From what moves the least to what moves the most, one bucket at a time:

1. optimizer state to the host, where the CPU updates it; last units first, since backward finishes them first. With
   one micro-batch per update their gradients wait on the host as well.
2. gradients of those buckets to the host; last units first.

Besides, a part of the blocks' host updates may be streamed through the device, spread evenly: the CPU's memory and the
link are two roads for the same state, and each idles while the other works. (Interleaving updates of the GPU and the
CPU by a performance model is from "Deep Optimizer States", arXiv 2410.21316.)

A bucket whose state rests on the device keeps its weight there too, unless both are forced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from strategies.core.facts import Facts, Home, UnitKind
from strategies.core.layout import Bucket, Item, Layout, Site, aligned, needs, scratch_of
from strategies.planner.buckets import capacity, form
from strategies.planner.movable import Movable

Place: TypeAlias = tuple[Site, Home]
ON_DEVICE = (Site.DEVICE, Site.STREAMED)
PASSING = (Item.GRAD, Item.VISIT)  # on the device; weights are counted apart
PARTS = 8  # shares of host updates that may be streamed: none, one eighth, ... all


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadRequest:
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
class StatePlacement:
    """How many buckets have their state on the host, how many of those their gradients too, and how many eighths of
    the blocks' host updates are streamed."""

    hosted: int
    parked: int
    eighths: int = 0

    @property
    def plain(self) -> StatePlacement:
        """The same, with nothing streamed."""
        return replace(self, eighths=0)

    def with_eighths(self, more: int) -> StatePlacement:
        """The same, with ``more`` streamed."""
        return replace(self, eighths=self.eighths + more)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Device bytes of a frame: of the weights that may travel, and of all else."""

    movable: int
    rest: int

    @property
    def whole(self) -> int:
        return self.movable + self.rest


class StatePlacements:
    """The frames that the wishes allow."""

    def __init__(self, facts: Facts, wishes: OffloadRequest) -> None:
        self._wishes = wishes
        size = wishes.bucket_bytes or capacity(facts)
        self._buckets = form(facts, size)
        movable = Movable(facts, size)
        streams = wishes.weights == "streamed"
        self.blocks = self._free(movable.blocks(self._buckets), even_if=streams)
        self._ends = self._free(movable.ends(self._buckets))
        always = set(self.blocks) if streams and wishes.site == "auto" else set[int]()
        self._hosted_always = always
        self._passing = set(movable.passing(self._buckets))
        trainable = [index for index, bucket in enumerate(self._buckets) if bucket.group is not None]
        self._hostable = [index for index in trainable if index not in always] if wishes.site == "auto" else []
        self._parks_early = wishes.gradients == "host" or (wishes.gradients == "auto" and facts.run.accumulation == 1)
        names = {unit.name for unit in facts.units if unit.kind is UnitKind.BLOCK}
        # Embedding and head are large: places for their state would cost more than they bring.
        self._streamable = [i for i, bucket in enumerate(self._buckets) if set(bucket.units) <= names]
        # One more than a block has, so that its backward does not wait for the gradients of the one before.
        passing = Counter(self._buckets[index].units[0] for index in self._passing)
        self._empty = Layout(
            buckets=(),
            units=tuple(unit.name for unit in facts.units),
            in_backward=wishes.in_backward,
            accumulation=facts.run.accumulation,
            max_grad_norm=facts.run.max_grad_norm,
            moments=facts.run.moments,
            grad_slots=1 + max(passing.values(), default=1),
        )
        self._weights = [aligned(bucket.weight_bytes) for bucket in self._buckets]
        self._cache: list[dict[Place, tuple[int, tuple[tuple[Item, int], ...], int]]] = [{} for _ in self._buckets]

    def _free(self, movable: list[int], *, even_if: bool = False) -> list[int]:
        """Those of ``movable`` whose state may rest where their weight does not."""
        if self._wishes.weights == "resident":
            return []
        bound = self._wishes.site == "device" and not even_if
        return [index for index in movable if not bound or self._buckets[index].group is None]

    def all(self) -> list[StatePlacement]:
        """From what moves the least to what moves the most; nothing is streamed that was not asked for."""
        frame = StatePlacement(0, 0)
        found = [frame]
        for hosted in range(1, len(self._hostable) + 1):
            found.append(frame := replace(frame, hosted=hosted))
        found += [replace(frame, parked=parked) for parked in range(1, len(self._parkable(self._sites(frame))) + 1)]
        return found

    def shared(self, frame: StatePlacement) -> Iterator[StatePlacement]:
        """``frame``, and the same with host updates streamed."""
        yield frame
        if self._wishes.site == "auto" and self._streaming(self._hosted(frame), PARTS):
            yield from (replace(frame, eighths=eighths) for eighths in range(1, PARTS + 1))

    def movable(self, frame: StatePlacement) -> list[int]:
        """Buckets whose weights may travel."""
        forced = self._wishes.weights == "streamed"
        sites = self._sites(frame)
        blocks = [index for index in self.blocks if forced or sites[index] is not Site.DEVICE]
        return blocks + [index for index in self._ends if sites[index] is not Site.DEVICE]

    def largest_unit(self, frame: StatePlacement) -> int:
        """Weights that may travel and are needed at one step, at most."""
        sums: Counter[str] = Counter()
        for index in self.movable(frame):
            for unit in self._buckets[index].units:
                sums[unit] += aligned(self._buckets[index].weight_bytes)
        return max(sums.values(), default=0)

    def layout(self, frame: StatePlacement) -> Layout:
        """All buckets as ``frame`` places them, every weight resident."""
        return replace(self._empty, buckets=tuple(self.buckets(frame)))

    def buckets(self, frame: StatePlacement) -> Iterator[Bucket]:
        """The buckets as ``frame`` places them."""
        for bucket, (site, grad_home) in self.placed(frame):
            yield replace(bucket, site=site, grad_home=grad_home)

    def placed(self, frame: StatePlacement) -> Iterator[tuple[Bucket, Place]]:
        """Each bucket with its site, and where its gradients wait: as ``buckets``, without making any."""
        return zip(self._buckets, self._places(frame), strict=True)

    def sizes(self, frame: StatePlacement) -> Sizes:
        """What the frame needs on the device; the same as of its layout, in a fraction of the time."""
        rest, mixed = 0, 0
        most, count = dict.fromkeys(PASSING, 0), dict.fromkeys(PASSING, 0)
        for index, place in enumerate(self._places(frame)):
            permanent, passing, scratch = self._costs(index, place)
            rest += permanent
            mixed = max(mixed, scratch)
            for item, size in passing:
                most[item] = max(most[item], size)
                count[item] += 1
        rest += sum(most[item] * min(self._empty.slots(item), count[item]) for item in PASSING)
        weights = sum(self._weights[index] for index in self.movable(frame))
        return Sizes(weights, rest - weights + scratch_of([mixed]))

    def _costs(self, index: int, place: Place) -> tuple[int, tuple[tuple[Item, int], ...], int]:
        """Of one bucket on the device: permanent bytes, what passes in which sizes, elements that use scratch."""
        found = self._cache[index].get(place)
        if found is None:
            site, grad_home = place
            bucket = replace(self._buckets[index], site=site, grad_home=grad_home)
            here = [need for need in needs(bucket, self._empty) if need.home is Home.DEVICE]
            permanent = sum(aligned(need.num_bytes) for need in here if not need.passes)
            passing = tuple((need.item, aligned(need.num_bytes)) for need in here if need.passes)
            found = (permanent, passing, bucket.num_elements if bucket.mixed and site in ON_DEVICE else 0)
            self._cache[index][place] = found
        return found

    def _places(self, frame: StatePlacement) -> list[Place]:
        sites = self._sites(frame)
        parkable = self._parkable(sites)
        down = set(parkable[len(parkable) - frame.parked :])
        if self._parks_early:
            early = {Site.HOST, Site.STREAMED} if self._wishes.gradients == "host" else {Site.HOST}
            down |= {index for index, site in enumerate(sites) if site in early and index in self._passing}
        for index in self._streaming(self._hosted(frame), frame.eighths):
            sites[index] = Site.STREAMED
        return [(site, Home.HOST if index in down else Home.DEVICE) for index, site in enumerate(sites)]

    def _sites(self, frame: StatePlacement) -> list[Site]:
        """Before anything is streamed that was not asked for."""
        forced = None if self._wishes.site == "auto" else Site(self._wishes.site)
        hosted = self._hosted(frame)
        return [
            Site.NONE if bucket.group is None else forced or (Site.HOST if index in hosted else Site.DEVICE)
            for index, bucket in enumerate(self._buckets)
        ]

    def _hosted(self, frame: StatePlacement) -> set[int]:
        return self._hosted_always | set(self._hostable[len(self._hostable) - frame.hosted :])

    def _parkable(self, sites: Sequence[Site]) -> list[int]:
        """Buckets whose gradients may wait at either home, in order."""
        if self._wishes.gradients != "auto":
            return []
        free = {Site.STREAMED} if self._parks_early else {Site.STREAMED, Site.HOST}
        return [index for index, site in enumerate(sites) if site in free and index in self._passing]

    def _streaming(self, hosted: set[int], eighths: int) -> set[int]:
        """``eighths`` of the blocks' hosted buckets, spread evenly over them."""
        those = [index for index in self._streamable if index in hosted]
        return {
            index
            for number, index in enumerate(those, start=1)
            if number * eighths // PARTS > (number - 1) * eighths // PARTS
        }
