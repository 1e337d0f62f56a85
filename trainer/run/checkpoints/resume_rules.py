"""What may differ between the run that saved a checkpoint and the run that resumes it: a comparison of two configs.

Some changes are meant (fewer log lines, another learning rate), some give a result that nobody can repeat (other data,
another batch), and some cannot work. Each key says which, where it stands (``strategies/core/resume.py``).

Two things are not of one key alone. Ranks and accumulation may change together, if updates keep their rows
(``same_rows.py``); but not where ranks have state of their own, as of compressed exchanges. And a key that is not set
means a default of Transformers or TRL: so checkpoints say what it was, and a release with another default is noticed.

Some keys say where something is, as ``data.path`` does. Values that differ in nothing else (``moved``) are neither
refused nor allowed by themselves: once it is open, what is there is compared with the hashes of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from textwrap import shorten
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import BaseModel

from deepstow.strategies.core.registry import available, find
from deepstow.strategies.core.resume import rule_at
from deepstow.trainer.config.arguments import REMOVED
from deepstow.trainer.config.check import inner_model
from deepstow.trainer.config.recipe import RECIPES
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.run.checkpoints import same_rows
from deepstow.trainer.run.checkpoints.same_rows import ACCUMULATION, FOLLOWS_LOSS, NOT_KNOWN, RANKS, Known

FILES = [recipe.files for recipe in RECIPES.values() if recipe.files is not None]
# Keys that say where something is, and the hash of a manifest that what is there is compared with.
PLACES: Mapping[str, str] = {
    "data.path": "sources", "data.datasets": "sources", "data.eval_path": "evaluation",
    "data.chat_template": "template", "data.chat_template_path": "template", "model.tokenizer": "tokenizer",
    "model.name_or_path": "weights", **{files.key: files.fact for files in FILES},
}  # fmt: skip


class _Content(NamedTuple):
    """A hash of a manifest: the key that it is about, the name that allows another one, what a refusal says of it."""

    key: str
    group: str
    what: str


_CONTENTS: Mapping[str, _Content] = {
    "tokenizer": _Content(
        "model.tokenizer", "", "it is not the one that {} was saved with, and the model has learned that one's tokens"
    ),
    "sources": _Content("data.path", "data", "the rows made of it are not those that {} was trained on"),
    "evaluation": _Content("data.eval_path", "data", "the rows made of it are not those that {} was evaluated on"),
    "template": _Content("data.chat_template", "data", "its text is not the one that {} was trained with"),
    "code": _Content("model.name_or_path", "model", "its Python code is not the one that {} was trained with"),
    "weights": _Content("model.name_or_path", "model", "its weights are not those that {} was trained on"),
    "seed": _Content("training.seed", "model", "it draws other random weights than those that {} was trained on"),
    **{files.fact: _Content(files.key, files.change, files.what) for files in FILES},
}

# Keys of Hugging Face's model configs on which names or shapes of parameters depend, or how a head is cut out of them.
_SHAPES = """
    model_type vocab_size hidden_size n_embd d_model dim intermediate_size n_inner ffn_dim d_ff num_hidden_layers
    n_layer n_layers num_layers num_attention_heads n_head n_heads num_heads num_key_value_heads head_dim
    word_embed_proj_dim max_position_embeddings n_positions n_ctx tie_word_embeddings attention_bias mlp_bias
    num_local_experts num_experts moe_intermediate_size num_experts_per_tok
"""
SHAPES = frozenset(_SHAPES.split())


class Line(NamedTuple):
    """A difference that is refused: the dotted key, its value now, and what to do."""

    key: str
    value: object
    what: str


class Changes(NamedTuple):
    """All differences that matter: the rules of keys that are honoured or allowed, what to log of them, and what is
    refused.
    """

    keys: dict[str, str]
    said: list[str]
    refused: list[Line]


class Difference(NamedTuple):
    """A dotted key that two configs have otherwise: its rule, the value that was saved, and the value now."""

    key: str
    rule: str
    old: Any
    new: Any


def compare(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    ranks: tuple[int, int],
    name: str,
    known: Known = NOT_KNOWN,
    resolved: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
) -> Changes:
    """Compare two configs as trees; ``ranks`` that saved and that resume, as copies of the model, the ``name`` of the
    checkpoint, what is ``known`` of it, and the ``resolved`` arguments of both.
    """
    written = {f"training.{key}" for tree in (saved, now) for key in tree.get("training", {})}
    allowed, places = now.get("training", {}).get("allow_change", ()), moved(saved, now, known)
    saved, now = (
        {**tree, "training": {**tree.get("training", {}), **arguments}}
        for tree, arguments in zip((saved, now), resolved, strict=True)
    )
    schedule = now["training"].get("lr_scheduler_type")
    unequal = [diff for diff in differences(saved, now) if diff.key not in places]
    keys, said, refused = changes = Changes({}, [], [])
    for key, value, why in _removed(saved):
        refused.append(Line(key, None, f"{name} was saved with {_shown(value)}: {why}"))
    reasons = dict[str, str]()  # of what is refused of ranks, by rule
    if ranks[0] != ranks[1]:
        if any(_exchanges_lossily(tree) for tree in (saved, now)):
            unequal.append(Difference(RANKS, "compression", *ranks))
            reasons["compression"] = " (each rank has state of its own)"
        deciding = [diff.key for diff in unequal if diff.rule != "free"] + [key for key in places if "data" in allowed]
        if any(key.startswith("data.") for key in deciding):
            known = known._replace(rows=None)
        if why := same_rows.why_not(saved, now, ranks, known):
            unequal.append(Difference(RANKS, "ranks", *ranks))
            reasons |= dict.fromkeys(("ranks", "accumulation"), f" ({why})")
        else:
            unequal = [diff for diff in unequal if diff.key != ACCUMULATION]
            if (count := same_rows.micro_batches(now, ranks[1])) > 2:
                said.append(f"the same rows in an update; its {count} micro-batches may be added up in another order")
    for key, rule, old, new in unequal:
        if rule == "free" or (rule == "evaluations" and schedule not in FOLLOWS_LOSS):
            continue
        recipe = RECIPES.get(key.partition(".")[0])
        if recipe and not recipe.changes(key, *(tree.get(recipe.name) or {} for tree in (saved, now))):
            continue
        if rule == "sums":
            rule = "said"
            if "layers" in (old, new) and _is_tied(known.model) and same_rows.micro_batches(now, ranks[1]) > 1:
                said.append(
                    "the tied head's gradients are added in another order, so last bits may be others from now on"
                )
        was = _shown(old) if key in written or not key.startswith("training.") else f"{_shown(old)}, the default then"
        if why := _cannot(key, rule, old, new, schedule):
            refused.append(Line(key, new, f"{name} was saved with {was}, {why}"))
        elif rule == "said" or rule in allowed:
            keys[key] = rule
            said.append(f"{key} = {_shown(new)} (was {was})")
        else:
            back = "start that many" if key == RANKS else "write that"
            what = f"{name} was saved with {was}, and the result would be another run's{reasons.get(rule, '')}"
            refused.append(Line(key, new, f"{what}; {back}, or allow it with training.allow_change: [{rule}]"))
    return changes


def moved(
    saved: Mapping[str, Any], now: Mapping[str, Any], known: Known = NOT_KNOWN
) -> dict[str, tuple[object, object]]:
    """Keys of two configs that differ in where something is alone, each with both values, if it can be compared."""
    moved_keys = {key: (old, new) for key, _, old, new in differences(saved, now) if _is_moved(key, old, new)}
    return {key: both for key, both in moved_keys.items() if PLACES[key] not in known.lacks}


def _is_moved(key: str, old: Any, new: Any) -> bool:
    if key == "data.datasets":
        return bool(old and new) and [{**part, "path": ""} for part in old] == [{**part, "path": ""} for part in new]
    if key in ("data.path", "data.eval_path", "model.name_or_path"):
        return isinstance(old, str) and isinstance(new, str)
    if recipe := RECIPES.get(key.partition(".")[0]):
        return recipe.files is not None and key == recipe.files.key and recipe.is_moved(old, new)
    return key in PLACES and not any(isinstance(value, Mapping) for value in (old, new))


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
    common_keys = saved["config"].keys() & now["config"].keys()
    trees = [{"model": {"config": {key: tree["config"][key] for key in common_keys}}} for tree in (saved, now)]
    changes = compare(trees[0], {**trees[1], "training": {"allow_change": list(allowed)}}, (1, 1), name)
    same_rows = saved["fingerprint"] == now["fingerprint"]
    of_data = Changes({}, [], [])
    for fact in ("sources", "evaluation", "template"):
        if saved[fact] is None:  # the fingerprint knows it as well, but not it alone
            known = (
                (now[fact] if same_rows else "not known") if any(PLACES[key] == fact for key in places) else now[fact]
            )
        else:
            known = saved[fact]
        if _CONTENTS[fact].key not in changed:
            compare_fact(fact, known, now[fact], allowed, name, places, of_data)
    compare_fact("tokenizer", saved["tokenizer"], now["tokenizer"], allowed, name, places, changes)
    if saved["code"] is not None:
        compare_fact("code", saved["code"], now["code"], allowed, name, places, changes)
    expected = any(key.startswith("data.") or key == "training.seed" for key in changed)
    if not (same_rows or expected or of_data.keys or of_data.refused or changes.refused):
        compare_fact("sources", "", "other", allowed, name, {}, of_data)
    return Changes(changes.keys | of_data.keys, changes.said + of_data.said, changes.refused + of_data.refused)


def compare_fact(
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
        changes.keys.update(dict.fromkeys(where or [content.key], content.group))
        shown = [f"{key} = {_where(new)} (was {_where(old)})" for key, (old, new) in where.items()] or [content.key]
        changes.said.extend(f"{place}: other contents than the checkpoint's" for place in shown)
        return
    cure = f", or allow it with training.allow_change: [{content.group}]" if content.group else ""
    for key, (old, new) in where.items():
        what = f"{name} was saved with {_where(old)}; {content.what.format(name)}; write that{cure}"
        changes.refused.append(Line(key, _where(new), what))
    if not where:
        back = "those" if " those " in content.what else "that"
        changes.refused.append(Line(content.key, None, f"{content.what.format(name)}; bring {back} back{cure}"))


def _where(value: Any) -> str:
    """The places in a value of ``PLACES``, in one line; a chat template may be there in full."""
    if isinstance(value, list | dict):
        value = ", ".join(dataset["path"] if isinstance(dataset, Mapping) else dataset for dataset in value)
    return shorten(_shown(value), 200)


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    """What two configs have otherwise, by their keys. A section that only one of them has is one difference, with those
    in it whose rule is another: what is not there is as by default.
    """
    return _inside(RunConfig, saved, now, "fixed", "")


def _inside(
    section: type[BaseModel], saved: Mapping[str, Any], now: Mapping[str, Any], around: str, at: str
) -> Iterator[Difference]:
    """Differences in a section, whose own rule is ``around``."""
    for name in dict.fromkeys([*section.model_fields, *saved, *now]):
        key, field = f"{at}{name}", section.model_fields.get(name)
        default = None if field is None or field.is_required() else field.get_default(call_default_factory=True)
        old, new = (tree.get(name, default) for tree in (saved, now))
        removed_rule = "free" if key in REMOVED else "fixed"  # another release had it
        rule = removed_rule if field is None else rule_at(field, around)
        if key == "strategies":
            yield from _of_strategies(old, new)
        elif rule == "architecture":
            # Where the model is a saved one, model.name_or_path differs, which says it all.
            yield from _of_architecture(old, new, key) if old and new else ()
        elif key == "training.data_seed" and (old, new) == (saved.get("seed"), now.get("seed")):
            continue  # the seed has its own line
        elif old != new:
            yield from _of_key(Difference(key, rule, old, new), field and inner_model(field.annotation))


def _of_key(found: Difference, section: type[BaseModel] | None) -> Iterator[Difference]:
    """The difference of a key, or those in the ``section`` that it is."""
    key, rule, old, new = found
    values = [value for value in (old, new) if value is not None]
    if section is None or not all(isinstance(value, Mapping) for value in values):
        yield found
        return
    both_written = len(values) == 2
    if not both_written:
        yield found
    inside = _inside(section, old or {}, new or {}, rule, f"{key}.")
    yield from (difference for difference in inside if both_written or difference.rule != rule)


def _of_strategies(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    for name in sorted({*saved, *now}):
        old = saved.get(name)
        new = now.get(name)
        strategy = find(name) if name in available() else None
        if strategy is not None and old is not None:
            old = {option: value for option, value in old.items() if not strategy.removed_of(option, value)}
        if old != new:
            yield from _of_key(
                Difference(f"strategies.{name}", strategy.resume if strategy else "fixed", old, new), strategy
            )


def _of_architecture(old: Mapping[str, Any], new: Mapping[str, Any], at: str) -> Iterator[Difference]:
    """Of Hugging Face's config of a model, by names of its keys."""
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _of_architecture(before, after, f"{at}.{name}")
        elif before != after:
            rule = "fixed" if name in SHAPES else "dropout" if "drop" in name else "model"
            yield Difference(f"{at}.{name}", rule, before, after)


def _exchanges_lossily(tree: Mapping[str, Any]) -> bool:
    """Whether ranks have state of their own."""
    return any(difference.rule == "compression" for difference in _of_strategies({}, tree.get("strategies", {})))


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


def _cannot(key: str, rule: str, old: object, new: object, schedule: object) -> str:
    """Why a change cannot work at all, and the way out; empty if it can. ``schedule`` is this run's."""
    if rule == "evaluations":
        return "and the schedule follows the evaluations; write that"
    if rule == "fixed":
        return "and its state does not fit another; write that, or start anew in another training.output_dir"
    if key == "training.lr_scheduler_type" and (old in FOLLOWS_LOSS) is not (new in FOLLOWS_LOSS):
        return "and a schedule that follows the evaluation loss cannot go on from one that does not; write that"
    if key == "training.learning_rate" and schedule in FOLLOWS_LOSS:
        return "and a schedule that follows the evaluation loss goes on from the rate that it has reached; write that"
    return ""


def _shown(value: object) -> str:
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
