"""Callbacks that a config names, ``training.callbacks``: made, watched, and asked for what they did.

They run on every rank, after ours and before the meter, in the order of the config. They may read weights, log, and
write beside checkpoints. What one raises ends the run in a line with its name, and the last checkpoint stands. State of
one that is an ``ExportableState`` is in each checkpoint, and a resumed run goes on with it.

Invariant. The card names them, and those that were seen changing parameters or the optimizer: training is then compared
with plain training that has the same callbacks.

Refused: modules that cannot be imported, classes that are no ``TrainerCallback`` or take other arguments, before
anything heavy; one that writes into a checkpoint, which is sealed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from deepstow.trainer.errors import ConfigError
from deepstow.trainer.model.hashes import changed, stamps
from deepstow.trainer.registry import Raised, Unusable, checked, class_of, code_of, guarded
from deepstow.trainer.run.checkpoints import checkpoint

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig

KEY = "training.callbacks"


class UserCallbacks:
    """The callbacks of a config.

    Attributes:
        names: as the config has them.
        codes: the hash of the file of each.
        changed: names of those that were seen changing parameters or the optimizer.
    """

    def __init__(self, config: RunConfig) -> None:
        """Raise ConfigError if one cannot be used; none is made yet."""
        self.names, self.codes, self.changed = list[str](), dict[str, str](), set[str]()
        self._kinds = list[tuple[type[TrainerCallback], Mapping[str, Any]]]()
        for entry in config.training.callbacks or ():
            options = {} if isinstance(entry, str) else dict(entry)
            name = entry if isinstance(entry, str) else options.pop("class")
            try:
                kind = checked(class_of(name, config.folders(KEY)), TrainerCallback)
                inspect.signature(kind).bind(**options)
            except (Unusable, TypeError) as error:
                raise config.error(KEY, name, str(error)) from None
            self.names.append(name)
            self.codes[name] = code_of(kind)
            self._kinds.append((self._watched(kind, name), options))

    def made(self) -> list[TrainerCallback]:
        """One of each. Raise ConfigError if one raises when it is made."""
        callbacks = []
        for name, (kind, options) in zip(self.names, self._kinds, strict=True):
            try:
                callbacks.append(kind(**options))
            except Exception as error:
                raise ConfigError(f"{KEY} = {name}: cannot be made: {type(error).__name__}: {error}") from None
        return [*([Restored(callbacks)] if callbacks else []), *callbacks]

    def sentence(self) -> str:
        """What a card says of them; empty if there are none."""
        if not self.names:
            return ""
        note = " (it changed parameters or the optimizer)"
        shown = (f"`{name.rpartition('/')[2]}`{note * (name in self.changed)}" for name in dict.fromkeys(self.names))
        return f"Callbacks took part in training: {', '.join(shown)}."

    def _watched(self, kind: type[TrainerCallback], name: str) -> type[TrainerCallback]:
        """``kind``, whose events are watched; its name is that of its state in a checkpoint."""
        subclass = guarded(kind, TrainerCallback, name)
        events = [event for event in vars(subclass) if event in vars(TrainerCallback)]
        seen = {event: self._watch(getattr(subclass, event), name) for event in events}
        return type(name, (subclass,), {"__module__": kind.__module__, **seen})

    def _watch(self, event: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(event)
        def call(callback: Any, args: Any, state: TrainerState, control: Any, **known: Any) -> Any:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            saves = event.__name__ == "on_save" and state.is_world_process_zero
            before, files = _looked_at(known), stamps(folder) if saves else {}
            result = event(callback, args, state, control, **known)
            if _looked_at(known) != before:
                self.changed.add(name)
            if saves and (written := changed(files, folder)):
                what = f"on_save has written {written[0]} into {folder}, which is sealed"
                raise Raised(f"{name}: {what}; take it out, and write beside the checkpoints")
            return result

        return call


@contextmanager
def keeping(folder: Path, *, alone: bool) -> Iterator[None]:
    """Inside, a callback of the config that raises is told with the checkpoint that stands in ``folder``. ``alone``: no
    other rank may still be sealing one.
    """
    try:
        yield
    except Raised as error:
        last = checkpoint.GOES_ON
        if alone:
            checkpoints = checkpoint.complete(folder) if folder.is_dir() else []
            last = f"{checkpoints[-1].path} is the last checkpoint" if checkpoints else "there is no checkpoint yet"
        error.rewrite(lambda line: f"{KEY} = {line}; {last}")
        raise


class Restored(TrainerCallback):
    """Gives callbacks of the config the state that a checkpoint has of them, but for what Hugging Face restores."""

    def __init__(self, callbacks: list[TrainerCallback]) -> None:
        self._callbacks = callbacks

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if not state.global_step or args.restore_callback_states_from_checkpoint:
            return
        saved: Any = state.stateful_callbacks or {}
        waiting = {name: list(entry) if isinstance(entry, list) else [entry] for name, entry in saved.items()}
        for callback in self._callbacks:
            if isinstance(callback, ExportableState) and (states := waiting.get(type(callback).__name__)):
                for attribute, value in states.pop(0)["attributes"].items():
                    setattr(callback, attribute, value)


def _looked_at(known: Mapping[str, Any]) -> list[Any]:
    """What changes with parameters and optimizer: how often tensors were written, and the options of its groups."""
    model, optimizer = known.get("model"), known.get("optimizer")
    fingerprint: list[Any] = [param._version for param in model.parameters()] if model is not None else []
    for group in getattr(optimizer, "param_groups", ()):
        fingerprint.append({key: value for key, value in group.items() if key != "params"})
    states = getattr(optimizer, "state", None)
    for state in states.values() if isinstance(states, Mapping) else ():
        fingerprint += [entry._version for entry in state.values() if hasattr(entry, "_version")]
    return fingerprint
