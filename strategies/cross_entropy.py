"""Cross-entropy: the loss of a large vocabulary by chunks of rows, so that the head needs little besides its logits.

Arithmetic, for n tokens, v words and logits of b bytes (2 in bf16, 4 in fp32), beside the last hidden states:
                 saved for backward    at most in forward      at most in backward
    native       4 nv                  (b + 8) nv, fp32: 8     (b + 12) nv, fp32: 12
    chunks       b nv                  b nv and a chunk        b nv and a chunk
A chunk has four fp32 tensors of a 32nd of the rows, or of 2 MiB each if that is more.

Invariant. Loss and gradients are bit for bit the same (``strategies/engine/forward/chunked_loss.py`` says why): the
products of the head are not cut, and everything else treats each row by itself.

Refused: nothing. The loss stays native, and the plan says so, where the model computes it by itself, where labels are
smoothed, and, by default, where the logits have less than 64 MiB in fp32: there the second softmax cost a CPU more time
than chunks in its caches saved; from there on chunks were faster (measured on 2 cores).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from deepstow.strategies.core.facts import Facts
from deepstow.strategies.core.plan import CHUNKS, Decision, Keep, Plan
from deepstow.strategies.core.protocol import Idle, Phase, Strategy
from deepstow.strategies.core.sizes import human
from deepstow.strategies.planner.activation_policy import WORTH_BYTES

if TYPE_CHECKING:
    from torch import nn


class CrossEntropy(Strategy):
    """Compute the loss of a causal language model by chunks of rows. Loss and gradients are bit for bit the same.

    The head then keeps its logits in the dtype of compute, and not their softmax in fp32 and two more tensors of that
    size. Switched on by ``offload``; write the section to have it without, or to switch it off.
    """

    phase = Phase.KEEP
    resume = "said"
    examples = ({"chunked": True},)

    chunked: bool | Literal["auto"] = Field(
        default="auto",
        description="auto: where the logits of a micro-batch have 64 MiB or more in fp32; true: always; false: never.",
    )

    def decide(self, facts: Facts, plan: Plan) -> Iterator[Decision]:
        if self.chunked is False:
            raise Idle("chunked: false leaves the loss to the model")
        head = next((unit for unit in facts.units if unit.in_chunks is not None), None)
        if facts.cut is not None and facts.run.stage != facts.cut.stages[-1]:
            raise Idle("the head is in another stage")
        if head is None or head.in_chunks is None:
            raise Idle("the model does not compute its loss by Transformers' loss of causal language models")
        size = 4 * head.in_chunks.logits
        if self.chunked == "auto" and size < WORTH_BYTES:
            raise Idle(f"the logits have {human(size)} in fp32, less than {human(WORTH_BYTES)}; chunked: true insists")
        reason = "the softmax of the logits is computed again, by chunks"
        yield Keep(unit=head.name, reason=reason, policy=CHUNKS, saved_bytes=head.in_chunks.saved_bytes)

    def apply(self, model: nn.Module, plan: Plan) -> None:
        from deepstow.strategies.engine.forward.chunked_loss import set_by_plan

        set_by_plan(model, plan)
