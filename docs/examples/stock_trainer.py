"""Hugging Face's own Trainer with the memory engine: one function around the class, and everything else as ever.

python -m docs.examples.stock_trainer
"""

import pydoc_data.topics
import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from deepstow import stowed

ROWS, TOKENS = 4, 64  # of a micro-batch
STEPS = 12
ACCUMULATION = 2


def rows() -> list[dict[str, Any]]:
    """The help texts that come with Python, by bytes."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    pieces = [list(text[start : start + TOKENS]) for start in range(0, 400 * TOKENS, TOKENS)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def build() -> LlamaForCausalLM:
    """A small Llama with the same weights each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=172, num_hidden_layers=6, num_attention_heads=4
    )
    return LlamaForCausalLM(config)


def arguments(folder: str) -> TrainingArguments:
    """A Trainer's usual ones; gradients are clipped to 1.0, which is the default."""
    return TrainingArguments(
        output_dir=folder, max_steps=STEPS, per_device_train_batch_size=ROWS, learning_rate=3e-3,
        gradient_accumulation_steps=ACCUMULATION, logging_steps=4, save_strategy="no",
        report_to=[], use_cpu=not torch.cuda.is_available(), seed=1,
    )  # fmt: skip


def main(folder: str | None = None) -> tuple[LlamaForCausalLM, list[dict[str, float]]]:
    """Train in 10 MiB of device memory; the model, plain again, and the log."""
    with tempfile.TemporaryDirectory() as spare:
        stows = stowed(Trainer, gpu_memory="10MiB", batch=(ROWS, TOKENS))
        trainer = stows(build(), arguments(folder or spare), train_dataset=rows())
        trainer.train()
        trainer.save_model(f"{folder or spare}/model")
    trainer.optimizer.close()
    return trainer.model, trainer.state.log_history


if __name__ == "__main__":
    main()
