"""Formats times sources, masks, splits, streaming, the saved Arrow and its fingerprint, tokenizers, the sample."""

import csv
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from transformers import CTRLTokenizer

from deepstow.trainer.config.sections import DataSection
from deepstow.trainer.data import prepare as preparing
from deepstow.trainer.data import sample, stream
from deepstow.trainer.data import tokenizer as tokenizers
from deepstow.trainer.data.formats import Encoder
from deepstow.trainer.data.packing import MASKED
from deepstow.trainer.data.prepare import tokenizer_content
from deepstow.trainer.data.sources import open_source
from deepstow.trainer.errors import DataError
from tests.helpers import data as helper

Rows = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prepare(tokenizer: Any, path: str, **options: Any) -> Any:
    return helper.prepare(tokenizer, path=path, **options)


def write(name: str, rows: Rows) -> str:
    file = Path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n\n" for row in rows))  # blank lines are no rows
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows, indent=1))
    elif file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        with file.open("w", newline="") as out:
            writer = csv.DictWriter(out, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return name


def decoded(tokenizer: Any, rows: Any) -> list[tuple[str, str]]:
    """Of each row: the whole text, and the text of the trained tokens."""
    pairs = ((row["input_ids"], [label for label in row["labels"] if label != MASKED]) for row in rows)
    return [(tokenizer.decode(whole), tokenizer.decode(trained)) for whole, trained in pairs]


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi é"}]
CHAT += [{"role": "assistant", "content": "Hello\nyou"}, {"role": "user", "content": "Bye"}]
CHAT += [{"role": "assistant", "content": "Ciao"}]
ROWS: dict[str, Rows] = {
    "text": [{"text": "The “first”, text"}, {"text": 'Second\ntext, "quoted"'}],
    "prompt/completion": [{"prompt": "Q: é?", "completion": " yes"}, {"prompt": "a\n", "completion": "b\nc"}],
    "instruction": [
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Rest.", "input": None, "output": "Zzz"},
    ],
    "messages": [{"messages": CHAT}, {"messages": CHAT[1:3]}],
    "input_ids": [{"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}],
}
EXPECTED = {
    "text": [("The “first”, text<|eos|>", ""), ('Second\ntext, "quoted"<|eos|>', "")],
    "prompt/completion": [("Q: é? yes<|eos|>", " yes<|eos|>"), ("a\nb\nc<|eos|>", "b\nc<|eos|>")],
    "instruction": [
        ("### Instruction\nAdd.\n\n### Input\n1 2\n\n### Response\n3<|eos|>", "3<|eos|>"),
        ("### Instruction\nRest.\n\n### Response\nZzz<|eos|>", "Zzz<|eos|>"),
    ],
}
CASES = [(name, "jsonl") for name in ROWS]
CASES += [("text", "json"), ("prompt/completion", "csv"), ("messages", "parquet"), ("instruction", "parquet")]


@pytest.mark.parametrize(("name", "suffix"), CASES)
def test_every_format_from_every_file(name: str, suffix: str, tokenizer: Any) -> None:
    said: list[str] = []
    prepared = prepare(tokenizer, write(f"d.{suffix}", ROWS[name]), said=said)
    assert prepared.format == name
    if name in EXPECTED:
        texts = decoded(tokenizer, prepared.train)
        assert [whole for whole, _ in texts] == [whole for whole, _ in EXPECTED[name]]
        assert name == "text" or texts == EXPECTED[name]  # a text is trained on but for its first token
    elif name == "input_ids":
        assert prepared.train[0] == {"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}
        assert prepared.train[1] == {"input_ids": [8, 9], "labels": [-100, 9]}
    labels = [label for row in prepared.train for label in row["labels"]]
    assert said[-1].endswith(f"; {sum(it != MASKED for it in labels)} of {len(labels)} tokens trained on")


def test_text_file_is_one_document_and_a_folder_is_many(tokenizer: Any) -> None:
    Path("books").mkdir()
    Path("books/b.txt").write_text("Two.\n\nParagraphs.")
    Path("books/a.txt").write_bytes(b"\xef\xbb\xbfOne.\r\n")
    Path("books/README.md").write_text("not data")
    Path("books/dataset_info.json").write_text("{}")  # LLaMA-Factory's list of data sets
    one, two = "One.\r\n<|eos|>", "Two.\n\nParagraphs.<|eos|>"
    for path, texts in (("books/b.txt", [two]), ("books", [one, two])):
        assert [whole for whole, _ in decoded(tokenizer, prepare(tokenizer, path).train)] == texts


def test_folder_files_of_the_split_asked_for(tokenizer: Any) -> None:
    write("d/train-00000.jsonl", [{"text": "to train"}])
    write("d/more/test.jsonl", [{"text": "to test"}])
    prepared = prepare(tokenizer, "d", eval_split="test")
    assert decoded(tokenizer, prepared.train)[0][0] == "to train<|eos|>"
    assert decoded(tokenizer, prepared.eval)[0][0] == "to test<|eos|>"


@pytest.mark.parametrize("streaming", [False, True])
def test_saved_and_hub_data_sets(streaming: bool, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = DatasetDict(train=Dataset.from_list(ROWS["text"]), validation=Dataset.from_list(ROWS["text"][:1]))
    saved.save_to_disk("saved")

    def load(path: str, name: str | None, split: str, streaming: bool, revision: str = "") -> Any:
        assert (path, name, revision) == ("owner/name", "en", "commit" if streaming else "")
        return saved[split].to_iterable_dataset() if streaming else saved[split]

    monkeypatch.setattr("deepstow.trainer.model.hub.unreachable", lambda: "")
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda self, name: SimpleNamespace(sha="commit"))
    monkeypatch.setattr("datasets.load_dataset", load)
    for options in ({"path": "saved"}, {"path": "owner/name", "name": "en"}):
        prepared = prepare(tokenizer, **options, streaming=streaming, eval_split="validation")
        assert [whole for whole, _ in decoded(tokenizer, prepared.train)] == [w for w, _ in EXPECTED["text"]]
        assert len(prepared.eval) == 1


def test_pydoc(tokenizer: Any) -> None:
    prepared = prepare(tokenizer, "pydoc", max_length=128)
    assert sum(len(row["input_ids"]) for row in prepared.train) > 100_000
    texts = decoded(tokenizer, prepare(tokenizer, "pydoc", name="pairs", max_length=4096).train)
    prompts = [whole.removesuffix(trained) for whole, trained in texts]
    assert "Explain Python's `while` statement.\n" in prompts
    assert all(prompt.startswith("Explain ") and prompt.endswith(".\n") for prompt in prompts)


def test_prompts_are_trained_on_when_asked(tokenizer: Any) -> None:
    path = write("d.jsonl", ROWS["prompt/completion"])
    masked, plain = prepare(tokenizer, path), prepare(tokenizer, path, completion_only_loss=False)
    assert [row["input_ids"] for row in masked.train] == [row["input_ids"] for row in plain.train]
    for row in plain.train:
        assert row["labels"] == [MASKED, *row["input_ids"][1:]]


# ---------------------------------------------------------------------------------------------- masks


def test_assistant_only_loss_trains_on_the_answers_and_their_ends(tokenizer: Any) -> None:
    path = write("d.jsonl", ROWS["messages"])
    (whole, trained), (_, second) = decoded(tokenizer, prepare(tokenizer, path, assistant_only_loss=True).train)
    assert trained == "Hello\nyou<|eos|>Ciao<|eos|>" and second == "Hello\nyou<|eos|>"
    assert whole.startswith("<|im_start|>system\nBe brief.<|eos|>\n<|im_start|>user\nHi é<|eos|>\n")
    every = decoded(tokenizer, prepare(tokenizer, path).train)[0]
    assert every == (whole, whole.removeprefix("<|im_start|>"))


def test_chat_template_from_a_file(tokenizer: Any) -> None:
    Path("t.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}U:{{ m.content }}{% endif %};{% endfor %}"
    )
    path = write("d.parquet", [{"messages": CHAT[1:3]}])
    options = {"chat_template_path": "t.jinja", "assistant_only_loss": True}
    assert decoded(tokenizer, prepare(tokenizer, path, **options).train) == [("U:Hi é;A:Hello\nyou;", "Hello\nyou")]
    before = prepare(tokenizer, path, **options).fingerprint
    Path("t.jinja").write_text(Path("t.jinja").read_text() + "!")
    assert prepare(tokenizer, path, **options).fingerprint != before


def test_boundary_of_prompt_and_completion_is_a_token_boundary(tokenizer: Any) -> None:
    """'the' is one token; split over prompt and completion it must not become one."""
    assert len(tokenizer("the")["input_ids"]) < 3
    path = write("d.jsonl", [{"prompt": "t", "completion": "he"}])
    assert decoded(tokenizer, prepare(tokenizer, path).train) == [("the<|eos|>", "he<|eos|>")]


def test_columns_choose_among_formats(tokenizer: Any) -> None:
    path = write("d.jsonl", [{"body": "b b", "text": "t t", "instruction": "i", "output": "o"}])
    for columns, expected in [
        ({"text": "body"}, "b b<|eos|>"),
        ({"text": "text"}, "t t<|eos|>"),
        ({"output": "output"}, "### Instruction\ni\n\n### Response\no<|eos|>"),
    ]:
        assert decoded(tokenizer, prepare(tokenizer, path, columns=columns).train)[0][0] == expected


def test_long_text_is_cut_and_long_answers_are_truncated(tokenizer: Any) -> None:
    said: list[str] = []
    text = prepare(tokenizer, write("t.jsonl", [{"text": "abc " * 100}]), max_length=16)
    assert max(len(row["input_ids"]) for row in text.train) == 16
    joined = [token for row in text.train for token in row["input_ids"]]
    assert tokenizer.decode(joined) == "abc " * 100 + "<|eos|>"
    pairs = write("p.jsonl", [{"prompt": "ab", "completion": "c d " * 50}])
    assert len(prepare(tokenizer, pairs, max_length=16, said=said).train[0]["input_ids"]) == 16
    assert said[0] == "data: p.jsonl: 1 rows tokenised; 1 longer than 16 tokens (truncate)"


def test_huge_text_is_tokenised_in_pieces_that_join_again(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"line {n} of it\n" for n in range(50))
    Path("d.txt").write_text(text)
    monkeypatch.setattr("deepstow.trainer.formats.format.SEGMENT_CHARACTERS", 100)
    prepared = prepare(tokenizer, "d.txt", max_length=4096)
    assert decoded(tokenizer, prepared.train)[0][0] == text + "<|eos|>"


# ----------------------------------------------------------------------------------- split and packing


def documents(count: int) -> Rows:
    return [{"text": f"document {n} " + "x y " * (n % 7)} for n in range(count)]


def tokens(rows: Any) -> list[int]:
    return sorted(token for row in rows for token in row["input_ids"])


def test_split_is_by_document_and_follows_from_the_seed(tokenizer: Any) -> None:
    path = write("d.jsonl", documents(40))
    one = prepare(tokenizer, path, eval_fraction=0.25, seed=1)
    assert (len(one.train), len(one.eval)) == (30, 10)
    both = {whole for whole, _ in decoded(tokenizer, [*one.train, *one.eval])}
    assert len(both) == 40
    other = prepare(tokenizer, path, eval_fraction=0.25, seed=2)
    assert decoded(tokenizer, other.eval) != decoded(tokenizer, one.eval)
    packed = prepare(tokenizer, path, eval_fraction=0.25, seed=1, packing=True, max_length=64)
    assert tokens(packed.eval) == tokens(one.eval)


def test_lone_text_keeps_its_end_for_evaluation(tokenizer: Any) -> None:
    Path("d.txt").write_text("abc " * 100)
    prepared = prepare(tokenizer, "d.txt", eval_fraction=0.1, max_length=4096)
    train, held = decoded(tokenizer, [*prepared.train, *prepared.eval])
    assert train[0] + held[0] == "abc " * 100 + "<|eos|>" and len(held[0]) < len(train[0]) / 5


@pytest.mark.parametrize("packing", [False, True])
def test_streaming_gives_the_same_rows(packing: bool, tokenizer: Any) -> None:
    options: dict[str, Any] = {"packing": packing, "max_length": 32, "eval_path": "d.jsonl"}
    path = write("d.jsonl", documents(300))
    plain, streamed = prepare(tokenizer, path, **options), prepare(tokenizer, path, streaming=True, **options)
    assert isinstance(streamed.train, IterableDataset)
    assert list(streamed.train) == list(plain.train) == list(streamed.train)
    assert streamed.eval is not None and list(streamed.eval) == list(plain.eval)


@pytest.mark.parametrize(
    ("rows", "indices", "line"),
    [
        (5, [0, 1, 2, 3, 4], None),
        (4, [0, 1, 2, 3], "data.rows = 4: the data has more; the others are in no pass"),
        (
            12,
            [*range(5), *range(5), 0, 1],
            "data.rows = 12: the data has 5, so that each pass takes its first rows again",
        ),
    ],
)
def test_a_stream_of_a_declared_length(rows: int, indices: list[int], line: str | None, tokenizer: Any) -> None:
    path, said = write("d.jsonl", documents(5)), list[str]()
    all_rows = list(prepare(tokenizer, path).train)
    streamed = prepare(tokenizer, path, streaming=True, rows=rows, said=said)
    for _ in range(2):
        said.clear()
        assert list(streamed.train) == [all_rows[index] for index in indices]
        assert said == ([line] if line else [])
    assert len(streamed.train) == rows


def test_streaming_packs_in_windows(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_WINDOW", 10)
    streamed = prepare(tokenizer, write("d.jsonl", documents(35)), packing=True, max_length=64, streaming=True)
    rows = list(streamed.train)
    plain = prepare(tokenizer, "d.jsonl", max_length=64)
    assert sum(row["position_ids"].count(0) for row in rows) == 35
    assert tokens(rows) == tokens(plain.train)


@pytest.mark.slow
def test_several_processes_give_the_same_rows(tokenizer: Any) -> None:
    path = write("d.jsonl", documents(600))
    one = prepare(tokenizer, path)
    kept = list(one.train)
    shutil.rmtree("prepared")
    two = prepare(tokenizer, path, num_proc=2)
    assert two.fingerprint == one.fingerprint and list(two.train) == kept


# -------------------------------------------------------------------------- saved Arrow and fingerprint


def test_second_call_opens_what_the_first_one_saved(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("d.jsonl", documents(20))
    first = prepare(tokenizer, path, eval_fraction=0.1)
    monkeypatch.setattr(
        "deepstow.trainer.data.formats.Encoder.encode", lambda self, rows: pytest.fail("tokenised again")
    )
    said: list[str] = []
    again = prepare(tokenizer, path, eval_fraction=0.1, said=said)
    assert said == [f"data: d.jsonl is prepared already ({first.fingerprint})"]
    assert list(again.train) == list(first.train) and list(again.eval) == list(first.eval)
    assert [p.name for p in Path("prepared").iterdir()] == [first.fingerprint]


@pytest.mark.parametrize("file", ["train.arrow", "manifest.json"])
def test_damaged_data_is_made_anew(file: str, tokenizer: Any) -> None:
    """Arrow has no hash: with a flipped bit the row would train with another token, or end the run with an error."""
    path = write("d.jsonl", documents(600))
    first = prepare(tokenizer, path, eval_fraction=0.5)
    rows, saved = list(first.train), Path("prepared", first.fingerprint, file)
    content = bytearray(saved.read_bytes())
    content[len(content) // 2] ^= 64
    saved.write_bytes(content)
    said: list[str] = []
    again = prepare(tokenizer, path, eval_fraction=0.5, said=said)
    assert f"{first.fingerprint} is damaged (" in said[0] and file in said[0] and "made anew" in said[0]
    assert again.fingerprint == first.fingerprint and list(again.train) == rows
    said.clear()
    prepare(tokenizer, path, eval_fraction=0.5, said=said)
    assert len(said) == 1 and "prepared already" in said[0]


def test_fingerprint_changes_with_data_options_and_tokenizer(tokenizer: Any) -> None:
    path = write("a/d.jsonl", documents(5))
    options: list[dict[str, Any]] = [{}, {"seed": 1}, {"max_length": 100}, {"packing": True}, {"streaming": True}]
    found = [prepare(tokenizer, path, **chosen).fingerprint for chosen in options]
    found.append(prepare(tokenizers.trained(300, Path("other"), ["some text"]), path).fingerprint)
    Path(path).write_text(Path(path).read_text().replace("document 1 ", "document 9 "))
    found.append(prepare(tokenizer, path).fingerprint)
    assert len(set(found)) == len(found)


def test_a_file_that_changes_while_it_is_read(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are not kept under the hash of what it was."""
    path = write("d.jsonl", documents(5))
    encode = Encoder.encode

    def encoded(self: Encoder, rows: Any) -> Any:
        write(path, documents(6))
        return encode(self, rows)

    with (
        monkeypatch.context() as inside,
        pytest.raises(DataError, match=r"^d\.jsonl: it has changed while it was read"),
    ):
        inside.setattr(Encoder, "encode", encoded)
        prepare(tokenizer, path)
    assert list(Path("prepared").iterdir()) == []


def test_a_tokenizer_in_python_is_more_than_its_tokens() -> None:
    vocabulary = {"a": 0, "b": 1, "ab</w>": 2, "<unk>": 3, "a@@": 4, "b</w>": 5}
    found = []
    for number, merges in enumerate(("a b</w>", "b a</w>", "a b</w>")):
        folder = Path(str(number))
        folder.mkdir()
        (folder / "vocab.json").write_text(json.dumps(vocabulary))
        (folder / "merges.txt").write_text(f"#version\n{merges}\n")
        words = CTRLTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
        found.append((tokenizer_content(words), tokenizer_content(words, former=True), words.tokenize("ab")))
    one, other, again = found
    assert one == again and one[2] != other[2] and one[0] != other[0] and one[1] == other[1]


def test_a_stream_from_the_hub_is_of_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    data, commits = Dataset.from_list(ROWS["text"]).to_iterable_dataset(), ["1", "2"]
    monkeypatch.setattr("deepstow.trainer.model.hub.unreachable", lambda: "")
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda self, name: SimpleNamespace(sha=commits.pop()))
    monkeypatch.setattr("datasets.load_dataset", lambda *names, **more: data)
    first, second = (open_source("owner/name", None, "train", True) for _ in range(2))
    assert first.identity(True) != second.identity(True) and first.former(True) == second.former(True)


def test_fingerprint_ignores_where_and_when(tokenizer: Any) -> None:
    first = prepare(tokenizer, write("a/d.jsonl", documents(5))).fingerprint
    assert prepare(tokenizer, write("b/c/d.jsonl", documents(5)), num_proc=1).fingerprint == first


# ------------------------------------------------------------------------------------ tokenizer, sample


def test_loaded_tokenizer_gets_a_pad_token(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "t")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = tmp_path / "t" / name
        if file.exists():
            kept = {k: v for k, v in json.loads(file.read_text()).items() if k != "pad_token"}
            file.write_text(json.dumps(kept))
    loaded = tokenizers.load(None, str(tmp_path / "t"), False, tmp_path, [])
    assert loaded.pad_token == loaded.eos_token == "<|eos|>"


def test_texts_of_messages() -> None:
    write("d.jsonl", [{"messages": CHAT[:2]}])
    assert list(preparing.texts(DataSection(path="d.jsonl"))) == ["Be brief.", "Hi é"]


def test_sample_shows_what_is_masked(tokenizer: Any) -> None:
    path = write("d.jsonl", ROWS["prompt/completion"])
    shown = sample.render(prepare(tokenizer, path), tokenizer, 1)
    assert shown.splitlines() == [
        "row 1 (prompt/completion): 6 tokens, 4 trained on",
        "[masked: a|\\n",
        "] b|\\n",
        "|c|<|eos|>",
        "outside brackets: trained on; [masked: ...]: read, not trained on; | ends a token",
    ]
    coloured = sample.render(prepare(tokenizer, path), tokenizer, 1, colour=True)
    assert "\x1b[2ma|\\n\n\x1b[0m\x1b[32mb|" in coloured


def test_sample_of_a_packed_row_shows_documents(tokenizer: Any) -> None:
    path = write("d.jsonl", ROWS["prompt/completion"])
    for streaming in (False, True):
        shown = sample.render(prepare(tokenizer, path, packing=True, streaming=streaming), tokenizer)
        assert "documents packed: 2" in shown.splitlines()[0]
        assert shown.count("--- document at token ") == 2 and "positions 0 to 5" in shown


def test_a_trained_tokenizer_is_of_its_texts(tmp_path: Path) -> None:
    """In a folder in which another was trained a fresh run trains its own; one that is resumed keeps what is there."""
    one, other = ([word * 3] * 50 for word in ("abab ", "cdcd "))
    made = tokenizers.trained(262, tmp_path, one, "one")
    first, strange = made.get_vocab(), "tab\t“é” 漢字 🙂  two  spaces\r\n"
    assert made.decode(made(strange)["input_ids"]) == strange
    assert (made.pad_token, made.eos_token) == ("<|pad|>", "<|eos|>")
    again = tokenizers.trained(262, tmp_path / "again", one, "one")
    assert again.backend_tokenizer.to_str() == made.backend_tokenizer.to_str()
    second = tokenizers.trained(262, tmp_path, other, "other").get_vocab()
    assert first != second
    for mark, expected in (("one", first), ("other", second)):
        assert tokenizers.trained(262, tmp_path, [], mark).get_vocab() == expected
    assert tokenizers.trained(262, tmp_path, [], "allowed to change", resumes=True).get_vocab() == first
