"""ZeRO: who holds which share of the training state. Stages 0 to 3, run by DeepSpeed's engine.

Problem. Mixed-precision Adam needs 16 bytes per parameter on every rank: 2 for the weight, 2 for its gradient, 12
for the fp32 master and the two moments. Data-parallel ranks all hold the same bytes.

Arithmetic, for P parameters on N ranks in mixed precision:
    stage 0   16 P                     nothing is split
    stage 1    4 P + 12 P / N          master and moments are split
    stage 2    2 P + 14 P / N          and gradients
    stage 3   16 P / N + live weights  and the weights, gathered unit by unit
In fp32 the weight and gradient take 4 bytes each; stages 1 to 3 still keep a master (their flat fp32 partition),
stage 0 does not: the weight is its own master.

Invariant. Splitting changes no arithmetic: on two ranks in fp32 the weights equal plain data-parallel training
bit for bit. Two cases add in another order and are equal to about 1e-5 only: clipping that triggers (stages 1 to 3 sum
the squares partition by partition), and accumulation (stages 2 and 3 reduce every micro-batch).

Refused: buckets that do not pay. Bucket sizes follow from the model, so that a small model does not reserve
gigabytes and a large one keeps its link busy. Stage 3 with Transformers before 5.23, which builds another model under
it (``trainer/run/ds_config.py``).

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from strategies.core.applied import log_applied
from strategies.core.facts import Facts, Precision, RunFacts, Unit, UnitKind
from strategies.core.plan import RUN, Decision, EngineSet, Kind, Plan, Reserve, Share, When
from strategies.core.protocol import BITWISE, Parity, Phase, Strategy

if TYPE_CHECKING:
    from torch import nn

MAX_BUCKET = 50_000_000  # elements: 100 MB of bf16, at which a PCIe or NVLink transfer is near its asymptote
_CLIPPING = "each rank sums the squares of its own partition, and DeepSpeed multiplies by 1/norm instead of dividing"
_EVERY_MICRO_BATCH = "stages 2 and 3 reduce each micro-batch over the ranks; plain training adds them up first"
_ROUNDING = "DeepSpeed computes with weights and gradients rounded to bf16; plain training autocasts fp32 weights"


class Zero(Strategy):
    """Shard optimizer state (1), gradients (2) and weights (3) over the ranks of the job.

    Stage 0 is plain data parallelism in DeepSpeed's engine. Higher stages hold less per rank; stage 3 sends half as
    much again over the link (3 instead of 2 numbers per parameter and step).
    """

    phase = Phase.WHO
    examples = ({"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3})

    stage: Literal[0, 1, 2, 3] = Field(
        description="0: nothing split, 1: optimizer state, 2: and gradients, 3: and weights."
    )

    def parity(self, run: RunFacts) -> Parity:
        """Bit for bit, but where DeepSpeed adds in another order than plain data parallelism."""
        if run.precision is not Precision.FP32:
            return Parity(2e-2, _ROUNDING)
        if self.stage >= 2 and run.accumulation > 1:
            return Parity(1e-4, _EVERY_MICRO_BATCH)
        if self.stage >= 1 and run.max_grad_norm > 0:
            return Parity(1e-4, _CLIPPING)
        return BITWISE

    def decide(self, facts: Facts, plan: Plan) -> Iterator[Decision]:
        for unit in facts.units:
            yield from self._shares(facts, unit)
        yield from self._engine(facts)
        yield from self._reserves(facts)

    def apply(self, model: nn.Module, plan: Plan) -> None:
        """Stage 3: blocks are gathered whole, and DeepSpeed's backward hooks stand at their borders only.

        [Note: order of sums] Its hooks are autograd nodes around every module that holds weights. Around the norm of
        a residual block such a node adds the norm's two contributions to the gradient first and the residual's
        afterwards; plain autograd adds them in another order, and the last bits differ. With the block as the unit no
        node stands between contributions, and the bits are those of plain training.
        """
        if self.stage != 3:
            return
        from deepspeed.utils import set_z3_leaf_modules_by_name

        blocks = [unit.name for unit in plan.facts.units if unit.kind is UnitKind.BLOCK]
        set_z3_leaf_modules_by_name(model, blocks)
        log_applied("zero", ((block, "weights are gathered for the whole block") for block in blocks))
        self._let_gradients_through(model)

    def _let_gradients_through(self, model: Any) -> None:
        # DeepSpeed reduces a block's gradients in torch's full backward hook. Where a block's input needs no gradient,
        # as behind a frozen embedding, torch calls that hook before the block's backward instead of after it.
        if not any(parameter.requires_grad for parameter in model.get_input_embeddings().parameters()):
            model.enable_input_require_grads()

    def _shares(self, facts: Facts, unit: Unit) -> Iterator[Share]:
        run = facts.run
        mixed = run.precision is not Precision.FP32
        split_from = {Kind.MASTER: 1, Kind.MOMENT: 1, Kind.GRAD: 2, Kind.PARAM: 3}
        element_bytes = {
            Kind.PARAM: run.precision.element_bytes,
            Kind.GRAD: run.precision.element_bytes,
            Kind.MASTER: 4 if mixed or self.stage > 0 else 0,
            Kind.MOMENT: 4 * run.moments,
        }
        for kind in Kind:
            split = self.stage >= split_from[kind]
            reason = f"stage {self.stage}: " + (f"1/{run.world_size} per rank" if split else "whole on every rank")
            ways = run.world_size if split else 1
            yield Share(unit=unit.name, reason=reason, kind=kind, ways=ways, element_bytes=element_bytes[kind])

    def _engine(self, facts: Facts) -> Iterator[EngineSet]:
        keys: dict[str, bool | int] = {"stage": self.stage}
        if self.stage > 0:
            keys |= {
                "reduce_bucket_size": self._bucket(facts),
                "allgather_bucket_size": self._bucket(facts),
                # A second stream is of use only where there are streams.
                "overlap_comm": facts.machine.has_accelerator,
                "contiguous_gradients": True,
            }
        if self.stage == 3:
            keys |= {
                "stage3_prefetch_bucket_size": self._largest_block(facts),
                "stage3_max_live_parameters": self._live(facts),
                "stage3_max_reuse_distance": self._largest_block(facts),
                "stage3_param_persistence_threshold": self._persistent(facts),
                "stage3_gather_16bit_weights_on_model_save": True,
                # Otherwise DeepSpeed replaces torch.nn.functional.linear for the whole process and leaves it so.
                "memory_efficient_linear": False,
            }
        for key, value in keys.items():
            yield EngineSet(unit=RUN, reason="zero", key=f"zero_optimization.{key}", value=value)

    def _reserves(self, facts: Facts) -> Iterator[Reserve]:
        run = facts.run
        if self.stage > 0:
            buffers = 2 if facts.machine.has_accelerator else 1  # overlapping needs a second one to fill
            yield Reserve(
                unit=RUN,
                reason="gradients are reduced bucket by bucket",
                owner="zero: reduce bucket",
                num_bytes=buffers * self._bucket(facts) * run.precision.element_bytes,
            )
        if self.stage == 3 and run.world_size > 1:
            yield Reserve(
                unit=RUN,
                reason="weights gathered for use and prefetched",
                owner="zero: gathered weights",
                num_bytes=min(self._live(facts), facts.num_params) * run.precision.element_bytes,
            )
        if run.precision is not Precision.FP32 or self.stage == 3:  # stage 3 flattens into a copy in fp32, too
            ways = run.world_size if self.stage > 0 else 1
            yield Reserve(
                unit=RUN,
                reason="the optimizer reads its share of the gradients in fp32",
                owner="zero: fp32 gradients",
                num_bytes=4 * -(-facts.num_trainable // ways),
                when=When.STEP,
            )

    def _bucket(self, facts: Facts) -> int:
        # One block per reduction keeps the message large; a larger parameter is sent in a bucket of its own.
        # DeepSpeed aligns shares to two elements and refuses an odd bucket.
        size = min(MAX_BUCKET, self._largest_block(facts), facts.num_trainable)
        return max(2, size + size % 2)

    def _largest_block(self, facts: Facts) -> int:
        """Elements; of any unit where the model has no blocks. Embedding and head are larger, but come once a step."""
        blocks = [unit.num_params for unit in facts.units if unit.kind is UnitKind.BLOCK]
        return max(blocks or [unit.num_params for unit in facts.units], default=1)

    def _live(self, facts: Facts) -> int:
        # The unit in use, whichever it is, a block prefetched and a block not yet released.
        return max((unit.num_params for unit in facts.units), default=1) + 2 * self._largest_block(facts)

    def _persistent(self, facts: Facts) -> int:
        # Vectors (norms, biases) stay whole: gathering them costs a message each and saves next to nothing.
        return 10 * facts.run.hidden_size
