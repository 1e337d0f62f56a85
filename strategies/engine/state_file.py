"""Optimizer state on disk: written and read parameter by parameter, so that it fits any layout of the same model.

    optimizer.json                           rule, hyperparameters, parameters and their files, a hash per file
    optimizer-00001-of-000NN.safetensors     <parameter>.step, .exp_avg, .exp_avg_sq; in mixed precision .master

Problem. The state takes up to three times the memory of fp32 weights, so it must not be copied to be saved; and neither
safetensors nor ``torch.load`` has a hash that would detect a flipped bit.

Files are written directly from the arenas and hashed while writing; from the device in pieces. A file has the state of
one bucket, at most ``FILE_BYTES`` or one parameter. Files are mapped for reading, one at a time. Nothing is pickled.

A save goes into ``<folder>.writing``, which takes the place of an earlier one once it is on the disk. A kill between
both renames leaves the earlier one in ``<folder>.earlier``, where ``load`` finds it (``strategies/core/commit.py``).

Invariant. ``load`` checks everything, hashes included, before it changes anything.

Refused: hyperparameters that are not JSON; a folder with other files in it; state of another model or rule, or damaged.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strategies.core import commit
from strategies.core.sizes import human

VERSION = 1
INDEX = "optimizer.json"
FILE_BYTES = 1 << 30
PIECE_BYTES = 16 << 20  # hashed, and brought down from the device, at a time
FILE_NAME = re.compile(r"optimizer-\d{5}-of-\d{5}\.safetensors")
AGAIN = "save again, or load an earlier save"


@dataclass(frozen=True, slots=True)
class Entry:
    """What is written of one trained parameter. ``state``: fp32 tensors by name, in the arenas."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    state: Mapping[str, Tensor]
    bucket: str

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state.values())


# --- writing ---------------------------------------------------------------------------------------------------------


def write(folder: Path, entries: Sequence[Entry], head: Mapping[str, Any]) -> None:
    """Write a save into ``folder``, atomically.

    Args:
        head: what ``optimizer.json`` says besides parameters and files.

    Raises:
        ValueError: a hyperparameter cannot be written as JSON.
        OSError: writing failed, or ``folder`` holds other files. What was in ``folder`` is still there.
    """
    _check_json(head["param_groups"])
    _refuse_foreign(folder)
    need = sum(entry.num_bytes for entry in entries)
    try:
        with commit.replaced_folder(folder) as draft:
            free = shutil.disk_usage(draft).free
            if need > free:
                raise OSError(f"it needs {human(need)}, the disk has {human(free)}")
            _write_all(draft, entries, head)
    except OSError as error:
        reason = error.strerror or str(error)
        kept = "; the earlier save in it is intact" if folder.exists() else ""
        raise OSError(f"{folder}: the optimizer state ({human(need)}) was not saved: {reason}{kept}") from error


def _write_all(folder: Path, entries: Sequence[Entry], head: Mapping[str, Any]) -> None:
    parts = list(_parts(entries))
    files: dict[str, Any] = {}
    params: dict[str, Any] = {}
    for number, part in enumerate(parts, start=1):
        name = f"optimizer-{number:05}-of-{len(parts):05}.safetensors"
        size, digest = _write_file(folder / name, part)
        files[name] = {"bytes": size, "sha256": digest}
        for entry in part:
            shown = {"shape": list(entry.shape), "dtype": entry.dtype, "file": name, "state": list(entry.state)}
            params[entry.name] = shown
    content = {"version": VERSION, **head, "parameters": params, "files": files}
    text = json.dumps({"sha256": _digest_of(content), "content": content}, indent=1, allow_nan=False)
    (folder / INDEX).write_text(text)


def _parts(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Group entries by file: those of one bucket, up to ``FILE_BYTES``."""
    part: list[Entry] = []
    for entry in entries:
        if part and (part[0].bucket != entry.bucket or sum(e.num_bytes for e in part) + entry.num_bytes > FILE_BYTES):
            yield part
            part = []
        part.append(entry)
    if part:
        yield part


def _write_file(path: Path, part: Sequence[Entry]) -> tuple[int, str]:
    """Write a safetensors file (length of the header, header, bytes) and return its size and hash."""
    header: dict[str, Any] = {}
    end = 0
    tensors = [(f"{entry.name}.{key}", tensor) for entry in part for key, tensor in entry.state.items()]
    for name, tensor in tensors:
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        start = memoryview(len(text).to_bytes(8, "little") + text)
        for piece in itertools.chain([start], (piece for _, tensor in tensors for piece in _pieces(tensor))):
            digest.update(piece)
            while len(piece):
                piece = piece[file.write(piece) :]
        return file.tell(), digest.hexdigest()


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in pieces of ``PIECE_BYTES``: views on the host, copies from the device."""
    assert tensor.dtype is torch.float32
    for piece in tensor.detach().reshape(-1).split(PIECE_BYTES // 4):
        yield memoryview(piece.cpu().numpy()).cast("B")


def _refuse_foreign(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir() or folder.is_symlink():
        raise FileExistsError(f"{folder}: not a folder; optimizer state needs one of its own")
    others = [path.name for path in folder.iterdir() if path.name != INDEX and not FILE_NAME.fullmatch(path.name)]
    if others:
        raise FileExistsError(
            f"{folder}: holds other files ({', '.join(sorted(others)[:3])}), which a save would replace; "
            f"optimizer state needs a folder of its own, such as {folder / 'optimizer'}"
        )


def _check_json(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if a hyperparameter cannot be written as JSON."""
    for number, group in enumerate(groups):
        for key, value in group.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError):
                raise ValueError(
                    f"param_groups[{number}][{key!r}] is {value!r}, which JSON cannot hold: use finite numbers, "
                    f"strings, lists"
                ) from None


# --- reading ---------------------------------------------------------------------------------------------------------


def read_index(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The folder that holds the save (``folder``, or the earlier one after a kill) and what ``optimizer.json`` says.

    Raises:
        ValueError: there is no save, or its index is damaged.
    """
    places = [place for place in (folder, commit.earlier(folder)) if (place / INDEX).is_file()]
    if not places:
        raise ValueError(f"{folder}: no {INDEX} in it; name a folder that optimizer.save() has written")
    path = places[0] / INDEX
    try:
        read = json.loads(path.read_bytes())
        content: dict[str, Any] = read["content"]
        intact = read["sha256"] == _digest_of(content)
    except (ValueError, KeyError, TypeError):
        intact = False
    if not intact:
        raise ValueError(f"{path}: damaged, its hash is another; {AGAIN}")
    if content["version"] != VERSION:
        raise ValueError(
            f"{path}: format {content['version']}, this release reads {VERSION}; use the one that saved it"
        )
    return places[0], content


def damaged_files(folder: Path, content: Mapping[str, Any]) -> Iterator[str]:
    """Why files that the index lists cannot be read, one line each."""
    for name, known in content["files"].items():
        path = folder / name
        if not FILE_NAME.fullmatch(name):
            yield f"{name!r}: not a name that a save gives; {AGAIN}"
        elif path.is_symlink() or not path.is_file():
            yield f"{path}: missing; {AGAIN}"
        elif path.stat().st_size != known["bytes"]:
            yield f"{path}: {path.stat().st_size} bytes, {known['bytes']} were written; {AGAIN}"
        elif _digest_of_file(path) != known["sha256"]:
            yield f"{path}: damaged, its hash is another; {AGAIN}"


def misfits(content: Mapping[str, Any], expected: Mapping[str, Entry], head: Mapping[str, Any]) -> Iterator[str]:
    """Why a save is of another model, grouping or rule, one line each. ``expected``: the entries of this model."""
    for key in ("rule", "state"):
        if content[key] != head[key]:
            yield f"saved by {key} {content[key]}, this optimizer has {head[key]}: stow with the rule that saved it"
    saved = content["parameters"]
    for name in expected.keys() - saved.keys():
        yield f"{name}: not in the save; train the same parameters as the run that saved"
    for name in saved.keys() - expected.keys():
        yield f"{name}: only in the save; train the same parameters as the run that saved"
    for name in (name for name in expected if name in saved):
        shape, dtype = tuple(saved[name]["shape"]), saved[name]["dtype"]
        if (shape, dtype) != (expected[name].shape, expected[name].dtype):
            yield (
                f"{name}: saved as {dtype} {list(shape)}, the model has {expected[name].dtype} "
                f"{list(expected[name].shape)}: load it into the model that saved it"
            )
    if saved.keys() == expected.keys():
        yield from _other_groups(content["param_groups"], head["param_groups"])


def _other_groups(saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if len(saved) != len(groups):
        yield f"param_groups: {len(saved)} in the save, {len(groups)} here: pass the same groups to stow"
        return
    for number, (old, new) in enumerate(zip(saved, groups, strict=True)):
        for name in sorted(set(old["params"]) - set(new["params"])):
            yield f"{name}: saved in group {number}, here in another: pass the same groups to stow"


def absent_tensors(folder: Path, content: Mapping[str, Any]) -> Iterator[str]:
    """Tensors of the index that the files do not have, or have in another shape, one line each."""
    from safetensors import SafetensorError, safe_open

    for name in content["files"]:
        try:
            with safe_open(folder / name, "pt") as file:
                found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            yield f"{folder / name}: {error}; {AGAIN}"
            continue
        for param, known in content["parameters"].items():
            for key in known["state"] if known["file"] == name else ():
                shape = () if key == "step" else tuple(known["shape"])
                if found.get(f"{param}.{key}") != shape:
                    yield f"{folder / name}: no {param}.{key} of shape {list(shape)}; {AGAIN}"


def read(folder: Path, content: Mapping[str, Any], put: Callable[[str, str, Tensor], None]) -> None:
    """Call ``put`` with parameter, name and value of every tensor; one file is mapped at a time."""
    from safetensors import safe_open

    for name in content["files"]:
        with safe_open(folder / name, "pt") as file:
            for param, known in content["parameters"].items():
                for key in known["state"] if known["file"] == name else ():
                    put(param, key, file.get_tensor(f"{param}.{key}"))


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
