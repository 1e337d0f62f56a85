"""Tensor parallelism: the linear layers of attention and MLP are divided over ranks, which compute each layer together.

For P parameters of which L are in divided layers, degree T and D copies of the model, a rank holds P - L + L / T
weights, and with them gradients, masters and moments, of which ZeRO takes 1 / D. Attention's and the MLP's inner
activations fall to 1 / T; the hidden states between them are whole.

Invariant. Ranks of one copy are given the same rows and compute the same hidden states, so what is not divided stays
equal on them to the last bit without being sent. The product of a layer divided by rows is summed in another order
than in plain training, so that a step is equal to rounding only. With ``sequence_parallel`` they compute slices of the
hidden states between divided layers (``strategies/parallel/scattered.py``), and send as many bytes in forward. With
``chunks`` they sum the rows of one chunk while they compute the next (``strategies/plugins/chunked.py``). With
``exchange`` they sum fewer tokens, in fewer bits (``strategies/plugins/exchanged.py``), which is lossy.

DeepSpeed's AutoTP does the work, in its engine or, for the stage of a pipeline, alone: the pipeline sums, clips and
updates then. Which layers it divides is said in ``strategies/parallel/autotp.py``, how many bytes
that leaves on a rank is counted on such a model (``trainer/model/tensor_share.py``), so the other strategies decide
about one rank's part. What is refused, and why: docs/strategies/tensor.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from deepstow.strategies.core.compatibility import Rule
from deepstow.strategies.core.facts import Facts, Precision, RunFacts, UnitKind
from deepstow.strategies.core.plan import RUN, Decision, EngineSet, Kind, Plan, Reserve, Share
from deepstow.strategies.core.protocol import LOSSY, Axis, Parity, Phase, Refusal, Requirement, Strategy
from deepstow.strategies.core.resume import on_resume
from deepstow.strategies.parallel import autotp, deepspeed
from deepstow.strategies.planner.engine_bytes import boundary_bytes
from deepstow.strategies.planner.lossy import ROWS, rows_message_bytes, rows_words
from deepstow.strategies.planner.network import UNKNOWN
from deepstow.strategies.planner.overlap import UNDER_WAY, Passes, divisors

if TYPE_CHECKING:
    from torch import nn

KEY = "strategies.tensor.degree"
SLICES = Axis.TOKENS.value
CHUNKS, EXCHANGE = "strategies.tensor.chunks", "strategies.tensor.exchange"
_EXACT = f"{EXCHANGE}.tokens = 1.0 and {EXCHANGE}.bits = 16"
_RUN_AGAIN = "blocks that run again were not compared with plain training"
_SUMS = "ranks sum the parts of a product in another order than one rank does, and Adam enlarges what differs"
_ROUNDING = "DeepSpeed computes with weights and gradients rounded to 16 bits; plain training autocasts fp32 weights"
# Beside chunks of rows, and beside lossy sums of them.
RULES = (
    Rule(CHUNKS, "strategies.offload", "it was not compared with plain training"),
    Rule(CHUNKS, "strategies.pipeline", "its stages run blocks one by one"),
    Rule(CHUNKS, "strategies.recompute.policy", _RUN_AGAIN),
    Rule(CHUNKS, "training.gradient_checkpointing", _RUN_AGAIN),
    Rule(CHUNKS, SLICES, "which divides tokens"),
    Rule(CHUNKS, "model.lora", "adapters were not compared with plain training", "leave it out"),
    *(
        Rule(EXCHANGE, key, "beside which it was not built", unless=_EXACT)
        for key in (
            "strategies.pipeline",
            "strategies.offload",
            "strategies.recompute.policy",
            "training.gradient_checkpointing",
            SLICES,
            CHUNKS,
            "model.lora",
            "training.fp16",
        )
    ),
)


class RowExchange(BaseModel):
    """Which part of the tokens ranks sum, and in how many bits."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    tokens: float = Field(default=1.0, gt=0, le=1, description="Part of each row's tokens whose sums are exchanged.")
    bits: Literal[4, 8, 16] = Field(default=16, description="Of a number on its way; 16: as it is computed.")
    codec: Literal["block", "segmented"] = Field(default="block", description="How numbers get fewer bits.")

    @property
    def is_exact(self) -> bool:
        return self.tokens == 1 and self.bits == 16

    @property
    def words(self) -> str:
        bits = f" in {self.bits} bits ({self.codec})" if self.bits < 16 else ""
        return f"the sums of {self.tokens:.4g} of the tokens{bits}"


class Tensor(Strategy):
    """Divide attention and MLP layers over ``degree`` ranks that compute each layer together.

    Each copy of the model takes that many ranks; further ranks are further copies, with other data. Ranks exchange
    hidden states several times per block, so the ranks of a copy belong on one machine with a fast link.
    """

    phase = Phase.WHO
    resume = "said"
    implies = {"zero": {"stage": 1}}
    spares = ("cross_entropy",)
    requires = frozenset([Requirement.DEEPSPEED, Requirement.BLOCK_TIMES])  # and zero's, unless a pipeline has that
    examples = ({"degree": 2}, {"degree": 2, "sequence_parallel": True})

    degree: int = Field(ge=2, description="Ranks that hold one copy of the model together.")
    sequence_parallel: bool = Field(
        default=False,
        description="Between divided layers each rank computes and saves a slice of the tokens instead of all.",
    )
    chunks: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        default=None,
        description="Attention and MLP take the rows of a micro-batch in as many chunks, and ranks sum one while they "
        "compute the next; auto: by the rates, if they are known; left out: all at once.",
    )

    exchange: RowExchange | None = Field(
        default=None,
        description="Lossy: ranks sum hidden states of fewer tokens, or in fewer bits; left out: all.",
        json_schema_extra=on_resume("compression"),
    )

    @property
    def lossy(self) -> RowExchange | None:
        """The exchange, unless it is of all tokens as they are."""
        return None if self.exchange is None or self.exchange.is_exact else self.exchange

    def parity(self, run: RunFacts) -> Parity:
        if self.lossy is not None:
            return Parity(LOSSY, f"ranks exchange {self.lossy.words} only")
        if run.precision is not Precision.FP32:
            return Parity(2e-2, _ROUNDING)
        return Parity(1e-5 if run.optim == "sgd" else 2e-2, _SUMS)

    def divides(self) -> Mapping[Axis, int]:
        return {Axis.TENSOR: self.degree} | ({Axis.TOKENS: self.degree} if self.sequence_parallel else {})

    def refusals(self, run: RunFacts) -> Iterator[Refusal]:
        if run.stowed and run.head_words % self.degree:  # the plan of one rank is that of all ranks of a copy
            cure = "must divide the words of the head beside strategies.offload, whose ranks have parts of one size"
            yield Refusal(KEY, self.degree, f"{cure}; write another vocab_size, or leave one of the two out")
        rows = run.micro_batch
        if isinstance(self.chunks, int) and rows % self.chunks:
            fits = autotp.listed([str(count) for count in range(1, rows + 1) if not rows % count])
            cure = f"must divide the rows of a micro-batch, training.per_device_train_batch_size = {rows}; write {fits}"
            yield Refusal(CHUNKS, self.chunks, cure)
        if self.exchange is not None and self.exchange.bits == 16 and "codec" in self.exchange.model_fields_set:
            cure = "numbers of exchange.bits = 16 are sent as they are; write bits: 8 or bits: 4, or leave codec out"
            yield Refusal(f"{EXCHANGE}.codec", self.exchange.codec, cure)

    def refuses_model(self, model: Mapping[str, Any]) -> Iterator[Refusal]:
        for why in autotp.complaints(model, self.degree):
            yield Refusal(KEY, self.degree, why)
        if (kind := model.get("model_type")) not in autotp.IN_SLICES:
            cure = (
                f"{kind} was not compared with plain training; architectures that were: {', '.join(autotp.IN_SLICES)}"
            )
            if self.sequence_parallel:
                yield Refusal(SLICES, True, cure)
            if self.chunks is not None:
                yield Refusal(CHUNKS, self.chunks, cure)
            if self.lossy is not None:
                yield Refusal(EXCHANGE, self.written["exchange"], cure)

    def decide(self, facts: Facts, plan: Plan) -> Iterator[Decision]:
        """The shares are those of one rank's part of the model, which ``zero`` decides about. A stage of a pipeline is
        divided without the engine (``apply``).
        """
        slices = ", tokens between them as well" if self.sequence_parallel else ""
        reason = f"attention and MLP divided over {self.degree} ranks{slices}"
        if facts.run.stowed:  # each rank's part is a model of its own to the memory engine
            yield Reserve(unit=RUN, reason=reason, owner="tensor: divided layers", num_bytes=0, in_passes=True)
            return
        if facts.run.stages > 1:
            for unit in (block for block in facts.units if block.kind is UnitKind.BLOCK):
                size = plan.share(unit.name, Kind.PARAM).element_bytes
                yield Share(unit=unit.name, reason=reason, kind=Kind.PARAM, shards=1, element_bytes=size)
            return
        if self.chunks is not None:
            size = 2 * boundary_bytes(facts.run) // self._chunks(facts)  # gradients of a chunk, before and behind
            yield Reserve(unit=RUN, reason=self._words(facts), owner=UNDER_WAY, num_bytes=size, in_passes=True)
        if self.lossy is not None:
            size, words = rows_message_bytes(facts.run, self.lossy.tokens), self._exchanged(facts)
            yield Reserve(unit=RUN, reason=words, owner=ROWS, num_bytes=size, in_passes=True)
        yield EngineSet(unit=RUN, reason=reason, key=deepspeed.TENSOR_DEGREE, value=self.degree)

    def _chunks(self, facts: Facts) -> int:
        if self.chunks != "auto":
            return self.chunks or 1
        passes = Passes.of(facts)
        return divisors(facts.run.micro_batch, UNKNOWN)[-1] if passes is None else passes.choose()

    def _words(self, facts: Facts) -> str:
        chunks, passes = self._chunks(facts), Passes.of(facts, [self.chunks] if isinstance(self.chunks, int) else [])
        summary = f"attention and MLP take rows in {chunks} chunks, one summed while the next is computed"
        if passes is None:
            return f"{summary}; the rates are unknown"
        blocks = ", ".join(f"in {many} {time:.3g} s" for many, time in passes.seconds().items())
        return f"{summary}: forward and backward of the blocks {blocks} (simulated)"

    def _exchanged(self, facts: Facts) -> str:
        assert self.lossy is not None
        how = self.lossy
        return rows_words(facts, how.words, how.tokens, how.bits, segmented=how.codec == "segmented")

    def apply(self, model: nn.Module, plan: Plan) -> None:
        from deepstow.strategies.parallel import scattered, tensor_adapters, tensor_shards
        from deepstow.strategies.plugins import chunked, codec_rows, exchanged

        changed = self.sequence_parallel or self.chunks is not None or self.lossy is not None
        if plan.facts.run.stages > 1 or plan.facts.run.stowed or changed:
            tied = plan.facts.run.tied
            tensor_shards.divide(model, self.degree, tied=tied, in_slices=self.sequence_parallel)
        else:
            tensor_adapters.divide(model, self.degree)
        if self.sequence_parallel:
            ranks = tensor_shards.group()
            scattered.start(model, scattered.Tokens(self.degree, tensor_shards.tensor_rank(), ranks.group_name))
        if self.chunks is not None:
            chunks = chunked.agreed(self._chunks(plan.facts), tensor_shards.group())
            blocks = sum(unit.kind is UnitKind.BLOCK for unit in plan.facts.units)
            chunked.start(model, [chunks] * len(chunked.SUBLAYERS) * blocks, tensor_shards.group())
        if (how := self.lossy) is not None:
            codec = codec_rows.Codec(how.bits, how.codec == "segmented") if how.bits < 16 else None
            exchanged.start(model, exchanged.Exchange(how.tokens, codec, tensor_shards.group()))
        tensor_shards.apart(model, plan.facts.run.grid)
