"""The layout: which parameters travel together, where each byte of them lives, and when it moves. Numbers only.

Problem. A model is larger than the device. Its parameters are cut into buckets, the unit of every copy and every
update; each bucket has one home address on the device for the whole run, so that a view taken in forward is still
right in backward after the bucket left and came back.

Memory arithmetic, per element of a bucket in a compute dtype of ``e`` bytes, ``m`` fp32 moments (Adam: 2):

    WEIGHT    e on the device; permanent, or at an address that is its own only while it is there
    COPY      e on the host, where the weight travels. In fp32 it is the master
    GRAD      e on the device; permanent where gradients park there, else in a ring on their way to the host
    PARKED    e on the host, where the update is on the host or gradients park there. In mixed precision the updated
              weight leaves from here: the gradient has been read by then
    ARRIVAL   e on the host, in a ring: a micro-batch's gradient before it is added to PARKED
    MASTER    4 at the update site; in fp32 only where the weight stays on the device and its update does not
    MOMENTS   4 m at the update site
    STEPS     4 per parameter: torch counts updates per parameter
    VISIT     4 m, and 4 for a master, on the device, in a ring: state that is brought through it (``STREAMED``)
    SCRATCH   fp32 copy of a stretch of bf16 gradient, on the device, one for all

Time is counted in steps: forward of each unit in order of first use, then backward in reverse; 2 n steps for n units. A
weight that travels has *stays*: the steps on which it is on the device. It comes at the first step of a stay and leaves
after the last; a stay that runs over the end of an iteration is written as two.

Invariant. A layout says where; it never says what a value is. Any layout that ``validate`` accepts trains with the
bits of plain training. ``strategies/planner`` makes layouts, ``strategies/engine`` carries them out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from strategies.core.facts import Home

PAGE_BYTES = 4096  # every stretch of host memory starts on such a boundary: memory is pinned page by page
ALIGN_BYTES = 512  # every parameter starts on such a boundary: full-width copies and aligned vector loads
SCRATCH_ELEMENTS = 1 << 22  # 16 MiB in fp32; a stretch of this many elements is updated at a time in mixed precision
Range: TypeAlias = tuple[int, int]  # steps, half-open
ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}


class Site(Enum):
    """Where a bucket's update is computed, and so where its optimizer state rests."""

    __hash__ = object.__hash__  # members are one of a kind; Enum's own asks for the name each time

    NONE = "frozen"
    DEVICE = "device"  # state on the device, the device's kernel
    HOST = "host"  # state on the host, the CPU's kernel
    STREAMED = "streamed"  # state on the host, brought through the device's kernel


class Item(Enum):
    """One kind of memory of a bucket. See the module docstring for sizes."""

    __hash__ = object.__hash__  # members are one of a kind; Enum's own asks for the name each time

    WEIGHT = "weight"
    COPY = "weight copy"
    GRAD = "gradient"
    PARKED = "parked gradient"
    ARRIVAL = "arriving gradient"
    MASTER = "master weight"
    MOMENTS = "moments"
    STEPS = "update counts"
    VISIT = "visiting state"
    SCRATCH = "scratch"
    SAVED = "saved tensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters of one dtype and one optimizer group, contiguous in order of first use.

    ``offsets`` are in elements from the start of the bucket, one per name in ``params``, aligned to ALIGN_BYTES;
    ``num_elements`` includes the padding between and after them. ``units`` are those that use the bucket.
    """

    name: str
    units: tuple[str, ...]
    params: tuple[str, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    num_elements: int
    dtype: str
    group: int | None  # of the optimizer; None: frozen
    site: Site
    resident_ticks: tuple[Range, ...] = ()  # steps on which its weight is on the device; empty: always
    grad_home: Home = Home.DEVICE  # where gradients wait for the norm and for further micro-batches

    @property
    def resident(self) -> bool:
        return not self.resident_ticks

    @property
    def mixed(self) -> bool:
        """Whether the compute weight is not the master."""
        return self.dtype != "float32"

    @property
    def weight_bytes(self) -> int:
        return self.num_elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All buckets in order of first use, and when things move.

    Args:
        units: all units of the model in order of first use; what steps are counted in.
        in_backward: updates start as gradients land. Otherwise they wait for the norm of all gradients and run in
            forward order under the next forward.
        accumulation: micro-batches per update.
        max_grad_norm: what gradients are clipped to; 0 does not clip.
        moments: fp32 numbers of optimizer state per element.
        grad_slots, visit_slots: places for gradients on their way down, and for visiting state.
    """

    buckets: tuple[Bucket, ...]
    units: tuple[str, ...]
    in_backward: bool
    accumulation: int
    max_grad_norm: float
    moments: int = 2
    grad_slots: int = 2
    visit_slots: int = 2

    @property
    def num_ticks(self) -> int:
        return 2 * len(self.units)

    def slots(self, item: Item) -> int:
        """Places that buckets take in turn for ``item``."""
        return self.visit_slots if item is Item.VISIT else self.grad_slots


def ticks_of(units: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The forward and the backward step of each unit."""
    return {name: (index, 2 * len(units) - 1 - index) for index, name in enumerate(units)}


def uses(bucket: Bucket, steps: Mapping[str, tuple[int, int]]) -> tuple[int, ...]:
    """The steps that use ``bucket``, ascending; ``steps`` as from ``ticks_of``."""
    return tuple(sorted({step for unit in bucket.units for step in steps[unit]}))


def leads(bucket: Bucket, layout: Layout) -> tuple[int, int]:
    """How many steps before its use a travelling weight comes: in forward and in backward; 1 where it stayed."""
    count, used = layout.num_ticks, uses(bucket, ticks_of(layout.units))
    found = [0, 0]
    came = [False, False]
    for start, end in bucket.resident_ticks:
        if start == 0 and bucket.resident_ticks[-1][1] == count:
            continue  # it came before the iteration began
        first = next((step for step in (*used, *(step + count for step in used)) if step >= start), start)
        back = first % count >= count // 2
        found[back], came[back] = max(found[back], first - start), True
        assert start < end
    return (found[0] if came[0] else 1, found[1] if came[1] else 1)


@dataclass(frozen=True, slots=True)
class Need:
    """A stretch of memory that a bucket needs: for ever, or while it is in use (``passes``)."""

    bucket: str
    item: Item
    home: Home
    num_bytes: int
    passes: bool = False


def needs(bucket: Bucket, layout: Layout) -> Iterator[Need]:
    """All the memory of one bucket. The one source of sizes, for planner, arena and tables."""
    name, weight = bucket.name, bucket.weight_bytes
    yield Need(name, Item.WEIGHT, Home.DEVICE, weight, passes=not bucket.resident)
    if not bucket.resident:
        yield Need(name, Item.COPY, Home.HOST, weight)
    if bucket.site is Site.NONE:
        return
    down = bucket.grad_home is Home.HOST
    yield Need(name, Item.GRAD, Home.DEVICE, weight, passes=down)
    if down or bucket.site is Site.HOST:
        yield Need(name, Item.PARKED, Home.HOST, weight)
    if down and layout.accumulation > 1:
        yield Need(name, Item.ARRIVAL, Home.HOST, weight, passes=True)
    rests = Home.DEVICE if bucket.site is Site.DEVICE else Home.HOST
    if bucket.mixed or (bucket.site is Site.HOST and bucket.resident):
        yield Need(name, Item.MASTER, rests, 4 * bucket.num_elements)
    if layout.moments:
        yield Need(name, Item.MOMENTS, rests, 4 * layout.moments * bucket.num_elements)
    counts = Home.HOST if bucket.site is Site.HOST else Home.DEVICE
    yield Need(name, Item.STEPS, counts, aligned(4 * len(bucket.params)))
    numbers = layout.moments + bucket.mixed
    if bucket.site is Site.STREAMED and numbers:
        yield Need(name, Item.VISIT, Home.DEVICE, 4 * numbers * bucket.num_elements, passes=True)


def common_needs(layout: Layout, hosted_bytes: int = 0) -> Iterator[Need]:
    """The memory that belongs to no single bucket; ``hosted_bytes``: of saved tensors that wait on the host."""
    if scratch := scratch_bytes(layout):
        yield Need("", Item.SCRATCH, Home.DEVICE, scratch)
    if hosted_bytes:
        yield Need("", Item.SAVED, Home.HOST, hosted_bytes)


def scratch_bytes(layout: Layout) -> int:
    """Of the one SCRATCH region on the device; 0 where no mixed-precision bucket is updated there."""
    return scratch_of([b.num_elements for b in layout.buckets if b.mixed and b.site in (Site.DEVICE, Site.STREAMED)])


def scratch_of(elements: Sequence[int]) -> int:
    """The same, of the mixed-precision buckets that are updated on the device."""
    return aligned(4 * min(SCRATCH_ELEMENTS, max(elements, default=0)))


def aligned(num_bytes: int, home: Home = Home.DEVICE) -> int:
    """The next multiple of ALIGN_BYTES, or on the host of PAGE_BYTES."""
    step = PAGE_BYTES if home is Home.HOST else ALIGN_BYTES
    return -(-num_bytes // step) * step


@dataclass(frozen=True, slots=True)
class Spot:
    """A stretch of one home's arena, in bytes."""

    home: Home
    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes

    def overlaps(self, other: Spot) -> bool:
        return self.home is other.home and self.offset < other.end and other.offset < self.end


@dataclass(frozen=True, slots=True)
class Addresses:
    """The size of each home's arena in bytes, and one spot for every need of every bucket.

    ``spots`` is keyed by bucket and item; what belongs to no bucket has the bucket name "". Weights that are never on
    the device together may overlap, and so may spots of one other item that buckets use in turn; nothing else does.
    """

    arena_bytes: Mapping[Home, int]
    spots: Mapping[tuple[str, Item], Spot]

    def of(self, bucket: str, item: Item) -> Spot:
        """The spot of one item of one bucket, which has to have one."""
        return self.spots[(bucket, item)]

    def num_bytes(self, home: Home) -> int:
        """The size of the arena of one home."""
        return self.arena_bytes.get(home, 0)
