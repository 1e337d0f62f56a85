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
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from deepstow.trainer.data.chats import NO_TEXT, SURROGATE, Fault, Template, find_template
from deepstow.trainer.data.chats import read as read_chat
from deepstow.trainer.data.packing import MASKED
from deepstow.trainer.data.report import BEYOND, EMPTY, LONG, UNTRAINED, Document, Dropped, Encoded
from deepstow.trainer.data.sources import Row, Source
from deepstow.trainer.errors import DataError, kind, nearest
from deepstow.trainer.formats.format import FORMATS, Format

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import DataSection

_MEDIA = ("image", "images", "video", "videos", "audio", "audios")


# Columns of well-known data sets that hold a prompt and its completion.
_PAIRS = (
    ("question", "answer"), ("query", "response"), ("prompt", "response"), ("instruction", "response"),
    ("problem", "solution"), ("question", "response"), ("input", "output"),
)  # fmt: skip


def detect(options: DataSection, source: Source) -> tuple[Format, dict[str, str]]:
    """The format of a source and the column of each of its fields. Raises DataError if no format fits, or several do,
    or ``columns`` names a missing column, or files have other fields.
    """
    first = source.tables[0]
    renamed: dict[str, str] = {str(name): column for name, column in options.columns.items()}
    listing = ", ".join(first.columns)
    absent = [
        f"data.columns: {name}: {column!r} is not in {first.name}; found: {listing}{nearest(column, first.columns)}"
        for name, column in renamed.items()
        if column not in first.columns
    ]
    if absent:
        raise DataError(absent)
    chosen = options.asked_format()
    formats = list(FORMATS.values()) if chosen is None else [chosen]
    fields = [name for format in formats for name in format.required + format.optional]
    refuse_unknown(renamed, fields if chosen is not None else (*fields, *renamed), f"format {formats[0].name}")
    also = {field: column for format in formats for column, field in format.also.items() if column in first.columns}
    mapped = also | {name: name for name in fields if name in first.columns} | renamed
    fits = [format for format in formats if all(name in mapped for name in format.required)]
    if len(fits) > 1 and renamed:
        fits = [format for format in fits if any(name in renamed for name in format.required)]
    if not fits:
        choices = ", ".join("+".join(format.required) for format in formats)
        what = f"no known format in columns {listing}; expected one of {choices}{_meant(first.columns)}"
        if chosen is not None:
            lacks = next(name for name in chosen.required if name not in mapped)
            hint = nearest(lacks, first.columns) or f"; data.columns says which column it is: {{{lacks}: ...}}"
            what = f"format {chosen.name} needs {choices}, no {lacks!r} in {listing}{hint}"
        raise DataError(f"{first.name}: {what}")
    if len(fits) > 1:
        names = " and ".join(format.name for format in fits)
        example = fits[0].required[0]
        cure = f"say which with data.format, or data.columns, e.g. {{{example}: {mapped[example]}}}"
        raise DataError(f"{first.name}: columns {listing} fit {names}; {cure}")
    format = fits[0]
    if format.makes == "conversation" and (media := [name for name in _MEDIA if name in first.columns]):
        raise DataError(
            f"{first.name}: column {media[0]!r}: only text is trained on, and these messages come with more"
        )
    columns = {name: mapped[name] for name in format.required + format.optional if name in mapped}
    for table in source.tables[1:]:
        for name in format.required:
            if columns[name] not in table.columns:
                present = ", ".join(table.columns)
                line = f"{table.name}: no column {columns[name]!r}, which {first.name} has; found: {present}"
                raise DataError(f"{line}; every file of a folder must have the same fields")
    return format, columns


def _meant(columns: Sequence[str]) -> str:
    """What these columns may be meant as: only whole formats, since half a guess trains on nonsense."""
    if {"chosen", "rejected"} & set(columns):
        return "; chosen and rejected are preference pairs: write task: dpo, orpo or reward"
    for prompt, completion in _PAIRS:
        if prompt in columns and completion in columns:
            return f"; did you mean data.columns: {{prompt: {prompt}, completion: {completion}}}?"
    for format in FORMATS.values():
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
    masks: bool  # prompts
    template: Template | None  # of a chat

    def encode(self, rows: Sequence[Row]) -> list[Encoded]:
        """One result per row. The strings of all rows are tokenised in one call, which uses all cores."""
        fields = [self._fields(row) for row in rows]
        documents = iter(self._tokenise([values for values in fields if not isinstance(values, str)]))
        encoded = [values if isinstance(values, str) else next(documents) for values in fields]
        results = [self._finish(outcome) if isinstance(outcome, Document) else outcome for outcome in encoded]
        return [f"{r.place}: {x}" if isinstance(x, str) else x for r, x in zip(rows, results, strict=True)]

    def _fields(self, row: Row) -> dict[str, Any] | str:
        """The fields of a row with their types checked, or a line about what is wrong."""
        if isinstance(row.values, str):
            return row.values
        values: dict[str, Any] = {}
        for name, column in self.columns.items():
            label = f"field {name!r}" if name == column else f"field {name!r} (column {column!r})"
            value = row.values.get(column)
            expected = self.format.kinds.get(name, str)
            if name in self.format.optional and (value is None or (name == "tools" and isinstance(value, list))):
                values |= {name: value} if value else {}
                continue
            if column not in row.values:
                return f"{label} is missing; found: {', '.join(row.values) or 'nothing'}"
            if not isinstance(value, expected):
                return f"{label} is {kind(value)}; every row needs {kind(expected())}"
            if isinstance(value, str) and SURROGATE.search(value):
                return f"{label} {NO_TEXT}"
            values[name] = value
        return values

    def _tokenise(self, rows: list[dict[str, Any]]) -> list[Encoded]:
        if self.format.makes == "conversation":
            return [self._chat(row) for row in rows]
        if self.format.makes == "tokens":
            token_rows = map(self.format.tokens, rows)
            return [tokens if isinstance(tokens, str) else Document(*tokens) for tokens in token_rows]
        segments = [self.format.segments(row) for row in rows]
        texts = [text for row in segments if not isinstance(row, str) for text, _ in row]
        ids = iter(self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else ())
        return [
            row if isinstance(row, str) else self._join([(next(ids), learnt or not self.masks) for _, learnt in row])
            for row in segments
        ]

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
        return self.options.excess_length_strategy or ("split" if self.format.splits else "truncate")

    def _chat(self, row: Mapping[str, Any]) -> Encoded:
        assert self.template is not None
        conversation = self.format.conversation(row)
        if isinstance(conversation, str) or not conversation["messages"]:
            return conversation if isinstance(conversation, str) else Dropped(EMPTY)
        assistant_only = self.options.assistant_only_loss
        try:
            chat = read_chat(conversation, self.columns.get("messages", "messages"), assistant_only)
            return Document(*self.template.encode(chat, assistant_only))
        except Fault as fault:
            return str(fault)

    def _finish(self, document: Document) -> Encoded:
        """Truncate or drop; refuse a token that the model has no embedding for."""
        ids = document.ids
        labels = [MASKED, *document.labels[1:]]
        limit = self.options.max_length
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


def refuse_unknown(columns: Mapping[str, str], fields: Sequence[str], owner: str) -> None:
    """Raise DataError if ``data.columns`` has a field that its ``owner``, named in the message, does not."""
    for name in columns:
        if name not in fields:
            allowed = ", ".join(fields)
            raise DataError(f"data.columns: {owner} has no field {name!r}; it has {allowed}{nearest(name, fields)}")


def make_encoder(options: DataSection, source: Source, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Encoder:
    """The encoder for a source; raises DataError if options do not fit the format or a chat template is missing."""
    format, columns = detect(options, source)
    name, chats = format.name, format.makes == "conversation"
    if options.completion_only_loss and not format.answers:
        need = f"{' or '.join(candidate.name for candidate in FORMATS.values() if candidate.answers)} data"
        raise DataError(f"data.completion_only_loss: true needs {need}; {source.name} is {name} data")
    if options.assistant_only_loss and not chats:
        raise DataError(f"data.assistant_only_loss: true needs messages data; {source.name} is {name} data")
    template = find_template(options, tokenizer) if chats else None
    masks = format.answers and options.completion_only_loss is not False
    return Encoder(options, format, columns, tokenizer, vocab_size, masks, template)
