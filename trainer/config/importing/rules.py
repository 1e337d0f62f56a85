"""What keys of others mean where a name is not enough, and what follows from keys that are not there.

A rule is given a key, and the draft so far; its outcome is values of ours, or a text that says what is lost. Defaults
that decide what is trained are written where they differ from ours. DeepSpeed: ``auto`` is what the TrainingArguments
say; a file without ``gradient_clipping`` clips nothing, whatever ``max_grad_norm`` says; warm-up is logarithmic unless
``warmup_type`` is linear.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from trainer.config.importing.draft import LOST, Draft, Rule, Value
from trainer.config.importing.read import PATHS, Given, Source
from trainer.config.yaml_file import error_line
from trainer.errors import ConfigError

ADAM = ("adam", "adamw", "fusedadam", "cpuadam")
SMALL = ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit", "adamw_torch_4bit")
ADAMW = ("adamw_hf", "adamw_apex_fused", "paged_adamw", "paged_adamw_32bit", *SMALL)
SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine_with_min_lr"}
SCALING = {"initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1, "loss_scale": 0}
# How FSDP says that weights are sharded all the time (stage 3), or gathered from forward to backward (2).
FSDP = {"full_shard": 3, "shard_grad_op": 2, "no_shard": 0, "1": 3, "2": 2, "3": 0, "true": 3, "false": 2}
MICRO, STEPS = "training.per_device_train_batch_size", "training.gradient_accumulation_steps"
RATE, SCHEDULE, KWARGS = (f"training.{name}" for name in ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs"))
OFFLOAD = (
    "offload_optimizer_device", "offload_param_device", "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device", "zero_optimization.cpu_offload",
)  # fmt: skip
SHARDING = (
    "fsdp",
    *(f"fsdp_config.{at}{name}" for at in ("", "fsdp_") for name in ("sharding_strategy", "reshard_after_forward")),
)
LOGARITHM = "the rate rises linearly here, and there by the logarithm of the step"
STREAM = "rows are filled with whole documents that do not see each other, not cut out of one stream"
TASK = "fine-tuning and pretraining can be imported, and nothing else"
ATTENTION = {"fa2": "flash_attention_2", "fa3": "flash_attention_3", "sdpa": "sdpa", "disabled": "eager", "auto": None}
TEMPLATES = ("chatml", "zephyr", "vicuna")  # those that are known by name here
DATASET = {"path", "type", "split", "name", "field", "field_messages", "ds_type", "data_files"}  # keys that are read

DEFAULTS: dict[str, dict[str, Any]] = {
    "transformers": {"training.output_dir": "trainer_output", "training.logging_steps": 500},
    "trl": {
        "training.output_dir": "trainer_output", "training.logging_steps": 10, RATE: 2e-5,
        "training.gradient_checkpointing": True,
    },
    "llamafactory": {"training.output_dir": "saves", "training.logging_steps": 500, "data.max_length": 2048},
    "axolotl": {
        "training.output_dir": "model-out", MICRO: 1, "training.num_train_epochs": 1.0, SCHEDULE: "cosine",
        "training.warmup_steps": 0.03, "training.logging_steps": 500, "data.max_length": 512,
    },
}  # fmt: skip
LORA: dict[str, dict[str, Any]] = {
    "trl": {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05},
    "llamafactory": {"r": 8, "lora_dropout": 0.0, "target_modules": "all-linear"},
    "axolotl": {"r": 8, "lora_alpha": 8},
    "transformers": {"r": 8, "lora_alpha": 8},  # as peft has them
}


def _set(value: object) -> bool:
    return value not in (None, "auto")


def _params(given: Given, section: str) -> dict[str, Any]:
    return (given.tree.get(section) or {}).get("params") or {}


def _only(values: Collection[object], why: str) -> Rule:
    return lambda given, draft: None if given.value in values else why


def _task(given: Given, draft: Draft) -> None:
    if given.value not in ("sft", "pt", False):
        raise ConfigError(f"{given.where}: {error_line(given.key, given.value, TASK)}")


def _optim(given: Given, draft: Draft) -> dict[str, Any]:
    ours = "adamw_torch_fused" if given.value in ADAMW else given.value
    lost = "AdamW in 32 bits is written; with strategies.offload its state rests on the host"
    return {"training.optim": ours, LOST: lost if given.value in SMALL else None}


def _optimizer(given: Given, draft: Draft) -> dict[str, Any]:
    name = str(given.value).lower()
    rate = {} if "lr" in _params(given, "optimizer") else {RATE: 1e-3}
    return {"training.optim": "adamw_torch_fused" if name in ADAM else name} | rate


def _scheduler(given: Given, draft: Draft) -> dict[str, Any] | str:
    if given.value not in SCHEDULES:
        return f"there is no such schedule here; of DeepSpeed's there are {', '.join(SCHEDULES)}"
    missing: dict[str, dict[str, Any]] = {
        "warmup_num_steps": {"training.warmup_steps": 1000},
        "warmup_max_lr": {RATE: 1e-3} if given.value == "WarmupDecayLR" else {},
        "cos_min_ratio": {KWARGS: {"min_lr_rate": 1e-4}} if "Cosine" in given.value else {},
        "warmup_type": {LOST: LOGARITHM},
    }
    params = _params(given, "scheduler")
    more = {key: value for name, ours in missing.items() if name not in params for key, value in ours.items()}
    return {SCHEDULE: SCHEDULES[given.value], **more}


def _offload(given: Given, draft: Draft) -> dict[str, Any]:
    lost = {LOST: "there is no disk tier; it rests in host memory"} if given.value == "nvme" else {}
    return {"strategies.offload": {}} | lost if given.value in ("cpu", "nvme", True) else {}


def _scaling(given: Given, draft: Draft) -> str | None:
    default = SCALING[given.key[-1]]
    is_lost = draft.of("training.fp16") and given.value != default
    return f"the scale of the loss is dynamic, with DeepSpeed's default {default}" if is_lost else None


def _precision(given: Given, draft: Draft) -> dict[str, Any] | str | None:
    if given.value not in ("bf16", "fp16"):
        return None if given.value in ("no", False) else "there are bf16, fp16 and fp32 here"
    if draft.of("training.bf16") or draft.of("training.fp16"):
        return None if draft.of(f"training.{given.value}") else "the arguments say another precision; that is used"
    return {f"training.{given.value}": True}


def _ranks(given: Given, draft: Draft) -> None:
    machines = given.tree.get("num_nodes", given.tree.get("nnodes", 1))
    draft.ranks = given.value * machines if type(given.value) is type(machines) is int else None


def _sharding(given: Given, draft: Draft) -> dict[str, Any]:
    words = re.findall(r"\w+", str(given.value).lower())
    hybrid = "sharding within machines and copies between them are not here; stage 3 is written"
    return {
        "strategies.zero.stage": next((FSDP[word] for word in words if word in FSDP), 3) or None,
        "strategies.offload": {} if "offload" in words else None,
        LOST: hybrid if "hybrid" in str(words) else None,
    }


def _job(given: Given, draft: Draft) -> dict[str, Any] | str | None:
    if given.value in ("TPU", "XLA", "MEGATRON_LM"):
        return "there are ZeRO, tensor parallelism and pipelines here"
    chosen = {"fsdp_sharding_strategy", "fsdp_reshard_after_forward"} & (given.tree.get("fsdp_config") or {}).keys()
    return {"strategies.zero.stage": 3} if given.value == "FSDP" and not chosen else None


def _lora_target(given: Given, draft: Draft) -> dict[str, Any]:
    names = given.value.replace(" ", "").split(",") if isinstance(given.value, str) else given.value
    return {"model.lora.target_modules": "all-linear" if names in (["all"], ["all-linear"]) else names}


def _template(given: Given, draft: Draft) -> dict[str, Any] | str | None:
    text = given.tree.get("chat_template_jinja") or str(given.value)
    if text in TEMPLATES or "{" in text:
        return {"data.chat_template": text}
    return None if text.startswith("tokenizer_default") else "the tokenizer's own template is used"


def _share(given: Given, draft: Draft) -> dict[str, Any] | str:
    return {"data.eval_fraction": given.value} if given.value < 1 else "a number of rows; write a share of them"


def _named_file(given: Given, draft: Draft) -> str | None:
    read = [source.file.rpartition("/")[2] for source in draft.sources]
    read += [
        str(given.value).rpartition("/")[2] for source in draft.sources if source.kind in given.name
    ]  # another is given instead
    return None if str(given.value).rpartition("/")[2] in read else "there is no such file here; give it, too"


def _nothing(key: Given, draft: Draft) -> None:
    """For what is looked at when all else is known."""


SHARED: dict[str, Rule] = {
    "optimizer.type": _optimizer,
    "optimizer.params.lr": lambda key, draft: {RATE: key.value},
    "optimizer.params.betas": lambda key, draft: {
        f"training.adam_beta{n}": beta for n, beta in enumerate(key.value, 1)
    },
    "optimizer.params.adam_w_mode": _only((True,), "weight decay in the gradient is not here; AdamW is written"),
    "scheduler.type": _scheduler,
    "scheduler.params.warmup_max_lr": lambda key, draft: {RATE: key.value},
    "scheduler.params.warmup_type": _only(("linear",), LOGARITHM),
    "scheduler.params.warmup_min_lr": _only((0,), "warm-up begins at 0 here"),
    "scheduler.params.warmup_min_ratio": _only((0,), "warm-up begins at 0 here"),
    "scheduler.params.cos_min_ratio": lambda key, draft: {KWARGS: {"min_lr_rate": key.value}},
    "steps_per_print": lambda key, draft: None if draft.trains else {"training.logging_steps": key.value},
    "mixed_precision": _precision,
    "distributed_type": _job,
    **{f"fp16.{name}": _scaling for name in SCALING},
    **dict.fromkeys(OFFLOAD, _offload),
    **dict.fromkeys(("num_processes", "num_gpus", "nproc_per_node"), _ranks),
    **dict.fromkeys(SHARDING, _sharding),
    **dict.fromkeys(PATHS, _named_file),
    **dict.fromkeys(("train_batch_size", "chat_template_jinja"), _nothing),
}
ARGUMENTS: dict[str, Rule] = {
    **SHARED,
    "optim": _optim,
    "activation_checkpointing": lambda key, draft: {f"training.{key.name}": key.value or None},
    "warmup_ratio": lambda key, draft: None if key.tree.get("warmup_steps") else {"training.warmup_steps": key.value},
    "lora_target": _lora_target,
    "lora_target_modules": _lora_target,
    "block_size": lambda key, draft: {"data.max_length": key.value, "data.packing": True, LOST: STREAM},
    "validation_split_percentage": lambda key, draft: {"data.eval_fraction": key.value / 100},
    "val_size": _share,
    "dataset": lambda key, draft: {
        "data.path": key.value,
        LOST: "a name in dataset_info.json; write a file or hub name",
    },
    "dataset_text_field": lambda key, draft: None if key.value == "text" else {"data.columns": {"text": key.value}},
    "packing_strategy": _only(("bfd",), STREAM),
    "stage": _task,
    "finetuning_type": _only(("lora", "full"), "there are lora and full here; full is written"),
    **dict.fromkeys(("template", "chat_template"), _template),
    "flash_attn": lambda key, draft: {"model.attn_implementation": ATTENTION.get(key.value, key.value)},
    **dict.fromkeys(("use_peft", "dataset_train_split", "dataset_test_split"), _nothing),
}


def _datasets(given: Given, draft: Draft) -> dict[str, Any]:
    entries = [{name: value for name, value in each.items() if value not in (None, [], {})} for each in given.value]
    entry = entries[0]
    kind, files = str(entry.get("type", "")).partition(".")[0], entry.get("data_files")
    columns = {"text": entry.get("field", "text"), "messages": entry.get("field_messages", "messages")}
    ours = {
        "data.path": files[0] if isinstance(files, list) else files or entry.get("path"),
        "data.split": entry.get("split"),
        "data.name": entry.get("name"),
        "data.columns": {name: column for name, column in columns.items() if name != column},
        "data.assistant_only_loss": kind == "chat_template" and not given.tree.get("train_on_inputs"),
    }
    lost = [] if len(entries) == 1 else [f"these are {len(entries)} data sets, and the first is written"]
    if kind == "alpaca":
        lost.append("the words around instruction, input and output are others here (### Instruction ...)")
    elif kind not in ("completion", "chat_template"):
        lost.append(f"type {kind or 'not given'}: here columns decide the format, see data.columns")
    if unread := sorted(entry.keys() - DATASET):
        lost.append(f"not read of it: {', '.join(unread)}")
    return {target: value for target, value in ours.items() if value} | {LOST: "; ".join(lost)}


def _evaluates(source: Source) -> bool:
    return source.kind != "axolotl" or bool(source.tree.get("val_set_size") or source.tree.get("test_datasets"))


def _bf16(given: Given, draft: Draft) -> dict[str, Any] | None:
    is_on = given.value in (True, "auto", "full")  # auto: where the device has it, as all that train have
    return {"training.bf16": True, "model.dtype": "bfloat16"} if is_on else None


def _per_epoch(given: Given, draft: Draft) -> dict[str, Any] | None:
    what, once, epochs = f"training.{given.name[:4]}", given.value == 1, given.tree.get("num_epochs") or 1
    if not given.value or (what == "training.eval" and not _evaluates(given.source)):
        return None
    return {
        f"{what}_strategy": "epoch" if once else "steps",
        f"{what}_steps": None if once else 1 / given.value / epochs,
    }


AXOLOTL: dict[str, Rule] = {
    **ARGUMENTS,
    "datasets": _datasets,
    "adapter": _only(("lora", "qlora"), "there are LoRA and full fine-tuning here; full is written"),
    "optimizer": _optim,
    "bf16": _bf16,
    "saves_per_epoch": _per_epoch,
    "evals_per_epoch": _per_epoch,
    "eval_strategy": lambda key, draft: {"training.eval_strategy": key.value} if _evaluates(key.source) else None,
    "eval_steps": lambda key, draft: {"training.eval_steps": key.value} if _evaluates(key.source) else None,
    "batch_size": lambda key, draft: {STEPS: key.value // (key.tree.get("micro_batch_size") or 1)},
    "wandb_project": lambda key, draft: {"training.report_to": "wandb", "training.project": key.value},
    "val_set_size": _share,
    "cosine_min_lr_ratio": lambda key, draft: {KWARGS: {"min_lr_rate": key.value}, SCHEDULE: "cosine_with_min_lr"},
    "lr_scheduler": lambda key, draft: None if key.tree.get("cosine_min_lr_ratio") else {SCHEDULE: key.value},
    "gradient_checkpointing": lambda key, draft: {"training.gradient_checkpointing": key.value is not False},
    "rl": _task,
    "train_on_inputs": _nothing,
}
WINS = {"optimizer.type", "scheduler.type", "scheduler.params.warmup_max_lr"}  # DeepSpeed's, whatever arguments say
RULES = {"deepspeed": SHARED, "accelerate": SHARED, "axolotl": AXOLOTL}


def imported(sources: list[Source]) -> Draft:
    """Our config, filled from all sources."""
    draft = Draft(sources)
    for source in sources:
        draft.carry(source, RULES.get(source.kind, ARGUMENTS), WINS)
        if source.trains:
            _finish_arguments(draft, source)
    for source in sources:
        if source.kind == "deepspeed":
            _finish_deepspeed(draft, source)
    return draft


def _finish_arguments(draft: Draft, source: Source) -> None:
    tree, kind, whole = source.tree, source.kind, Given(source, (), source.tree)
    if kind == "trl" and not draft.of("training.fp16"):
        draft.default("training.bf16", True, source)
    for name in ("save", "eval") if kind == "axolotl" else ():
        if f"training.{name}_steps" not in draft.values and (name == "save" or _evaluates(source)):
            draft.default(f"training.{name}_strategy", "epoch", source)
    adapted = {
        "trl": bool(tree.get("use_peft")),
        "llamafactory": tree.get("finetuning_type", "lora") == "lora",
        "axolotl": tree.get("adapter") in ("lora", "qlora"),
        "transformers": "model.lora.r" in draft.values,
    }[kind]
    defaults = {f"model.lora.{name}": value for name, value in LORA[kind].items()} if adapted else {}
    if kind == "llamafactory" and adapted:
        defaults["model.lora.lora_alpha"] = 2 * (draft.of("model.lora.r") or 8)
        defaults |= {"model.dtype": "bfloat16"} if draft.of("training.bf16") else {}  # frozen weights, as computed in
    for target, value in (DEFAULTS[kind] | defaults).items():
        draft.default(target, value, source)
    for target in [] if adapted else [target for target in draft.values if target.startswith("model.lora.")]:
        if of := draft.values.pop(target).given:
            draft.need_not(of, "no adapters are trained")
    if (split := whole.at("dataset_train_split")).value not in (None, "train"):
        draft.put("data.split", split.value, split)
    evaluates = draft.of("training.eval_strategy") not in (None, "no") and tree.get("dataset_name")
    if evaluates and not any(draft.of(f"data.eval_{name}") for name in ("path", "split", "fraction")):
        split = whole.at("dataset_test_split", "test" if kind == "trl" else "validation")
        draft.put("data.eval_split", split.value, split)


def _finish_deepspeed(draft: Draft, source: Source) -> None:
    tree, whole = source.tree, Given(source, (), source.tree)
    if "gradient_clipping" not in tree:
        draft.put("training.max_grad_norm", 0.0, whole.at("gradient_clipping", "not there"), wins=True)
    if not draft.trains and "auto" in (tree.get("train_micro_batch_size_per_gpu"), tree.get("gradient_clipping")):
        draft.lose(whole.at("train_micro_batch_size_per_gpu"), "what the TrainingArguments say; give them, too")
    elif not draft.trains and "scheduler" not in tree:
        draft.values[SCHEDULE] = Value("constant", f"no scheduler in {source.file}")
    if _set(tree.get("train_batch_size")):
        _batch(draft, whole.at("train_batch_size"))


def _batch(draft: Draft, total: Given) -> None:
    """What DeepSpeed makes of the batch of all ranks: one of its three factors follows from the other two."""
    assumed = (8, 1) if draft.trains else (None, None)  # of TrainingArguments
    micro, steps = (draft.of(name) or default for name, default in zip((MICRO, STEPS), assumed, strict=True))
    if micro is None and draft.ranks is None:
        draft.values[MICRO] = Value(None, f"train_batch_size {total.value} / ranks / micro-batches", total)
        draft.lose(total, "that is of all ranks; write how many each has into the line that is null")
        return
    rest, left = divmod(total.value, (micro or 1) * (steps or 1) * (draft.ranks or 1))
    product = f"{micro or '?'} per device x {steps or 1} micro-batches x {draft.ranks or rest} ranks"
    if left or (rest > 1 and None not in (micro, steps, draft.ranks)):
        draft.lose(total, f"{product} is another batch")
    elif draft.ranks is None:
        draft.ranks = rest
        draft.need_not(total, product)
    elif micro is None or steps is None:
        draft.put(STEPS if micro else MICRO, rest, total)
