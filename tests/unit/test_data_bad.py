"""Bad data ends with a DataError (exit code 3) whose line names file, row and field: one case per line below.

The expected lines are whole lines: what the user reads is the interface.
"""

import io
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from deepstow.trainer.config.sections import DataSection
from deepstow.trainer.data import prepare, sources
from deepstow.trainer.data import tokenizer as tokenizers
from deepstow.trainer.errors import ConfigError, DataError, ExitCode
from deepstow.trainer.formats.reader import READERS
from tests.helpers.data import VOCAB


def jsonl(*rows: Any) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def parquet(**columns: list[Any]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


def chat(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def case(name: str, files: dict[str, str | bytes], section: dict[str, Any], *lines: str) -> Any:
    return pytest.param(files, section, lines, id=name)


OK = {"text": "hello there"}
PAIR = {"prompt": "p" * 40, "completion": "c" * 40}
MARKS = "{% generation %} ... {% endgeneration %}"
WHOLE = parquet(text=[f"row {n}" for n in range(5000)])
FORMATS = "text, prompt+completion, messages, instruction+output, input_ids"

CASES = [
    case("renamed column, near", {"d.jsonl": jsonl({"id": 1, "txt": "x"})}, {},
        f"d.jsonl: no known format in columns id, txt; expected one of {FORMATS}; "
        "did you mean data.columns: {text: txt}?"),
    case("preference pairs", {"d.jsonl": jsonl({"prompt": "x", "chosen": "y", "rejected": "z"})}, {},
        f"d.jsonl: no known format in columns prompt, chosen, rejected; expected one of {FORMATS}; "
        "chosen and rejected are preference pairs: write task: dpo, orpo or reward"),
    case("questions and answers", {"d.jsonl": jsonl({"question": "x", "answer": "y"})}, {},
        f"d.jsonl: no known format in columns question, answer; expected one of {FORMATS}; "
        "did you mean data.columns: {prompt: question, completion: answer}?"),
    case("mapped column absent", {"d.jsonl": jsonl({"body": "x"})}, {"columns": {"text": "bodi"}},
        "data.columns: text: 'bodi' is not in d.jsonl; found: body; did you mean 'body'?"),
    case("ambiguous", {"d.jsonl": jsonl({"text": "x", "instruction": "y", "output": "z"})}, {},
        "d.jsonl: columns text, instruction, output fit text and instruction; "
        "say which with data.format, or data.columns, e.g. {text: text}"),
    case("field missing in a row", {"d.jsonl": jsonl(OK, {"id": 3})}, {},
        "d.jsonl:2: field 'text' is missing; found: id"),
    case("first row without fields", {"d.jsonl": jsonl({}, OK)}, {},
        "d.jsonl:1: field 'text' is missing; found: nothing"),
    case("wrong type in a mapped column", {"d.jsonl": jsonl({"b": 7})}, {"columns": {"text": "b"}},
        "d.jsonl:1: field 'text' (column 'b') is an integer; every row needs a string"),
    case("empty cell in csv", {"d.csv": "prompt,completion\na,b\nc,\n"}, {},
        "d.csv:3: field 'completion' is null; every row needs a string"),
    case("half a surrogate pair", {"d.jsonl": '{"text": "a \\ud800"}\n'}, {},
        "d.jsonl:1: field 'text' holds half a surrogate pair (\\ud800 to \\udfff), which is no character"),
    case("a number of 5000 digits", {"d.jsonl": f'{{"text": {"1" * 5000}}}'}, {},
        "d.jsonl:1: broken JSON: a number of too many digits"),
    case("nested too deeply", {"d.json": "[" * 100_000}, {}, "d.json:1: broken JSON: nested too deeply"),
    case("empty file", {"d.jsonl": ""}, {}, "d.jsonl: the file is empty; it has no rows"),
    case("csv header only", {"d.csv": "text\n"}, {}, "d.csv: the file is empty; it has no rows"),
    case("only empty texts", {"d.jsonl": jsonl({"text": ""}, {"text": " "})}, {},
        "d.jsonl: all 2 rows are dropped: 2 empty"),
    case("broken line", {"d.jsonl": jsonl(OK, OK, '{"text": "a')}, {},
        "d.jsonl:3: broken JSON: Unterminated string starting at column 10"),
    case("row is no object", {"d.jsonl": jsonl(OK, [1, 2])}, {},
        "d.jsonl:2: a row must be a JSON object, not a list"),
    case("broken json array", {"d.json": '[{"text": "a"},\n{"text": "b"\n]'}, {},
        "d.json:3: broken JSON: Expecting ',' delimiter at column 1"),
    case("csv whose rows have several lines", {"d.csv": 'text,id\n"a\nb",1\n\nc,d,2\n'}, {},
        "d.csv:5: the row has 3 fields, the header has 2"),
    case("csv without commas", {"d.csv": "prompt;completion\na;b\n"}, {},
        "d.csv:1: columns are separated by ';'; write commas"),
    case("a list in jsonl", {"d.jsonl": json.dumps([OK, OK], indent=1)}, {},
        "d.jsonl:1: a list begins here, and .jsonl has one object per line; a list is read from a .json file"),
    case("csv with an open quote", {"d.csv": 'text\n"a b\nc\n'}, {},
        "d.csv:3: broken CSV: unexpected end of data"),
    case("truncated parquet", {"d.parquet": parquet(text=["a b"] * 99)[:-20]}, {},
        "d.parquet: not a whole Parquet file: it is truncated or damaged"),
    case("damage inside parquet", {"d.parquet": WHOLE[:4] + b"\xff" * 200 + WHOLE[204:]}, {},
        "d.parquet:1: the Parquet data is damaged from here on"),
    case("invalid utf-8 in txt", {"d.txt": b"one\ntwo \xff\n"}, {},
        "d.txt:2: byte 0xff is not valid UTF-8"),
    case("invalid utf-8 in jsonl", {"d.jsonl": b'{"text": "a b"}\n{"text": "\xe9"}\n'}, {},
        "d.jsonl:2: byte 0xe9 is not valid UTF-8"),
    case("invalid utf-8 in csv", {"d.csv": b"text\nab\n\xe9\n"}, {}, "d.csv:3: byte 0xe9 is not valid UTF-8"),
    case("empty folder", {"d/readme.md": "x"}, {"path": "d"},
        "d: the folder holds no data file; allowed: .txt, .jsonl, .json, .csv, .parquet"),
    case("mixed schemas", {"d/a.jsonl": jsonl(OK), "d/b.jsonl": jsonl({"prompt": "x", "id": 1})}, {"path": "d"},
        "d/b.jsonl: no column 'text', which d/a.jsonl has; found: prompt, id; "
        "every file of a folder must have the same fields"),
    case("split not there", {"d/train.jsonl": jsonl(OK)}, {"path": "d", "split": "test"},
        "data.split: 'test': no file of d is named so; found: train"),
    case("some files name a split", {"d/train.txt": "a", "d/x.txt": "b"}, {"path": "d"},
        "d: train.txt names a split and x.txt does not; rename or move one"),
    case("split of one file", {"d.jsonl": jsonl(OK)}, {"split": "test"},
        "data.split: 'test': d.jsonl is one file and has no splits"),
    case("unsupported suffix", {"d.jsonk": "x"}, {},
        "d.jsonk: .jsonk is not a data format; allowed: .txt, .jsonl, .json, .csv, .parquet; did you mean '.json'?"),
    case("path not found, near", {"corpus.jsonl": jsonl(OK)}, {"path": "corpsu.jsonl"},
        "data.path: corpsu.jsonl does not exist; did you mean 'corpus.jsonl'?"),
    case("eval path not found", {"d.jsonl": jsonl(OK)}, {"eval_path": "zzz"},
        "data.eval_path: zzz does not exist; a hub name looks like owner/name"),
    case("nothing to divide", {"d.jsonl": jsonl(PAIR)}, {"eval_fraction": 0.5},
        "data.eval_fraction: d.jsonl has one row; use data.eval_path"),
    case("subset of a local path", {"d.jsonl": jsonl(OK)}, {"name": "en"},
        "data.name: 'en' is a hub subset, but d.jsonl is a local path; remove it"),
    case("wrong role", {"d.jsonl": jsonl(chat(("user", "a"), ("assitant", "b")))}, {},
        "d.jsonl:1: field 'messages[1]' has role 'assitant'; "
        "allowed: system, user, assistant, tool, developer; did you mean 'assistant'?"),
    case("ShareGPT's role, misspelt", {"d.jsonl": jsonl({"conversations": [{"from": "usr", "value": "a"}]})}, {},
        "d.jsonl:1: field 'conversations[0]' has role 'usr'; "
        "allowed: system, user, assistant, tool, developer; did you mean 'user'?"),
    case("half a message", {"d.jsonl": jsonl({"messages": [{"from": "human", "text": "a"}]})}, {},
        "d.jsonl:1: field 'messages[0]' needs role and content; found: from, text"),
    case("a message with an image",
        {"d.jsonl": jsonl(chat(("user", [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}])))}, {},
        "d.jsonl:1: field 'messages[0]' has a part that is no text (image_url); "
        "images, sound and files are not trained on"),
    case("images beside messages", {"d.jsonl": jsonl(chat(("user", "a")) | {"images": ["a.png"]})}, {},
        "d.jsonl: column 'images': only text is trained on, and these messages come with more"),
    case("a call without arguments",
        {"d.jsonl": jsonl({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]})}, {},
        "d.jsonl:1: field 'messages[0]' has a tool call that is none; "
        "a call is {name: text, arguments: an object, or one as JSON text}"),
    case("ShareGPT's call that is no JSON",
        {"d.jsonl": jsonl({"conversations": [{"from": "function_call", "value": "f(x)"}]})}, {},
        "d.jsonl:1: field 'conversations[0]' has a tool call that is none; "
        "a call is {name: text, arguments: an object, or one as JSON text}"),
    case("OpenAI's old calls",
        {"d.jsonl": jsonl({"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]})}, {},
        "d.jsonl:1: has function_call, which the tokenizer's chat template does not write; "
        "name one that does in data.chat_template"),
    case("tools that are none", {"d.jsonl": jsonl(chat(("user", "a")) | {"tools": "look_up"})}, {},
        "d.jsonl:1: field 'tools' is no list of functions, each {type: function, function: {name, ...}}"),
    case("tools that the template leaves out", {"d.jsonl": jsonl(chat(("user", "a")) | {"tools": [{"name": "f"}]})},
        {"chat_template": "zephyr"}, "d.jsonl:1: has tools, which data.chat_template zephyr does not write; "
        "name one that does in data.chat_template"),
    case("reasoning that the template leaves out",
        {"d.jsonl": jsonl({"messages": [{"role": "assistant", "content": "a", "reasoning_content": "b"}]})},
        {"chat_template": "zephyr"},
        "d.jsonl:1: has reasoning_content, which data.chat_template zephyr does not write; "
        "name one that does in data.chat_template"),
    case("a chosen turn where all are trained on",
        {"d.jsonl": jsonl({"messages": [{"role": "assistant", "content": "a", "weight": 0}]})}, {},
        "d.jsonl:1: field 'messages[0]' has weight 0; turns are chosen where data.assistant_only_loss is true"),
    case("half a weight", {"d.jsonl": jsonl({"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]})},
        {"assistant_only_loss": True}, "d.jsonl:1: field 'messages[0]' has weight 0.5; one of them, and 0 or 1"),
    case("a question that is trained on",
        {"d.jsonl": jsonl({"messages": [{"role": "user", "content": "a", "train": True}]})},
        {"assistant_only_loss": True},
        "d.jsonl:1: field 'messages[0]' has train True; only turns of the assistant are trained on"),
    case("template that is none", {"d.jsonl": jsonl(chat(("user", "a")))}, {"chat_template": "zepyr"},
        "data.chat_template: zepyr does not exist and is none of chatml, zephyr, vicuna; did you mean 'zephyr'?"),
    case("message without content", {"d.jsonl": jsonl(chat(("user", None)))}, {},
        "d.jsonl:1: field 'messages[0]' has content that is null; every message needs a string"),
    case("no messages", {"d.jsonl": jsonl({"messages": []})}, {},
        "d.jsonl: all 1 rows are dropped: 1 empty"),
    case("no assistant turn", {"d.jsonl": jsonl(chat(("user", "a")))}, {"assistant_only_loss": True},
        "d.jsonl: all 1 rows are dropped: 1 without a token that is trained on"),
    case("template without marks that writes the last turn otherwise",
        {"d.jsonl": jsonl(chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))),
         "t.jinja": "{% for m in messages %}{{ m.role + (m.content if loop.last else '') }}{% endfor %}"},
        {"assistant_only_loss": True, "chat_template_path": "t.jinja"},
        "d.jsonl:1: t.jinja writes the first 2 messages otherwise than where more follow, so turn 2 cannot be told "
        f"from the others; put {MARKS} around answers in a copy and name it in data.chat_template"),
    case("template with a syntax error",
        {"d.jsonl": jsonl(chat(("assistant", "a"))), "t.jinja": "a\n{% if %}"}, {"chat_template_path": "t.jinja"},
        "t.jinja:2: Expected an expression, got 'end of statement block'"),
    case("template refuses",
        {"d.jsonl": jsonl(chat(("user", "a"))), "t.jinja": "{{ raise_exception('user first') }}"},
        {"chat_template_path": "t.jinja"},
        "d.jsonl:1: field 'messages': the chat template refuses it: user first"),
    case("template not found",
        {"d.jsonl": jsonl(chat(("user", "a"))), "chat.jinja": "x"}, {"chat_template_path": "chta.jinja"},
        "data.chat_template_path: chta.jinja does not exist; did you mean 'chat.jinja'?"),
    case("answers cut off", {"d.jsonl": jsonl(PAIR, PAIR)}, {"max_length": 16},
        "d.jsonl: all 2 rows are dropped: 2 whose first trained token is beyond data.max_length"),
    case("all too long", {"d.jsonl": jsonl(PAIR)}, {"max_length": 8, "excess_length_strategy": "drop"},
        "d.jsonl: all 1 rows are dropped: 1 longer than data.max_length"),
    case("everything masked", {"d.jsonl": jsonl({"input_ids": [5, 6, 7], "labels": [-100] * 3})}, {},
        "d.jsonl: all 1 rows are dropped: 1 without a token that is trained on"),
    case("id beyond the vocabulary", {"d.jsonl": jsonl({"input_ids": [5, 6]}, {"input_ids": [5, 400]})}, {},
        "d.jsonl:2: token id 400 is beyond the model's vocabulary of 400; "
        "the data or the tokenizer belongs to another model"),
    case("negative id", {"d.jsonl": jsonl({"input_ids": [5, -1]})}, {},
        "d.jsonl:1: field 'input_ids' holds something that is not a token id (a whole number >= 0)"),
    case("no ids", {"d.jsonl": jsonl({"input_ids": []})}, {}, "d.jsonl: all 1 rows are dropped: 1 empty"),
    case("labels of another length", {"d.jsonl": jsonl({"input_ids": [5, 6], "labels": [5]})}, {},
        "d.jsonl:1: field 'labels' has 1 entries, field 'input_ids' has 2"),
    case("shifted labels", {"d.jsonl": jsonl({"input_ids": [5, 6, 7], "labels": [6, 7, -100]})}, {},
        "d.jsonl:1: field 'labels' holds 6, neither its token nor -100; labels are not shifted"),
    case("completion-only loss on text", {"d.jsonl": jsonl(OK)}, {"completion_only_loss": True},
        "data.completion_only_loss: true needs prompt/completion or instruction data; d.jsonl is text data"),
    case("assistant-only loss on text", {"d.jsonl": jsonl(OK)}, {"assistant_only_loss": True},
        "data.assistant_only_loss: true needs messages data; d.jsonl is text data"),
    case("several", {"d.jsonl": jsonl(OK, *[{"text": n} for n in range(7)], OK)}, {},
        "d.jsonl:2: field 'text' is an integer; every row needs a string (also d.jsonl:3, d.jsonl:4, d.jsonl:5, "
        "d.jsonl:6, d.jsonl:7 and 1 more)"),
    case("several kinds", {"d.jsonl": jsonl(*[{"text": [None] * 0 if n % 2 else n} for n in range(3)])}, {},
        "d.jsonl:1: field 'text' is an integer; every row needs a string (also d.jsonl:3)",
        "d.jsonl:2: field 'text' is a list; every row needs a string"),
]  # fmt: skip

# What files are made of, to be put together at random.
PIECES = [
    b"[", b"]", b"{", b"}", b'"text"', b'"input_ids"', b":", b",", b'"a b"', b'"', b"\n", b"text", b"5", b"-1",
    b"\r", b" ", b"null", b"1.5", b'"\\ud800"', b"true", b"PAR1", b"text,id\n", b"x,1\n", b'{"text": "a b"}\n',
    b'{"text": "a b"},', b'{"input_ids": [5, 6]}\n', b'{"messages": [{"role": "user", "content": "a"}]}\n', b"\xff",
    b"\x00", b"\xef\xbb\xbf",
]  # fmt: skip


@pytest.mark.parametrize(("files", "section", "lines"), CASES)
def test_bad_data(
    files: dict[str, str | bytes],
    section: dict[str, Any],
    lines: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokenizer: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError) as caught:
        options = DataSection(**({"path": next(iter(files), "pydoc")} | section))
        prepare.prepare(options, tokenizer, VOCAB, 0, tmp_path / "prepared", lambda line: None)
    assert caught.value.code == ExitCode.DATA == 3
    assert caught.value.lines == lines
    prepared = tmp_path / "prepared"
    assert not prepared.exists() or not list(prepared.iterdir()), "a refused data set leaves nothing behind"


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.sampled_from(tuple(READERS)), st.lists(st.sampled_from(PIECES), max_size=30).map(b"".join))
def test_any_bytes_are_data_or_a_data_error(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Any, suffix: str, content: bytes
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    path = folder / f"d{suffix}"
    path.write_bytes(content)
    try:
        prepare.prepare(DataSection(path=str(path)), tokenizer, VOCAB, 0, folder / "p", lambda line: None)
    except DataError as error:
        assert all(line.startswith((str(path), "... and", "data.columns")) for line in error.lines)


def test_split_missing_in_a_saved_data_set(tmp_path: Path) -> None:
    from datasets import DatasetDict

    DatasetDict(train=Dataset.from_dict({"text": ["a b"]})).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match=r"^data\.split: 'test' is not in .*saved; found: train$"):
        sources.open_source(str(tmp_path / "saved"), None, "test", False)
    next(tmp_path.rglob("*.arrow")).write_bytes(b"")
    with pytest.raises(DataError, match=r"saved: saved data that cannot be loaded: [^\n]+$"):
        sources.open_source(str(tmp_path / "saved"), None, "train", False)


def test_hub_failure_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub\nwith a long tail")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    monkeypatch.setattr("deepstow.trainer.model.hub.unreachable", lambda: None)
    with pytest.raises(DataError) as caught:
        sources.open_source("owner/name", None, "train", False)
    line = "data.path: hub data set owner/name cannot be loaded: ConnectionError: Couldn't reach the Hub"
    assert caught.value.lines == (line,)


def test_tokenizer_without_template(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(jsonl(chat(("user", "a"))))
    monkeypatch.setattr(tokenizer, "chat_template", None)
    ways = "write chatml, zephyr, vicuna, the path of a .jinja file, or the template itself"
    line = f"data.chat_template: messages need one and the tokenizer has none; {ways}"
    with pytest.raises(DataError, match=f"^{line}$"):
        prepare.prepare(DataSection(path=str(path)), tokenizer, VOCAB, 0, tmp_path / "p", lambda line: None)


def test_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model\.tokenizer: .*nowhere cannot be loaded: [^\n]*$"):
        tokenizers.load(str(tmp_path / "nowhere"), None, False, tmp_path, [])


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        ConfigError, match=f"^model.tokenizer: the folder {tmp_path} holds no tokenizer; write the name"
    ):
        tokenizers.load(None, str(tmp_path), False, tmp_path, [])


def test_a_pipe_in_the_place_of_a_tokenizer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"^model\.tokenizer = .*: tokenizer\.json is a pipe, and no file$"):
        tokenizers.load(str(tmp_path), None, False, tmp_path, [])


def test_tokenizer_needs_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no text to train a tokenizer on"):
        tokenizers.trained(300, tmp_path, [])


def test_a_tokenizer_is_trained_without_what_the_data_is_refused_for(tmp_path: Path) -> None:
    """So that the line about the row is said, and not a traceback of the tokenizer."""
    (tmp_path / "d.jsonl").write_text(jsonl({"text": "a \ud800"}, {"text": "b"}))
    assert [*prepare.texts(DataSection(path=str(tmp_path / "d.jsonl")))] == ["b"]
