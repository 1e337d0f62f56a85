"""Simulated: our search beside degrees that others published and trained with; the tables in published_choices.md.

    python -m deepstow.benchmarks.published_choices

Sources, all on machines of eight cards of 80 GB:

    2021    Narayanan et al., arXiv 2104.04473, tables 1 and 2, A100, 200 Gb/s each: all recomputed, and counted as work
    2022    Korthikanti et al., arXiv 2205.05198, table 5, the same: sequence parallelism, attention recomputed
    2024    Llama 3, arXiv 2407.21783, table 4, H100, 400 Gb/s each: nothing recomputed. Ours is a GPT of its sizes

The search is given what those engines can do and not what ours can: tensor with pipeline, vocabulary over tensor ranks,
ZeRO 0 or 1, buffers of what is in flight only. Saved bytes per layer are those of the 2022 paper's table 2: ``s b h (10
+ 24 / t + 5 a s / (h t))``, with sequence parallelism ``s b h (34 / t + 5 a s / (h t))``; selective recomputation and
fused attention leave out the last term, full recomputation keeps ``2 s b h``. Interleaved stages are not modelled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from deepstow.strategies.core.facts import (
    Choices,
    Facts,
    MachineFacts,
    Operator,
    Precision,
    RunFacts,
    Unit,
    UnitKind,
    Work,
)
from deepstow.strategies.core.protocol import Refusal
from deepstow.strategies.planner.hybrid.degrees import Degrees, Models, Size, Stowed
from deepstow.strategies.planner.hybrid.search import Options, hybrid
from deepstow.strategies.planner.hybrid.step_seconds import Pricing
from deepstow.strategies.planner.network import Cluster
from deepstow.strategies.report.hybrid_table import shape
from deepstow.strategies.report.table import table
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.machine.profiles import profile
from deepstow.trainer.planning.hybrid import cluster_of

POLICY = {2021: "full", 2022: "selective", 2024: "none"}


@dataclass(frozen=True, slots=True)
class Gpt:
    """A shape of GPT, as a paper trained it."""

    name: str
    layers: int
    hidden: int
    heads: int
    year: int = 2021
    words: int = 51_200
    sequence: int = 2048

    def seconds(self, ranks: int, sequences: int, teraflops: float) -> float:
        """Of a step at published Tflop/s per GPU (equation 3 of 2021; later without what is recomputed)."""
        h = self.hidden
        s = self.sequence
        passes = 4 if self.year == 2021 else 3
        products = 24 * sequences * s * self.layers * h**2 * (1 + s / (6 * h))
        return (passes * products + 6 * sequences * s * h * self.words) / ranks / teraflops / 1e12


B175 = Gpt("175 B", 96, 12288, 96)
B530 = Gpt("530 B", 105, 20480, 128)
B1000 = Gpt("1 T", 128, 25600, 160)
B405 = Gpt("405 B", 126, 16384, 128, 2024, 128_256, 8192)
SECONDS = (  # stages, sequences per step, seconds of a step; 8 tensor ranks, 1 data rank
    (Gpt("22 B", 48, 6144, 64, 2022), 1, 4, 1.10), (replace(B175, year=2022), 8, 64, 13.75),
    (replace(B530, year=2022), 35, 280, 37.83), (replace(B1000, year=2022), 64, 512, 71.49),
)  # fmt: skip
TERAFLOPS = (  # stages, data ranks, sequences, Tflop/s per GPU; 8 tensor ranks
    (B175, 12, 4, 1536, 153), (B175, 12, 16, 1536, 141), (B530, 35, 9, 2520, 163), (B1000, 64, 6, 3072, 163),
    (B405, 16, 64, 2048, 430), (B405, 16, 128, 2048, 400),
)  # fmt: skip
ALONE = (  # ZeRO 3 without model parallelism: ranks, micro-batch, sequences, Tflop/s per GPU
    (B175, 384, 4, 1536, 144), (B175, 768, 2, 1536, 88), (B175, 1536, 1, 1536, 44),
    (B530, 640, 4, 2560, 138), (B530, 1120, 2, 2240, 98), (B530, 2240, 1, 2240, 48),
)  # fmt: skip


def rank_facts(gpt: Gpt, machine: MachineFacts, b: int, t: int, pieces: int = 1) -> Facts:
    """One of ``t`` tensor ranks' share of ``gpt`` for a micro-batch of ``b``, each block in so many ``pieces``."""
    h, s = gpt.hidden, gpt.sequence
    hidden = s * b * h
    linear = 24 * b * s * h * h // t
    core = 4 * b * s * s * h // t
    outside = t if gpt.year == 2021 else 1  # what tensor ranks divide with sequence parallelism only
    input_bytes, dense = 2 * hidden * outside // t, (10 * outside + 24) * hidden // t
    saved = dense + (0 if gpt.year == 2024 else 5 * gpt.heads * s * s * b // t)
    operators = (Operator("linear all", (dense - input_bytes) // pieces, Work(linear // pieces)),)
    choices = Choices(input_bytes // pieces, saved // pieces, operators, Work(core // pieces))
    params, words = (12 * h * h // t + 13 * h) // pieces, gpt.words * h // t
    blocks = [
        Unit(f"block {index}", UnitKind.BLOCK, params, params, saved // pieces, choices)
        for index in range(gpt.layers * pieces)
    ]
    embedding = Unit("embedding", UnitKind.EMBEDDING, words + s * h, words + s * h, hidden)
    head = Unit("head", UnitKind.HEAD, words, words, 4 * hidden + 4 * s * b * gpt.words // t)
    run = RunFacts(
        micro_batch=b, sequence=s, accumulation=1, max_grad_norm=1.0, precision=Precision.BF16, world_size=1,
        hidden_size=h, forward_flops=gpt.layers * (linear + core) + 2 * b * s * words,
    )  # fmt: skip
    return Facts((embedding, *blocks, head), run, machine)


def setting(gpt: Gpt, ranks: int) -> tuple[MachineFacts, Cluster]:
    """The cards of the paper, and a network of which compute hides nothing."""
    card = profile("h100-sxm-pcie5" if gpt.year == 2024 else "a100-80g-sxm")
    assert card.rates is not None
    machine = MachineFacts(card.name, card.device_total_bytes, card.host_available_bytes // 8, 1 << 30, card.rates)
    on = cluster_of(card.rates, Ranks(world_size=ranks, local_world_size=8), None)
    return machine, replace(on, hidden=0.0)  # as those engines exchanged


def simulated(facts: Facts, cluster: Cluster, degrees: Degrees) -> tuple[str, str]:
    """Seconds, and those at either end of what is assumed of the network."""
    models, rates = Models({degrees.size: facts}), facts.machine.rates
    assert rates is not None
    first, *ends = (
        f"{Pricing(models, on, rates).price(degrees).seconds:.4g}" for on in (cluster, *cluster.either_way())
    )
    return first, "-".join(ends)


def without_zero_2(degrees: Degrees) -> Refusal | None:
    """Those engines split the optimizer's state at most."""
    return Refusal("zero.stage", degrees.zero, "is not theirs") if degrees.zero >= 2 else None


def choice(gpt: Gpt, stages: int, data: int, sequences: int, seconds: float) -> tuple[str, ...]:
    """A published choice of 8 tensor ranks, what it takes by our pricing, and what the search would choose."""
    machine, cluster = setting(gpt, 8 * stages * data)
    facts = {Size(size, t): rank_facts(gpt, machine, size, t) for size in (1, 2, 4) for t in (1, 2, 4, 8)}
    policies = ("none", "full") if gpt.year == 2021 else ("none", "selective", "full")
    best = hybrid(facts, cluster, sequences, Options(without_zero_2, policies, (Stowed.NOTHING,))).best
    theirs = Degrees(
        stages=stages, tensor=8, data=data, zero=int(gpt.year == 2024), recompute=POLICY[gpt.year],
        micro_batches=sequences // data,
    )  # fmt: skip
    place = next((str(at) for at, plan in enumerate(best, 1) if shape(plan.degrees) == shape(theirs)), "-")
    ours = f"{shape(best[0].degrees)}, {best[0].degrees.recompute}, ZeRO {best[0].degrees.zero}"
    by_pricing = simulated(facts[Size(1, 8)], cluster, theirs)
    named = (f"{gpt.name}, {gpt.year}", f"{cluster.ranks:,}", shape(theirs), f"{seconds:.4g}")
    return *named, *by_pricing, ours, f"{best[0].price.seconds:.4g}", place


def alone(gpt: Gpt, ranks: int, micro_batch: int, sequences: int, teraflops: float) -> tuple[str, ...]:
    """ZeRO 3 by itself, which gathered each of the four matrices of a block by itself."""
    machine, cluster = setting(gpt, ranks)
    degrees = Degrees(data=ranks, zero=3, recompute="full", micro_batch=micro_batch)
    by_pricing = simulated(rank_facts(gpt, machine, micro_batch, 1, pieces=4), cluster, degrees)
    return gpt.name, f"{ranks:,}", str(micro_batch), f"{gpt.seconds(ranks, sequences, teraflops):.4g}", *by_pricing


def choices() -> Iterator[tuple[str, ...]]:
    """All of them."""
    yield from (choice(gpt, stages, 1, sequences, seconds) for gpt, stages, sequences, seconds in SECONDS)
    for gpt, stages, data, sequences, teraflops in TERAFLOPS:
        yield choice(gpt, stages, data, sequences, gpt.seconds(8 * stages * data, sequences, teraflops))


if __name__ == "__main__":
    same = ("s", "simulated", "from-to")
    ours = ("our best p x t x d", "simulated ", "place of theirs")
    print(
        "\n".join(table(("model", "ranks", "published p x t x d", *same, *ours), choices(), markdown=True)), end="\n\n"
    )
    rows = [alone(*case) for case in ALONE]
    print("\n".join(table(("ZeRO 3 alone", "ranks", "micro-batch", *same), rows, markdown=True)))
