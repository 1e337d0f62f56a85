"""Spans of named parameters in safetensors files: written by whoever holds them, read by whoever needs them.

    model.norm.weight.exp_avg                   the whole tensor ``exp_avg`` of a parameter, in the parameter's shape
    model.norm.weight.exp_avg[1024:2048]        elements 1024 to 2047 of it, counted row by row
    ...o_proj.weight.exp_avg[0:64,32:48/48]     rows 0 to 63 of its columns 32 to 47, of which it has 48

Problem. A rank holds whole parameters, rows or columns of them, or what happens to lie in its share of a flat buffer.
A file that says what it holds by name and range can be read under any other division, by any number of ranks.

``write`` streams from where tensors are, in pieces, and makes no second copy of them. ``Store`` reads any range of any
tensor from any number of files, straight into the memory that it is for; nothing is mapped, and nothing is unpickled.

Invariant. A range is read only if its elements are each in exactly one span.

Refused, each in one line: a file that is cut or malformed, a range that is missing or twice there, another shape.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strategies.state.blocks import Columns, Rectangle, all_columns, gaps, rectangles

FILE_BYTES = 1 << 30  # a writer begins another file beyond that
PIECE_BYTES = 16 << 20  # hashed, brought down from the device, or read for it at a time
HEADER_BYTES = 100 << 20  # more than any header has
WEIGHT = "weight"
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
KEY = re.compile(
    r"(?P<name>.+)\.(?P<kind>[A-Za-z0-9_]+?)(?:\[(?P<start>\d+):(?P<stop>\d+)(?:,(?P<left>\d+):(?P<right>\d+)/(?P<of>\d+))?\])?"
)


class SpanError(ValueError):
    """What is in the files cannot be used; one line that names the file or the tensor."""


@dataclass(frozen=True, slots=True)
class Span:
    """Elements ``start`` to ``start + tensor.numel()`` of the tensor ``kind`` of parameter ``name``.

    ``shape`` is that of the whole tensor. With ``columns`` elements are counted in these columns alone, and the span
    has whole rows of them, or a part of one row.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    tensor: Tensor
    columns: Columns | None = None

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.tensor.numel() == math.prod(self.shape)

    @property
    def key(self) -> str:
        """Its name in the file."""
        end = "" if self.is_whole else f"[{self.start}:{self.start + self.tensor.numel()}]"
        if self.columns is not None:
            (block,) = rectangles(self.columns, self.start, self.tensor.numel())
            end = f"[{block.top}:{block.bottom},{block.left}:{block.right}/{self.columns.of}]"
        return f"{self.name}.{self.kind}{end}"


# --- writing ---------------------------------------------------------------------------------------------------------


def parts(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Group spans by file, up to ``FILE_BYTES`` or one span."""
    part: list[Span] = []
    num_bytes = 0
    for span in spans:
        if part and num_bytes + span.tensor.nbytes > FILE_BYTES:
            yield part
            part, num_bytes = [], 0
        part.append(span)
        num_bytes += span.tensor.nbytes
    if part:
        yield part


def write(path: Path, spans: Sequence[Span], *, hashed: bool = True) -> tuple[int, str | None]:
    """Write a safetensors file (length of the header, header, bytes) and return its size and, if wished, SHA-256."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for span in spans:
        shape = span.shape if span.is_whole else (span.tensor.numel(),)
        offsets = [end, end + span.tensor.nbytes]
        assert span.key not in header, f"{span.key} is written twice"
        header[span.key] = {"dtype": NAMES[span.tensor.dtype], "shape": list(shape), "data_offsets": offsets}
        end += span.tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        start = memoryview(len(text).to_bytes(8, "little") + text)
        for piece in itertools.chain([start], (piece for span in spans for piece in _pieces(span.tensor))):
            if hashed:
                digest.update(piece)
            while len(piece):
                piece = piece[file.write(piece) :]
        return file.tell(), digest.hexdigest() if hashed else None


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in pieces of ``PIECE_BYTES``: views on the host, copies from the device."""
    for piece in tensor.detach().reshape(-1).split(PIECE_BYTES // tensor.element_size()):
        yield _bytes(piece.cpu())


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    data: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stored:
    """A span in a file: elements ``start`` to ``stop``, from byte ``offset`` on. ``shape``: if it is a whole tensor.

    With ``columns`` elements are counted in these columns alone.
    """

    path: Path
    start: int
    stop: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...] | None
    columns: Columns | None = None

    def rectangles(self, of: int) -> Iterator[Rectangle]:
        """Which part it is of a matrix with ``of`` columns; the memory is the file's, from ``offset`` on."""
        return rectangles(self.columns or all_columns(of), self.start, self.stop - self.start)


class Store:
    """What a number of files hold, by parameter and kind."""

    def __init__(self, stored: Mapping[tuple[str, str], Sequence[Stored]]) -> None:
        self._stored = {key: sorted(spans, key=lambda span: span.start) for key, spans in stored.items()}
        self._kinds: dict[str, set[str]] = {}
        for name, kind in stored:
            self._kinds.setdefault(name, set()).add(kind)

    @classmethod
    def of(cls, paths: Iterable[Path], *, kind: str | None = None) -> Store:
        """Read the headers of ``paths``. With ``kind``, keys are names of whole tensors of that kind.

        Raises:
            SpanError: a file is missing or malformed.
        """
        found: dict[tuple[str, str], list[Stored]] = {}
        for path in paths:
            for key, dtype, shape, offset in read_header(path):
                name, what, start, columns = (key, kind, None, None) if kind is not None else _parsed(path, key)
                stop = (start or 0) + math.prod(shape)
                span = Stored(path, start or 0, stop, dtype, offset, shape if start is None else None, columns)
                found.setdefault((name, what), []).append(span)
        return cls(found)

    def kinds(self, name: str) -> set[str]:
        """The kinds of tensors that there are of a parameter."""
        return self._kinds.get(name, set())

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._stored

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Parameter and kind of all tensors of which something is there."""
        return iter(self._stored)

    def shape(self, name: str, kind: str) -> tuple[int, ...] | None:
        """The shape, where a file holds the whole tensor."""
        return next((span.shape for span in self._stored.get((name, kind), ()) if span.shape is not None), None)

    def dtype(self, name: str, kind: str) -> torch.dtype:
        """The dtype of a tensor that is there."""
        return self._stored[name, kind][0].dtype

    def faults(self, name: str, kind: str, shape: Sequence[int]) -> Iterator[str]:
        """Why a tensor of ``shape`` cannot be put together, one line each."""
        what, numel, end = f"{name}.{kind}", math.prod(shape), 0
        if any(span.columns for span in self._stored.get((name, kind), ())):
            yield from (f"{what}: {why}" for why in self._block_faults(name, kind, shape))
            return
        last: Stored | None = None
        for span in self._stored.get((name, kind), ()):
            if span.shape is not None and span.shape != tuple(shape):
                yield f"{span.path}: {what} has shape {list(span.shape)}, not {list(shape)}"
            elif span.stop > numel:
                yield f"{span.path}: {what} goes on to element {span.stop}, and it has {numel}"
            elif span.start > end:
                yield f"{what}: elements {end} to {span.start} of {numel} are in no file"
            elif span.start < end and last is not None:
                yield f"{what}: elements {span.start} to {min(end, span.stop)} are in {last.path} and in {span.path}"
            if last is not None and span.dtype is not last.dtype:
                yield f"{span.path}: {what} is {span.dtype} here and {last.dtype} in {last.path}"
            end, last = max(end, span.stop), span
        if end < numel or last is None:
            yield f"{what}: elements {end} to {numel} of {numel} are in no file" if last else f"{what} is in no file"

    def _block_faults(self, name: str, kind: str, shape: Sequence[int]) -> Iterator[str]:
        """The same where spans have some of the columns."""
        spans, of = self._stored[name, kind], shape[-1] if shape else 1
        if any(span.columns is not None and span.columns.of != of for span in spans) or len(shape) < 2:
            yield f"it was saved as a matrix of other columns than {of}"
        elif len({span.dtype for span in spans}) > 1:
            yield "it has several dtypes"
        else:
            found = [each for span in spans for each in span.rectangles(of)]
            yield from gaps(found, math.prod(shape) // of, of)

    @torch.no_grad()
    def read(
        self,
        name: str,
        kind: str,
        start: int,
        into: Tensor,
        *,
        columns: Columns | None = None,
        rounding: bool = False,
    ) -> None:
        """Fill ``into`` with the elements from ``start`` on; it may be on any device.

        Args:
            columns: ``start`` counts in these columns alone, which are all that is read.
            rounding: allow another dtype that cannot hold every value.

        Raises:
            SpanError: an element is in no span, the dtype does not fit, or a file ends early.
        """
        stop = start + into.numel()
        if not into.is_contiguous():
            made = torch.empty(into.shape, dtype=into.dtype, device=into.device)
            self.read(name, kind, start, made, columns=columns, rounding=rounding)
            into.copy_(made)
            return
        known = columns or next((span.columns for span in self._stored.get((name, kind), ()) if span.columns), None)
        if known is not None:
            self._read_blocks(name, kind, columns or all_columns(known.of), start, into, rounding=rounding)
            return
        flat, done = into.view(-1), start
        for span in self._stored.get((name, kind), ()):
            low, high = max(span.start, done), min(span.stop, stop)
            if low > done or low >= high:
                continue
            _refuse_rounding(span, f"{name}.{kind}", into, rounding=rounding)
            _read(span, low - span.start, flat[low - start : high - start])
            done = high
        if done < stop:
            raise SpanError(f"{name}.{kind}: elements {done} to {stop} are in no file")

    def _read_blocks(self, name: str, kind: str, columns: Columns, start: int, into: Tensor, *, rounding: bool) -> None:
        """Fill ``into`` where it or what is stored has some of the columns."""
        wanted, missing = list(rectangles(columns, start, into.numel())), into.numel()
        for span in self._stored.get((name, kind), ()):
            for have in span.rectangles(columns.of):
                for want in wanted:
                    source, target = have.common(want), want.common(have)
                    if source is not None and target is not None:
                        _refuse_rounding(span, f"{name}.{kind}", into, rounding=rounding)
                        _read_block(span, source, into.view(-1), target)
                        missing -= source.area
        if missing:
            raise SpanError(f"{name}.{kind}: {missing} elements are in no file")


def read_header(path: Path) -> list[tuple[str, torch.dtype, tuple[int, ...], int]]:
    """Key, dtype, shape and place in the file of every tensor.

    Raises:
        SpanError: the file is missing or malformed.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, HEADER_BYTES):
                raise SpanError(f"{path}: cut, or not a safetensors file")
            header = json.loads(file.read(length), object_pairs_hook=_distinct)
    except OSError as error:
        raise SpanError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, SpanError) else SpanError(f"{path}: its header cannot be read") from None
    if not isinstance(header, dict):
        raise SpanError(f"{path}: its header is not a table")
    header.pop("__metadata__", None)
    found = [(key, *_entry(path, key, entry)) for key, entry in header.items()]
    found.sort(key=lambda entry: (entry[3], entry[4]))
    end = 0
    for key, _, _, begin, stop in found:
        if begin != end:
            raise SpanError(f"{path}: {key} begins at byte {begin} of the data and not at {end}")
        end = stop
    if end != size - 8 - length:
        raise SpanError(f"{path}: {size} bytes, and its header says {8 + length + end}")
    return [(key, dtype, shape, 8 + length + begin) for key, dtype, shape, begin, _ in found]


def _entry(path: Path, key: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """Dtype, shape, first byte and last byte of a tensor."""
    try:
        dtype, shape, (begin, stop) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        sound = all(type(each) is int and each >= 0 for each in (*shape, begin, stop))
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound or stop - begin != math.prod(shape) * dtype.itemsize:
        raise SpanError(f"{path}: what its header says about {key} cannot be")
    return dtype, shape, begin, stop


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a name twice")
    return dict(pairs)


def _parsed(path: Path, key: str) -> tuple[str, str, int | None, Columns | None]:
    """Parameter, kind, and the first element and the columns of what is not a whole tensor."""
    match = KEY.fullmatch(key)
    if match is None:
        raise SpanError(f"{path}: {key!r} does not name a tensor of a parameter")
    start = None if match["start"] is None else int(match["start"])
    if match["of"] is None or start is None:
        return match["name"], match["kind"], start, None
    columns = Columns(int(match["left"]), int(match["right"]), int(match["of"]))
    if not columns.start < columns.stop <= columns.of:
        raise SpanError(f"{path}: {key!r} does not name columns of a matrix")
    return match["name"], match["kind"], start * columns.width, columns  # a block begins with a whole row of its own


def _refuse_rounding(span: Stored, what: str, into: Tensor, *, rounding: bool) -> None:
    if not rounding and torch.promote_types(span.dtype, into.dtype) is not into.dtype:
        raise SpanError(f"{span.path}: {what} is {span.dtype} and cannot be read into {into.dtype}")


def _read(span: Stored, skipped: int, into: Tensor) -> None:
    """Read elements of ``span`` into a flat tensor: directly on the host, in pieces for another dtype or device."""
    try:
        with span.path.open("rb", buffering=0) as file:
            file.seek(span.offset + skipped * span.dtype.itemsize)
            if into.device.type == "cpu" and into.dtype is span.dtype:
                _fill(file, span.path, _bytes(into))
                torch.autograd.graph.increment_version(into)  # who has a copy of it sees that it has changed
                return
            for piece in into.split(PIECE_BYTES // span.dtype.itemsize):
                host = torch.empty(piece.shape, dtype=span.dtype)
                _fill(file, span.path, _bytes(host))
                piece.copy_(host)
    except OSError as error:
        raise SpanError(f"{span.path}: {error.strerror}") from None


def _read_block(span: Stored, source: Rectangle, flat: Tensor, target: Rectangle) -> None:
    """Read a rectangle of ``span`` into its place in ``flat``, as many rows at a time as fit into a piece."""
    width, stride = source.right - source.left, source.stride
    rows = max(1, PIECE_BYTES // (stride * span.dtype.itemsize))
    for top in range(0, source.bottom - source.top, rows):
        count = min(rows, source.bottom - source.top - top)
        host = torch.empty((count - 1) * stride + width, dtype=span.dtype)
        _read(span, source.offset + top * stride, host)
        place = flat.as_strided(
            (count, width), (target.stride, 1), flat.storage_offset() + target.offset + top * target.stride
        )
        place.copy_(host.as_strided((count, width), (stride, 1)))


def _fill(file: FileIO, path: Path, memory: memoryview) -> None:
    while len(memory):
        count = file.readinto(memory)
        if not count:
            raise SpanError(f"{path}: it ends early")
        memory = memory[count:]
