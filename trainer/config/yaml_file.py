"""Read YAML by the 1.2 core schema, with the line of every key.

PyYAML reads ``1e-4`` as text, ``no`` as false and ``010`` as eight, and silently keeps the last of two equal keys.
Refused, each with its line: duplicate keys, tags (``!!python/...`` included), aliases (a small file cannot expand into
a huge one), keys that are not text, integers beyond 64 bits, and more than one document. All that leaves the rest of
the file readable is collected; a syntax error ends the reading.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from deepstow.trainer.errors import printable

Key = tuple[str, ...]
COMMAND_LINE = "command line"
LONGEST_VALUE = 60  # characters of a value that an error line repeats
LARGEST_INTEGER = 2**63
LARGEST_TEXT = 1 << 18  # characters, which take seconds to read


def _integer(text: str) -> int:
    number = int(text, 0) if text.startswith(("0o", "0x")) else int(text)
    if not -LARGEST_INTEGER <= number < LARGEST_INTEGER:
        raise ValueError(text)
    return number


TEXT, CONTAINERS = "tag:yaml.org,2002:str", ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
# Pattern, the characters that such a scalar may begin with ("" stands for an empty one), and its value.
SCALARS: Mapping[str, tuple[str, Sequence[str], Callable[[str], object]]] = {
    "tag:yaml.org,2002:null": (r"~|null|Null|NULL|", ("~", "n", "N", ""), lambda text: None),
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", "tTfF", lambda text: text.lower() == "true"),
    "tag:yaml.org,2002:int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789", _integer),
    "tag:yaml.org,2002:float": (
        FLOAT, "-+.0123456789", lambda text: float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
    ),
}  # fmt: skip

# Part of PyYAML's message, and the message that we show instead.
SYNTAX: tuple[tuple[str, str], ...] = (
    ("'\\t'", "a tab in the indentation; use spaces"),
    ("alias", "aliases (*name) are not read; write the value where it is used"),
    ("mapping values are not allowed", "a ':' where none can be; check the indentation, or quote the text"),
    ("could not find expected ':'", "a key without ': ' after it"),
    ("expected <block end>", "the indentation does not match the lines above"),
    ("end of stream", "a quote or bracket is never closed"),
    ("node content", "a value is missing, or a bracket is never closed"),
    ("expected ',' or", "a bracket is never closed, or a comma is missing"),
    ("single document", "more than one document; a config is one"),
    ("start any token", "text that begins with a special character; put it in quotes"),
    ("undeclared tag handle", "tags (!name) are not read"),
)


class Location(NamedTuple):
    """Where a key was written: a file and its line (0: the whole file), or the command line."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line and self.file != COMMAND_LINE else self.file


MISSING = object()  # the value of a key that is not there


class Fault(NamedTuple):
    """A key (none: a whole file), its value or MISSING, what is wrong with it, and where it was written."""

    key: Key
    value: object
    what: str
    location: Location = Location("")

    def __str__(self) -> str:
        return f"{self.location}: {error_line(self.key, self.value, self.what)}"


def dotted(key: Key) -> str:
    """The key as a user writes it, on one line."""
    return printable(".".join(key))


def shown(key: Key, value: object) -> str:
    """``value`` as an error line shows it: JSON, shortened; secrets are hidden."""
    if re.search(r"((?<!bos_|eos_|pad_|unk_)token|password|secret|api_key)$", key[-1] if key else ""):
        return "(hidden)"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ("-.inf" if value < 0 else ".inf")
    text = printable(json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def location_of(key: Key, locations: Mapping[Key, Location]) -> Location | None:
    """Where ``key`` was written, or else the nearest section around it; None if there is neither."""
    around = (key[:depth] for depth in range(len(key), -1, -1))
    return next((locations[section] for section in around if section in locations), None)


def error_line(key: Key, value: object, what: str) -> str:
    """``dotted.key = value: what``, the form of all config errors, as far as there are a key and a value."""
    lead = dotted(key)
    if value is not MISSING:
        lead = f"{lead} = {shown(key, value)}" if key else shown(key, value)
    return f"{lead}: {what}" if lead else what


class _Loader(yaml.SafeLoader):
    """Turns text into nodes; ``Document``, which knows the keys above a node, turns those into values."""

    yaml_implicit_resolvers = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="alias", problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Quotes text that our loader or a YAML 1.1 reader would otherwise read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # Unusual line breaks (U+0085, U+2028) have to be escaped, which needs double quotes.
        return self.represent_scalar(TEXT, data, style=None if data.isprintable() else '"')


_Dumper.add_representer(str, _Dumper.represent_str)
for _tag, (_pattern, _first, _) in SCALARS.items():
    for _each in (_Loader, _Dumper):
        _each.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern})\\Z"), _first)


@dataclass
class Document:
    """A file as nested plain values, the location of every key, and the problems found while reading."""

    file: str = ""
    tree: dict[str, Any] = field(default_factory=dict)
    locations: dict[Key, Location] = field(default_factory=dict)
    problems: list[Fault] = field(default_factory=list)  # with the keys whose values could not be read

    def report(self, line: int, what: str, key: Key = (), value: object = MISSING) -> None:
        """Add a problem; ``key`` is the one whose ``value`` could not be read."""
        self.problems.append(Fault(key, value, what, Location(self.file, line)))

    def value_of(self, node: yaml.Node, key: Key) -> Any:
        """The value of a node; the locations of keys in it and the problems are added to those of the document."""
        if node.tag not in (TEXT, *SCALARS, *CONTAINERS):
            return self._refuse(node, key, node.tag, "tags (!name) are not read; write a plain value")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, key)
        if isinstance(node, yaml.SequenceNode):
            return [self.value_of(item, (*key, str(index))) for index, item in enumerate(node.value)]
        if node.tag != TEXT:
            try:
                return SCALARS[node.tag][2](node.value)
            except (ValueError, KeyError):  # or the tag of a container
                return self._refuse(node, key, node.value, "not a number that fits into 64 bits")
        if re.search("[\ud800-\udfff]", node.value):
            return self._refuse(node, key, node.value, "half of a character; write the character itself")
        return node.value

    def _mapping(self, node: yaml.MappingNode, key: Key) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for name_node, value_node in node.value:
            name = name_node.value if isinstance(name_node, yaml.ScalarNode) else "?"
            inner = (*key, name)
            line = name_node.start_mark.line + 1
            if name_node.tag != TEXT or re.search("[\ud800-\udfff]", name):
                self._refuse(name_node, key, name, "a key must be text; put it in quotes")
                continue
            first = self.locations.setdefault(inner, Location(self.file, line))
            value = self.value_of(value_node, inner)
            if name in tree:
                self.report(line, error_line(inner, value, f"duplicate key, first on line {first.line}; keep one"))
            else:
                tree[name] = value
        return tree

    def _refuse(self, node: yaml.Node, key: Key, value: object, what: str) -> None:
        self.report(node.start_mark.line + 1, what, key, value)


def _syntax(error: yaml.YAMLError, text: str) -> tuple[int, str]:
    """The line of a syntax error and a plain message for it."""
    if isinstance(error, yaml.reader.ReaderError):
        return text.count("\n", 0, error.position) + 1, "a control character; delete it"
    mark = getattr(error, "problem_mark", None)
    problem = " ".join(str(words_of) for name in ("context", "problem") if (words_of := getattr(error, name, None)))
    words = next((words for sign, words in SYNTAX if sign in problem), f"not valid YAML: {printable(problem)}")
    return (mark.line + 1 if mark else 1), words


def parse(text: str, file: str, key: Key = ()) -> tuple[Any, Document]:
    """The value written in ``text`` (None if it is empty), with locations and problems. Never raises."""
    document = Document(file)
    if len(text) > LARGEST_TEXT:
        document.report(1, error_line(key, MISSING, f"{len(text):,} characters; a config has {LARGEST_TEXT:,} at most"))
        return None, document
    try:
        node = _Loader(text).get_single_node()
        value = None if node is None else document.value_of(node, key)
    except yaml.YAMLError as error:
        line, words = _syntax(error, text)
    except RecursionError:
        line, words = 1, "nested too deeply"
    else:
        return value, document
    document.report(line, error_line(key, text if key else MISSING, words))
    return None, document


def read(path: Path) -> Document:
    """The mapping in the file at ``path``. Raises only OSError; everything else is in ``problems``."""
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        document = Document(str(path))
        document.report(raw.count(b"\n", 0, error.start) + 1, "not UTF-8; save the file as UTF-8")
        return document
    value, document = parse(text, str(path))
    if isinstance(value, dict):
        document.tree = value
    elif not document.problems:
        what = "the file is empty" if value is None else f"{shown((), value)} stands alone"
        document.report(1, f"{what}; a config has the sections model, data, training, strategies")
    return document


def write(tree: Mapping[str, Any]) -> str:
    """``tree`` as YAML that ``parse`` reads back to an equal value."""
    return yaml.dump(dict(tree), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def one_line(key: str, value: object) -> str:
    """``key: value`` on one line, which ``parse`` reads back."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=1 << 20)
    return f"{key}: {text.strip().removesuffix('...').strip()}"


def leaves(key: Key, value: object) -> Iterator[tuple[Key, object]]:
    """Every value below ``key`` that is not a mapping with something in it."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves((*key, name), inner)
    else:
        yield key, value
