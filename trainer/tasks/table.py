"""The tasks by name."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.tasks.classification import Classification
from trainer.tasks.preference import Dpo, Kto, Orpo, Reward
from trainer.tasks.seq2seq import Seq2Seq
from trainer.tasks.task import Pretrain, Task

LANGUAGE = Task()
TASKS: Mapping[str, Task] = {
    task.name: task for task in (LANGUAGE, Pretrain(), Dpo(), Orpo(), Kto(), Reward(), Classification(), Seq2Seq())
}
