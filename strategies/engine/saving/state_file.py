"""The memory engine's state on disk, in the format of all strategies (``strategies/state/saved_state.py``): written
directly from the arenas and read directly into them, under any layout, since it is up to three times as large as fp32
weights. A save takes the place of an earlier one once it is on the disk (``strategies/state/commit.py``). ``load``
checks everything, hashes included, before it changes anything.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepstow.strategies.core.sizes import human
from deepstow.strategies.engine.memory.pieces import AtHand
from deepstow.strategies.engine.saving.state_dict import StateAccess
from deepstow.strategies.state import commit, saved_state
from deepstow.strategies.state.blocks import Columns
from deepstow.strategies.state.saved_state import FILE_NAME, INDEX, MASTER, Described, Saved, Weights, other_model
from deepstow.strategies.state.spans import WEIGHT, Span, SpanError


class EngineState:
    """The ``Holder`` for a stowed model. If every rank has all, one of them writes; if they share it, each does."""

    def __init__(self, access: StateAccess, *, writes: bool = True) -> None:
        self._access = access
        self._engine = access.engine
        self._shared = self._engine.ranks.shared
        self.divides_weights = self._shares_weights = self._engine.shares_weights
        self._writes_whole = writes
        self._writes = writes or self._shared
        self._params = dict(access.model.named_parameters())
        self.rule = self._engine.rule.kind

    def groups(self) -> list[dict[str, Any]]:
        names = {id(param): name for name, param in self._params.items()}
        return [{**group, "params": [names[id(param)] for param in group["params"]]} for group in self._engine.groups()]

    def entries(self) -> Iterator[tuple[str, Described, list[Span]]]:
        """Every trained parameter in the order of the layout. Those never updated have no count and no moments."""
        if not self._writes:
            return
        self._access.drain()
        names = {id(param): name for name, param in self._params.items()}
        rule = self._engine.rule
        for bucket in self._engine.buckets:
            for param in bucket.params if bucket.spec.group is not None else ():
                name, parts = names[id(param)], list(self._access.parts_of(param))
                step = self._access.count_of(param).item()
                updated = step > 0 or rule.kernel.begins
                spans = [
                    span
                    for part in parts
                    for kind, tensor in part.state.items()
                    if updated or kind == MASTER
                    for span in self.spans(name, kind, part.start, tensor, part.at_hand)
                ]
                numbers = {"step": step} if updated and (rule.kernel.counts or not rule.names) else {}
                if parts:
                    kinds = {span.kind: span.shape for span in spans}
                    yield name, Described(self.whole_shape(name), bucket.spec.dtype, numbers, kinds), spans

    def weight_spans(self, names: set[str]) -> Iterator[Span]:
        if self._shared:
            self._access.drain()  # a collective: on all ranks now, whatever they write
        for name in names if self._writes else ():
            param = self._params.get(name)
            if param is None:  # in another stage of a pipeline
                continue
            bucket, index = self._engine.bucket_of[id(param)]
            if not self._shares_weights:
                if self._writes_whole:
                    yield from self.spans(name, WEIGHT, 0, self._access.newest_of(param))
                continue
            self._engine.refuse_damaged(bucket, index)
            resting = bucket.own(bucket.weight) if bucket.copy is None else bucket.copy
            for piece in bucket.pieces_in([index]):
                tensor = bucket.rounded(piece) if bucket.given_up else resting[piece.at : piece.at + piece.size]
                yield Span(name, WEIGHT, tuple(param.shape), piece.start, tensor)

    # --- of the whole model ------------------------------------------------------------------------------------------

    def whole_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._params[name].shape)

    def within(self, name: str, start: int) -> tuple[int, Columns | None]:
        """Where element ``start`` of what this rank has of a parameter is in all of it, or among some columns."""
        return start, None

    def spans(self, name: str, kind: str, start: int, tensor: Tensor, at_hand: AtHand = nullcontext) -> Iterator[Span]:
        """``tensor``, elements from ``start`` on of what this rank has, as this rank writes it."""
        yield Span(name, kind, self.whole_shape(name), start, tensor, at_hand=at_hand)

    # --- loading -----------------------------------------------------------------------------------------------------

    def misfits(self, saved: Saved) -> Iterator[str]:
        rule, shapes = self._engine.rule, self.shapes()
        complaints = list(other_model(saved, shapes, self.rule))
        yield from complaints
        for name in (name for name in shapes if name in self._params and not complaints):
            described = saved.parameters[name]
            kinds = [kind for kind in described.tensors if kind not in (MASTER, WEIGHT)]
            if (kinds or described.numbers.get("step")) and sorted(kinds) != sorted(rule.names):
                yield f"{name}: saved with {kinds}, {self.rule} has {list(rule.names)}: train on as the run that saved"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The whole model's trained parameters."""
        return {name: self.whole_shape(name) for group in self.groups() for name in group["params"]}

    def fill(self, saved: Saved) -> None:
        """Take over counts and moments; gradients that wait for a step are discarded."""
        access = self._access
        access.drain()
        self._engine.zero(to_none=True)
        for name in saved.trained() & self._params.keys():
            param, described = self._params[name], saved.parameters[name]
            access.forget_state(param)
            moments = described.tensors.keys() - {MASTER, WEIGHT}  # of SGD, which torch does not count
            access.count_of(param).fill_(described.numbers.get("step", bool(moments)))
            for part in access.parts_of(param):
                start, columns = self.within(name, part.start)
                with part.at_hand(writes=True):
                    for kind in described.tensors:
                        if kind not in (MASTER, WEIGHT):
                            saved.store.read(name, kind, start, part.state[kind], columns=columns)

    def fill_weights(self, weights: Weights) -> None:
        """Take over every weight that was saved, one by one, and its master."""
        self._access.drain()
        for name, param in self._params.items():
            if weights.find(name) is None:
                continue
            bucket, index = self._engine.bucket_of[id(param)]
            start, columns = self.within(name, 0)
            mixed = bucket.spec.group is not None and bucket.spec.low_precision
            if mixed and not bucket.is_shared:
                master = self._access.state_of(param)[MASTER]
                weights.read(name, start, master, columns)
                self._access.set_state(param, {MASTER: master})
                continue
            # Where ranks share it, each reads all of it, for its home may hold all of it.
            value = torch.empty(param.shape, dtype=torch.float32 if mixed else param.dtype)
            weights.read(name, start, value, columns)
            self._access.set_weight(param, value.to(param.dtype), master=not bucket.is_shared)
            if bucket.is_shared:
                bucket.fill_masters({index: value.view(-1)})


# --- a folder of its own ---------------------------------------------------------------------------------------------


def save(holder: EngineState, folder: Path, more: Sequence[Span] = (), extra: Mapping[str, Any] | None = None) -> None:
    """Write a save into ``folder``, atomically, with ``more`` spans and what else there is to say. ValueError if a
    hyperparameter is no JSON; OSError if writing failed, or ``folder`` holds other files: they are still there then.
    """
    saved_state.check_json(holder.groups())
    _refuse_foreign(folder)
    spans = [span for *_, param_spans in holder.entries() for span in param_spans]
    need = sum(span.tensor.nbytes for span in (*spans, *more))
    try:
        with commit.replaced_folder(folder) as draft:
            free = shutil.disk_usage(draft).free
            if need > free:
                raise OSError(f"it needs {human(need)}, the disk has {human(free)}")
            saved_state.write_part(draft, holder, more, rank=0, ranks=1, hashed=True)
            saved_state.write_index(draft, holder, 1, extra)
            saved_state.opened(draft)
    except OSError as error:
        reason = error.strerror or str(error)
        intact = "; the earlier save in it is intact" if folder.exists() else ""
        raise OSError(f"{folder}: the optimizer state ({human(need)}) was not saved: {reason}{intact}") from error


def _refuse_foreign(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir() or folder.is_symlink():
        raise FileExistsError(f"{folder}: not a folder; optimizer state needs one of its own")
    others = [path.name for path in folder.iterdir() if path.name != INDEX and not FILE_NAME.fullmatch(path.name)]
    if others:
        raise FileExistsError(
            f"{folder}: holds other files ({', '.join(sorted(others)[:3])}), which a save would replace; "
            f"optimizer state needs a folder of its own, such as {folder / 'optimizer'}"
        )


def load(holder: EngineState, folder: Path, groups: Sequence[dict[str, Any]]) -> None:
    """Take over a save and its hyperparameters, which go into ``groups``. ValueError if there is none, or it is damaged
    or of another model, grouping or rule; nothing has changed then.
    """
    places = [place for place in (folder, commit.earlier(folder)) if (place / INDEX).is_file()]
    if not places:
        raise ValueError(f"{folder}: no {INDEX} in it; name a folder that optimizer.save() has written")
    try:
        saved = saved_state.opened(places[0], hashes=True)
    except SpanError as error:
        raise ValueError(f"{places[0]}: the optimizer state was not loaded:\n  {error}") from None
    complaints = [*holder.misfits(saved), *_without_weights(saved, holder), *_other_groups(saved, holder.groups())]
    if complaints:
        raise ValueError(f"{places[0]}: the optimizer state was not loaded:\n  " + "\n  ".join(complaints))
    holder.fill(saved)
    holder.fill_weights(Weights(saved.store, None, {}))
    for group, saved_group in zip(groups, saved.param_groups, strict=True):
        for key, value in saved_group.items():
            if key != "params":
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _without_weights(saved: Saved, holder: EngineState) -> Iterator[str]:
    """Parameters whose weight had another dtype and no master, one line each: the exact weight is not in the save."""
    for name, ours, _ in holder.entries():
        known = saved.parameters.get(name)
        if known is not None and known.dtype != ours.dtype and MASTER not in known.tensors:
            yield (
                f"{name}: saved as {known.dtype} {list(known.shape)}, the model has {ours.dtype} {list(ours.shape)}: "
                f"load it into the model that saved it"
            )


def _other_groups(saved: Saved, groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if len(saved.param_groups) != len(groups):
        yield f"param_groups: {len(saved.param_groups)} in the save, {len(groups)} here: pass the same groups to stow"
        return
    for number, (old, new) in enumerate(zip(saved.param_groups, groups, strict=True)):
        for name in sorted(set(old["params"]) - set(new["params"])):
            yield f"{name}: saved in group {number}, here in another: pass the same groups to stow"
