"""Side effects of a block happen once, however often the block runs.

A recomputed block runs again in backward. A batch norm would move its running statistics again, a block that drops
itself by ``random.random()`` would draw again. So a replay starts from the state that the first run found, and
afterwards everything is restored to what it was before the replay: random numbers of Python, of NumPy, and of
generators that are attributes of the block's modules (torch's own are restored by its checkpoints); tensors in buffers
and attributes of these modules; and numbers in attributes, as counters are.

What the block writes to is learned in its first run, and again when one of its modules changes between training and
evaluation: everything is copied before and compared bit by bit afterwards. After that torch's version counters are
compared, and a write to a tensor that the first run did not write to is refused. The copies, until backward, are small
(statistics, an auxiliary loss) and not in the plan.

Not noticed: anything in lists, closures and other objects; writes through ``.data`` that begin after the first run;
numbers under DeepSpeed's stage 3, whose hooks count in the attributes of modules, and have to count each run.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deepstow.strategies.engine.tensors.nested import same_bits

Owner = dict[str, Any]  # a module's buffers or its attributes
Source = tuple[Callable[[], Any], Callable[[Any], None]]  # of random numbers: gets its state, sets it
ABSENT = object()
GLOBAL: tuple[Source, Source] = ((random.getstate, random.setstate), (np.random.get_state, np.random.set_state))


class Effects:
    """Remembers which tensors a block writes to when it runs."""

    def __init__(self, block: nn.Module, name: str) -> None:
        self.block = block
        self.name = name
        self.counts = not any(hasattr(param, "ds_id") for param in block.parameters())
        # Module paths and names of tensors, by which modules are in training. Snapshots of first runs add to it.
        self.written: dict[tuple[bool, ...], set[tuple[str, str]]] = {}


class Snapshot(AbstractContextManager[None]):
    """The state that one run of a block found; as a context, it is that state again, for replays."""

    def __init__(self, effects: Effects) -> None:
        modules = dict(effects.block.named_modules())
        self._effects, self._mode = effects, tuple(module.training for module in modules.values())
        self._known = effects.written.get(self._mode)  # None: this is the first such run
        self._found: list[tuple[str, Owner, Owner]] = []  # path, the dict of a module, and what it held
        self._versions: dict[int, int] = {}  # of tensors, by id
        self._copies: dict[int, Tensor] = {}  # the same
        self._changed: list[tuple[Owner, str, Any]] = []  # owner, name and the former value
        self._sources = list(GLOBAL)
        for path, module in modules.items():
            for owner in (module._buffers, module.__dict__):
                self._found.append((path, owner, owner.copy()))
                self._note(path, owner)
        self._random = [get() for get, _ in self._sources]
        self._present: list[tuple[Owner, str, Any]] = []  # during a replay: the values to restore
        self._drawn: list[Any] = []  # the same, of random numbers

    def _note(self, path: str, owner: Owner) -> None:
        for name, value in owner.items():
            if _is_state(value):
                self._versions[id(value)] = _version(value)
                if self._known is None or (path, name) in self._known:
                    self._copies[id(value)] = _copy(value)
            elif value.__class__ not in PLAIN and (generator := source(value)) is not None:
                self._sources.append(generator)

    @torch.no_grad()
    def _end(self) -> None:
        """The run is over: keep the former values of what it changed."""
        written = set(self._known or ())
        for path, owner, former in self._found:
            for name, now in (dict.fromkeys(former, ABSENT) | owner).items():
                was = former.get(name, ABSENT)
                if not _is_state(was):
                    counted = self._effects.counts and now.__class__ in NUMBERS and was != now
                    if counted or _is_state(now):
                        self._changed.append((owner, name, was))
                elif (path, name) in written or self._is_written(was):  # some kernels do not count writes
                    written.add((path, name))
                    if id(was) not in self._copies:
                        self._refuse(path, name)
                    self._changed.append((owner, name, self._copies[id(was)]))
                elif now is not was:
                    # without its graph, which would stay alive with it
                    self._changed.append((owner, name, was.detach().requires_grad_(was.requires_grad)))
        if self._known is None:
            self._effects.written[self._mode] = written
        for record in (self._found, self._versions, self._copies):
            record.clear()

    def _is_written(self, tensor: Tensor) -> bool:
        if _version(tensor) != self._versions[id(tensor)]:
            return True
        comparable = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta
        return self._known is None and comparable and not same_bits(tensor, self._copies[id(tensor)])

    def _refuse(self, path: str, name: str) -> None:
        where = ".".join(filter(None, (self._effects.name, path, name)))
        raise RuntimeError(
            f"{where} is written to in forward, which the first forward of this block did not do, so it cannot be "
            f"recomputed: write strategies.recompute.policy: none, or choose other blocks by strategies.recompute.every"
        )

    @contextmanager
    def first(self) -> Iterator[None]:
        yield
        self._end()

    def __enter__(self) -> None:
        """Begin a replay. There may be several, one after the other."""
        self._present = [(owner, name, owner.get(name, ABSENT)) for owner, name, _ in self._changed]
        self._drawn = [get() for get, _ in self._sources]
        self._set_random(self._random)
        copies: dict[int, Any] = {}  # a tensor that several modules share stays shared
        for owner, name, was in self._changed:
            _put(owner, name, copies.setdefault(id(was), _copy(was)))

    def __exit__(self, *error: object) -> None:
        for owner, name, value in self._present:
            _put(owner, name, value)
        self._set_random(self._drawn)
        self._present.clear()

    def _set_random(self, states: list[Any]) -> None:
        for (_, put), state in zip(self._sources, states, strict=True):
            put(state)


@contextmanager
def forked_rng() -> Iterator[None]:
    """Random numbers go on afterwards as if nothing inside had drawn any: torch's, Python's and NumPy's."""
    states = [get() for get, _ in GLOBAL]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for (_, put), state in zip(GLOBAL, states, strict=True):
            put(state)


PLAIN = {bool, int, float, str, type(None), set, dict, OrderedDict}  # most attributes of a module
NUMBERS = {bool, int, float}
SIZED = {list, dict, set, OrderedDict}


def source(value: Any) -> Source | None:
    """Functions that get and set the state of ``value``, if it is a random generator with a state."""
    if isinstance(value, torch.Generator):
        put: Callable[[Tensor], Any] = value.set_state
        return value.get_state, put
    if isinstance(value, np.random.RandomState):
        return value.get_state, value.set_state
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate, value.setstate
    bits = value.bit_generator if isinstance(value, np.random.Generator) else value
    if isinstance(bits, np.random.BitGenerator):
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return None


def _is_state(value: Any) -> bool:
    return value.__class__ not in PLAIN and isinstance(value, Tensor) and not isinstance(value, nn.Parameter)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _copy(value: Any) -> Any:
    with torch.no_grad():
        return value.clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _put(owner: Owner, name: str, value: Any) -> None:
    if value is ABSENT:
        owner.pop(name, None)
    else:
        owner[name] = value


def attributes(model: nn.Module) -> dict[tuple[str, str], tuple[Any, object]]:
    """What modules hold besides parameters, modules, hooks and their mode, with versions of tensors, sizes of lists,
    and states of generators.
    """
    marked: dict[tuple[str, str], tuple[Any, object]] = {}
    for path, module in model.named_modules():
        for owner in (module._buffers, module.__dict__):
            for name, value in owner.items():
                if "_hooks" in name or name == "training":  # some hooks remove themselves; a Trainer sets the mode
                    continue
                marked[path, name] = value, _mark(value)
    return marked


def _mark(value: Any) -> object:
    if value.__class__ in SIZED:
        return len(value)
    if value.__class__ in PLAIN:
        return None
    if _is_state(value):
        return _version(value)
    if (generator := source(value)) is None:
        return None
    state = generator[0]()
    return state.tolist() if isinstance(state, Tensor) else repr(state)


def changed(before: dict[tuple[str, str], tuple[Any, object]], model: nn.Module) -> str:
    """The first attribute that is another one than ``before``, by its dotted path; empty if none is."""
    now = attributes(model)
    for key in dict.fromkeys((*before, *now)):
        (was, mark), (is_now, new_mark) = before.get(key, (ABSENT, None)), now.get(key, (ABSENT, None))
        if mark != new_mark or not (was is is_now or (was.__class__ in PLAIN and was == is_now)):
            return ".".join(filter(None, key))
    return ""
