"""Combinations of keys that cannot be run, although each key alone is valid.

A check yields the key to report, and what would work. A key that is itself wrong has the value ``WRONG``, which makes
every comparison false, so that one mistake is never reported twice. Checks therefore compare, and do not say ``not``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deepstow.strategies.core.compatibility import parts_of, values_in
from deepstow.strategies.core.optimizers import options_of
from deepstow.strategies.core.protocol import COMPILE_KEYS, Phase, Requirement
from deepstow.strategies.core.registry import available, find, rules
from deepstow.trainer.config.recipe import RECIPES, Recipe
from deepstow.trainer.config.yaml_file import MISSING, Fault
from deepstow.trainer.formats.format import FORMATS
from deepstow.trainer.tasks.task import TASKS, Task
from deepstow.trainer.values import KEEP_ONE, NOT_THEIRS, OFF, WRONG, Found, Values

PLANNED = {Requirement.PARAMETERS, Requirement.COMPUTE_DTYPE}
PYDOC = ("text", "pairs", "labels", "preferences", "ratings")
FIELDS = tuple(  # of rows, in the tree
    dict.fromkeys(
        [name for row_format in FORMATS.values() for name in row_format.required + row_format.optional]
        + [field.name for task in TASKS.values() for field in task.fields]
    )
)
MAPPED = f"a mapping from our fields ({', '.join(FIELDS)}) to columns"
OTHER_PROJECTS = {"comet_ml": "COMET_PROJECT_NAME", "swanlab": "SWANLAB_PROJECT"}
KEEPS = "preprocess_logits_for_metrics"
EVALUATE = "write training.eval_strategy = steps or epoch"
KEPT_INPUTS = (
    "frees nothing of layers with 8-bit weights: bitsandbytes keeps their inputs by itself; write "
    "model.quantization_config.load_in_4bit: true, or leave it out"
)


def conflicts(sections: Mapping[str, Values]) -> list[Fault]:
    """Every conflict among the values of all sections; ``strategies`` has the options of those that are on. What a task
    from outside says is left to ``of_task``, since its code would run for it.
    """
    m, d, t = (sections[name] for name in ("model", "data", "training"))
    problems = [
        *_model(m, d, t),
        *_data(d, t),
        *_training(d, t),
        *_strategies(sections),
        *_quantised(m, t),
        *_compiled(m, t),
    ]
    problems += of_recipes([recipe for recipe in RECIPES.values() if sections[recipe.name]], sections)
    name = sections["task"].name if isinstance(sections["task"].name, str) else ""
    if name in TASKS:  # what fields others have is seen with their code
        problems += _columns(d)
    return faults(sections, problems) + of_task(TASKS.get(name), sections)


def of_task(task: Task | None, sections: Mapping[str, Values]) -> list[Fault]:
    """Every conflict with the task; None: it is not known yet, or wrong."""
    if task is None:
        return []
    alone = [recipe.name for recipe in RECIPES.values() if recipe.language and sections[recipe.name]]
    return faults(sections, [*_keys_of(task, sections), *language_alone(task, alone)])


def language_alone(task: Task, keys: Iterable[str]) -> Found:
    """Of ``keys`` that are for tasks that predict the next token alone."""
    for key in () if task.language else keys:
        yield key, f"is for task sft and pretrain, and this is {task.name}; leave it out"


def of_recipes(recipes: Sequence[Recipe], sections: Mapping[str, Values]) -> Found:
    """Every conflict of these ``recipes`` with the other sections."""
    m = sections["model"]
    export = m.lora.get("export", "adapter" if m.name_or_path else "merged") if isinstance(m.lora, dict) else "merged"
    if export != "merged" and (needs := next((recipe.name for recipe in recipes if recipe.merges), None)):
        yield "model.lora.export", f"adapters are exported without their base, which {needs} needs; write merged"
    for recipe in recipes:
        if m.attention_mask and not recipe.masks:
            yield "model.attention_mask", f"has not been compared with {recipe.name}; {KEEP_ONE}"
        yield from recipe.conflicts(sections)


def faults(sections: Mapping[str, Values], problems: Iterable[tuple[str, str]]) -> list[Fault]:
    """The faults that ``problems`` say, each with the value of its key."""
    return [Fault(tuple(key.split(".")), _value(sections, key), words) for key, words in problems]


def _value(sections: Mapping[str, Any], key: str) -> Any:
    value: Any = sections
    for name in key.split("."):
        value = value[int(name)] if isinstance(value, list) else value.get(name) if isinstance(value, dict) else None
    if isinstance(value, Values):
        value = {name: item for name, item in value.items() if item is not WRONG}
    return MISSING if value is None else value


def _model(m: Values, d: Values, t: Values) -> Found:
    if m.config and m.name_or_path:
        yield "model.config", f"cannot go with model.name_or_path; {KEEP_ONE}"
    if m.config and m.adapter:
        what = "is of no use without its base, and model.config has random weights; write model.name_or_path"
        yield "model.adapter", what
    elif m.adapter and m.lora is None:
        yield "model.adapter", "needs model.lora, which a config file is given from the adapter"
    if m.config is None and m.name_or_path is None and m.adapter is None:
        yield "model.name_or_path", "missing; write a folder or hub name, or model.config for random weights"
    if isinstance(m.config, dict):
        if m.tokenizer is None:
            cure = "write a name, a folder or {train: bpe, vocab_size: 4096}"
            yield "model.tokenizer", f"missing; model.config brings none: {cure}"
        kind, size = m.config.get("model_type"), m.config.get("vocab_size")
        if not (isinstance(kind, str) and kind):
            lead = "missing; " if kind is None else ""
            yield "model.config.model_type", f"{lead}must be the name of a Hugging Face architecture, as in llama"
        if isinstance(m.tokenizer, dict) and type(size) is int and size < m.tokenizer["vocab_size"]:
            yield "model.tokenizer.vocab_size", f"must be <= model.config.vocab_size, which is {size}"
    kernels = (None, "auto", "sdpa", "sdpa_varlen", "flex_attention", WRONG)
    if m.attention_mask and m.attn_implementation not in kernels:
        what = "cannot apply model.attention_mask; write sdpa_varlen, sdpa or flex_attention"
        yield "model.attn_implementation", what
    shown = m.attention_mask if isinstance(m.attention_mask, dict) else {}
    if m.attn_implementation == "sdpa_varlen" and (shown.get("strided") or shown.get("random")):
        what = "computes a window and first tokens alone; write sdpa or flex_attention with strided or random"
        yield "model.attn_implementation", what
    if shown.get("random") and d.packing is True:
        what = "where a document begins in a packed row would change it; leave it out, or data.packing"
        yield "model.attention_mask.random", what
    if t.fp16 and t.bf16:
        yield "training.fp16", f"cannot go with training.bf16; {KEEP_ONE}"
    if t.fp16 and m.dtype == "bfloat16":
        what = "cannot go with training.fp16, which scales float32 weights; write float32, or training.bf16"
        yield "model.dtype", what
    if m.name_or_path is None and isinstance(m.lora, dict) and m.lora.get("export") == "adapter":
        what = "adapters are of no use without their base, whose random weights nobody else has; leave it out"
        yield "model.lora.export", what
    if m.dtype == "float16" and m.lora is None:
        yield "model.dtype", "float16 weights lose their small updates; write float32 with training.fp16, or bfloat16"
    elif m.dtype == "float16" and t.bf16:
        yield "training.bf16", "cannot go with model.dtype = float16; write bfloat16 there, or training.fp16"


def _quantised(m: Values, t: Values) -> Found:
    key, q = "model.quantization_config", m.quantization_config
    if not isinstance(q, dict):
        return
    four, eight = (q.get(f"load_in_{bits}bit", False) for bits in (4, 8))
    if four is eight:
        yield key, "must have one of load_in_4bit: true and load_in_8bit: true"
    if m.lora is None and m.adapter is None:
        yield key, "quantised weights cannot be trained; write model.lora beside it"
    elif isinstance(m.lora, dict) and m.lora.get("use_dora"):
        what = "PEFT dequantises the whole weight of every layer for it, which cannot be planned"
        yield "model.lora.use_dora", f"cannot go with model.quantization_config: {what}; {KEEP_ONE}"
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        if eight and t[name]:
            yield f"training.{name}", KEPT_INPUTS


def _compiles(t: Values) -> list[str]:
    return [f"training.{key}" for key in COMPILE_KEYS if t[key] not in (*OFF, WRONG)]


def _compiled(m: Values, t: Values) -> Found:
    compiling = _compiles(t)
    if not compiling:
        return
    if t.torch_compile_mode == "default" and t.torch_compile_backend not in (None, "inductor", WRONG):
        yield "training.torch_compile_mode", "is inductor's; leave it out"
    for checkpointing in ("gradient_checkpointing", "activation_checkpointing"):
        if t[checkpointing] not in (*OFF, WRONG):
            what = "would be compiled into each block; write strategies.recompute: {policy: full}"
            yield f"training.{checkpointing}", f"cannot go with {compiling[0]}: it {what}"
    unmeasured = {"training.use_liger_kernel": t.use_liger_kernel}
    unmeasured |= {f"model.{key}": m[key] for key in ("quantization_config", "attention_mask")}
    if m.attn_implementation not in (None, "auto", "sdpa", "eager", WRONG):
        unmeasured["model.attn_implementation"] = m.attn_implementation
    for key, value in unmeasured.items():
        if value not in (*OFF, WRONG):
            yield key, f"cannot go with {compiling[0]}: it has not been compared, compiled and not; {KEEP_ONE}"


def _data(d: Values, t: Values) -> Found:
    if d.path is None and d.datasets is None:
        yield "data.path", "missing; write a file, a folder, a hub name or pydoc, or data.datasets for several"
    if isinstance(d.datasets, list):
        yield from _datasets(d)
    if d.streaming and d.eval_fraction:
        yield "data.eval_fraction", "cannot go with data.streaming; write data.eval_split or data.eval_path"
    elif d.eval_fraction and (d.eval_path or d.eval_split):
        yield "data.eval_fraction", f"cannot go with data.eval_{'path' if d.eval_path else 'split'}; {KEEP_ONE}"
    if d.streaming and d.num_proc:
        yield "data.num_proc", "cannot go with data.streaming; write training.dataloader_num_workers"
    if d.streaming and t.max_steps == -1 and d.rows is None:
        yield "data.streaming", "a stream has no known length; write data.rows, or training.max_steps"
    if d.rows and d.streaming in OFF:
        yield "data.rows", "rows are counted where data.streaming is off; leave it out"
    if d.assistant_only_loss and d.completion_only_loss:
        yield "data.assistant_only_loss", f"cannot go with data.completion_only_loss; {KEEP_ONE}"
    if d.chat_template and d.chat_template_path:
        yield "data.chat_template_path", f"cannot go with data.chat_template; {KEEP_ONE}"
    if d.path == "pydoc":
        if d.name in (None, "text"):
            for key in ("completion_only_loss", "assistant_only_loss"):
                if d[key]:
                    yield f"data.{key}", "pydoc text has no answers; write data.name = pairs, or leave it out"
        elif d.name not in PYDOC[1:]:
            yield "data.name", _pydoc_names()


def _columns(d: Values) -> Found:
    """Fields that nothing in the tree has, where nothing from outside is asked for them."""
    several = d.datasets if isinstance(d.datasets, list) else []
    for at, entry in {"data": d, **{f"data.datasets.{index}": item for index, item in enumerate(several)}}.items():
        columns, format = entry.get("columns"), entry.get("format") or d.format
        if isinstance(columns, dict) and (format is None or format in FORMATS) and {*columns} - {*FIELDS}:
            yield f"{at}.columns", f"must be {MAPPED}"


def _pydoc_names() -> str:
    return f"must be {', '.join(PYDOC[:-1])} or {PYDOC[-1]}, since the path is pydoc"


def _keys_of(task: Task, sections: Mapping[str, Values]) -> Found:
    """Keys that this task does not have, and what it says itself of those that it has."""
    m, d, t = (sections[name] for name in ("model", "data", "training"))
    for key in dict.fromkeys(key for other in TASKS.values() for key in other.keys):
        section, _, name = key.partition(".")
        unset = (None, WRONG) if section == "training" else (*OFF, WRONG)
        if key not in task.keys and sections[section][name] not in unset:
            owners = " and ".join(other.name for other in TASKS.values() if key in other.keys)
            yield key, f"is for task {owners}, and this is {task.name}; leave it out"
    if t.sample_prompts and not task.generates:
        yield "training.sample_prompts", f"a model of task {task.name} continues no text; leave it out"
    if m.quantization_config and not task.quantised:
        what = f"has not been compared with the stock Trainer for task {task.name}; leave it out"
        yield "model.quantization_config", what
    if (compiling := _compiles(t)) and not task.language:
        yield compiling[0], f"rows of task {task.name} have many lengths, and each would be compiled anew; leave it out"
    for key in NOT_THEIRS:
        if t[key] and task.own_loss:
            yield f"training.{key}", f"the loss of task {task.name} does not take it; leave it out"
    if t.compute_metrics not in (None, WRONG):
        if task.own_loss:
            what = f"evaluations of task {task.name} say {task.own_loss}; leave it out"
            yield "training.compute_metrics", what
        elif (task.generates or task.has_decoder) and t.predict_with_generate in OFF and t[KEEPS] is None:
            what = "needs it, or the logits of every word at every position would be kept; write what is, as in"
            yield f"training.{KEEPS}", f"missing; training.compute_metrics {what} my_metrics:most_likely"
    elif t[KEEPS] and t.compute_metrics is None:
        yield f"training.{KEEPS}", "needs training.compute_metrics"
    if t.train_sampling_strategy in ("group_by_length", "batch_rebalance") and task.own_loss:
        what = f"rows of task {task.name} have several lengths; write random or sequential"
        yield "training.train_sampling_strategy", what
    metric, metrics = t.metric_for_best_model, task.metrics if t.compute_metrics is None else ()
    if isinstance(metric, str) and metrics and metric.removeprefix("eval_") not in metrics:
        what = f"evaluations of {task.name} give {', '.join(metrics)}; training.compute_metrics adds others"
        yield "training.metric_for_best_model", what
    yield from task.conflicts(m, d, t)


def _datasets(d: Values) -> Found:
    for key in ("path", "name", "columns", "limit", "split"):
        if d[key] and d[key] != "train":
            yield f"data.{key}", "cannot go with data.datasets; write it in each of them that needs it"
    if d.eval_split:
        yield "data.eval_split", "cannot go with data.datasets; write data.eval_fraction or data.eval_path"
    if d.streaming:
        yield "data.streaming", "cannot go with data.datasets: how they are mixed follows from all their tokens"
    shares = [entry.get("token_share") for entry in d.datasets]
    if any(shares) and not all(shares):
        yield f"data.datasets.{shares.index(None)}.token_share", "missing; all data sets have one or none does"
    elif all(shares) and abs(sum(shares) - 1) > 1e-6:
        yield "data.datasets.0.token_share", f"all of them together must be 1, and are {sum(shares):g}"
    for index, entry in enumerate(d.datasets):
        if entry.get("path") == "pydoc" and entry.get("name") not in (None, *PYDOC):
            yield f"data.datasets.{index}.name", _pydoc_names()
        if entry.get("weight") and entry.get("token_share"):
            yield f"data.datasets.{index}.weight", f"cannot go with its token_share; {KEEP_ONE}"


def _training(d: Values, t: Values) -> Found:
    if d.eval_fraction in OFF and d.eval_path is None and d.eval_split is None:
        for key in ("eval_strategy", "eval_on_start", "compute_metrics"):
            if t[key] and t[key] != "no":
                needs = "needs evaluation data; write data.eval_fraction, data.eval_split or data.eval_path"
                yield f"training.{key}", needs
    if t.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy") and t.eval_strategy == "no":
        yield "training.lr_scheduler_type", f"follows the evaluation loss; {EVALUATE}"
    if t.dataloader_persistent_workers:
        what = "a resumed run would draw other random numbers than one that was not interrupted; leave it out"
        yield "training.dataloader_persistent_workers", what
    if t.dataloader_prefetch_factor and t.dataloader_num_workers in OFF:
        yield "training.dataloader_prefetch_factor", "needs training.dataloader_num_workers >= 1"
    if t.gradient_checkpointing_kwargs and t.gradient_checkpointing_kwargs.get("preserve_rng_state") is False:
        what = "recomputing would draw another dropout mask; leave preserve_rng_state out"
        yield "training.gradient_checkpointing_kwargs", what
    for suffix in ("", "_kwargs"):
        earlier, newer = t[f"gradient_checkpointing{suffix}"], t[f"activation_checkpointing{suffix}"]
        if None not in (earlier, newer) and WRONG not in (earlier, newer):
            what = f"is the newer name of training.gradient_checkpointing{suffix}; {KEEP_ONE}"
            yield f"training.activation_checkpointing{suffix}", what
    if t.warmup_steps and t.max_steps != -1 and t.warmup_steps > t.max_steps:
        yield "training.warmup_steps", f"must be <= training.max_steps, which is {t.max_steps}"
    if isinstance(t.optim_args, str) and isinstance(t.optim, str):
        try:
            options_of(t.optim, t.optim_args)
        except ValueError as error:
            yield "training.optim_args", str(error)
    if t.eval_strategy == "no":
        for key in ("early_stopping_patience", "sample_prompts"):
            if t[key] not in (None, WRONG):
                yield f"training.{key}", f"needs evaluations; {EVALUATE}"
    if t.early_stopping_threshold not in (*OFF, WRONG) and t.early_stopping_patience is None:
        yield "training.early_stopping_threshold", "needs training.early_stopping_patience"
    if isinstance(t.report_to, list) and "none" in t.report_to and len(t.report_to) > 1:
        yield "training.report_to", "none is no tracker beside others; leave it out"
    for name, variable in OTHER_PROJECTS.items():
        if t.project not in (None, WRONG) and isinstance(t.report_to, str | list) and name in t.report_to:
            yield "training.project", f"{name} takes it from {variable}; leave it out"
    if isinstance(t.profile, dict):
        first, last = t.profile["steps"]
        if first > last:
            yield "training.profile.steps", "must be the first and the last step, in this order"
        if t.max_steps != -1 and last > t.max_steps:
            yield "training.profile.steps", f"must be <= training.max_steps, which is {t.max_steps}"
    if t.save_strategy == "best" and t.eval_strategy == "no":
        yield "training.save_strategy", f"needs evaluations; {EVALUATE}"
    if t.save_strategy == "best" and t.metric_for_best_model is None:
        yield "training.save_strategy", "needs training.metric_for_best_model, as in loss"
    if t.load_best_model_at_end and t.save_strategy != "best":
        yield from _best_model(t)


def _best_model(t: Values) -> Found:
    evaluate, save = t.eval_strategy, t.save_strategy
    if evaluate != save or save == "no":
        what = f"training.eval_strategy ({evaluate}) and training.save_strategy ({save}) must be equal, not no"
        yield "training.load_best_model_at_end", what
    eval_steps = t.logging_steps if t.eval_steps is None else t.eval_steps
    if evaluate == save == "steps" and eval_steps and t.save_steps:
        times = t.save_steps / eval_steps
        if abs(times - round(times)) > 1e-6 or (t.save_steps < 1) != (eval_steps < 1):
            what = f"must be a multiple of training.eval_steps ({eval_steps}), for training.load_best_model_at_end"
            yield "training.save_steps", what


def _strategies(sections: Mapping[str, Values]) -> Found:
    m, t = sections["model"], sections["training"]
    half = m.dtype != "float32" and t.bf16 in OFF and t.fp16 in OFF
    value_at = values_in(sections)

    def value_of(key: str) -> Any:
        return None if (value := value_at(key)) is WRONG else value

    for rule in rules(name for name in available() if name in sections["strategies"]):
        if not rule.key.startswith("strategies.") and rule.applies(value_of):
            yield parts_of(rule.key)[0], rule.words(value_of)
    for name in available():
        if name in sections["strategies"]:
            if t.fp16 and m.dtype == "float16" and find(name).requires >= PLANNED:
                yield "model.dtype", f"strategies.{name} keeps float32 weights under training.fp16; write float32"
            yield from _quantised_beside(name, m, t)
            if half and find(name).requires >= PLANNED:
                what = f"strategies.{name} computes in float32 without training.bf16"
                yield "model.dtype", f"{what}; write training.bf16: true, or float32"


def _quantised_beside(name: str, m: Values, t: Values) -> Found:
    """What strategies that place single parameters, or recompute, cannot do with quantised weights."""
    q, kind = m.quantization_config, find(name)
    if not isinstance(q, dict):
        return
    if q.get("load_in_8bit") and kind.phase is Phase.KEEP:
        yield f"strategies.{name}", KEPT_INPUTS
    if not kind.requires >= PLANNED:
        return
    computes = "bfloat16" if t.bf16 else "float32"
    if q.get("load_in_4bit") and q.get("bnb_4bit_compute_dtype", "float32") != computes:
        key = "model.quantization_config.bnb_4bit_compute_dtype"
        yield key, f"strategies.{name} computes in {computes}; write that"
