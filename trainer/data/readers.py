"""The readers of the tree: each yields (number, row), where a row that cannot be read is a sentence."""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from deepstow.trainer.errors import DataError, kind
from deepstow.trainer.formats.reader import READERS, Numbered, Reader


def _utf8(raw: bytes, place: str, first_line: int = 1) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = first_line + raw.count(b"\n", 0, error.start)
        raise DataError(f"{place}:{line}: byte 0x{raw[error.start]:02x} is not valid UTF-8") from None


def _broken(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"broken JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
    return f"broken JSON: {'nested too deeply' if isinstance(error, RecursionError) else 'a number of too many digits'}"


def _object(value: object) -> Mapping[str, Any] | str:
    return value if isinstance(value, dict) else f"a row must be a JSON object, not {kind(value)}"


def _lines(path: Path) -> Numbered:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip()
                if number == 1 and text.startswith("["):
                    what = "a list begins here, and .jsonl has one object per line; a list is read from a .json file"
                    raise DataError(f"{path}:1: {what}")
                if text:
                    yield number, _object(json.loads(text))
            except UnicodeDecodeError as error:
                yield number, f"byte 0x{raw[error.start]:02x} is not valid UTF-8"
            except (ValueError, RecursionError) as error:
                yield number, _broken(error)


def plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Without the keys that Arrow adds to an object because another one has them (``tool_calls`` in every message)."""
    return {name: _present(value) for name, value in row.items()}


def _present(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _present(inner) for name, inner in value.items() if inner is not None}
    return list(map(_present, value)) if isinstance(value, list) and value and isinstance(value[0], dict) else value


@READERS.add
class Txt(Reader):
    """One document."""

    name = ".txt"

    def rows(self, path: Path, columns: Collection[str]) -> Numbered:
        text = _utf8(path.read_bytes(), str(path))
        if text.strip():
            yield 1, {"text": text}


@READERS.add
class Jsonl(Reader):
    """One JSON object per line."""

    name = ".jsonl"

    def rows(self, path: Path, columns: Collection[str]) -> Numbered:
        yield from _lines(path)

    def count(self, path: Path) -> int | None:
        with path.open("rb") as file:
            return sum(chunk.count(b"\n") for chunk in iter(partial(file.read, 1 << 24), b""))


@READERS.add
class Json(Reader):
    """A list of JSON objects, or one per line."""

    name = ".json"

    def rows(self, path: Path, columns: Collection[str]) -> Numbered:
        with path.open("rb") as file:
            head = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
        if not head.startswith(b"["):  # the other thing people call .json: one object per line
            yield from _lines(path)
            return
        try:
            rows = json.loads(_utf8(path.read_bytes(), str(path)))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{getattr(error, 'lineno', 1)}: {_broken(error)}") from None
        yield from enumerate(map(_object, rows), start=1)


@READERS.add
class Csv(Reader):
    """Rows of cells, with a header."""

    name = ".csv"

    def rows(self, path: Path, columns: Collection[str]) -> Numbered:
        csv.field_size_limit(2**31 - 1)  # the default of 128 KiB refuses ordinary documents
        with path.open("rb") as file:
            lines = (_utf8(raw, str(path), number) for number, raw in enumerate(file, start=1))
            reader = csv.reader(lines, strict=True)
            try:
                header, next_line = next(filter(None, reader), []), reader.line_num + 1
                if len(header) == 1 and (mark := next((mark for mark in ";\t" if mark in header[0]), None)):
                    raise DataError(f"{path}:1: columns are separated by {mark!r}; write commas")
                for row in reader:
                    number, next_line = next_line, reader.line_num + 1
                    if not row:
                        continue
                    if len(row) != len(header):
                        yield number, f"the row has {len(row)} fields, the header has {len(header)}"
                    else:  # CSV cannot write null: an empty cell is one, as it is for pandas and `datasets`
                        yield number, {name: cell or None for name, cell in zip(header, row, strict=True)}
            except csv.Error as error:
                raise DataError(f"{path}:{reader.line_num}: broken CSV: {error}") from None


@READERS.add
class Parquet(Reader):
    """Apache's columns."""

    name = ".parquet"

    def rows(self, path: Path, wanted: Collection[str]) -> Numbered:
        done: int | None = None
        try:
            file = pq.ParquetFile(path)
            done, names = 0, file.schema_arrow.names
            if not wanted:
                yield 0, dict.fromkeys(names)
                return
            columns = [name for name in names if name in wanted]
            for batch in file.iter_batches(batch_size=256, columns=columns):
                yield from enumerate(map(plain, batch.to_pylist()), start=done + 1)
                done += len(batch)
        except (pa.ArrowException, OSError):
            if done is None:
                raise DataError(f"{path}: not a whole Parquet file: it is truncated or damaged") from None
            raise DataError(f"{path}:{done + 1}: the Parquet data is damaged from here on") from None

    def count(self, path: Path) -> int | None:
        return int(pq.read_metadata(path).num_rows)
