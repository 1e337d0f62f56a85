"""How moments and masters rest: in fp32, or in fewer bits; ``strategies/engine/updating/moments.py`` has what
they mean.

Bytes per parameter on the host, in bf16 with AdamW, where weights travel and gradients use their copies' place: 14 with
moments in fp32, 10 in bf16, 8.03 in int8 (2, and two scales of 4 bytes for each block of 256). A master in bf16 is the
weight itself, and its gradient has a place of its own: 8 with moments in bf16, 6.03 in int8. Where updates in backward
take gradients from a few slots (``gradients: passing``) it has none: 6 and 4.03.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

MomentsAs: TypeAlias = Literal["fp32", "bf16", "int8"]
MOMENT_BYTES: Mapping[MomentsAs, int] = {"fp32": 4, "bf16": 2, "int8": 1}
# Times as long as in fp32 that AdamW takes on the CPU, by the records of moments under benchmarks/records.
SLOWER: Mapping[MomentsAs, float] = {"fp32": 1.0, "bf16": 4.0, "int8": 7.5}
ROUNDING = 1.2  # more of it for masters in bf16
BLOCK = 256  # elements of a parameter, from its first one on, whose moments in int8 have a scale together
HOST_CHUNK = 1 << 20  # elements that the CPU updates at a time
NOISE_STARTS = 1 << 16  # places in the noise at which that of a chunk may begin


def blocks_of(sizes: Iterable[int]) -> tuple[int, ...]:
    """How many blocks parameters of these sizes have."""
    return tuple(-(-size // BLOCK) for size in sizes)


def expanded_elements(kind: MomentsAs, spans: Iterable[int]) -> int:
    """How many elements have their moments in scratch memory at a time, of buckets with ``spans`` of so many."""
    return 0 if kind == "fp32" else min(HOST_CHUNK, max(spans, default=0))


def expanded_bytes(kind: MomentsAs, moments: int, spans: Iterable[int], *, masters: bool = False) -> int:
    """The size of that memory: fp32 moments, and noise for each of the elements; both for ``masters``, too, if these
    are in bf16. 0 if none is needed.
    """
    elements = expanded_elements(kind, spans)
    return 4 * ((moments + 1 + 2 * masters) * elements + (1 + masters) * NOISE_STARTS) if elements else 0


def touched_bytes(kind: MomentsAs, in_fp32: int, *, masters: bool = False) -> int:
    """Bytes of memory that an update of AdamW touches per parameter, if it is ``in_fp32`` with state in fp32."""
    # Two moments, read and written; of a master two bytes instead of four, and no weight that is written beside it.
    return in_fp32 - 4 * (4 - MOMENT_BYTES[kind]) - 6 * masters


def slower(kind: MomentsAs, *, masters: bool = False) -> float:
    """Times as long as in fp32 that AdamW takes on the CPU."""
    return SLOWER[kind] + ROUNDING * masters
