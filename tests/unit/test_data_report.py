"""Rows that are too long, empty or masked: what becomes of them, that they are counted, and the report that says so."""

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deepstow.launch.train import main
from deepstow.trainer.data import prepare as preparing
from deepstow.trainer.data import report, sources
from deepstow.trainer.data.packing import MASKED
from tests.helpers import data as helper
from tests.helpers.data import write

LIMIT = 16
M = MASKED
IDS: list[dict[str, Any]] = [
    {"input_ids": [5, 6, 7], "labels": [M, M, 7]},
    {"input_ids": [*range(20, 60)], "labels": [M] * 10 + [*range(30, 37)] + [M] * 15 + [*range(52, 60)]},  # 40 long
    {"input_ids": [*range(60, 80)], "labels": [M] * 16 + [*range(76, 80)]},  # 20 long, trained on beyond 16 only
    {"input_ids": [5, 6, 7], "labels": [5, 6, 7]},  # the first once more
    {"input_ids": [], "labels": []},
    {"input_ids": [8, 9], "labels": [M, M]},
    {"input_ids": [9], "labels": [9]},
]
NONE = "2 without a token that is trained on"
EXPECTED = {
    "truncate": ([3, 16, 3], f"1 empty, 1 whose first trained token is beyond data.max_length, {NONE}"),
    "drop": ([3, 3], f"1 empty, 2 longer than data.max_length, {NONE}"),
    "split": ([3, 16, 8, 4, 3], f"1 empty, {NONE}"),  # not the pieces with nothing to train on
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def prepare(tokenizer: Any, said: list[str] | None = None, **options: Any) -> Any:
    return helper.prepare(tokenizer, said=said, **{"max_length": LIMIT} | options)


def test_many_dropped_rows_are_a_warning_at_each_start(tokenizer: Any) -> None:
    """A line of its own, with the cure for most of them, also where the rows are prepared already."""
    good, masked = IDS[0], IDS[5]
    write([*[good] * 8, *[masked] * 2])
    said: list[str] = []
    prepare(tokenizer, said)
    assert not any("WARNING" in line for line in said), "a fifth is not more than a fifth"
    write([*[good] * 7, *[masked] * 2])
    line = "data: d.jsonl: 2 of 9 rows are dropped: 2 without a token that is trained on; deepstow train --show-sample"
    for _ in range(2):
        said.clear()
        prepare(tokenizer, said)
        assert [each for each in said if each.startswith(f"WARNING: {line}")] == said[-1:]


@pytest.mark.parametrize("how", EXPECTED)
def test_long_rows(how: str, tokenizer: Any) -> None:
    write(IDS)
    said: list[str] = []
    prepared = prepare(tokenizer, said, excess_length_strategy=how)
    lengths, dropped = EXPECTED[how]
    assert [len(row["input_ids"]) for row in prepared.train] == lengths
    assert all(any(label != MASKED for label in row["labels"]) for row in prepared.train)
    long = "" if how == "drop" else f"; 2 longer than {LIMIT} tokens ({how})"
    rows = 4 if how == "split" else len(lengths)
    assert said[0] == f"data: d.jsonl: {rows} rows tokenised; dropped: {dropped}{long}; 1 duplicates"
    assert sum(prepared.report["sources"][0]["lengths"].values()) == len(IDS)
    streamed = prepare(tokenizer, excess_length_strategy=how, streaming=True)
    assert list(streamed.train) == list(prepared.train) and streamed.report is None


def test_a_piece_of_an_answer_is_the_answer(tokenizer: Any) -> None:
    """Tokens and labels of the pieces, one behind the other, are those of the row, but for what is dropped."""
    write([IDS[1]])
    pieces = list(prepare(tokenizer, excess_length_strategy="split").train)
    assert [row["input_ids"][0] for row in pieces] == [20, 52] and pieces[0]["labels"] == [M] * 10 + [*range(30, 36)]
    assert pieces[1]["labels"] == [M, *range(53, 60)]  # nothing in the piece comes before its first token


def test_text_can_be_truncated_too(tokenizer: Any) -> None:
    write([{"text": "abc " * 100}])
    (row,) = prepare(tokenizer, excess_length_strategy="truncate").train
    assert len(row["input_ids"]) == LIMIT and row["labels"][1:] == row["input_ids"][1:]


def test_evaluation_documents_that_are_trained_on_are_said(tokenizer: Any) -> None:
    write(IDS[:2])
    write([IDS[3], {"input_ids": [4, 4]}], "held.jsonl")
    lines = prepare(tokenizer, eval_path="held.jsonl").report["lines"]
    assert lines[-1] == "data: 1 of the evaluation documents are trained on, too"


def test_what_was_prepared_before_there_were_reports(tokenizer: Any) -> None:
    """The fingerprint is that of before as well, so its checkpoints are resumed."""
    write(IDS[:1])
    first = prepare(tokenizer)
    assert first.fingerprint == prepare(tokenizer, excess_length_strategy=None).fingerprint
    assert first.fingerprint != prepare(tokenizer, excess_length_strategy="truncate").fingerprint


@pytest.mark.parametrize("terminal", [False, True])
def test_progress(terminal: bool, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar that knows how many rows there are, on a terminal."""
    error = io.StringIO()
    monkeypatch.setattr(error, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stderr", error)
    write(IDS)
    prepare(tokenizer, limit=6)
    assert ("data: d.jsonl:" in error.getvalue() and "/6 [" in error.getvalue()) is terminal


def test_rows_are_counted_ahead() -> None:
    write(IDS)
    pq.write_table(pa.table({"text": ["a", "b"]}), "d.parquet")
    Path("d.csv").write_text("text\na\n")
    counts = [sources.open_source(f"d.{kind}", None, "train", False).count() for kind in ("jsonl", "parquet", "csv")]
    assert counts == [len(IDS), 2, None]


def test_rows_are_kept_for_all_runs_of_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where its cache cannot be written, as below a file."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    assert preparing.cache(Path("run")) == tmp_path / "cache" / "deepstow"
    Path("file").touch()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", Path("file"))
    assert preparing.cache(Path("run")) == Path("run")


def test_histogram() -> None:
    lengths = {"1": 1, "3": 4, "4": 2, "1000": 80}
    bins = report.binned(lengths, 1)
    assert bins[1, 2] == 1 and bins[2, 4] == 4 and bins[4, 8] == 2 and bins[8, 16] == 0 and bins[512, 1024] == 80
    assert sum(report.binned(lengths, 4).values()) == 87
    shown = report.text({"max_length": 5, "sources": [{"line": "d", "lengths": lengths}], "lines": ["data: train"]})
    marked = [line for line in shown.splitlines() if "max_length" in line]
    assert marked == ["      4 to        7             2  #  <- data.max_length 5"]
    assert max(line.count("#") for line in shown.splitlines()) == 40 and shown.endswith("\n\ndata: train")


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    Path("c.yaml").write_text(
        "model: {config: {model_type: llama, hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1,\n"
        "  num_attention_heads: 2}, tokenizer: {train: bpe, vocab_size: 400}}\n"
        "data: {path: pydoc, name: pairs, max_length: 512}\ntraining: {output_dir: r}\n"
    )
    assert main(["--config", "c.yaml", "--data-report", "--plot", "lengths.png"]) == 0
    assert "<- data.max_length 512" in capsys.readouterr().out

    assert Path("lengths.png").read_bytes().startswith(b"\x89PNG")
    assert main(["--config", "c.yaml", "--data-report", "--plot", "lengths.pgn"]) == 2
    assert capsys.readouterr().err.startswith("--plot lengths.pgn: the name of a picture ends in .png")
    assert main(["--config", "c.yaml", "--data-report", "data.streaming=true", "training.max_steps=1"]) == 2
    assert "no report" in capsys.readouterr().err


def test_the_picture_has_the_rows_and_the_line_of_max_length() -> None:
    lengths = {"64": 1, "80": 2, "96": 3, "120": 4}
    sources = [{"line": "one", "lengths": lengths}, {"line": "two", "lengths": {"3": 7}}]
    first, second = report.draw({"max_length": 96, "sources": sources}).axes
    rows = first.patches[0].get_data()
    assert [*rows.values] == [1, 2, 3, 4] and rows.edges[0] == 64 and rows.edges[-1] == 128
    assert first.lines[0].get_xdata()[0] == 96 and first.get_xscale() == "log"
    assert (first.get_xlabel(), first.get_ylabel()) == ("length of a row (tokens)", "rows")
    assert [*second.patches[0].get_data().values] == [7]
