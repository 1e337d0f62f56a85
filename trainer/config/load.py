"""Load a config file and overrides into a ``RunConfig``, or raise one error that lists everything wrong.

There are three layers: the base named by ``extends:``, the file, and the overrides. Later layers win key by key; null
removes what an earlier layer set. A base extends nothing, so that at most two files have to be read to find a value.
Nothing heavy is imported, so that a bad config fails in a fraction of a second, before torch is loaded.

    configs/x.yaml:12: training.learning_rte = 0.01: unknown key; did you mean 'learning_rate'?
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, create_model
from pydantic.json_schema import GenerateJsonSchema

from deepstow.strategies.core.registry import available, find
from deepstow.trainer.config.check import check
from deepstow.trainer.config.saved_adapter import filled
from deepstow.trainer.config.sections import OPTIONAL, SECTIONS, RunConfig
from deepstow.trainer.config.yaml_file import (
    COMMAND_LINE,
    MISSING,
    Document,
    Fault,
    Key,
    Location,
    error_line,
    leaves,
    location_of,
    parse,
    read,
)
from deepstow.trainer.errors import ConfigError, nearest_file, printable

EXTENDS = "Path of one other config, relative to this file, whose keys apply where this file sets none."


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The config in the file at ``path``, changed by ``overrides`` such as ``training.learning_rate=1e-4``. Raises
    ConfigError with one line per problem, in the order of the file.
    """
    path = Path(path)
    file = _read(path, Location(printable(str(path))))
    return _loaded(str(path), _base(path, file), file, overrides)


def load_tree(tree: dict[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """The config of a ``tree`` that is in no file, changed by ``overrides``; raises ConfigError as ``load`` does."""
    return _loaded(COMMAND_LINE, Document(), Document(COMMAND_LINE, tree=tree), overrides)


def _loaded(path: str, base: Document, file: Document, overrides: Sequence[str]) -> RunConfig:
    """The config of these layers; ``path`` is where problems of keys that are written nowhere are reported."""
    command = _overrides(overrides)
    layers = (base, file, command)
    tree: dict[str, Any] = {}
    for layer in layers:
        if layer is command:
            _drop_what_is_off(layer.tree, tree)
        tree = merged(tree, layer.tree)
    locations = _locations(layers)
    faults = [fault for layer in layers for fault in layer.problems]
    unread = {fault.key for fault in faults}
    complete = ("extends",) not in unread and all(layer.tree or not layer.problems for layer in (base, file))
    tree, adapter_faults = filled(tree)
    unsaid = {fault.key for fault in adapter_faults}
    for fault in [*adapter_faults, *(checked for checked in check(tree, complete) if checked.key not in unsaid)]:
        if fault.key not in unread:
            faults.append(fault._replace(location=location_of(fault.key, locations) or Location(path, 1)))
    if faults:
        order = {path: 0, COMMAND_LINE: 2}  # the base comes between
        faults.sort(key=lambda fault: (order.get(fault.location.file, 1), fault.location.line))
        raise ConfigError(map(str, faults))
    return build(tree).note_locations({(): Location(path), **locations})


def build(tree: dict[str, Any]) -> RunConfig:
    """The config of a tree in which ``check`` finds nothing."""
    strategies = {name: find(name).model_validate(options) for name, options in (tree.get("strategies") or {}).items()}
    sections = {name: tree.get(name, {}) for name in SECTIONS} | {name: tree.get(name) for name in OPTIONAL}
    sections["recipes"] = tree.get("recipes") or {}
    return RunConfig.model_validate({"task": tree.get("task", "sft"), **sections, "strategies": strategies})


PLAIN: tuple[tuple[str, Any], ...] = (("task", "sft"), ("recipes", {}))  # keys that are no sections


class _Partial(GenerateJsonSchema):
    """A schema in which no key is required, since a file with ``extends:`` may hold only some."""

    def field_is_required(self, *_: Any, **__: Any) -> bool:
        return False


def json_schema() -> dict[str, Any]:
    """The JSON schema of a config file, for editors; includes the options of all strategies."""
    options: dict[str, Any] = {name: (find(name) | None, None) for name in available()}
    strategies = create_model("Strategies", __config__={"extra": "forbid"}, **options)
    fields: dict[str, Any] = {name: (model, ...) for name, model in SECTIONS.items()}
    fields |= {name: (model | None, None) for name, model in OPTIONAL.items()}
    fields |= {name: (RunConfig.model_fields[name].annotation, default) for name, default in PLAIN}
    fields |= {"strategies": (strategies, None), "extends": (str, Field(description=EXTENDS))}
    schema = create_model("DeepStow", __config__={"extra": "forbid"}, **fields)
    return dict(schema.model_json_schema(schema_generator=_Partial))


def merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``under`` changed by ``over``: mappings key by key, all else replaced, null removes what was set."""
    result = dict(under)
    for name, value in over.items():
        if value is None and under.get(name) is not None:
            del result[name]
        elif isinstance(value, dict) and isinstance(under.get(name), dict):
            result[name] = merged(under[name], value)
        else:
            result[name] = value
    return result


def _read(path: Path, location: Location, key: Key = (), value: object = MISSING) -> Document:
    """The document at ``path``. If it cannot be read, that is a problem of the ``value`` of ``key`` at ``location``."""
    try:
        return read(path)
    except FileNotFoundError:
        what = f"no such file{nearest_file(path)}"
    except (OSError, ValueError) as error:
        what = f"cannot be read: {getattr(error, 'strerror', None) or 'not a path'}"
    return Document(problems=[Fault(key, value, what, location)])


def _base(path: Path, file: Document) -> Document:
    """The document that ``file`` extends, or an empty one; removes the key ``extends`` from both."""
    if "extends" not in file.tree:
        return Document()
    name, location = file.tree.pop("extends"), file.locations[("extends",)]
    if not isinstance(name, str) or not name:
        words = "must be the path of one config, relative to this file"
        return Document(problems=[Fault(("extends",), name, words, location)])
    base = _read(path.parent / name, location, ("extends",), name)
    if "extends" in base.tree:
        words, place = "a base extends nothing; one level only", base.locations[("extends",)]
        if (further := base.tree["extends"]) != name and isinstance(further, str):
            words += f"; write extends: {Path(name).parent / further} in {path.name}, and what else it needs"
        base.problems.append(Fault(("extends",), base.tree.pop("extends"), words, place))
    return base


def _overrides(arguments: Sequence[str]) -> Document:
    """Arguments such as ``a.b=value`` as one layer; the last one for a key wins."""
    layer = Document(COMMAND_LINE)
    for argument in arguments:
        name, equals, text = argument.partition("=")
        key = tuple(name.split("."))
        words = ""
        if not equals or not all(key):
            words = f"{printable(argument)}: an override is written key=value, as in training.max_steps=10"
        elif name.startswith("-"):
            words = f"{printable(argument)}: write {printable(argument.lstrip('-'))}, without dashes"
        elif key == ("extends",):
            words = error_line(key, text, "belongs into the file")
        if words:
            layer.report(0, words)
            continue
        value, parsed = parse(text, COMMAND_LINE, key)
        layer.problems += parsed.problems
        layer.locations |= parsed.locations | {key[:depth]: Location(COMMAND_LINE) for depth in range(1, len(key) + 1)}
        if not parsed.problems:
            _set(layer.tree, key, value)
    return layer


def _drop_what_is_off(command: dict[str, Any], tree: dict[str, Any]) -> None:
    """Ignore ``strategies.zero=null`` on the command line if that strategy is off already."""
    chosen, present = command.get("strategies"), tree.get("strategies") or {}
    if isinstance(chosen, dict) and isinstance(present, dict):
        for name in [name for name in chosen if chosen[name] is None and name in available() and name not in present]:
            del chosen[name]


def _set(tree: dict[str, Any], key: Key, value: object) -> None:
    for name in key[:-1]:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    tree[key[-1]] = value


def _locations(layers: Sequence[Document]) -> dict[Key, Location]:
    """Where each key was written last. A key replaced or taken back as a whole leaves no locations below it.

    A section of a file stays where it is when the command line changes keys in it.
    """
    locations: dict[Key, Location] = {}
    values: set[Key] = set()
    for layer in layers:
        keys = {key for key, value in leaves((), layer.tree) if value != {}}
        values |= keys
        kept = {at: of for at, of in locations.items() if not any(at[:depth] in keys for depth in range(1, len(at)))}
        if layer is layers[-1]:
            kept = layer.locations | kept
            locations = kept | {key: of for key, of in layer.locations.items() if key in values}
        else:
            locations = kept | layer.locations
    return locations
