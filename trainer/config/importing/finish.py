"""From all sources to a draft, and what follows from keys that are not there.

Defaults that decide what is trained are written where they differ from ours. With a ds_config, DeepSpeed's hold:
nothing is clipped without ``gradient_clipping``, whatever ``max_grad_norm`` says.
"""

from __future__ import annotations

from typing import Any

from deepstow.trainer.config.importing import rules
from deepstow.trainer.config.importing.datasets import EXCESS
from deepstow.trainer.config.importing.draft import Draft, Value
from deepstow.trainer.config.importing.read import Given, Source
from deepstow.trainer.config.importing.rules import MICRO, QUANTISED, RATE, SCHEDULE, STEPS, WARMUP

OUT = "training.output_dir"
DEEPSPEED: dict[str, dict[str, Any]] = {  # by section of a ds_config, and by schedule
    "optimizer": {"lr": 1e-3},
    "scheduler": {"warmup_num_steps": 1000, "warmup_type": "log"},
    "WarmupDecayLR": {"warmup_max_lr": 1e-3},
    "WarmupCosineLR": {"cos_min_ratio": 1e-4},
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "transformers": {OUT: "trainer_output", "training.logging_steps": 500},
    "trl": {OUT: "trainer_output", RATE: 2e-5, "training.gradient_checkpointing": True, EXCESS: "truncate"},
    "llamafactory": {
        OUT: "saves", "training.logging_steps": 500, "data.max_length": 2048, EXCESS: "truncate",
        "training.gradient_checkpointing": True,
    },
    "axolotl": {
        OUT: "model-out", MICRO: 1, "training.num_train_epochs": 1.0, SCHEDULE: "cosine", "data.max_length": 512,
        EXCESS: "drop", "training.average_tokens_across_devices": False, "training.save_total_limit": 4,
    },
}  # fmt: skip
TRL_RATES = {"dpo": 1e-6, "orpo": 1e-6, "kto": 1e-6, "reward": 1e-4}
LORA: dict[str, dict[str, Any]] = {
    "trl": {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05},
    "llamafactory": {"r": 8, "lora_dropout": 0.0, "target_modules": "all-linear"},
    "axolotl": {"r": 8, "lora_alpha": 8},
    "transformers": {"r": 8, "lora_alpha": 8},  # as peft has them
}


def imported(sources: list[Source]) -> Draft:
    """Our config, filled from all sources."""
    draft = Draft(sources)
    training = [source for source in sources if source.trains]
    for source in training:
        draft.carry(source, rules.RULES.get(source.kind, rules.ARGUMENTS), rules.WINS)
    if training:  # a command line and the file that it names are one
        merged = {name: value for source in reversed(training) for name, value in source.tree.items()}
        _finish_arguments(draft, training[0]._replace(tree=merged))
    for source in sources[len(training) :]:
        if source.kind == "deepspeed":
            source = source._replace(tree=_completed(source.tree))
        draft.carry(source, rules.RULES[source.kind], rules.WINS)
    for source in sources:
        if source.kind == "deepspeed":
            _finish_deepspeed(draft, source)
    return draft


def _completed(tree: dict[str, Any]) -> dict[str, Any]:
    """A ds_config with the values that DeepSpeed takes for what is not there."""
    completed = {"gradient_clipping": 0.0} | tree
    for section in DEEPSPEED.keys() & tree.keys():
        if isinstance(options := tree[section], dict):
            params = DEEPSPEED[section] | DEEPSPEED.get(str(options.get("type")), {}) | (options.get("params") or {})
            completed[section] = options | {"params": params}
    return completed


def _finish_arguments(draft: Draft, source: Source) -> None:
    tree = source.tree
    kind = source.kind
    root = Given(source, (), source.tree)
    if kind in ("trl", "axolotl") and "bf16" not in tree and not draft.of("training.fp16"):
        draft.default("training.bf16", True, source)
        if kind == "axolotl":
            draft.default("model.dtype", "bfloat16", source)
    if kind == "axolotl":
        _finish_axolotl(draft, root)
    if kind == "llamafactory" and tree.get("stage") != "pt":
        cut = root.at("cutoff_len", DEFAULTS[kind]["data.max_length"])
        draft.lose(cut, "cuts prompt and answer of a long row, here its end is cut; shorten such rows yourself")
    if kind == "trl" and tree.get("max_length", 1024) is None:
        draft.lose(Given(source, ("max_length",), None), "is no limit there; write the length of the longest row")
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
    if task := draft.of("task"):
        defaults |= {RATE: TRL_RATES.get(task, 2e-5)} if kind == "trl" else {}
        if task == "kto" and kind == "trl":  # whose loss compares rows with their neighbours
            defaults["training.train_sampling_strategy"] = "sequential"
    for target, value in (DEFAULTS[kind] | defaults).items():
        if target != EXCESS or task in (None, "pretrain"):
            draft.default(target, value, source)
    if draft.of(f"{QUANTISED}.load_in_4bit"):  # NF4, computed in the type that weights are loaded in
        computed = draft.of("model.dtype") or "float32"
        draft.default(f"{QUANTISED}.bnb_4bit_quant_type", "nf4", source)
        draft.default(f"{QUANTISED}.bnb_4bit_use_double_quant", kind in ("axolotl", "llamafactory"), source)
        draft.default(f"{QUANTISED}.bnb_4bit_compute_dtype", computed, source)
    checkpointing = draft.values.get("training.gradient_checkpointing")
    if draft.of(f"{QUANTISED}.load_in_8bit") and checkpointing:
        del draft.values["training.gradient_checkpointing"]
        if checkpointing.given:
            draft.need_not(checkpointing.given, "bitsandbytes keeps the inputs of layers with 8-bit weights anyway")
    for target in [] if adapted else [target for target in draft.values if target.startswith("model.lora.")]:
        if given := draft.values.pop(target).given:
            draft.need_not(given, "no adapters are trained")
    evaluates = draft.of("training.eval_strategy") not in (None, "no") and tree.get("dataset_name")
    if evaluates and not any(draft.of(f"data.eval_{name}") for name in ("path", "split", "fraction")):
        split = root.at("dataset_test_split", "test" if kind == "trl" else "validation")
        draft.put("data.eval_split", split.value, split)


def _finish_axolotl(draft: Draft, whole: Given) -> None:
    """Its defaults that depend on other keys."""
    tree, source = whole.tree, whole.source
    if "training.save_steps" not in draft.values:
        draft.default("training.save_strategy", "epoch", source)
    if WARMUP not in draft.values:
        steps = tree.get("max_steps")
        draft.default(WARMUP, rules.warmup(min(int(0.03 * steps), 100)) if steps else 0.03, source)
        if not steps:
            draft.lose(whole.at("warmup_steps"), "is 3 % of all steps and at most 100 there; write warmup_steps")
    if tree.get("tf32", "auto") == "auto" and not (draft.of("training.bf16") or draft.of("training.fp16")):
        draft.lose(whole.at("tf32", "auto"), "takes TF32 where a GPU has it; write true or false")
    best = tree.get("load_best_model_at_end", False) is not False or tree.get("early_stopping_patience")
    saves, evaluations = draft.of("training.save_steps"), draft.of("training.eval_steps")
    if best and saves and evaluations and saves % evaluations == 0:
        draft.default("training.load_best_model_at_end", True, source)
    if tree.get("sample_packing") and tree.get("eval_sample_packing") is False:
        draft.default("training.dataloader_drop_last", True, source)


def _finish_deepspeed(draft: Draft, source: Source) -> None:
    tree, root = source.tree, Given(source, (), source.tree)
    if not draft.trains and "auto" in (tree.get("train_micro_batch_size_per_gpu"), tree.get("gradient_clipping")):
        draft.lose(root.at("train_micro_batch_size_per_gpu"), "is what the TrainingArguments say; give them, too")
    elif not draft.trains and "scheduler" not in tree:
        draft.values[SCHEDULE] = Value("constant", f"no scheduler in {source.file}")
    if "optimizer" in tree and draft.of("training.weight_decay"):
        decay = root.at("optimizer").at("params").at("weight_decay", draft.of("training.weight_decay"))
        draft.lose(decay, "is of all weights there, and not of biases and norms here; write 0, or no optimizer")
    if type(tree.get("train_batch_size")) is int:
        _batch(draft, root.at("train_batch_size"))


def _batch(draft: Draft, total: Given) -> None:
    """What DeepSpeed makes of the batch of all ranks: one of its three factors follows from the other two."""
    assumed = (8, 1) if draft.trains else (None, None)  # of TrainingArguments
    micro, steps = (draft.of(name) or default for name, default in zip((MICRO, STEPS), assumed, strict=True))
    quotient, remainder = divmod(total.value, (micro or 1) * (steps or 1) * (draft.ranks or 1))
    product = f"{micro} per device x {steps or 1} micro-batches x {draft.ranks or quotient} ranks"
    if micro is None and draft.ranks is None:
        draft.values[MICRO] = Value(None, f"train_batch_size {total.value} / ranks / micro-batches", total)
        draft.lose(total, "is of all ranks; write train_micro_batch_size_per_gpu, too")
    elif remainder or (quotient > 1 and None not in (micro, steps, draft.ranks)):
        draft.lose(total, f"is another batch than {product}; correct one of them")
    elif draft.ranks is None:
        draft.ranks = quotient
        draft.need_not(total, product)
    elif micro is None or steps is None:
        draft.put(STEPS if micro else MICRO, quotient, total)
