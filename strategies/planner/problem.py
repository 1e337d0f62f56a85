"""The planning problem in numbers: one iteration's ticks, the weights that they use, the link, and the budget.

An iteration has ticks 0..T-1: forward of each block, then backward in reverse (with recomputation). A weight is idle
between its uses: a *gap*. A weight used at FP_i and BP_i has two per iteration: the turn (FP_i to BP_i, long for early
blocks, includes the peak of activations) and the boundary (BP_i to the next FP_i, long for late blocks).

Ticks are counted on into the next iteration: a gap that spans the boundary has ``before`` >= T. A weight that leaves in
a gap and whose copy is issued at tick ``issue`` is absent at after < t < issue. At each tick, what is present plus what
the tick itself needs is within the budget, whatever the real timing is. The copy starts when tick issue - 1 has ended
and the copies needed before it have arrived; the tick ``before`` waits for it. Eviction is free: the host has the
weight, or receives it once per iteration after an update on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from math import inf
from typing import NamedTuple

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.layout import Site


@dataclass(frozen=True, slots=True)
class Tick:
    """The forward or backward of one unit: seconds of compute, and bytes on the device that are not weights.

    ``hosted_bytes`` of what a forward saves wait on the host until the backward of the same unit.
    """

    name: str
    seconds: float
    num_bytes: int
    hosted_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """How a weight is updated, once per iteration. Weights of the same slot use it in turn; None: its own memory.

    Args:
        seconds: of the CPU where ``site`` is the host, else of the device, if nothing else uses the memory.
        touched_bytes: that it reads and writes meanwhile, in the memory of the place where it is computed.
        grad_bytes: go down after the weight's last use, if its update or its gradient is on the host.
        state_bytes: come up before a streamed update and go down after it.
        grad_slot, arrival_slot, visit_slot: for its gradient on the device, for a gradient that arrives on the host to
            be added, and for its visiting state.
        parked_slot: on the host, in which its gradient is until the update has read it.
        exchange_bytes: of its gradient, that a rank sends to others.
        grad_direct: its gradient goes down from where it is made, and compute waits for that.
        from_master: an update on the device makes the weight from its master, and needs no weight before.
        disk_bytes: of state that rests on the disk: read before the update into ``window_slot``, and written after it.
        rewritten_bytes: of a new weight that rests there: written after the update, from the place of its gradient.
    """

    site: Site
    seconds: float
    touched_bytes: int = 0
    grad_bytes: int = 0
    state_bytes: int = 0
    grad_tier: Tier = Tier.DEVICE
    grad_slot: int | None = None
    grad_direct: bool = False
    arrival_slot: int | None = None
    parked_slot: int | None = None
    visit_slot: int | None = None
    exchange_bytes: int = 0
    from_master: bool = False
    disk_bytes: int = 0
    window_slot: int | None = None
    rewritten_bytes: int = 0

    @property
    def sends_down(self) -> bool:
        """Whether the gradient crosses the link."""
        return self.grad_bytes > 0 and (self.site is Site.HOST or self.grad_tier is Tier.HOST)

    @property
    def leaves_slot(self) -> bool:
        """Whether the gradient leaves its memory, for the host or for its owners, so that others may use it."""
        return self.sends_down or self.grad_slot is not None


@dataclass(frozen=True, slots=True)
class Weight:
    """The weight of a bucket: its bytes while present, and the ticks that use it, ascending. No update: frozen.

    ``overlapping`` are the weights, by index, that are at the same addresses at other times. Of ``shards`` ranks each
    copies its part over its link, and gets the others' over the network; with ``common_host`` each copies all parts of
    what comes from the host. ``on_host``: there is a copy of it, which an update on the device writes too.
    ``gradient_tick``: after which its gradient is complete; None: its last use. ``disk_bytes`` of it rest on the disk,
    and are read into ``disk_slot`` on the host for each reload. ``copy_bytes``: on the link, if it is encoded.
    """

    name: str
    num_bytes: int
    uses: tuple[int, ...]
    update: Update | None = None
    overlapping: tuple[int, ...] = ()
    shards: int = 1
    on_host: bool = False
    common_host: bool = False
    gradient_tick: int | None = None
    disk_bytes: int = 0
    disk_slot: int | None = None
    copy_bytes: int | None = None

    @property
    def gradient_at(self) -> int:
        """The tick after which its gradient is complete."""
        return self.uses[-1] if self.gradient_tick is None else self.gradient_tick

    @property
    def reload_bytes(self) -> int:
        """What one rank copies up from the host."""
        return self.num_bytes if self.common_host else self.link_bytes

    @property
    def gathered_bytes(self) -> int:
        """What is left of a reload for the others to send."""
        return 0 if self.common_host else self.exchange_bytes

    @property
    def link_bytes(self) -> int:
        """What one rank copies up or down."""
        return (self.num_bytes if self.copy_bytes is None else self.copy_bytes) // self.shards

    @property
    def exchange_bytes(self) -> int:
        """What one rank gets from the others."""
        return self.num_bytes - self.num_bytes // self.shards


@dataclass(frozen=True, slots=True)
class Link:
    """Host to device (up) and device to host (down): latency in seconds, then bytes per second.

    ``duplex`` is the factor on both rates while bytes move in both directions; 1: they do not disturb each other.
    """

    latency: float
    up: float
    down: float
    duplex: float = 1.0


@dataclass(frozen=True, slots=True)
class Shared:
    """What several resources use at the same time; each slows down the others as far as it has to.

    Args:
        dram: bytes per second of the host's memory: each byte of a copy counts once, an update what it touches.
        device: bytes per second of the device's memory: copies, and updates on the device.
        cores: there is no accelerator; compute, copies and updates on the host run on the same cores.
        network: bytes per second that a rank sends to others in a gather.
        sums: how many times as long gradients take to their owners as a gather of as many bytes.
        through_host: exchanges cross the links and the host's memory, in both directions.
        disk: bytes per second that the disk reads and writes, one at a time.
        disk_overlap: how much of both it does at once: 1 is either, 2 each as if it were alone.
    """

    dram: float = inf
    device: float = inf
    cores: bool = False
    network: float = inf
    sums: float = 1.0
    through_host: bool = False
    disk: tuple[float, float] = (inf, inf)
    disk_overlap: float = 1.0


class Gap(NamedTuple):
    """The ticks ``after`` < t < ``before`` at which a weight is idle; ``before`` may lie in the next iteration."""

    weight: int
    after: int
    before: int


class Eviction(NamedTuple):
    """A weight leaves in ``gap``; its reload is issued when tick ``issue`` - 1 has ended."""

    gap: Gap
    issue: int


@dataclass(frozen=True)
class Problem:
    """One iteration and the machine it runs on.

    Args:
        budget: bytes on the device for weights and for what ticks need. What is always present is not part of it.
        accumulation: passes over the ticks per update.
        in_backward: updates start as gradients land (``tasks.py``); else under the next forward, with the norm known.
        shared: rates that copies and updates have together.
    """

    ticks: tuple[Tick, ...]
    weights: tuple[Weight, ...]
    link: Link
    budget: int
    accumulation: int = 1
    in_backward: bool = False
    shared: Shared = Shared()

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """Every gap with an idle tick in it, ascending; the order does not depend on the order of the weights."""
        return self._order.gaps

    @property
    def rank(self) -> tuple[int, ...]:
        """The position of each weight in an order that does not depend on the one they are given in."""
        return self._order.rank

    @property
    def needed(self) -> Mapping[Gap, int]:
        """The position of each gap in the order of the ticks, within one iteration, that need the weights back."""
        return self._order.needed

    @cached_property
    def _order(self) -> _Order:
        return _order(len(self.ticks), tuple([(weight.uses, weight.num_bytes, weight.name) for weight in self.weights]))

    def up_seconds(self, num_bytes: int) -> float:
        """Seconds of a copy to the device while nothing else moves."""
        return self.link.latency + num_bytes / min(self.link.up, self.shared.dram, self.shared.device)

    @cached_property
    def reload_seconds(self) -> tuple[float, ...]:
        """Seconds of each weight's copy to the device, or of reading it from the disk, if that takes longer."""
        return tuple(self.seconds_of(weight, weight.reload_bytes) for weight in self.weights)

    def seconds_of(self, weight: Weight, num_bytes: int) -> float:
        """The seconds of ``reload_seconds``, if so many bytes of ``weight`` go up."""
        return max(self.up_seconds(num_bytes) + self.decode_seconds(weight), weight.disk_bytes / self.shared.disk[0])

    def decode_seconds(self, weight: Weight) -> float:
        """Of UP, to decode weights: codes are read, weights written, read, multiplied and written."""
        return 0.0 if weight.copy_bytes is None else (weight.copy_bytes + 3 * weight.num_bytes) / self.shared.device

    @cached_property
    def compute_seconds(self) -> float:
        """Seconds of one pass in which nothing waits."""
        return sum(tick.seconds for tick in self.ticks)

    @cached_property
    def all_present(self) -> tuple[int, ...]:
        """Bytes per tick if nothing leaves."""
        weights = sum(weight.num_bytes for weight in self.weights)
        return tuple(tick.num_bytes + weights for tick in self.ticks)


class _Order(NamedTuple):
    gaps: tuple[Gap, ...]
    rank: tuple[int, ...]
    needed: Mapping[Gap, int]


@lru_cache(maxsize=64)
def _order(count: int, weights: tuple[tuple[tuple[int, ...], int, str], ...]) -> _Order:
    """Of weights by uses, bytes and name: a search has many problems of the same ones."""
    order = sorted(range(len(weights)), key=weights.__getitem__)
    rank = tuple(sorted(range(len(weights)), key=order.__getitem__))
    unsorted = [
        Gap(index, after, before)
        for index, (uses, num_bytes, _) in enumerate(weights)
        if num_bytes
        for after, before in zip(uses, (*uses[1:], uses[0] + count), strict=True)
        if before - after > 1
    ]
    gaps = tuple(sorted(unsorted, key=lambda gap: (gap.after, gap.before, rank[gap.weight])))
    order_of_need = sorted(gaps, key=lambda gap: (gap.before % count, rank[gap.weight]))
    return _Order(gaps, rank, {gap: position for position, gap in enumerate(order_of_need)})


def need_order(problem: Problem, gaps: Iterable[Gap]) -> list[Gap]:
    """Gaps in the order of the ticks, within one iteration, that need the weights back."""
    return sorted(gaps, key=problem.needed.__getitem__)


def memory(problem: Problem, evictions: Iterable[tuple[Gap, int]]) -> list[int]:
    """Bytes on the device per tick."""
    count = len(problem.ticks)
    change = [0] * (2 * count + 1)
    for gap, issue in evictions:
        size = problem.weights[gap.weight].num_bytes
        change[gap.after + 1] -= size
        change[issue] += size
    absent = list(accumulate(change))
    pairs = zip(problem.all_present, absent[:count], absent[count:], strict=False)
    return [present + in_this + in_previous for present, in_this, in_previous in pairs]


def least_memory(problem: Problem, gaps: Iterable[Gap]) -> list[int]:
    """Bytes on the device per tick if the weights leave in ``gaps`` and come back as late as possible."""
    return memory(problem, ((gap, gap.before) for gap in gaps))


def at_need(gaps: Iterable[Gap]) -> tuple[Eviction, ...]:
    """Each reload issued as late as possible: when the tick before its use has ended."""
    return tuple(Eviction(gap, gap.before) for gap in gaps)


def present_ticks(problem: Problem, evictions: Iterable[Eviction]) -> list[set[int]]:
    """Per weight the ticks of one iteration at which it is present."""
    count = len(problem.ticks)
    present = [set(range(count)) for _ in problem.weights]
    for eviction in evictions:
        present[eviction.gap.weight] -= {t % count for t in range(eviction.gap.after + 1, eviction.issue)}
    return present
