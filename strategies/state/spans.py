"""Spans of named parameters in safetensors files: written by whoever holds them, read by whoever needs them.

A rank holds whole parameters, rows or columns of them, or what happens to lie in its share of a flat buffer. A file
that says what it holds by name and range (docs/checkpoint-format.md) can be read under any other division.

``write`` streams from where tensors are, in pieces, and makes no second copy of them. ``Store`` reads any range of any
tensor from any number of files, straight into the memory that it is for; nothing is unpickled.

Invariant. A range is read only if its elements are each in exactly one span.

Refused, each in one line: a file that is cut or malformed, a range that is missing or twice there, another shape.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deepstow.strategies.state.blocks import Columns, Rectangle, rectangles

FILE_BYTES = 1 << 30  # a writer begins another file beyond that
PIECE_BYTES = 16 << 20  # hashed, brought down from the device, or read for it at a time
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
    """Elements ``start`` to ``start + tensor.numel()`` of the tensor ``kind`` of parameter ``name``."""

    name: str
    kind: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    tensor: Tensor
    columns: Columns | None = None  # elements are counted in these alone; there are whole rows, or a part of one row
    at_hand: Callable[[], AbstractContextManager[None]] = nullcontext  # inside of it the tensor's memory has its values

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.tensor.numel() == math.prod(self.shape)

    @property
    def key(self) -> str:
        end = "" if self.is_whole else f"[{self.start}:{self.start + self.tensor.numel()}]"
        if self.columns is not None:
            (block,) = rectangles(self.columns, self.start, self.tensor.numel())
            end = f"[{block.top}:{block.bottom},{block.left}:{block.right}/{self.columns.of}]"
        return f"{self.name}.{self.kind}{end}"


# --- writing ---------------------------------------------------------------------------------------------------------


def parts(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Group spans by file, up to ``FILE_BYTES`` or one span."""
    group: list[Span] = []
    num_bytes = 0
    for span in spans:
        if group and num_bytes + span.tensor.nbytes > FILE_BYTES:
            yield group
            group, num_bytes = [], 0
        group.append(span)
        num_bytes += span.tensor.nbytes
    if group:
        yield group


def write(
    path: Path, spans: Sequence[Span], *, hashed: bool = True, about: Mapping[str, str] | None = None
) -> tuple[int, str | None]:
    """Write a safetensors file (length of the header, header, bytes) and return its size and, if wished, SHA-256.
    ``about``: of the header's metadata.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(about or {})}}
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
        for piece in itertools.chain([start], (piece for span in spans for piece in _pieces(span))):
            if hashed:
                digest.update(piece)
            while len(piece):
                piece = piece[file.write(piece) :]
        return file.tell(), digest.hexdigest() if hashed else None


def _pieces(span: Span) -> Iterator[memoryview]:
    """The bytes of a span in pieces of ``PIECE_BYTES``: views on the host, copies from the device."""
    with span.at_hand():
        for piece in span.tensor.detach().reshape(-1).split(PIECE_BYTES // span.tensor.element_size()):
            yield _bytes(piece.cpu())


def _bytes(tensor: Tensor) -> memoryview:
    data: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stored:
    """A span in a file: elements ``start`` to ``stop``, from byte ``offset`` on."""

    path: Path
    start: int
    stop: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...] | None  # of a whole tensor
    columns: Columns | None = None  # elements are counted in these alone

    def rectangles(self, of: int) -> Iterator[Rectangle]:
        """Which part it is of a matrix with ``of`` columns; the memory is the file's, from ``offset`` on."""
        return rectangles(self.columns or Columns(0, of, of), self.start, self.stop - self.start)


class Store:
    """What a number of files hold, by parameter and kind."""

    def __init__(self, stored: Mapping[tuple[str, str], Sequence[Stored]]) -> None:
        self._stored = stored

    @classmethod
    def of(cls, paths: Iterable[Path], *, kind: str | None = None) -> Store:
        """Read the headers of ``paths``. With ``kind``, keys are names of whole tensors of that kind. Raise SpanError
        if a file is missing or malformed.
        """
        stored: dict[tuple[str, str], list[Stored]] = {}
        for path in paths:
            for key, dtype, shape, offset in read_header(path):
                name, span_kind, start, columns = (key, kind, None, None) if kind is not None else _parsed(path, key)
                stop = (start or 0) + math.prod(shape)
                span = Stored(path, start or 0, stop, dtype, offset, shape if start is None else None, columns)
                stored.setdefault((name, span_kind), []).append(span)
        return cls(stored)

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._stored

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._stored)

    def shape(self, name: str, kind: str) -> tuple[int, ...] | None:
        return next((span.shape for span in self._stored.get((name, kind), ()) if span.shape is not None), None)

    def dtype(self, name: str, kind: str) -> torch.dtype:
        return self._stored[name, kind][0].dtype

    def faults(self, name: str, kind: str, shape: Sequence[int]) -> Iterator[str]:
        """Why a tensor of ``shape`` cannot be put together, one line each."""
        label = f"{name}.{kind}"
        spans = self._stored.get((name, kind), ())
        numel = math.prod(shape)
        of = shape[-1] if shape and any(span.columns for span in spans) else max(1, numel)
        if not spans:
            yield f"{label} is in no file"
            return
        for span in spans:
            if span.shape is not None and span.shape != tuple(shape):
                yield f"{span.path}: {label} has shape {list(span.shape)}, not {list(shape)}"
                return
            if span.columns is not None and span.columns.of != of:
                yield f"{span.path}: {label} was saved as a matrix of other columns than {of}"
                return
            if span.dtype is not spans[0].dtype:
                yield f"{span.path}: {label} is {span.dtype} here and {spans[0].dtype} in {spans[0].path}"
        blocks = [(block, span.path) for span in spans for block in span.rectangles(of)]
        blocks.sort(key=lambda it: (it[0].top, it[0].left))
        for place, (block, path) in enumerate(blocks):
            last = (block.bottom - 1) * of + block.right
            if last > numel:
                yield f"{path}: {label} goes on to element {last}, and it has {numel}"
            for other, second in blocks[place + 1 :]:
                if (other.top, other.left) >= (block.bottom - 1, block.right):
                    break
                if (common := block.common(other)) is not None:
                    twice = f"{common.top * of + common.left} to {(common.bottom - 1) * of + common.right}"
                    yield f"{label}: elements {twice} are in {path} and in {second}"
        if (missing := numel - sum(block.area for block, _ in blocks)) > 0:
            yield f"{label}: {missing} of {numel} elements are in no file"

    @torch.no_grad()
    def read(
        self, name: str, kind: str, start: int, into: Tensor, *, columns: Columns | None = None, rounding: bool = False
    ) -> None:
        """Fill ``into``, on any device, with the elements from ``start`` on; of ``columns`` alone, if given, in which
        ``start`` then counts. Raise SpanError if one is in no span, if a file ends early, or if the dtype of ``into``
        cannot hold every value, unless ``rounding`` is allowed.
        """
        buffer = into if into.is_contiguous() else torch.empty(into.shape, dtype=into.dtype, device=into.device)
        spans, missing = self._stored.get((name, kind), ()), into.numel()
        for span in spans:
            if not rounding and torch.promote_types(span.dtype, into.dtype) is not into.dtype:
                raise SpanError(f"{span.path}: {name}.{kind} is {span.dtype} and cannot be read into {into.dtype}")
        cut = columns or next((span.columns for span in spans if span.columns), None)
        # Without columns, the tensor is a matrix of one row; how long it is on disk does not matter here.
        of = cut.of if cut else max([start + missing, *(span.stop for span in spans)])
        requested = list(rectangles(columns or Columns(0, of, of), start, missing))
        for span in spans:
            for have in span.rectangles(of):
                for want in requested:
                    source, target = have.common(want), want.common(have)
                    if source is not None and target is not None:
                        _read_block(span, source, buffer.view(-1), target)
                        missing -= source.area
        if missing:
            raise SpanError(f"{name}.{kind}: {missing} elements are in no file")
        if buffer is not into:
            into.copy_(buffer)


def read_header(path: Path) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], int]]:
    """Key, dtype, shape and place in the file of every tensor. Raise SpanError if it is missing or malformed."""
    try:
        with safe_open(path, "pt"):  # checks the header, and that the tensors take the whole of the file
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except OSError as error:
        raise SpanError(f"{path}: {error.strerror or error}") from error
    except (SafetensorError, ValueError) as error:
        raise SpanError(f"{path}: cut, or not a safetensors file: {error}") from error
    header.pop("__metadata__", None)
    for key, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise SpanError(f"{path}: {key} is of the type {entry['dtype']}, which is not read here")
        yield key, DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0]


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
        raise SpanError(f"{span.path}: {error.strerror}") from error


def _read_block(span: Stored, source: Rectangle, flat: Tensor, target: Rectangle) -> None:
    """Read a rectangle of ``span`` into its place in ``flat``: at once where both are without gaps, else in pieces."""
    height = source.bottom - source.top
    width = source.right - source.left
    stride = source.stride
    if height == 1 or width == stride == target.stride:
        _read(span, source.offset, flat[target.offset : target.offset + source.area])
        return
    rows = max(1, PIECE_BYTES // (stride * span.dtype.itemsize))
    for top in range(0, height, rows):
        count = min(rows, height - top)
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
