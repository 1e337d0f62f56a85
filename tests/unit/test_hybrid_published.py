"""The search beside published configurations: the bytes of their activations, and degrees that they chose."""

import pytest

from benchmarks.megatron_choices import B175, B530, SEQUENCE, Case, published, rank_facts, solved
from strategies.core.facts import MachineFacts, UnitKind
from strategies.planner.activation_policy import by_policy
from trainer.machine.profiles import profile

CARD = profile("a100-80g-sxm")
MACHINE = MachineFacts(CARD.name, CARD.device_total_bytes, CARD.host_available_bytes // 8, 1 << 30, CARD.rates)


def test_activations_are_those_of_the_published_table() -> None:
    """Bytes per layer in units of s b h, for GPT-3: 34 + 80 in all, 70 % of which selective recomputation frees."""
    for sequence_parallel, tensor, expected in (
        (False, 1, (114, 34, 2)),
        (False, 8, (10 + 24 / 8 + 10, 10 + 24 / 8, 2)),
        (True, 8, (114 / 8, 34 / 8, 2 / 8)),
    ):
        known = rank_facts(B175, MACHINE, 2, tensor, sequence_parallel=sequence_parallel)
        block = next(unit for unit in known.units if unit.kind is UnitKind.BLOCK)
        kept = [by_policy(block, policy).saved_bytes for policy in ("none", "selective", "full")]
        assert [size / (SEQUENCE * 2 * B175.hidden) for size in kept] == pytest.approx(expected)


def test_operations_are_those_of_the_published_formula() -> None:
    """72 b s l h^2 (1 + s / 6 h + V / 12 l h) for a step without recomputation; split over tensor ranks."""
    h, layers, s = B175.hidden, B175.layers, SEQUENCE
    whole = 72 * s * layers * h**2 * (1 + s / (6 * h) + 51_200 / (12 * layers * h))
    for tensor in (1, 8):
        run = rank_facts(B175, MACHINE, 1, tensor, sequence_parallel=True).run
        assert 3 * run.forward_flops * tensor == pytest.approx(whole, rel=1e-6)


@pytest.fixture(scope="module")
def cases() -> dict[tuple[str, int], Case]:
    some = [given for given in published() if given.year == 2022 and given.gpt in (B175, B530)]
    return {(given.gpt.name, given.ranks): solved(given, MACHINE) for given in some}


def test_it_finds_the_degrees_that_were_published_for_530_b(cases: dict[tuple[str, int], Case]) -> None:
    best = cases["530 B", 280].answer.best[0].degrees
    assert (best.stages, best.tensor, best.data, best.recompute, best.micro_batch) == (35, 8, 1, "selective", 1)


def test_what_was_published_is_among_its_best_and_takes_longer_than_simulated(
    cases: dict[tuple[str, int], Case],
) -> None:
    """Within 30 %: the simulation has the speed of the best products, and nothing that a network loses."""
    for case in cases.values():
        assert case.theirs.price.seconds <= 1.002 * case.answer.best[0].price.seconds
        assert 0.7 * case.given.seconds < case.theirs.price.seconds < case.given.seconds
        assert case.closed_form == pytest.approx(case.theirs.price.seconds, rel=0.02)
