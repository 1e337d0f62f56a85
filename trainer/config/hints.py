"""Hints for unknown keys.

Problem. Most configs are rewritten from another framework's, and "unknown key" alone leaves the user searching.

The first of these that matches is used: for a name of another framework, our name for it; for one of our own keys in
the wrong section, its full name; for anything else, the most similar key, if one is similar.

Refused: foreign names as aliases, since a file could then give one option two values under two names.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from pydantic import BaseModel

from strategies.core.registry import available
from trainer.config.arguments import REFUSED
from trainer.config.sections import SECTIONS, RunConfig
from trainer.config.wording import inner_model
from trainer.config.yaml_file import Key
from trainer.errors import nearest

# Their key -> our key, with a remark after ";" if the meaning differs. An answer that does not start with one of our
# sections is only a remark: there is no such key here. Keys are looked up with and without their section.
_LENGTH, _BATCH = "data.max_length", "training.per_device_train_batch_size"
_RATE, _CLIP = "training.learning_rate", "training.max_grad_norm"
_ACCUMULATE, _NAME = "training.gradient_accumulation_steps", "model.name_or_path"
_RECOMPUTE, _KEEP = "training.gradient_checkpointing", "training.save_total_limit"
_ACTIVATIONS = "strategies.recompute.activation_offloading"
_OFFLOAD, _ANSWERS = "strategies.offload", "data.completion_only_loss; with the opposite meaning"
_PROCESSES = "the launcher decides that: deepspeed --num_gpus=N launch/train.py"
_PRODUCT = "that follows from per_device_train_batch_size, gradient_accumulation_steps and the number of devices"
_PLANNED = "the plan decides that; remove the line"
_ENGINE = "DeepSpeed is the engine here; write the section strategies"

FOREIGN: Mapping[str, Mapping[str, str]] = {
    "Axolotl": {
        "base_model": _NAME,
        "base_model_config": "model.config",
        "micro_batch_size": _BATCH,
        "eval_batch_size": "training.per_device_eval_batch_size",
        "sequence_len": _LENGTH,
        "sample_packing": "data.packing",
        "num_epochs": "training.num_train_epochs",
        "lr_scheduler": "training.lr_scheduler_type",
        "val_set_size": "data.eval_fraction",
        "datasets": "data.path",
        "dataset_prepared_path": "tokenised data is cached by Hugging Face datasets; remove the line",
        "train_on_inputs": _ANSWERS,
        "roles_to_train": "data.assistant_only_loss",
        "chat_template": "data.chat_template_path; a file here",
        "flash_attention": "model.attn_implementation; write flash_attention_2",
        "sdp_attention": "model.attn_implementation; write sdpa",
        "adapter": "model.lora",
        "lora_r": "model.lora.r",
        "lora_target_linear": "model.lora.target_modules; write all-linear",
        "lora_modules_to_save": "model.lora.modules_to_save",
        "auto_resume_from_checkpoints": "training.resume_from_checkpoint; write auto",
        "saves_per_epoch": "training.save_steps; or training.save_strategy = epoch",
        "evals_per_epoch": "training.eval_steps; or training.eval_strategy = epoch",
        "wandb_name": "training.run_name",
        "wandb_project": "training.project; with training.report_to = wandb",
        "use_tensorboard": "training.report_to; write tensorboard",
        "use_wandb": "training.report_to; write wandb",
        "tokenizer_config": "model.tokenizer",
        "activation_offloading": _ACTIVATIONS,
    },
    "LLaMA-Factory": {
        "cutoff_len": _LENGTH,
        "dataset": "data.path",
        "dataset_dir": "data.path",
        "val_size": "data.eval_fraction",
        "neat_packing": "data.packing",
        "train_on_prompt": _ANSWERS,
        "flash_attn": "model.attn_implementation",
        "enable_liger_kernel": "training.use_liger_kernel",
        "disable_gradient_checkpointing": f"{_RECOMPUTE}; with the opposite meaning",
        "preprocessing_num_workers": "data.num_proc",
        "finetuning_type": "model.lora",
        "lora_rank": "model.lora.r",
        "lora_target": "model.lora.target_modules",
        "additional_target": "model.lora.modules_to_save",
        "pure_bf16": "model.dtype; write bfloat16",
        "template": "data.chat_template_path; a file here",
    },
    "TRL": {
        "model_name_or_path": _NAME,
        "dataset_name": "data.path",
        "dataset_config": "data.name",
        "dataset_train_split": "data.split",
        "dataset_test_split": "data.eval_split",
        "dataset_num_proc": "data.num_proc",
        "max_seq_length": _LENGTH,
        "use_peft": "model.lora",
    },
    "older Hugging Face": {
        "warmup_ratio": "training.warmup_steps; a value below 1 is a share of all steps",
        "evaluation_strategy": "training.eval_strategy",
        "per_gpu_train_batch_size": _BATCH,
        "torch_dtype": "model.dtype",
        "group_by_length": "training.train_sampling_strategy; write group_by_length",
        "overwrite_output_dir": "training.overwrite",
        "no_cuda": "training.use_cpu",
        "logging_dir": "training.output_dir; logs are kept in it",
        "hub_model_name": "training.hub_model_id",
        "save_safetensors": "weights are always saved as safetensors; remove the line",
        "half_precision_backend": "there is one only; remove the line",
    },
    "MS-Swift": {"attn_impl": "model.attn_implementation", "tuner_type": "model.lora"},
    "torchtune": {
        "batch_size": _BATCH,
        "epochs": "training.num_train_epochs",
        "max_steps_per_epoch": "training.max_steps; counted over the whole run",
        "optimizer._component_": "training.optim",
        "lr_scheduler._component_": "training.lr_scheduler_type",
        "lr_scheduler.num_warmup_steps": "training.warmup_steps",
        "checkpointer.checkpoint_dir": _NAME,
        "checkpointer.output_dir": "training.output_dir",
        "tokenizer.path": "model.tokenizer",
        "tokenizer.max_seq_len": _LENGTH,
        "dataset.packed": "data.packing",
        "dataset.source": "data.path",
        "dataset.train_on_input": _ANSWERS,
        "train_on_input": _ANSWERS,
        "clip_grad_norm": _CLIP,
        "compile": "training.torch_compile",
        "enable_activation_checkpointing": _RECOMPUTE,
        "enable_activation_offloading": _ACTIVATIONS,
        "keep_last_n_checkpoints": _KEEP,
        "metric_logger": "training.report_to",
        "log_every_n_steps": "training.logging_steps",
        "custom_sharded_layers": _ENGINE,
    },
    "litgpt": {
        "checkpoint_dir": _NAME,
        "out_dir": "training.output_dir",
        "train.global_batch_size": _PRODUCT,
        "train.micro_batch_size": _BATCH,
        "train.max_seq_length": _LENGTH,
        "train.epochs": "training.num_train_epochs",
        "train.max_steps": "training.max_steps",
        "train.max_norm": _CLIP,
        "train.lr_warmup_steps": "training.warmup_steps",
        "train.save_interval": "training.save_steps",
        "train.log_interval": "training.logging_steps",
        "eval.interval": "training.eval_steps",
        "data.mask_prompt": "data.completion_only_loss",
        "data.val_split_fraction": "data.eval_fraction",
        "logger_name": "training.report_to",
    },
    "torchtitan": {
        "training.steps": "training.max_steps",
        "training.local_batch_size": _BATCH,
        "training.global_batch_size": _PRODUCT,
        "training.seq_len": _LENGTH,
        "training.max_norm": _CLIP,
        "training.dataset": "data.path",
        "training.dataset_path": "data.path",
        "training.mixed_precision_param": "training.bf16",
        "optimizer.name": "training.optim",
        "optimizer.lr": _RATE,
        "lr_scheduler.warmup_steps": "training.warmup_steps",
        "checkpoint.folder": "training.output_dir",
        "checkpoint.interval": "training.save_steps",
        "checkpoint.keep_latest_k": _KEEP,
        "activation_checkpoint.mode": "strategies.recompute",
        "parallelism.data_parallel_shard_degree": "strategies.zero.stage",
        "compile.enable": "training.torch_compile",
        "metrics.log_freq": "training.logging_steps",
    },
    "DeepSpeed": {
        "train_micro_batch_size_per_gpu": _BATCH,
        "train_batch_size": _PRODUCT,
        "gradient_clipping": _CLIP,
        "zero_optimization": "strategies.zero",
        "zero_optimization.stage": "strategies.zero.stage",
        "zero_optimization.offload_optimizer.device": _OFFLOAD,
        "zero_optimization.offload_param.device": _OFFLOAD,
        "offload_optimizer": _OFFLOAD,
        "offload_param": _OFFLOAD,
        "zero_optimization.overlap_comm": _PLANNED,
        "zero_optimization.reduce_bucket_size": _PLANNED,
        "zero_optimization.allgather_bucket_size": _PLANNED,
        "zero_optimization.contiguous_gradients": _PLANNED,
        "zero_optimization.memory_efficient_linear": _PLANNED,
        "bf16.enabled": "training.bf16",
        "fp16.enabled": "training.fp16",
        "optimizer.type": "training.optim",
        "optimizer.params.lr": _RATE,
        "optimizer.params.betas": "training.adam_beta1; and training.adam_beta2",
        "optimizer.params.eps": "training.adam_epsilon",
        "optimizer.params.weight_decay": "training.weight_decay",
        "scheduler.type": "training.lr_scheduler_type",
        "scheduler.params.warmup_num_steps": "training.warmup_steps",
        "scheduler.params.total_num_steps": "training.max_steps",
        "steps_per_print": "training.logging_steps",
        "tensorboard.enabled": "training.report_to; write tensorboard",
        "wandb.enabled": "training.report_to; write wandb",
        "activation_checkpointing.partition_activations": "strategies.recompute",
    },
    "Lightning": {
        "accumulate_grad_batches": _ACCUMULATE,
        "gradient_clip_val": _CLIP,
        "max_epochs": "training.num_train_epochs",
        "precision": "training.bf16; or training.fp16",
        "val_check_interval": "training.eval_steps",
        "check_val_every_n_epoch": "training.eval_strategy; write epoch",
        "default_root_dir": "training.output_dir",
        "seed_everything": "training.seed",
        "deterministic": "training.full_determinism",
        "ckpt_path": "training.resume_from_checkpoint",
        "save_top_k": _KEEP,
        "devices": _PROCESSES,
        "num_nodes": _PROCESSES,
        "accelerator": "training.use_cpu; an accelerator is used if there is one",
        "strategy": _ENGINE,
    },
    "PyTorch": {
        "lr": _RATE,
        "optimizer": "training.optim",
        "scheduler": "training.lr_scheduler_type",
        "betas": "training.adam_beta1; and training.adam_beta2",
        "eps": "training.adam_epsilon",
        "num_workers": "training.dataloader_num_workers",
        "grad_clip": _CLIP,
    },
    "YAML 1.1": {"<<": "merge keys are not read; write extends: base.yaml at the top of the file"},
}


@cache
def known_keys() -> tuple[str, ...]:
    """All our keys, dotted. Of strategies only the names, since their files are imported on demand."""

    def below(model: type[BaseModel], at: str) -> Iterable[str]:
        for name, field in model.model_fields.items():
            yield f"{at}.{name}"
            if inner := inner_model(field.annotation):
                yield from below(inner, f"{at}.{name}")

    keys = [key for name, model in SECTIONS.items() for key in (name, *below(model, name))]
    return (*keys, "strategies", *(f"strategies.{name}" for name in available()))


def foreign(key: Key) -> str | None:
    """The hint for ``key`` if it is a name of another framework."""
    names = [".".join(key)] + ([".".join(key[1:])] if key[0] in RunConfig.model_fields else [])
    for name in names:
        for whose, table in FOREIGN.items():
            if name in table:
                answer, _, remark = table[name].partition("; ")
                if answer.split(".")[0] not in RunConfig.model_fields:
                    return f"that is {whose}'s name; {table[name]}"
                return f"that is {whose}'s name, write '{answer}'" + (f" ({remark})" if remark else "")
    return None


def unknown_key(key: Key, siblings: Sequence[str]) -> str:
    """The error message for ``key``, whose section has the keys ``siblings``."""
    if words := foreign(key):
        return f"unknown key; {words}"
    if key[-1] in REFUSED:
        return f"unknown key; {REFUSED[key[-1]]}"
    others = [known for known in known_keys() if known != ".".join(key)]
    for ending in (".".join(key), key[-1]):
        if elsewhere := next((known for known in others if known.endswith(f".{ending}")), None):
            return f"unknown key; write '{elsewhere}'"
    if hint := nearest(key[-1], siblings):
        return f"unknown key{hint}"
    leaves = {known.rpartition(".")[2]: known for known in reversed(known_keys())}
    if near := difflib.get_close_matches(key[-1], leaves, n=1, cutoff=0.75):
        return f"unknown key; did you mean '{leaves[near[0]]}'?"
    known = f"known here: {', '.join(siblings)}" if len(siblings) <= 20 else "see docs/config.md"
    return f"unknown key; {known}"
