"""Trainers as their users make them: Hugging Face's and TRL's, with default arguments, tiny models and local text."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

STEPS = 3
Wrap = Callable[[type], type]


@cache
def words() -> list[str]:
    """Some that every Python has."""
    return sorted({word for text in list(pydoc_data.topics.topics.values())[:10] for word in text.split()})[:120]


def tokenizer() -> Any:
    """One token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *words()])}
    plain = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def sentence(start: int, length: int) -> str:
    return " ".join(words()[(start + position) % len(words())] for position in range(length))


def answers(row: int, length: int) -> dict[str, str]:
    return {"chosen": sentence(3 * row, length), "rejected": sentence(11 * row, length)}


def llama(kind: str = "LlamaForCausalLM", **more: Any) -> Any:
    """The same weights each time."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(words()) + 3, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        pad_token_id=0, eos_token_id=1, **more,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


def arguments(kind: type, folder: str, **more: Any) -> Any:
    """What has to be said: where, how long, no GPU. All else is the default."""
    return kind(
        output_dir=folder, max_steps=STEPS, use_cpu=True, report_to=[], logging_steps=1, disable_tqdm=True,
        per_device_train_batch_size=2, **{"save_strategy": "no", **more},
    )  # fmt: skip


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])


IDS = [[2 + (7 * row + place * place) % 100 for place in range(12)] for row in range(32)]
ROWS = [{"input_ids": ids, "labels": ids} for ids in IDS]


def stock(
    wrap: Wrap,
    folder: str,
    base: type | None = None,
    rows: Any = ROWS,
    optimizers: Callable[[Any], tuple[Any, Any]] = lambda model: (None, None),
    **more: Any,
) -> Any:
    """``transformers.Trainer``, or a class of its kind."""
    import transformers

    model, given = llama(), arguments(transformers.TrainingArguments, folder, **more)
    made = wrap(base or transformers.Trainer)
    return made(model, given, train_dataset=rows, eval_dataset=ROWS[:6], optimizers=optimizers(model))


def in_fp16(trainer: Any) -> Any:
    """As on a GPU: on the CPU Accelerate neither autocasts nor scales. The scale is too large at first, and grows."""
    accelerator = trainer.accelerator
    assert accelerator.mixed_precision == "fp16"
    accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu", 2.0**18, growth_interval=1)
    return trainer


def sft(wrap: Wrap, folder: str, **more: Any) -> Any:
    """TRL's SFTTrainer, which reads the head's weight itself."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_list([{"text": sentence(5 * row, 12)} for row in range(32)])
    return wrap(SFTTrainer)(
        llama(), arguments(SFTConfig, folder), train_dataset=rows, processing_class=tokenizer(), **more
    )


def dpo(wrap: Wrap, folder: str, **more: Any) -> Any:
    """TRL's DPOTrainer: a second model as reference, or, with adapters, the same one without them."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    texts = ({"prompt": sentence(5 * row, 6), **answers(row, 5)} for row in range(32))
    reference = {} if "peft_config" in more else {"ref_model": llama()}
    given = {"train_dataset": Dataset.from_list([*texts]), "processing_class": tokenizer(), **reference, **more}
    return wrap(DPOTrainer)(llama(), args=arguments(DPOConfig, folder), **given)


def reward(wrap: Wrap, folder: str) -> Any:
    """TRL's RewardTrainer."""
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    rows = Dataset.from_list([answers(row, 8) for row in range(32)])
    model = llama("LlamaForSequenceClassification", num_labels=1)
    return wrap(RewardTrainer)(
        model, args=arguments(RewardConfig, folder), train_dataset=rows, processing_class=tokenizer()
    )


def on_policy(wrap: Wrap, folder: str, kind: str, module: str, **more: Any) -> Any:
    """TRL's trainers in which the student answers prompts in each step, and a second model says how well."""
    from datasets import Dataset

    trl, words, teacher = import_module(module), tokenizer(), llama()
    words.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    with torch.no_grad():
        teacher.lm_head.weight.mul_(-3)  # not what the student would say
    texts = [sentence(5 * row, 6) for row in range(32)]
    roles = ("user", "assistant")
    rows = [{"prompt": text, "messages": [{"role": role, "content": text} for role in roles]} for text in texts]
    dataset = Dataset.from_list(rows).remove_columns("prompt" if kind == "GKD" else "messages")
    given = arguments(getattr(trl, f"{kind}Config"), folder, **more)
    return wrap(getattr(trl, f"{kind}Trainer"))(llama(), teacher, given, train_dataset=dataset, processing_class=words)


TRAINERS: Mapping[str, Callable[[Wrap, str], Any]] = {
    "Trainer": stock,
    "Trainer, accumulation": lambda wrap, folder: stock(wrap, folder, gradient_accumulation_steps=2),
    "Trainer, lion": lambda wrap, folder: stock(wrap, folder, optim="lion_32bit", weight_decay=0.1),
    # Of the fused one Accelerate does not know that it skips a step, so the schedule goes on.
    "Trainer, fp16, not fused": lambda wrap, folder: in_fp16(stock(wrap, folder, fp16=True, optim="adamw_torch")),
    "SFTTrainer": sft,
    "DPOTrainer": dpo,
    "DPOTrainer, peft_config": lambda wrap, folder: dpo(wrap, folder, peft_config=lora()),
    "RewardTrainer": reward,
}

# The student answers in each step.
ON_POLICY: Mapping[str, Callable[[Wrap, str], Any]] = {
    "DistillationTrainer": partial(on_policy, kind="Distillation", module="trl", max_completion_length=8),
    "GKDTrainer": partial(on_policy, kind="GKD", module="trl.experimental.gkd", max_new_tokens=8, lmbda=1.0),
}


def trained(make: Callable[[Wrap, str], Any], wrap: Wrap, folder: str) -> tuple[Any, dict[str, Tensor], list[Any]]:
    """The trainer after training, its weights, and losses and norms as they were logged."""
    trainer = make(wrap, folder)
    trainer.train()
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    seen = [(record["loss"], record["grad_norm"]) for record in trainer.state.log_history if "loss" in record]
    return trainer, weights, seen


def unlike(make: Callable[[Wrap, str], Any], wrap: Wrap, folder: str) -> list[str]:
    """What differs between the Trainer as it is and as ``wrap`` makes it; empty only if weights have travelled."""
    _, expected, logged = trained(make, lambda base: base, f"{folder}/plain")
    trainer, found, also_logged = trained(make, wrap, f"{folder}/stowed")
    wrong = [] if repr(logged) == repr(also_logged) and len(logged) == STEPS else [f"logged {logged} and {also_logged}"]
    wrong += sorted(expected.keys() ^ found.keys())
    wrong += [name for name in expected.keys() & found.keys() if not torch.equal(expected[name], found[name])]
    if not any(not bucket.resident for bucket in trainer.plan.layout.buckets):
        wrong.append("nothing travelled")
    large = any(name in type(trainer).__name__ for name in ("SFT", "StowedTrainer"))  # gradients, by themselves
    small = all(not norm >= trainer.args.max_grad_norm for _, norm in logged)
    if large and small and not hasattr(trainer.model, "peft_config"):
        wrong.append(f"nothing was clipped: {logged}")
    return wrong
