"""Conversations: every published form gives the tokens of OpenAI's, and the answers alone are trained on, or some."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deepstow.trainer.data.packing import MASKED
from deepstow.trainer.data.templates import READY
from deepstow.trainer.errors import DataError
from tests.helpers import data as helper
from tests.helpers.data import write

CALL = {"name": "add", "arguments": {"a": 1, "b": 2}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "Three."},
]
OPENAI = {"messages": MESSAGES, "tools": [TOOL]}
PARTS = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
AS_TEXT = {"name": "add", "arguments": json.dumps(CALL["arguments"])}
SAME: dict[str, dict[str, Any]] = {
    "arguments as JSON text": {
        "messages": [*MESSAGES[:2], {"role": "assistant", "tool_calls": [{"function": AS_TEXT}]}, *MESSAGES[3:]],
        "tools": json.dumps([TOOL]),
    },
    "parts": {"messages": [{"role": "system", "content": PARTS}, *MESSAGES[1:]], "tools": [TOOL]},
    "ShareGPT": {
        "system": "Be brief.",
        "conversations": [
            {"from": "human", "value": "1 + 2?"},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "3"},
            {"from": "gpt", "value": "Three."},
        ],
        "tools": json.dumps([TOOL["function"]]),
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def prepare(tokenizer: Any, *rows: dict[str, Any], **options: Any) -> Any:
    write(rows)
    return helper.prepare(tokenizer, **options).train


def trained(tokenizer: Any, row: dict[str, Any]) -> str:
    return str(tokenizer.decode([label for label in row["labels"] if label != MASKED]))


@pytest.mark.parametrize("form", SAME)
def test_each_form_gives_the_tokens_of_openai(form: str, tokenizer: Any) -> None:
    (expected,) = prepare(tokenizer, OPENAI, assistant_only_loss=True)
    (found,) = prepare(tokenizer, SAME[form], assistant_only_loss=True)
    assert found == expected
    whole = tokenizer.decode(expected["input_ids"])
    assert json.dumps(TOOL) in whole and "Be brief." in whole.partition("You may call")[0]
    call = f"<tool_call>{json.dumps(CALL)}</tool_call><|eos|>"
    assert trained(tokenizer, expected) == call + "Three.<|eos|>"


def test_nulls_that_parquet_adds_are_no_keys(tokenizer: Any) -> None:
    other = {"type": "function", "function": {"name": "look", "arguments": {"what": "it"}}}
    both = {
        "messages": [*MESSAGES[:2], MESSAGES[2] | {"tool_calls": [other, *MESSAGES[2]["tool_calls"]]}],
        "tools": [TOOL],
    }
    expected = list(prepare(tokenizer, OPENAI, both))
    pq.write_table(pa.Table.from_pylist([OPENAI, both]), "d.parquet")
    assert list(prepare(tokenizer, path="d.parquet")) == expected


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("name", READY)
def test_answers_are_found_without_marks(name: str, opens: bool, tokenizer: Any) -> None:
    """By prefixes, with what the template writes between an answer and the next turn; also if the assistant opens."""
    chat = {"messages": [MESSAGES[0], MESSAGES[1], MESSAGES[4], {"role": "user", "content": "é?"}, MESSAGES[4]]}
    chat["messages"] = chat["messages"][2:] if opens else chat["messages"]
    (marked,) = prepare(tokenizer, chat, chat_template=name, assistant_only_loss=True)
    plain = re.sub(r"{% (end)?generation %}", "", READY[name])
    (found,) = prepare(tokenizer, chat, chat_template=plain, assistant_only_loss=True)
    assert found["input_ids"] == marked["input_ids"]
    assert trained(tokenizer, marked) == trained(tokenizer, found).replace("\n", "")
    assert trained(tokenizer, marked).replace(" ", "") == "Three.<|eos|>" * 2
    for label, same in zip(marked["labels"], found["labels"], strict=True):
        assert label in (MASKED, same)


@pytest.mark.parametrize("marks", [True, False])
def test_chosen_turns(marks: bool, tokenizer: Any) -> None:
    turns = [("one", {"train": False}), ("two", {"weight": 1}), ("three", {}), ("four", {"weight": 0})]
    messages = [
        message
        for text, choice in turns
        for message in ({"role": "user", "content": "?"}, {"role": "assistant", "content": text, **choice})
    ]
    template = READY["zephyr"] if marks else re.sub(r"{% (end)?generation %}", "", READY["zephyr"])
    options = {"chat_template": template, "assistant_only_loss": True}
    (row,) = prepare(tokenizer, {"messages": messages}, **options)
    assert trained(tokenizer, row).replace("\n", "") == "two<|eos|>three<|eos|>"


def test_a_token_that_is_half_an_answer_is_not_trained_on(tokenizer: Any) -> None:
    assert len(tokenizer("in")["input_ids"]) == 1
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    chat = {"messages": [{"role": "user", "content": "=i"}, {"role": "assistant", "content": "n man"}]}
    (row,) = prepare(tokenizer, chat, chat_template=template, assistant_only_loss=True)
    assert row["input_ids"] == tokenizer("=in man")["input_ids"] and trained(tokenizer, row) == " man"


def words_alone() -> Any:
    """A real tokenizer whose tokens are words: spaces between them are in none."""
    vocabulary = {word: number for number, word in enumerate(("?", "<e>", "u:", "a:", "good", "bad", "yes", "no"))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?", eos_token="<e>", pad_token="<e>")


MARKED = (
    "{{% for m in messages %}}{{% if m.role == 'assistant' %}}a: {{% generation %}}{}{{% endgeneration %}} "
    "{{% else %}}u: {{{{ m.content }}}} {{% endif %}}{{% endfor %}}"
)
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "good"},
    {"role": "assistant", "content": "yes no"},
    {"role": "user", "content": "bad"},
    {"role": "assistant", "content": "no"},
]


@pytest.mark.parametrize("inside", ["{{ m.content }}", "{{ m.content }} ", " {{ m.content }}", "{{ m.content }} \n"])
def test_marks_whose_ends_the_tokenizer_drops(inside: str) -> None:
    """Transformers marks all that follows, questions as well, or nothing from there on."""
    rows = [{"messages": TALK[:1]}, {"messages": TALK}]
    options = {"assistant_only_loss": True, "chat_template": MARKED.format(inside)}
    if inside == "{{ m.content }}":
        _, row = [*prepare(words_alone(), {"messages": TALK[2:]}, {"messages": TALK}, **options)]
        assert row["labels"] == [MASKED] * 3 + [6, 7] + [MASKED] * 3 + [7]
        return
    with pytest.raises(DataError) as refused:
        prepare(words_alone(), *rows, **options)
    (line,) = refused.value.lines
    assert re.match(r"d\.jsonl:2: token \d \('(u:|yes)'\) is (out|in)side of the answers by its characters, and", line)


def test_an_answer_that_ends_in_a_character_of_several_tokens(tokenizer: Any) -> None:
    """All of them are trained on, of which Transformers marks the first; also where a macro writes the marks."""
    talk = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "a \U0001f98a"}]
    mark = "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}"
    of_macro = f"{{% macro say(m) %}}{{{{ m.role }}}}:{mark}. {{% endmacro %}}"
    for macro, body in (("", f"{{{{ m.role }}}}:{mark}. "), (of_macro, "{{ say(m) }}")):
        template = f"{macro}{{% for m in messages %}}{body}{{% endfor %}}"
        (row,) = prepare(tokenizer, {"messages": talk}, assistant_only_loss=True, chat_template=template)
        assert trained(tokenizer, row) == "a \U0001f98a"


def test_marks_keep_the_white_space_around_them(tokenizer: Any) -> None:
    """Borders are written for a comparison only, with every sign that a mark may have."""
    for left, right in ("--", "-+", "+-", "  "):
        mark = f"{{%{left.strip()} generation {right.strip()}%}}\n  {{{{ m.content }}}}\n  "
        mark += f"{{%{left.strip()} endgeneration {right.strip()}%}}\n\n"
        talk = [{"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two"}]
        template = f"begin {{% for m in messages %}}\n  {mark}.{{% endfor %}}"
        (row,) = prepare(tokenizer, {"messages": talk}, assistant_only_loss=True, chat_template=template)
        plain = tokenizer.apply_chat_template(talk, chat_template=template, tokenize=False)
        assert tokenizer.decode(row["input_ids"]) == plain
        assert "".join(trained(tokenizer, row).split()) == "onetwo"
