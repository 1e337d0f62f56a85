"""Training state on disk, in one format for all strategies: an index, and spans of named parameters (``spans.py``).

A ``Holder`` is the state of one strategy on one rank: what it has, as views of where it is, and places to fill. Loading
fills what each rank needs, from whatever ranks and strategy have saved it. Files, kinds of tensors and numbers are
listed in docs/checkpoint-format.md. Ranks write without talking to each other, so that none waits for another that
could not write.

Invariant. ``opened`` finds every element of every tensor in the files once, and all names, sizes and counts agree, or
it refuses; hashes are checked by wish. A writer opens what was written before it counts as saved.

Refused: hyperparameters that are not JSON; ranks that disagree about a number; files of another format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt
from torch import Tensor

from deepstow.strategies.state import spans
from deepstow.strategies.state.blocks import Columns
from deepstow.strategies.state.sealed import Damaged, File, M, Size, read_signed, signed, size_and_hash
from deepstow.strategies.state.spans import WEIGHT, Span, SpanError, Store

VERSION = 2
INDEX = "optimizer.json"
FILE_NAME = re.compile(r"^optimizer-\d{5}-of-\d{5}(-\d{3,}\.safetensors|\.json)$")
MASTER = "master"
AGAIN = "save again, or load an earlier save"


@dataclass(frozen=True, slots=True)
class Described:
    """What is saved of a parameter: its shape, the dtype of its weight, numbers (none if it was never updated), and the
    shapes of tensors by kind.
    """

    shape: tuple[Size, ...]
    dtype: str
    numbers: Mapping[str, StrictInt | StrictFloat]
    tensors: Mapping[str, tuple[Size, ...]]


class _Record(BaseModel):
    version: Literal[2]
    parameters: dict[str, Described]
    files: dict[Annotated[str, Field(pattern=FILE_NAME.pattern)], File]


class _Group(BaseModel):
    model_config = ConfigDict(extra="allow")

    params: list[str]


class _Index(BaseModel):
    version: Literal[2]
    ranks: Annotated[int, Field(strict=True, gt=0, lt=10**5)]
    rule: str
    param_groups: list[_Group]
    extra: dict[str, Any]


class Holder(Protocol):
    """The training state of one strategy on one rank."""

    rule: str

    def groups(self) -> list[dict[str, Any]]:
        """Hyperparameters; ``params`` are names. The same on all ranks."""

    def entries(self) -> Iterator[tuple[str, Described, list[Span]]]:
        """What this rank writes, by parameter: views of where the state is."""

    def misfits(self, saved: Saved) -> Iterator[str]:
        """Why ``saved`` cannot be filled in, one line each."""

    def fill(self, saved: Saved) -> None:
        """Take over counts and tensors, except weights and masters."""

    def fill_weights(self, weights: Weights) -> None:
        """Take over weights, and masters where there are any."""


@dataclass(frozen=True, slots=True)
class Saved:
    """An opened save: what the index says, and what the files hold."""

    rule: str
    param_groups: list[dict[str, Any]]
    parameters: Mapping[str, Described]
    extra: Mapping[str, Any]
    store: Store

    def trained(self) -> set[str]:
        return {name for group in self.param_groups for name in group["params"]}


class Weights:
    """The exact weights of a save: masters, weights among the spans, or those of files with whole weights."""

    def __init__(self, saved: Store, files: Store | None, aliases: Mapping[str, Sequence[str]]) -> None:
        """``files`` have whole weights by name; ``aliases``: all names of a tied weight by each of them."""
        self._saved = saved
        self._files = files
        self._aliases = aliases

    def find(self, name: str) -> tuple[Store, str, str] | None:
        """Where the exact weight is: what holds it, its name there, and its kind."""
        for candidate in (name, *self._aliases.get(name, ())):
            for store, kind in ((self._saved, MASTER), (self._saved, WEIGHT), (self._files, WEIGHT)):
                if store is not None and (candidate, kind) in store:
                    return store, candidate, kind
        return None

    def faults(self, name: str, shape: Sequence[int]) -> Iterator[str]:
        place = self.find(name)
        if place is None:
            yield f"{name}: its weight is in no file"
        else:
            yield from place[0].faults(place[1], place[2], shape)

    def read(self, name: str, start: int, into: Tensor, columns: Columns | None = None) -> None:
        """Fill ``into`` with the elements from ``start`` on, of ``columns`` alone if given, rounded to its dtype."""
        place = self.find(name)
        if place is None:
            raise SpanError(f"{name}: its weight is in no file")
        place[0].read(place[1], place[2], start, into, columns=columns, rounding=True)


# --- writing ---------------------------------------------------------------------------------------------------------


def write_part(folder: Path, holder: Holder, further: Iterable[Span], *, rank: int, ranks: int, hashed: bool) -> None:
    """Write what this rank holds, and ``further`` spans, into ``folder``, which exists."""
    described: dict[str, Described] = {}
    all_spans: list[Span] = []
    for name, parameter, own_spans in holder.entries():
        described[name] = parameter
        all_spans += own_spans
    for span in further:
        all_spans.append(span)
        former = described.get(span.name, Described(span.shape, _name_of(span.tensor), {}, {}))
        tensors = {**former.tensors, span.kind: span.shape}
        described[span.name] = Described(former.shape, former.dtype, former.numbers, tensors)
    files: dict[str, Any] = {}
    for number, group in enumerate(spans.parts(all_spans), start=1):
        name = f"optimizer-{rank:05}-of-{ranks:05}-{number:03}.safetensors"
        size, digest = spans.write(folder / name, group, hashed=hashed)
        files[name] = {"bytes": size, "sha256": digest}
    parameters = {name: asdict(parameter) for name, parameter in described.items()}
    content = {"version": VERSION, "parameters": parameters, "files": files}
    (folder / _record_of(rank, ranks)).write_text(signed(content))


def write_index(folder: Path, holder: Holder, ranks: int, extra: Mapping[str, Any] | None = None) -> None:
    """Write what concerns all ranks; for the first one. Raise ValueError if a hyperparameter is not JSON."""
    groups = holder.groups()
    check_json(groups)
    head = {"version": VERSION, "ranks": ranks, "rule": holder.rule, "param_groups": groups, "extra": dict(extra or {})}
    (folder / INDEX).write_text(signed(head))


def _record_of(rank: int, ranks: int) -> str:
    return f"optimizer-{rank:05}-of-{ranks:05}.json"


def _name_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _merged(records: Sequence[_Record]) -> dict[str, Described]:
    merged: dict[str, Described] = {}
    for name, second in ((name, second) for record in records for name, second in record.parameters.items()):
        first = merged.setdefault(name, second)
        held = [side for side in (first, second) if set(side.tensors) != {WEIGHT}]  # a rank may have written that alone
        if (first.shape, first.dtype) != (second.shape, second.dtype) or len({str(side.numbers) for side in held}) > 1:
            raise SpanError(f"{name}: ranks disagree about it: {first} and {second}")
        numbers = held[0].numbers if held else {}
        merged[name] = Described(second.shape, second.dtype, numbers, {**first.tensors, **second.tensors})
    return merged


def _faults(parameters: Mapping[str, Described], store: Store) -> Iterator[str]:
    """What the files lack or have too much of, one line each."""
    for name, parameter in parameters.items():
        for kind, shape in parameter.tensors.items():
            yield from store.faults(name, kind, shape)
    for name, kind in store:
        if name not in parameters or kind not in parameters[name].tensors:
            yield f"{name}.{kind}: in the files, and no rank lists it"


def check_json(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if a hyperparameter cannot be written as JSON."""
    for number, group in enumerate(groups):
        for key, value in group.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError):
                raise ValueError(
                    f"param_groups[{number}][{key!r}] is {value!r}, which JSON cannot hold: use finite numbers, "
                    f"strings, lists"
                ) from None


# --- reading ---------------------------------------------------------------------------------------------------------


def opened(folder: Path, *, hashes: bool = False) -> Saved:
    """Open a save. Nothing of it is trusted: names, sizes, ranges and counts are checked, and hashes by wish. Raise
    SpanError if there is none, if it has another format, or is damaged: a line for each file.
    """
    if not (folder / INDEX).is_file():
        raise SpanError(f"{folder}: no {INDEX} in it; name a folder that optimizer.save() has written")
    index = _signed(folder / INDEX, _Index)
    records = [_signed(folder / _record_of(rank, index.ranks), _Record) for rank in range(index.ranks)]
    files = {name: file for record in records for name, file in record.files.items()}
    if complaints := list(_damaged(folder, files, hashes=hashes)):
        raise SpanError("\n  ".join(complaints))
    parameters, store = _merged(records), Store.of(folder / name for name in files)
    trained = {name for group in index.param_groups for name in group.params}
    complaints = [f"{name}: no rank has written its state; {AGAIN}" for name in sorted(trained - parameters.keys())]
    complaints += [f"{line}; {AGAIN}" for line in _faults(parameters, store)]
    if complaints:
        raise SpanError(complaints[0])
    groups = [group.model_dump() for group in index.param_groups]
    return Saved(index.rule, groups, parameters, index.extra, store)


def _signed(path: Path, kind: type[M]) -> M:
    """What a signed file says. Raise SpanError if it is missing, has another format, or is damaged."""
    try:
        if not path.is_symlink():
            return read_signed(path, kind)
    except FileNotFoundError:
        pass
    except Damaged as error:
        raise SpanError(f"{path} {error}; {AGAIN}") from None
    raise SpanError(f"{path}: missing; {AGAIN}")


def _damaged(folder: Path, files: Mapping[str, File], *, hashes: bool) -> Iterator[str]:
    """Why files that a rank has listed cannot be read, one line each."""
    for name, file in files.items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            yield f"{path}: missing; {AGAIN}"
        elif path.stat().st_size != file.bytes:
            yield f"{path}: {path.stat().st_size} bytes, {file.bytes} were written; {AGAIN}"
        elif hashes and file.sha256 is not None and size_and_hash(path)[1] != file.sha256:
            yield f"{path}: damaged, its hash is another; {AGAIN}"


def other_model(saved: Saved, expected: Mapping[str, tuple[int, ...]], rule: str) -> Iterator[str]:
    """Why a save is of another model or rule, one line each. ``expected``: shapes of trained parameters by name."""
    if saved.rule != rule:
        yield f"saved by {saved.rule}, this optimizer is {rule}: train on with the rule that saved it"
    trained = saved.trained()
    for name in sorted(expected.keys() - trained):
        yield f"{name}: not in the save; train the same parameters as the run that saved"
    for name in sorted(trained - expected.keys()):
        yield f"{name}: only in the save; train the same parameters as the run that saved"
    for name in sorted(expected.keys() & trained):
        if saved.parameters[name].shape != expected[name]:
            yield (
                f"{name}: saved as {list(saved.parameters[name].shape)}, the model has {list(expected[name])}: load it "
                f"into the model that saved it"
            )
