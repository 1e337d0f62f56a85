"""What a run does with a teacher: checked before anything is loaded, asked before the student exists.

A checkpoint names the contents of the teacher. A run that is resumed with another one, under the same name, would learn
from two; it is refused (``inputs.py``) unless ``training.allow_change`` has ``loss``, as other keys of ``distill``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deepstow.strategies.engine.memory.accelerator import device_of
from deepstow.trainer.data import prepare, teacher
from deepstow.trainer.data.collate import check_packing
from deepstow.trainer.data.teacher import Lesson
from deepstow.trainer.distributed.agreement import DAY_S, agreement
from deepstow.trainer.errors import write_line, write_nothing
from deepstow.trainer.model.structured import config_of
from deepstow.trainer.model.student import width_of
from deepstow.trainer.planning.from_config import budget_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from deepstow.strategies.core.plan import Plan
    from deepstow.trainer.config.sections import RunConfig
    from deepstow.trainer.data.prepare import Prepared
    from deepstow.trainer.distributed.ranks import Ranks
    from deepstow.trainer.machine.probe import Machine


def refuse(config: RunConfig) -> None:
    """Raise ConfigError if a teacher has no configuration, or hidden states of another width than the student."""
    if config.distill is None:
        return
    configs, own = teacher.configs_of(config), width_of(config_of(config).get_text_config())
    for name, found in configs.items():
        if config.distill.on != "logits" and (width := width_of(found.get_text_config())) != own:
            why = f"hidden states of {name} have {width} numbers, and the student's {own}"
            what = "a projection between them would be a trained parameter that no export has a place for; write logits"
            raise config.error("distill.on", config.distill.on, f"{why}; {what}")


def check(
    config: RunConfig, ranks: Ranks, tokenizer: PreTrainedTokenizerBase, prepared: Prepared, plan: Plan
) -> Lesson | None:
    """What the teacher will be asked; None without one. A collective. ConfigError: it cannot be this student's, or has
    no room.
    """
    if config.distill is None:
        return None
    student = config_of(config).get_text_config()
    budget = budget_of(config, plan)
    with agreement(ranks, DAY_S) as together:
        lesson = together.on_first(
            ranks.rank,
            lambda: teacher.check(config, tokenizer, prepared, student, budget, _home(config), write_line),
        )
    for section in teacher.sections_of(config).values():
        check_packing(config.model_copy(update={"model": section}))
    return lesson


def priced(config: RunConfig, plan: Plan, machine: Machine) -> list[str]:
    """What the teachers take, for the plan. ConfigError: one has no room, or cannot be described."""
    refuse(config)
    return [] if config.distill is None else teacher.priced(config, budget_of(config, plan), machine)


def answered(
    config: RunConfig,
    lesson: Lesson,
    tokenizer: PreTrainedTokenizerBase,
    prepared: Prepared,
    *,
    compares: bool,
) -> Prepared:
    """The rows with the teacher's answers, asked by the first rank of a machine and opened by all. ``compares``: those
    that are found, with their manifest.
    """
    where = device_of("cpu" if config.training.use_cpu else None)
    say = write_line if compares else write_nothing
    return teacher.answered(config, lesson, tokenizer, prepared, _home(config), where, say, compares=compares)


def _home(config: RunConfig) -> Path:
    """Where answers are: beside the rows."""
    return prepare.cache(Path(config.training.output_dir) / "data")
