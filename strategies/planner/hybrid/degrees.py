"""What the search chooses, and which of it can be run: one table of rules, each with its reason.

``HERE`` is what this project's engines run today. Whoever teaches them more deletes a rule. Others, as the comparison
with published configurations, bring rules of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum


class Stowed(Enum):
    """What rests in host memory between its uses."""

    NOTHING = "none"
    STATE = "state"  # masters and moments, updated by the CPU
    WEIGHTS = "weights"  # and weights, fetched for each use


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """One way to use all ranks: ``stages`` x ``tensor`` x ``data`` of them.

    Args:
        zero: ZeRO's stage over the data ranks.
        recompute: a policy of ``strategies.recompute``: none, selective or full.
        micro_batch: sequences; ``micro_batches`` of them per step go through each pipeline.
        last_blocks: blocks of the last stage; the others have as many as one another, or one more.
    """

    stages: int = 1
    tensor: int = 1
    data: int = 1
    zero: int = 0
    recompute: str = "none"
    offload: Stowed = Stowed.NOTHING
    micro_batch: int = 1
    micro_batches: int = 1
    last_blocks: int = 0

    @property
    def ranks(self) -> int:
        """Of the whole job."""
        return self.stages * self.tensor * self.data

    @property
    def unsplit(self) -> Degrees:
        """The same for all numbers of blocks in the last stage."""
        return replace(self, last_blocks=0)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and the machine allow."""

    blocks: int
    per_machine: int
    mixed: bool = True  # precision
    tied: bool = False  # head and embedding


@dataclass(frozen=True, slots=True)
class Rule:
    """Degrees that cannot be run: those that ``broken_by`` finds, for a reason in words."""

    name: str
    reason: str
    broken_by: Callable[[Degrees, Limits], bool]


SHAPE: tuple[Rule, ...] = (
    Rule(
        "machine",
        "a tensor group stays inside a machine",
        lambda d, has: d.tensor > 1 and has.per_machine % d.tensor != 0,
    ),
    Rule("blocks", "each stage has at least one block", lambda d, has: d.stages > 1 and d.stages > has.blocks),
    Rule(
        "pipeline with ZeRO 2, 3",
        "stages 2 and 3 exchange at every micro-batch, which a pipeline does not wait for",
        lambda d, has: d.stages > 1 and d.zero >= 2,
    ),
    Rule(
        "offloaded weights with ZeRO 1, 2",
        "these stages keep all weights on each device",
        lambda d, has: d.offload is Stowed.WEIGHTS and d.zero in (1, 2),
    ),
    Rule(
        "offloaded state with ZeRO 3",
        "its weights rest on the host with the state",
        lambda d, has: d.offload is Stowed.STATE and d.zero == 3,
    ),
)
HERE: tuple[Rule, ...] = (
    *SHAPE,
    Rule(
        "tensor with pipeline",
        "two engines run them, DeepSpeed's and torch's, and neither knows the other",
        lambda d, has: d.tensor > 1 and d.stages > 1,
    ),
    Rule(
        "tensor with ZeRO 3",
        "DeepSpeed splits layers over tensor ranks with stages 0 to 2",
        lambda d, has: d.tensor > 1 and d.zero == 3,
    ),
    Rule(
        "tensor with ZeRO 0 in mixed precision",
        "DeepSpeed would clip by the norm of one rank's gradients",
        lambda d, has: d.tensor > 1 and d.zero == 0 and has.mixed,
    ),
    Rule(
        "tensor with selective recomputation",
        "products are summed over the ranks in place, so they cannot be kept",
        lambda d, has: d.tensor > 1 and d.recompute == "selective",
    ),
    Rule(
        "tensor with offload",
        "tensor ranks are DeepSpeed's engine, offload is the memory engine",
        lambda d, has: d.tensor > 1 and d.offload is not Stowed.NOTHING,
    ),
    Rule(
        "pipeline with ZeRO 1 without offload",
        "copies of a stage hold the same in torch's pipeline, and share state in the memory engine",
        lambda d, has: d.stages > 1 and d.zero > 0 and d.offload is Stowed.NOTHING,
    ),
    Rule(
        "pipeline with offload and a tied head",
        "gradients of its two ends are added before the memory engine has them",
        lambda d, has: d.stages > 1 and d.offload is not Stowed.NOTHING and has.tied,
    ),
    Rule(
        "1f1b with few micro-batches",
        "torch's schedule takes at least as many as there are stages",
        lambda d, has: d.stages > 1 and d.micro_batches < d.stages,
    ),
)


def broken(degrees: Degrees, limits: Limits, rules: tuple[Rule, ...]) -> Rule | None:
    """The first rule that ``degrees`` break; None: they can be run."""
    return next((rule for rule in rules if rule.broken_by(degrees, limits)), None)
