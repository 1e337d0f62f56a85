"""Rows of data from files, folders, Python's documentation (``pydoc``) or the hub, each with its place: ``a.jsonl:7``.

Local files are read here row by row and not by a table builder of ``datasets``, which infers one schema for all files,
and reports a broken row by its block. The number in a place is the line in .jsonl, .txt and .csv files, and the row
counted from 1 in .json and .parquet files. A .txt file is one document. A folder consists of all
its data files in name order, or of the files of one split if their names begin with train, test or validation. A row
that cannot be read is a sentence, so that several are reported at once; else it is a DataError.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from deepstow.strategies.state.commit import inside
from deepstow.strategies.state.sealed import digest_of
from deepstow.trainer.data import pydoc_rows
from deepstow.trainer.data.readers import plain
from deepstow.trainer.errors import DataError, first_line, nearest, nearest_file
from deepstow.trainer.formats.reader import READERS, Numbered, Reader
from deepstow.trainer.model import hub
from deepstow.trainer.model.hashes import hashes
from deepstow.trainer.registry import Unusable

_INFO = "dataset_info.json"  # of Hugging Face's saved data, beside state.json; LLaMA-Factory's list of data sets, alone
_STATE = "state.json"
_SPLIT_WORD = re.compile(r"(?:^|/)(train|training|test|validation|valid|val|dev|eval)(?:[-_./0-9]|$)")
_SPLIT_ALIASES = {"training": "train", "valid": "validation", "val": "validation", "dev": "validation"}


class Row(NamedTuple):
    """One row of data: ``place`` is ``<file>:<number>``; ``values`` is a sentence if it could not be read."""

    place: str
    values: Mapping[str, Any] | str


def _read_pydoc(name: str, columns: Collection[str]) -> Numbered:
    yield from pydoc_rows.rows(name)


def _read_arrow(dataset: Any, columns: Collection[str]) -> Numbered:
    names = [name for name in dataset.column_names or () if name in columns]
    yield from enumerate(map(plain, dataset.select_columns(names) if names else dataset), start=1)


@dataclass(frozen=True)
class Table:
    """One file, or another set of rows with the same columns."""

    name: str
    columns: tuple[str, ...]
    read: Callable[[Collection[str]], Numbered]


@dataclass(frozen=True)
class Source:
    """Rows that can be read repeatedly, always in the same order, also in another process."""

    name: str
    tables: tuple[Table, ...]
    identity: Callable[[bool], list[str]]  # the content in its order, wherever it is: exactly, or by size and time
    former: Callable[[bool], list[str]]  # the same as releases identified it whose manifests have names of files in it
    count: Callable[[], int | None] = lambda: None  # how many rows, as far as that can be known at once
    readers: tuple[Reader, ...] = ()  # of its files

    def say_unread(self, columns: Collection[str], say: Callable[[str], None]) -> None:
        """Say which other columns there are than those that are read."""
        if unread := [name for name in self.tables[0].columns if name not in columns]:
            say(f"data: {self.name}: columns that are not read: {', '.join(unread)}")

    def rows(self, columns: Collection[str]) -> Iterator[Row]:
        """All rows, each with at least these ``columns``, where it has them."""
        for table in self.tables:
            for number, values in table.read(columns):
                yield Row(f"{table.name}:{number}", values)


def _reader(path: Path) -> Reader:
    try:
        return READERS.found(path.suffix.lower())
    except Unusable as error:
        raise DataError(f"{path}: {path.suffix}: {error}") from None


def _files(root: Path, paths: Sequence[Path], asked: Reader | None = None) -> Source:
    """Files in the order given; ``root`` is the file or folder of the config. Reads the head of every file. ``asked``:
    for a reader that is not that of their suffix.
    """
    tables, readers = [], [asked or _reader(path) for path in paths]
    for path, reader in zip(paths, readers, strict=True):
        read_rows, broken = partial(reader.rows, path), list[str]()
        for number, row in read_rows(()):
            if isinstance(row, str):
                broken.append(f"{path}:{number}: {row}")
            elif row:
                tables.append(Table(str(path), tuple(row), read_rows))
                break
        else:
            raise DataError(broken[:5] or f"{path}: the file is empty; it has no rows")
    former = partial(_former_marks, root, paths)
    count = partial(_count, paths, readers)
    return Source(str(root), tuple(tables), partial(_marks, paths), former, count, tuple(dict.fromkeys(readers)))


def _count(paths: Sequence[Path], readers: Sequence[Reader]) -> int | None:
    total = 0
    for path, reader in zip(paths, readers, strict=True):
        number = reader.count(path)
        if number is None:
            return None
        total += number
    return total


def _marks(paths: Sequence[Path], exact: bool) -> list[str]:
    """Of files in their order; what reads them is known by the suffix, and other parts of their names say nothing."""
    return [f"{path.suffix.lower()} {mark}" for path, mark in zip(paths, _contents(paths, exact), strict=True)]


def _former_marks(root: Path, paths: Sequence[Path], exact: bool) -> list[str]:
    return [
        f"{path.relative_to(root.parent)} {mark}" for path, mark in zip(paths, _contents(paths, exact), strict=True)
    ]


def _contents(paths: Sequence[Path], exact: bool) -> list[str]:
    return hashes(paths) if exact else [f"{s.st_size} {s.st_mtime_ns}" for s in (path.stat() for path in paths)]


def _pydoc(name: str) -> Source:
    columns, read_rows = pydoc_rows.COLUMNS[name], partial(_read_pydoc, name)
    content = repr([values for _, values in read_rows(())])
    marks = ["pydoc", hashlib.sha256(content.encode()).hexdigest()]
    identity = partial(_known, marks)
    return Source("pydoc", (Table("pydoc", columns, read_rows),), identity, identity)


def _arrow(name: str, dataset: Any, marks: list[str], former: Callable[[bool], list[str]] | None = None) -> Source:
    """A ``datasets.Dataset`` or ``IterableDataset``: from the hub, or a folder written by ``save_to_disk``."""
    columns = dataset.column_names or next((list(row) for row in islice(dataset, 1)), [])
    table = Table(name, tuple(columns), partial(_read_arrow, dataset))
    identity = partial(_known, marks)
    return Source(name, (table,), identity, former or identity, lambda: getattr(dataset, "num_rows", None))


def _known(marks: list[str], exact: bool) -> list[str]:
    return marks


def is_on_hub(path: str) -> bool:
    """Whether ``path`` is looked for on the hub, which has names with an owner alone."""
    return "/" in path and Path(path).suffix.lower() not in READERS.names() and hub.is_name(path)


def open_source(
    path: str, name: str | None, split: str, streaming: bool, key: str = "data.", reader: Reader | None = None
) -> Source:
    """The source that ``path`` names: a file, a folder, ``pydoc`` (``name``: see ``pydoc_rows.py``), or a hub name
    ``owner/name`` (``name``: its subset). Raises DataError if nothing is there, or it cannot be read; ``key`` is the
    prefix of the config keys of this source, ``reader`` the one that the config names.
    """
    local = Path(path).expanduser()
    suffix, suffixes = local.suffix.lower(), READERS.names()
    if reader is not None and not local.exists():
        raise DataError(f"{key}path: {path} does not exist{nearest_file(local)}; data.reader reads files")
    if path == "pydoc":
        return _pydoc(name or "text")
    if reader is None and is_on_hub(path):
        return _hub(path, name, split, streaming, key)
    if name is not None and local.exists():
        raise DataError(f"{key}name: {name!r} is a hub subset, but {path} is a local path; remove it")
    if local.is_dir():
        return _folder(local, split, key, reader)
    if not local.is_file():
        hint = nearest_file(local) or "; a hub name looks like owner/name"
        raise DataError(f"{key}path: {path} does not exist{hint}")
    if reader is None and suffix not in suffixes:
        allowed = f"{', '.join(suffixes)}{nearest(suffix, suffixes) or '; data.reader names another reader'}"
        raise DataError(f"{path}: {local.suffix or 'no suffix'} is not a data format; allowed: {allowed}")
    if split != "train":
        raise DataError(f"{key}split: {split!r}: {path} is one file and has no splits")
    return _files(local, [local], reader)


def is_saved(folder: Path) -> bool:
    """Whether ``save_to_disk`` of Hugging Face has written it."""
    return (folder / "dataset_dict.json").is_file() or all((folder / name).is_file() for name in (_INFO, _STATE))


def _folder(folder: Path, split: str, key: str, reader: Reader | None) -> Source:
    if reader is None and is_saved(folder):
        return _saved(folder, split, key)
    suffixes, paths = READERS.names(), (path for path in inside(folder) if path.name != _INFO)
    readable = (path for path in paths if reader is not None or path.suffix.lower() in suffixes)
    files = [path for path in readable if not path.name.startswith(".") and path.is_file()]
    if not files:
        raise DataError(f"{folder}: the folder holds no data file; allowed: {', '.join(suffixes)}")
    words = {path: _SPLIT_WORD.search(path.relative_to(folder).with_suffix("").as_posix().lower()) for path in files}
    splits = {path: _SPLIT_ALIASES.get(word[1], word[1]) if word else None for path, word in words.items()}
    naming = [path for path in files if splits[path]]
    if naming and len(naming) < len(files):
        silent = next(path for path in files if not splits[path])
        raise DataError(f"{folder}: {naming[0].name} names a split and {silent.name} does not; rename or move one")
    if naming:
        files = [path for path in files if splits[path] == _SPLIT_ALIASES.get(split, split)]
    if not files:
        available = ", ".join(sorted({word for word in splits.values() if word}))
        raise DataError(f"{key}split: {split!r}: no file of {folder} is named so; found: {available}")
    if not naming and split != "train":
        raise DataError(f"{key}split: {split!r}: no file name in {folder} says which split it is")
    return _files(folder, files, reader)


def _saved(folder: Path, split: str, key: str) -> Source:
    from datasets import DatasetDict, load_from_disk

    try:
        data = load_from_disk(str(folder))
    except Exception as error:  # of whatever is missing or damaged
        raise DataError(f"{folder}: saved data that cannot be loaded: {first_line(error)}") from None
    home = folder
    if isinstance(data, DatasetDict):
        if split not in data:
            raise DataError(f"{key}split: {split!r} is not in {folder}; found: {', '.join(data)}")
        data, home = data[split], folder / split
    # Rows are those of the files that the state lists, in that order; and columns and values are as it says besides.
    state = json.loads((home / _STATE).read_bytes())
    shards = hashes(home / entry["filename"] for entry in state.pop("_data_files"))
    read_as = {name: value for name, value in state.items() if name not in ("_fingerprint", "_split")}
    marks = [digest_of([read_as, data.features.to_dict()]), *shards]

    def former(exact: bool) -> list[str]:
        return [split, *hashes(sorted(folder.rglob("*.arrow")))]

    return _arrow(str(folder), data, marks, former)


def _hub(path: str, name: str | None, split: str, streaming: bool, key: str) -> Source:
    from datasets import config, load_dataset
    from datasets.naming import camelcase_to_snakecase
    from huggingface_hub import HfApi

    owner, _, repo_name = path.rpartition("/")
    cached = Path(config.HF_DATASETS_CACHE, f"{owner}___{camelcase_to_snakecase(repo_name)}").is_dir() and not streaming
    if not cached and (why := hub.unreachable()):
        what = "is neither here nor in the cache of Hugging Face datasets, and the hub cannot be reached"
        raise DataError(f"{key}path: {path} {what} ({why})")
    try:
        commit = HfApi().dataset_info(path).sha if streaming else None  # else a stream names none
        if cached and hub.unreachable():
            data = _cached(path, name, split)
        else:
            revision = {"revision": commit} if commit else {}
            data = load_dataset(path, name, split=split, streaming=streaming, **revision)
    except Exception as error:  # the hub client raises many unrelated types
        raise DataError(f"{key}path: hub data set {path} cannot be loaded: {first_line(error)}") from None
    # Download addresses contain the commit, so they identify the content.
    urls = sorted(map(str, getattr(data.info, "download_checksums", None) or ()))
    marks = [path, str(name), split, *urls]
    return _arrow(f"{path}[{split}]", data, [*marks, commit] if commit else marks, lambda exact: marks)


def _cached(path: str, name: str | None, split: str) -> Any:
    """What ``load_dataset`` takes from its cache in the end, after it has asked the hub for 23 s."""
    from datasets.packaged_modules.cache.cache import Cache

    repo_name = path.rpartition("/")[2]
    return Cache(repo_id=path, dataset_name=repo_name, config_name=name, version="auto", hash="auto").as_dataset(
        split=split
    )
