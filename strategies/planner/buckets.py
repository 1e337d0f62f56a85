"""Buckets: which parameters are copied together, and which of them may be offloaded.

A copy over the link needs to be large to be fast, and small enough that several fit beside the activations. The block
is the natural size. If the rates of the link are known, it is split as far as that shortens the copies: with U copies
of each bucket per step, n buckets of C bytes at most, a latency of a and b bytes per second,

    J(C) = U (n a + bytes / b) + C / b        the last term is the first copy, which compute cannot hide

(the criterion of Elixir, Huang et al. 2022, for buckets that all move). Smaller buckets also make slots smaller.

A bucket holds parameters of one dtype and one optimizer group, in order of first use. Parameters that may be in use
while units run that do not own them have buckets of their own, which never leave. A bucket takes whole blocks while
they fit into the capacity. Embedding and head are not split and never share a bucket with a block. A tied parameter is
in the bucket of its first use.

Over ranks, a bucket is cut into spans of equal size. The norm of a parameter is a reduction over all of it, so
parameters are whole in one span where that leaves little of a span empty: embedding and head are cut, blocks seldom.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median_low
from typing import TypeAlias

from deepstow.strategies.core.facts import Facts, Param, UnitKind
from deepstow.strategies.core.formats import blocks_of, is_encoded
from deepstow.strategies.core.layout import ALIGN_BYTES, ITEM_BYTES, Bucket, Site, aligned

PARTS = (2, 3, 4, 6, 8)  # of a block, tried as capacities
SMALL = 8  # a bucket of less than this part of a block, per unit, is not worth a copy
UNEVEN = 0.1  # of a span may be empty so that no parameter has several owners
Kinds: TypeAlias = tuple[tuple[str, UnitKind], ...]  # of units in order, by name
Like: TypeAlias = tuple[str, int | None, bool, str]  # dtype, group, read elsewhere, ``frozen_as``: of all of a bucket


def form(facts: Facts, capacity: int | None = None, shards: int = 1, *, frozen_as: str = "") -> tuple[Bucket, ...]:
    """Buckets of all parameters in order of first use, all on the device.

    Args:
        capacity: bytes of a bucket, unless one parameter is larger; None: those of the largest block in that dtype.
        shards: ranks that hold a span of each bucket.
        frozen_as: the format in which frozen matrices of blocks travel, in buckets of their own; empty: as they are.
    """
    assert facts.params, "buckets are made of single parameters; these facts do not list them"
    blocks = blocks_of(facts)
    encoded = {param.name: frozen_as for param in facts.params if frozen_as and is_encoded(param, blocks)}
    return _formed(facts.params, _kinds(facts), capacity, shards, tuple(encoded.items()))


@lru_cache(maxsize=64)
def _formed(
    params: tuple[Param, ...],
    kinds: Kinds,
    capacity: int | None,
    shards: int,
    encoded: tuple[tuple[str, str], ...] = (),
) -> tuple[Bucket, ...]:
    """``form``: a search asks for the same buckets again and again."""
    place = {name: index for index, (name, _) in enumerate(kinds)}
    in_order = sorted(params, key=lambda param: place[param.unit])
    pieces = list[list[Param]]()
    formats = dict(encoded)
    likes = {param.name: _like(param, formats.get(param.name, "")) for param in in_order}
    for like in dict.fromkeys(likes.values()):
        size = capacity or _block_bytes(params, kinds, like[0])
        pieces += _pieces([param for param in in_order if likes[param.name] == like], kinds, size)
    order = {param.name: index for index, param in enumerate(in_order)}
    pieces.sort(key=lambda piece: order[piece[0].name])
    names = _names(pieces, list(place), likes)
    return tuple(
        _bucket(name, piece, place, shards, likes[piece[0].name]) for name, piece in zip(names, pieces, strict=True)
    )


def capacity(facts: Facts) -> int | None:
    """Bytes of a bucket by the criterion above: a block or a part of it. None: unknown rates, or no blocks."""
    rates, copies = facts.machine.rates, 2 * facts.run.accumulation + 1  # of weights for both passes, and the gradient
    if rates is None:
        return None
    return _capacity(facts.params, _kinds(facts), copies, rates.link_latency_s, rates.up_bytes_per_s)


@lru_cache(maxsize=64)
def _capacity(params: tuple[Param, ...], kinds: Kinds, copies: int, latency: float, rate: float) -> int | None:
    """``capacity``: a search asks for the same one again and again."""
    block, blocks = _block_bytes(params, kinds), {name for name, kind in kinds if kind is UnitKind.BLOCK}

    def moved(size: int) -> float:
        bucket_sizes = [b.weight_bytes for b in _formed(params, kinds, size, 1) if b.units[0] in blocks]
        return copies * (len(bucket_sizes) * latency + sum(bucket_sizes) / rate) + max(bucket_sizes, default=0) / rate

    sizes = [block, *(-(-block // parts) for parts in PARTS)]
    return min(sizes, key=moved) if block else None  # the largest of equals


def block_bytes(facts: Facts, dtype: str | None = None) -> int:
    """Weights of the largest block, in one dtype or in all; 0 if there are no blocks."""
    return _block_bytes(facts.params, _kinds(facts), dtype)


def typical_block_bytes(facts: Facts) -> int:
    """Weights of a block that as many blocks exceed as not; 0 if there are no blocks."""
    return median_low(_sizes_of_blocks(facts.params, _kinds(facts), None) or [0])


def _block_bytes(params: Iterable[Param], kinds: Kinds, dtype: str | None = None) -> int:
    return max(_sizes_of_blocks(params, kinds, dtype), default=0)


def _sizes_of_blocks(params: Iterable[Param], kinds: Kinds, dtype: str | None) -> list[int]:
    totals = {name: 0 for name, kind in kinds if kind is UnitKind.BLOCK}
    for param in params:
        if param.unit in totals and dtype in (None, param.dtype):
            totals[param.unit] += _bytes(param)
    return list(totals.values())


def _kinds(facts: Facts) -> Kinds:
    return tuple((unit.name, unit.kind) for unit in facts.units)


def _like(param: Param, frozen_as: str) -> Like:
    return (param.dtype, param.group, param.elsewhere, frozen_as)


def _bytes(param: Param) -> int:
    return aligned(param.num_elements * ITEM_BYTES[param.dtype])


def _pieces(params: Iterable[Param], kinds: Kinds, capacity: int) -> Iterator[list[Param]]:
    """Parameters of one dtype and group, cut into buckets."""
    shares: dict[str, list[Param]] = {}
    for param in params:
        shares.setdefault(param.unit, []).append(param)
    packed, packed_bytes = list[Param](), 0
    for unit, kind in kinds:
        share = shares.get(unit, [])
        size = sum(map(_bytes, share))
        alone = kind is not UnitKind.BLOCK or size > capacity
        if packed and (alone or packed_bytes + size > capacity):
            yield packed
            packed, packed_bytes = [], 0
        if not alone:
            packed, packed_bytes = packed + share, packed_bytes + size
        elif kind is UnitKind.BLOCK:
            yield from _cut(share, capacity)
        elif share:
            yield share
    if packed:
        yield packed


def _cut(share: Iterable[Param], capacity: int) -> Iterator[list[Param]]:
    piece, piece_bytes = list[Param](), 0
    for param in share:
        size = _bytes(param)
        if piece and piece_bytes + size > capacity:
            yield piece
            piece, piece_bytes = [], 0
        piece.append(param)
        piece_bytes += size
    if piece:
        yield piece


def _names(pieces: Sequence[Sequence[Param]], units: Sequence[str], like_of: Mapping[str, Like]) -> list[str]:
    """``model.layers.0``, ``model.layers.0..3``; further a format; ``:group1`` and ``/1`` if it were there twice."""
    bases = [_span(sorted({param.unit for param in piece}, key=units.index)) for piece in pieces]
    likes = [like_of[piece[0].name] for piece in pieces]
    groups, dtypes = defaultdict[str, set[int | None]](set), defaultdict[str, set[str]](set)
    for base, (dtype, group, *_) in zip(bases, likes, strict=True):
        groups[base].add(group)
        dtypes[base].add(dtype)
    parts = Counter(zip(bases, likes, strict=True))
    numbered: Counter[tuple[str, Like]] = Counter()
    names: list[str] = []
    for base, like in zip(bases, likes, strict=True):
        (dtype, group, *_), name = like, base + ":elsewhere" * like[2] + f":{like[3]}" * bool(like[3])
        if len(groups[base]) > 1:
            name += ":frozen" if group is None else f":group{group}"
        if len(dtypes[base]) > 1:
            name += f":{dtype}"
        if parts[base, like] > 1:
            name += f"/{numbered[base, like]}"
            numbered[base, like] += 1
        names.append(name)
    assert len(set(names)) == len(names), names
    return names


def _span(units: Sequence[str]) -> str:
    if len(units) == 1:
        return units[0]
    first, last = units[0].rpartition("."), units[-1].rpartition(".")
    return f"{units[0]}..{last[2] if first[0] == last[0] else units[-1]}"


def _bucket(name: str, params: Sequence[Param], place: dict[str, int], shards: int, like: Like) -> Bucket:
    dtype, group, _, frozen_as = like
    step = ALIGN_BYTES // ITEM_BYTES[dtype]
    offsets, end = _offsets([-(-param.num_elements // step) * step for param in params], shards, step)
    users = {unit for param in params for unit in (param.unit, *param.users)}
    return Bucket(
        name=name,
        units=tuple(sorted(users, key=place.__getitem__)),
        params=tuple(param.name for param in params),
        sizes=tuple(param.num_elements for param in params),
        offsets=offsets,
        num_elements=end,
        dtype=dtype,
        group=group,
        site=Site.NONE if group is None else Site.DEVICE,
        shards=shards,
        looked_up=all(param.looked_up for param in params),
        frozen_as=frozen_as,
    )


def _offsets(sizes: Sequence[int], shards: int, step: int) -> tuple[tuple[int, ...], int]:
    """Where parameters of these aligned sizes begin in ``shards`` equal spans, and where the last span ends.

    Whole parameters go to the emptiest span, the largest first. If that wastes more than ``UNEVEN``, they follow each
    other and are cut where spans end.
    """
    spans: list[list[int]] = [[] for _ in range(shards)]
    loads = [0] * shards
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        emptiest = loads.index(min(loads))
        spans[emptiest].append(index)
        loads[emptiest] += sizes[index]
    even = -(-sum(sizes) // (shards * step)) * step
    if shards == 1 or max(loads) > (1 + UNEVEN) * even:
        spans, share = [list(range(len(sizes)))], even
    else:
        share = max(loads)
    offsets = dict[int, int]()
    for number, span in enumerate(spans):
        end = number * share
        for index in sorted(span):
            offsets[index] = end
            end += sizes[index]
    return tuple(offsets[index] for index in range(len(sizes))), shards * share


@dataclass(slots=True)
class Offloadable:
    """Indices of buckets whose weights may be offloaded, and whose gradients may be sent to the host as they are made.

    Excluded are weights of small buckets, because a copy costs its latency and saves nothing; buckets that more than
    half of the blocks use, because they would come back for every block; and parameters that may be in use while units
    run that do not own them.

    Args:
        blocks: large enough, and used by a few blocks only.
        ends: large buckets of embedding and head that nothing uses while blocks run.
        gradients: large, and complete within a few blocks. Other gradients are few and land all through backward; they
            would hold a slot all the time. Over ranks a slot is held until all ranks have exchanged what is in it, so
            it has to be the gradient of a weight that is not used for long.
    """

    blocks: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)


def offloadable(facts: Facts, buckets: Sequence[Bucket], bucket_bytes: int | None) -> Offloadable:
    """Which of ``buckets`` may leave the device."""
    blocks = {unit.name for unit in facts.units if unit.kind is UnitKind.BLOCK}
    elsewhere = {param.name for param in facts.params if param.elsewhere}
    stacks = {name.rpartition(".")[0] for name in blocks}
    largest = block_bytes(facts)
    worth = min(largest, bucket_bytes or largest) / SMALL
    may_leave = Offloadable()
    for index, bucket in enumerate(buckets):
        count = len(bucket.units)
        if bucket.weight_bytes / count < worth:
            continue
        by_few_blocks = blocks.issuperset(bucket.units) and 2 * count <= len(blocks)
        if by_few_blocks or count == 1:
            may_leave.gradients.append(index)
        if not elsewhere.isdisjoint(bucket.params):
            continue
        if by_few_blocks:
            may_leave.blocks.append(index)
        # With several stacks of blocks the "head" holds what stands between them, and is not used at the end only.
        elif blocks.isdisjoint(bucket.units) and len(stacks) == 1:
            may_leave.ends.append(index)
    if facts.run.adding_copies > 1:
        may_leave.gradients = sorted(may_leave.blocks + may_leave.ends)
    return may_leave
