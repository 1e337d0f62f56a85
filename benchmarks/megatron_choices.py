"""Simulated: our search beside the degrees that Megatron-LM's authors published for GPT shapes on A100.

    python benchmarks/megatron_choices.py

Published, on machines of eight A100 80 GB with 200 Gb/s per card, 2,048 tokens per sequence, 51,200 words:

    2022    Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models": sequence parallelism
            and selective recomputation, no data parallelism; seconds per iteration, of table 5
    2021    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM": full
            recomputation; tables 1 and 2, whose flop of a step include the recomputed ones

The search is given what that engine can do and not what ours can: tensor with pipeline, vocabulary split over tensor
ranks, ZeRO 0 or 1, buffers of what is in flight only. Bytes of activations are those of the 2022 paper's table: per
layer ``s b h (10 + 24 / t + 5 a s / (h t))``, with sequence parallelism ``s b h (34 / t + 5 a s / (h t))``; selective
leaves out the last term, full keeps ``2 s b h``. Not modelled: interleaved stages, which the authors use, and that
smaller products are slower. Steps without model parallelism (ZeRO 3) are priced, too, beside the published ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from strategies.core.facts import (
    Choices,
    Facts,
    MachineFacts,
    Operator,
    Precision,
    Rates,
    RunFacts,
    Unit,
    UnitKind,
    Work,
)
from strategies.core.sizes import human
from strategies.planner.hybrid.account import Account
from strategies.planner.hybrid.cluster import Cluster, Wire
from strategies.planner.hybrid.degrees import SHAPE, Degrees, Rule, Stowed
from strategies.planner.hybrid.parts import Models
from strategies.planner.hybrid.search import Answer, Found, Known, Options, hybrid
from strategies.planner.hybrid.step_seconds import Pricing
from strategies.report.hybrid_table import shape
from strategies.report.table import table
from trainer.machine.profiles import profile

SEQUENCE, WORDS, PEAK = 2048, 51_200, 312e12
MENU = (
    *SHAPE,
    Rule("ZeRO 2, 3", "Megatron-LM splits the optimizer's state at most", lambda d, has: d.zero >= 2),
)


@dataclass(frozen=True, slots=True)
class Gpt:
    """A shape of GPT."""

    name: str
    layers: int
    hidden: int
    heads: int


@dataclass(frozen=True, slots=True)
class Published:
    """What was published: ranks, sequences per step, tensor degree, stages, and seconds of a step."""

    gpt: Gpt
    year: int
    ranks: int
    sequences: int
    tensor: int
    stages: int
    seconds: float


B22, B175 = Gpt("22 B", 48, 6144, 64), Gpt("175 B", 96, 12288, 96)
B530, B1000 = Gpt("530 B", 105, 20480, 128), Gpt("1 T", 128, 25600, 160)


def hardware_seconds(gpt: Gpt, ranks: int, sequences: int, teraflops: float) -> float:
    """Seconds of a step from published Tflop/s per GPU, by the formula of the 2021 paper, with all recomputed."""
    h, s, layers = gpt.hidden, SEQUENCE, gpt.layers
    flops = 96 * sequences * s * layers * h**2 * (1 + s / (6 * h) + WORDS / (16 * layers * h))
    return flops / ranks / teraflops / 1e12


def published() -> Iterator[Published]:
    """The cases."""
    for gpt, ranks, sequences, stages, seconds in (
        (B22, 8, 4, 1, 1.10), (B175, 64, 64, 8, 13.75), (B530, 280, 280, 35, 37.83), (B1000, 512, 512, 64, 71.49),
    ):  # fmt: skip
        yield Published(gpt, 2022, ranks, sequences, 8, stages, seconds)
    for gpt, ranks, sequences, stages, teraflops in (
        (B175, 384, 1536, 12, 153), (B175, 768, 1536, 12, 149), (B175, 1536, 1536, 12, 141),
        (B530, 2520, 2520, 35, 163),
    ):  # fmt: skip
        yield Published(gpt, 2021, ranks, sequences, 8, stages, hardware_seconds(gpt, ranks, sequences, teraflops))


def rank_facts(gpt: Gpt, machine: MachineFacts, micro_batch: int, tensor: int, *, sequence_parallel: bool) -> Facts:
    """One tensor rank's share of ``gpt``, by formulas."""
    h, s, b, a, t = gpt.hidden, SEQUENCE, micro_batch, gpt.heads, tensor
    whole = s * b * h
    linear = 24 * b * s * h * h // t
    core = 4 * b * s * s * h // t
    outside = 1 if sequence_parallel else t  # what every tensor rank holds is divided by t only with it
    given = 2 * whole * outside // t
    dense = (10 * outside + 24) * whole // t
    squared = 5 * a * s * s * b // t
    choices = Choices(
        input_bytes=given,
        running_bytes=dense + squared,
        operators=(Operator("linear all", dense - given, Work(linear)),),
        rest=Work(core),
    )
    params = 12 * h * h // t + 13 * h
    block = Unit("", UnitKind.BLOCK, params, params, dense + squared, choices)
    blocks = tuple(replace(block, name=f"layers.{index}") for index in range(gpt.layers))
    words = WORDS * h // t
    embedding = Unit("embedding", UnitKind.EMBEDDING, words + s * h, words + s * h, whole)
    head = Unit("head", UnitKind.HEAD, words, words, 4 * whole + 4 * s * b * WORDS // t)
    flops = gpt.layers * (linear + core) + 2 * b * s * words
    run = RunFacts(
        micro_batch=b, sequence=s, accumulation=1, max_grad_norm=1.0, precision=Precision.BF16, world_size=1,
        hidden_size=h, forward_flops=flops,
    )  # fmt: skip
    return Facts((embedding, *blocks, head), run, machine)


@dataclass(frozen=True, slots=True)
class Case:
    """A published choice, ours, and what both take by our pricing."""

    given: Published
    answer: Answer
    theirs: Found
    closed_form: float

    @property
    def mfu(self) -> tuple[float, float]:
        """Of the published seconds, and of ours for the same degrees."""
        gpt, h, s = self.given.gpt, self.given.gpt.hidden, SEQUENCE
        flops = 72 * self.given.sequences * s * gpt.layers * h**2 * (1 + s / (6 * h) + WORDS / (12 * gpt.layers * h))
        best = flops / self.given.ranks / PEAK
        return best / self.given.seconds, best / self.theirs.price.seconds


def solved(given: Published, machine: MachineFacts) -> Case:
    """Search and price one case."""
    rates = machine.rates
    assert rates is not None
    known: Known = {
        (size, t): rank_facts(given.gpt, machine, size, t, sequence_parallel=given.year == 2022)
        for size in (1, 2, 4)
        for t in (1, 2, 4, 8)
    }
    cluster = cluster_of(rates, given.ranks)
    policies = ("none", "selective", "full") if given.year == 2022 else ("none", "full")
    options = Options(rules=MENU, policies=policies, offloads=(Stowed.NOTHING,))
    answer = hybrid(known, cluster, given.sequences, options)
    models = Models(known)
    pricing, account = Pricing(models, cluster, rates), Account(models)
    data = given.ranks // given.tensor // given.stages
    even = Degrees(
        stages=given.stages,
        tensor=given.tensor,
        data=data,
        recompute="selective" if given.year == 2022 else "full",
        micro_batch=1,
        micro_batches=given.sequences // data,
        last_blocks=given.gpt.layers // given.stages,
    )
    return Case(given, answer, Found(even, account.of(even), pricing.price(even)), pricing.closed_form(even))


def cluster_of(rates: Rates, ranks: int) -> Cluster:
    """Machines of eight."""
    assert rates.net_bytes_per_s is not None and rates.net_across_bytes_per_s is not None
    inside, across = rates.net_bytes_per_s, rates.net_across_bytes_per_s
    return Cluster(ranks, 8, Wire(inside, rates.net_latency_s), Wire(across, rates.net_across_latency_s))


def cells(case: Case) -> tuple[str, ...]:
    """A row of the table."""
    given, best = case.given, case.answer.best[0]
    near = next((at for at, each in enumerate(case.answer.best, 1) if same(each.degrees, case.theirs.degrees)), None)
    return (
        f"{given.gpt.name}, {given.year}", str(given.ranks), str(given.sequences),
        shape(case.theirs.degrees), f"{given.seconds:.4g}", f"{case.mfu[0]:.0%}",
        f"{case.theirs.price.seconds:.4g}", f"{case.mfu[1]:.0%}", human(case.theirs.bytes.device),
        shape(best.degrees), f"{best.degrees.recompute}, ZeRO {best.degrees.zero}, {best.degrees.micro_batch}",
        f"{best.price.seconds:.4g}", human(best.bytes.device), str(near or "-"),
    )  # fmt: skip


def same(ours: Degrees, theirs: Degrees) -> bool:
    """Whether the three degrees agree."""
    return (ours.stages, ours.tensor, ours.data) == (theirs.stages, theirs.tensor, theirs.data)


HEADER = (
    "model", "ranks", "sequences", "published p x t x d", "s", "MFU", "ours for it: s", "MFU", "GiB",
    "our best p x t x d", "with, micro-batch", "s", "GiB", "place of theirs",
)  # fmt: skip


def without_model_parallelism(machine: MachineFacts) -> Iterator[tuple[str, ...]]:
    """ZeRO 3 alone for 175 B, as table 2 of the 2021 paper has it, with the network at its rate and at an eighth."""
    assert machine.rates is not None
    for ranks, micro_batch, teraflops in ((384, 4, 144), (768, 2, 88), (1536, 1, 44)):
        seconds = [f"{hardware_seconds(B175, ranks, 1536, teraflops):.1f}"]
        for share in (1, 8):
            across = machine.rates.net_across_bytes_per_s
            inside = machine.rates.net_bytes_per_s
            assert across is not None and inside is not None
            rates = replace(machine.rates, net_across_bytes_per_s=across / share, net_bytes_per_s=inside / share)
            facts = rank_facts(B175, machine, micro_batch, 1, sequence_parallel=False)
            pricing = Pricing(Models({(micro_batch, 1): facts}), cluster_of(rates, ranks), rates)
            degrees = Degrees(data=ranks, zero=3, recompute="full", micro_batch=micro_batch, last_blocks=B175.layers)
            seconds.append(f"{pricing.price(degrees).seconds:.1f}")
        yield (str(ranks), str(micro_batch), *seconds)


def main() -> None:
    """Print both tables."""
    card = profile("a100-80g-sxm")
    machine = MachineFacts(card.name, card.device_total_bytes, card.host_available_bytes // 8, 1 << 30, card.rates)
    cases = [solved(given, machine) for given in published()]
    print("\n".join(table(HEADER, [cells(case) for case in cases], markdown=True)))
    ratios = [case.closed_form / case.theirs.price.seconds for case in cases]
    print(f"\nclosed form of P2 over the clock, for the published degrees: {min(ratios):.3f} to {max(ratios):.3f}\n")
    header = ("ranks", "micro-batch", "published s", "simulated s", "at an eighth of the rates")
    print("\n".join(table(header, without_model_parallelism(machine), markdown=True)))


if __name__ == "__main__":
    main()
