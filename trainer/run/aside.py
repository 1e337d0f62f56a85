"""What an earlier run has left in a folder moves into ``earlier-N`` beside it, or is deleted if that was said.

Invariant. Each thing is renamed in one step, so after a kill it is in one of both places, whole. Of what is a symbolic
link the link moves, and nothing is deleted through it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from pathlib import Path

from strategies.core.commit import remove, sync


def move(things: Iterable[Path], output_dir: Path, *, overwrite: bool) -> Path | None:
    """Move what exists of ``things`` into a new ``earlier-N``, which is returned; delete it with ``overwrite``.

    Raises:
        OSError: something cannot be renamed or deleted.
    """
    there = [path for path in things if os.path.lexists(path)]
    number = next(n for n in itertools.count(1) if not (output_dir / f"earlier-{n}").exists())
    folder = output_dir / f"earlier-{number}"
    if there:
        folder.mkdir()
    for path in there:
        if path.is_symlink():  # it may be relative
            (folder / path.name).symlink_to(path.resolve())
            path.unlink()
        else:
            path.rename(folder / path.name)
    if there:
        sync(output_dir)
    if overwrite and there:
        remove(folder)
    return folder if there and not overwrite else None
