"""Bytes of other engines on one rank: what ZeRO's stages split over the ranks, and what DeepSpeed's engine and torch's
pipeline set aside, besides the state of the rank's part. Pure.

``strategies/zero.py`` and ``pipeline.py`` make their decisions from these, and the search over degrees (``hybrid/``)
its account, so that all count the same bytes. The arithmetic of ZeRO is in the docstring of the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from deepstow.strategies.core.facts import Facts, Precision, RunFacts, UnitKind
from deepstow.strategies.core.plan import RUN, Kind, Reserve, When

MESSAGE_BYTES = 25 << 20  # of gradients to the other copies, as torch's data parallelism sends them
MAX_BUCKET = 50_000_000  # elements: 100 MB of bf16, at which a PCIe or NVLink transfer is near its asymptote
SPLIT_FROM: Mapping[Kind, int] = {Kind.MASTER: 1, Kind.MOMENT: 1, Kind.GRAD: 2, Kind.PARAM: 3}


def element_bytes(run: RunFacts, stage: int) -> dict[Kind, int]:
    """Bytes per element of each kind of tensor in DeepSpeed's engine; 0: there is no such tensor."""
    mixed = run.precision is not Precision.FP32
    return {
        Kind.PARAM: run.precision.element_bytes,
        Kind.GRAD: run.precision.element_bytes,
        Kind.MASTER: 4 if mixed or stage > 0 else 0,
        Kind.MOMENT: 4 * run.moments,
    }


def buffers(facts: Facts, stage: int, shards: int) -> Iterator[Reserve]:
    """What DeepSpeed's engine sets aside on each rank where ``shards`` ranks share the state."""
    size, mixed = facts.run.precision.element_bytes, facts.run.precision is not Precision.FP32
    if stage > 0:
        count = 2 if facts.machine.has_accelerator else 1  # overlapping needs a second one to fill
        num_bytes, reason = count * bucket_elements(facts) * size, "gradients are reduced bucket by bucket"
        yield Reserve(unit=RUN, reason=reason, owner="zero: reduce bucket", num_bytes=num_bytes)
    run, sizes = facts.run, element_bytes(facts.run, stage)
    if run.apart and stage > 0:
        split_bytes = sum(sizes[kind] for kind, from_stage in SPLIT_FROM.items() if stage >= from_stage)
        expert_bytes = split_bytes * run.apart * (shards - run.alike) // (shards * run.alike)
        reason = f"{run.alike} ranks share it, and not all {shards}"
        yield Reserve(unit=RUN, reason=reason, owner="zero: state of experts", num_bytes=expert_bytes)
    if stage == 3 and shards > 1:
        live, reason = min(live_elements(facts), facts.num_params), "weights gathered for use and prefetched"
        yield Reserve(unit=RUN, reason=reason, owner="zero: gathered weights", num_bytes=live * size)
    if mixed or stage == 3:  # stage 3 flattens into a copy in fp32, too
        reason = "the optimizer reads its share of the gradients in fp32"
        share, owner = -(-facts.num_trainable // (shards if stage > 0 else 1)), "zero: fp32 gradients"
        yield Reserve(unit=RUN, reason=reason, owner=owner, num_bytes=4 * share, when=When.STEP)


def bucket_elements(facts: Facts) -> int:
    """Elements of a bucket of gradients: one block, so that messages are large.

    A parameter larger than that is sent in a bucket of its own. Always even: DeepSpeed aligns shares to two elements
    and refuses an odd bucket.
    """
    size = min(MAX_BUCKET, largest_block(facts), facts.num_trainable)
    return max(2, size + size % 2)


def live_elements(facts: Facts) -> int:
    """Most elements gathered at a time: the largest unit in use, one block prefetched and one not yet released."""
    return max((unit.num_params for unit in facts.units), default=1) + 2 * largest_block(facts)


def largest_block(facts: Facts) -> int:
    """Elements; of any unit if the model has no blocks. Embedding and head are larger but needed once per step."""
    blocks = [unit.num_params for unit in facts.units if unit.kind is UnitKind.BLOCK]
    return max(blocks or [unit.num_params for unit in facts.units], default=1)


# --- torch's pipeline ------------------------------------------------------------------------------------------------


def boundary_bytes(run: RunFacts) -> int:
    """Of one micro-batch's hidden states, which stages send to each other."""
    return run.micro_batch * run.sequence * run.hidden_size * run.precision.element_bytes


def received_bytes(run: RunFacts, borders: int, micro_batches: int) -> int:
    """Of the tensors that come from other stages over ``borders`` of the rank's parts; each micro-batch has its own."""
    return borders * micro_batches * boundary_bytes(run)


def message_bytes(run: RunFacts, num_trainable: int, copies: int, *, shared: bool = False) -> int:
    """Of what gradients are copied into to be summed over the ``copies`` of the model; none if there is one. Where they
    have ``shared`` the optimizer's state, messages of new weights come later, and beside each the rank's part of it.

    A message is closed when it is full, so it can be longer by the largest gradient.
    """
    if copies == 1:
        return 0
    num_bytes = min(run.trained_bytes * num_trainable, MESSAGE_BYTES + run.trained_bytes * run.largest_param)
    return num_bytes + -(-num_bytes // copies) * shared
