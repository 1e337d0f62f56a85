"""A loss that learns from a teacher's answers as well as from the data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from deepstow.strategies.core.protocol import COMPILE_KEYS, Refusal
from deepstow.trainer.config.arguments import Allowed, Count, NonEmpty, Positive, Section, option
from deepstow.trainer.config.recipe import RECIPES, Files, Recipe
from deepstow.trainer.values import KEEP_ONE, NOT_THEIRS, Found, Values

if TYPE_CHECKING:
    from deepstow.strategies.core.plan import Plan
    from deepstow.trainer.config.recipe import Column
    from deepstow.trainer.config.sections import RunConfig
    from deepstow.trainer.machine.probe import Machine
    from deepstow.trainer.run.session import Session

TEACHER = "teacher"  # the keyword of forward, the column of a row, and what a manifest has the hash of
Divergence = Literal["forward_kl", "reverse_kl", "jsd"]
KL = "forward_kl"
NOT_DISTILLED = (*NOT_THEIRS, *COMPILE_KEYS)


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
        weights = {self.teacher: 1.0} if isinstance(self.teacher, str) else self.teacher
        return {name: weight / sum(weights.values()) for name, weight in weights.items()}


@RECIPES.add
class Distill(Recipe):
    """The teacher is asked before training (``teacher.py``), and its answers are in the loss (``loss.py``)."""

    name = "distill"
    section = DistillSection
    language = True
    own_loss = True
    not_layerwise = "distill would keep the answers of all micro-batches on the device"
    files = Files("distill.teacher", TEACHER, "loss", "its files are not those that {} was trained with")

    def conflicts(self, sections: Mapping[str, Values]) -> Found:
        if sections["data"].streaming:
            yield "data.streaming", "cannot go with distill: the teacher answers all rows before training; leave it out"
        d = sections["distill"]
        if d.on != "logits" and isinstance(d.teacher, dict) and len(d.teacher) > 1:
            yield "distill.on", "hidden states of several teachers have no average; write logits, or name one teacher"
        if d.on == "logits" and d.hidden_weight != 1:
            yield "distill.hidden_weight", "is for distill.on: hidden or both; leave it out"
        for key in NOT_DISTILLED:
            if sections["training"][key]:
                yield f"training.{key}", f"cannot go with distill, whose loss does not have it; {KEEP_ONE}"

    def refusals(self, config: RunConfig, world_size: int, *, installed: bool) -> Iterator[Refusal]:
        for name, strategy in config.strategies.items():
            if strategy.divides():
                what = "has not been compared with distill, whose teacher answers whole rows; leave one of the two out"
                yield Refusal(f"strategies.{name}", strategy.model_dump(exclude_unset=True), what)

    def refuse_before_rows(self, config: RunConfig) -> None:
        from deepstow.trainer.recipes.distill import teacher

        teacher.refuse(config)

    def counted_by(self, config: RunConfig) -> Any:
        section = self.options(config)
        return [section.loss, section.top_k, section.on]

    def counted_loss(self, model: Any, config: RunConfig, shape: tuple[int, int]) -> Mapping[str, Any]:
        from deepstow.trainer.recipes.distill import loss

        return loss.counted(model, config, shape)

    def plan_lines(self, config: RunConfig, plan: Plan, machine: Machine) -> Iterable[str]:
        from deepstow.trainer.planning.from_config import budget_of
        from deepstow.trainer.recipes.distill import teacher

        teacher.refuse(config)
        return teacher.priced(config, budget_of(config, plan), machine)

    def is_moved(self, old: Any, new: Any) -> bool:
        """Names of teachers are no more than places, of as many with the same weights."""
        weights = [[*teachers.values()] if isinstance(teachers, Mapping) else [1.0] for teachers in (old, new)]
        return weights[0] == weights[1]

    def hash_of_files(self, config: RunConfig) -> str:
        from deepstow.trainer.recipes.distill import teacher

        return teacher.mark_of(config)

    def announce(self, session: Session) -> Any:
        from deepstow.trainer.recipes.distill import teacher

        return teacher.check(session)

    def before_training(self, session: Session) -> Session:
        from deepstow.trainer.recipes.distill import teacher

        return teacher.answered(session, session.recipes[self.name])

    def set_loss(self, model: Any, session: Session) -> None:
        from deepstow.trainer.recipes.distill import loss

        if (lesson := session.recipes.get(self.name)) is not None:  # no teacher was asked for a copy of a run
            loss.learn(model, session.config, lesson.how)

    def columns(self, config: RunConfig) -> Mapping[str, Column]:
        from deepstow.trainer.recipes.distill import loss

        return {TEACHER: loss.answers_of}

    def recorded(self, session: Session) -> Mapping[str, str]:
        lesson = session.recipes.get(self.name)
        return {} if lesson is None else {TEACHER: lesson.teacher}


def asked_of(config: RunConfig) -> DistillSection:
    """What the section of ``config`` asks for."""
    section: DistillSection = RECIPES[Distill.name].options(config)
    return section
