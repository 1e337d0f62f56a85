"""Generate tables of the docs, between two marks: the keys in ``config.md`` and ``strategies``, from the sections; what
goes together in ``compatibility.md``, from the rules; ``exit-codes.md``, from the errors; and ``compared.md``, from the
YAML file beside it.

``python -m deepstow.trainer.config.doc`` writes them; a test compares the files with what would be written.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deepstow.strategies.core.compatibility import parts_of, values_in
from deepstow.strategies.core.registry import available, find, rules
from deepstow.trainer.config.check import allowed, elsewhere, inner_model
from deepstow.trainer.config.sections import OPTIONAL, SECTIONS, RunConfig
from deepstow.trainer.errors import MEANINGS, ExitCode

BEGIN, END = "<!-- keys: written by `python -m deepstow.trainer.config.doc` -->\n", "<!-- end of keys -->\n"
MENTION = re.compile(r"\bdocs/[\w/-]+\.md\b|\bdeepstow docs [a-z][a-z_-]*")
FRAMEWORKS = {
    "axolotl": "Axolotl", "llama_factory": "LLaMA-Factory", "hugging_face": "Hugging Face + DeepSpeed", "here": "here",
}  # fmt: skip


def pages(docs: Path) -> Iterator[tuple[Path, str]]:
    """Each page in the folder ``docs`` with generated tables, and the text that it should have. ValueError if a page
    does not have the two marks.
    """
    codes = ((f"`{int(code)}`", text, _again(code)) for code, text in MEANINGS.items())
    tables_of = {"config": _whole_config(), "compatibility": _compatibility()}
    tables_of |= {
        "exit-codes": _table(("code", "meaning", "start again?"), codes),
        "compared": _compared(docs / "compared.yaml"),
    }
    tables_of |= {f"strategies/{name}": _keys(find(name)) for name in available()}
    for name, tables in tables_of.items():
        page = docs / f"{name}.md"
        before, begin, remainder = page.read_text(encoding="utf-8").partition(BEGIN)
        _, end, after = remainder.partition(END)
        if not (begin and end):
            raise ValueError(f"{page}: the marks {BEGIN.strip()!r} and {END.strip()!r} are missing")
        yield page, "".join((before, BEGIN, "\n", _linked(tables, name, docs), "\n", END, after))


def _again(code: int) -> str:
    """Whether a scheduler starts a run again that ended so."""
    if code in (ExitCode.FINISHED, ExitCode.INTERRUPTED):
        return "no"
    by_others = code in (ExitCode.PREEMPTED, ExitCode.WATCHDOG, ExitCode.PEER_DIED)
    return "yes" if by_others else "after a look: it would end in the same way"


def _linked(text: str, page: str, docs: Path) -> str:
    """``text`` with the pages that it names, as in "see deepstow docs attention", as links from ``page``."""
    paths = {path.stem: path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}

    def link(match: re.Match[str]) -> str:
        name = Path(match[0].split()[-1]).stem
        shown = match[0] if match[0].startswith("deepstow") else name
        return f"[{shown}]({'../' * page.count('/')}{paths[name]})"

    return MENTION.sub(link, text)


def _cells(rows: Iterable[Mapping[str, str]]) -> Iterator[tuple[str, ...]]:
    return ((row["feature"], *(row[name] for name in FRAMEWORKS)) for row in rows)


def _compared(path: Path) -> str:
    """What is written for a feature in each framework, a table for each group."""
    groups: dict[str, list[dict[str, str]]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return "\n".join(
        f"## {group}\n\n{_table(('', *FRAMEWORKS.values()), _cells(rows))}" for group, rows in groups.items()
    )


def _whole_config() -> str:
    task = RunConfig.model_fields["task"]
    parts = ["## task\n", _keys_of({"task": task})]
    parts += [part for name, model in {**SECTIONS, **OPTIONAL}.items() for part in _section(f"## {name}", name, model)]
    parts += ["## recipes\n", _keys_of({"recipes": RunConfig.model_fields["recipes"]})]
    purposes = {name: inspect.cleandoc(find(name).__doc__ or "").split("\n\n")[0] for name in available()}
    links = _table(
        ("strategy", "what it does"), ((f"[`{name}`](strategies/{name}.md)", text) for name, text in purposes.items())
    )
    parts.append(f"## strategies\n\nA strategy that is present is on. Its page has its keys.\n\n{links}")
    foreign_names: dict[str, list[str]] = {}
    for name, (whose, ours) in elsewhere().items():
        foreign_names.setdefault(ours, []).append(f"`{name}` ({whose})")
    foreign = _table(("here", "elsewhere"), ((ours, ", ".join(names)) for ours, names in foreign_names.items()))
    return "\n".join([*parts, f"## Names from elsewhere\n\nThey are errors that name ours.\n\n{foreign}"])


def _section(title: str, at: str, model: type[BaseModel]) -> Iterator[str]:
    yield f"{title}\n\n{inspect.cleandoc(model.__doc__ or '')}\n"
    yield _keys(model)
    for name, field in model.model_fields.items():
        if inner := inner_model(field.annotation):
            yield from _section(f"### {at}.{name}", f"{at}.{name}", inner)


def _keys(model: type[BaseModel]) -> str:
    return _keys_of(model.model_fields)


def _keys_of(fields: Mapping[str, FieldInfo]) -> str:
    """Two columns, so that the second one is seen on a telephone."""
    rows = (
        (f"`{name}`", f"{field.description or ''} *({allowed(field.annotation, field.metadata)}; {_default(field)})*")
        for name, field in fields.items()
    )
    return _table(("key", "meaning"), rows) if fields else "No options.\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "not set" if value is None else f"default `{json.dumps(value, default=str)}`"


def variants() -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Each strategy with the options of its first example; one that has to be given one of some values, with each."""
    labelled: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for name in available():
        kind = find(name)
        levels = {key: get_args(field.annotation) for key, field in kind.model_fields.items() if field.is_required()}
        several = [(key, value) for key, values in levels.items() for value in values]
        required: dict[str, Mapping[str, Any]] = {f"{name} {value}": {key: value} for key, value in several}
        for label, options in (required or {name: kind.examples[0]}).items():
            labelled[label] = name, kind.model_validate(options).model_dump()
    return labelled


def _compatibility() -> str:
    """Signs for every two strategies, and the reasons of all rules."""
    every_rule, examples = rules(available()), variants()
    names, table = list(examples), list[tuple[str, ...]]()
    for row, label in enumerate(names[1:], 1):
        cells = []
        for name, options in (examples[column] for column in names[:row]):
            value_of = values_in({"strategies": dict([examples[label], (name, options)])})
            refused = any(rule.applies(value_of) for rule in every_rule)
            cells.append("" if name == examples[label][0] else "-" if refused else "+")
        table.append((f"`{label}`", *cells, *[""] * (len(names) - 1 - row)))
    strategies, keys = dict[tuple[str, str, str], list[str]](), dict[tuple[str, str], list[str]]()
    for rule in every_rule:
        beside = _terms(rule.beside, " and ")
        if rule.key.startswith("strategies."):
            unless = f"unless there is {_terms(rule.unless, ' or ')}" if rule.unless else ""
            strategies.setdefault((_term(rule.key), unless, rule.why), []).append(beside)
        else:
            keys.setdefault((beside, rule.why), []).append(_term(rule.key))
    pairs = ((key, f"{'; '.join(besides)} {unless}".strip(), why) for (key, unless, why), besides in strategies.items())
    outside = ((key, ", ".join(besides), why) for (key, why), besides in keys.items())
    tables = (
        _table(("", *(f"`{label}`" for label in names[:-1])), table),
        _table(("refused", "beside", "why"), pairs),
        _table(("beside", "keys that are refused", "why"), outside),
    )
    return "\n".join(tables)


def _terms(written: str, joint: str) -> str:
    alternatives = (alternative.split(" and ") for alternative in written.split(joint) if alternative)
    return joint.join(" and ".join(map(_term, alternative)) for alternative in alternatives)


def _term(term: str) -> str:
    """A term of a rule; an option that a strategy cannot be without is the strategy."""
    key, relation, values = parts_of(term)
    section, name, *option = key.split(".")
    shown = key
    if section == "strategies":
        required = bool(option) and find(name).model_fields[option[0]].is_required()
        shown = name if not option or (required and not values) else ".".join((name, *option))
    return f"`{shown}`" + f" {relation} {', '.join(values).lower()}" * bool(values)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("\n", " ").replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


if __name__ == "__main__":
    for path, text in pages(Path(__file__).resolve().parents[2] / "docs"):
        path.write_text(text, encoding="utf-8")
