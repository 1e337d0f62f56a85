"""Buffers: one address for everything, for the whole run.

Memory that is allocated and freed during training is fragmented and cannot be known in advance; of pinned memory torch
rounds each allocation up to a power of two. So each home is one arena, taken at the start and never grown. It holds
    permanent tensors  +  slots x largest bucket, for each kind of slot  +  scratch  +  saved tensors that wait on the
    host  +  alignment (on the device below 512 bytes per parameter)

Invariant. A bucket has the same address whenever it is present, so a view that forward saved is valid in backward. Of
the buckets that share an address one is present at a time, and buckets that one block uses never share.

Refused: nothing. Without ``offload`` no weights travel, and torch's allocator is as good; the strategy is then idle.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from deepstow.strategies.core.facts import Facts
from deepstow.strategies.core.plan import RUN, Decision, Place, Plan
from deepstow.strategies.core.protocol import Idle, Phase, Strategy
from deepstow.strategies.core.validate import check
from deepstow.strategies.planner.addresses import place
from deepstow.strategies.planner.memory_rows import reserves


class Buffers(Strategy):
    """Planned addresses for all that ``offload`` moves. Switched on by it; write the section for its option only."""

    phase = Phase.BUFFER
    resume = "said"
    examples = ({"debug": True},)

    debug: bool = Field(
        default=False,
        description="Check on each use that a slot holds the bucket it should, and with each forward and backward that "
        "all ranks run the same blocks; slow, for tests.",
    )

    def decide(self, facts: Facts, plan: Plan) -> Iterator[Decision]:
        if plan.layout is None:
            raise Idle("nothing travels: strategies.offload is not on")
        addresses = place(plan.layout, plan.hosted_bytes())
        check(plan.layout, addresses, facts.params, plan.hosted_bytes())
        yield Place(unit=RUN, reason="one address for the whole run", addresses=addresses, debug=self.debug)
        yield from reserves(plan, plan.layout, addresses)
