"""Checkpoints on disk: what one says about itself, which are good, which one is resumed, which are deleted.

A kill, a full disk or a power cut leaves a folder that has the highest number and cannot be resumed; a flipped bit
leaves one that can, with other weights; and one of other data, another seed or batch trains on without a word. So
``manifest.json`` (``strategies/state/sealed.py``) has the hash of every file, which is compared before a run resumes,
and enough to compare the run that saved with that one (``resume_rules.py``). ``auto`` takes the newest good checkpoint
and says which newer ones are damaged and how; one that is named has to be good itself.

Invariant. At every moment a checkpoint that was complete is on the disk. The newest one whose weights are finite is
never deleted. A folder ``checkpoint-N`` disappears in one step: it is renamed before it is deleted. Of a checkpoint
that is a symbolic link nothing is deleted, not even the link. A manifest has nothing from the clock or from paths that
the config does not name: two runs that are the same have the same one at the same step.
"""

from __future__ import annotations

import json
import re
import stat
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepstow.strategies.state import sealed
from deepstow.strategies.state.commit import EARLIER, remove, restore_earlier
from deepstow.strategies.state.sealed import MANIFEST, Damaged

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from deepstow.trainer.config.sections import RunConfig

KIND = "checkpoint"
PACKAGES = ("deepstow", "torch", "transformers", "deepspeed", "accelerate", "peft")
# Keys of a model's config that say where it came from, how it is written or what is done with it afterwards.
_NOT_THE_MODEL = """
    _name_or_path architectures auto_map dtype torch_dtype transformers_version use_cache _attn_implementation
    _attn_implementation_autoset pad_token_id bos_token_id eos_token_id
"""
TRAINER_STATE = "trainer_state.json"
FORMER_MARK = "complete.json"  # of releases that wrote no manifest
FOLDER = re.compile(r"checkpoint-(\d+)")
WRITING, DELETED = "checkpoints.writing", "checkpoints.deleted"  # what a kill leaves in them is no checkpoint
KEY = "training.resume_from_checkpoint"
GOES_ON = f"{KEY}=auto goes on from the last checkpoint"


class _Part(BaseModel):
    """Strict and frozen: a manifest is what we wrote, or it is damaged."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class DataFacts(_Part):
    """Which rows were trained on: hashes of contents, whatever their paths (``trainer/data/prepare.py``).

    ``evaluation`` and ``template`` are None in a manifest of a release that did not have them; names of files are in
    ``sources`` and ``fingerprint`` there, and the order of the shards of saved data is not.
    """

    fingerprint: str
    sources: str
    tokenizer: str
    rows: int | None = Field(description="None for a stream.")
    teacher: str = ""  # a hash of its contents, if there is one
    evaluation: str | None = None
    template: str | None = None


class ModelFacts(_Part):
    """Hugging Face's config of the model, and a hash of the names and shapes of its parameters.

    ``weights``: of those that training began with, ``code``: of the Python files that came with it
    (``trainer/model/contents.py``). None in a manifest of a release that did not have them.
    """

    config: dict[str, Any]
    shapes: str
    weights: str | None = None
    code: str | None = None


class About(_Part):
    """What is the same for all checkpoints of a run.

    ``arguments``: what Hugging Face's Trainer was given, defaults included (``resuming.resolved``). None in a manifest
    of a release that did not have them.
    """

    config: dict[str, Any]
    arguments: dict[str, Any] | None = None
    config_sha256: str
    versions: dict[str, str]
    code: dict[str, str] = Field(default={}, description="Hashes of files from outside that the config names.")
    world_size: int = Field(ge=1)
    threads: int | None = Field(default=None, ge=1, description="Of torch in each rank; releases before wrote none.")
    data: DataFacts
    model: ModelFacts


class Manifest(_Part):
    """What a checkpoint says about itself; it is ``finite`` if no weight, no moment and no loss is NaN or infinite."""

    step: int = Field(ge=0)
    finite: bool
    run: About


def plain_config(hf_config: PretrainedConfig) -> dict[str, Any]:
    """A model's config as JSON, without what does not decide what is computed."""
    # Some configs have infinity, which JSON has not: it becomes text.
    tree = json.loads(hf_config.to_json_string(use_diff=False), parse_constant=str)
    return {key: value for key, value in tree.items() if key not in _NOT_THE_MODEL.split()}


def versions() -> dict[str, str]:
    """Names and versions of the packages that decide bits."""
    by_package = dict.fromkeys(PACKAGES, "not installed")
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            by_package[package] = version(package)
    return by_package


class Found(NamedTuple):
    """A checkpoint with its manifest; ``path`` may be a symbolic link."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step


def folders(output_dir: Path) -> list[Path]:
    """Every folder that is named like a checkpoint, by step. Raise OSError if one of them, or ``output_dir``, cannot be
    looked at: a run would start anew beside it.
    """
    named = (path for path in output_dir.iterdir() if FOLDER.fullmatch(path.name))
    return sorted((path for path in named if stat.S_ISDIR(path.stat().st_mode)), key=step_of)


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint."""
    return int(path.name.removeprefix("checkpoint-"))


def is_in(path: Path, output_dir: Path) -> bool:
    """Whether a checkpoint is one of those in ``output_dir``, where links to it, and it itself, may be links."""
    return output_dir.resolve() in (path.parent.resolve(), path.resolve().parent)


def complete(output_dir: Path) -> list[Found]:
    """The checkpoints that have a readable manifest, oldest first. Their files are not compared."""
    checkpoints = []
    for path in folders(output_dir):
        with suppress(Damaged):
            checkpoints.append(Found(path, read(path)[1]))
    return checkpoints


def read(path: Path) -> tuple[sealed.Sealed, Manifest]:
    """The manifest of a checkpoint; its files are not looked at. Raise Damaged if it has none."""
    seal = sealed.read(path, KIND)
    try:
        manifest = Manifest.model_validate(dict(seal.about))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise Damaged(f"{MANIFEST} is of another release: {where}: {first['msg'].lower()}") from None
    if FOLDER.fullmatch(path.name) and step_of(path) != manifest.step:
        raise Damaged(f"its manifest is of step {manifest.step}")
    return seal, manifest


def digest(path: Path) -> str:
    """What a checkpoint is called by its content: equal runs have equal ones at the same step. Raise Damaged."""
    return sealed.identity(path, KIND)


def verified(path: Path) -> Found:
    """The checkpoint in ``path``. Raise Damaged, in one line, if a byte of it is not what its manifest says."""
    seal, manifest = read(path)
    lines = damage(path, seal, manifest)
    if lines:
        remaining = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        raise Damaged(f"{lines[0]}{remaining}")
    return Found(path, manifest)


def damage(path: Path, seal: sealed.Sealed, about: Manifest) -> list[str]:
    """A line for all that is not what was saved: each file, and a state of Hugging Face's that is of another step."""
    lines = sealed.damage(path, seal)
    if lines:
        return lines
    try:
        step = json.loads((path / TRAINER_STATE).read_bytes())["global_step"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        step = None
    return [] if step == about.step else [f"{TRAINER_STATE} is of step {step}, its manifest of step {about.step}"]


# --- deleting --------------------------------------------------------------------------------------------------------


def delete_old(output_dir: Path, keep: int, written: int, best: Path | None) -> list[str]:
    """Delete checkpoints, by the one of step ``written``: not the ``keep`` newest up to it, not the best, and not the
    newest finite one. Returns a line for each that is a symbolic link, of which nothing is deleted. May raise OSError.
    """
    past = [saved for saved in complete(output_dir) if saved.step <= written]
    finite = [saved for saved in past if saved.manifest.finite]
    spared = {saved.path.resolve() for saved in [*past[-keep:], *finite[-1:]]} | ({best.resolve()} if best else set())
    lines = []
    for path in (saved.path for saved in past if saved.path.resolve() not in spared):
        if path.is_symlink():
            lines.append(f"{path}: a symbolic link, so it is kept though training.save_total_limit = {keep}")
            continue
        (output_dir / DELETED).mkdir(exist_ok=True)
        deleted = output_dir / DELETED / path.name
        remove(deleted)
        path.rename(deleted)
    remove(output_dir / DELETED)
    return lines


def restore(output_dir: Path) -> None:
    """Give checkpoints their names back that a kill has caught between two renames. May raise OSError."""
    for path in list(output_dir.iterdir()):
        if path.name.endswith(EARLIER) and FOLDER.fullmatch(name := path.name.removesuffix(EARLIER)):
            restore_earlier(output_dir / name)


def clear(output_dir: Path) -> None:
    """``restore``, and delete the rest that a kill has left: drafts, half-deleted checkpoints. May raise OSError."""
    remove(output_dir / WRITING)
    with suppress(OSError):  # what cannot be deleted now is in nobody's way
        remove(output_dir / DELETED)
    restore(output_dir)


# --- resuming --------------------------------------------------------------------------------------------------------


def to_resume(config: RunConfig) -> tuple[Found | None, list[str]]:
    """The checkpoint that ``training.resume_from_checkpoint`` stands for, compared with its manifest, and what to say;
    None starts from the beginning. Raise ConfigError if one is required and none is good.
    """
    output_dir, resume_from = Path(config.training.output_dir), config.training.resume_from_checkpoint
    if resume_from is None or resume_from is False:
        return None, []
    named = None if resume_from == "auto" or resume_from is True else Path(str(resume_from))
    bad: list[tuple[Path, str]] = []
    for path in [named] if named else reversed(folders(output_dir)):
        checkpoint, why = _looked_at(path)
        if checkpoint is not None:
            return checkpoint, [f"{newer}: {reason}; going back to {path}" for newer, reason in bad]
        bad.append((path, why))
    if named:
        nearby = list[Path]()
        for place in dict.fromkeys([named.parent, output_dir]):
            with suppress(OSError):  # it is refused anyhow
                nearby += reversed(folders(place))
        good = next((path for path in nearby if path.resolve() != named.resolve() and _looked_at(path)[0]), None)
        why = bad[0][1] if named.is_dir() else "there is no such folder"
        why += f"; the newest good one is {good}" if good else ""
    elif former := [f"{path}: {reason}" for path, _ in bad if (reason := _former(path))]:
        why = former[0]
    elif bad:
        older = ", and no older one is good" if len(bad) > 1 else ""
        why = f"{bad[0][0]}: {bad[0][1]}{older}; write false to start from the beginning; they are kept"
    elif resume_from is True:
        why = f"{output_dir} holds no checkpoint; write auto to start when there is none"
    else:
        return None, []
    raise config.error(KEY, resume_from, why)


def _looked_at(path: Path) -> tuple[Found | None, str]:
    """A checkpoint whose every byte was compared, or why it is none."""
    try:
        return verified(path), ""
    except Damaged as damaged:
        return None, _former(path) or f"damaged: {damaged}"


def _former(path: Path) -> str:
    """What to do with a checkpoint of a release that wrote no manifest; empty if it is none."""
    if (path / MANIFEST).exists() or not (path / FORMER_MARK).is_file():
        return ""
    return (
        f"written by an earlier release, which kept no hashes: go on with that release, or start from its weights "
        f"with model.name_or_path: {path} and {KEY}: false"
    )
