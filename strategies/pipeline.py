"""Pipeline: stages of blocks on different ranks, through which micro-batches go one behind the other.

With P stages and M micro-batches per step, 1f1b and gpipe take (M + P - 1) / M of the time without waiting. gpipe keeps
what backward needs of all M micro-batches, 1f1b that of P - s in stage s. Training state is divided by the cut.

Invariant. The order of sums is that of one process that accumulates the micro-batches: weights, losses and gradient
norms have its bits. A tied head has a copy at each end; their gradients are added after all micro-batches, which is
another order of sums.

The schedules are those of ``torch.distributed.pipelining``, run by ``strategies/parallel/pipelining.py``. With
``offload`` beside it, the memory engine trains each stage: it is told when the backward of another micro-batch begins,
and stages combine the norms of their gradients before any of them updates. With ``zero`` of stage 1 alone, copies of a
stage divide the optimizer's state (``strategies/parallel/pipeline_zero.py``), and the bits stay. With ``tensor`` ranks
divide the layers of each stage, and the bits are those of ``tensor`` alone. Blocks that cannot run apart are refused
after a trial on a small copy (``strategies/parallel/stages.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Literal

from pydantic import Field

from deepstow.strategies.core.facts import Facts, Param, RunFacts, Unit
from deepstow.strategies.core.optimizers import ELEMENTWISE
from deepstow.strategies.core.plan import RUN, Decision, Kind, Plan, Reserve, Share, When
from deepstow.strategies.core.protocol import Axis, Parity, Phase, Refusal, Requirement, Strategy, is_older
from deepstow.strategies.planner.cuts import DEPTHS, Schedule, complaint, cut, work
from deepstow.strategies.planner.engine_bytes import message_bytes, received_bytes

KEY = "strategies.pipeline"
RETURNS_FROM = (2, 13)  # releases of torch
_TIED = "a tied head has a copy at each end, and gradients of the two ends are added after all micro-batches"


class Pipeline(Strategy):
    """Cut the model into stages of blocks on different ranks, through which micro-batches go one behind the other.

    For models whose state does not fit one device, where the network between the ranks is slow. The more micro-batches
    a step has (``training.gradient_accumulation_steps``), the less the stages wait.
    """

    phase = Phase.WHO
    resume = "said"
    takes_over = ("zero",)
    requires = frozenset([Requirement.PARAMETERS])
    examples = ({"stages": 2}, {"stages": 2, "schedule": "gpipe"})

    stages: int = Field(ge=2, description="Ranks that one copy of the model is cut over.")
    schedule: Literal["gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv", "dualpipev"] = Field(
        default="1f1b", description="Order of forwards and backwards. gpipe and 1f1b give a stage one part, others two."
    )
    blocks: list[int] | None = Field(
        default=None, description="Blocks in each part; not set means that parts take equally long."
    )

    @property
    def order(self) -> Schedule:
        return Schedule(self.schedule)

    @property
    def _zero(self) -> int:
        """The stage of strategies.zero, where no other engine shares the state."""
        return self._others["zero"].model_dump()["stage"] if self._others else 0

    def parity(self, run: RunFacts) -> Parity:
        """Bit for bit, unless head and embedding are tied, which is not known here."""
        return Parity(1e-4, _TIED)

    def divides(self) -> Mapping[Axis, int]:
        return {Axis.STAGES: self.stages}

    def least_blocks(self) -> int:
        return sum(self.blocks) if self.blocks else self.stages * self.order.parts_per_stage

    def refusals(self, run: RunFacts) -> Iterator[Refusal]:
        if self._zero == 1 and (run.optim not in ELEMENTWISE or run.optim == "adagrad"):
            fits = (
                "cannot be divided among the copies of a stage; write adamw_torch_fused, or leave strategies.zero out"
            )
            yield Refusal("training.optim", run.optim, f"its state {fits}")
        count, key = run.accumulation, "training.gradient_accumulation_steps"
        least, rounds = self.order.least_micro_batches(self.stages), count // self.stages
        if count < least:
            yield Refusal(key, count, f"{self.schedule} on {self.stages} stages takes at least {least} micro-batches")
        elif not self.order.in_rounds(count, self.stages):
            fits = f"{self.stages * rounds} or {self.stages * (rounds + 1)}"
            yield Refusal(key, count, f"{self.schedule} on {self.stages} stages takes full rounds; write {fits}")

    def refuses_model(self, model: Mapping[str, Any]) -> Iterator[Refusal]:
        depth = next((model[key] for key in DEPTHS if isinstance(model.get(key), int)), None)
        if depth is not None and (why := complaint(depth, self.order, self.stages, self.blocks)):
            yield self._refusal(why)

    def _refusal(self, why: str) -> Refusal:
        key = "stages" if self.blocks is None else "blocks"
        return Refusal(f"{KEY}.{key}", getattr(self, key), why)

    def check_installed(self) -> None:
        """Releases of torch before 2.13 let a rank with two neighbouring parts send to itself as it sets up."""
        if self.order.returns and is_older("torch", RETURNS_FROM):
            cure = f"torch {version('torch')} cannot set it up; install 2.13, or write interleaved_zero_bubble"
            raise Refusal(f"{KEY}.schedule", self.schedule, cure)

    def narrowed(self, facts: Facts, rank: int) -> Facts:
        """The units of this rank's parts, and how many micro-batches are under way at once."""
        run = facts.run
        try:
            model_cut = cut(facts.units, self.order, self.stages, self.blocks)
        except ValueError as error:
            raise self._refusal(str(error)) from None
        stage = run.grid.cell(rank).stage
        mine = model_cut.of_stage(stage)
        unit_names = {name for part in mine for name in model_cut.parts[part]}
        in_flight = max(self.order.in_flight(part, self.stages, run.accumulation) for part in mine)
        params = tuple(placed for param in facts.params if (placed := _at(param, unit_names)) is not None)
        units = [_with_copies(unit, params) for unit in facts.units if unit.name in unit_names]
        flops = work(facts.units)
        share = sum(flops[name] for name in unit_names) / max(1, sum(flops.values()))
        return replace(
            facts,
            units=tuple(units),
            run=replace(
                run,
                stage=stage,
                in_flight=in_flight,
                forward_flops=int(run.forward_flops * share),
                model_params=run.model_params or facts.num_params,  # of tensor ranks' parts the whole is known
                model_flops=run.model_flops or run.forward_flops,
            ),
            params=params,
            cut=model_cut,
        )

    def decide(self, facts: Facts, plan: Plan) -> Iterator[Decision]:
        run = facts.run
        assert facts.cut is not None, "facts are of one stage"
        first, last = 0, len(facts.cut.parts) - 1
        ends = sum((part != first) + (part != last) for part in facts.cut.of_stage(run.stage))
        yield Reserve(
            unit=RUN,
            reason=f"hidden states and their gradients of {run.accumulation} micro-batches, from the next stages",
            owner="pipeline: received tensors",
            num_bytes=received_bytes(run, ends, run.accumulation),
            in_passes=True,
        )
        shared = self._zero == 1 and run.replicas > 1
        for unit in facts.units if shared else ():
            yield Share(
                unit=unit.name,
                reason=f"zero stage 1: 1/{run.replicas} per copy of the stage",
                kind=Kind.MOMENT,
                shards=run.replicas,
                element_bytes=plan.share(unit.name, Kind.MOMENT).element_bytes,
            )
        if messages := message_bytes(run, facts.num_trainable, run.replicas, shared=shared):
            yield Reserve(
                unit=RUN,
                reason=f"gradients{' and weights' * shared} are copied into messages to the other copies",
                owner="pipeline: messages",
                num_bytes=messages,
                when=When.STEP,
            )


def _at(param: Param, here: Collection[str]) -> Param | None:
    """``param`` as a stage with the units ``here`` has it; None if it does not. A tied one is at both ends."""
    owner = param.unit if param.unit in here else next((user for user in param.users if user in here), None)
    users = tuple(user for user in param.users if user in here and user != owner)
    return None if owner is None else replace(param, unit=owner, users=users)


def _with_copies(unit: Unit, params: Sequence[Param]) -> Unit:
    """``unit`` with its copy of a tied weight."""
    unit_params = [param for param in params if param.unit == unit.name]
    trained = sum(param.num_elements for param in unit_params if param.group is not None)
    return replace(unit, num_params=sum(param.num_elements for param in unit_params), num_trainable=trained)
