"""Describe in words what may be written for a key, and turn pydantic's errors into the same words.

Problem. A validation library explains its own steps ("Input should be a valid integer, unable to parse"), while the
user wants to know what may be written here.

``allowed`` computes that from the declaration of the field, for error lines and for ``docs/config.md``, so that both
say the same: ``must be a whole number >= 1``. Only the location of pydantic's errors is used, and whether the key is
unknown or missing; its messages are not shown.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from trainer.config.yaml_file import Key
from trainer.errors import nearest

MISSING = object()  # the value of a key that is not there

PLAIN: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Any: "anything",
}
BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))


class Allowed(str):
    """Metadata that describes a type whose generated words would be clumsy: ``Annotated[..., Allowed("...")]``."""


class Unknown(tuple[str, ...]):
    """Marks a key that its section does not have; holds the keys that it has. ``hints`` finds the words."""


class Fault(NamedTuple):
    """A key, its value (or MISSING), and what is wrong with it."""

    key: Key
    value: object
    what: str | Unknown


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
        return " or ".join(allowed(part) for part in inner if part is not type(None))
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
    return tuple(choice for part in get_args(annotation) for choice in choices(part))


def inner_model(annotation: Any) -> type[BaseModel] | None:
    """The model that a mapping for this field is validated with, or None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return next((found for part in get_args(annotation) if (found := inner_model(part))), None)
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


def _locate(
    model: type[BaseModel], kind: str, location: Iterable[object], data: Any, at: Key
) -> tuple[Key, Any, object]:
    """Follow pydantic's location to our innermost field; returns its key, its value, and the field or Unknown."""
    current: type[BaseModel] | None = model
    found: FieldInfo | None = None
    for step in map(str, location):
        if current is None:
            break
        if kind == "extra_forbidden" and step in data and step not in current.model_fields:
            return (*at, step), data[step], Unknown(current.model_fields)
        if step not in current.model_fields:
            continue  # the name of a union's member, not a key
        found = current.model_fields[step]
        at, data = (*at, step), data.get(step, MISSING)
        current = inner_model(found.annotation) if isinstance(data, dict) else None
    # If a mapping is left, a member of a union that is not a mapping complains about it; ignore that.
    return at, data, found if current is None else None


def _from_pydantic(model: type[BaseModel], error: ValidationError, data: Any, at: Key) -> Iterator[Fault]:
    for item in error.errors(include_url=False, include_input=False):
        key, value, found = _locate(model, item["type"], item["loc"], data, at)
        if isinstance(found, Unknown):
            yield Fault(key, value, found)
        elif item["type"] in ("value_error", "assertion_error"):  # from a validator of ours: keep its words
            yield Fault(key, value, str(item["ctx"]["error"]))
        elif isinstance(found, FieldInfo):
            words = _must_be(found, value)
            yield Fault(key, value, f"missing; {words}" if value is MISSING else words)


def _mistyped_choices(model: type[BaseModel], data: Mapping[str, Any], at: Key) -> Iterator[Fault]:
    """Refuse true or 1.0 for the choice 1, which pydantic accepts because Literal compares with ==."""
    for name, field in model.model_fields.items():
        value, names = data.get(name), choices(field.annotation)
        if isinstance(value, bool | float) and value in names and type(value) not in map(type, names):
            yield Fault((*at, name), value, _must_be(field, value))


def faults(model: type[BaseModel], data: object, at: Key) -> list[Fault]:
    """Everything wrong with ``data``, written under the key ``at``, as a ``model``."""
    if not isinstance(data, dict):
        return [Fault(at, data, "must be a section: indented 'key: value' lines")]
    try:
        model.model_validate(data)
        found: list[Fault] = []
    except ValidationError as error:
        found = list(_from_pydantic(model, error, data, at))
    found += _mistyped_choices(model, data, at)
    first: dict[Key, Fault] = {}
    for fault in found:  # one line per key, since a union reports an error for each member
        first.setdefault(fault.key, fault)
    return list(first.values())
