"""What a key of others means where its name is not enough.

A rule is given a key, and the draft so far; its outcome is values of ours, or a text that says what is lost. What
DeepSpeed has in force whatever arguments say (``WINS``) replaces theirs.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from deepstow.trainer.config.importing.draft import LOST, Draft, Rule
from deepstow.trainer.config.importing.read import PATHS, Given, Source
from deepstow.trainer.config.yaml_file import error_line
from deepstow.trainer.errors import ConfigError

SMALL = ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit", "adamw_torch_4bit")
ADAMW = ("adam", "adamw", "fusedadam", "adamw_hf", "adamw_apex_fused", "paged_adamw", "paged_adamw_32bit", *SMALL)
SMALL_LION = ("lion_8bit", "paged_lion_8bit")
LION = ("lion", "fusedlion", "paged_lion_32bit", *SMALL_LION)
SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine_with_min_lr"}
# How FSDP says that weights are sharded all the time (stage 3), or gathered from forward to backward (2).
FSDP = {"full_shard": 3, "shard_grad_op": 2, "no_shard": 0, "1": 3, "2": 2, "3": 0, "true": 3, "false": 2}
MICRO, STEPS = "training.per_device_train_batch_size", "training.gradient_accumulation_steps"
WARMUP = "training.warmup_steps"
RATE, SCHEDULE, KWARGS = (f"training.{name}" for name in ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs"))
OFFLOAD = (
    "offload_optimizer_device", "offload_param_device", "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device", "zero_optimization.cpu_offload",
)  # fmt: skip
SHARDING = (
    "fsdp",
    *(f"fsdp_config.{at}{name}" for at in ("", "fsdp_") for name in ("sharding_strategy", "reshard_after_forward")),
)
JOBS = ("DEEPSPEED", "FSDP", "NO", "no", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU")
LOGARITHM = "the rate rises linearly here, and there by the logarithm of the step"
STREAM = "rows are filled with whole documents that do not see each other, not cut out of one stream"
TASKS = {"sft": None, "pt": "pretrain", "rm": "reward", "ipo": "dpo"} | {n: n for n in ("dpo", "orpo", "kto", "reward")}
FLASH = "flash_attention_2"
ATTENTION = {"flash": FLASH, "fa2": FLASH, "fa3": "flash_attention_3", "disabled": "eager", "auto": None}
TEMPLATES = ("chatml", "zephyr", "vicuna")  # those that are known by name here
ROLES = {"role", "content", "from", "value"}  # of messages, as they are known here
DATASET = {  # keys that are read
    "path", "type", "split", "name", "field", "field_messages", "ds_type", "data_files", "field_chosen",
    "field_rejected",
}  # fmt: skip
QUANTISED = "model.quantization_config"
EXCESS = "data.excess_length_strategy"


def _only(values: Collection[object], why: str) -> Rule:
    return lambda given, draft: None if given.value in values else why


def _task(given: Given, draft: Draft) -> dict[str, Any]:
    if given.value not in TASKS:
        what = f"cannot be imported; there are {', '.join(map(str, TASKS))}"
        raise ConfigError(f"{given.where}: {error_line(given.key, given.value, what)}")
    pretraining = {"data.packing": True, EXCESS: "split", LOST: STREAM} if given.value == "pt" else {}
    return {"task": TASKS[given.value], "training.loss_type": "ipo" if given.value == "ipo" else None} | pretraining


def _optim(given: Given, draft: Draft) -> dict[str, Any]:
    name = str(given.value).lower()
    ours = "adamw_torch_fused" if name in ADAMW else "lion_32bit" if name in LION else name
    lost = f"{ours} is written, in 32 bits; with strategies.offload its state rests on the host"
    return {"training.optim": ours, LOST: lost if name in (*SMALL, *SMALL_LION) else None}


def _scheduler(given: Given, draft: Draft) -> dict[str, Any] | str:
    why = f"there is no such schedule here; of DeepSpeed's there are {', '.join(SCHEDULES)}"
    return {SCHEDULE: SCHEDULES[given.value]} if given.value in SCHEDULES else why


def _offload(given: Given, draft: Draft) -> dict[str, Any]:
    what: Any = {} if given.value in ("cpu", "nvme", True) else None
    lost = "rests in host memory; of optimizer state and a frozen base a part may rest in strategies.offload.disk"
    return {"strategies.offload": what, LOST: lost if given.value == "nvme" else None}


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
    words = _words(str(given.value).lower())
    hybrid = "sharding within machines and copies between them are not here; stage 3 is written"
    return {
        "strategies.zero.stage": next((FSDP[word] for word in words if word in FSDP), 3) or None,
        "strategies.offload": {} if "offload" in words else None,
        LOST: hybrid if "hybrid" in str(words) else None,
    }


def _lora_target(given: Given, draft: Draft) -> dict[str, Any]:
    names = given.value.replace(" ", "").split(",") if isinstance(given.value, str) else given.value
    return {"model.lora.target_modules": "all-linear" if names in (["all"], ["all-linear"]) else names}


def _template(given: Given, draft: Draft) -> dict[str, Any] | str | None:
    if given.value in TEMPLATES or "{" in given.value:
        return {"data.chat_template": given.value}
    return None if given.value.startswith("tokenizer_default") else "the tokenizer's own template is used"


def _share(given: Given, draft: Draft) -> dict[str, Any] | str:
    return {"data.eval_fraction": given.value} if given.value < 1 else "a number of rows; write a share of them"


def _named_file(given: Given, draft: Draft) -> str | None:
    instead = any(source.kind in given.name for source in draft.sources)  # another is given
    read = (source.file.rpartition("/")[2] for source in draft.sources)
    found = instead or given.value is True or str(given.value).rpartition("/")[2] in read
    return None if found else "there is no such file here; give it, too"


def _named_datasets(given: Given, draft: Draft) -> dict[str, Any]:
    limit = {"limit": given.tree["max_samples"]} if given.tree.get("max_samples") else {}
    names = given.value.split(",") if isinstance(given.value, str) else given.value
    lost = "from dataset_info.json; write a file or a hub name instead of each name"
    if given.tree.get("stage", "sft") == "sft" and not given.tree.get("train_on_prompt"):
        lost += ", and assistant_only_loss: true with messages, of which answers alone are trained on there"
    return _mixed([{"path": name.strip()} | limit for name in names]) | {LOST: lost}


def _mixture(given: Given, draft: Draft) -> dict[str, Any]:
    """TRL's, whose columns are those that are kept."""
    ours = [
        {"path": _path(each)} | {name: each[name] for name in ("name", "split") if each.get(name)}
        for each in given.value
    ]
    unread = sorted(
        {name for each in given.value for name in each} - {"path", "name", "split", "columns", "data_files"}
    )
    return _mixed(ours) | {LOST: f"not read of it: {', '.join(unread)}" if unread else None}


def _nothing(key: Given, draft: Draft) -> None:
    """For what is looked at when all else is known."""


SHARED: dict[str, Rule] = {
    "optimizer.type": _optim,
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
    "gradient_clipping": lambda key, draft: {"training.max_grad_norm": key.value},
    "steps_per_print": lambda key, draft: None if draft.trains else {"training.logging_steps": key.value},
    "mixed_precision": _precision,
    "distributed_type": _only(JOBS, "there are ZeRO, tensor parallelism and pipelines here"),
    **dict.fromkeys(OFFLOAD, _offload),
    **dict.fromkeys(("num_processes", "num_gpus", "nproc_per_node"), _ranks),
    **dict.fromkeys(SHARDING, _sharding),
    **dict.fromkeys(PATHS, _named_file),
    "train_batch_size": _nothing,
}
ARGUMENTS: dict[str, Rule] = {
    **SHARED,
    "optim": _optim,
    "activation_checkpointing": lambda key, draft: {f"training.{key.name}": key.value or None},
    "warmup_ratio": lambda key, draft: None if key.tree.get("warmup_steps") else {WARMUP: key.value},
    "lora_target": _lora_target,
    "lora_target_modules": _lora_target,
    "block_size": lambda key, draft: {"data.max_length": key.value, "data.packing": True, LOST: STREAM},
    "validation_split_percentage": lambda key, draft: {"data.eval_fraction": key.value / 100},
    **dict.fromkeys(("val_size", "test_split_size"), _share),
    "dataset": _named_datasets,
    "datasets": _mixture,
    "dataset_text_field": lambda key, draft: None if key.value == "text" else {"data.columns": {"text": key.value}},
    "packing_strategy": _only(("bfd",), STREAM),
    "truncation_mode": _only(("keep_start",), "samples lose their ends here"),
    **dict.fromkeys(("task", "stage"), _task),
    "finetuning_type": _only(("lora", "full"), "there are lora and full here; full is written"),
    **dict.fromkeys(("template", "chat_template"), _template),
    "load_in_4bit": lambda key, draft: {f"{QUANTISED}.load_in_4bit": key.value or None},
    "load_in_8bit": lambda key, draft: {f"{QUANTISED}.load_in_8bit": key.value or None},
    "quantization_bit": lambda key, draft: {f"{QUANTISED}.load_in_{key.value}bit": True},
    "quantization_method": _only(("bnb", "bitsandbytes"), "bitsandbytes is used"),
    "double_quantization": lambda key, draft: {f"{QUANTISED}.bnb_4bit_use_double_quant": key.value},
    "model_revision": _only(("main",), "the main branch is loaded"),
    "flash_attn": lambda key, draft: {"model.attn_implementation": ATTENTION.get(key.value, key.value)},
    **dict.fromkeys(("use_peft", "dataset_train_split", "dataset_test_split", "max_samples"), _nothing),
}


def _words(value: Any) -> list[str]:
    return re.findall(r"\w+", str(value))


def _path(entry: dict[str, Any]) -> Any:
    files = entry.get("data_files")
    return files[0] if isinstance(files, list) and files else files or entry.get("path")


def _datasets(given: Given, draft: Draft) -> dict[str, Any]:
    ours: list[dict[str, Any]] = []
    lost: dict[str, None] = {}
    prefers = bool(given.tree.get("rl") or given.tree.get("reward_model"))
    for each in given.value:
        entry = {name: value for name, value in each.items() if value not in (None, [], {})}
        kind = str(entry.get("type", "")).partition(".")[0]
        columns = {"text": entry.get("field"), "prompt" if prefers else "messages": entry.get("field_messages")}
        columns |= {name: entry.get(f"field_{name}") for name in ("chosen", "rejected")}
        one = {
            "path": _path(entry),
            "name": entry.get("name"),
            "split": entry.get("split"),
            "columns": {name: column for name, column in columns.items() if column not in (None, name)},
            "assistant_only_loss": kind == "chat_template" and not (prefers or given.tree.get("train_on_inputs")),
        }
        ours.append({name: value for name, value in one.items() if value})
        usual = {name for name in entry if name.startswith("message_") and {*_words(entry[name])} <= ROLES}
        if kind == "alpaca":
            lost["the words around instruction, input and output are others here (### Instruction ...)"] = None
        elif kind not in ("completion", "pretrain", "chat_template"):
            lost[f"type {kind or 'not given'}: here columns decide the format, see data.columns"] = None
        if unread := sorted(entry.keys() - DATASET - usual):
            lost[f"not read of it: {', '.join(unread)}"] = None
    return _mixed(ours) | {LOST: "; ".join(lost)}


def _mixed(datasets: list[dict[str, Any]]) -> dict[str, Any]:
    single = {f"data.{name}": value for name, value in datasets[0].items()}
    return single if len(datasets) == 1 else {"data.datasets": datasets}


def evaluates(source: Source) -> bool:
    """Whether there is something to evaluate on; Axolotl's keys about it are written anyway."""
    return source.kind != "axolotl" or bool(source.tree.get("val_set_size") or source.tree.get("test_datasets"))


def _per_epoch(given: Given, draft: Draft) -> dict[str, Any] | None:
    what, epochs = f"training.{given.name[:4]}", given.tree.get("num_epochs") or 1
    if not given.value or (what == "training.eval" and not evaluates(given.source)):
        return None
    if given.value == 1:
        return {f"{what}_strategy": "epoch"}
    return {f"{what}_strategy": "steps", f"{what}_steps": 1 / given.value / epochs}


def _eval_steps(given: Given, draft: Draft) -> dict[str, Any] | None:
    """They are what says that it evaluates, there."""
    if not given.value or not evaluates(given.source):
        return None
    return {"training.eval_strategy": "steps", "training.eval_steps": given.value}


def _test_datasets(given: Given, draft: Draft) -> dict[str, Any] | str | None:
    paths = [_path(each) for each in given.value or ()]
    return {"data.eval_path": paths[0]} if len(paths) == 1 else "there is one data.eval_path here" if paths else None


AXOLOTL: dict[str, Rule] = {
    **ARGUMENTS,
    "datasets": _datasets,
    "pretraining_dataset": lambda key, draft: _datasets(key, draft) | {"data.streaming": True, EXCESS: "split"},
    "attention": lambda key, draft: {"model.attn_implementation": ATTENTION.get(key.value, key.value)},
    "adapter": _only(("lora", "qlora"), "there are LoRA and full fine-tuning here; full is written"),
    "optimizer": _optim,
    # auto: where the device has it, as all that train have; weights are loaded in it, too
    "bf16": lambda key, draft: {"training.bf16": True, "model.dtype": "bfloat16"} if key.value else None,
    "saves_per_epoch": _per_epoch,
    "evals_per_epoch": _per_epoch,
    "eval_strategy": lambda key, draft: {"training.eval_strategy": key.value} if evaluates(key.source) else None,
    "eval_steps": _eval_steps,
    "test_datasets": _test_datasets,
    "batch_size": lambda key, draft: {STEPS: key.value // (key.tree.get("micro_batch_size") or 1)},
    "wandb_project": lambda key, draft: {"training.report_to": "wandb", "training.project": key.value},
    "val_set_size": _share,
    "cosine_min_lr_ratio": lambda key, draft: {KWARGS: {"min_lr_rate": key.value}, SCHEDULE: "cosine_with_min_lr"},
    "lr_scheduler": lambda key, draft: None if key.tree.get("cosine_min_lr_ratio") else {SCHEDULE: key.value},
    "gradient_checkpointing": lambda key, draft: {"training.gradient_checkpointing": key.value is not False},
    "chat_template_jinja": _template,
    "rl": _task,
    "reward_model": lambda key, draft: {"task": "reward" if key.value else None},
    "train_on_inputs": _nothing,
}
# DeepSpeed's, whatever arguments say.
WINS = {"optimizer.type", "scheduler.type", "scheduler.params.warmup_max_lr", "gradient_clipping"}
RULES = {"deepspeed": SHARED, "accelerate": SHARED, "axolotl": AXOLOTL}
