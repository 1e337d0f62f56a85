"""ZeRO: which rank holds which share of the training state. Stages 0 to 3, run by DeepSpeed's engine.

The arithmetic is in docs/strategies/zero.md. In fp32 weight and gradient take 4 bytes each; stages 1 to 3 still keep a
master (their flat fp32 partition), stage 0 does not: the weight is its own master.

Invariant. Splitting does not change the arithmetic: on two ranks in fp32 the weights equal those of plain data-parallel
training bit for bit, except where DeepSpeed takes sums in another order (``parity``).

Beside ``offload`` this strategy decides nothing: the memory engine is used, and its ranks share what the stage says.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from itertools import product
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from deepstow.strategies.core.facts import Facts, Precision, RunFacts
from deepstow.strategies.core.plan import RUN, Decision, EngineSet, Kind, Plan, Share
from deepstow.strategies.core.protocol import BITWISE, FitOptions, Parity, Phase, Refusal, Requirement, Strategy
from deepstow.strategies.parallel import deepspeed
from deepstow.strategies.planner.engine_bytes import SPLIT_FROM, buffers, element_bytes

if TYPE_CHECKING:
    from torch import nn

_CLIPPING = "each rank sums the squares of its own partition, and DeepSpeed multiplies by 1/norm instead of dividing"
_EVERY_MICRO_BATCH = "stages 2 and 3 reduce each micro-batch over the ranks; plain training adds them up first"
_ROUNDING = "DeepSpeed computes with weights and gradients rounded to bf16; plain training autocasts fp32 weights"


class Zero(Strategy):
    """Shard optimizer state (1), gradients (2) and weights (3) over the ranks of the job.

    Stage 0 is plain data parallelism in DeepSpeed's engine. Higher stages hold less per rank; stage 3 sends half as
    much again over the link (3 instead of 2 numbers per parameter and step).
    """

    phase = Phase.WHO
    resume = "said"
    fit = FitOptions({"stage": 3}, needs_ranks=True)
    requires = frozenset([Requirement.DEEPSPEED, Requirement.COMPUTE_DTYPE])
    examples = ({"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3})

    stage: Literal[0, 1, 2, 3] = Field(
        description="0: nothing split, 1: optimizer state, 2: and gradients, 3: and weights."
    )

    def parity(self, run: RunFacts) -> Parity:
        if run.precision is not Precision.FP32:
            return Parity(2e-2, _ROUNDING)
        if self.stage >= 2 and run.accumulation > 1:
            return Parity(1e-4, _EVERY_MICRO_BATCH)
        if self.stage >= 1 and run.max_grad_norm > 0:
            return Parity(1e-4, _CLIPPING)
        return BITWISE

    def decide(self, facts: Facts, plan: Plan) -> Iterator[Decision]:
        run, sizes = facts.run, element_bytes(facts.run, self.stage)
        if why := run.refuses_copies_of_written():
            raise Refusal("strategies.zero", self.written, why)
        for unit, kind in product(facts.units, Kind):
            split = self.stage >= SPLIT_FROM[kind]
            reason = f"stage {self.stage}: " + (f"1/{run.copies} per rank" if split else "whole on every rank")
            shards = run.copies if split else 1
            yield Share(unit=unit.name, reason=reason, kind=kind, shards=shards, element_bytes=sizes[kind])
        for key, value in deepspeed.zero_keys(facts, self.stage).items():
            yield EngineSet(unit=RUN, reason="zero", key=f"zero_optimization.{key}", value=value)
        yield from buffers(facts, self.stage, run.copies)

    def apply(self, model: nn.Module, plan: Plan) -> None:
        if self.stage == 3:
            deepspeed.set_leaf_modules(model, plan)

    def check_installed(self) -> None:
        if self.stage == 3 and not deepspeed.builds_under_stage_3():
            cause = f"under it Transformers {version('transformers')} gives some weights and rotary frequencies"
            raise Refusal("strategies.zero.stage", 3, f"{cause} other values; install 5.23, or write stage 2")
