"""What a checkpoint says about itself: the step, how it was made, and from what.

A checkpoint that is loaded by another run trains on: with other data, another seed, another batch, another model of the
same shape, and nothing in the weights shows it. So ``manifest.json`` (``strategies/core/sealed.py``) has, besides the
hash of every file, enough to compare the run that saved with the run that resumes (``trainer/run/resume_rules.py``).

Invariant. Everything comes from the config, the data, the model and the ranks; nothing from the clock or from paths
that the config does not name. Two runs that are the same have the same manifest at the same step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from strategies.core import sealed
from strategies.core.sealed import Damaged, Sealed, digest_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from trainer.config.sections import RunConfig
    from trainer.data.prepare import Prepared

KIND = "checkpoint"
PACKAGES = ("deepstow", "torch", "transformers", "deepspeed", "accelerate", "peft")
# Keys of a model's config that say where it came from, how it is written or what is done with it afterwards.
_NOT_THE_MODEL = """
    _name_or_path architectures auto_map dtype torch_dtype transformers_version use_cache _attn_implementation
    _attn_implementation_autoset pad_token_id bos_token_id eos_token_id
"""


class _Part(BaseModel):
    """Strict and frozen: a manifest is what we wrote, or it is damaged."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class DataFacts(_Part):
    """Which rows were trained on: ``sources`` and ``tokenizer`` are hashes of contents, whatever their paths."""

    fingerprint: str
    sources: str
    tokenizer: str
    rows: int | None = Field(description="None for a stream.")


class ModelFacts(_Part):
    """Hugging Face's config of the model, and a hash of the names and shapes of its parameters."""

    config: dict[str, Any]
    shapes: str


class About(_Part):
    """What is the same for all checkpoints of a run."""

    config: dict[str, Any]
    config_sha256: str
    versions: dict[str, str]
    world_size: int = Field(ge=1)
    data: DataFacts
    model: ModelFacts


class Manifest(_Part):
    """What a checkpoint says about itself; it is ``finite`` if no weight, no moment and no loss is NaN or infinite."""

    step: int = Field(ge=0)
    finite: bool
    run: About


def about(
    config: RunConfig, prepared: Prepared, hf_config: PretrainedConfig, shapes: Mapping[str, Iterable[int]], ranks: int
) -> About:
    """What the checkpoints of a run have to say. ``hf_config`` is as it was loaded; the run may change its copy."""
    tree = _plain(json.dumps(config.tree()))
    rows = len(prepared.train) if hasattr(prepared.train, "__len__") else None
    return About(
        config=tree,
        config_sha256=digest_of(tree),
        versions=versions(),
        world_size=ranks,
        data=DataFacts(
            fingerprint=prepared.fingerprint, sources=prepared.sources, tokenizer=prepared.tokenizer, rows=rows
        ),
        model=ModelFacts(config=plain_config(hf_config), shapes=digest_of_shapes(shapes)),
    )


def plain_config(hf_config: PretrainedConfig) -> dict[str, Any]:
    """A model's config as JSON, without what does not decide what is computed."""
    tree = _plain(hf_config.to_json_string(use_diff=False))
    return {key: value for key, value in tree.items() if key not in _NOT_THE_MODEL.split()}


def _plain(text: str) -> dict[str, Any]:
    """A tree as JSON reads it, with text for infinity, which some configs have and JSON has not."""
    tree: dict[str, Any] = json.loads(text, parse_constant=str)
    return tree


def digest_of_shapes(shapes: Mapping[str, Iterable[int]]) -> str:
    """A hash of names and shapes, whatever their order."""
    return digest_of({name: list(shape) for name, shape in shapes.items()})


def versions() -> dict[str, str]:
    """Names and versions of the packages that decide bits."""
    found = dict.fromkeys(PACKAGES, "not installed")
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def read(folder: Path) -> tuple[Sealed, Manifest]:
    """The manifest of a checkpoint; its files are not looked at. Raise Damaged if it has none."""
    found = sealed.read(folder, KIND)
    try:
        return found, Manifest.model_validate(dict(found.about))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise Damaged(f"{sealed.MANIFEST} is of another release: {where}: {first['msg'].lower()}") from None
