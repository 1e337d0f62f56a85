"""What lossy exchanges send, and whether coding takes longer than the link saves. Numbers only.

For P gradients in fp32, on N ranks, in bytes that a rank sends in a step:

    all of them        2 (N-1)/N 4P                      by a ring
    bf16, fp16         2 (N-1)/N 2P
    int8               2 (N-1)/N (1 + 4/128) P           to the owners of parts, and from them
    PowerSGD           2 (N-1)/N 4 r (n + m)             of each n x m matrix, two factors of rank r
    top-k              (N-1) 8 d P                       a number and its place each; messages are gathered, so this
                                                         grows with N, and at a density of 1/N nothing is saved

The memory engine's gradients have 2 bytes in 16 bits, and where its ranks hold spans they are sent once, to their
owners: (N-1)/N 4P without, and as above with compression, since all ranks get all means.

With local steps the same of what was learned in H steps, once in H steps: a part of 1/H of each, and the outer weights
and their momentum are on the host.

What tensor ranks send of fewer tokens in fewer bits, per block of a micro-batch with V numbers of hidden states, T
ranks, a part r of the tokens:

    without            2 (T-1)/T V   for each sum: in forward 2, in backward one of each layer divided by columns
    with               2 (T-1)/T V   2 r in forward, in b bits with 4/128 bytes for blocks; 1 + r in backward, as they
                                     are
    scores             (T-1) V / width in forward, twice, in fp32, unless r is 1

Coding is priced by the device's memory: of gradients in passes over P numbers of 4 bytes, of hidden states in bytes per
number that is coded, and decoded. As the code makes them on an accelerator, which nobody has measured; on a CPU as many
as it took one core of a Xeon, in times of a pass of a copy (4 M numbers).
"""

from __future__ import annotations

from collections.abc import Iterator

from deepstow.strategies.core.facts import Compression, Facts, Precision, Rates, RunFacts, UnitKind
from deepstow.strategies.core.plan import RUN, Reserve, Tier
from deepstow.strategies.planner.engine_bytes import MESSAGE_BYTES, boundary_bytes
from deepstow.strategies.planner.network import gather_rate, straight

UNKNOWN = "the link's rate is unknown"
VISITING = 5  # copies of a bucket in fp32 on the device of the memory engine, at most
COUNTED = {"none": 3, "bf16": 3, "fp16": 3, "int8": 16, "powersgd": 12, "topk": 20}
ON_CPU = {"none": 5, "bf16": 5, "fp16": 5, "int8": 95, "powersgd": 105, "topk": 120}
ROWS = "tensor: exchanged rows"
ROWS_COUNTED = {(8, False): (44, 24), (4, False): (48, 28), (8, True): (180, 100), (4, True): (184, 104)}
ROWS_ON_CPU = {(8, False): (92, 37), (4, False): (188, 65), (8, True): (1025, 480), (4, True): (1020, 540)}


def message_bytes(how: Compression, facts: Facts) -> float | None:
    """Bytes of one rank's message of a step, before it is known how often it travels; None: the model has no width."""
    count, width = facts.num_trainable, facts.run.hidden_size
    if how.method == "powersgd":
        if not width:
            return None
        # A matrix has the model's width on one side; blocks are as many as there are squares of it in them.
        matrices = ((unit.num_trainable, unit.kind is UnitKind.BLOCK) for unit in facts.units)
        sides = (size / width + width * max(1.0, size / width**2 * in_block) for size, in_block in matrices if size)
        return min(how.rank * sum(sides), count) * 4
    return {"none": 4.0, "topk": 8 * how.density, "int8": 1 + 4 / 128}.get(how.method, 2.0) * count


def sent_bytes(facts: Facts, *, spans: bool = False) -> tuple[float, float | None]:
    """What a rank sends in a step without and with compression; of local steps on average. ``spans``: of each bucket a
    rank holds one, in the memory engine.
    """
    run, how = facts.run, facts.run.compression
    assert how is not None
    ring = 2 * (run.copies - 1) / run.copies
    message = message_bytes(how, facts)
    times = run.copies - 1 if how.method == "topk" else ring
    halved = run.stowed and not how.local_steps and run.precision is Precision.BF16 and not run.adapters
    exact = ring * (2 if halved else 4) * facts.num_trainable
    return exact / (1 + spans), None if message is None else times * message / max(1, how.local_steps)


def owed_bytes(facts: Facts) -> int:
    """Of what a rank has not sent, its momentum and PowerSGD's factors."""
    how, count = facts.run.compression, facts.num_trainable
    if how is None or not how.owes:
        return 0
    owned = count / facts.run.copies
    by_method = {"int8": owned, "powersgd": (message_bytes(how, facts) or 4 * count) / 4}
    return int(4 * (count * (2 if how.momentum else 1) + by_method.get(how.method, 0.0)))


def outer_bytes(facts: Facts) -> int:
    """Of the host, of outer weights and their momentum."""
    how = facts.run.compression
    return 8 * facts.num_trainable if how is not None and how.local_steps else 0


def bucket_bytes(facts: Facts) -> int:
    """At most, of gradients that are sent together: a bucket, which ends with a parameter or is a unit of the model."""
    run, largest = facts.run, max(unit.num_trainable for unit in facts.units)
    bucket = max(MESSAGE_BYTES + run.largest_param * run.trained_bytes, largest * run.trained_bytes)
    return min(bucket, facts.num_trainable * run.trained_bytes)


def reserves(facts: Facts) -> Iterator[Reserve]:
    """What a rank sets aside besides the buckets of data parallelism."""
    run, rests = facts.run, Tier.HOST if facts.run.stowed else Tier.DEVICE
    owner, stowed = "collectives: owed gradients", run.stowed
    why = "what a rank has not sent yet"
    yield Reserve(unit=RUN, reason=why, owner=owner, num_bytes=owed_bytes(facts), tier=rests, in_passes=stowed)
    if outer := outer_bytes(facts):
        why, owner = "outer weights and momentum", "collectives: outer state"
        tier = Tier.HOST if stowed or facts.machine.has_accelerator else Tier.DEVICE
        yield Reserve(unit=RUN, reason=why, owner=owner, num_bytes=outer, tier=tier, in_passes=stowed)
    how = run.compression
    assert how is not None
    if stowed and not how.local_steps:  # in fp32, with what is owed, as it was, coded and decoded
        size = 4 * (VISITING + (how.momentum > 0)) * max(unit.num_trainable for unit in facts.units)
    else:
        size = 3 * bucket_bytes(facts)  # a bucket, as it is coded and as it is decoded
    why, owner = "messages of a bucket", "collectives: messages"
    yield Reserve(unit=RUN, reason=why, owner=owner, num_bytes=size, in_passes=True)


def share_and_coding(facts: Facts, rates: Rates, *, spans: bool = False) -> tuple[float, float]:
    """The part that is sent of all, and seconds of coding in a step; the part is 1 where it is not known."""
    how, (exact, sent) = facts.run.compression, sent_bytes(facts, spans=spans)
    assert how is not None
    passes = COUNTED if facts.machine.has_accelerator else ON_CPU
    coding = passes[how.method] * 4 * facts.num_trainable / rates.device_bytes_per_s / max(1, how.local_steps)
    if facts.run.stowed and facts.machine.has_accelerator and not how.local_steps:  # what is owed comes up, and goes
        coding += owed_bytes(facts) * (1 / rates.up_bytes_per_s + 1 / rates.down_bytes_per_s)
    return 1.0 if sent is None else sent / exact, coding


def exchanged_bytes(facts: Facts, rates: Rates, elements: int, size: int, shards: int) -> float:
    """What a rank sends of a bucket's gradients, of so many ``elements`` and bytes, where it is not the straight sum of
    spans; coding counts as what could be sent meanwhile.
    """
    ranks, how = facts.run.adding_copies, facts.run.compression
    sent = (1 if shards > 1 else 2) * (ranks - 1) / ranks * size
    if how is None or how.local_steps:
        return sent
    share, coding = share_and_coding(facts, rates, spans=shards > 1)
    return sent * share + coding * gather_rate(facts, rates) * elements / facts.num_trainable


def kept_bytes(facts: Facts) -> int:
    """Of what each rank adds to a checkpoint: what it owes; of local steps momentum, weights and inner state, too."""
    return owed_bytes(facts) + outer_bytes(facts) // 2 * (2 + facts.run.moments)


def words(facts: Facts, *, spans: bool = False) -> str:
    """What is sent, what that gains, and that it is lossy."""
    how, rates = facts.run.compression, facts.machine.rates
    assert how is not None
    exact, sent = sent_bytes(facts, spans=spans)
    if sent is None:
        return f"{how.words}, lossy: each rank sends fewer than {exact / 1e6:.4g} MB per step, how many is unknown"
    about = "about " if how.method == "powersgd" else "on average " if how.local_steps else ""
    text = f"{how.words}, lossy: each rank sends {about}{sent / 1e6:.4g} MB per step instead of {exact / 1e6:.4g} MB"
    if how.method == "topk" and not how.local_steps:
        text += f", as much at a density of {1 / facts.run.copies:.2g} with {facts.run.copies} ranks"
        text += f", or with {1 / how.density:.4g} ranks at this one"
    if rates is None:
        return f"{text}; {UNKNOWN}"
    saved = (exact - sent) / gather_rate(facts, rates)
    return f"{text}; {_gain(saved, share_and_coding(facts, rates, spans=spans)[1], 'leave it out')}"


def _gain(saved: float, coding: float, cure: str) -> str:
    verdict = f"which is more than it saves: {cure}" if coding > saved else "less than it saves"
    return f"the link saves {saved * 1e3:.3g} ms, coding takes {coding * 1e3:.3g} ms (estimated), {verdict}"


# --- hidden states ---------------------------------------------------------------------------------------------------


def rows_message_bytes(run: RunFacts, tokens: float) -> int:
    """Of the device, while one sum is exchanged: the partial sum, chosen rows in fp32, coded and decoded."""
    return int(boundary_bytes(run) * (1 + 4 * tokens * 4 / run.precision.element_bytes))


def rows_words(facts: Facts, what: str, tokens: float, bits: int, *, segmented: bool) -> str:
    """What is sent, what that gains, and that it is lossy."""
    run, machine = facts.run, facts.machine
    ranks, blocks = run.tensor, sum(unit.kind is UnitKind.BLOCK for unit in facts.units)
    size, element = boundary_bytes(run), run.precision.element_bytes
    numbers, ring = size / element, 2 * (ranks - 1) / ranks
    of_number = element if bits == 16 else bits / 8 + (0 if segmented else 4 / 128)
    scores = (ranks - 1) * 4 * run.micro_batch * run.sequence * (tokens < 1)
    exact = blocks * ring * sum(run.sums[:2]) * size
    sent = blocks * (2 * (ring * tokens * numbers * of_number + scores) + ring * (1 + tokens) * size)
    text = f"lossy, {what}: each rank sends {sent / 1e6:.4g} MB per micro-batch instead of {exact / 1e6:.4g} MB"
    if (rates := machine.rates) is None:
        return f"{text}; {UNKNOWN}"
    saved, coding = (exact - sent) / straight(facts, rates, ranks).bytes_per_s, 0.0
    if bits < 16:
        coded, decoded = (ROWS_COUNTED if machine.has_accelerator else ROWS_ON_CPU)[bits, segmented]
        touched = 2 * blocks * tokens * numbers * ((1 + 1 / ranks) * coded + 2 * decoded)
        coding = touched / rates.device_bytes_per_s
    return f"{text}; {_gain(saved, coding, 'take 16 bits')}"
