"""From the config's ``data`` section to rows: read, tokenise, split, pack, save once.

``prepare`` writes the rows as Arrow into ``folder/<fingerprint>/`` and maps them into memory, so that a second run and
every other rank open the same bytes. The fingerprint is a sha256 over what decides the rows (options, tokenizer,
contents of the files, seed), not over paths, times or versions of libraries; streamed files count by size and time. The
folder is sealed (``strategies/core/sealed.py``); data that is damaged is made anew, with one line that says so.

Documents are split into training and evaluation *before* they are cut or packed, so that none is on both sides. With
streaming only evaluation data is saved, packing sees a window of documents, and a bad row ends the run when it is read.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute
from datasets import Dataset, Features, IterableDataset, List, Value
from transformers import PreTrainedTokenizerBase

from strategies.core.commit import added_folder, remove
from strategies.core.sealed import Damaged, damage, digest_of, seal
from strategies.core.sealed import read as read_manifest
from trainer.data import packing
from trainer.data.formats import Document, Encoded, Encoder, detect, make_encoder
from trainer.data.packing import MASKED, Span, Tokens
from trainer.data.sources import Row, Source, open_source
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.config.sections import DataSection

Say = Callable[[str], None]
T = TypeVar("T")

KIND = "data"  # in the manifest
_LAYOUT = 1  # raise when the same inputs would give other rows
_BATCH = 256  # rows tokenised in one call, documents written at once
_WINDOW = 512  # documents that streaming packs together
_PATIENCE = 10_000  # rows still read after the first bad one, to report the others with it
# Keys that do not decide the rows, or whose content is part of the fingerprint.
_NOT_CONTENT = {"path", "eval_path", "num_proc", "chat_template", "chat_template_path"}


@dataclass(frozen=True)
class Prepared:
    """Rows ready for the Collator. ``sources`` and ``tokenizer`` are hashes of the contents that they were made of."""

    train: Dataset | IterableDataset
    eval: Dataset | None
    fingerprint: str
    format: str
    sources: str = ""
    tokenizer: str = ""
    chat_template: str | None = None  # that the config names; the tokenizer is exported with it


def prepare(
    section: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    seed: int,
    folder: Path,
    say: Say,
    opened: Callable[[str, str, str], None] = lambda sources, tokenizer, fingerprint: None,
    *,
    compares: bool = True,
) -> Prepared:
    """The run's data: opened if it is in ``folder``, otherwise prepared and saved there.

    ``seed`` is that of the split. ``opened`` is called with the hashes of sources and tokenizer and the fingerprint
    before any row is made, and may refuse. ``compares``: with its manifest; a machine's first rank does so for all.
    DataError has one line per problem, naming file, row and field.
    """
    train, held_out = open_train(section), _open_eval(section)
    encoder = make_encoder(section, train, tokenizer, vocab_size)
    eval_encoder = make_encoder(section, held_out, tokenizer, vocab_size) if held_out else None
    marks = [source.identity(not section.streaming) for source in ([train, held_out] if held_out else [train])]
    key, made_of = fingerprint(encoder, seed, marks), (digest_of(marks[0]), digest_of(_tokenizer_content(tokenizer)))
    opened(*made_of, key)
    home = folder / key
    if home.is_dir() and (not compares or _is_whole(home, say)):
        say(f"data: {train.name} is prepared already ({key})")
    elif held_out or not section.streaming:
        with added_folder(home) as draft:
            if held_out and eval_encoder:
                _write("eval", held_out, eval_encoder, draft, say)
            if not section.streaming:
                _write("train", train, encoder, draft, say, section.eval_fraction, seed)
            seal(draft, KIND, {"fingerprint": key})
    rows = _stream(train, encoder) if section.streaming else _open(home / "train.arrow")
    evaluation = _open(home / "eval.arrow") if (home / "eval.arrow").exists() else None
    named = section.chat_template or section.chat_template_path
    template = encoder.template.text if encoder.template and named else None
    return Prepared(rows, evaluation, key, encoder.format.name, *made_of, template)


def _is_whole(home: Path, say: Say) -> bool:
    """Whether the prepared data in ``home`` is what was written. Data that is not is deleted, and made anew."""
    try:
        lines = damage(home, read_manifest(home, KIND))
    except Damaged as error:
        lines = [str(error)]
    if lines:
        say(f"data: {home} is damaged ({lines[0]}), so the rows are made anew")
        try:
            remove(home)
        except OSError as error:
            raise DataError(f"{home}: damaged, and cannot be deleted: {error.strerror}; remove the folder") from None
    return not lines


def open_train(section: DataSection) -> Source:
    """The source of the training rows."""
    return open_source(section.path, section.name, section.split, section.streaming)


def _open_eval(section: DataSection) -> Source | None:
    path, name, split = section.eval_path, None, section.eval_split or section.split
    if path is None:
        if section.eval_split is None:
            return None
        path, name = section.path, section.name
    return open_source(path, name, split, streaming=False, key="data.eval_")


def texts(section: DataSection) -> Iterator[str]:
    """All strings of the training data, to train a tokenizer on."""
    source = open_train(section)
    _, columns = detect(section, source)
    for row in source.rows(columns.values()):
        values = {} if isinstance(row.values, str) else row.values
        for value in map(values.get, columns.values()):
            for item in value if isinstance(value, list) else [value]:
                text = item.get("content", item.get("value")) if isinstance(item, dict) else item
                if isinstance(text, str) and text:
                    yield text


def fingerprint(encoder: Encoder, seed: int, marks: Sequence[list[str]]) -> str:
    """16 hex digits that differ for different rows; ``marks`` are the identity of each source."""
    content = {
        "layout": _LAYOUT,
        "options": {k: v for k, v in encoder.options.model_dump(mode="json").items() if k not in _NOT_CONTENT},
        "template": encoder.template and encoder.template.text,
        "tokenizer": _tokenizer_content(encoder.tokenizer),
        "vocab_size": encoder.vocab_size,
        "seed": seed,
        "sources": list(marks),
    }
    return digest_of(content)[:16]


def _tokenizer_content(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    special = sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return [backend.to_str(), special]
    return [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), special]


def _write(
    side: str, source: Source, encoder: Encoder, draft: Path, say: Say, held_out: float = 0.0, seed: int = 0
) -> None:
    """Tokenise ``source`` and write the rows of ``side``.arrow; a share of ``held_out`` of them to eval.arrow."""
    path = draft / "documents.arrow"
    good = _good(_encode(encoder, source, encoder.options.num_proc), source, say)
    _save(path, ({"input_ids": document.ids, "labels": document.labels} for document in good))
    table = _open(path).data
    path.unlink()  # it exists as long as it is mapped
    ids, labels = table.column("input_ids"), table.column("labels")

    def read(document: int) -> tuple[Tokens, Tokens]:
        return ids[document].values.to_numpy(), labels[document].values.to_numpy()

    sides = {side: packing.whole(pa.compute.list_value_length(ids).to_pylist())}
    if held_out:
        if len(spans := sides[side]) == 1 and (encoder.format.name != "text" or spans[0].stop < 4):
            raise DataError(f"data.eval_fraction: {source.name} has one row; use data.eval_path")
        sides[side], sides["eval"] = packing.split(spans, held_out, seed)
    for name, spans in sorted(sides.items()):
        rows, tokens, trained = _save(draft / f"{name}.arrow", _rows(encoder, spans, read))
        share = f"{trained:,} of {tokens:,} tokens trained on"
        say(f"data: {name}: {rows:,} rows of up to {encoder.options.max_length:,} tokens; {share}")


def _rows(
    encoder: Encoder, spans: list[Span], read: Callable[[int], tuple[Tokens, Tokens]]
) -> Iterator[dict[str, Tokens]]:
    """The rows of some spans. Only text is cut into several: half an answer is not a sample."""
    if encoder.format.name == "text":
        spans = packing.chunk(spans, encoder.options.max_length)
    return packing.rows(spans, read, encoder.options.max_length, encoder.options.packing)


_TOKENS = pa.list_(pa.int32())


def _save(path: Path, rows: Iterable[dict[str, Any]]) -> tuple[int, int, int]:
    """Write rows of token lists as an Arrow stream, batch by batch; how many rows, tokens, and tokens trained on."""
    num_rows = tokens = trained = 0
    writer: pa.RecordBatchStreamWriter | None = None
    for batch in _batched(rows, _BATCH):
        columns = {name: pa.array([row[name] for row in batch], type=_TOKENS) for name in batch[0]}
        table = pa.record_batch(columns)
        writer = writer or pa.ipc.new_stream(str(path), table.schema)
        writer.write_batch(table)
        labels = columns["labels"].flatten().to_numpy()
        num_rows, tokens = num_rows + len(batch), tokens + len(labels)
        trained += int((labels != MASKED).sum())
    assert writer is not None, "a source without rows is refused before this"
    writer.close()
    return num_rows, tokens, trained


def _open(path: Path) -> Dataset:
    return Dataset.from_file(str(path))


def _encode(encoder: Encoder, source: Source, num_proc: int | None) -> Iterator[Encoded]:
    """One result per row, in order. A fast tokenizer uses all cores; ``num_proc`` is for the others."""
    batches = _batched(source.rows(list(encoder.columns.values())), _BATCH)
    if num_proc is None or num_proc == 1:
        yield from itertools.chain.from_iterable(map(encoder.encode, batches))
        return
    # Spawned, not forked: a fork of a process that holds threads or a process group can hang.
    with ProcessPoolExecutor(num_proc, get_context("spawn"), _start_worker, (encoder,)) as pool:
        try:
            for group in _batched(batches, 4 * num_proc):  # bounds what is read ahead
                yield from itertools.chain.from_iterable(pool.map(_work, group))
        except BrokenProcessPool:
            raise DataError("data.num_proc: a tokenising process died, out of memory?; use fewer") from None


_worker: Encoder  # of a worker process, set once by its initializer instead of being sent with every batch


def _start_worker(encoder: Encoder) -> None:
    global _worker
    _worker = encoder


def _work(rows: list[Row]) -> list[Encoded]:
    return _worker.encode(rows)


def _good(results: Iterable[Encoded], source: Source, say: Say) -> Iterator[Document]:
    """Yield documents; after the first bad row only collect further bad rows, and raise DataError with them."""
    bad: list[str] = []
    num_empty = num_cut = num_good = num_after_bad = 0
    spoken = time.monotonic()
    for result in results:
        if isinstance(result, str):
            bad.append(result)
        elif result is None:
            num_empty += 1
        elif not bad:
            num_good += 1
            num_cut += result.num_cut > 0
            yield result
        num_after_bad += bool(bad)
        if num_after_bad > _PATIENCE:
            break
        if time.monotonic() - spoken > 10:
            spoken = time.monotonic()
            say(f"data: {source.name}: {num_good:,} rows tokenised")
    if bad:
        raise DataError(bad if len(bad) <= 5 else [*bad[:5], f"... and {len(bad) - 5:,} more bad rows"])
    if num_good == 0:
        reason = f"all {num_empty} rows are empty text" if num_empty else "there are no rows"
        raise DataError(f"{source.name}: {reason}")
    notes = [f"{num_empty:,} empty rows skipped"] * (num_empty > 0)
    notes += [f"{num_cut:,} rows cut to data.max_length"] * (num_cut > 0)
    say("; ".join([f"data: {source.name}: {num_good:,} rows tokenised", *notes]))


def _stream(source: Source, encoder: Encoder) -> IterableDataset:
    names = ["input_ids", "labels", "position_ids"] if encoder.options.packing else ["input_ids", "labels"]
    features = Features({name: List(Value("int32")) for name in names})
    arguments = {"source": source, "encoder": encoder}
    return IterableDataset.from_generator(_stream_rows, features=features, gen_kwargs=arguments)


def _stream_rows(source: Source, encoder: Encoder) -> Iterator[dict[str, Tokens]]:
    """Rows one by one; documents of one window may be packed together."""

    def documents() -> Iterator[tuple[Tokens, Tokens]]:
        for result in _encode(encoder, source, None):
            if isinstance(result, str):
                raise DataError(result)
            if result is not None:
                yield np.array(result.ids, np.int32), np.array(result.labels, np.int32)

    for window in _batched(documents(), _WINDOW if encoder.options.packing else 1):
        yield from _rows(encoder, packing.whole([len(ids) for ids, _ in window]), window.__getitem__)


def _batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
