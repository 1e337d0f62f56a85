"""What tensor ranks send of fewer tokens in fewer bits, and whether coding takes longer than the link saves.

Numbers that a rank sends per block, of a micro-batch with V numbers of hidden states, T ranks, a part r of the tokens:

    without        2 (T-1)/T V   for each sum: in forward 2, in backward one of each layer divided by columns
    with           2 (T-1)/T V   2 r in forward, in b bits with 4/128 bytes for blocks; 1 + r in backward, as they are
    scores         (T-1) V / width in forward, twice, in fp32, unless r is 1

Coding is priced in bytes of the device's memory per number that is coded, and decoded: as the code makes passes on an
accelerator, which nobody has measured; on a CPU what one core took, in bytes of a copy (4 M numbers).
"""

from __future__ import annotations

from deepstow.strategies.core.facts import Facts, RunFacts, UnitKind
from deepstow.strategies.planner.exchanges import straight
from deepstow.strategies.planner.pipeline_bytes import boundary_bytes

OWNER = "tensor: exchanged rows"
COUNTED = {(8, False): (44, 24), (4, False): (48, 28), (8, True): (180, 100), (4, True): (184, 104)}
ON_CPU = {(8, False): (92, 37), (4, False): (188, 65), (8, True): (1025, 480), (4, True): (1020, 540)}


def message_bytes(run: RunFacts, tokens: float) -> int:
    """Of the device, while one sum is exchanged: the partial sum, chosen rows in fp32, coded and decoded."""
    return int(boundary_bytes(run) * (1 + 4 * tokens * 4 / run.precision.element_bytes))


def words(facts: Facts, what: str, tokens: float, bits: int, *, segmented: bool) -> str:
    """What is sent, what that gains, and that it is lossy."""
    run, machine = facts.run, facts.machine
    ranks, blocks = run.tensor, sum(unit.kind is UnitKind.BLOCK for unit in facts.units)
    size, element = boundary_bytes(run), run.precision.element_bytes
    numbers, ring = size / element, 2 * (ranks - 1) / ranks
    of_number = element if bits == 16 else bits / 8 + (0 if segmented else 4 / 128)
    scores = (ranks - 1) * 4 * run.micro_batch * run.sequence * (tokens < 1)
    whole = blocks * ring * sum(run.sums[:2]) * size
    less = blocks * (2 * (ring * tokens * numbers * of_number + scores) + ring * (1 + tokens) * size)
    said = f"lossy, {what}: each rank sends {less / 1e6:.4g} MB per micro-batch instead of {whole / 1e6:.4g} MB"
    if (rates := machine.rates) is None:
        return f"{said}; the link's rate is unknown"
    saved, coding = (whole - less) / straight(facts, rates, ranks).bytes_per_s, 0.0
    if bits < 16:
        coded, decoded = (COUNTED if machine.has_accelerator else ON_CPU)[bits, segmented]
        touched = 2 * blocks * tokens * numbers * ((1 + 1 / ranks) * coded + 2 * decoded)
        coding = touched / rates.device_bytes_per_s
    verdict = "which is more than it saves: take 16 bits" if coding > saved else "less than it saves"
    return f"{said}; the link saves {saved * 1e3:.3g} ms, coding takes {coding * 1e3:.3g} ms (estimated), {verdict}"
