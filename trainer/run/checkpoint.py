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
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strategies.core import sealed
from strategies.core.commit import EARLIER, remove, restore_earlier, sync
from strategies.core.sealed import MANIFEST, Damaged
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
    return sorted(named, key=step_of)


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint."""
    return int(path.name.removeprefix("checkpoint-"))


def complete(output_dir: Path) -> list[Found]:
    """The checkpoints that have a readable manifest, oldest first. Their files are not compared."""
    found = []
    for path in folders(output_dir):
        with suppress(Damaged):
            found.append(Found(path, _manifest(path)[1]))
    return found


def _manifest(path: Path) -> tuple[sealed.Sealed, Manifest]:
    found = manifest.read(path)
    if FOLDER.fullmatch(path.name) and step_of(path) != found[1].step:
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


def prune(output_dir: Path, keep: int, written: int, best: Path | None) -> list[str]:
    """Delete checkpoints, by the one of step ``written``: not the ``keep`` newest up to it, not the best, and not the
    newest finite one. Returns a line for each that is a symbolic link, of which nothing is deleted.

    Raises:
        OSError: one cannot be deleted.
    """
    past = [each for each in complete(output_dir) if each.step <= written]
    finite = [each for each in past if each.manifest.finite]
    kept = {each.path.resolve() for each in [*past[-keep:], *finite[-1:]]} | ({best.resolve()} if best else set())
    lines = []
    for path in (each.path for each in past if each.path.resolve() not in kept):
        if path.is_symlink():
            lines.append(f"{path}: a symbolic link, so it is kept though training.save_total_limit = {keep}")
            continue
        (output_dir / DELETED).mkdir(exist_ok=True)
        gone = output_dir / DELETED / path.name
        remove(gone)
        path.rename(gone)
    remove(output_dir / DELETED)
    return lines


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
    found, why = _looked_at(path)
    if found is not None:
        return found, []
    others = [each for place in dict.fromkeys([path.parent, output_dir]) for each in reversed(folders(place))]
    good = next((each for each in others if each.resolve() != path.resolve() and _looked_at(each)[0]), None)
    hint = f"; the newest good one is {good}" if good else ""
    raise config.error(KEY, wanted, f"{why if path.is_dir() else 'there is no such folder'}{hint}")


def _newest(config: RunConfig, output_dir: Path, wanted: str | bool) -> tuple[Found | None, list[str]]:
    """The newest good checkpoint of the run, and a line for each newer one that is damaged."""
    bad: list[tuple[Path, str]] = []
    for path in reversed(folders(output_dir)):
        found, why = _looked_at(path)
        if found is not None:
            return found, [f"{newer}: {what}; going back to {path}" for newer, what in bad]
        bad.append((path, why))
    if not bad and wanted is True:
        raise config.error(KEY, wanted, f"{output_dir} holds no checkpoint; write auto to start when there is none")
    if not bad:
        return None, []
    for path, _ in bad:
        if what := _former(path):
            raise config.error(KEY, wanted, f"{path}: {what}")
    path, why = bad[0]
    others = ", and no older one is good" if len(bad) > 1 else ""
    start = "write false to start from the beginning; they are kept"
    raise config.error(KEY, wanted, f"{path}: {why}{others}; {start}")


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
