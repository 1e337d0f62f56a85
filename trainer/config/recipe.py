"""What a recipe is: a section of the config, and what a run does if it is there. Those of the tree are in
``trainer/recipes``; nothing else names one of them. The trainer asks each one that a config switches on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from deepstow.strategies.core.compose import requirements_of
from deepstow.strategies.core.protocol import Refusal, Requirement
from deepstow.strategies.core.resume import Rule
from deepstow.trainer.config.arguments import Section
from deepstow.trainer.registry import Registry
from deepstow.trainer.values import Found, Values

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig


class Exact(NamedTuple):
    """The exact export, of which others are made.

    Attributes:
        folder: as ``from_pretrained`` opens it.
        tokenizer: the run's.
        rows: that are held out; None: there are none.
        budget: bytes of the device that may be used.
    """

    folder: Path
    tokenizer: Any
    rows: Any
    budget: int


class Writer:
    """Makes exports of the ``exact`` one, on the first rank, once training has left the device."""

    def write(self, name: str, draft: Path) -> Mapping[str, Any]:
        """Fill the empty folder ``draft``. Returns what its manifest says besides what decides it. Raise ExportError if
        what was made is not what it should be, once it is opened again.
        """
        raise NotImplementedError

    def wrote(self, name: str, folder: Path) -> None:
        """The export is in ``folder``."""

    def end(self) -> None:
        """All exports of all recipes are made."""


class Recipe:
    """What else a run does with its model.

    Attributes:
        name: of its section; a recipe from outside is given the one that it is used by, in ``recipes``.
        section: the keys of it.
        resume: what a resumed run may do with keys that say nothing of it themselves; of a recipe from outside any
            change is one of the loss.
        language: it takes tasks alone that predict the next token.
        merges: it takes models that have their adapters in their weights.
        masks: it has been compared with ``model.attention_mask``.
    """

    name: str
    section: type[Section] = Section
    resume: Rule = "loss"
    language = False
    merges = False
    masks = False

    def options(self, config: RunConfig) -> Any:
        """The section of ``config``, which has one."""
        own = config.recipes.get(self.name)
        return getattr(config, self.name) if own is None else self.section.model_validate(own)

    def conflicts(self, sections: Mapping[str, Values]) -> Found:
        """Keys of its section and of others that cannot go together, each with what would work; ``conflicts.py``."""
        yield from ()

    def refusals(self, config: RunConfig, world_size: int, *, installed: bool) -> Iterator[Refusal]:
        """What cannot work, known before data is read; with ``installed`` also packages that are not here."""
        yield from ()

    def refuse(self, config: RunConfig) -> None:
        """Raise ConfigError for what cannot be made of the model, before a weight is loaded."""

    def not_timed(self, config: RunConfig) -> str:
        """Why blocks that are timed before a run are not those of the run; empty if they are."""
        return ""

    def counted_by(self, config: RunConfig) -> Any:
        """What of its section decides what ``counted`` changes, as plain values."""
        return None

    def counted(self, model: Any, config: RunConfig) -> Any:
        """``model``, which has no storage, with forward as training has it, so that its memory is in the plan."""
        return model

    def apply(self, model: Any, config: RunConfig) -> None:
        """Change the model that was built, before strategies do. Names of parameters stay."""

    def after_training(self, model: Any, config: RunConfig) -> None:
        """Change the model back that was trained, before it is exported."""

    def sentence(self, config: RunConfig) -> str:
        """What the exact model's card says of it."""
        return ""

    def changes(self, key: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
        """Whether a run that is resumed with another value of ``key`` would give another result; its sections. It is
        asked of recipes of the tree.
        """
        return True

    def exports(self, config: RunConfig) -> Mapping[str, Mapping[str, Any]]:
        """What it makes of the exact export: each in ``export-NAME``, made again if what decides it is another."""
        return {}

    def writer(self, config: RunConfig, exact: Exact) -> Writer:
        """What makes ``exports``."""
        raise NotImplementedError


RECIPES: Registry[Recipe] = Registry(Recipe, "deepstow.recipes", "deepstow.trainer.recipes")


def whole_weights(config: RunConfig, world_size: int, key: str, value: object) -> Iterator[Refusal]:
    """For what torch or the engine does where all of each weight is on one rank."""
    if world_size > 1:
        yield Refusal(key, value, f"is for one rank so far, and there are {world_size}; leave it out")
    elif Requirement.DEEPSPEED in requirements_of(config.strategies):
        what = "DeepSpeed's engine has the weights; write strategies.offload, or leave strategies.zero out"
        yield Refusal(key, value, what)
