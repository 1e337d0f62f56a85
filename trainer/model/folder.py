"""The files of a saved model, looked at before a library opens them: nothing of a folder is believed.

Libraries answer what is wrong with a folder with tracebacks, or do what it says: they wait for a pipe, build lists of a
billion layers, open files anywhere, and fetch and run code that a configuration names. Each is one line here.

``refuse`` looks at the small files, for a plan as well. ``refuse_weights`` opens each file of weights, without reading
their values, for a run. Pickles of tensors (``.bin``) are left to Transformers, which has torch read nothing from them
but tensors. What only shows while weights are loaded is one line in ``build.py``.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from deepstow.strategies.core.sizes import human
from deepstow.trainer.errors import ConfigError, first_line
from deepstow.trainer.model import config_keys, hub

CONFIG = "config.json"
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TENSORS, INDEX_OF_TENSORS = "pytorch_model.bin", "pytorch_model.bin.index.json"  # pickled
OF_ADAPTERS = "adapter_config.json"
OBJECTS = (
    CONFIG, INDEX, INDEX_OF_TENSORS, OF_ADAPTERS, "generation_config.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "tokenizer.json",
)  # fmt: skip
READ = (".json", ".jinja", ".safetensors", ".model", ".txt")  # endings of what libraries open
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
MOST_TEXT, MOST_CONFIG = 1 << 30, 16 << 20  # bytes; the largest tokenizers have 50 MB
FLOATS = ("F64", "F32", "F16", "BF16")


def refuse(name_or_path: str) -> None:
    """Raise ConfigError for a file of a saved model that cannot be read, or a configuration that no model can have."""
    said = f"model.name_or_path = {name_or_path!r}"
    folder = Path(name_or_path)
    try:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{said}: is a file; name the folder of a model saved by save_pretrained")
        if folder.is_dir():
            refuse_files(folder, said)
            paths = [folder / name for name in OBJECTS]
        else:
            paths = [path for path in (hub.file_of(name_or_path, name) for name in (CONFIG, INDEX)) if path]
    except OSError as error:  # a loop of links, no right to list it
        if not os.path.lexists(folder):
            return  # the hub does not have it, which is said later
        raise ConfigError(f"{said}: cannot be read: {error.strerror or error}") from None
    for path in paths:
        if path.exists():
            tree = _object(path, said)
            if path.name == CONFIG:
                refuse_config(tree, f"{said}: {CONFIG}: ")
            if path.name in (INDEX, INDEX_OF_TENSORS):
                _shards(tree, said, path.name)
            if path.name == OF_ADAPTERS:
                what = "to go on with them write it as model.adapter; to train all weights merge them into their base"
                raise ConfigError(f"{said}: it holds adapters ({OF_ADAPTERS}); {what}")


def refuse_files(folder: Path, key: str) -> None:
    """Raise ConfigError, at ``key``, for what has the name of a file that libraries read, and is none."""
    for path in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        _refuse_file(path, key)


def refuse_config(tree: Mapping[str, Any], place: str) -> None:
    """Raise ConfigError for a configuration, as it is written, that Transformers should not be given; ``place`` stands
    before its keys.
    """
    problems = [f"{place}{key} = {value!r}: {what}" for key, value, what in config_keys.impossible(tree)]
    if problems:
        raise ConfigError(problems)
    classes = tree.get("architectures")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        raise ConfigError(f"{place}architectures = {classes!r}: must be a list of names")


def refuse_weights(name_or_path: str) -> None:
    """Raise ConfigError for weights of a saved model that are not there, or are no whole safetensors.

    Of a model on the hub that is not here yet the names alone are known.
    """
    said = f"model.name_or_path = {name_or_path!r}"
    refuse(name_or_path)
    folder = Path(name_or_path)
    if not folder.is_dir():
        return
    for single, index in ((WHOLE, INDEX), (TENSORS, INDEX_OF_TENSORS)):
        if (folder / single).exists():
            paths = [folder / single]
            break
        if (folder / index).exists():
            paths = [folder / name for name in _shards(_object(folder / index, said), said, index)]
            break
    else:
        raise ConfigError(f"{said}: {_without(folder)}")
    quantised = "quantization_config" in _object(folder / CONFIG, said)  # is refused with the config
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{said}: {index} names {path.name}, which is not there; copy the folder anew")
        if path.suffix == ".safetensors" and not quantised and (why := _damage(path)):
            raise ConfigError(f"{said}: {path.name} is damaged: {why}; copy it anew")


def _without(folder: Path) -> str:
    """What a folder has in place of safetensors, and what to do."""
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED)
    if not pickled:
        return f"the folder holds no weights ({WHOLE}); save the model there with save_pretrained"
    how = f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(NEW_FOLDER)"
    return (
        f"its weights are pickled ({pickled[0]}), in no form that Transformers reads; where you trust whoever made "
        f"them, convert them once, for {how}, and name the new folder"
    )


def _refuse_file(path: Path, key: str) -> None:
    """Raise ConfigError if ``path`` has the ending of what libraries read, and is nothing that could be read."""
    if path.suffix not in READ:
        return
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"{key}: {path.name} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise ConfigError(f"{key}: {path.name} is {kinds.get(stat.S_IFMT(status.st_mode), 'a device')}, and no file")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{key}: {path.name} may not be read")
    if path.suffix != ".safetensors" and status.st_size > MOST_TEXT:
        raise ConfigError(f"{key}: {path.name} has {human(status.st_size)}, and no such file has over 1 GiB")


def _object(path: Path, key: str) -> dict[str, Any]:
    """The JSON object in a file. Raise ConfigError if there is none."""
    if path.name == CONFIG and (size := path.stat().st_size) > MOST_CONFIG:
        raise ConfigError(f"{key}: {CONFIG} has {human(size)}, and no configuration has over {human(MOST_CONFIG)}")
    try:
        tree = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error).partition("\n")[0]
        raise ConfigError(f"{key}: {path.name} is no JSON: {why}") from None
    except OSError as error:
        raise ConfigError(f"{key}: {path.name} cannot be read: {error.strerror}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{key}: {path.name} must be a JSON object, not {type(tree).__name__}")
    return tree


def _shards(index: Mapping[str, Any], key: str, name: str) -> list[str]:
    """The files that an index of this ``name`` names. Raise ConfigError for one that is not in its folder, or is of
    another kind.
    """
    places, suffix = index.get("weight_map"), name.removesuffix(".index.json").rpartition(".")[2]
    if not isinstance(places, dict) or not places or not isinstance(index.get("metadata"), dict):
        raise ConfigError(f"{key}: {name} must have metadata, and a weight_map from tensors to files")
    for tensor, file in places.items():
        if not isinstance(file, str) or PurePosixPath(file).name != file or not file.endswith(f".{suffix}"):
            what = f"must be the name of a .{suffix} file in the same folder"
            raise ConfigError(f"{key}: {name}: weight_map.{tensor} = {file!r}: {what}")
    return sorted(set(places.values()))


def _damage(path: Path) -> str:
    """What is wrong with a file of weights, as its header says; empty if nothing is."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            for name, kind in _kinds(opened):
                if name.endswith(".weight") and kind not in FLOATS:
                    return f"{name} has the type {kind}, and a weight has {', '.join(FLOATS)}"
    except (SafetensorError, OSError, ValueError) as error:
        return first_line(error).removeprefix("SafetensorError: Error while deserializing header: ")
    return ""


def _kinds(opened: Any) -> Iterator[tuple[str, str]]:
    for name in opened.keys():  # noqa: SIM118 - it is no dict
        yield name, opened.get_slice(name).get_dtype()
