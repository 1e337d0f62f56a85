"""Sequence parallelism (Ulysses): every row of data is divided over ranks, for contexts that one device cannot hold.

For degree N a rank has 1 / N of the tokens of each row between attentions, and all tokens of 1 / N of the heads inside
them, so what forward saves and computes is 1 / N. Weights are whole on each rank, and ranks of a row share gradients
and state like ranks with other data: ``zero`` divides both over all of them.

Invariant. A step trains the tokens that plain training on one rank per row trains, each with its position and its
attention, and their loss has the same weight. Gradients are sums over the slices, taken in another order, so a step is
equal to rounding only.

How it is computed, and why it is not DeepSpeed's: ``strategies/parallel/ulysses.py``. What is refused, and why:
docs/strategies/sequence.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from deepstow.strategies.core.facts import Facts, Precision, RunFacts
from deepstow.strategies.core.plan import RUN, Decision, Plan, Reserve
from deepstow.strategies.core.protocol import Axis, FitOptions, Parity, Phase, Refusal, Strategy, compared_with
from deepstow.strategies.planner.network import slices_bytes

if TYPE_CHECKING:
    from torch import nn

KEY = "strategies.sequence.degree"
# Architectures that train as without it (tests/parity/test_sequence.py), by Hugging Face's model_type.
MODELS = ("llama", "mistral", "qwen2", "qwen3")
HEADS = "num_attention_heads"
_LENGTHENING = ("dynamic", "longrope")  # rotary frequencies that follow from the longest position that is seen
_SUMS = "gradients are sums over the slices of a row in another order, and Adam enlarges what differs"
_ROUNDING = "the slices of a row are rounded to 16 bits where plain training rounds their sum"
_RING = "torch's ring attention, which could use more, runs on no CPU and was not compared"


class Sequence(Strategy):
    """Divide every row of data over ``degree`` ranks, for contexts that one device cannot hold.

    That many ranks are given the same rows, and each computes a slice of the tokens of each; further ranks have other
    rows. Ranks exchange the heads of attention four times per block and micro-batch, so those of a row belong on one
    machine with a fast link.
    """

    phase = Phase.WHO
    resume = "said"
    fit = FitOptions(rows_by="degree")
    examples = ({"degree": 2},)

    degree: int = Field(ge=2, description="Ranks that each compute a slice of every row.")

    def parity(self, run: RunFacts) -> Parity:
        if run.precision is not Precision.FP32:
            return Parity(5e-2, _ROUNDING)
        return Parity(1e-5 if run.optim == "sgd" else 2e-2, _SUMS)

    def divides(self) -> Mapping[Axis, int]:
        return {Axis.SEQUENCE: self.degree}

    def check_installed(self) -> None:
        """Older releases of Transformers scale losses otherwise."""
        compared_with(KEY, self.degree, "transformers", (5, 23))

    def refuses_model(self, model: Mapping[str, Any]) -> Iterator[Refusal]:
        for why in _complaints(model, self.degree):
            yield Refusal(KEY, self.degree, why)

    def decide(self, facts: Facts, plan: Plan) -> Iterator[Decision]:
        """What is saved and computed was counted on a slice; here is what comes from the other ranks."""
        yield Reserve(
            unit=RUN,
            reason=f"rows divided over {self.degree} ranks: queries, keys and values of the others' slices",
            owner="sequence: received heads",
            num_bytes=slices_bytes(facts.run),
            in_passes=True,
        )

    def apply(self, model: nn.Module, plan: Plan) -> None:
        from deepstow.strategies.parallel import ulysses

        ulysses.start(model, plan.facts.run.grid)


def _complaints(model: Mapping[str, Any], degree: int) -> Iterator[str]:
    """Why rows of a model with this configuration cannot be divided, one line each, and what could be written."""
    kind, heads = model.get("model_type"), model.get(HEADS)
    if kind not in MODELS:
        yield f"{kind} was not compared with plain training; architectures that were: {', '.join(MODELS)}"
        return
    if isinstance(heads, int) and heads % degree:
        fits = [str(count) for count in range(2, heads + 1) if not heads % count]
        instead = f"write {', '.join(fits)}" if fits else "leave it out"
        yield f"must divide model.config.{HEADS}, which is {heads}: each rank computes whole heads; {instead}; {_RING}"
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    if rope.get("rope_type") in _LENGTHENING:
        cause = "rotary frequencies follow from the longest position of a row, of which a rank has a slice"
        yield f"cannot go with rope_type {rope['rope_type']}: its {cause}; leave it out"
    if model.get("attention_dropout"):
        yield "cannot go with model.config.attention_dropout: ranks would drop the same places of other heads; write 0"
