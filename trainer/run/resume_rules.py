"""What may differ between the run that saved a checkpoint and the run that resumes it: one table and a comparison.

Some changes of a config are meant (fewer log lines, another learning rate), some give a result that nobody can repeat
(other data, another batch), and some cannot work. Every key has a rule:

* ``SILENT``: says where, when and how much is reported, kept or moved; no bit of the result depends on it;
* ``SAID``: is honoured, and the log says old and new value: the learning rate and its schedule, the number of steps;
* a name, such as ``batch_size``: changes the result; refused unless ``training.allow_change`` has the name;
* ``NEVER``: the saved state does not fit.

Strategies may change: they decide where state rests and who holds it (``MOVES``); it is said. Where ranks have state of
their own, as of compressed exchanges, other options or another number of ranks are ``compression``; state in fewer
bits is ``moments``. Ranks and accumulation may change together, if updates keep their rows (``same_rows.py``). A key
that is in no rule is refused, and a test compares the table with the sections of the config.

Some keys say where something is, as ``data.path`` does. Values that differ in nothing else (``moved``) are neither
refused nor allowed by themselves: once it is open, what is there is compared with the hashes of the checkpoint.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from types import MappingProxyType
from typing import Any, NamedTuple

from deepstow.strategies.core.protocol import Losses
from deepstow.strategies.core.registry import available, find
from deepstow.trainer.config.arguments import ALLOWABLE
from deepstow.trainer.run import same_rows
from deepstow.trainer.run.same_rows import ACCUMULATION, FOLLOWS_LOSS, NOT_KNOWN, RANKS, Known

SILENT, SAID, NEVER, MOVES = "silent", "said", "never", "moves"
COMPRESSION, MOMENTS = "compression", "moments"  # of a strategy, by what it says itself
QAT = "qat"  # two keys of quantize together

_SILENT_TRAINING = """
    output_dir logging_strategy logging_steps logging_first_step log_on_each_node log_level log_level_replica
    include_num_input_tokens_seen live profile report_to run_name project trackio_space_id trackio_bucket_id
    trackio_static_space_id eval_strategy eval_steps eval_delay eval_on_start per_device_eval_batch_size
    eval_accumulation_steps save_strategy save_steps save_total_limit save_on_each_node load_best_model_at_end
    metric_for_best_model greater_is_better resume_from_checkpoint restore_callback_states_from_checkpoint
    push_to_hub hub_model_id hub_private_repo hub_revision dataloader_num_workers
    dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context ddp_timeout torch_empty_cache_steps
    predict_with_generate generation_max_length generation_num_beams gradient_checkpointing
    gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs allow_change overwrite
    sample_prompts compute_metrics preprocess_logits_for_metrics
"""
# What changes the result, by the name that training.allow_change takes.
_GROUPS: Mapping[str, str] = {
    "data": """data.path data.datasets data.name data.split data.limit data.eval_path data.eval_split
        data.eval_fraction data.columns data.completion_only_loss data.assistant_only_loss
        data.chat_template data.chat_template_path data.streaming data.rows""",
    "max_length": "data.max_length data.excess_length_strategy data.max_target_length",
    "packing": "data.packing",
    "seed": "training.seed training.data_seed",
    "order": "training.train_sampling_strategy training.dataloader_drop_last training.dataloader_in_order",
    "batch_size": "training.per_device_train_batch_size",
    "accumulation": "training.gradient_accumulation_steps",
    "loss": """distill training.average_tokens_across_devices training.label_smoothing_factor
        training.neftune_noise_alpha training.beta training.loss_type training.precompute_ref_log_probs
        training.desirable_weight training.undesirable_weight training.center_rewards_coefficient""",
    "pruning": "prune",
    "dropout": "model.lora.lora_dropout training.disable_dropout",
    "betas": "training.adam_beta1 training.adam_beta2 training.adam_epsilon",
    "weight_decay": "training.weight_decay",
    "clipping": "training.max_grad_norm",
    "precision": "training.bf16 training.fp16 training.tf32 model.dtype",
    "kernels": """training.full_determinism training.use_cpu training.torch_compile training.torch_compile_backend
        training.torch_compile_mode training.use_liger_kernel training.liger_kernel_config
        model.attn_implementation""",
    "model": """model.name_or_path model.adapter model.config model.attention_mask model.quantization_config
        model.lora.lora_alpha model.lora.use_rslora""",
}
_SAID = """
    training.learning_rate training.max_steps training.num_train_epochs training.lr_scheduler_type
    training.lr_scheduler_kwargs training.warmup_steps training.early_stopping_patience
    training.early_stopping_threshold model.lora.loraplus_lr_ratio
"""
_NEVER = """
    task training.optim training.optim_args model.tokenizer model.labels model.problem_type model.lora model.lora.r
    model.lora.target_modules model.lora.bias
    model.lora.modules_to_save model.lora.use_dora
"""
RULES: Mapping[str, str] = {
    **{f"training.{name}": SILENT for name in _SILENT_TRAINING.split()},
    "data.num_proc": SILENT,
    "quantize": SILENT,
    "export": SILENT,
    "model.trust_remote_code": SILENT,
    "model.lora.export": SILENT,
    **{key: name for name, keys in _GROUPS.items() for key in keys.split()},
    **dict.fromkeys(_SAID.split(), SAID),
    **dict.fromkeys(_NEVER.split(), NEVER),
}


def unset() -> dict[str, object]:
    """What an unset key means; writing it out is no change. Without ``use_cpu``, the device is the machine's. Read from
    the source of Transformers, which takes seconds to import.
    """
    found = find_spec("transformers")
    if found is None or found.origin is None:
        return {}
    tree = ast.parse(Path(found.origin).with_name("training_args.py").read_text(encoding="utf-8"))
    (theirs,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments")
    defaults = dict[str, object]()
    for node in theirs.body:
        if not isinstance(node, ast.AnnAssign) or node.value is None:
            continue
        given = {each.arg: each.value for each in node.value.keywords} if isinstance(node.value, ast.Call) else {}
        with suppress(ValueError):  # no default, or one that is not written out: every config says ``optim``
            defaults[f"training.{ast.unparse(node.target)}"] = ast.literal_eval(given.get("default", node.value))
    return {key: value for key, value in defaults.items() if key != "training.use_cpu"}


# Keys that say where something is, and the hash of a manifest that what is there is compared with.
PLACES: Mapping[str, str] = {
    "data.path": "sources", "data.datasets": "sources", "data.eval_path": "evaluation",
    "data.chat_template": "template", "data.chat_template_path": "template", "model.tokenizer": "tokenizer",
    "model.name_or_path": "weights", "distill": "teacher",
}  # fmt: skip


class _Content(NamedTuple):
    """A hash of a manifest: the key that it is about, the name that allows another one, what a refusal says of it."""

    key: str
    group: str
    what: str


_CONTENTS: Mapping[str, _Content] = {
    "tokenizer": _Content(
        "model.tokenizer",
        "",
        "it is not the one that {} was saved with, and the model has learned that one's tokens",
    ),
    "sources": _Content("data.path", "data", "the rows made of it are not those that {} was trained on"),
    "evaluation": _Content("data.eval_path", "data", "the rows made of it are not those that {} was evaluated on"),
    "template": _Content("data.chat_template", "data", "its text is not the one that {} was trained with"),
    "code": _Content("model.name_or_path", "model", "its Python code is not the one that {} was trained with"),
    "weights": _Content("model.name_or_path", "model", "its weights are not those that {} was trained on"),
    "seed": _Content("training.seed", "model", "it draws other random weights than those that {} was trained on"),
    "teacher": _Content("distill.teacher", "loss", "its files are not those that {} was trained with"),
}

# Keys of Hugging Face's model configs on which names or shapes of parameters depend, or how a head is cut out of them.
_SHAPES = """
    model_type vocab_size hidden_size n_embd d_model dim intermediate_size n_inner ffn_dim d_ff num_hidden_layers
    n_layer n_layers num_layers num_attention_heads n_head n_heads num_heads num_key_value_heads head_dim
    word_embed_proj_dim max_position_embeddings n_positions n_ctx tie_word_embeddings attention_bias mlp_bias
    num_local_experts num_experts moe_intermediate_size num_experts_per_tok
"""
SHAPES = frozenset(_SHAPES.split())
_EVALUATIONS = """eval_strategy eval_steps eval_delay eval_on_start metric_for_best_model greater_is_better
    compute_metrics preprocess_logits_for_metrics"""
_FOLLOWED = {f"training.{name}" for name in _EVALUATIONS.split()}


class Line(NamedTuple):
    """A difference that is refused: the dotted key, its value now, and what to do."""

    key: str
    value: object
    what: str


class Changes(NamedTuple):
    """All differences that matter: keys that are honoured or allowed, what to log of them, and what is refused."""

    keys: set[str]
    said: list[str]
    refused: list[Line]


def compare(
    saved: Mapping[str, Any], now: Mapping[str, Any], ranks: tuple[int, int], name: str, known: Known = NOT_KNOWN
) -> Changes:
    """Compare two configs as trees; ``ranks`` that saved and that resume, as copies of the model, the ``name`` of the
    checkpoint, and what is ``known`` of it.
    """
    allowed, places = now.get("training", {}).get("allow_change", ()), moved(saved, now, known)
    found = [(key, rule_of(key), old, new) for key, old, new in differences(saved, now) if key not in places]
    found += _of_strategies(saved, now, ranks)
    if (old := _rounded(saved)) != (new := _rounded(now)):
        found.append(("quantize.qat", QAT, old, new))
    keys, said, refused = changes = Changes(set(), [], [])
    for key, value, why in _removed(saved):
        refused.append(Line(key, None, f"{name} was saved with {_shown(value)}: {why}"))
    other_rows = ""
    if ranks[0] != ranks[1]:
        found.append((RANKS, RANKS, *ranks))
        others = [key for key, rule, *_ in found if rule != SILENT] + [key for key in places if "data" in allowed]
        if any(key.startswith("data.") for key in others):
            known = known._replace(rows=None)
        other_rows = same_rows.why_not(saved, now, ranks, known)
        if not other_rows:
            found = [each for each in found if each[0] not in (RANKS, ACCUMULATION)]
            if (count := same_rows.micro_batches(now, ranks[1])) > 2:
                said.append(f"the same rows in an update; its {count} micro-batches may be added up in another order")
    if _is_tied(known.model) and same_rows.micro_batches(now, ranks[1]) > 1 and len(set(map(_sums, (saved, now)))) > 1:
        said.append(
            "the tied head's gradients added in another order: the last bits differ from those of the run so far"
        )
    for key, rule, old, new in found:
        schedule = now.get("training", {}).get("lr_scheduler_type")
        rule = NEVER if key in _FOLLOWED and schedule in FOLLOWS_LOSS else rule
        if rule == SILENT:
            continue
        if why := _cannot(key, rule, old, new, schedule):
            refused.append(Line(key, new, f"{name} was saved with {_shown(old)}, {why}"))
        elif rule in (SAID, MOVES) or rule in allowed:
            keys.add(key)
            said.append(f"{key} = {_shown(new)} (was {_shown(old)})")
        else:
            back = "start that many" if key == RANKS else "write that"
            why = f" ({other_rows})" if other_rows and key in (RANKS, ACCUMULATION) else ""
            what = f"{name} was saved with {_shown(old)}, and the result would be another run's{why}"
            refused.append(Line(key, new, f"{what}; {back}, or allow it with training.allow_change: [{rule}]"))
    return changes


def moved(
    saved: Mapping[str, Any], now: Mapping[str, Any], known: Known = NOT_KNOWN
) -> dict[str, tuple[object, object]]:
    """Keys of two configs that differ in where something is alone, each with both values, if it can be compared."""
    found = {key: (old, new) for key, old, new in differences(saved, now) if _is_moved(key, old, new)}
    return {key: both for key, both in found.items() if PLACES[key] not in known.lacks}


def _is_moved(key: str, old: Any, new: Any) -> bool:
    if key in ("data.datasets", "distill"):
        return type(old) is type(new) and old and new and _without_places(old) == _without_places(new)
    if key in ("data.path", "data.eval_path", "model.name_or_path"):
        return isinstance(old, str) and isinstance(new, str)
    return key in PLACES and not any(isinstance(value, Mapping) for value in (old, new))


def _without_places(value: Any) -> Any:
    """Of data sets the options, of a teacher, or several, the weights and what is learned."""
    if isinstance(value, Mapping):
        teacher = value["teacher"]
        return {**value, "teacher": [1] if isinstance(teacher, str) else list(teacher.values())}
    return [{**each, "path": ""} for each in value]


def compare_contents(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    allowed: Sequence[str],
    changed: Collection[str],
    name: str,
    places: Mapping[str, tuple[object, object]] = MappingProxyType({}),
) -> Changes:
    """Compare what is known after data, tokenizer and model config were opened: hashes of ``_CONTENTS``, None where a
    release did not have it; ``fingerprint`` of the rows, ``config`` of the model. ``changed``: keys of the run's config
    that differ and may; ``places``: those that were ``moved``.
    """
    # Releases of Transformers add keys, so only what both have is compared.
    both = saved["config"].keys() & now["config"].keys()
    trees = [{"model": {"config": {key: tree["config"][key] for key in both}}} for tree in (saved, now)]
    changes = compare(trees[0], {**trees[1], "training": {"allow_change": list(allowed)}}, (1, 1), name)
    same_rows = saved["fingerprint"] == now["fingerprint"]
    of_data = Changes(set(), [], [])
    for fact in ("sources", "evaluation", "template"):
        if saved[fact] is None:  # the fingerprint knows it as well, but not it alone
            known = (
                (now[fact] if same_rows else "not known") if any(PLACES[key] == fact for key in places) else now[fact]
            )
        else:
            known = saved[fact]
        if _CONTENTS[fact].key not in changed:
            compare_content(fact, known, now[fact], allowed, name, places, of_data)
    compare_content("tokenizer", saved["tokenizer"], now["tokenizer"], allowed, name, places, changes)
    if saved["code"] is not None:
        compare_content("code", saved["code"], now["code"], allowed, name, places, changes)
    expected = any(key.startswith("data.") or key == "training.seed" for key in changed)
    if not (same_rows or expected or of_data.keys or of_data.refused or changes.refused):
        compare_content("sources", "", "other", allowed, name, {}, of_data)
    return Changes(changes.keys | of_data.keys, changes.said + of_data.said, changes.refused + of_data.refused)


def compare_content(
    fact: str,
    saved: str,
    now: str,
    allowed: Sequence[str],
    name: str,
    places: Mapping[str, tuple[object, object]],
    changes: Changes,
) -> None:
    """Add to ``changes`` what a hash, a ``fact`` of ``_CONTENTS``, says of its key, or of those among ``places``."""
    content, where = _CONTENTS[fact], {key: both for key, both in places.items() if PLACES[key] == fact}
    if saved == now:
        for key, (old, new) in where.items():
            changes.said.append(f"{key} = {_where(new)} (was {_where(old)}): the same contents")
        return
    if content.group and content.group in allowed:
        changes.keys.update(where or [content.key])
        shown = [f"{key} = {_where(new)} (was {_where(old)})" for key, (old, new) in where.items()] or [content.key]
        changes.said.extend(f"{each}: other contents than the checkpoint's" for each in shown)
        return
    cure = f", or allow it with training.allow_change: [{content.group}]" if content.group else ""
    for key, (old, new) in where.items():
        what = f"{name} was saved with {_where(old)}; {content.what.format(name)}; write that{cure}"
        changes.refused.append(Line(content.key if key == "distill" else key, _where(new), what))
    if not where:
        back = "those" if " those " in content.what else "that"
        changes.refused.append(Line(content.key, None, f"{content.what.format(name)}; bring {back} back{cure}"))


def _where(value: Any) -> str:
    """The places in a value of ``PLACES``, in one line; a chat template may be there in full."""
    if isinstance(value, Mapping):
        value = value["teacher"]
    if isinstance(value, list | dict):
        value = ", ".join(each["path"] if isinstance(each, Mapping) else each for each in value)
    return shorten(_shown(value), 200)


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Dotted keys with both values, where they differ; a section without rules inside is one key."""
    old, new, means = leaves(saved), leaves(now), unset()
    built = [any(key.startswith("model.config.") for key in tree) for tree in (old, new)]
    for key in old | new:
        if built[0] is not built[1] and key.startswith("model.config."):
            continue  # model.name_or_path differs, which says it all
        before, after = old.get(key, means.get(key)), new.get(key, means.get(key))
        if key == "training.data_seed":  # unset, it is the seed
            before, after = (tree.get(key, tree.get("training.seed")) for tree in (old, new))
            if old.get(key) is None and new.get(key) is None:
                continue  # the seed has its own line
        if before != after:
            yield key, before, after


def _of_strategies(
    saved: Mapping[str, Any], now: Mapping[str, Any], ranks: Sequence[int]
) -> Iterator[tuple[str, str, str, str]]:
    """State of strategies that is not what it was: that of each rank, and what has fewer bits than plain training's."""
    trees = [tree.get("strategies", {}) for tree in (saved, now)]
    for name in sorted({*trees[0], *trees[1]} & set(available())):
        used = [find(name).of_saved(tree[name]) if name in tree else None for tree in trees]
        losses = [each.losses() if each else Losses() for each in used]
        pairs = zip((each.exchange for each in losses), ranks, strict=True)
        exchanged = [f"{way} by {many} ranks" if way else "whole" for way, many in pairs]
        bits = [each.bits or "moments in fp32, weights as loaded" for each in losses]
        if exchanged[0] != exchanged[1]:
            yield f"strategies.{name}", COMPRESSION, f"exchanged {exchanged[0]}", f"exchanged {exchanged[1]}"
        if bits[0] != bits[1]:
            yield f"strategies.{name}", MOMENTS, bits[0], bits[1]


def _sums(tree: Mapping[str, Any]) -> str:
    """In which order gradients of a tied weight are added."""
    strategies = tree.get("strategies", {})
    used = [find(name).of_saved(strategies[name]) for name in sorted(strategies.keys() & set(available()))]
    return ", ".join(filter(None, (each.losses().sums for each in used)))


def _is_tied(model: Mapping[str, Any]) -> bool:
    """Whether a model of this config of Hugging Face's, or a part of it, ties its head."""
    parts = (part for part in model.values() if isinstance(part, Mapping))
    return bool(model.get("tie_word_embeddings")) or any(map(_is_tied, parts))


def _removed(saved: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Options of an earlier version whose state no run goes on from: key, value and why."""
    for name in saved.get("strategies", {}).keys() & set(available()):
        for option, value in saved["strategies"][name].items():
            if (removed := find(name).removed_of(option, value)) and removed.state:
                yield f"strategies.{name}.{option}", value, removed.state


def _rounded(tree: Mapping[str, Any]) -> str | None:
    """How forward rounds the weights; None: it does not."""
    given = tree.get("quantize") or {}
    return f"{given['qat']} by {given['group_size']}" if given.get("qat") else None


def rule_of(key: str) -> str:
    """The rule of a dotted key; keys of ``model.config`` by what they are."""
    if key.startswith("strategies."):
        return MOVES
    if key.startswith("model.config."):
        last = key.rpartition(".")[2]
        if key.removeprefix("model.config.") in SHAPES or last in SHAPES:
            return NEVER
        return "dropout" if "drop" in last else "model"
    return RULES.get(key, NEVER)


def leaves(tree: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """The values of a config by dotted keys. A strategy is one value with its options; so is what has an own rule."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{at}{name}"
        inside = key in ("model", "data", "training", "strategies", "model.lora") or key.startswith("model.config")
        found |= leaves(value, f"{key}.") if inside and isinstance(value, Mapping) else {key: value}
    return found


def _cannot(key: str, rule: str, old: object, new: object, schedule: object) -> str:
    """Why a change cannot work at all, and the way out; empty if it can. ``schedule`` is this run's."""
    if key in _FOLLOWED and rule == NEVER:
        return "and the schedule follows the evaluations; write that"
    if rule == NEVER:
        return "and its state does not fit another; write that, or start anew in another training.output_dir"
    if key == "training.lr_scheduler_type" and (old in FOLLOWS_LOSS) is not (new in FOLLOWS_LOSS):
        return "and a schedule that follows the evaluation loss cannot go on from one that does not; write that"
    if key == "training.learning_rate" and schedule in FOLLOWS_LOSS:
        return "and a schedule that follows the evaluation loss goes on from the rate that it has reached; write that"
    return ""


def _shown(value: object) -> str:
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


assert set(ALLOWABLE) == {*_GROUPS, COMPRESSION, MOMENTS, QAT, "ranks"}, (
    "training.allow_change has the groups of this table"
)
