"""The tasks by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from deepstow.trainer.tasks.classification import Classification
from deepstow.trainer.tasks.embedding import Embedding
from deepstow.trainer.tasks.preference import Dpo, Kto, Orpo, Reward
from deepstow.trainer.tasks.seq2seq import Seq2Seq
from deepstow.trainer.tasks.task import Pretrain, Task

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig

LANGUAGE = Task()
TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (LANGUAGE, Pretrain(), Dpo(), Orpo(), Kto(), Reward(), Classification(), Seq2Seq(), Embedding())
}


def only_language(config: RunConfig, what: str) -> None:
    """Raise ConfigError unless the task of ``config`` predicts the next token, as ``what`` needs."""
    if not TASKS[config.task].language:
        raise config.error("task", config.task, f"{what} is for sft and pretrain only")
