"""Buffers: one address for everything, for the whole run.

Problem. Memory that is allocated and freed while training runs is fragmented, synchronises the device, and cannot be
promised in advance. Pinned host memory is worse: torch rounds each piece of it up to a power of two.

Arithmetic. Each home is one arena, taken at the start:
    what rests there  +  slots x largest bucket, for each ring  +  scratch  +  alignment (below 512 bytes a parameter)
It is exact: the plan's table adds up to the arenas, and the arenas never grow.

Invariant. A bucket has the same address whenever it is present, so a view that forward saved is right in backward; of
the buckets that share an address one is present at a time, and no two that one block uses share any.

Refused: nothing. Without ``offload`` nothing travels, and torch's allocator serves as well.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from strategies.core.facts import Facts, RunFacts
from strategies.core.plan import RUN, Decision, Place, Plan
from strategies.core.protocol import BITWISE, Idle, Parity, Phase, Strategy
from strategies.core.validate import check
from strategies.planner.addresses import place
from strategies.planner.memory_rows import reserves


class Buffers(Strategy):
    """Planned addresses for all that ``offload`` moves. Switched on by it; write the section for its option only."""

    phase = Phase.BUFFER
    examples = ({"debug": True},)

    debug: bool = Field(
        default=False,
        description="Check on each use that a slot holds the bucket it should, and have every weight that backward "
        "reads brought, not only where that was seen to be needed; slow, for tests.",
    )

    def parity(self, run: RunFacts) -> Parity:
        """Bit for bit: an address is not a value."""
        return BITWISE

    def decide(self, facts: Facts, plan: Plan) -> Iterator[Decision]:
        if plan.layout is None:
            raise Idle("nothing travels: strategies.offload is not on")
        addresses = place(plan.layout, plan.hosted_bytes())
        check(plan.layout, addresses, facts.params, plan.hosted_bytes())
        yield Place(unit=RUN, reason="one address for the whole run", addresses=addresses, debug=self.debug)
        yield from reserves(plan, plan.layout, addresses)
