"""The sections of a config that make smaller models while training: ``distill`` and ``prune``."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from deepstow.trainer.config.arguments import Allowed, Count, NonEmpty, Positive, Section, option

Divergence = Literal["forward_kl", "reverse_kl", "jsd"]
KL = "forward_kl"


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    return pattern


Pattern = Annotated[NonEmpty, AfterValidator(_check_pattern)]


class DistillSection(Section):
    """Learn from the answers of a teacher as well as from the data: each trained token's loss is
    alpha * temperature^2 * divergence(teacher, student) + (1 - alpha) * cross-entropy. Hidden states may be in
    the place of the divergence, or beside it (deepstow docs distill).
    """

    teacher: Annotated[
        NonEmpty | Annotated[dict[NonEmpty, Positive], Field(min_length=1)],
        Allowed("a folder or hub name, or several with a weight > 0 each"),
    ] = Field(
        description="Folder or hub name of a model with the student's tokens; or several, {name: weight, ...}, whose "
        "probabilities are averaged."
    )
    alpha: Annotated[float, Field(ge=0, le=1)] = option(
        "Weight of the divergence; the cross-entropy has the rest.", 0.5
    )
    temperature: Positive = option("Logits of both are divided by it for the divergence.", 1.0)
    loss: Divergence = option("Which divergence: KL(teacher, student), KL(student, teacher), or Jensen-Shannon.", KL)
    top_k: Annotated[Literal["all"] | Count, Allowed("a whole number >= 1, or all")] = option(
        "How many of the teacher's most likely tokens are compared one by one; all others count as one.", 64
    )
    on: Literal["logits", "hidden", "both"] = option(
        "What is compared; hidden: the last hidden states, of a teacher as wide as the student.", "logits"
    )
    hidden_weight: Positive = option("Factor of the hidden states' part of the loss.", 1.0)
    teacher_dtype: Literal["int8", "nf4"] | None = option(
        "The teacher's linear layers in 8 or 4 bits, by bitsandbytes; not set: bfloat16 with training.bf16, or float32."
    )
    teacher_batch_size: Count = option("Rows in one forward of the teacher; more make one that is streamed faster.", 8)

    @property
    def teachers(self) -> dict[str, float]:
        """The share of each in the average."""
        given = {self.teacher: 1.0} if isinstance(self.teacher, str) else self.teacher
        return {name: weight / sum(given.values()) for name, weight in given.items()}


class PruneSection(Section):
    """Make weights of linear layers zero while training, and keep them so, or take parts of the model out before
    (deepstow docs prune, deepstow docs structured).
    """

    method: Literal["magnitude", "wanda", "2:4", "structured"] = option(
        "Which weights go: the smallest of a matrix; of each output, the smallest times the norm of their input; two "
        "of four consecutive inputs; or, before training, whole parts of a saved model.",
        "magnitude",
    )
    sparsity: Annotated[float, Field(gt=0, lt=1)] = option(
        "Share of the weights that are zero in the end; structured: share of each of parts that goes.", 0.5
    )
    schedule: Literal["cubic", "once"] | None = option(
        "cubic: s_t = sparsity (1 - (1 - t/T)^3), where T is until of all steps; once: all before the first step; not "
        "set: cubic, and once for 2:4."
    )
    until: Annotated[float, Field(gt=0, lt=1)] = option(
        "Share of the steps after which the last weights go; the others heal.", 0.5
    )
    rounds: Count = option("How many times weights go, under the cubic schedule.", 10)
    modules: Annotated[
        list[NonEmpty] | Pattern | None, Allowed("a list of module names, or a regular expression for all of a name")
    ] = option("Linear layers that are pruned; not set: all of the blocks.")
    parts: Annotated[list[Literal["channels", "heads", "layers"]], Field(min_length=1)] | None = option(
        "structured: what goes: channels of each MLP, heads with their whole group of key and value, whole layers; not "
        "set: [channels, heads]."
    )
    calibration_rows: Count = option(
        "wanda, structured: rows of the training data, from the first on, that choose what goes.", 32
    )

    @property
    def is_cubic(self) -> bool:
        return self.method in ("magnitude", "wanda") and self.schedule != "once"

    @property
    def is_structured(self) -> bool:
        return self.method == "structured"
