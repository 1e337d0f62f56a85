"""How moments rest: in fp32, or in fewer bits, of which ``strategies/engine/updating/moments.py`` says what they mean.

Bytes per parameter on the host, in bf16 with AdamW, where weights travel and gradients use their copies' place: 14 with
moments in fp32, 10 in bf16, 8.03 in int8 (2, and two scales of 4 bytes for each block of 256).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

MomentsAs: TypeAlias = Literal["fp32", "bf16", "int8"]
MOMENT_BYTES: Mapping[MomentsAs, int] = {"fp32": 4, "bf16": 2, "int8": 1}
# Times as long as in fp32 that AdamW takes on the CPU, by benchmarks/records/2026-11-27_moments_2-core.
SLOWER: Mapping[MomentsAs, float] = {"fp32": 1.0, "bf16": 4.0, "int8": 5.0}
BLOCK = 256  # elements of a parameter, from its first one on, whose moments in int8 have a scale together
HOST_CHUNK = 1 << 20  # elements that the CPU updates at a time
NOISE_STARTS = 1 << 16  # places in the noise at which that of a chunk may begin


def blocks_of(sizes: Iterable[int]) -> tuple[int, ...]:
    """How many blocks parameters of these sizes have."""
    return tuple(-(-size // BLOCK) for size in sizes)


def expanded_elements(kind: MomentsAs, spans: Iterable[int]) -> int:
    """How many elements have their moments in scratch memory at a time, of buckets with ``spans`` of so many."""
    return 0 if kind == "fp32" else min(HOST_CHUNK, max(spans, default=0))


def expanded_bytes(kind: MomentsAs, moments: int, spans: Iterable[int]) -> int:
    """The size of that memory: fp32 moments, and noise for each of the elements. 0 if none is needed."""
    elements = expanded_elements(kind, spans)
    return 4 * ((moments + 1) * elements + NOISE_STARTS) if elements else 0


def touched_bytes(kind: MomentsAs, in_fp32: int) -> int:
    """Bytes of memory that an update of AdamW touches per parameter, if it is ``in_fp32`` with moments in fp32."""
    return in_fp32 - 4 * (4 - MOMENT_BYTES[kind])  # two moments, read and written
