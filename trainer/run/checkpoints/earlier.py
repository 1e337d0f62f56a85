"""What a run finds in its folder and does not go on with is kept in ``earlier-N``: nothing is mixed, nothing is lost.

    what is there                     a fresh run   one that goes back       one of another run's checkpoint
    checkpoints                       moved         later ones are moved     moved
    export, export-*                  moved         moved, if of later steps moved
    metrics.jsonl                     moved         copied; later lines go   moved
    config.yaml, plan.*, facts.json   copied        copied                   copied
    TensorBoard's runs, profile       moved         moved                    moved
    data, tokenizer, recipes' models  made of inputs that their manifests name: they stay

A fresh run that finds neither checkpoint nor export, and a run that goes on from the newest checkpoint after a kill,
move nothing. An export that names no checkpoint (``finished.py``) moves alone. A run that resumes deletes nothing of
this, whatever ``training.overwrite`` says.

Invariant. All that moves goes together. Copies and the list of names are on the disk before the folder has its name
``earlier-N``; from then on a start completes what a kill has left undone. So no run ever goes on from a checkpoint of
steps that were given up.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepstow.strategies.state.commit import remove, replace_file, sync
from deepstow.strategies.state.sealed import MANIFEST, Damaged, read, size_and_hash
from deepstow.trainer.run.checkpoints import checkpoint, finished
from deepstow.trainer.run.checkpoints.checkpoint import DELETED, TRAINER_STATE, Found
from deepstow.trainer.run.history import records

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig

METRICS = "metrics.jsonl"
SETTINGS = ("config.yaml", "plan.json", "plan.txt", "ds_config.json", "facts.json")  # written anew by each start
PICTURES = ("runs", "profile")  # TensorBoard's, in Hugging Face's default folder, and the profiler's
DRAFT, MOVING = "earlier.writing", "moving.json"
FURTHER = "further export"  # in the manifests of what was made of an export


def set_aside(config: RunConfig, found: Found | None) -> Iterator[str]:
    """Move what a run that resumes ``found`` does not go on with; yields lines to print. May raise OSError."""
    folder, overwrite = Path(config.training.output_dir), config.training.overwrite
    remove(folder / DRAFT)
    results = [*checkpoint.folders(folder), *exports(folder)]
    pictures, settings = ([folder / name for name in names] for names in (PICTURES, SETTINGS))
    if found is None:
        things = [*results, *pictures, folder / METRICS] if results else []
        aside = move_aside(things, folder, copies=settings, overwrite=overwrite)
        if aside:
            yield f"a fresh run: the checkpoints and the export of the earlier one are now in {aside}"
        return
    if not is_of(folder, found):
        others = [path for path in results if path.resolve() != found.path.resolve()]
        things = [*others, *pictures, folder / METRICS]
        aside = move_aside(things, folder, copies=settings, overwrite=False)
        if aside:
            yield f"{found.path} is another run's: what was in {folder} before is now in {aside}"
        return
    undone = list(_undone(folder, found))
    alone = [path for path in _unnamed(folder) if path not in undone]
    things = [*undone, *alone, *(pictures if undone else ())]
    copies = [*settings, folder / METRICS] if undone else []
    aside = move_aside(things, folder, copies=copies, overwrite=False)
    if undone:
        names = ", ".join(path.name for path in undone)
        yield f"gone back to {found.path.name}: what came after it ({names}) is now in {aside}"
    if alone:
        names = ", ".join(path.name for path in alone)
        yield f"{names}: not known to be made of {found.path.name}, so not kept in place; now in {aside}"


def exports(folder: Path) -> list[Path]:
    """The export and all that were made of it, as far as they are there. May raise OSError."""
    return sorted(path for path in folder.iterdir() if path.name.partition("-")[0] == finished.NAME)


def is_of(folder: Path, found: Found) -> bool:
    """Whether a checkpoint is of the run whose records are in ``folder``: it is in it, and its history has all losses
    that are recorded there for steps before it. One of its own step may have been logged after the save.
    """
    if not checkpoint.is_in(found.path, folder):
        return False
    try:
        lines = (folder / METRICS).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return True
    state = json.loads((found.path / TRAINER_STATE).read_bytes())
    logged = {pair for pair in _losses(records(lines)) if pair[0] < found.step}
    return logged <= {*_losses(state["log_history"])}


def _losses(history: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, str]]:
    """Steps and losses, as text: JSON has no number for those that are not finite."""
    return ((record["step"], str(record["loss"])) for record in history if "loss" in record)


def _undone(folder: Path, found: Found) -> Iterator[Path]:
    """Checkpoints and exports of steps after ``found``, or of its step and another content."""
    digest = checkpoint.digest(found.path)
    for path in checkpoint.folders(folder):
        step = checkpoint.step_of(path)
        if path.resolve() != found.path.resolve() and (
            step > found.step or (step == found.step and _other(path, digest))
        ):
            yield path
    record = finished.said_by(folder / finished.NAME)
    last, base = record.get("step"), record.get(finished.OF)
    if isinstance(last, int) and (last > found.step or (last == found.step and base is not None and base != digest)):
        yield from exports(folder)


def _other(path: Path, digest: str) -> bool:
    try:
        return checkpoint.digest(path) != digest
    except Damaged:
        return True


def _unnamed(folder: Path) -> Iterator[Path]:
    """Exports of no checkpoint that they name, and what was made of another export than the one beside it."""
    exported = exports(folder)
    if finished.said_by(folder / finished.NAME).get(finished.OF) is None:
        yield from exported
    else:
        yield from (path for path in exported if path.name != finished.NAME and not is_made_of(path, folder))


def is_made_of(path: Path, folder: Path) -> bool:
    """Whether a further export was made of the export that is in ``folder`` now."""
    try:
        made_of = read(path, FURTHER).about["decided by"]["of"]
        return bool(made_of == size_and_hash(folder / finished.NAME / MANIFEST)[1])
    except (Damaged, OSError, KeyError, TypeError):
        return False


# --- moving ----------------------------------------------------------------------------------------------------------


def move_aside(
    things: Iterable[Path], output_dir: Path, *, copies: Iterable[Path] = (), overwrite: bool
) -> Path | None:
    """Move what exists of ``things``, with ``copies`` of files, into a new ``earlier-N``, which is returned; delete it
    with ``overwrite``. Of a symbolic link the link moves, and nothing is deleted through it. May raise OSError.
    """
    names = {path.name for path in output_dir.iterdir()}  # a look at each would take an error for absence
    existing = [path for path in things if path.name in names]
    if not existing:
        return None
    draft = output_dir / DRAFT
    remove(draft)
    draft.mkdir()
    for path in copies if not overwrite else ():
        if path.is_file():
            shutil.copy2(path, draft / path.name)
            sync(draft / path.name)
    replace_file(draft / MOVING, json.dumps([path.name for path in existing]))
    numbered = (f"earlier-{number}" for number in itertools.count(1))
    folder = output_dir / (DELETED if overwrite else next(name for name in numbered if name not in names))
    if overwrite:
        remove(folder)
    draft.rename(folder)
    sync(output_dir)
    _complete(folder)
    if overwrite:
        remove(folder)
    return None if overwrite else folder


def complete(output_dir: Path) -> None:
    """Move what a kill has kept from being moved. Raise OSError, or ValueError for a list that is damaged."""
    for folder in sorted(output_dir.iterdir()):
        if folder.name == DELETED or folder.name.startswith("earlier-"):
            _complete(folder)


def _complete(folder: Path) -> None:
    output_dir, marker = folder.parent, folder / MOVING
    try:
        names = json.loads(marker.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return  # all of it has moved
    if wrong := next((name for name in names if Path(name).name != name), None):
        raise ValueError(f"{marker} names {wrong!r}, which is not in {output_dir}")
    for name in {path.name for path in output_dir.iterdir()} & set(names):
        path, place = output_dir / name, folder / name
        if path.is_symlink():  # it may be relative
            if not place.is_symlink():
                place.symlink_to(path.resolve())
            path.unlink()
        else:
            path.rename(place)
    sync(folder)
    sync(output_dir)
    marker.unlink()
    sync(folder)
