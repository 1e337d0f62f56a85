"""What a recipe is: a section of the config, and what a run does if it is there. Those of the tree are in
``trainer/recipes``; nothing else names one of them. The trainer asks each one that a config switches on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from deepstow.strategies.core.compose import requirements_of
from deepstow.strategies.core.protocol import Refusal, Requirement
from deepstow.strategies.core.resume import Rule
from deepstow.trainer.config.arguments import Section
from deepstow.trainer.registry import Registry
from deepstow.trainer.values import Found, Values

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, TrainerCallback

    from deepstow.strategies.core.facts import Held, RunFacts
    from deepstow.strategies.core.plan import Plan
    from deepstow.trainer.config.sections import RunConfig
    from deepstow.trainer.machine.probe import Machine
    from deepstow.trainer.planning.facts import ModelCount
    from deepstow.trainer.run.session import Session

    Column = Callable[[Sequence[Mapping[str, Any]], Tensor], Tensor]  # of rows and their labels [rows, length]


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


class Files(NamedTuple):
    """What a recipe of the tree reads besides data and model; a run that is resumed compares it with the checkpoint's.

    Attributes:
        key: dotted, that says where it is.
        fact: of the data in a manifest, which has its hash.
        change: that allows another one, in ``training.allow_change``.
        what: a refusal says of another one.
    """

    key: str
    fact: str
    change: str
    what: str


class Recipe:
    """What else a run does with its model. Hooks stand in the order in which a run asks for them.

    Attributes:
        name: of its section; a recipe from outside is given the one that it is used by, in ``recipes``.
        section: the keys of it.
        resume: what a resumed run may do with keys that say nothing of it themselves; of a recipe from outside any
            change is one of the loss.
        language: it takes tasks alone that predict the next token.
        merges: it takes models that have their adapters in their weights.
        masks: it has been compared with ``model.attention_mask``.
        own_loss: forward computes the loss, in evaluations as well.
        not_layerwise: why micro-batches cannot take turns in each layer; empty if they can.
        files: that are compared when a run is resumed.
    """

    name: str
    section: type[Section] = Section
    resume: Rule = "loss"
    language = False
    merges = False
    masks = False
    own_loss = False
    not_layerwise = ""
    files: Files | None = None

    def options(self, config: RunConfig) -> Any:
        """The section of ``config``, which has one."""
        section = config.recipes.get(self.name)
        return getattr(config, self.name) if section is None else self.section.model_validate(section)

    # --- the config ---

    def conflicts(self, sections: Mapping[str, Values]) -> Found:
        """Keys of its section and of others that cannot go together, each with what would work; ``conflicts.py``."""
        yield from ()

    def refusals(self, config: RunConfig, world_size: int, *, installed: bool) -> Iterator[Refusal]:
        """What cannot work, known before data is read; with ``installed`` also packages that are not here."""
        yield from ()

    def refuse_before_rows(self, config: RunConfig) -> None:
        """Raise ConfigError for what small files say; on the ranks that read the data, before they do."""

    # --- a run that is resumed ---

    def changes(self, key: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
        """Whether a run that is resumed with another value of ``key`` would give another result; its sections. It is
        asked of recipes of the tree.
        """
        return True

    def is_moved(self, old: Any, new: Any) -> bool:
        """Whether two values of the key of ``files`` may name the same, in two places."""
        return isinstance(old, str) and isinstance(new, str)

    def hash_of_files(self, config: RunConfig) -> str:
        """The hash of ``files`` as they are now."""
        raise NotImplementedError

    def reads_weights_again(self, config: RunConfig) -> bool:
        """Whether the bits of a run that is resumed depend on the weights that training began with."""
        return False

    # --- the plan ---

    def model_config(self, built: PretrainedConfig, config: RunConfig) -> PretrainedConfig:
        """The configuration of the model that is trained, of the one that was ``built``. Raise ConfigError."""
        return built

    def not_timed(self, config: RunConfig) -> str:
        """Why blocks that are timed before a run are not those of the run; empty if they are."""
        return ""

    def counted_by(self, config: RunConfig) -> Any:
        """What of its section decides how the model is counted, as plain values."""
        return None

    def counted(self, model: Any, config: RunConfig) -> Any:
        """``model``, which has no storage, with forward as training has it, so that its memory is in the plan."""
        return model

    def counted_loss(self, model: Any, config: RunConfig, shape: tuple[int, int]) -> Mapping[str, Any]:
        """Give ``model``, which has no storage, the loss of training. Returns what forward takes besides, of rows and
        tokens of this ``shape``.
        """
        return {}

    def memory(self, config: RunConfig, model: ModelCount, run: RunFacts) -> Iterable[Held]:
        """What it holds besides, in a ``run`` of this ``model``."""
        return ()

    def plan_lines(self, config: RunConfig, plan: Plan, machine: Machine) -> Iterable[str]:
        """Lines above the plan: what it takes before training. Raise ConfigError: there is no room."""
        return ()

    def refuse(self, config: RunConfig) -> None:
        """Raise ConfigError for what cannot be made of the model, before a weight is loaded."""

    # --- the run ---

    def announce(self, session: Session) -> Any:
        """Say what will be done before training, once the plan was shown; a collective. ``session.recipes`` has what
        this returns, by its name. Raise ConfigError: it cannot be done.
        """
        return None

    def before_training(self, session: Session) -> Session:
        """Do it; a collective. Returns the run with other rows (``prepared``), or a model that is loaded in place of
        the one that the config names (``source``). Hugging Face knows of no ZeRO stage yet, and splits no model.
        """
        return session

    def apply(self, model: Any, config: RunConfig) -> None:
        """Change the model that was built, before strategies do. Names of parameters stay."""

    def set_loss(self, model: Any, session: Session) -> None:
        """Give ``model`` the loss of training, after strategies."""

    def columns(self, config: RunConfig) -> Mapping[str, Column]:
        """What makes tensors of the columns of its own that rows may have; forward is given them by these names."""
        return {}

    def callbacks(self, session: Session, trainer: Any) -> Sequence[TrainerCallback]:
        """Those that see its ``trainer`` after all of DeepStow's."""
        return ()

    def recorded(self, session: Session) -> Mapping[str, str]:
        """The hash of ``files``, by its fact, for checkpoints; of recipes of the tree."""
        return {}

    # --- the exports ---

    def after_training(self, model: Any, config: RunConfig) -> None:
        """Change the model back that was trained, before it is exported."""

    def sentence(self, session: Session) -> str:
        """What the exact model's card says of it."""
        return ""

    def results(self, history: Sequence[Mapping[str, Any]]) -> Iterable[str]:
        """What the card says of what was logged, a sentence each."""
        return ()

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
        cure = "DeepSpeed's engine has the weights; write strategies.offload, or leave strategies.zero out"
        yield Refusal(key, value, cure)
