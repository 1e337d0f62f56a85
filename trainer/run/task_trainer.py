"""The Trainer of a task: its class, the arguments that are the task's, and what it has left of the rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers

from deepstow.trainer.data.collate import Collator
from deepstow.trainer.data.report import MANY
from deepstow.trainer.errors import DataError, warning
from deepstow.trainer.model import attention, build
from deepstow.trainer.run.trainer import Trainer
from deepstow.trainer.tasks.task import loaded, mean_over_tokens, token_losses

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from deepstow.trainer.config.sections import RunConfig
    from deepstow.trainer.tasks.task import Task


def class_for(task: Task) -> type[Trainer]:
    """The Trainer of a task, as one rank of a job."""
    base = loaded(task.trainer)
    return Trainer if base is transformers.Trainer else type("Trainer", (Trainer, base), {})


def adapters_follow(config: RunConfig) -> bool:
    """Whether the Trainer adds adapters to the model that it is given."""
    return config.model.lora is not None and config.chosen_task.adds_adapters


def options(config: RunConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The keyword arguments of the Trainer that are the task's."""
    task, packing = config.chosen_task, config.data.packing
    if not task.language:
        given = task.options(model, tokenizer, config)
        if config.model.lora is not None and config.model.adapter is None and task.adds_adapters:
            given["peft_config"] = build.lora_config(config.model.lora, task)
        return given
    # Flash attention takes packed documents as one long row instead of a batch of rows.
    flatten = packing and str(config.model.attn_implementation).startswith("flash_attention")
    least = config.data.max_length if config.training.compile_backend else 0
    documents = packing and attention.takes_documents(config)
    pad: Any = tokenizer.pad_token_id
    losses = {"compute_metrics": mean_over_tokens, "preprocess_logits_for_metrics": token_losses}
    columns = {name: make for each in config.switched_on for name, make in each.columns(config).items()}
    collate = Collator(pad, packing, flatten=flatten, least=least, documents=documents, columns=columns)
    return {"data_collator": collate, **losses}


def left_out(config: RunConfig, found: int, trainer: Trainer) -> str:
    """A line about how many of the rows that it was given a Trainer of TRL has dropped; empty if none. Raise DataError
    if all.
    """
    left = len(trainer.train_dataset)  # type: ignore[arg-type]
    line = f"data: {found - left:,} of {found:,} rows are dropped: their prompts fill data.max_length"
    cure = f"raise it from {config.data.max_length}"
    if not left:
        raise DataError(f"{line}; {cure}")
    return warning(f"{line}; {cure}") if (found - left) * MANY > found else line if left < found else ""
