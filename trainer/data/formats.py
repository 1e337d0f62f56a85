"""Tokenise rows: input ids, and labels that say which tokens are trained on.

The format is recognised by the columns; ``data.columns`` maps our names to those of the data.

A row of strings is a list of segments, trained on or not, and each segment is tokenised *alone*. So no token straddles
the boundary between prompt and completion, the mask is exact, and a prompt has the tokens that it has in generation.
Long text is also cut into segments, at line ends, to bound the memory of the tokenizer (a hundred bytes per token).

A label is the token itself, or -100 if it is not trained on; the model shifts labels. The first label is always -100,
as in a packed row. ``eos`` follows text and completions and is trained on; a chat template writes its own. A bad row
gives a line of text instead of an exception, so that several can be reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from deepstow.trainer.data.chats import NO_TEXT, SURROGATE, Fault, Template, find_template
from deepstow.trainer.data.chats import read as read_chat
from deepstow.trainer.data.packing import MASKED
from deepstow.trainer.data.report import BEYOND, EMPTY, LONG, UNTRAINED, Document, Dropped, Encoded
from deepstow.trainer.data.sources import Row, Source
from deepstow.trainer.errors import DataError, kind, nearest

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import DataSection

_SEGMENT_CHARACTERS = 1 << 20


class Format(NamedTuple):
    """A name, the fields that a row must have, and those that it may have."""

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


FORMATS = (
    Format("text", ("text",)),
    Format("prompt/completion", ("prompt", "completion")),
    Format("messages", ("messages",), ("system", "tools")),
    Format("instruction", ("instruction", "output"), ("input",)),
    Format("input_ids", ("input_ids",), ("labels",)),
)
FIELDS = tuple(name for format in FORMATS for name in format.required + format.optional)
_ALSO = {"conversations": "messages"}  # columns with another name that can mean one field only: ShareGPT's
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")


# Columns of well-known data sets that hold a prompt and its completion.
_PAIRS = (
    ("question", "answer"), ("query", "response"), ("prompt", "response"), ("instruction", "response"),
    ("problem", "solution"), ("question", "response"), ("input", "output"),
)  # fmt: skip

Segment = tuple[str, bool]  # a string that is tokenised alone, and whether it is trained on


def detect(options: DataSection, source: Source) -> tuple[Format, dict[str, str]]:
    """The format of a source and the column of each of its fields. Raises DataError if no format fits, or several do,
    or ``columns`` names a missing column, or files have other fields.
    """
    first = source.tables[0]
    given: dict[str, str] = {str(name): column for name, column in options.columns.items()}
    found = ", ".join(first.columns)
    absent = [
        f"data.columns: {name}: {column!r} is not in {first.name}; found: {found}{nearest(column, first.columns)}"
        for name, column in given.items()
        if column not in first.columns
    ]
    if absent:
        raise DataError(absent)
    also = {field: column for column, field in _ALSO.items() if column in first.columns}
    mapped = also | {name: name for name in FIELDS if name in first.columns} | given
    fits = [format for format in FORMATS if all(name in mapped for name in format.required)]
    if len(fits) > 1 and given:
        fits = [format for format in fits if any(name in given for name in format.required)]
    if not fits:
        known = ", ".join("+".join(format.required) for format in FORMATS)
        raise DataError(
            f"{first.name}: no known format in columns {found}; expected one of {known}{_meant(first.columns)}"
        )
    if len(fits) > 1:
        names = " and ".join(format.name for format in fits)
        example = fits[0].required[0]
        cure = f"say which with data.columns, e.g. {{{example}: {mapped[example]}}}"
        raise DataError(f"{first.name}: columns {found} fit {names}; {cure}")
    format = fits[0]
    if format.name == "messages" and (media := [name for name in _MEDIA if name in first.columns]):
        raise DataError(
            f"{first.name}: column {media[0]!r}: only text is trained on, and these messages come with more"
        )
    columns = {name: mapped[name] for name in format.required + format.optional if name in mapped}
    for table in source.tables[1:]:
        for name in format.required:
            if columns[name] not in table.columns:
                others = ", ".join(table.columns)
                line = f"{table.name}: no column {columns[name]!r}, which {first.name} has; found: {others}"
                raise DataError(f"{line}; every file of a folder must have the same fields")
    return format, columns


def _meant(columns: Sequence[str]) -> str:
    """What these columns may be meant as: only whole formats, since half a guess trains on nonsense."""
    if {"chosen", "rejected"} & set(columns):
        return "; chosen and rejected are preference pairs: write task: dpo, orpo or reward"
    for prompt, completion in _PAIRS:
        if prompt in columns and completion in columns:
            return f"; did you mean data.columns: {{prompt: {prompt}, completion: {completion}}}?"
    for format in FORMATS:
        near = {name: get_close_matches(name, columns, n=1) for name in format.required}
        if all(near.values()):
            wrong = ", ".join(f"{name}: {close[0]}" for name, close in near.items() if name != close[0])
            return f"; did you mean data.columns: {{{wrong}}}?"
    return ""


@dataclass(frozen=True)
class Encoder:
    """Turns rows of one source into Documents; it can be pickled for worker processes."""

    options: DataSection
    format: Format
    columns: Mapping[str, str]
    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    vocab_size: int
    completion_only: bool
    template: Template | None  # of a chat

    def encode(self, rows: Sequence[Row]) -> list[Encoded]:
        """One result per row. The strings of all rows are tokenised in one call, which uses all cores."""
        fields = [self._fields(row) for row in rows]
        parts = iter(self._tokenise([values for values in fields if not isinstance(values, str)]))
        found = [values if isinstance(values, str) else next(parts) for values in fields]
        results = [self._finish(part) if isinstance(part, Document) else part for part in found]
        return [f"{r.place}: {x}" if isinstance(x, str) else x for r, x in zip(rows, results, strict=True)]

    def _fields(self, row: Row) -> dict[str, Any] | str:
        """The fields of a row with their types checked, or a line about what is wrong."""
        if isinstance(row.values, str):
            return row.values
        values: dict[str, Any] = {}
        for name, column in self.columns.items():
            label = f"field {name!r}" if name == column else f"field {name!r} (column {column!r})"
            value = row.values.get(column)
            wanted = list if name in ("messages", "input_ids", "labels") else str
            if name in self.format.optional and (value is None or (name == "tools" and isinstance(value, list))):
                values |= {name: value} if value else {}
                continue
            if column not in row.values:
                return f"{label} is missing; found: {', '.join(row.values) or 'nothing'}"
            if not isinstance(value, wanted):
                return f"{label} is {kind(value)}; every row needs {kind(wanted())}"
            if isinstance(value, str) and SURROGATE.search(value):
                return f"{label} {NO_TEXT}"
            values[name] = value
        return values

    def _tokenise(self, rows: list[dict[str, Any]]) -> list[Encoded]:
        if self.format.name == "messages":
            return [self._chat(row) for row in rows]
        if self.format.name == "input_ids":
            return [_ids_fault(row) or Document(row["input_ids"], row.get("labels", row["input_ids"])) for row in rows]
        segments = [_segments(self.format.name, row, not self.completion_only) for row in rows]
        texts = [text for row in segments for text, _ in row]
        if not texts:
            return [Dropped(EMPTY) for _ in rows]
        ids = iter(self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])
        return [self._join([(next(ids), trained) for _, trained in row]) for row in segments]

    def _join(self, parts: list[tuple[list[int], bool]]) -> Document | Dropped:
        if not parts:
            return Dropped(EMPTY)
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        start = [bos] if bos is not None and self.tokenizer("")["input_ids"][:1] == [bos] else []
        end = [] if eos is None else [eos]
        ids, labels = [*start], [MASKED for _ in start]
        for tokens, trained in [*parts, (end, True)]:
            ids += tokens
            labels += tokens if trained else [MASKED] * len(tokens)
        return Document(ids, labels)

    @property
    def excess(self) -> str:
        """What becomes of a document that is longer than ``data.max_length``: half an answer is not a sample."""
        return self.options.excess_length_strategy or ("split" if self.format.name == "text" else "truncate")

    def _chat(self, row: Mapping[str, Any]) -> Encoded:
        assert self.template is not None
        if not row["messages"]:
            return Dropped(EMPTY)
        only = self.options.assistant_only_loss
        try:
            return Document(*self.template.encode(read_chat(row, self.columns["messages"], only), only))
        except Fault as fault:
            return str(fault)

    def _finish(self, document: Document) -> Encoded:
        """Truncate or drop; refuse a token that the model has no embedding for."""
        ids, labels, limit = document.ids, [MASKED, *document.labels[1:]], self.options.max_length
        if (worst := max(ids, default=0)) >= self.vocab_size:
            line = f"token id {worst} is beyond the model's vocabulary of {self.vocab_size}"
            return f"{line}; the data or the tokenizer belongs to another model"
        first = next((index for index, label in enumerate(labels) if label != MASKED), None)
        if first is None or len(ids) < 2:
            return Dropped(UNTRAINED if ids else EMPTY, len(ids))
        if len(ids) <= limit or self.excess == "split":
            return Document(ids, labels)
        if self.excess == "drop" or first >= limit:
            return Dropped(LONG if self.excess == "drop" else BEYOND, len(ids))
        return Document(ids[:limit], labels[:limit], len(ids) - limit)


def _segments(format: str, row: Mapping[str, str], prompted: bool) -> list[Segment]:
    """The strings of a row; ``prompted`` says whether prompts are trained on too."""
    if format == "prompt/completion":
        return [(row["prompt"], prompted), (row["completion"], True)]
    if format == "instruction":
        given = row.get("input", "").strip()
        context = f"### Input\n{given}\n\n" if given else ""
        prompt = f"### Instruction\n{row['instruction'].strip()}\n\n{context}### Response\n"
        return [(prompt, prompted), (row["output"], True)]
    segments: list[Segment] = []
    text = row["text"]
    while text.strip() and len(text) > _SEGMENT_CHARACTERS:
        cut = text.rfind("\n", 0, _SEGMENT_CHARACTERS) + 1 or _SEGMENT_CHARACTERS
        segments.append((text[:cut], True))
        text = text[cut:]
    return [*segments, (text, True)] if segments or text.strip() else []


def _ids_fault(row: Mapping[str, list[Any]]) -> str | None:
    ids, labels = row["input_ids"], row.get("labels", row["input_ids"])
    if len(labels) != len(ids):
        return f"field 'labels' has {len(labels)} entries, field 'input_ids' has {len(ids)}"
    if any(type(token) is not int or token < 0 for token in ids):
        return "field 'input_ids' holds something that is not a token id (a whole number >= 0)"
    for token, label in zip(ids, labels, strict=True):
        if label not in (token, MASKED):
            return f"field 'labels' holds {label!r}, neither its token nor {MASKED}; labels are not shifted"
    return None


def make_encoder(options: DataSection, source: Source, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Encoder:
    """The encoder for a source; raises DataError if options do not fit the format or a chat template is missing."""
    format, columns = detect(options, source)
    name = format.name
    prompted = name in ("prompt/completion", "instruction")
    if options.completion_only_loss and not prompted:
        need = "prompt/completion or instruction data"
        raise DataError(f"data.completion_only_loss: true needs {need}; {source.name} is {name} data")
    if options.assistant_only_loss and name != "messages":
        raise DataError(f"data.assistant_only_loss: true needs messages data; {source.name} is {name} data")
    template = find_template(options, tokenizer) if name == "messages" else None
    masks = prompted and options.completion_only_loss is not False
    return Encoder(options, format, columns, tokenizer, vocab_size, masks, template)
