"""Checkpoints: which one is complete, which one is resumed, which ones may go.

Problem. Several processes write a checkpoint; a kill in between leaves a folder that has the highest number and
cannot be resumed. Hugging Face and DeepSpeed both pick it (their ``latest`` and highest-number rules).

Rule. After every rank has written and all have met, rank 0 writes ``complete.json`` into the folder. ``auto`` resumes
from the newest folder that has it; a folder named by the user is taken at the user's word, but must have it too.
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
FOLDER = re.compile(r"checkpoint-(\d+)")


def mark_complete(output_dir: Path, step: int, *, is_first: bool) -> None:
    """Called by every rank after it has written its part; rank 0 marks the folder once all have."""
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    if is_first:
        replace_file(output_dir / f"checkpoint-{step}" / MARK, json.dumps({"step": step}))


def unmark(output_dir: Path, step: int, *, is_first: bool) -> None:
    """Called by every rank before it writes into a folder that an earlier run may have completed."""
    import torch.distributed

    if is_first:
        (output_dir / f"checkpoint-{step}" / MARK).unlink(missing_ok=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def complete(output_dir: Path) -> list[Path]:
    """All complete checkpoints, oldest first."""
    found = [
        (int(match[1]), path)
        for path in output_dir.glob("checkpoint-*")
        if (match := FOLDER.fullmatch(path.name)) and (path / MARK).is_file()
    ]
    return [path for _, path in sorted(found)]


def newest_complete(output_dir: Path) -> Path | None:
    """The complete checkpoint with the highest step, or None."""
    return next(reversed(complete(output_dir)), None)


def prune(output_dir: Path, keep: int, best: str | None) -> None:
    """Delete all but the ``keep`` newest complete checkpoints and the best one.

    The mark goes first: a checkpoint that is half deleted is not complete.
    """
    for folder in complete(output_dir)[:-keep]:
        if best is None or folder.resolve() != Path(best).resolve():
            (folder / MARK).unlink()
            shutil.rmtree(folder)


def set_aside(output_dir: Path) -> Path | None:
    """Move what an earlier run left out of the way of a fresh one: its checkpoints and its metrics, nothing deleted.

    Otherwise the old checkpoints, with their higher steps, would be resumed after the first kill of the new run.
    Returns the folder they are in now; None if there was nothing.
    """
    old = sorted(path for path in output_dir.glob("checkpoint-*") if FOLDER.fullmatch(path.name) and path.is_dir())
    if not old:
        return None
    number = next(n for n in itertools.count(1) if not (output_dir / f"earlier-{n}").exists())
    folder = output_dir / f"earlier-{number}"
    folder.mkdir()
    for path in [*old, output_dir / "metrics.jsonl"]:
        if path.exists():
            path.rename(folder / path.name)
    return folder


def to_resume(output_dir: Path, wish: str | bool | None) -> Path | None:
    """The checkpoint that ``training.resume_from_checkpoint`` means; None starts from the beginning.

    Raises:
        ConfigError: a checkpoint is required and there is none, or the named one is not complete.
    """
    key = f"training.resume_from_checkpoint = {json.dumps(wish)}"
    if wish is None or wish is False:
        return None
    if wish == "auto" or wish is True:
        newest = newest_complete(output_dir)
        if newest is None and wish is True:
            raise ConfigError(
                f"{key}: {output_dir} holds no complete checkpoint; write auto to start when there is none"
            )
        return newest
    path = Path(str(wish))
    if not path.is_dir():
        newest = newest_complete(path.parent) or newest_complete(output_dir)
        hint = f"; the newest complete one is {newest}" if newest else ""
        raise ConfigError(f"{key}: there is no such folder{hint}")
    if not (path / MARK).is_file():
        newest = newest_complete(path.parent)
        hint = f"; the newest complete one is {newest}" if newest else ""
        raise ConfigError(f"{key}: not complete, it has no {MARK} (the run was killed while saving it){hint}")
    return path
