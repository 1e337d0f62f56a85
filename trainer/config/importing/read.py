"""Read what another framework is told, in a file or by a command line, and find out whose it is.

A file is known by its keys. A command line is cut in two at the script: what stands before it is for the
launcher, and is read as Accelerate's config. Files that are named inside (``--deepspeed ds.json``) are read along.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from deepstow.trainer.config.arguments import TrainingSection
from deepstow.trainer.config.check import elsewhere
from deepstow.trainer.config.yaml_file import COMMAND_LINE, Document, Key, Location, dotted, location_of, parse
from deepstow.trainer.errors import ConfigError, nearest_file

NAMES: Mapping[str, str] = {
    "deepspeed": "DeepSpeed", "accelerate": "Accelerate", "axolotl": "Axolotl", "llamafactory": "LLaMA-Factory",
    "trl": "TRL", "transformers": "Transformers",
}  # fmt: skip
# The keys by which a file is known; those of TrainingArguments are in the files of several.
MARKS = {
    "deepspeed": {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"},
    "accelerate": {"compute_environment", "distributed_type", "num_machines", "main_training_function"},
    "axolotl": {"base_model", "sequence_len", "micro_batch_size", "sample_packing", "val_set_size"},
    "llamafactory": {"finetuning_type", "cutoff_len", "template", "dataset_dir", "lora_rank", "lora_target"},
}
TRL = {
    "use_peft", "max_length", "max_seq_length", "packing", "dataset_text_field", "assistant_only_loss", "lora_r",
    "completion_only_loss", "dataset_train_split", "dataset_num_proc", "lora_target_modules",
}  # fmt: skip
ARGUMENTS = {*TrainingSection.model_fields, "model_name_or_path", "dataset_name", *TRL}
TOOLS = {"trl": "trl", "llamafactory-cli": "llamafactory", "axolotl": "axolotl"}  # with a word instead of a script
LAUNCHERS = {"python", "python3", "torchrun", "deepspeed", "accelerate", *TOOLS}
TASKS = "sft|orpo|dpo|kto|reward|grpo|rloo|ppo"  # in the names of TRL's scripts
PATHS = ("", "deepspeed", "deepspeed_config", "deepspeed_config_file", "config_file", "config")  # keys that name a file
FILES = (".json", ".yaml", ".yml")
ASIDE = ("deepspeed", "accelerate")


class Source(NamedTuple):
    """One file, or one side of a command line: whose it is, its name, and what it says."""

    kind: str
    file: str
    tree: dict[str, Any]
    locations: Mapping[Key, Location] = {}

    @property
    def trains(self) -> bool:
        """Whether it says how to train, and not only on what; the others have to agree with it."""
        return self.kind not in ASIDE


class Given(NamedTuple):
    """A key of a source, and its value."""

    source: Source
    key: Key
    value: Any

    @property
    def name(self) -> str:
        """The key with dots."""
        return dotted(self.key)

    @property
    def where(self) -> Location:
        """The file, and the line if it is known."""
        return location_of(self.key, self.source.locations) or Location(self.source.file)

    @property
    def tree(self) -> dict[str, Any]:
        """All that the source says."""
        return self.source.tree

    def at(self, name: str, default: Any = None) -> Given:
        """What stands below this one; ``default`` if nothing does."""
        value = self.value.get(name) if isinstance(self.value, dict) else None
        return Given(self.source, (*self.key, name), default if value is None else value)


def read_all(paths: Iterable[str], words: Sequence[str], kind: str | None) -> list[Source]:
    """Every source that is given, and those that they name. ``kind``: whose they are, where their keys leave that open.
    Those that say how to train come first. ConfigError if one cannot be read.
    """
    sources = _command(list(words), COMMAND_LINE, kind) if words else []
    for path in paths:
        sources += _file(Path(path), kind)
    replaced = {source.kind for source in sources} & {"deepspeed"}  # in place of one that a script names
    for source in sources:  # which grows
        for inner, whose in _named(source):
            if str(inner) not in {earlier.file for earlier in sources} and whose not in replaced:
                sources += _file(inner, kind or whose)
    return sorted(sources, key=lambda source: -1 if source.trains else ASIDE.index(source.kind))


def _named(source: Source) -> Iterator[tuple[Path, str]]:
    for name in PATHS:
        value = source.tree.get(name)
        if isinstance(value, str) and value.endswith(FILES):
            near = [path for path in (Path(value), Path(source.file).parent / value) if path.is_file()]
            yield from [(path, "deepspeed" if name.startswith("deepspeed") else source.kind) for path in near[:1]]


def _file(path: Path, kind: str | None) -> list[Source]:
    text = _text(path)
    if path.suffix not in FILES and (commands := _commands(text)):
        if len(commands) > 1:
            raise ConfigError(f"{path}: holds {len(commands)} commands; give the one that trains after --")
        return _command(commands[0], str(path), kind)
    document = mapping(path, text)
    return [_source(document.tree, str(path), kind, document)]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = f"no such file{nearest_file(path)}" if isinstance(error, FileNotFoundError) else "cannot be read"
        raise ConfigError(f"{path}: {why}") from None


def mapping(path: Path, text: str | None = None) -> Document:
    """A file of JSON or YAML, with its keys as ``tree``. ConfigError if it cannot be read or holds none."""
    text = _text(path) if text is None else text
    tree, document = parse(text.expandtabs() if text.lstrip().startswith("{") else text, str(path))
    if document.problems or not isinstance(tree, dict):
        raise ConfigError([str(fault) for fault in document.problems] or f"{path}: holds no keys and no command")
    document.tree = tree
    return document


def _source(tree: dict[str, Any], file: str, kind: str | None, document: Document | None = None) -> Source:
    marks = {name: sorted(marks & tree.keys()) for name, marks in MARKS.items() if marks & tree.keys()}
    if len(marks) > 1 and kind not in marks:
        owners = " and of ".join(f"{NAMES[name]} ({', '.join(keys)})" for name, keys in marks.items())
        raise ConfigError(f"{file}: has keys of {owners}; say which with --from {' or --from '.join(marks)}")
    if not (marks or kind or ARGUMENTS & tree.keys()):
        raise ConfigError(f"{file}: none of its keys is known; say whose it is with --from {', '.join(NAMES)}")
    if len(marks) == 1:
        kind = next(iter(marks))
    locations = document.locations if document else {}
    if kind == "accelerate" and isinstance(inner := tree.get("deepspeed_config"), dict):  # as its launcher's options
        tree = {name: value for name, value in tree.items() if name != "deepspeed_config"} | inner
        locations |= {key[1:]: at for key, at in locations.items() if key[0] == "deepspeed_config" and key[1:]}
    return Source(kind or ("trl" if TRL & tree.keys() else "transformers"), file, tree, locations)


def _commands(text: str) -> list[list[str]]:
    """The commands of a shell script that begin with a launcher or a Python file, and have options if any has; with the
    values of its variables, as far as they are plain.
    """
    commands = []
    variables = dict(re.findall(r"^\s*(?:export\s+)?(\w+)=[\"']?([^\s\"'`()]*)[\"']?\s*$", text, re.MULTILINE))
    for _ in range(3):  # of which one may be in another
        text = Template(text).safe_substitute(variables)
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a part of a text over several lines
            continue
        words = _bare(words)
        if words and (Path(words[0]).name in LAUNCHERS or words[0].endswith(".py")):
            commands.append(words)
    return [words for words in commands if any(re.match("--", word) for word in words)] or commands


def _bare(words: list[str]) -> list[str]:
    """Without variables of the environment before the command."""
    return words if not words or not re.match(r"\w+=|exec$|nohup$", words[0]) else _bare(words[1:])


def _command(words: list[str], file: str, kind: str | None) -> list[Source]:
    words = _bare(words) or [""]
    script = next((at for at, word in enumerate(words) if word.endswith(".py")), -1)
    if (tool := Path(words[0]).name) in TOOLS:
        script, kind = 1, TOOLS[tool]
    elif script < 0 and "-m" in words:
        script = words.index("-m") + 1
    options, launched = _options(words[script + 1 :]), _options(words[1 : max(script, 1)])
    if kind in (None, "trl") and (task := re.search(TASKS, words[max(script, 0)].rpartition("/")[2])):
        kind, options = "trl", options | ({} if task[0] == "sft" else {"task": task[0]})
    if options.keys() - {*PATHS}:
        sources = [_source(options, file, kind)]
    else:  # what it does is in the files alone
        files = _named(Source("transformers", file, options))
        sources = [
            source for path, whose in files for source in _file(path, kind or (whose if whose == "deepspeed" else None))
        ]
    launched = {name: value for name, value in launched.items() if name not in ("", "m")}
    sources += [Source("accelerate", file, launched)] if launched else []
    if not sources:
        raise ConfigError(f"{file}: neither options of a script, nor a file that is here")
    return sources


def _options(words: Iterable[str]) -> dict[str, Any]:
    """``--name value`` as Hugging Face's parser reads it; words before the first option are under the empty name."""
    tree: dict[str, Any] = {}
    name = ""
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, _, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            tree[name] = [_value(value)] if "=" in word else []
        else:
            tree.setdefault(name, []).append(_value(word))
    tree = {key: value[0] if len(value) == 1 else value or True for key, value in tree.items()}
    off = [key for key, value in tree.items() if value is True and key.startswith("no_") and key not in elsewhere()]
    return {key: value for key, value in tree.items() if key not in off} | {key[3:]: False for key in off}


def _value(text: str) -> Any:
    if re.fullmatch(r"[0-9]+(_[0-9]+)+", text):
        return int(text)
    value, document = parse(text, COMMAND_LINE)
    return text if document.problems or (isinstance(value, dict | list) and text[0] not in "{[") else value
