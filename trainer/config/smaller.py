"""Combinations of keys of ``distill`` and ``prune``; ``conflicts.py`` says how they are found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deepstow.strategies.core.protocol import COMPILE_KEYS
from deepstow.trainer.config.recipe import RECIPES
from deepstow.trainer.tasks.task import Task
from deepstow.trainer.values import KEEP_ONE, NOT_THEIRS, WRONG, Found, Values

NOT_DISTILLED = (*NOT_THEIRS, *COMPILE_KEYS)


def conflicts(sections: Mapping[str, Values]) -> Found:
    """Every conflict of ``distill`` and ``prune`` with the others."""
    yield from _distilled(sections)
    yield from _pruned(sections)
    for name in ("prune", "distill"):
        if sections["model"].attention_mask and sections[name]:
            yield "model.attention_mask", f"has not been compared with {name}; {KEEP_ONE}"


def of_task(task: Task, sections: Mapping[str, Values]) -> Found:
    """What is for tasks that predict the next token alone."""
    recipes = [each.name for each in RECIPES.values() if each.language]
    yield from language_alone(task, [name for name in ("distill", "prune", *recipes) if sections[name]])


def language_alone(task: Task, keys: Iterable[str]) -> Found:
    """Of ``keys`` that are for tasks that predict the next token alone."""
    for key in () if task.language else keys:
        yield key, f"is for task sft and pretrain, and this is {task.name}; leave it out"


def _distilled(sections: Mapping[str, Values]) -> Found:
    if not sections["distill"]:
        return
    if sections["data"].streaming:
        yield "data.streaming", "cannot go with distill: the teacher answers all rows before training; leave it out"
    d = sections["distill"]
    if d.on != "logits" and isinstance(d.teacher, dict) and len(d.teacher) > 1:
        yield "distill.on", "hidden states of several teachers have no average; write logits, or name one teacher"
    if d.on == "logits" and d.hidden_weight != 1:
        yield "distill.hidden_weight", "is for distill.on: hidden or both; leave it out"
    for key in NOT_DISTILLED:
        if sections["training"][key]:
            yield f"training.{key}", f"cannot go with distill, whose loss does not have it; {KEEP_ONE}"


def _pruned(sections: Mapping[str, Values]) -> Found:
    p, m, d, t = (sections[name] for name in ("prune", "model", "data", "training"))
    if not p:
        return
    if m.lora:
        yield "model.lora", "cannot go with prune: adapters are added to weights that stay as they are; leave it out"
    if m.quantization_config:
        yield "model.quantization_config", "cannot go with prune, whose weights are trained; leave it out"
    if p.method == "structured":
        yield from _structured(p, m, d)
        return
    if p.parts:
        yield "prune.parts", "are of method structured; leave them out"
    if p.method == "2:4" and p.sparsity != 0.5:
        yield "prune.sparsity", "two of four are half of the weights; leave it out"
    if p.method == "2:4" and p.schedule == "cubic":
        yield "prune.schedule", "two of four go at once; leave it out, or write magnitude"
    if key := next((key for key in COMPILE_KEYS if t[key]), None):
        yield f"training.{key}", f"has not been compared with prune; {KEEP_ONE}"
    if p.method == "wanda" and d.streaming:
        yield "data.streaming", "cannot go with wanda, which reads the first rows again; write magnitude"
    for key in ("load_best_model_at_end", "early_stopping_patience"):
        if t[key] and t[key] is not WRONG and p.method != "2:4" and p.schedule != "once":
            what = "the best weights may be of before the last round of pruning; write prune.schedule: once"
            yield f"training.{key}", what


def _structured(p: Values, m: Values, d: Values) -> Found:
    """What goes once, before training, from a saved model, by the rows that are trained on."""
    for key, value in {"schedule": None, "modules": None, "until": 0.5, "rounds": 10}.items():
        if p[key] != value:
            yield f"prune.{key}", "is for weights that become zero; with method structured, leave it out"
    if isinstance(p.parts, list) and len(set(p.parts)) != len(p.parts):
        yield "prune.parts", "must be names, all different"
    if m.config:
        what = "random weights are all alike; name a saved model, or write smaller sizes here"
        yield "model.config", f"cannot go with prune.method structured: {what}"
    if m.trust_remote_code:
        yield "model.trust_remote_code", "cannot go with prune.method structured, which knows Transformers' own models"
    if d.streaming:
        yield "data.streaming", "cannot go with prune.method structured, which reads the first rows before training"
