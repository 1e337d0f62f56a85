"""Rows of some columns in files: written under one division of a matrix, read under another."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from strategies.state import spans
from strategies.state.blocks import Columns, all_columns, rectangles
from strategies.state.spans import Span, SpanError, Store
from strategies.state.torch_state import Held, Piece, TorchState

ROWS, COLUMNS = 7, 12
WHOLE = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
NAME = "o_proj.weight"


def cuts(size: int, parts: int, draw: random.Random) -> list[tuple[int, int]]:
    """``size`` elements in ``parts`` ranges that are not empty."""
    ends = [0, *sorted(draw.sample(range(1, size), parts - 1)), size]
    return list(pairwise(ends))


def places(tensor_ranks: int, data_ranks: int, draw: random.Random) -> list[Held]:
    """What each rank has: a share of some columns, or of all rows."""
    found = []
    for left, right in cuts(COLUMNS, tensor_ranks, draw):
        columns = Columns(left, right, COLUMNS) if tensor_ranks > 1 else None
        part = WHOLE[:, left:right].contiguous().view(-1)
        for start, stop in cuts(part.numel(), data_ranks, draw):
            piece = Piece(NAME, (ROWS, COLUMNS), start, 0, stop - start, columns)
            found.append(Held(part[start:stop].clone(), (piece,), "float32"))
    return found


def written(folder: Path, some: list[Held]) -> Store:
    """A file for each rank."""
    for number, place in enumerate(some):
        holder = TorchState(torch.optim.SGD([WHOLE]), [], [], {}, [place])
        spans.write(folder / str(number), list(holder.weight_spans({NAME})))
    return Store.of(sorted(folder.iterdir()))


@pytest.mark.parametrize("seed", range(12))
def test_any_division_is_read_under_any_other(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "PIECE_BYTES", 100)  # two rows at a time
    draw = random.Random(seed)
    store = written(tmp_path, places(draw.randint(2, 3), draw.randint(1, 3), draw))
    assert list(store.faults(NAME, "weight", (ROWS, COLUMNS))) == []
    for want in [*places(3, 2, draw), *places(1, 3, draw)]:
        found = torch.full_like(want.tensor, -1)
        (piece,) = want.pieces
        store.read(NAME, "weight", piece.start, found, columns=piece.columns)
        assert torch.equal(found, want.tensor)


def test_columns_of_a_whole_tensor(tmp_path: Path) -> None:
    """As a rank reads them from the model's own file."""
    spans.write(tmp_path / "file", [Span(NAME, "weight", (ROWS, COLUMNS), 0, WHOLE)])
    into = torch.empty(ROWS, 4)
    Store.of([tmp_path / "file"]).read(NAME, "weight", 0, into, columns=Columns(8, 12, COLUMNS))
    assert torch.equal(into, WHOLE[:, 8:])


def test_what_is_missing_or_twice_there_is_found(tmp_path: Path) -> None:
    left, right = (Columns(0, 5, COLUMNS), WHOLE[:, :5]), (Columns(5, 12, COLUMNS), WHOLE[:, 5:])
    one = Span(NAME, "weight", (ROWS, COLUMNS), 0, left[1].contiguous(), left[0])
    rows = Span(NAME, "weight", (ROWS, COLUMNS), 7, right[1][1:].contiguous(), right[0])
    again = Span(NAME, "weight", (ROWS, COLUMNS), 12, WHOLE[1:2].clone(), all_columns(COLUMNS))
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


def test_rectangles_of_a_range() -> None:
    """The rest of a row, whole rows, the beginning of a row."""
    found = [tuple(each) for each in rectangles(Columns(10, 14, 20), 3, 10)]
    assert found == [(0, 1, 13, 14, 0, 4), (1, 3, 10, 14, 1, 4), (3, 4, 10, 11, 9, 4)]
