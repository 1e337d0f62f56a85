"""Several data sets: each by its own format, split and limit, mixed by weights or token shares, the same every time."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from deepstow.trainer.config.load import load
from deepstow.trainer.config.sections import DataSection
from deepstow.trainer.data import prepare as preparing
from deepstow.trainer.errors import DataError
from tests.helpers import data as helper
from tests.helpers.data import VOCAB


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids say where they come from: a has 40 rows of 5 tokens 10, 11, ...; b has 100 of 10 tokens 100, 101, ..."""
    monkeypatch.chdir(tmp_path)
    for name, count, first, length in (("a", 40, 10, 5), ("b", 100, 100, 10)):
        rows = ({"input_ids": [first + number] * length} for number in range(count))
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepare(tokenizer: Any, *datasets: dict[str, Any], **options: Any) -> Any:
    return helper.prepare(tokenizer, datasets=list(datasets), **{"max_length": 16} | options)


def times(rows: Any) -> Counter[int]:
    """How often each document is there."""
    return Counter(row["input_ids"][0] for row in rows)


def test_each_has_its_own_format_split_and_limit(tokenizer: Any) -> None:
    Path("c").mkdir()
    Path("c/test.jsonl").write_text(json.dumps({"q": "why?", "a": "because"}) + "\n")
    Path("c/train.jsonl").write_text(json.dumps({"q": "no", "a": "no"}) + "\n")
    pairs = {"path": "c", "split": "test", "columns": {"prompt": "q", "completion": "a"}}
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    Path("d.jsonl").write_text(json.dumps(chat) + "\n")
    chats = {"path": "d.jsonl", "assistant_only_loss": True}
    prepared = prepare(tokenizer, {"path": "a.jsonl", "limit": 2}, pairs, chats, max_length=64)
    assert prepared.format == "input_ids + prompt/completion + messages"
    first, second, third, fourth = prepared.train
    assert (first["input_ids"], second["input_ids"]) == ([10] * 5, [11] * 5)
    answers = [tokenizer.decode([label for label in row["labels"] if label >= 0]) for row in (third, fourth)]
    assert tokenizer.decode(third["input_ids"]) == "why?because<|eos|>"
    assert answers == ["because<|eos|>", "ho<|eos|>"]


def test_weights(tokenizer: Any) -> None:
    said: list[str] = []
    a, b = {"path": "a.jsonl", "weight": 2.5}, {"path": "b.jsonl", "weight": 0.25}
    prepared = prepare(tokenizer, a, b, said=said)
    found = times(prepared.train)
    assert Counter(found[token] for token in range(10, 50)) == {2: 20, 3: 20}
    assert Counter(found[token] for token in range(100, 200)) == {0: 75, 1: 25}
    assert said[2] == "data: mix of 750 tokens: a.jsonl 66.7% (2.5 times), b.jsonl 33.3% (0.25 times)"
    assert said[2] in prepared.report["lines"]
    other = times(prepare(tokenizer, a, b, seed=1).train)
    assert other != found and other.total() == found.total()


@pytest.mark.parametrize(("shares", "rows"), [((0.5, 0.5), (40, 20)), ((0.1, 0.9), (22, 100))])
def test_token_shares_take_no_row_twice(shares: tuple[float, float], rows: tuple[int, int], tokenizer: Any) -> None:
    """The largest such mix: one of the two is taken whole."""
    sets = [{"path": f"{name}.jsonl", "token_share": share} for name, share in zip("ab", shares, strict=True)]
    found = times(prepare(tokenizer, *sets).train)
    assert set(found.values()) == {1}
    assert (sum(token < 100 for token in found), sum(token >= 100 for token in found)) == rows


def test_the_part_of_evaluation_is_of_each_and_of_no_weight(tokenizer: Any) -> None:
    sets = [{"path": "a.jsonl", "weight": 2.0}, {"path": "b.jsonl"}]
    prepared = prepare(tokenizer, *sets, eval_fraction=0.1)
    train, held = times(prepared.train), times(prepared.eval)
    assert not train.keys() & held.keys() and set(held.values()) == {1}
    assert (sum(token < 100 for token in held), sum(token >= 100 for token in held)) == (4, 10)
    assert train.total() == 2 * 36 + 90


def test_the_same_rows_again_and_others_otherwise(tokenizer: Any) -> None:
    """By the fingerprint, which a checkpoint has: contents and weights count, places do not."""
    sets = ({"path": "a.jsonl", "weight": 1.5}, {"path": "b.jsonl"})
    first = prepare(tokenizer, *sets, packing=True)
    rows = list(first.train)
    shutil.rmtree("prepared")
    assert list(prepare(tokenizer, *sets, packing=True).train) == rows
    Path("elsewhere").mkdir()
    shutil.copy("a.jsonl", "elsewhere/a.jsonl")
    assert (
        prepare(tokenizer, {"path": "elsewhere/a.jsonl", "weight": 1.5}, sets[1], packing=True).fingerprint
        == first.fingerprint
    )
    others = [sets[::-1], ({"path": "a.jsonl"}, sets[1]), (sets[0], {"path": "b.jsonl", "limit": 99}), sets[:1]]
    found = {prepare(tokenizer, *each, packing=True).fingerprint for each in others}
    assert len(found | {first.fingerprint}) == 5


def test_one_in_a_list_is_that_one(tokenizer: Any) -> None:
    alone = preparing.prepare(DataSection(path="a.jsonl", max_length=16), tokenizer, VOCAB, 0, Path("prepared"), print)
    assert prepare(tokenizer, {"path": "a.jsonl"}).fingerprint == alone.fingerprint
    assert times(prepare(tokenizer, {"path": "a.jsonl", "weight": 2.0}).train) == Counter(
        dict.fromkeys(range(10, 50), 2)
    )


def test_refusals(tokenizer: Any) -> None:
    for datasets, line in (
        (({"path": "a.jsonl"}, {"path": "c.jsonl"}), "data.datasets.1.path: c.jsonl does not exist; did you mean "),
        (({"path": "a.jsonl", "weight": 0.01}, {"path": "b.jsonl"}), "a.jsonl: 0.01 times it is no row; give it more"),
    ):
        with pytest.raises(DataError) as caught:
            prepare(tokenizer, *datasets)
        assert caught.value.lines[0].startswith(line)


def test_a_config_with_several_is_written_and_read() -> None:
    Path("c.yaml").write_text(
        "model: {name_or_path: m}\ntraining: {output_dir: r}\n"
        "data:\n  datasets:\n  - {path: a.jsonl, weight: 2}\n  - {path: b.jsonl, columns: {text: body}}\n"
    )
    config = load("c.yaml")
    Path("again.yaml").write_text(config.dump())
    assert load("again.yaml") == config and "null" not in config.dump()
    assert [part.path for part in config.data.parts()] == ["a.jsonl", "b.jsonl"]
