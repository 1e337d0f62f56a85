"""More memory is never slower, exactly, however uneven the plans are that are found."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from strategies.planner.monotone import Found, at_budget

LEAST, MOST = 1000, 30_000


@given(st.integers(0, 10**6), st.floats(0, 0.3), st.lists(st.integers(LEAST, 2 * MOST), min_size=2, max_size=12))
def test_seconds_never_rise_with_the_budget(seed: int, noise: float, budgets: list[int]) -> None:
    """Plans take about a million over their bytes, and need between all and nine tenths of the budget."""

    def find(budget: int) -> list[Found[int]]:
        random = Random(f"{seed} {budget}")
        needs = [max(LEAST, int(budget * random.uniform(0.9, 1))) for _ in range(random.randint(0, 3))]
        return [Found(n, 10**6 / n * random.uniform(1, 1 + noise), budget) for n in needs]

    low = Found(LEAST, 10**6 / LEAST * (1 + noise), LEAST)
    found = [at_budget(budget, low, MOST, find) for budget in sorted(budgets)]
    assert all(one.num_bytes <= budget for one, budget in zip(found, sorted(budgets), strict=True))
    assert [one.seconds for one in found] == sorted((one.seconds for one in found), reverse=True)
