"""A cache of model counts, so that a second plan of the same model loads neither torch nor Transformers.

The counts follow from the model section, a few keys of ``training`` and ``data``, the versions of the packages and the
project's own code that counts; a hash of all of these is the name of a file in ``~/.cache/deepstow/counts``. A folder
is identified by its config.json, and by the sizes and times of its weights. A model by name on the hub is counted anew
by each process, since the name may come to mean another model. A file that cannot be read is replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter

from deepstow.strategies.core.compose import degrees, requirements_of
from deepstow.strategies.core.protocol import Axis
from deepstow.strategies.state.commit import replace_file
from deepstow.trainer.model import folder

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
# Whatever counts a model, or computes what is counted.
COUNTING = ("trainer/model", "trainer/recipes", "trainer/tasks", "strategies/engine/forward")
SOURCES = (
    *(path for folder in COUNTING for path in sorted((ROOT / folder).rglob("*.py"))),
    ROOT / "strategies/core/facts.py",
    *(ROOT / f"trainer/planning/{name}.py" for name in ("evaluation", "facts", "positions")),
    *(ROOT / f"strategies/parallel/{name}.py" for name in ("autotp", "scattered", "ulysses", "varlen")),
)
PACKAGES = ("torch", "transformers", "peft", "trl")
_HERE: dict[str, Any] = {}  # counts that are valid in this process only
TRAINING = (
    "per_device_train_batch_size", "bf16", "fp16", "label_smoothing_factor", "disable_dropout", "compile_backend",
    "recomputes", "use_liger_kernel", "liger_kernel_config",
)  # fmt: skip


def cached(config: RunConfig, kind: type[T], count: Callable[[], T], *, what: str = "") -> T:
    """The result of ``count`` for the configured model, from the file of an earlier call if there is one. ``what``
    names the part that is counted, if it is not all.
    """
    name, lasts = name_of(config, what)
    if not lasts:
        if name not in _HERE:
            _HERE[name] = count()
        within: T = _HERE[name]
        return within
    file, adapter = Path.home() / f".cache/deepstow/counts/{name}.json", TypeAdapter(kind)
    with contextlib.suppress(OSError, ValueError):
        return adapter.validate_json(file.read_bytes())
    counted = count()
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, adapter.dump_json(counted))
    return counted


def name_of(config: RunConfig, what: str = "") -> tuple[str, bool]:
    """A name for everything known that the counts follow from, and whether that is all, in other processes as well.
    ConfigError: a saved model's files cannot be read.
    """
    model: dict[str, Any] = config.model.model_dump(mode="json")
    lasts = not config.model.trust_remote_code
    if config.model.name_or_path is not None:
        saved = Path(config.model.name_or_path)
        if saved.is_dir():
            folder.refuse(config.model.name_or_path)
        try:
            model["config.json"] = (saved / "config.json").read_text()
            files = sorted((*saved.glob("*.safetensors"), *saved.glob("*.bin")))
            model["files"] = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        except (OSError, UnicodeDecodeError):
            lasts = False
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    content = {
        "model": model,
        "task": config.task,
        "code": getattr(config.chosen_task, "code", ""),  # of a task from outside
        "recipes": {
            recipe.name: [recipe.counted_by(config), getattr(recipe, "code", "")] for recipe in config.switched_on
        },
        "what": what,
        "training": {name: getattr(config.training, name) for name in TRAINING},
        "data": [config.data.max_length, config.data.max_target_length, config.data.packing],
        # Alone of what strategies require these change the forward; the rest is chosen from one count for all.
        "casts": sorted({need.name for need in requirements_of(config.strategies)} & {"COMPUTE_DTYPE", "DEEPSPEED"}),
        # Layers or rows that ranks divide have other shapes.
        **{axis.value: degrees(config.strategies).get(axis, 1) for axis in (Axis.TENSOR, Axis.TOKENS, Axis.SEQUENCE)},
        "versions": versions,
        "sources": [hashlib.sha256(path.read_bytes()).hexdigest() for path in SOURCES],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32], lasts
