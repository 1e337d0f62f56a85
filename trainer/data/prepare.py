"""From the config's ``data`` section to rows: read, tokenise, split, pack, save once.

``prepare`` writes the rows as Arrow into ``folder/<fingerprint>/`` and maps them into memory, so that a second run and
every other rank open the same bytes. The fingerprint is a sha256 over what decides the rows (options, tokenizer,
contents of the files, seed), not over paths, times or versions of libraries; streamed files count by size and time. The
folder is sealed (``strategies/state/sealed.py``); data that is damaged is made anew, with one line that says so.

Documents are split into training and evaluation *before* they are cut or packed, so that none is on both sides. With
streaming (``stream.py``) only evaluation data is saved, packing sees a window of documents, and a bad row ends the run
when it is read.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute
from datasets import Dataset, IterableDataset, config
from transformers import PreTrainedTokenizerBase

from deepstow.strategies.state.commit import added_folder, remove
from deepstow.strategies.state.sealed import Damaged, damage, digest_of, seal
from deepstow.strategies.state.sealed import read as read_manifest
from deepstow.trainer.data import packing, report
from deepstow.trainer.data.chats import SURROGATE
from deepstow.trainer.data.encoding import Part, encoded, fitting
from deepstow.trainer.data.formats import Encoder, detect, make_encoder
from deepstow.trainer.data.mapped import Make, Numbers, makes
from deepstow.trainer.data.packing import MASKED, Spans, Tokens
from deepstow.trainer.data.report import Say, Tally
from deepstow.trainer.data.sources import Row, Source, open_source
from deepstow.trainer.data.stream import Stream, stream
from deepstow.trainer.errors import DataError, warning
from deepstow.trainer.model.hashes import hashes
from deepstow.trainer.registry import codes

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import DataSection


KIND = "data"  # in the manifest
REPORT = "report.json"
_LAYOUT = 1  # raise when the same inputs would give other rows
_SAVED = 1 << 19  # tokens written at once
# Keys that decide nothing where they are not set; and those that never do, or whose content is in the fingerprint.
_LATER = {"excess_length_strategy", "datasets", "limit", "max_target_length", "rows", "format", "reader"}
_NOT_CONTENT = {"path", "eval_path", "num_proc", "chat_template", "chat_template_path"}


class Contents(NamedTuple):
    """Hashes of what rows are made of, wherever it is: training and evaluation data that has a source of its own (or
    empty), tokenizer, the text of the chat template (or empty); and of all that decides rows, with options and seed.
    """

    sources: str = ""
    evaluation: str = ""
    tokenizer: str = ""
    template: str = ""
    fingerprint: str = ""


Opened = Callable[[Contents, Callable[[], Contents]], None]  # what is read now; and as former releases identified it


def opened_by_nobody(contents: Contents, former: Callable[[], Contents]) -> None:
    """Of a run that resumes none."""


@dataclass(frozen=True)
class Prepared:
    """Rows ready for the Collator, and what they were made of."""

    train: Dataset | IterableDataset | Stream
    eval: Dataset | None
    format: str
    contents: Contents
    chat_template: str | None = None  # that the config names; the tokenizer is exported with it
    plain: bool = False  # text, without answers that alone are trained on
    chats: bool = False  # written by a chat template
    report: Mapping[str, Any] | None = None  # what became of the rows; None where nothing was read ahead

    @property
    def fingerprint(self) -> str:
        """16 hex digits that differ for different rows."""
        return self.contents.fingerprint


def cache(otherwise: Path) -> Path:
    """Where this machine keeps prepared rows, for all runs: beside Hugging Face's own data; ``otherwise`` where that
    cannot be written.
    """
    shared = Path(config.HF_DATASETS_CACHE, "deepstow")
    with suppress(OSError):
        shared.mkdir(parents=True, exist_ok=True)
    return shared if os.access(shared, os.W_OK) else otherwise


def prepare(
    section: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    seed: int,
    folder: Path,
    say: Say,
    opened: Opened = opened_by_nobody,
    *,
    compares: bool = True,
) -> Prepared:
    """The run's data: opened if it is in ``folder``, otherwise prepared and saved there.

    ``seed`` is that of the split. ``opened`` is called with what will be read before any row is made, and may refuse.
    ``compares``: with its manifest; a machine's first rank does so for all.
    DataError has one line per problem, naming file, row and field.
    """
    sources, held_out = list(open_train(section)), open_eval(section)
    mix = [(data_set.weight or 1.0, data_set.token_share) for data_set in section.datasets or ()] or [(1.0, None)]
    train = [
        Part(source, make_encoder(options, source, tokenizer, vocab_size), *weights)
        for options, source, weights in zip(section.parts(), sources, mix, strict=True)
    ]
    encoder = train[0].encoder
    evaluation = [Part(held_out, make_encoder(section, held_out, tokenizer, vocab_size))] if held_out else []

    def contents(*, former: bool = False) -> Contents:
        identities = [part.source.former if former else part.source.identity for part in [*train, *evaluation]]
        marks = [identity(not section.streaming) for identity in identities]
        own, held = marks[: len(train)], marks[len(train) :]
        text = digest_of(encoder.template.text) if encoder.template else ""
        words = tokenizer_content(tokenizer, former=former)
        of_train, of_held = digest_of(own[0] if len(own) == 1 else own), digest_of(held) if held else ""
        return Contents(of_train, of_held, digest_of(words), text, fingerprint(train, seed, marks, words))

    saved_sources = [part.source for part in (evaluation if section.streaming else [*train, *evaluation])]
    before = [source.identity(False) for source in saved_sources]
    made_of = contents()
    opened(made_of, partial(contents, former=True))
    key = made_of.fingerprint
    for part in (*train, *evaluation):
        part.source.say_unread(part.encoder.columns.values(), say)
    home, names = folder / key, ", ".join(source.name for source in sources)
    if home.is_dir() and (not compares or is_whole(home, say)):
        say(f"data: {names} is prepared already ({key})")
    elif held_out or not section.streaming:
        with added_folder(home) as draft:
            written = [_write("eval", evaluation, draft, say)] if evaluation else []
            if not section.streaming:
                written.append(_write("train", train, draft, say, section.eval_fraction, seed))
            (draft / REPORT).write_text(json.dumps(report.content(section.max_length, written)))
            refuse_changed(saved_sources, before)
            seal(draft, KIND, {"fingerprint": key})
    rows = stream(train[0].source, encoder, say) if section.streaming else _open(home / "train.arrow")
    file_names = [path.name for path in home.iterdir()] if held_out or not section.streaming else []
    eval_rows = _open(home / "eval.arrow") if "eval.arrow" in file_names else None
    chosen_template = section.chat_template or section.chat_template_path
    template = encoder.template.text if encoder.template and chosen_template else None
    content = json.loads((home / REPORT).read_text()) if REPORT in file_names else None
    for line in (content or {}).get("warnings", ()):
        say(warning(line))
    formats = " + ".join(dict.fromkeys(part.encoder.format.name for part in train))
    forms = [part.encoder.format for part in train]
    plain, chats = all(form.plain for form in forms), any(form.makes == "conversation" for form in forms)
    return Prepared(rows, eval_rows, formats, made_of, template, plain, chats, content)


def refuse_changed(sources: Iterable[Source], before: Iterable[list[str]]) -> None:
    """Raise DataError if a file is not of the size or time that it was ``before``: its rows would be kept, under the
    hash of what it was then.
    """
    for source, former in zip(sources, before, strict=True):
        if source.identity(False) != former:
            raise DataError(f"{source.name}: it has changed while it was read; start again when nobody writes to it")


def is_whole(home: Path, say: Say, kind: str = KIND) -> bool:
    """Whether the prepared data in ``home`` is what was written. Data that is not is deleted, and made anew."""
    try:
        lines = damage(home, read_manifest(home, kind))
    except Damaged as error:
        lines = [str(error)]
    if lines:
        say(f"{kind}: {home} is damaged ({lines[0]}), so it is made anew")
        try:
            remove(home)
        except OSError as error:
            raise DataError(f"{home}: damaged, and cannot be deleted: {error.strerror}; remove the folder") from None
    return not lines


def open_train(section: DataSection) -> Iterator[Source]:
    """The source of the training rows of each data set."""
    for index, part in enumerate(section.parts()):
        assert part.path is not None
        key = "data." if section.datasets is None else f"data.datasets.{index}."
        yield open_source(part.path, part.name, part.split, section.streaming, key, part.asked_reader())


def open_eval(section: DataSection) -> Source | None:
    """The source of the evaluation rows, if they are apart from the training rows."""
    path = section.eval_path
    name = None
    split = section.eval_split or section.split
    if path is None:
        if section.eval_split is None:
            return None
        path, name = section.path, section.name
    assert path is not None
    return open_source(path, name, split, False, "data.eval_", section.asked_reader())


def texts(section: DataSection) -> Iterator[str]:
    """All strings of the training data, to train a tokenizer on."""
    for part, source in zip(section.parts(), open_train(section), strict=True):
        columns = detect(part, source)[1].values()
        yield from strings(itertools.islice(source.rows(columns), part.limit), columns)


def mark(section: DataSection) -> str:
    """What identifies the training data, wherever it is, and how much of it is read."""
    marks = [source.identity(not section.streaming) for source in open_train(section)]
    return digest_of([marks, [[part.limit, sorted(map(str, part.columns.items()))] for part in section.parts()]])


def strings(rows: Iterable[Row], columns: Collection[str]) -> Iterator[str]:
    """All strings in these ``columns``, those of messages among them, but for what is refused when rows are made."""
    for row in rows:
        values = {} if isinstance(row.values, str) else row.values
        for value in map(values.get, columns):
            yield from (text for text in strings_in(value) if not SURROGATE.search(text))


def strings_in(value: Any) -> Iterator[str]:
    """The strings of one value of a row, which may be a list of messages."""
    for item in value if isinstance(value, list) else [value]:
        text = item.get("content", item.get("value")) if isinstance(item, dict) else item
        if isinstance(text, str) and text:
            yield text


def fingerprint(parts: Sequence[Part], seed: int, marks: Sequence[list[str]], words: list[Any]) -> str:
    """16 hex digits that differ for different rows; ``marks`` are the identity of each source, ``words`` the content
    of the tokenizer.
    """
    encoder = parts[0].encoder
    content = {
        "layout": _LAYOUT,
        "options": _options(encoder),
        "template": encoder.template and encoder.template.text,
        "tokenizer": words,
        "vocab_size": encoder.vocab_size,
        "seed": seed,
        "sources": list(marks),
    }
    if encoder.options.assistant_only_loss and encoder.template and encoder.template.marks:
        content["answers"] = "by characters"  # before, by Transformers alone
    if code := codes(plugin for part in parts for plugin in (part.encoder.format, *part.source.readers)):
        content["code"] = code
    if len(parts) > 1 or parts[0].weight != 1:
        content["mix"] = [[_options(part.encoder), part.weight, part.token_share] for part in parts]
    return digest_of(content)[:16]


def _options(encoder: Encoder) -> dict[str, Any]:
    options = encoder.options.model_dump(mode="json").items()
    return {key: value for key, value in options if key not in _NOT_CONTENT and not (value is None and key in _LATER)}


def tokenizer_content(tokenizer: PreTrainedTokenizerBase, *, former: bool = False) -> list[Any]:
    """All that decides what a tokenizer makes of a text; of one that Python computes its own files, and its class where
    that came with it. ``former`` releases knew the tokens alone of such a one.
    """
    special = sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return [backend.to_str(), special]
    content = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), special]
    if former:
        return content
    with tempfile.TemporaryDirectory() as folder, suppress(NotImplementedError):
        tokenizer.save_vocabulary(folder)
        content.append(hashes(sorted(path for path in Path(folder).rglob("*") if path.is_file())))
    if type(tokenizer).__module__.startswith("transformers_modules."):
        content.append(inspect.getsource(type(tokenizer)))
    return content


def _write(
    side: str, parts: Sequence[Part], draft: Path, say: Say, held_out: float = 0.0, seed: int = 0
) -> tuple[list[Tally], list[str]]:
    """Tokenise the ``parts``, mix them and write the rows of ``side``.arrow; a share of ``held_out`` of each goes to
    eval.arrow. What became of their rows, and a line for each file.
    """
    path, options = draft / "documents.arrow", parts[0].encoder.options
    make = makes(draft)
    tallies = [_tally(part, make) for part in parts]
    good = (tally.documents(encoded(part, options.num_proc), say) for part, tally in zip(parts, tallies, strict=True))
    documents = itertools.chain.from_iterable(good)
    as_arrays = (np.array([document.ids, document.labels], np.int32) for document in documents)  # a tenth of the lists
    _save(path, ({"input_ids": ids, "labels": labels} for ids, labels in as_arrays))
    table = _open(path).data
    path.unlink()  # it exists as long as it is mapped
    ids, labels = table.column("input_ids"), table.column("labels")

    def read(document: int) -> tuple[Tokens, Tokens]:
        return ids[document].values.to_numpy(), labels[document].values.to_numpy()

    sides: dict[str, list[Spans]] = {side: []}
    lengths, at = make((len(ids),), np.int32), 0
    for chunk in ids.chunks:
        lengths[at : at + len(chunk)] = pa.compute.list_value_length(chunk).to_numpy()
        at += len(chunk)
    all_spans = packing.whole(lengths, make)
    for part, spans in zip(parts, np.split(all_spans, np.cumsum([tally.rows for tally in tallies])[:-1]), strict=True):
        if held_out:
            if len(spans) == 1 and (not part.encoder.format.splits or spans[0, 2] < 4):
                raise DataError(f"data.eval_fraction: {part.source.name} has one row; use data.eval_path")
            spans, held_spans = packing.split(spans, held_out, seed, make)
            sides.setdefault("eval", []).append(fitting(part.encoder, held_spans, read))
        sides[side].append(fitting(part.encoder, spans, read))
    lines = []
    if len(parts) > 1 or parts[0].weight != 1:
        sides[side], line = _mixed(parts, sides[side], seed)
        say(line)
        lines.append(line)
    for name, pieces in sorted(sides.items()):
        spans = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        packed = packing.rows(spans, read, options.max_length, options.packing, make)
        rows, tokens, trained = _save(draft / f"{name}.arrow", packed)
        share = f"{trained:,} of {tokens:,} tokens trained on"
        lines.append(f"data: {name}: {rows:,} rows of up to {options.max_length:,} tokens; {share}")
        say(lines[-1])
    return tallies, lines


def _tally(part: Part, make: Make) -> Tally:
    options, total = part.encoder.options, part.source.count() if sys.stderr.isatty() else None
    total = options.limit if total is None else min(total, options.limit or total)
    return Tally(part.source.name, options.max_length, part.encoder.excess, total, hashes=Numbers(make))


def _mixed(parts: Sequence[Part], spans: list[Spans], seed: int) -> tuple[list[Spans], str]:
    """The spans of each part by its weight, and a line that says how many tokens of the mix it has."""
    shares = [part.token_share for part in parts if part.token_share is not None]
    weights = [part.weight for part in parts]
    if shares:
        weights = packing.weights_of(shares, [_tokens(part_spans) for part_spans in spans])
    weighted = [packing.weighted(part_spans, weight, seed) for part_spans, weight in zip(spans, weights, strict=True)]
    words, total = [], sum(map(_tokens, weighted))
    for part, weight, part_spans in zip(parts, weights, weighted, strict=True):
        if not len(part_spans):
            raise DataError(f"{part.source.name}: {weight:.3g} times it is no row; give it more weight, or take it out")
        words.append(f"{part.source.name} {_tokens(part_spans) / total:.1%} ({weight:.3g} times)")
    return weighted, f"data: mix of {total:,} tokens: {', '.join(words)}"


def _tokens(spans: Spans) -> int:
    return int((spans[:, 2] - spans[:, 1]).sum(dtype=np.int64))


_TOKENS = pa.list_(pa.int32())


def _save(path: Path, rows: Iterable[dict[str, Any]]) -> tuple[int, int, int]:
    """Write rows of token lists as an Arrow stream, batch by batch; how many rows, tokens, and tokens trained on."""
    num_rows = tokens = trained = 0
    writer: pa.RecordBatchStreamWriter | None = None
    with path.open("wb") as file:  # of one that it opens itself Arrow ignores that closing fails
        for batch in _by_tokens(rows):
            columns = {name: pa.array([row[name] for row in batch], type=_TOKENS) for name in batch[0]}
            table = pa.record_batch(columns)
            writer = writer or pa.ipc.new_stream(file, table.schema)
            writer.write_batch(table)
            labels = columns["labels"].flatten().to_numpy()
            num_rows, tokens = num_rows + len(batch), tokens + len(labels)
            trained += int((labels != MASKED).sum())
        assert writer is not None, "a source without rows is refused before this"
        writer.close()
    return num_rows, tokens, trained


def _by_tokens(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Batches of about as many tokens each: a file of small ones takes memory for each of them when it is open."""
    batch, size = [], 0
    for row in rows:
        batch.append(row)
        size += len(row["labels"]) + 64  # as much as its arrays take besides
        if size >= _SAVED:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _open(path: Path) -> Dataset:
    return Dataset.from_file(str(path))
