"""The layout: which parameters are moved together, where each byte of them lies, and when it moves. Numbers only.

Parameters are grouped into buckets, the unit of every copy and every update. Each bucket has one fixed address on the
device for the whole run, so that a view taken in forward is still valid in backward after the bucket was evicted and
fetched again.

Memory arithmetic, per element of a bucket in a compute dtype of ``e`` bytes, ``m`` fp32 moments (Adam: 2):

    WEIGHT    e on the device; permanent, or at an address that it shares with weights that are there at other times
    COPY      e on the host, if the weight travels. In fp32 it is the master. In shared slots if it rests on the
              disk (``weight_on_disk``). If ``frozen_as`` names a format, its codes and scales,
              which become the weight on the device, in CODES, one for all
    GRAD      e on the device; permanent if gradients wait there for the update, else one of a few shared slots. None
              where a gradient goes down from the memory in which backward made it (``grad_direct``)
    PARKED    e on the host, if the update runs there or gradients wait there. In mixed precision the updated weight is
              written here too, and copied up from here: the gradient has been read by then. 0 if it lies in COPY.
              On the device, if ranks share the gradients that wait there (``grad_split``). In shared slots where an
              update in backward takes it (``grad_taken``)
    ARRIVAL   e on the host, in shared slots: a micro-batch's gradient before it is added to PARKED
    MASTER    4 at the update site; in fp32, and of a bucket that ``rounds``, e, and only if the weight stays on the
              device and its update runs on the host: else the copy, or the weight, is the master. In fp32, too, a
              weight that may rest on the disk (``copy_on_disk``) has one, beside its moments, with which it is read
    MOMENTS   4 m at the update site; less where the layout names a format (``moments_as``), which is on the host
    SCALES    of moments, one per block of elements, if their format has blocks
    EXPANDED  on the host, one for all: moments, and masters that are rounded, while they are updated, in fp32, and
              noise (``core/formats.py``)
    STEPS     4 per parameter: torch counts updates per parameter
    VISIT     4 m, and 4 for a master, on the device, in shared slots: state that is brought there for its update
    SCRATCH   fp32 copy of a stretch of bf16 gradient, on the device, one for all buckets
    RECEIVED  on the device, one for all: the gradients of a bucket's span from all ranks, before they are added; only
              if they are added in the order of ranks (``reduction``)
    WINDOW    4 m, and 4 for a master, on the host, for ``window_elements`` in each of some slots, one for all: state
              that rests on the disk (``on_disk``), while it is updated, in place of MOMENTS and MASTER. The new weight
              is made in PARKED, over the gradient, and goes to the disk from there, if it rests there
    SAVED     on the host, one for all: tensors that forward saved and that wait there for backward

Over ranks a bucket may be cut into ``shards`` of equal size, one for each rank. WEIGHT and GRAD are whole on every
rank while they are there; with ``grad_split`` GRAD is a slot, as if the gradient left. Everything else holds the rank's
own span only. A parameter is whole in one span where that costs little room; otherwise it is cut at aligned elements,
and its owners are several ranks (``planner/buckets.py``).

With ``common_host`` the ranks are on one machine, and copy all spans of a weight up from its memory (``read_by_all``)
instead of their own span only, with the network for the others. What others read comes first in the host's arena.

In mixed precision with one micro-batch per update, COPY and PARKED of a bucket are one place (``parks_in_copy``). The
copy is needed until backward has fetched it for the last time, the gradient from then on, and the update writes the
new weight over the gradient that it has read. A weight that is wanted in between, and one whose gradient is dropped, is
rounded from the master again, whose rounded value it always is.

Time inside an iteration is counted in ticks: forward of each unit in order of first use, then backward in reverse; 2 n
ticks for n units. A weight that travels has ``resident_ticks``, half-open ranges during which it is on the device: it
is fetched at the first tick of a range and evicted after the last. A range that runs over the end of an iteration is
written as two.

Example, three units a, b, c: the weight of b is used at ticks 1 (forward) and 4 (backward). Fetched one tick ahead of
each use, it has ``resident_ticks`` ((0, 2), (3, 5)).

Invariant. A layout says where values lie, never what they are. Any layout that ``validate`` accepts trains with the
bits of plain training. ``strategies/planner`` makes layouts, ``strategies/engine`` carries them out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple, TypeAlias

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.formats import FORMATS, expanded_bytes

PAGE_BYTES = 4096  # every spot on the host starts on such a boundary: memory is pinned page by page
ALIGN_BYTES = 512  # every parameter starts on such a boundary: full-width copies and aligned vector loads
ALIGNMENT: Mapping[Tier, int] = {Tier.DEVICE: ALIGN_BYTES, Tier.HOST: PAGE_BYTES}
WINDOW_ELEMENTS = 1 << 22  # whose state is read from the disk, updated and written at a time
SCRATCH_ELEMENTS = 1 << 22  # 16 MiB in fp32; a stretch of this many elements is updated at a time in mixed precision
Range: TypeAlias = tuple[int, int]  # ticks, half-open
Reduction: TypeAlias = Literal["exact", "fast"]
ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "uint8": 1, "int8": 1}  # the last two: quantised


class Site(Enum):
    """Where a bucket's update is computed, which decides where its optimizer state lies."""

    __hash__ = object.__hash__  # by identity; Enum's own looks the name up each time

    NONE = "frozen"
    DEVICE = "device"  # state on the device, the device's kernel
    HOST = "host"  # state on the host, the CPU's kernel
    STREAMED = "streamed"  # state on the host, brought to the device for the device's kernel


class Item(Enum):
    """One kind of memory; the module docstring has the sizes."""

    __hash__ = object.__hash__  # by identity; Enum's own looks the name up each time

    WEIGHT = "weight"
    COPY = "weight copy"
    CODES = "encoded weights"
    GRAD = "gradient"
    PARKED = "parked gradient"
    ARRIVAL = "arriving gradient"
    MASTER = "master weight"
    MOMENTS = "moments"
    SCALES = "scales of moments"
    EXPANDED = "expanded moments"
    STEPS = "update counts"
    VISIT = "visiting state"
    SCRATCH = "scratch"
    RECEIVED = "received gradients"
    WINDOW = "state from the disk"
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
    shards: int = 1  # ranks that hold a span each, see ``share``
    looked_up: bool = False  # its first unit does not read it in backward, as an embedding
    resident_ticks: tuple[Range, ...] = ()  # when its weight is on the device; empty: always
    grad_tier: Tier = Tier.DEVICE  # where gradients wait for the norm and for further micro-batches
    grad_split: bool = False  # they wait on the device, each rank's span alone; the whole gradient only passes a slot
    grad_direct: bool = False  # they go down from where backward made them, and backward waits for that; no slot
    grad_taken: bool = False  # it waits nowhere on the host: the CPU's update takes it in backward, from a slot
    on_disk: bool = False  # moments, and masters in mixed precision, rest in a file; if frozen, the weight that travels
    copy_on_disk: bool = False  # and so does the weight that travels, if it is trained
    rounds: bool = False  # in bf16, its weight is its master, which the host's update rounds stochastically
    frozen_as: str = ""  # the format in which frozen matrices, which were encoded once, rest and travel; empty: dtype

    @property
    def resident(self) -> bool:
        return not self.resident_ticks

    @property
    def state_on_disk(self) -> bool:
        return self.on_disk and self.site is not Site.NONE

    @property
    def weight_on_disk(self) -> bool:
        return self.on_disk and (self.site is Site.NONE or self.copy_on_disk)  # it rests there if it travels

    @property
    def share(self) -> int:
        """Elements of one rank's span: rank r holds those from ``r * share`` on."""
        return self.num_elements // self.shards

    @property
    def grad_passes(self) -> bool:
        """Whether its gradient leaves the memory that it has on the device before the update."""
        return self.grad_tier is Tier.HOST or self.grad_split

    @property
    def cut(self) -> bool:
        """Whether a parameter is in the spans of several ranks."""
        return self.shards > 1 and any(
            start // self.share != (start + max(size, 1) - 1) // self.share
            for start, size in zip(self.offsets, self.sizes, strict=True)
        )

    @property
    def mixed(self) -> bool:
        """Whether it has masters in fp32 beside its weights."""
        return self.low_precision or self.copy_on_disk

    @property
    def low_precision(self) -> bool:
        """Whether these masters are more exact than its weights."""
        return self.dtype != "float32" and not self.rounds

    @property
    def weight_bytes(self) -> int:
        return self.num_elements * ITEM_BYTES[self.dtype]

    @property
    def copy_bytes(self) -> int:
        """Of all of the weight, at rest on the host and on the link."""
        return FORMATS[self.frozen_as].num_bytes(self.num_elements) if self.frozen_as else self.weight_bytes

    def state_bytes(self, moments: int) -> int:
        """Bytes of one rank's moments, and of its masters in mixed precision."""
        return 4 * (moments + self.mixed) * self.share


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All buckets in order of first use, and what decides when they move.

    Args:
        in_backward: updates start as gradients land, but for those on the device that need copies. These run in forward
            order under the next forward, as all do otherwise, after the norm of all gradients.
        disk: the folders, each on a drive, of the files that have the state of buckets that are ``on_disk``.
        disk_checksums: what is read there is compared with what was written.
        moments_as: how moments rest; in less than fp32 only those of AdamW that one rank's CPU updates, and training is
            not exact then.
        reduction: how ranks that share a bucket add its gradients. "exact": each owner in the order of ranks; "fast":
            while they are sent, in the order of the library's reduce-scatter.
    """

    buckets: tuple[Bucket, ...]
    units: tuple[str, ...]  # of the whole model in order of first use; they define the ticks
    in_backward: bool
    accumulation: int  # micro-batches per update
    max_grad_norm: float  # 0 does not clip
    moments: int = 2  # numbers of optimizer state per element
    moments_as: str = "fp32"  # of ``core/formats.py``
    grad_slots: int = 2  # for gradients on their way down
    visit_slots: int = 2  # for visiting state
    window_slots: int = 3  # for state from the disk: one is read, one is updated, one is written; and for weights
    window_elements: int = WINDOW_ELEMENTS  # of each of them
    common_host: bool = False  # the ranks are on one machine, and read weights out of each other's host memory
    reduction: Reduction = "exact"
    disk: tuple[str, ...] = ()
    disk_checksums: bool = True

    @property
    def num_ticks(self) -> int:
        return 2 * len(self.units)

    @property
    def trained_spans(self) -> list[int]:
        return [bucket.share for bucket in self.buckets if bucket.group is not None]

    @property
    def expanded_bytes(self) -> int:
        """Size of the EXPANDED region; 0 if all moments rest in fp32."""
        rounds = any(bucket.rounds for bucket in self.buckets)
        return expanded_bytes(self.moments_as, self.moments, self.trained_spans, masters=rounds)

    @property
    def codes_bytes(self) -> int:
        """Size of the CODES region; 0 if no weight travels in a format of its own."""
        return max((b.copy_bytes for b in self.buckets if b.frozen_as and not b.resident), default=0)

    def slots(self, item: Item) -> int:
        if item is Item.COPY and self.disk:  # weights, each on one drive, on their way up
            return self.window_slots + len(self.disk) - 1
        return self.visit_slots if item is Item.VISIT else self.grad_slots

    @property
    def window_bytes(self) -> int:
        """Size of the WINDOW region; 0 if no state rests on the disk."""
        windows = [self.window_of(bucket) for bucket in self.buckets if bucket.state_on_disk]
        return min(self.window_slots, sum(n for n, _ in windows)) * max((size for _, size in windows), default=0)

    def window_of(self, bucket: Bucket) -> tuple[int, int]:
        """Of a bucket whose state is on the disk: how many pieces pass the window, and the size of slots for them."""
        piece_bytes = 4 * (self.moments + bucket.mixed) * min(bucket.share, self.window_elements)
        return -(-bucket.share // self.window_elements), aligned(piece_bytes, Tier.HOST)


def ticks_of(units: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The forward and the backward tick of each unit."""
    return {name: (index, 2 * len(units) - 1 - index) for index, name in enumerate(units)}


def uses(bucket: Bucket, ticks: Mapping[str, tuple[int, int]]) -> tuple[int, ...]:
    """The ticks that read the weight of ``bucket``, ascending; ``ticks`` as from ``ticks_of``."""
    read = {tick for unit in bucket.units for tick in ticks[unit]}
    return tuple(sorted(read - {ticks[bucket.units[0]][1]} if bucket.looked_up else read))


def gradient_tick(bucket: Bucket, ticks: Mapping[str, tuple[int, int]]) -> int:
    """The tick after which the gradient of ``bucket`` is complete."""
    return max(ticks[unit][1] for unit in bucket.units)


def parks_in_copy(bucket: Bucket, layout: Layout) -> bool:
    """Whether COPY is the place of PARKED, too; see the module docstring.

    Not in fp32, where the copy is the master; nor with several micro-batches, of which each forward fetches the copy
    after the first one's gradient has gone down; nor where the weight rests on the disk.
    """
    goes_down = bucket.grad_tier is Tier.HOST or bucket.site is Site.HOST
    in_memory = not (bucket.resident or bucket.weight_on_disk)
    return bucket.mixed and in_memory and goes_down and layout.accumulation == 1


class Need(NamedTuple):
    """Memory that a bucket needs: for the whole run, or only while it is in use (``passes``)."""

    bucket: str
    item: Item
    tier: Tier
    num_bytes: int
    passes: bool = False


def needs(bucket: Bucket, layout: Layout) -> Iterator[Need]:
    """All the memory of one bucket. Planner, arena and tables take its sizes from here only."""
    name, weight = bucket.name, bucket.weight_bytes
    own_bytes, copy = weight // bucket.shards, bucket.copy_bytes // bucket.shards
    yield Need(name, Item.WEIGHT, Tier.DEVICE, weight, passes=not bucket.resident)
    if not bucket.resident:
        size = aligned(copy, Tier.HOST) if bucket.weight_on_disk else copy  # it is read and written by whole pages
        yield Need(name, Item.COPY, Tier.HOST, size, passes=bucket.weight_on_disk)
    if bucket.site is Site.NONE:
        return
    if not bucket.grad_direct:
        yield Need(name, Item.GRAD, Tier.DEVICE, weight, passes=bucket.grad_passes)
    if bucket.grad_split:
        yield Need(name, Item.PARKED, Tier.DEVICE, own_bytes)
    elif (bucket.grad_tier is Tier.HOST or bucket.site is Site.HOST) and not parks_in_copy(bucket, layout):
        size = aligned(own_bytes, Tier.HOST) if bucket.copy_on_disk else own_bytes
        yield Need(name, Item.PARKED, Tier.HOST, size, passes=bucket.grad_taken)
    if bucket.grad_tier is Tier.HOST and layout.accumulation > 1:
        yield Need(name, Item.ARRIVAL, Tier.HOST, own_bytes, passes=True)
    state_tier = Tier.DEVICE if bucket.site is Site.DEVICE else Tier.HOST
    if (bucket.mixed and not bucket.on_disk) or (not bucket.mixed and bucket.site is Site.HOST and bucket.resident):
        yield Need(name, Item.MASTER, state_tier, (4 if bucket.mixed else ITEM_BYTES[bucket.dtype]) * bucket.share)
    if layout.moments and not bucket.on_disk:
        rests = FORMATS[layout.moments_as]
        yield Need(name, Item.MOMENTS, state_tier, layout.moments * rests.code_bytes(bucket.share))
        if rests.block:
            scales = sum(map(rests.blocks, bucket.sizes))
            yield Need(name, Item.SCALES, state_tier, rests.scale_bytes * layout.moments * scales)
    count_tier = Tier.HOST if bucket.site is Site.HOST else Tier.DEVICE
    yield Need(name, Item.STEPS, count_tier, aligned(4 * len(bucket.params)))
    if bucket.site is Site.STREAMED and (state := bucket.state_bytes(layout.moments)):
        yield Need(name, Item.VISIT, Tier.DEVICE, state, passes=True)


def common_needs(layout: Layout, hosted_bytes: int = 0) -> Iterator[Need]:
    """The memory that belongs to no single bucket; ``hosted_bytes``: of saved tensors that wait on the host."""
    if scratch := scratch_bytes(layout):
        yield Need("", Item.SCRATCH, Tier.DEVICE, scratch)
    if codes := layout.codes_bytes:
        yield Need("", Item.CODES, Tier.DEVICE, codes)
    if layout.expanded_bytes:
        yield Need("", Item.EXPANDED, Tier.HOST, layout.expanded_bytes)
    if layout.window_bytes:
        yield Need("", Item.WINDOW, Tier.HOST, layout.window_bytes)
    if received := received_bytes(layout):
        yield Need("", Item.RECEIVED, Tier.DEVICE, received)
    if hosted_bytes:
        yield Need("", Item.SAVED, Tier.HOST, hosted_bytes)


def received_bytes(layout: Layout) -> int:
    """Size of the RECEIVED region; 0 if ranks share no bucket that is trained, or gradients are added on the way."""
    return largest_shared(layout) if layout.reduction == "exact" else 0


def largest_shared(layout: Layout) -> int:
    """Bytes of the largest gradient that ranks add; 0 if there is none."""
    return max((b.weight_bytes for b in layout.buckets if b.shards > 1 and b.group is not None), default=0)


def scratch_bytes(layout: Layout) -> int:
    """Size of the SCRATCH region; 0 if no mixed-precision bucket is updated on the device."""
    return scratch_of([b.share for b in layout.buckets if b.mixed and b.site in (Site.DEVICE, Site.STREAMED)])


def scratch_of(elements: Sequence[int]) -> int:
    """Size of the SCRATCH region for mixed-precision buckets of so many elements that are updated on the device."""
    return aligned(4 * min(SCRATCH_ELEMENTS, max(elements, default=0)))


def aligned(num_bytes: int, tier: Tier = Tier.DEVICE) -> int:
    """``num_bytes`` rounded up to what spots at ``tier`` are aligned to."""
    unit = ALIGNMENT[tier]
    return -(-num_bytes // unit) * unit


def leads(bucket: Bucket, layout: Layout) -> tuple[int, int]:
    """How many ticks before its use a travelling weight is fetched, in forward and backward; 1 where it is there."""
    count, used = layout.num_ticks, uses(bucket, ticks_of(layout.units))
    ahead: dict[bool, int] = {}  # by whether it is used in backward
    for start, _ in bucket.resident_ticks:
        if start == 0 and bucket.resident_ticks[-1][1] == count:
            continue  # it was fetched before the iteration began
        first_use = next((tick for tick in (*used, *(tick + count for tick in used)) if tick >= start), start)
        in_backward = first_use % count >= count // 2
        ahead[in_backward] = max(ahead.get(in_backward, 0), first_use - start)
    return ahead.get(False, 1), ahead.get(True, 1)


def read_by_all(bucket: Bucket, layout: Layout) -> Item | None:
    """What all ranks read of each other's memory on the host to have the whole weight.

    The copy of a weight that travels, unless it rests on the disk; of one that stays, and is
    updated on the host, what the update leaves there. None: they get it over the network.
    """
    if not layout.common_host or bucket.shards == 1:
        return None
    if not bucket.resident:
        return None if bucket.weight_on_disk else Item.COPY
    updated = Item.PARKED if bucket.mixed else Item.MASTER
    return updated if bucket.site is Site.HOST else None


def common_bytes(layout: Layout) -> int:
    """Bytes of the host's arena, from its start, that all ranks read."""
    return sum(aligned(b.weight_bytes // b.shards, Tier.HOST) for b in layout.buckets if read_by_all(b, layout))


def mapped_bytes(layout: Layout) -> int:
    """Bytes of the other ranks' memory that this one maps. The system counts them as this process's, too."""
    return max((bucket.shards - 1 for bucket in layout.buckets), default=0) * common_bytes(layout)


# --- addresses --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spot:
    """A range of one tier's arena, in bytes."""

    tier: Tier
    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes

    def overlaps(self, other: Spot) -> bool:
        return self.tier is other.tier and self.offset < other.end and other.offset < self.end


@dataclass(frozen=True, slots=True)
class Addresses:
    """The size of each tier's arena in bytes, and one spot for every need of every bucket.

    ``spots`` is keyed by bucket and item; what belongs to no bucket has the bucket name "". Weights that are never on
    the device together may overlap, and so may spots of one other item that buckets use in turn; nothing else does.
    """

    arena_bytes: Mapping[Tier, int]
    spots: Mapping[tuple[str, Item], Spot]

    def of(self, bucket: str, item: Item) -> Spot:
        return self.spots[(bucket, item)]

    def num_bytes(self, tier: Tier) -> int:
        return self.arena_bytes.get(tier, 0)
