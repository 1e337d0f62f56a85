"""The rows of a task that is not the prediction of the next token: read, checked, made and saved once.

Columns are the task's fields, or those that ``data.columns`` gives for them. What is wrong with rows is said once for
each cause, with the places of the first. Rows are saved as in ``prepare.py``: sealed, under a fingerprint of all that
decides them, and opened through a link in a folder of its own, where TRL may put what it makes of them for the next
run and for other ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from datasets import Dataset

from deepstow.strategies.state.commit import added_folder
from deepstow.strategies.state.sealed import digest_of, seal
from deepstow.trainer.data import packing
from deepstow.trainer.data.chats import NO_TEXT, SURROGATE, Fault, find_template, read
from deepstow.trainer.data.encoding import batched
from deepstow.trainer.data.formats import refuse_unknown
from deepstow.trainer.data.prepare import (
    KIND,
    Contents,
    Opened,
    Prepared,
    is_whole,
    open_eval,
    open_train,
    refuse_changed,
    strings,
    strings_in,
    tokenizer_content,
)
from deepstow.trainer.data.report import MANY, PATIENCE, Say, by_cause
from deepstow.trainer.data.sources import Row, Source
from deepstow.trainer.errors import DataError, first_line, kind, nearest, warning
from deepstow.trainer.registry import codes

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from deepstow.trainer.config.sections import DataSection, RunConfig
    from deepstow.trainer.tasks.task import Task

BATCH = 256


def prepare(
    task: Task,
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    model: PretrainedConfig,
    folder: Path,
    say: Say,
    opened: Opened,
    *,
    compares: bool,
) -> Prepared:
    """As ``deepstow.trainer.data.prepare.prepare``, for ``task``. ``model`` knows the labels."""
    data, seed = config.data, config.training.seed
    if chosen_template := data.chat_template or data.chat_template_path:
        tokenizer.chat_template = find_template(data, tokenizer).text
    sources, held_out = {"train": next(open_train(data))}, open_eval(data)
    sources |= {"eval": held_out} if held_out else {}
    options = {"task": task.name, "labels": model.label2id, "template": tokenizer.chat_template}
    options |= {"problem": model.problem_type} if model.problem_type else {}
    if code := codes([task, *(reader for source in sources.values() for reader in source.readers)]):
        options["code"] = code
    options |= {"columns": data.columns, "limit": data.limit, "lengths": lengths(data)}

    def contents(*, former: bool = False) -> Contents:
        marks = [digest_of((source.former if former else source.identity)(True)) for source in sources.values()]
        text = digest_of(tokenizer.chat_template) if tokenizer.chat_template else ""
        words = digest_of(tokenizer_content(tokenizer, former=former))
        key = digest_of([options, data.eval_fraction, seed, marks, words])[:16]
        return Contents(marks[0], marks[1] if held_out else "", words, text, key)

    before = [source.identity(False) for source in sources.values()]
    made_of = contents()
    opened(made_of, partial(contents, former=True))
    key = made_of.fingerprint
    for source in sources.values():
        columns = columns_of(task, data, source)
        source.say_unread(columns.values(), say)
        if line := task.note(columns):
            say(f"data: {source.name}: {line}")
    home = folder / key
    if home.is_dir() and (not compares or is_whole(home, say)):
        say(f"data: {sources['train'].name} is prepared already ({key})")
    else:
        with added_folder(home) as draft:
            for side, source in sources.items():
                features = _made(task, source, data, tokenizer, model, say)
                _write(draft, side, features, data.eval_fraction if side == "train" else 0.0, seed, say)
            refuse_changed(sources.values(), before)
            seal(draft, KIND, {"fingerprint": key})
    train, evaluation = (_open(home, folder / f"{key}.used", side) for side in ("train", "eval"))
    assert train is not None
    template = tokenizer.chat_template if chosen_template else None
    return Prepared(train, evaluation, task.name, made_of, chat_template=template)


def lengths(data: DataSection) -> tuple[int, int | None]:
    """All that decides how long rows are."""
    return data.max_length, data.max_target_length


def texts(task: Task, data: DataSection) -> Iterator[str]:
    """All strings of the training data, to train a tokenizer on."""
    source = next(open_train(data))
    columns = columns_of(task, data, source)
    text_columns = [column for name, column in columns.items() if name != "label"]
    yield from strings(source.rows(columns.values()), text_columns)


def columns_of(task: Task, data: DataSection, source: Source) -> dict[str, str]:
    """The column of each field. Raise DataError if one that every row needs is missing."""
    columns, mapping = dict[str, str](), {str(name): column for name, column in data.columns.items()}
    refuse_unknown(mapping, [field.name for field in task.fields], f"task {task.name}")
    for table in source.tables:
        present = ", ".join(table.columns)
        for name, _, required, _ in task.fields:
            column = mapping.get(name, name)
            if column in table.columns:
                columns[name] = column
            elif required or name in mapping:
                all_of = " + ".join(field.name for field in task.fields if field.required)
                hint = nearest(column, table.columns) or f"; data.columns says which column it is: {{{name}: ...}}"
                raise DataError(f"{table.name}: task {task.name} needs {all_of}, no {column!r} in {present}{hint}")
    return columns


def _made(
    task: Task, source: Source, data: DataSection, tokenizer: PreTrainedTokenizerBase, model: PretrainedConfig, say: Say
) -> Iterator[dict[str, Any]]:
    """The rows of a source; after the first bad one only others are looked for, and DataError has them."""
    columns = columns_of(task, data, source)
    bad = list[str]()
    ties = list[str]()
    num_after_bad = 0
    number = 0
    for batch in batched(islice(source.rows(list(columns.values())), data.limit), BATCH):
        checked = [(row.place, _fields(task, columns, row)) for row in batch]
        bad += [f"{place}: {values}" for place, values in checked if isinstance(values, str)]
        good = [(place, values) for place, values in checked if not isinstance(values, str)]
        features = task.features([values for _, values in good], tokenizer, model, data) if good else []
        speaks = {field.name for field in task.fields if field.chats}  # of those that may be messages
        spoken = [
            {name: value for name in speaks if isinstance(value := values.get(name), list)}
            for values in features
            if isinstance(values, dict)
        ]
        if any(spoken):
            template = find_template(data, tokenizer)
            for chat in spoken:  # TRL renders them, without bounds
                prompt = chat.pop("prompt", [])
                for messages in chat.values() or [[]]:
                    template.try_out([*prompt, *messages])
        pairs = zip(good, features, strict=True)
        number += len(features)
        ties += [place for place, values in good if "chosen" in values and values["chosen"] == values["rejected"]]
        bad += [f"{place}: {line}" for (place, _), line in pairs if isinstance(line, str)]
        if not bad:
            yield from (row for row in features if not isinstance(row, str))
        num_after_bad += len(batch) * bool(bad)
        if num_after_bad > PATIENCE:
            break
    if bad:
        raw_rows = (row.values for row in islice(source.rows(list(columns.values())), data.limit))
        fields = ({name: row.get(columns[name]) for name in columns} for row in raw_rows if not isinstance(row, str))
        cure = task.cure(fields, model)
        raise DataError([f"{source.name}: {cure}"] if cure else by_cause(bad))
    if ties:
        what = f"chosen and rejected are the same in {len(ties):,} of {number:,} rows, the first at {ties[0]}"
        if len(ties) == number:
            raise DataError(f"{source.name}: {what}: there is nothing to prefer; are the two columns the right ones?")
        line = f"data: {what}: no preference"
        say(warning(line) if len(ties) * MANY > number else line)


def _fields(task: Task, columns: Mapping[str, str], row: Row) -> dict[str, Any] | str:
    """The fields of a row with their types checked, or a line about what is wrong."""
    if isinstance(row.values, str):
        return row.values
    values = dict[str, Any]()
    for name, kinds, required, chats in task.fields:
        value = row.values.get(columns.get(name, name))
        if not required and name not in columns:
            continue
        if kinds and type(value) not in kinds:
            allowed = " or ".join(kind(choice()) for choice in kinds)
            return f"field {name!r} is {kind(value)}; every row needs {allowed}"
        if any(map(SURROGATE.search, strings_in(value))):
            return f"field {name!r} {NO_TEXT}"
        if chats and isinstance(value, list):
            try:
                value = read({"messages": value}, name, False).messages
            except Fault as fault:
                return str(fault)
        values[name] = value
    return values


def _write(draft: Path, side: str, rows: Iterable[dict[str, Any]], held_out: float, seed: int, say: Say) -> None:
    """Write the rows of ``side``, and a share of ``held_out`` of them as those of the evaluation."""
    unsplit = draft / "whole.arrow"
    _save(unsplit, rows)
    dataset = Dataset.from_file(str(unsplit))
    if not held_out:
        unsplit.rename(draft / f"{side}.arrow")
        say(f"data: {side}: {len(dataset):,} rows of {', '.join(dataset.column_names)}")
        return
    if len(dataset) == 1:
        raise DataError("data.eval_fraction: the data has one row; use data.eval_path")
    spans = packing.whole(np.broadcast_to(np.int32(1), len(dataset)))
    for name, chosen in zip((side, "eval"), packing.split(spans, held_out, seed), strict=True):
        _save(draft / f"{name}.arrow", dataset.select(chosen[:, 0]))
        say(f"data: {name}: {len(chosen):,} rows of {', '.join(dataset.column_names)}")
    unsplit.unlink()


def _save(path: Path, rows: Iterable[Any]) -> None:
    batches = batched(rows, BATCH)
    first = pa.Table.from_pylist(next(batches, []))
    if not first.num_rows:
        raise DataError("data.path: there are no rows")
    with pa.ipc.new_stream(str(path), first.schema) as writer:
        writer.write_table(first)
        for batch in batches:
            try:
                writer.write_table(pa.Table.from_pylist(batch, schema=first.schema))
            except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
                what = f"later rows are of another form than the first {BATCH} ({first_line(error)})"
                raise DataError(f"data.path: {what}; write all as text, or all as messages") from None


def _open(home: Path, used: Path, side: str) -> Dataset | None:
    if not (home / f"{side}.arrow").exists():
        return None
    link = used / side / "rows.arrow"
    link.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        link.symlink_to(Path("../..") / home.name / f"{side}.arrow")
    return Dataset.from_file(str(link))
