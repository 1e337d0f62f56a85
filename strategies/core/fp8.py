"""Frozen weights in fp8 on the link: how many bytes, and where that is refused. What the bytes mean is in
``strategies/engine/tensors/fp8.py``.
"""

from __future__ import annotations

from deepstow.strategies.core.facts import Facts, Param, RunFacts, UnitKind

BLOCK = 128  # elements of a parameter, from its first one on, that have a scale together
SCALE_BYTES = 2


def packed_bytes(elements: int) -> int:
    """Of so many elements: a code of one byte for each, and the scales behind them."""
    return elements + SCALE_BYTES * -(-elements // BLOCK)


def is_rounded(param: Param, blocks: frozenset[str]) -> bool:
    """Whether ``param`` is a frozen matrix of one of ``blocks``, by name; bitsandbytes' whole numbers are none."""
    frozen = param.group is None and not param.vector and param.dtype in ("float32", "bfloat16")
    return frozen and param.unit in blocks


def blocks_of(facts: Facts) -> frozenset[str]:
    """Names of the units that are blocks."""
    return frozenset(unit.name for unit in facts.units if unit.kind is UnitKind.BLOCK)


def refused_by(run: RunFacts, *, shared: bool, disk: bool) -> str:
    """Why a run cannot have them, and the way out; empty: it can."""
    parts = {"strategies.zero": shared, "strategies.tensor": run.tensor > 1, "strategies.pipeline": run.stages > 1}
    if divided := [name for name, is_so in parts.items() if is_so]:
        return f"is of weights that each rank has whole, and {divided[0]} divides them; leave one of them out"
    return "rest in the host's memory, not on a disk; leave strategies.offload.disk out" if disk else ""


def nothing_to_round(facts: Facts) -> str:
    """Why ``facts`` have no such weights, and the way out; empty: they have."""
    if any(param.dtype in ("uint8", "int8") for param in facts.params):
        return "the weights of model.quantization_config are packed already; leave one of them out"
    if any(is_rounded(param, blocks_of(facts)) for param in facts.params):
        return ""
    return "no matrix of a block is frozen; write model.lora, or leave it out"
