"""The data formats of the tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepstow.trainer.formats.format import FORMATS, Format, Segment
from deepstow.trainer.tasks.task import MASKED

SEGMENT_CHARACTERS = 1 << 20


@FORMATS.add
class Text(Format):
    """Plain text. Long text is cut at line ends, to bound the memory of the tokenizer (a hundred bytes per token)."""

    name = "text"
    required = ("text",)
    splits = plain = True

    def segments(self, row: Mapping[str, Any]) -> list[Segment]:
        segments: list[Segment] = []
        text = row["text"]
        while text.strip() and len(text) > SEGMENT_CHARACTERS:
            cut = text.rfind("\n", 0, SEGMENT_CHARACTERS) + 1 or SEGMENT_CHARACTERS
            segments.append((text[:cut], True))
            text = text[cut:]
        return [*segments, (text, True)] if segments or text.strip() else []


@FORMATS.add
class Completion(Format):
    """A prompt and what follows it."""

    name = "prompt/completion"
    required = ("prompt", "completion")
    answers = True

    def segments(self, row: Mapping[str, Any]) -> list[Segment]:
        return [(row["prompt"], False), (row["completion"], True)]


@FORMATS.add
class Messages(Format):
    """Turns of a conversation; ShareGPT's name for them is another."""

    name = "messages"
    required = ("messages",)
    optional = ("system", "tools")
    kinds = {"messages": list}
    also = {"conversations": "messages"}

    def conversation(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return row


@FORMATS.add
class Instruction(Format):
    """Alpaca's columns, between its headings."""

    name = "instruction"
    required = ("instruction", "output")
    optional = ("input",)
    answers = True

    def segments(self, row: Mapping[str, Any]) -> list[Segment]:
        given = row.get("input", "").strip()
        below = f"### Input\n{given}\n\n" if given else ""
        prompt = f"### Instruction\n{row['instruction'].strip()}\n\n{below}### Response\n"
        return [(prompt, False), (row["output"], True)]


@FORMATS.add
class Ids(Format):
    """Rows that are tokenised already."""

    name = "input_ids"
    required = ("input_ids",)
    optional = ("labels",)
    kinds = {"input_ids": list, "labels": list}
    plain = True

    def tokens(self, row: Mapping[str, Any]) -> tuple[list[int], list[int]] | str:
        ids, labels = row["input_ids"], row.get("labels", row["input_ids"])
        if len(labels) != len(ids):
            return f"field 'labels' has {len(labels)} entries, field 'input_ids' has {len(ids)}"
        if any(type(token) is not int or token < 0 for token in ids):
            return "field 'input_ids' holds something that is not a token id (a whole number >= 0)"
        for token, label in zip(ids, labels, strict=True):
            if label not in (token, MASKED):
                return f"field 'labels' holds {label!r}, neither its token nor {MASKED}; labels are not shifted"
        return ids, labels
