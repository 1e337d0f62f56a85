"""Hints for unknown keys: most configs are rewritten from another framework's.

The first of these that matches is used: for a name of another framework (``foreign.yaml``), our name for it; for one of
our own keys in the wrong section, its full name; for anything else, the most similar key, if one is similar.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from pydantic import BaseModel

from strategies.core.registry import available
from trainer.config.arguments import REFUSED
from trainer.config.sections import SECTIONS, RunConfig
from trainer.config.wording import inner_model
from trainer.config.yaml_file import Key, read
from trainer.errors import nearest


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
    """All our keys, dotted. Of strategies only the names, since their files are imported on demand."""

    def below(model: type[BaseModel], at: str) -> Iterable[str]:
        for name, field in model.model_fields.items():
            yield f"{at}.{name}"
            if inner := inner_model(field.annotation):
                yield from below(inner, f"{at}.{name}")

    keys = [key for name, model in SECTIONS.items() for key in (name, *below(model, name))]
    return (*keys, "strategies", *(f"strategies.{name}" for name in available()))


def foreign(key: Key) -> str | None:
    """The hint for ``key`` if it is a name of another framework."""
    name, inner = ".".join(key), ".".join(key[1:])
    found = elsewhere().get(name) or (elsewhere().get(inner) if key[0] in RunConfig.model_fields else None)
    if found is None:
        return None
    whose, (answer, _, remark) = found[0], found[1].partition("; ")
    if answer.split(".")[0] not in RunConfig.model_fields:
        return f"that is {whose}'s name; {found[1]}"
    return f"that is {whose}'s name, write '{answer}'" + (f" ({remark})" if remark else "")


def unknown_key(key: Key, siblings: Sequence[str]) -> str:
    """The error message for ``key``, whose section has the keys ``siblings``."""
    if words := foreign(key):
        return f"unknown key; {words}"
    if key[-1] in REFUSED:
        return f"unknown key; {REFUSED[key[-1]]}"
    others = [known for known in known_keys() if known != ".".join(key)]
    for ending in (".".join(key), key[-1]):
        if ours := next((known for known in others if known.endswith(f".{ending}")), None):
            return f"unknown key; write '{ours}'"
    if hint := nearest(key[-1], siblings):
        return f"unknown key{hint}"
    leaves = {known.rpartition(".")[2]: known for known in reversed(known_keys())}
    if near := difflib.get_close_matches(key[-1], leaves, n=1, cutoff=0.75):
        return f"unknown key; did you mean '{leaves[near[0]]}'?"
    known = f"known here: {', '.join(siblings)}" if len(siblings) <= 20 else "see docs/config.md"
    return f"unknown key; {known}"
