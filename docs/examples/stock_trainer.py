"""Hugging Face's own Trainer, unchanged, with a stowed model: give it the optimizer, and leave clipping to the plan.

python docs/examples/stock_trainer.py
"""

import pydoc_data.topics
import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, get_linear_schedule_with_warmup

from strategies.runtime import AdamW, stow
from trainer.memory import plan_for

ROWS, TOKENS, STEPS, ACCUMULATION = 4, 64, 12, 2


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


def arguments(folder: str, max_grad_norm: float, **more: Any) -> TrainingArguments:
    """What both runs of the comparison share."""
    return TrainingArguments(
        output_dir=folder, max_steps=STEPS, per_device_train_batch_size=ROWS, learning_rate=3e-3, weight_decay=0.0,
        gradient_accumulation_steps=ACCUMULATION, max_grad_norm=max_grad_norm, logging_steps=4, save_strategy="no",
        report_to=[], use_cpu=not torch.cuda.is_available(), seed=1, **more,
    )  # fmt: skip


def main(folder: str | None = None) -> tuple[LlamaForCausalLM, list[dict[str, float]]]:
    """Train; the model, plain again, and the log."""
    model = build()
    plan = plan_for(
        model, gpu_memory="10MiB", batch=(ROWS, TOKENS), accumulation=ACCUMULATION, max_grad_norm=1.0
    )  # the plan clips, so max_grad_norm is 0 below
    optimizer = stow(model, plan, rule=AdamW(lr=3e-3, weight_decay=0.0))
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, STEPS)
    print(*optimizer.engine.arena.owners(), sep="\n")
    with tempfile.TemporaryDirectory() as spare:
        trainer = Trainer(
            model,
            arguments(folder or spare, max_grad_norm=0.0),
            train_dataset=rows(),
            optimizers=(optimizer, scheduler),
        )
        trainer.train()
        trainer.save_model(f"{folder or spare}/model")
    optimizer.close()
    return model, trainer.state.log_history


if __name__ == "__main__":
    main()
