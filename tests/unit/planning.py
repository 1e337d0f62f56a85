"""Random planning problems for the planner's tests; the same seed gives the same problem."""

from dataclasses import replace
from random import Random

from strategies.core.facts import Home
from strategies.core.layout import Site
from strategies.planner.problem import Link, Problem, Tick, Update, Weight, at_need, memory


def blocks(
    weights: list[int], forward: list[float], backward: list[float], saved: list[int], link: Link, budget: int
) -> Problem:
    """Blocks that forward goes through and backward in reverse; each saves bytes from its forward to its backward."""
    count, live = len(weights), 0
    steps = []
    for index in range(count):
        live += saved[index]
        steps.append(Tick(f"FP {index}", forward[index], live))
    for index in reversed(range(count)):
        steps.append(Tick(f"BP {index}", backward[index], live))
        live -= saved[index]
    items = tuple(Weight(str(i), size, (i, 2 * count - 1 - i)) for i, size in enumerate(weights))
    return Problem(tuple(steps), items, link, budget)


def uneven(seed: int, counts: tuple[int, ...] = (3, 4, 5), kind: str = "uneven", byte: int = 100) -> Problem:
    """Blocks that are all different, with a budget that something must leave for."""
    random = Random(f"{kind} {seed}")
    count = random.choice(counts)
    weights = [random.randint(byte, 10 * byte) for _ in range(count)]
    forward = [random.uniform(0.5, 2) for _ in range(count)]
    backward = [seconds * random.uniform(1.5, 3.2) for seconds in forward]
    saved = [random.randint(0, 6 * byte) for _ in range(count)]
    return _budgeted(blocks(weights, forward, backward, saved, Link(0, 1, 1), 0), random)


def coarse(seed: int, counts: tuple[int, ...] = (3, 4, 5)) -> Problem:
    """Uneven blocks of few bytes each: many ties."""
    return uneven(seed, counts, "coarse", 1)


def halved(problem: Problem) -> Problem:
    """The problem with each item in two of different size, which the same steps use."""
    items = [
        Weight(f"{item.name}{part}", size, item.uses)
        for item in problem.weights
        for part, size in (("a", item.num_bytes // 3), ("b", item.num_bytes - item.num_bytes // 3))
    ]
    return replace(problem, weights=tuple(items))


def even(seed: int, counts: tuple[int, ...] = (3, 4, 5)) -> Problem:
    """Blocks that are all alike."""
    random = Random(f"even {seed}")
    count = random.choice(counts)
    size, seconds = random.randint(1, 9) * 100, random.uniform(0.5, 2)
    saved = [random.randint(0, 600)] * count
    back = [seconds * random.uniform(1.5, 3.2)] * count
    return _budgeted(blocks([size] * count, [seconds] * count, back, saved, Link(0, 1, 1), 0), random)


def _budgeted(problem: Problem, random: Random) -> Problem:
    least, most = span(problem)
    rate = sum(item.num_bytes for item in problem.weights) / problem.compute_seconds
    rate *= random.choice([0.5, 0.75, 1, 1.5, 2, 3, 5])
    link = Link(random.choice([0, 0.05]), rate, rate)
    return replace(problem, budget=random.randint(least, most - 1), link=link)


def span(problem: Problem) -> tuple[int, int]:
    """The least budget with a plan, and the budget for which nothing has to leave."""
    return max(memory(problem, at_need(problem.gaps))), max(problem.all_present)


def updated(problem: Problem, seed: int) -> Problem:
    """The problem with updates at random sites."""
    random = Random(f"updated {seed}")
    items = [replace(item, update=_update(item, random)) for item in problem.weights]
    in_backward = random.choice([True, False])
    link = replace(problem.link, duplex=random.choice([1.0, 0.7]))
    return replace(
        problem, weights=tuple(items), in_backward=in_backward, accumulation=random.choice([1, 2]), link=link
    )


def _update(item: Weight, random: Random) -> Update | None:
    site = random.choice([Site.DEVICE, Site.HOST, Site.STREAMED, Site.NONE])
    if site is Site.NONE:
        return None
    grad_home = Home.DEVICE if site is Site.DEVICE else random.choice(list(Home))
    seconds = random.uniform(0.05, 1)
    return Update(
        site=site, seconds=seconds, grad_bytes=item.num_bytes, state_bytes=6 * item.num_bytes, grad_home=grad_home
    )
