"""Everything wrong with a tree of plain values as a config, each with what may be written.

Pydantic says only whether a value is valid; the words, what may be written here, are computed from its field.

Most configs are rewritten from another framework's. The hint for an unknown key is the first of these that matches: for
a name of another framework (``foreign.yaml``), our name for it; for one of our own keys in the wrong section, its full
name; for anything else, the most similar key. Foreign names are no aliases: a file could then say one thing twice.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from deepstow.strategies.core.protocol import Strategy
from deepstow.strategies.core.registry import available, find
from deepstow.trainer.config.arguments import REMOVED, Allowed
from deepstow.trainer.config.conflicts import conflicts
from deepstow.trainer.config.recipe import RECIPES
from deepstow.trainer.config.sections import OPTIONAL, SECTIONS, RunConfig, flat
from deepstow.trainer.config.yaml_file import MISSING, Fault, Key, leaves, read
from deepstow.trainer.errors import nearest

TOP = ("extends", *RunConfig.model_fields)
PLAIN: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Any: "anything",
}
BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))


def check(tree: dict[str, Any], whole: bool = True) -> list[Fault]:
    """Everything wrong with a merged tree. If a file could not be read ``whole``, missing keys are not reported."""
    unknown = [name for name in tree if name not in RunConfig.model_fields]
    faults = [fault for name in unknown for fault in _unknown((name,), tree[name], TOP)]
    # A misspelt section is one mistake: do not also report that the keys of the right name are missing.
    required = [name for name in SECTIONS if name not in tree]
    absent = {near for name in unknown for near in difflib.get_close_matches(name, required, n=1)}
    if unknown and len(absent) < len(required) == len(SECTIONS):
        what = f"none of the sections {', '.join(SECTIONS)} is here; is the file another framework's?"
        faults.insert(0, Fault((), MISSING, f"{what} deepstow import makes a config from it"))
        absent = {*SECTIONS}
    for name, model in SECTIONS.items():
        if name not in absent:
            faults += section_faults(model, tree.get(name, {}), (name,))
    for name, model in OPTIONAL.items():
        if tree.get(name) is not None:
            faults += section_faults(model, tree[name], (name,))
    if "task" in tree and (words := _refusal(RunConfig, RunConfig.model_fields["task"], tree["task"])):
        faults.append(Fault(("task",), tree["task"], words))
    if tree.get("recipes") is not None:
        faults += _recipes(tree["recipes"])
    faults += _strategies(tree.get("strategies"))
    if not whole:
        return [fault for fault in faults if fault.value is not MISSING]
    return faults + conflicts(flat(tree, [*(fault.key for fault in faults), *((name,) for name in absent)]))


def section_faults(model: type[BaseModel], data: object, at: Key) -> Iterator[Fault]:
    """Everything wrong with ``data``, written under the key ``at``, as a ``model``."""
    if not isinstance(data, dict):
        yield Fault(at, data, "must be a section: indented 'key: value' lines")
        return
    for name, value in data.items():
        key, field = (*at, name), model.model_fields.get(name)
        if removed := issubclass(model, Strategy) and model.removed_of(name, value):
            yield Fault(key, value, f"was removed: {removed.cure}")
        elif cure := REMOVED.get(".".join(key)):
            yield Fault(key, value, f"was removed: {cure}")
        elif field is None:
            yield from _unknown(key, value, tuple(model.model_fields))
        elif (inner := inner_model(field.annotation)) and isinstance(value, dict) and not _listed(field.annotation):
            yield from section_faults(inner, value, key)
        elif inner and isinstance(value, list) and value and _listed(field.annotation):
            for index, item in enumerate(value):
                yield from section_faults(inner, item, (*key, str(index)))
        elif words := _refusal(model, field, value):
            yield Fault(key, value, words)
    for name, field in model.model_fields.items():
        if field.is_required() and name not in data:
            yield Fault((*at, name), MISSING, f"missing; {_must_be(field, MISSING)}")


def _listed(annotation: Any) -> bool:
    """Whether the type is a list, or may be one."""
    members = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType, Annotated) else ()
    return get_origin(annotation) is list or any(map(_listed, members))


def _refusal(model: type[BaseModel], field: FieldInfo, value: object) -> str | None:
    """What is wrong with the value of a field, or None."""
    names = choices(field.annotation)
    # In a list, since the type of a field may be a model, which has a config of its own.
    kind: Any = GenericAlias(list, (Annotated[field.annotation, field],))
    try:
        TypeAdapter(kind, config=model.model_config).validate_python([value])
    except ValidationError as error:
        raised = (item["ctx"]["error"] for item in error.errors() if item["type"] == "value_error")  # of our validators
        return str(next(raised, None) or _must_be(field, value))
    if isinstance(value, bool | float) and value in names and type(value) not in map(type, names):
        return _must_be(field, value)  # true or 1.0 for the choice 1, which pydantic accepts since it compares with ==
    return None


def _must_be(field: FieldInfo, value: object) -> str:
    words = f"must be {allowed(field.annotation, field.metadata)}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{words}, and finite"
    names = [choice for choice in choices(field.annotation) if isinstance(choice, str)]
    if isinstance(value, list):
        unknown = next((item for item in value if isinstance(item, str) and item not in names), None)
        return words + (nearest(unknown.lower(), names, cutoff=0.5) if unknown is not None else "")
    if isinstance(value, str):
        if hint := nearest(value.lower(), names, cutoff=0.5):
            return words + hint
        if "number" in words:
            with suppress(ValueError):
                float(value)
                return f"{words}; write it plainly, without quotes or underscores"
    return words


def _strategies(section: object) -> Iterator[Fault]:
    if not isinstance(section, dict):
        if section is not None:
            yield Fault(("strategies",), section, "must be a section: indented 'name: {options}' lines")
        return
    for name, options in section.items():
        key = ("strategies", name)
        if name not in available():
            hint = foreign(key)
            suggestion = nearest(name, available()) or (f"; {hint}" if hint else "")
            yield Fault(key, options, f"not a strategy; available: {', '.join(available())}{suggestion}")
        elif options is None:
            yield Fault(key, None, "on or off? write {} to switch it on as it is, or remove the line")
        else:
            yield from section_faults(find(name), options, key)


def _recipes(section: object) -> Iterator[Fault]:
    """Of those from outside, whose options are looked at where their code may run."""
    if not isinstance(section, dict) or not all(isinstance(options, dict) for options in section.values()):
        yield Fault(("recipes",), section, "must be a section: indented 'module:Class: {options}' lines")
        return
    for name in section.keys() & {*RECIPES}:
        yield Fault(("recipes", name), section[name], f"has a section of its own; write {name}: {{...}}")


def _unknown(key: Key, value: object, siblings: Sequence[str]) -> Iterator[Fault]:
    """One fault for an unknown key, or one per key inside it if it is a section of another framework."""
    inner = list(leaves(key, value))
    if any(foreign(leaf) for leaf, _ in inner if leaf != key):
        for leaf, leaf_value in inner:
            yield Fault(leaf, leaf_value, unknown_key(leaf, siblings))
    else:
        yield Fault(key, value, unknown_key(key, siblings))


@cache
def elsewhere() -> dict[str, tuple[str, str]]:
    """Each name that another framework has for one of our keys: whose it is, and the answer."""
    table = read(Path(__file__).with_name("foreign.yaml")).tree
    return {
        name: (whose, answer)
        for answer, names_by_framework in table.items()
        for whose, names in names_by_framework.items()
        for name in (names if isinstance(names, list) else [names])
    }


@cache
def known_keys() -> tuple[str, ...]:
    """All our keys, dotted: those of each data set after those of data, which are alike. Of strategies only the names,
    since their files are imported on demand.
    """

    def below(model: type[BaseModel], at: str) -> Iterable[str]:
        for name, field in model.model_fields.items():
            yield f"{at}.{name}"
            if inner := inner_model(field.annotation):
                yield from below(inner, f"{at}.{name}")

    keys = [key for name, model in {**SECTIONS, **OPTIONAL}.items() for key in (name, *below(model, name))]
    keys = sorted(keys, key=lambda known: known.count("."))
    return (*keys, "strategies", *(f"strategies.{name}" for name in available()))


def foreign(key: Key) -> str | None:
    """The hint for ``key`` if it is a name of another framework."""
    name, inner = ".".join(key), ".".join(key[1:])
    entry = elsewhere().get(name) or (elsewhere().get(inner) if key[0] in RunConfig.model_fields else None)
    if entry is None:
        return None
    whose, (answer, _, remark) = entry[0], entry[1].partition("; ")
    if answer.split(".")[0] not in RunConfig.model_fields:
        return f"that is {whose}'s name; {entry[1]}"
    return f"that is {whose}'s name, write '{answer}'" + (f" ({remark})" if remark else "")


def unknown_key(key: Key, siblings: Sequence[str]) -> str:
    """The error message for ``key``, whose section has the keys ``siblings``."""
    if words := foreign(key):
        return f"unknown key; {words}"
    if len(key) > 2 and (hint := nearest(key[-1], siblings)):  # alpha beside lora_alpha is not that of another section
        return f"unknown key{hint}"
    candidates = [candidate for candidate in known_keys() if candidate != ".".join(key)]
    for ending in (".".join(key), key[-1]):
        if full_name := next((candidate for candidate in candidates if candidate.endswith(f".{ending}")), None):
            return f"unknown key; write '{full_name}'"
    if hint := nearest(key[-1], siblings):
        return f"unknown key{hint}"
    leaves = {candidate.rpartition(".")[2]: candidate for candidate in reversed(known_keys())}
    if len(key) <= 2 and (near := difflib.get_close_matches(key[-1], leaves, n=1, cutoff=0.75)):
        return f"unknown key; did you mean '{leaves[near[0]]}'?"
    listing = f"known here: {', '.join(siblings)}" if len(siblings) <= 20 else "all keys: deepstow docs config"
    return f"unknown key; {listing}"


# --- what may be written ---------------------------------------------------------------------------------------------


def allowed(annotation: Any, metadata: Iterable[object] = ()) -> str:
    """What may be written for this type, worded to follow "must be"."""
    marks = [mark for item in metadata for mark in (item.metadata if isinstance(item, FieldInfo) else [item])]
    for mark in marks:
        if isinstance(mark, Allowed):
            return str(mark)
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return allowed(inner[0], [*inner[1:], *marks])
    if origin in (Union, types.UnionType):
        return " or ".join(allowed(member) for member in inner if member is not type(None))
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}" if len(inner) > 1 else str(inner[0])
    if origin is list:
        return f"a list, each {allowed(inner[0])}"
    if origin is dict:
        words = allowed(inner[1])
        return "a mapping" if words == PLAIN[Any] else f"a mapping, each {words}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a mapping with {', '.join(annotation.model_fields)}"
    if any(getattr(mark, "min_length", None) for mark in marks):
        return "non-empty text"
    kind = PLAIN.get(annotation, f"a {getattr(annotation, '__name__', 'value')}")
    limits = [(sign, getattr(mark, name, None)) for mark in marks for name, sign in BOUNDS]
    bounds = " and ".join(f"{sign} {limit}" for sign, limit in limits if limit is not None)
    return f"{kind} {bounds}".rstrip()


def choices(annotation: Any) -> tuple[Any, ...]:
    """The values that the Literals of a type list, inside unions and lists too."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(choice for inner in get_args(annotation) for choice in choices(inner))


def inner_model(annotation: Any) -> type[BaseModel] | None:
    """The model that a mapping for this field is validated with, or None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, Annotated, list):
        return next((model for inner in get_args(annotation) if (model := inner_model(inner))), None)
    return None
