"""Digests of saved models by what is in them, wherever they are: of weights, of Python code, of all files.

Of a model on the hub the commit stands for its files. Weights are the files that ``from_pretrained`` reads: of those
that a folder has in several forms, one. The same tensors in other files are another digest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepstow.strategies.state.sealed import digest_of
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.model import hub
from deepstow.trainer.model.hashes import hashes, stamp

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deepstow.trainer.config.sections import ModelSection

ADAPTERS, OF_ADAPTERS = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
FORMS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
CODE = "*.py"


def contents(name: str, hf_config: Any) -> str:
    """Of a saved model's files, or of the commit that the hub's cache has. May raise OSError."""
    if not Path(name).is_dir():
        return digest_of([name, getattr(hf_config, "_commit_hash", None)])
    files = [path for path in sorted(Path(name).iterdir()) if path.suffix in (".json", ".safetensors", ".bin", ".py")]
    hashed = zip(files, hashes(files), strict=True)
    return digest_of([[path.name, path.stat().st_size, sha256] for path, sha256 in hashed])


def weights(section: ModelSection, hf_config: Any, seed: int) -> str:
    """Of the weights that a model begins with: the files of a saved one, or all that random ones are drawn by.

    Raises:
        ConfigError: a file cannot be read.
    """
    name = section.name_or_path
    if name is None:
        return digest_of(["random", seed])
    try:
        digest = _weights(name, hf_config)
        return digest if section.adapter is None else digest_of([digest, *hashes(_of_adapter(section.adapter))])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = (
            f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else "the list of its files is damaged"
        )
        raise ConfigError(f"model.name_or_path = {name!r}: its weights cannot be read: {why}") from None


def stamps(section: ModelSection, hf_config: Any) -> list[list[int]]:
    """Of the files of ``weights``, as they are now, without a look into them. May raise OSError."""
    name = section.name_or_path
    files = _files(Path(name), hf_config) if name is not None and Path(name).is_dir() else []
    return [stamp(path) for path in [*files, *(_of_adapter(section.adapter) if section.adapter else [])]]


def _of_adapter(folder: str) -> list[Path]:
    return [path for path in (Path(folder) / name for name in (ADAPTERS, *OF_ADAPTERS)) if path.is_file()]


def _weights(name: str, hf_config: Any) -> str:
    folder = Path(name)
    if not folder.is_dir():
        return digest_of(["commit", getattr(hf_config, "_commit_hash", None)])
    base: list[str] = []
    if (folder / ADAPTERS).is_file():  # beside weights of its own, or those of another model
        base_name = json.loads((folder / ADAPTERS).read_bytes()).get("base_model_name_or_path")
        base = [_weights(base_name, hf_config)] if base_name and not _files(folder, hf_config) else []
        base += hashes(path for path in (folder / file for file in OF_ADAPTERS) if path.is_file())
    return digest_of([*base, *hashes(_files(folder, hf_config))])


def _files(folder: Path, hf_config: Any) -> list[Path]:
    """The files of weights that Transformers reads, in order; none where there are only adapters."""
    declared = getattr(hf_config, "transformers_weights", None)
    chosen = next((path for path in (folder / name for name in (declared, *FORMS) if name) if path.is_file()), None)
    if chosen is None:
        return []
    if chosen.suffix != ".json":
        return [chosen]
    return [folder / file for file in sorted(set(json.loads(chosen.read_bytes())["weight_map"].values()))]


def code(section: ModelSection, hf_config: Any) -> str:
    """Of the Python files that a saved model brings and runs; empty if it may not. May raise OSError."""
    name = section.name_or_path
    if name is None or not section.trust_remote_code:
        return ""
    folders = [Path(name)] if Path(name).is_dir() else []
    commits = [] if folders else [getattr(hf_config, "_commit_hash", None)]
    for reference in sorted(set(_classes(getattr(hf_config, "auto_map", None) or {}))):
        repository, _, class_path = reference.rpartition("--")
        if repository and (source := hub.file_of(repository, f"{class_path.partition('.')[0]}.py")):
            folders.append(source.parent)
    files = [(folder, path) for folder in folders for path in sorted(folder.rglob(CODE))]
    hashed = zip(files, hashes(path for _, path in files), strict=True)
    return digest_of([commits, [[str(path.relative_to(folder)), sha256] for (folder, path), sha256 in hashed]])


def _classes(auto_map: dict[str, Any]) -> Iterable[str]:
    for value in auto_map.values():
        yield from (name for name in (value if isinstance(value, list | tuple) else [value]) if isinstance(name, str))
