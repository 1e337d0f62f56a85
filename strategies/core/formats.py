"""Number formats: in how many bits moments, masters and frozen weights may rest. Bytes and seconds only; what the bits
mean is in ``strategies/engine/codecs.py``.

To add a format, write a row of ``FORMATS`` here, its codec there, and its name beside the option in
``strategies/offload.py``. All else reads these rows.

Bytes per parameter on the host, in bf16 with AdamW, where weights travel and gradients use their copies' place: 14 with
moments in fp32, 10 in bf16, 8.03 in int8 (2, and two scales of 4 bytes for each block of 256). A master in bf16 is the
weight itself, and its gradient has a place of its own: 8 with moments in bf16, 6.03 in int8. Where updates in backward
take gradients from a few slots (``gradients: passing``) it has none: 6 and 4.03.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from deepstow.strategies.core.facts import Facts, Param, RunFacts, UnitKind

Use: TypeAlias = Literal["moments", "masters", "frozen weights"]
ROUNDING = 1.2  # times as long as in fp32, more, for masters in bf16
HOST_CHUNK = 1 << 20  # elements that the CPU updates at a time
NOISE_STARTS = 1 << 16  # places in the noise at which that of a chunk may begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How numbers rest.

    Args:
        bits: of one number.
        uses: what may rest so. A frozen weight is exact in its own dtype when it was encoded once.
        block: numbers of a parameter, from its first one on, that have a scale together; a divisor of 128 if frozen
            weights rest so, of 256 if moments do. 0: no scales.
        scale_bytes: of one scale.
        slower: times as long as with moments in fp32 that AdamW takes on the CPU, by benchmarks/records/moments.md.
    """

    bits: int
    uses: tuple[Use, ...]
    block: int = 0
    scale_bytes: int = 0
    slower: float = 1.0

    def code_bytes(self, elements: int) -> int:
        """Bytes of so many numbers, without their scales."""
        return -(-elements * self.bits // 8)

    def blocks(self, elements: int) -> int:
        """How many scales so many numbers of one parameter have."""
        return -(-elements // self.block) if self.block else 0

    def num_bytes(self, elements: int) -> int:
        """Bytes of so many numbers, and of their scales."""
        return self.code_bytes(elements) + self.scale_bytes * self.blocks(elements)


FORMATS: Mapping[str, Format] = {
    "fp32": Format(bits=32, uses=("moments", "masters")),
    "bf16": Format(bits=16, uses=("moments", "masters"), slower=4.0),
    "int8": Format(bits=8, uses=("moments",), block=256, scale_bytes=4, slower=7.5),
    "fp8": Format(bits=8, uses=("frozen weights",), block=128, scale_bytes=2),
}


def names_of(use: Use) -> list[str]:
    """Formats in which such numbers may rest, but fp32."""
    return [name for name, rests in FORMATS.items() if use in rests.uses and name != "fp32"]


def expanded_elements(moments_as: str, spans: Iterable[int]) -> int:
    """How many elements have their moments in scratch memory at a time, of buckets with ``spans`` of so many."""
    return 0 if moments_as == "fp32" else min(HOST_CHUNK, max(spans, default=0))


def expanded_bytes(moments_as: str, moments: int, spans: Iterable[int], *, masters: bool = False) -> int:
    """The size of that memory: fp32 moments, and noise for each of the elements; both for ``masters``, too, if these
    are in bf16. 0 if none is needed.
    """
    elements = expanded_elements(moments_as, spans)
    return 4 * ((moments + 1 + 2 * masters) * elements + (1 + masters) * NOISE_STARTS) if elements else 0


def touched_bytes(moments_as: str, in_fp32: int, *, masters: bool = False) -> int:
    """Bytes of memory that an update of AdamW touches per parameter, if it is ``in_fp32`` with state in fp32."""
    # Two moments, read and written; of a master two bytes instead of four, and no weight that is written beside it.
    return in_fp32 - (32 - FORMATS[moments_as].bits) // 2 - 6 * masters


def slower(moments_as: str, *, masters: bool = False) -> float:
    """Times as long as in fp32 that AdamW takes on the CPU."""
    return FORMATS[moments_as].slower + ROUNDING * masters


def is_encoded(param: Param, blocks: frozenset[str]) -> bool:
    """Whether ``param`` may rest in a format for frozen weights: it is a frozen matrix of one of ``blocks``, by name.
    bitsandbytes' whole numbers are none.
    """
    frozen = param.group is None and not param.vector and param.dtype in ("float32", "bfloat16")
    return frozen and param.unit in blocks


def blocks_of(facts: Facts) -> frozenset[str]:
    """Names of the units that are blocks."""
    return frozenset(unit.name for unit in facts.units if unit.kind is UnitKind.BLOCK)


def refused_by(run: RunFacts, *, shared: bool, disk: bool) -> str:
    """Why frozen weights of a run cannot rest in a format of their own, and the way out; empty: they can."""
    parts = {"strategies.zero": shared, "strategies.tensor": run.tensor > 1, "strategies.pipeline": run.stages > 1}
    if divided := [name for name, is_so in parts.items() if is_so]:
        return f"is of weights that each rank has whole, and {divided[0]} divides them; leave one of them out"
    return "rest in the host's memory, not on a disk; leave strategies.offload.disk out" if disk else ""


def nothing_to_encode(facts: Facts) -> str:
    """Why ``facts`` have no weights that may rest in a format of their own, and the way out; empty: they have."""
    if any(param.dtype in ("uint8", "int8") for param in facts.params):
        return "the weights of model.quantization_config are packed already; leave one of them out"
    if any(is_encoded(param, blocks_of(facts)) for param in facts.params):
        return ""
    return "no matrix of a block is frozen; write model.lora, or leave it out"
