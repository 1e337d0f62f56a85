"""Weights that become zero while training and stay so, or parts of the model that are taken out before."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field

from deepstow.strategies.core.facts import Held, Tier
from deepstow.strategies.core.layout import SCRATCH_ELEMENTS
from deepstow.strategies.core.protocol import COMPILE_KEYS, Refusal
from deepstow.trainer.config.arguments import Allowed, Count, NonEmpty, Section, option
from deepstow.trainer.config.recipe import RECIPES, Recipe, whole_weights
from deepstow.trainer.values import KEEP_ONE, WRONG, Found, Values

if TYPE_CHECKING:
    from transformers import PretrainedConfig, TrainerCallback

    from deepstow.strategies.core.facts import RunFacts
    from deepstow.trainer.config.sections import RunConfig
    from deepstow.trainer.planning.facts import ModelCount
    from deepstow.trainer.run.session import Session

ZEROS = "pruning: zeros"  # what is held of them during an update
CHOICE_BYTES = 24  # per element: weight, score, what torch's kthvalue copies, marks and their running count


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    return pattern


Pattern = Annotated[NonEmpty, AfterValidator(_check_pattern)]


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


@RECIPES.add
class Prune(Recipe):
    """Masks of single weights (``pruning.py``), and smaller models (``structured.py``)."""

    name = "prune"
    section = PruneSection
    resume = "pruning"
    language = True

    def conflicts(self, sections: Mapping[str, Values]) -> Found:
        p, m, d, t = (sections[name] for name in ("prune", "model", "data", "training"))
        if isinstance(m.lora, dict):
            yield (
                "model.lora",
                "cannot go with prune: adapters are added to weights that stay as they are; leave it out",
            )
        if m.quantization_config:
            yield "model.quantization_config", "cannot go with prune, whose weights are trained; leave it out"
        yield from _structured(p, m, d) if p.method == "structured" else _masked(p, d, t)

    def refusals(self, config: RunConfig, world_size: int, *, installed: bool) -> Iterator[Refusal]:
        section = self.options(config)
        if not section.is_structured:  # zeros are kept where all of each weight is on one rank
            yield from whole_weights(config, world_size, "prune", section.model_dump(exclude_unset=True))

    def model_config(self, built: PretrainedConfig, config: RunConfig) -> PretrainedConfig:
        if not self.options(config).is_structured:
            return built
        from deepstow.trainer.recipes.prune import sizes

        return sizes.smaller(config, built)

    def counted_by(self, config: RunConfig) -> Any:
        section = self.options(config)
        return section.is_structured and [section.sparsity, section.parts]

    def memory(self, config: RunConfig, model: ModelCount, run: RunFacts) -> Iterable[Held]:
        section = self.options(config)
        if section.is_structured:
            return
        from deepstow.trainer.recipes.prune import rounds

        sizes = rounds.sizes(section, model.units, model.params)
        if not sizes:
            raise config.error("prune.modules", section.modules, "no layer of a block has such a name")
        if run.stowed:
            what = "which weights are zero, a stretch at a time"
            yield Held(owner=ZEROS, reason=what, num_bytes=min(max(sizes), SCRATCH_ELEMENTS))
        else:  # torch's optimizer updates all weights in one step
            yield Held(owner=ZEROS, reason="which weights are zero, a byte each", num_bytes=sum(sizes), in_step=True)
        what = "the largest matrix, where weights to prune are chosen"
        yield Held(owner="pruning: choice", reason=what, num_bytes=CHOICE_BYTES * max(sizes), tier=Tier.HOST)

    def reads_weights_again(self, config: RunConfig) -> bool:
        return bool(self.options(config).is_structured)

    def announce(self, session: Session) -> Any:
        if not self.options(session.config).is_structured:
            return None
        from deepstow.trainer.recipes.prune import structured

        return structured.check(session)

    def before_training(self, session: Session) -> Session:
        if session.recipes[self.name] is None:
            return session
        from deepstow.trainer.recipes.prune import structured

        return structured.made(session, session.recipes[self.name])

    def callbacks(self, session: Session, trainer: Any) -> Sequence[TrainerCallback]:
        if self.options(session.config).is_structured:
            return ()
        from deepstow.trainer.recipes.prune.pruning import Pruning

        return [Pruning(trainer, session.config)]

    def sentence(self, session: Session) -> str:
        if session.recipes[self.name] is None:
            return ""
        from deepstow.trainer.recipes.prune import structured

        return structured.sentence(session.recipes[self.name])

    def results(self, history: Sequence[Mapping[str, Any]]) -> Iterable[str]:
        pruned = next((record for record in reversed(history) if "sparsity" in record), None)
        if pruned is None:
            return
        parts = (f"{key.removeprefix('sparsity/')} {share:.2%}" for key, share in pruned.items() if "sparsity/" in key)
        yield f"It was pruned: {pruned['sparsity']:.2%} of the weights of these layers are zero ({', '.join(parts)})."
        if first := next((record for record in history if "eval_loss" in record), None):
            yield f"The evaluation loss at step {first['step']} was {first['eval_loss']:.4f}."


def asked_of(config: RunConfig) -> PruneSection:
    """What the section of ``config`` asks for."""
    section: PruneSection = RECIPES[Prune.name].options(config)
    return section


def _masked(p: Values, d: Values, t: Values) -> Found:
    """Single weights, which go while training."""
    if p.parts:
        yield "prune.parts", "are of method structured; leave them out"
    if p.method == "2:4" and p.sparsity != 0.5:
        yield "prune.sparsity", "two of four are half of the weights; leave it out"
    if p.method == "2:4" and p.schedule == "cubic":
        yield "prune.schedule", "two of four go at once; leave it out, or write magnitude"
    if key := next((key for key in COMPILE_KEYS if t[key]), None):
        yield f"training.{key}", f"has not been compared with prune; {KEEP_ONE}"
    if p.method == "wanda" and d.streaming:
        yield "data.streaming", "cannot go with wanda, which reads the first rows again; write magnitude"
    for key in ("load_best_model_at_end", "early_stopping_patience"):
        if t[key] and t[key] is not WRONG and p.method != "2:4" and p.schedule != "once":
            what = "the best weights may be of before the last round of pruning; write prune.schedule: once"
            yield f"training.{key}", what


def _structured(p: Values, m: Values, d: Values) -> Found:
    """What goes once, before training, from a saved model, by the rows that are trained on."""
    for key, value in {"schedule": None, "modules": None, "until": 0.5, "rounds": 10}.items():
        if p[key] != value:
            yield f"prune.{key}", "is for weights that become zero; with method structured, leave it out"
    if isinstance(p.parts, list) and len(set(p.parts)) != len(p.parts):
        yield "prune.parts", "must be names, all different"
    if m.config:
        what = "random weights are all alike; name a saved model, or write smaller sizes here"
        yield "model.config", f"cannot go with prune.method structured: {what}"
    if m.trust_remote_code:
        yield "model.trust_remote_code", "cannot go with prune.method structured, which knows Transformers' own models"
    if d.streaming:
        yield "data.streaming", "cannot go with prune.method structured, which reads the first rows before training"
