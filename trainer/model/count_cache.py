"""Counts of models, remembered: a second plan of the same model loads neither torch nor Transformers.

Loading them takes longer than counting and planning together, and budgets and sites are tried again and again on one
model. What is counted follows from the model section, a few keys of ``training`` and ``data``, the versions of the
packages and this project's own code that counts; a hash of all of these is the name of a file in
``~/.cache/deepstow/counts``. A model by name on the hub is always counted anew, since a name may come to mean something
else; a folder is known by what its config.json says. Whatever is wrong with a file, the model is counted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter

from strategies.core.compose import needs_of

if TYPE_CHECKING:
    from trainer.config.sections import RunConfig

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    ROOT / "trainer/planning/facts.py",
    *(ROOT / f"trainer/model/{name}.py" for name in ("counting", "outside_reads", "linear_layers", "params", "build")),
    ROOT / "strategies/engine/checkpointing.py",
    *(ROOT / f"strategies/core/{name}.py" for name in ("facts", "linears")),
)
PACKAGES = ("torch", "transformers", "peft")
TRAINING = ("per_device_train_batch_size", "bf16", "fp16", "gradient_checkpointing", "activation_checkpointing")


def stored_at() -> Path:
    """Where counts are kept unless somebody says otherwise."""
    return Path.home() / ".cache/deepstow/counts"


def remembered(config: RunConfig, kind: type[T], count: Callable[[], T], folder: Path | None = None) -> T:
    """What ``count`` says of the configured model, from the file of an earlier call where there is one."""
    name = name_of(config)
    if name is None:
        return count()
    file, adapter = (folder or stored_at()) / f"{name}.json", TypeAdapter(kind)
    with contextlib.suppress(OSError, ValueError):
        return adapter.validate_json(file.read_bytes())
    found = count()
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")  # ranks write the same file
        unfinished.write_bytes(adapter.dump_json(found))
        unfinished.rename(file)
    return found


def name_of(config: RunConfig) -> str | None:
    """A name for all that the counts follow from; None, where nobody can know all of it."""
    model: dict[str, Any] = config.model.model_dump(mode="json")
    if config.model.name_or_path is not None:
        try:
            model["config.json"] = (Path(config.model.name_or_path) / "config.json").read_text()
        except (OSError, UnicodeDecodeError):
            return None
    if config.model.trust_remote_code:
        return None
    known = {
        "model": model,
        "training": {name: getattr(config.training, name) for name in TRAINING},
        "data": [config.data.max_length, config.data.packing],
        "needs": sorted(need.name for need in needs_of(config.strategies)),
        "repeats": any(strategy.repeats_products() for strategy in config.strategies.values()),
        "versions": [_version(name) for name in PACKAGES],
        "sources": [hashlib.sha256(path.read_bytes()).hexdigest() for path in SOURCES],
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
