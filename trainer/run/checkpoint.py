"""Checkpoints: which are complete, which one is resumed, and which are deleted.

Problem. Several processes write a checkpoint. A kill in between leaves a folder that has the highest number and cannot
be resumed, and Hugging Face and DeepSpeed would both choose it.

Invariant. Rank 0 writes ``complete.json`` into the folder after a barrier that follows every rank's writing. Only a
folder that has it is resumed: with ``auto`` the newest one, otherwise the one that the user names.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

from strategies.core.commit import replace_file
from trainer.errors import ConfigError

MARK = "complete.json"
FOLDER = re.compile(r"checkpoint-\d+")


def mark_complete(output_dir: Path, step: int, *, is_first: bool) -> None:
    """Mark a checkpoint complete; to be called by every rank after it has written its part."""
    _barrier()
    if is_first:
        replace_file(output_dir / f"checkpoint-{step}" / MARK, json.dumps({"step": step}))


def unmark(output_dir: Path, step: int, *, is_first: bool) -> None:
    """Remove the mark of an earlier run; to be called by every rank before it writes into the folder."""
    if is_first:
        (output_dir / f"checkpoint-{step}" / MARK).unlink(missing_ok=True)
    _barrier()


def _barrier() -> None:
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def _checkpoints(output_dir: Path) -> list[Path]:
    named = [path for path in output_dir.glob("checkpoint-*") if FOLDER.fullmatch(path.name) and path.is_dir()]
    return sorted(named, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def complete(output_dir: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    return [path for path in _checkpoints(output_dir) if (path / MARK).is_file()]


def newest_complete(output_dir: Path) -> Path | None:
    """The complete checkpoint with the highest step, or None."""
    return next(reversed(complete(output_dir)), None)


def prune(output_dir: Path, keep: int, best: str | None) -> None:
    """Delete all but the ``keep`` newest complete checkpoints and the best one.

    The mark is deleted first, so that a half-deleted checkpoint is not complete.
    """
    for folder in complete(output_dir)[:-keep]:
        if best is None or folder.resolve() != Path(best).resolve():
            (folder / MARK).unlink()
            shutil.rmtree(folder)


def set_aside(output_dir: Path) -> Path | None:
    """Move the checkpoints and metrics of an earlier run into a folder of their own; nothing is deleted.

    Otherwise the old checkpoints, with their higher steps, would be resumed after the first kill of the new run.
    Returns the folder they are in now; None if there were none.
    """
    old = _checkpoints(output_dir)
    if not old:
        return None
    number = next(n for n in itertools.count(1) if not (output_dir / f"earlier-{n}").exists())
    folder = output_dir / f"earlier-{number}"
    folder.mkdir()
    for path in [*old, output_dir / "metrics.jsonl"]:
        if path.exists():
            path.rename(folder / path.name)
    return folder


def to_resume(output_dir: Path, wanted: str | bool | None) -> Path | None:
    """The checkpoint that ``training.resume_from_checkpoint`` stands for; None starts from the beginning.

    Raises:
        ConfigError: a checkpoint is required and there is none, or the named one is not complete.
    """
    key = f"training.resume_from_checkpoint = {json.dumps(wanted)}"
    if wanted is None or wanted is False:
        return None
    if wanted == "auto" or wanted is True:
        newest = newest_complete(output_dir)
        if newest is None and wanted is True:
            raise ConfigError(
                f"{key}: {output_dir} holds no complete checkpoint; write auto to start when there is none"
            )
        return newest
    path = Path(str(wanted))
    if (path / MARK).is_file():
        return path
    newest = newest_complete(path.parent) or newest_complete(output_dir)
    hint = f"; the newest complete one is {newest}" if newest else ""
    killed = f"not complete, it has no {MARK} (the run was killed while saving it)"
    raise ConfigError(f"{key}: {killed if path.is_dir() else 'there is no such folder'}{hint}")
