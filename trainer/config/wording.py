"""What may be written for a key, in words, computed from its field: for error lines and for ``docs/config.md``."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trainer.config.yaml_file import Key

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


class Fault(NamedTuple):
    """A key, its value (or MISSING), and what is wrong with it."""

    key: Key
    value: object
    what: str


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
