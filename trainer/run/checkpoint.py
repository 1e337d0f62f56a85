"""Checkpoints on disk: which are good, which one is resumed, which are deleted, and what moves out of a new run's way.

A kill, a full disk or a power cut leaves a folder that has the highest number and cannot be resumed; a flipped bit
leaves one that can, with other weights. So a checkpoint is a folder with a manifest (``trainer/run/manifest.py``), and
every byte of it is compared with that before it is resumed. ``auto`` takes the newest good one and says which newer
ones are damaged and how; one that is named has to be good itself.

Invariant. At every moment a checkpoint that was complete is on the disk. The newest one whose weights are finite is
never deleted. A folder ``checkpoint-N`` disappears in one step: it is renamed before it is deleted. Of a checkpoint
that is a symbolic link nothing is deleted, not even the link.

Refused: checkpoints of releases before there were manifests; starting anew because all checkpoints are damaged.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strategies.core import sealed
from strategies.core.commit import EARLIER, remove, restore_earlier, sync
from strategies.core.sealed import MANIFEST, Damaged
from trainer.errors import ConfigError
from trainer.run import manifest
from trainer.run.manifest import Manifest

if TYPE_CHECKING:
    from trainer.config.sections import RunConfig

TRAINER_STATE = "trainer_state.json"
FORMER_MARK = "complete.json"  # of releases that wrote no manifest
FOLDER = re.compile(r"checkpoint-(\d+)")
WRITING, DELETED = "checkpoints.writing", "checkpoints.deleted"  # what a kill leaves in them is no checkpoint
KEY = "training.resume_from_checkpoint"


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint with its manifest; ``path`` may be a symbolic link."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step


def folders(output_dir: Path) -> list[Path]:
    """Every folder that is named like a checkpoint, by step."""
    named = [path for path in output_dir.glob("checkpoint-*") if FOLDER.fullmatch(path.name) and path.is_dir()]
    return sorted(named, key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("checkpoint-"))


def complete(output_dir: Path) -> list[Found]:
    """The checkpoints that have a readable manifest, oldest first. Their files are not compared."""
    found = []
    for path in folders(output_dir):
        with suppress(Damaged):
            found.append(Found(path, _manifest(path)[1]))
    return found


def newest_complete(output_dir: Path) -> Path | None:
    """The checkpoint with the highest step that has a readable manifest, or None."""
    return next((found.path for found in reversed(complete(output_dir))), None)


def _manifest(path: Path) -> tuple[sealed.Sealed, Manifest]:
    found = manifest.read(path)
    if FOLDER.fullmatch(path.name) and _step(path) != found[1].step:
        raise Damaged(f"its manifest is of step {found[1].step}")
    return found


def verified(path: Path) -> Found:
    """The checkpoint in ``path``, compared with its manifest byte by byte.

    Raises:
        Damaged: with one line for all that is wrong.
    """
    seal, about = _manifest(path)
    lines = damage(path, seal, about)
    if lines:
        more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        raise Damaged(f"{lines[0]}{more}")
    return Found(path, about)


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


# --- deleting, and moving out of the way -----------------------------------------------------------------------------


def to_delete(found: Sequence[Found], keep: int, written: int, best: Path | None) -> list[Found]:
    """Which of the checkpoints, sorted by step, may go after that of step ``written``.

    Not the ``keep`` newest up to it, not the best, and not the newest finite one.
    """
    past = [each for each in found if each.step <= written]
    finite = [each for each in past if each.manifest.finite]
    kept = {each.path for each in [*past[-keep:], *finite[-1:]]}
    return [each for each in past if each.path not in kept and (best is None or each.path.resolve() != best.resolve())]


def prune(output_dir: Path, keep: int, written: int, best: Path | None) -> list[str]:
    """Delete what ``to_delete`` says; returns a line for each that is a symbolic link, of which nothing is deleted.

    Raises:
        OSError: one cannot be deleted.
    """
    kept = []
    for each in to_delete(complete(output_dir), keep, written, best):
        if each.path.is_symlink():
            kept.append(f"{each.path}: a symbolic link, so it is kept though training.save_total_limit = {keep}")
            continue
        (output_dir / DELETED).mkdir(exist_ok=True)
        gone = output_dir / DELETED / each.path.name
        remove(gone)
        each.path.rename(gone)
    remove(output_dir / DELETED)
    return kept


def clear(output_dir: Path) -> None:
    """Put away what a kill has left: drafts, half-deleted checkpoints, and an earlier one under another name.

    Raises:
        OSError: something cannot be deleted or renamed.
    """
    remove(output_dir / WRITING)
    with suppress(OSError):  # what cannot be deleted now is in nobody's way
        remove(output_dir / DELETED)
    for path in output_dir.glob(f"checkpoint-*{EARLIER}"):
        if FOLDER.fullmatch(name := path.name.removesuffix(EARLIER)):
            restore_earlier(output_dir / name)


def set_aside(output_dir: Path, after: int | None = None, *, overwrite: bool = False) -> Path | None:
    """Move checkpoints, metrics and export of an earlier run into ``earlier-N``, which is returned if there were any.

    Otherwise the old checkpoints, with their higher steps, would be resumed after the first kill of the new run.

    Args:
        after: only checkpoints of later steps are moved: those that a resumed run goes back behind.
        overwrite: delete them instead.
    """
    if after is not None:
        return move_aside([path for path in folders(output_dir) if _step(path) > after], output_dir, overwrite=False)
    old = [*folders(output_dir), output_dir / "export"]
    if not any(path.exists() for path in old):
        return None
    return move_aside([*old, output_dir / "metrics.jsonl"], output_dir, overwrite=overwrite)


def move_aside(things: Iterable[Path], output_dir: Path, *, overwrite: bool) -> Path | None:
    """Move what exists of ``things`` into a new ``earlier-N``, which is returned; delete it with ``overwrite``.

    Each is renamed in one step, so after a kill it is in one of both places, whole. Of a symbolic link the link moves,
    and nothing is deleted through it.

    Raises:
        OSError: something cannot be renamed or deleted.
    """
    there = [path for path in things if os.path.lexists(path)]
    if not there:
        return None
    numbered = (output_dir / f"earlier-{number}" for number in itertools.count(1))
    folder = next(each for each in numbered if not each.exists())
    folder.mkdir()
    for path in there:
        if path.is_symlink():  # it may be relative
            (folder / path.name).symlink_to(path.resolve())
            path.unlink()
        else:
            path.rename(folder / path.name)
    sync(output_dir)
    if overwrite:
        remove(folder)
    return None if overwrite else folder


# --- resuming --------------------------------------------------------------------------------------------------------


def to_resume(config: RunConfig) -> tuple[Found | None, list[str]]:
    """The checkpoint that ``training.resume_from_checkpoint`` stands for, compared with its manifest, and what to say.

    None starts from the beginning.

    Raises:
        ConfigError: a checkpoint is required and there is none, the named one is not good, or none of several is.
    """
    output_dir, wanted = Path(config.training.output_dir), config.training.resume_from_checkpoint
    if wanted is None or wanted is False:
        return None, []
    if wanted == "auto" or wanted is True:
        return _newest(config, output_dir, wanted)
    path = Path(str(wanted))
    try:
        return verified(path), []
    except Damaged as damaged:
        what = _former(path) or f"damaged: {damaged}"
    others = [each for place in dict.fromkeys([path.parent, output_dir]) for each in reversed(folders(place))]
    good = next((each for each in others if each.resolve() != path.resolve() and _is_good(each)), None)
    hint = f"; the newest good one is {good}" if good else ""
    raise config.error(KEY, wanted, f"{what if path.is_dir() else 'there is no such folder'}{hint}")


def _newest(config: RunConfig, output_dir: Path, wanted: str | bool) -> tuple[Found | None, list[str]]:
    """The newest good checkpoint of the run, and a line for each newer one that is damaged."""
    damage: list[tuple[Path, str]] = []
    for path in reversed(folders(output_dir)):
        try:
            good = verified(path)
        except Damaged as damaged:
            damage.append((path, str(damaged)))
        else:
            return good, [f"{bad}: damaged: {why}; going back to {good.path}" for bad, why in damage]
    if not damage and wanted is True:
        raise config.error(KEY, wanted, f"{output_dir} holds no checkpoint; write auto to start when there is none")
    if not damage:
        return None, []
    for path, _ in damage:
        if what := _former(path):
            raise config.error(KEY, wanted, f"{path}: {what}")
    path, why = damage[0]
    others = ", and no older one is good" if len(damage) > 1 else ""
    start = "write false to start from the beginning; they are kept"
    raise config.error(KEY, wanted, f"{path}: damaged: {why}{others}; {start}")


def _former(path: Path) -> str:
    """What to do with a checkpoint of a release that wrote no manifest; empty if it is none."""
    if (path / MANIFEST).exists() or not (path / FORMER_MARK).is_file():
        return ""
    return (
        f"written by an earlier release, which kept no hashes: go on with that release, or start from its weights "
        f"with model.name_or_path: {path} and {KEY}: false"
    )


def _is_good(path: Path) -> bool:
    try:
        return bool(verified(path))
    except Damaged:
        return False


def refuse_damaged(path: Path, key: str) -> None:
    """Compare a checkpoint that the run itself is about to read.

    Raises:
        ConfigError: it is damaged.
    """
    try:
        verified(path)
    except Damaged as damaged:
        raise ConfigError(f"{key}: {path} cannot be loaded: damaged: {damaged}") from None
