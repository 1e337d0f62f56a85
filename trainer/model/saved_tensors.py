"""The tensors of a saved model by the names that they have in the model, each read when it is asked for.

Most are one tensor of a file. Others Transformers makes of several, as the experts of a layer, which are one tensor in
the model and one for each expert in files. Its own converters do so here as well, for one tensor of the model at a
time: those that it noted on the model as it made it without values (``_weight_conversions``).

Invariant. What is read has the bits of ``from_pretrained``: names are sorted and renamed, and sources cast and
converted, as in its ``convert_and_load_state_dict_in_model``. The shape is found by the same conversion without values,
so nothing is read of a model that does not fit its files.

Experts that are stacked first are independent of each other. They are read a few at a time, and only those that are
asked for; any other conversion is done whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from deepstow.trainer.model.folder import INDEX, INDEX_OF_TENSORS, TENSORS, WHOLE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PIECE_BYTES = 32 << 20  # of experts that are converted together


class NotInParts(Exception):
    """Why the whole model has to be built."""


class Source(NamedTuple):
    """A tensor in a file, which is opened for each reading: pages that were read stay until it is closed."""

    path: Path
    key: str
    shape: tuple[int, ...]
    pattern: str = ""  # of Transformers' converter, that its name matches

    def rows(self, rows: slice) -> Tensor:
        """These rows of it, in memory of their own or the file's pages."""
        with safe_open(self.path, framework="pt") as opened:
            tensor: Tensor = opened.get_slice(self.key)[rows]
        return tensor


Read = Callable[[Source], Tensor]


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of a model, made of ``sources``. ``stacked``: of how many experts, each of which has as many sources."""

    name: str
    shape: tuple[int, ...]
    sources: Sequence[Source]
    convert: Callable[[Iterable[Source], Read], Mapping[str, Tensor]] | None = None  # None: it is the one source
    stacked: int = 0

    def read(self, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        """These ``rows`` of the tensor. Pages of one that is not converted are the file's until somebody writes."""
        if self.convert is None:
            with safe_open(self.sources[0].path, framework="pt") as opened:
                key = self.sources[0].key
                tensor: Tensor = opened.get_tensor(key) if rows == slice(None) else opened.get_slice(key)[rows]
            return tensor.to(dtype)
        if not self.stacked:
            return self._converted(self.sources, dtype)[rows].clone()
        experts = range(self.stacked)[rows]
        tensor = torch.empty(
            len(experts), *self.shape[1:], dtype=dtype
        )  # below what is freed, so that it leaves no hole
        step = max(1, PIECE_BYTES * self.stacked // max(1, prod(self.shape) * dtype.itemsize))
        for at in range(0, len(experts), step):
            tensor[at : at + step] = self._converted(self._of(experts[at : at + step]), dtype)
        return tensor

    def _of(self, experts: Iterable[int]) -> list[Source]:
        return [source for at in experts for source in self.sources[at :: self.stacked]]

    def _converted(self, sources: Iterable[Source], dtype: torch.dtype) -> Tensor:
        assert self.convert is not None
        with ExitStack() as stack:
            files = {
                path: stack.enter_context(safe_open(path, framework="pt")) for path in {entry.path for entry in sources}
            }

            def read(source: Source) -> Tensor:
                tensor: Tensor = files[source.path].get_tensor(source.key)
                return tensor.to(dtype)

            return self.convert(sources, read)[self.name]


def saved_tensors(model: PreTrainedModel, name_or_path: str) -> dict[str, SavedTensor]:
    """What is in the files of a saved model, by its names in ``model``, which ``from_pretrained`` has made of them
    without values. Raise NotInParts if they are no safetensors, have a name twice, or cannot be converted.
    """
    converters = [converter for converter in _conversions(model) if isinstance(converter, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    tensors: dict[str, SavedTensor] = {}
    several: dict[str, list[Source]] = {}
    listed = list(_sources(name_or_path))
    of_key = {source.key: source for source in listed}
    if len(of_key) < len(listed):
        raise NotInParts("its files have a name twice")
    for key, name, pattern in renamed(model, of_key):
        source = of_key[key]
        if pattern is not None:
            several.setdefault(name, []).append(source._replace(pattern=pattern))
        elif name in tensors:
            raise NotInParts(f"its files have {name} twice")
        else:
            tensors[name] = SavedTensor(name, source.shape, [source])
    for first, sources in several.items():
        for tensor in _made(model, first, of_pattern[sources[0].pattern], sources):
            if tensor.name in tensors:
                raise NotInParts(f"its files have {tensor.name} twice")
            tensors[tensor.name] = tensor
    return tensors


def renamed(model: PreTrainedModel, keys: Iterable[str]) -> Iterator[tuple[str, str, str | None]]:
    """Of each of ``keys`` of files, in Transformers' order: its name in ``model``, and the pattern that it matches of
    what Transformers converts; None: it is not converted.
    """
    conversions = _conversions(model)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    prefix, names = model.base_model_prefix, model.state_dict()
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, names)
        if name not in names and key in names:
            name, pattern = rename_source_key(key, [], [], prefix, names)
        yield key, name, pattern


def _conversions(model: PreTrainedModel) -> list[Any]:
    """Transformers' for ``model``, which ``from_pretrained`` notes on it; of one that was made of a config, all."""
    noted = getattr(model, "_weight_conversions", None)
    return deepcopy(get_model_conversion_mapping(model) if noted is None else noted)


def rows_in_files(name_or_path: str) -> dict[str, Callable[[slice], Tensor]]:
    """What reads rows of each tensor in the files of a saved model, pickled ones included; empty: none are here."""
    try:
        return {source.key: source.rows for source in _sources(name_or_path)}
    except NotInParts:
        tensors: dict[str, Any] = {}
        for path in _files(name_or_path, TENSORS, INDEX_OF_TENSORS):
            with suppress(RuntimeError):  # torch's oldest format, which cannot be read in parts
                tensors |= torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return {key: value.__getitem__ for key, value in tensors.items()}


def _made(model: PreTrainedModel, first: str, converter: Any, sources: list[Source]) -> Iterable[SavedTensor]:
    """The tensors that ``converter`` makes of ``sources``, of which ``first`` is one's name."""

    def convert(sources: Iterable[Source], read: Read) -> Mapping[str, Tensor]:
        fresh = deepcopy(converter)
        for source in sources:
            fresh.add_tensor(first, source.key, source.pattern, read(source))
        values = fresh.convert(first, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in values.items()}

    try:
        values = convert(sources, lambda source: torch.empty(source.shape, device="meta"))
    except Exception as error:  # whatever an operation of theirs says of what it was given
        why = str(error).strip().partition("\n")[0]
        raise NotInParts(f"Transformers' conversion of {first} does not work for it alone ({why})") from None
    patterns = [source.pattern for source in sources]
    counts = {patterns.count(pattern) for pattern in patterns}
    stacks = _is_stack(converter) and len(counts) == 1 and len(values) == 1
    in_order = [source for pattern in dict.fromkeys(patterns) for source in sources if source.pattern == pattern]
    for name, value in values.items():
        yield SavedTensor(name, tuple(value.shape), in_order, convert, counts.pop() if stacks else 0)


def _is_stack(converter: Any) -> bool:
    """Whether rows of what it makes are experts, each made of its own sources alone."""
    first, *others = converter.operations
    return (type(first) is MergeModulelist and first.dim == 0) and all(
        type(operation) is Concatenate and operation.dim > 0 for operation in others
    )


def _sources(name_or_path: str) -> Iterable[Source]:
    files = _files(name_or_path, WHOLE, INDEX)
    if not files:
        raise NotInParts(f"it has no {WHOLE}")
    for path in files:
        with safe_open(path, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - it is no dict
                yield Source(path, key, tuple(opened.get_slice(key).get_shape()))


def _files(name_or_path: str, whole: str, parts: str) -> list[Path]:
    """The file ``whole``, or those that the index ``parts`` names, if they are on this machine."""

    def find(name: str) -> Path | None:
        path = Path(name_or_path) / name
        if not Path(name_or_path).is_dir():  # whoever made the model without values has put the files there
            path = Path(str(try_to_load_from_cache(name_or_path, name)))
        return path if path.is_file() else None

    files = [path] if (path := find(whole)) else []
    if not files and (index := find(parts)):
        files = [index.parent / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    return files
