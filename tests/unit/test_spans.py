"""Spans of named parameters in files: any range is read exactly, and what is not there once is said in one line."""

import json
import random
import re
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepstow.strategies.state import saved_state, spans
from deepstow.strategies.state.blocks import Columns
from deepstow.strategies.state.saved_state import Described, Saved, Weights
from deepstow.strategies.state.spans import WEIGHT, Span, SpanError, Store
from deepstow.strategies.state.torch_state import Held, Piece, TorchState

SHAPE = (6, 4)
VALUES = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


def cut(*ranges: tuple[int, int], values: Tensor = VALUES, name: str = "a.w", kind: str = "exp_avg") -> list[Span]:
    return [Span(name, kind, tuple(values.shape), low, values.reshape(-1)[low:high]) for low, high in ranges]


def store(folder: Path, *files: list[Span]) -> Store:
    paths = [folder / f"{number}.safetensors" for number in range(len(files))]
    for path, held in zip(paths, files, strict=True):
        spans.write(path, held)
    return Store.of(paths)


def faults(folder: Path, *files: list[Span], shape: tuple[int, ...] = SHAPE) -> list[str]:
    return [line.replace(f"{folder}/", "") for line in store(folder, *files).faults("a.w", "exp_avg", shape)]


def test_spans_of_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    held = cut((0, 4), (4, 8), (8, 9), (9, 19), (19, 20), (20, 21))  # elements of 4 bytes
    monkeypatch.setattr(spans, "FILE_BYTES", 32)
    assert [[span.tensor.numel() for span in part] for part in spans.parts(held)] == [[4, 4], [1], [10], [1, 1]]
    assert held[2].key == "a.w.exp_avg[8:9]"


def test_read_into_other_strides_and_types(tmp_path: Path) -> None:
    found = store(tmp_path, cut((0, 24)), cut((0, 24), values=VALUES.bfloat16(), kind="low"))
    into, turned = torch.empty(SHAPE), torch.empty(SHAPE[::-1]).t()
    before = into._version
    found.read("a.w", "exp_avg", 0, into)
    assert torch.equal(into, VALUES) and into._version > before, "who has a copy of it sees the change"
    found.read("a.w", "exp_avg", 0, turned)
    assert not turned.is_contiguous() and torch.equal(turned, VALUES)
    wider = torch.empty(SHAPE)
    found.read("a.w", "low", 0, wider)
    assert torch.equal(wider, VALUES.bfloat16().float())
    lower = torch.empty(SHAPE, dtype=torch.bfloat16)
    with pytest.raises(SpanError, match=r"a.w.exp_avg is torch.float32 and cannot be read into torch.bfloat16"):
        found.read("a.w", "exp_avg", 0, lower)
    found.read("a.w", "exp_avg", 0, lower, rounding=True)
    assert torch.equal(lower, VALUES.bfloat16())


def test_what_is_not_there_once(tmp_path: Path) -> None:
    cases: dict[str, list[tuple[int, int]]] = {
        "a.w.exp_avg: 1 of 24 elements are in no file": [(0, 10), (11, 24)],
        "a.w.exp_avg: elements 11 to 12 are in 0.safetensors and in 1.safetensors": [(0, 12), (11, 24)],
        "a.w.exp_avg is in no file": [],
    }
    for line, ranges in cases.items():
        assert faults(tmp_path, *(cut(each) for each in ranges)) == [line]
    assert faults(tmp_path, cut((0, 24)), shape=(4, 6)) == ["0.safetensors: a.w.exp_avg has shape [6, 4], not [4, 6]"]
    line = "0.safetensors: a.w.exp_avg goes on to element 20, and it has 18"
    assert faults(tmp_path, cut((0, 18), (18, 20)), shape=(3, 6)) == [line]


def header(path: Path, content: Any, data: bytes = b"\0" * 16) -> Path:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(**changed: Any) -> dict[str, Any]:
    return {"a.w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changed}


MALFORMED: list[Any] = [
    b"{",
    b"[" * 100_000,
    entry(dtype="F99"),
    entry(dtype="I8", shape=[16]),  # a type of others
    entry(data_offsets=[0, 12]),
    entry(shape=[2], data_offsets=[8, 16]),  # a hole
]


def test_malformed_and_cut_files(tmp_path: Path) -> None:
    for content in MALFORMED:
        path = header(tmp_path / "f.safetensors", content)
        with pytest.raises(SpanError, match=re.escape(str(path))) as caught:
            Store.of([path], kind=WEIGHT)
        assert len(str(caught.value).splitlines()) == 1
    path = header(tmp_path / "f.safetensors", entry())
    whole = path.read_bytes()
    for size in (0, 7, 20, len(whole) - 17, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(SpanError):
            Store.of([path], kind=WEIGHT)
    path.unlink()
    with pytest.raises(SpanError, match="No such file"):
        Store.of([path], kind=WEIGHT)


# --- rows of some columns: written under one division of a matrix, read under another -------------------------------

ROWS, COLUMNS = 7, 12
WHOLE = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
NAME = "o_proj.weight"


def ranges_of(size: int, parts: int, draw: random.Random) -> list[tuple[int, int]]:
    """``size`` elements in ``parts`` ranges that are not empty."""
    ends = [0, *sorted(draw.sample(range(1, size), parts - 1)), size]
    return list(pairwise(ends))


def places(tensor_ranks: int, data_ranks: int, draw: random.Random) -> list[Held]:
    """What each rank has: a share of some columns, or of all rows."""
    found = []
    for left, right in ranges_of(COLUMNS, tensor_ranks, draw):
        columns = Columns(left, right, COLUMNS) if tensor_ranks > 1 else None
        part = WHOLE[:, left:right].contiguous().view(-1)
        for start, stop in ranges_of(part.numel(), data_ranks, draw):
            piece = Piece(NAME, (ROWS, COLUMNS), start, 0, stop - start, columns)
            found.append(Held(part[start:stop].clone(), (piece,), "float32"))
    return found


def stored(folder: Path, some: list[Held]) -> Store:
    """A file for each rank."""
    for number, place in enumerate(some):
        holder = TorchState(torch.optim.SGD([WHOLE]), [], [], {}, [place])
        spans.write(folder / str(number), list(holder.weight_spans({NAME})))
    return Store.of(sorted(folder.iterdir()))


@pytest.mark.parametrize("seed", range(6))
def test_any_division_is_read_under_any_other(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "PIECE_BYTES", 100)  # two rows at a time
    draw = random.Random(seed)
    found = stored(tmp_path, places(draw.randint(1, 3), draw.randint(1, 3), draw))
    assert list(found.faults(NAME, "weight", (ROWS, COLUMNS))) == []
    for want in [*places(3, 2, draw), *places(1, 3, draw)]:
        into = torch.full_like(want.tensor, -1)
        (piece,) = want.pieces
        found.read(NAME, "weight", piece.start, into, columns=piece.columns)
        assert torch.equal(into, want.tensor)


def test_what_is_missing_or_twice_there_is_found(tmp_path: Path) -> None:
    left, right = (Columns(0, 5, COLUMNS), WHOLE[:, :5]), (Columns(5, 12, COLUMNS), WHOLE[:, 5:])
    one = Span(NAME, "weight", (ROWS, COLUMNS), 0, left[1].contiguous(), left[0])
    rows = Span(NAME, "weight", (ROWS, COLUMNS), 7, right[1][1:].contiguous(), right[0])
    again = Span(NAME, "weight", (ROWS, COLUMNS), 12, WHOLE[1:2].clone(), Columns(0, COLUMNS, COLUMNS))
    assert [span.key for span in (one, rows)] == [f"{NAME}.weight[0:7,0:5/12]", f"{NAME}.weight[1:7,5:12/12]"]
    for number, span in enumerate((one, rows, again)):
        spans.write(tmp_path / str(number), [span])
    some = Store.of([tmp_path / "0", tmp_path / "1"])
    (line,) = some.faults(NAME, "weight", (ROWS, COLUMNS))
    assert line == f"{NAME}.weight: 7 of 84 elements are in no file"
    with pytest.raises(SpanError, match="7 elements are in no file"):
        some.read(NAME, "weight", 0, torch.empty(ROWS, COLUMNS))
    every = list(Store.of([tmp_path / "0", tmp_path / "1", tmp_path / "2"]).faults(NAME, "weight", (ROWS, COLUMNS)))
    assert any("elements 12 to 17 are in " in line for line in every)
    (line,) = some.faults(NAME, "weight", (COLUMNS, ROWS))
    assert line.endswith("was saved as a matrix of other columns than 7")


# --- the index -------------------------------------------------------------------------------------------------------


class Owner:
    """A rank that holds what it is given; ``parameters`` as it describes them."""

    rule = "AdamW"

    def __init__(self, held: list[Span], step: float = 3.0) -> None:
        self.held, self.step = held, step

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": ["a.w"], "lr": 0.1, "betas": (0.9, 0.95)}]

    def entries(self) -> Any:
        for span in self.held:
            yield span.name, Described(span.shape, "float32", {"step": self.step}, {span.kind: span.shape}), [span]


def written(folder: Path, *owners: Owner) -> Saved:
    for rank, owner in enumerate(owners):
        holder: Any = owner
        saved_state.write_part(folder, holder, (), rank=rank, ranks=len(owners), hashed=True)
    first: Any = owners[0]
    saved_state.write_index(folder, first, len(owners), {"steps": 3})
    return saved_state.opened(folder)


def test_rows_of_three_ranks(tmp_path: Path) -> None:
    """As an engine writes whose ranks own rows: each its own, and whole parameters of which others have nothing."""
    whole = Span("b", "exp_avg", (2,), 0, torch.tensor([1.0, 2.0]))
    saved = written(tmp_path, Owner(cut((0, 8))), Owner([*cut((8, 16)), whole]), Owner(cut((16, 24))))
    assert saved.parameters["a.w"] == Described(SHAPE, "float32", {"step": 3.0}, {"exp_avg": SHAPE})
    into = torch.empty(SHAPE)
    saved.store.read("a.w", "exp_avg", 0, into)
    assert torch.equal(into, VALUES)
    assert saved.param_groups == [{"params": ["a.w"], "lr": 0.1, "betas": [0.9, 0.95]}]
    assert saved.extra == {"steps": 3}


def test_a_save_that_lacks_something_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(SpanError, match="8 of 24 elements are in no file"):
        written(tmp_path, Owner(cut((0, 8))), Owner(cut((16, 24))))
    with pytest.raises(SpanError, match=r"a\.w: ranks disagree about it"):
        written(tmp_path, Owner(cut((0, 8))), Owner(cut((8, 24)), step=2.0))
    with pytest.raises(SpanError, match=r"a\.w: no rank has written its state"):
        written(tmp_path, Owner([]))


def test_the_exact_weight_is_the_master(tmp_path: Path) -> None:
    low = VALUES.bfloat16()
    files = store(
        tmp_path, cut((0, 24), values=VALUES, kind="master"), cut((0, 24), values=low, name="tied", kind=WEIGHT)
    )
    weights = Weights(files, None, {"other": ["tied", "other"]})
    into, rounded = torch.empty(SHAPE), torch.empty(SHAPE, dtype=torch.bfloat16)
    weights.read("a.w", 0, into)
    weights.read("a.w", 0, rounded)
    assert torch.equal(into, VALUES) and torch.equal(rounded, low)
    weights.read("other", 0, rounded)  # under its other name
    assert torch.equal(rounded, low)
    assert list(weights.faults("absent", SHAPE)) == ["absent: its weight is in no file"]
