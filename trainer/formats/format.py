"""What a data format is: the columns of a row, and what it says of them. Tokenising is in ``trainer/data/formats.py``.

A format writes one of three methods. ``segments`` gives strings, each of which is tokenised alone. ``conversation``
gives messages, which the tokenizer's chat template writes. ``tokens`` gives ids that are there already.

If a format of the tree gives other rows than before, raise ``_LAYOUT`` in ``trainer/data/prepare.py``: rows that were
prepared are kept by content, and only the code of formats from outside is part of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepstow.trainer.registry import Registry
from deepstow.trainer.tasks.task import MASKED

Segment = tuple[str, bool]  # a string that is tokenised alone, and whether it is trained on


class Format:
    """The columns of a row, and what is trained on.

    Attributes:
        name: in messages; a format from outside is given the one that it is used by.
        required, optional: fields of a row, the columns of the same name unless ``data.columns`` has others.
        kinds: types of fields that are no text.
        also: names of columns that can mean one field only, with that field.
        answers: prompts come before what is trained on, so ``data.completion_only_loss`` has a meaning.
        splits: a row that is too long becomes several, unless ``data.excess_length_strategy`` says otherwise.
        plain: it is text, without answers.
    """

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    kinds: Mapping[str, type] = {}
    also: Mapping[str, str] = {}
    answers = False
    splits = False
    plain = False

    def segments(self, row: Mapping[str, Any]) -> list[Segment] | str:
        """The strings of a row, which has ``required`` and those of ``optional`` that are there; or a line about what
        is wrong with it. An empty list: the row is dropped. A format with ``answers`` says False of prompts, and
        ``data.completion_only_loss: false`` trains on them, too.
        """
        raise NotImplementedError

    def conversation(self, row: Mapping[str, Any]) -> Mapping[str, Any] | str:
        """``messages`` of a row, as OpenAI's API has them, and ``system`` and ``tools`` if there are any; or a line
        about what is wrong with it.
        """
        raise NotImplementedError

    def tokens(self, row: Mapping[str, Any]) -> tuple[list[int], list[int]] | str:
        """Ids of a row, and labels: the ids, or -100 where nothing is learned. Or a line about what is wrong."""
        raise NotImplementedError

    @property
    def makes(self) -> str:
        """Which of the three methods it has. TypeError: none, or several."""
        ways = [way for way in WAYS if getattr(type(self), way) is not getattr(Format, way)]
        if len(ways) != 1:
            raise TypeError(f"must have one of the methods {', '.join(WAYS)}, and has {' and '.join(ways) or 'none'}")
        return ways[0]

    def __init__(self) -> None:
        if not (getattr(self, "required", None) and {*map(type, self.required)} == {str}):
            raise TypeError("required must name its columns, as in required = ('question', 'answer')")
        assert self.makes


WAYS = ("segments", "conversation", "tokens")
FORMATS: Registry[Format] = Registry(Format, "deepstow.data_formats", "deepstow.trainer.formats")
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
        context = row.get("input", "").strip()
        below = f"### Input\n{context}\n\n" if context else ""
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
