"""Recomputation: blocks whose forward runs once more in backward, but for the operators whose outputs are kept.

The mechanism is torch's: non-reentrant checkpoints, with their selective contexts where something is kept. A checkpoint
stands in for a block's ``forward``, inside all hooks of the block, so that whoever fetches the block's weights at its
borders (the memory engine, ZeRO) has them there when backward runs it again. No module is renamed or wrapped. The
engine also stands ``around`` each run, for backward may begin one before it has met a border (``guard.py``).

Names. What is kept is named by kind and number within one forward of a block: "linear 3" is its fourth product with a
weight. Names come from what an operator does, not from the model's class, and are the same on every device:

    linear      a product with a weight
    attention   a fused kernel, or the product of two activations after a softmax
    scores      any other product of two activations
    softmax     of any size

What waits on the host (``activations.py``) goes there in two ways, neither of which torch's contexts notice. The input
passes through saved-tensor hooks around the checkpoint. Outputs are sent by a mode beneath the selective one, for which
they are not kept; in the replay the same mode gives them back in place of running the operator.

Exactness. An operator that is not found where it was expected is run again, or kept in vain: time, never another bit.
Two kinds of output cannot be kept. One that is written to later would come back changed: the first forward keeps
nothing and looks for such. One that draws random numbers would not draw them when the others are replayed, so these
would get other numbers: a fused attention with dropout is run again.

Sources: torch.utils.checkpoint; Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from strategies.core.applied import log_applied
from strategies.core.facts import UnitKind
from strategies.core.plan import INPUT, Keep
from strategies.engine.activations import HostRoom, Sent, unwritten
from strategies.engine.effects import Effects
from strategies.engine.tensors.nested import tensors_in

if TYPE_CHECKING:
    from strategies.core.plan import Plan
    from strategies.engine.transfer.transfer import Transfer

aten = torch.ops.aten
WITH_WEIGHTS = {aten.mm, aten.addmm, aten._addmm_activation, aten.convolution, aten._grouped_mm}
BATCHED = {aten.bmm, aten.baddbmm}
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class Names:
    """Names the operators of one forward of ``block``, in the order in which they run."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._counts: dict[str, int] = {}
        self._after_softmax = False
        self._weights: set[int] | None = None

    def of(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        """The name of this call; None where its output is not worth a name or must not be kept."""
        kind = self._kind(func, args)
        if kind is None:
            return None
        self._after_softmax = kind == "softmax"
        number = self._counts[kind] = self._counts.get(kind, -1) + 1
        return None if kind == "attention" and draws(func, args, kwargs) else f"{kind} {number}"

    def _kind(self, func: Any, args: tuple[Any, ...]) -> str | None:
        packet = func.overloadpacket
        if packet in WITH_WEIGHTS:
            return "linear"
        if packet in BATCHED:
            if any(isinstance(arg, Tensor) and self._is_weight(arg) for arg in args):
                return "linear"
            return "attention" if self._after_softmax else "scores"
        name = packet.__name__
        if "backward" in name:
            return None
        if "scaled_dot_product" in name or "flash_attention" in name or "efficient_attention" in name:
            return "attention"
        return "softmax" if name in ("_softmax", "_safe_softmax") else None

    def _is_weight(self, tensor: Tensor) -> bool:
        if self._weights is None:
            self._weights = {param.untyped_storage()._cdata for param in self._block.parameters()}
        return tensor.untyped_storage()._cdata in self._weights


def draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a fused attention draws random numbers."""
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | {**kwargs}
    return bool(given.get("dropout_p"))


class Seen(TorchDispatchMode):
    """Shows named outputs of a forward as they are made; with those of ``kept`` that were written to afterwards."""

    def __init__(self, block: nn.Module, kept: Collection[str]) -> None:
        super().__init__()
        self._names, self._kept = Names(block), kept
        self._made: list[tuple[str, Tensor, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = self._names.of(func, args, kwargs or {})
        if name in self._kept:
            self._made += [(str(name), tensor, tensor._version) for tensor in tensors_in(out)]
        return out

    def tensors_of(self, names: Collection[str]) -> list[Tensor]:
        """Outputs of the operators in ``names`` that are still what they were when made."""
        return [tensor for name, tensor, version in self._made if name in names and tensor._version == version]

    @property
    def written(self) -> frozenset[str]:
        """Names of those that are not any more what they were when made."""
        return frozenset(name for name, tensor, version in self._made if tensor._version != version)


class Sending(TorchDispatchMode):
    """Sends outputs of a forward to the host, those named in ``hosted``. ``sent`` has them by operator and number.

    Calls are numbered without those that are ``kept`` on the device: a replay does not show them.
    """

    def __init__(self, block: nn.Module, kept: Collection[str], hosted: Collection[str], room: HostRoom) -> None:
        super().__init__()
        self.sent: dict[tuple[Any, int], Any] = {}
        self._names, self._kept, self._hosted, self._room = Names(block), kept, hosted, room
        self._calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = self._names.of(func, args, kwargs or {})
        if name in self._kept:
            return out
        if name in self._hosted:
            made = [tensor for tensor in tensors_in(out) if tensor.device == args[0].device]
            sent = {id(tensor): self._room.send(tensor) for tensor in made}
            if None not in sent.values():  # otherwise it runs again
                self.sent[func, self._calls[func]] = tree_map(lambda value: sent.get(id(value), value), out)
        self._calls[func] += 1
        return out


class Receiving(TorchDispatchMode):
    """In a replay: gives back what ``sending`` has sent instead of running its operators again."""

    def __init__(self, sending: Sending) -> None:
        super().__init__()
        self._sending = sending
        self._calls: Counter[Any] = Counter()

    def __enter__(self) -> Any:
        self._calls.clear()  # a graph that was retained is replayed once more
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = (func, self._calls[func])
        self._calls[func] += 1
        if call in self._sending.sent:
            return tree_map(_received, self._sending.sent[call])
        return func(*args, **(kwargs or {}))


def _received(value: Any) -> Any:
    return value.get() if isinstance(value, Sent) else value


class Checkpointed:
    """Stands in for the ``forward`` of ``block``: keeps its inputs and the outputs named in ``kept``.

    Args:
        hosted: what of these, and of the input, waits in ``room``.
        name: of the block, for messages.
    """

    def __init__(
        self,
        block: nn.Module,
        kept: Collection[str],
        hosted: Collection[str] = (),
        room: HostRoom | None = None,
        name: str = "",
    ) -> None:
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext  # the first forward, and each time again
        self.watch: Callable[[Tensor], object] | None = None  # is shown what is kept on the device; for the ledger
        self.forward = block.forward
        self.room = room if hosted else None
        self._block, self._kept, self._hosted = block, frozenset(kept), frozenset(hosted)
        self._written: frozenset[str] | None = None if kept else frozenset()
        self._effects = Effects(block, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the block's own; without gradients it is just that."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        args = tuple(map(_copied, args))
        kwargs = {name: _copied(value) for name, value in kwargs.items()}
        seen = Seen(self._block, self._kept) if self._written is None or self.watch is not None else None
        with self._input_sent(args):
            out = checkpoint(self._run, *args, use_reentrant=False, context_fn=partial(self._contexts, seen), **kwargs)
        if seen is not None:
            stays = args[1:] if INPUT in self._hosted else args
            self._look(seen, [*tensors_in(stays), *tensors_in(kwargs)])
        return out

    @contextmanager
    def _input_sent(self, args: tuple[Any, ...]) -> Iterator[None]:
        """The hidden states that the checkpoint saves go to the host, if they are to."""
        stream = stream_in(args) if INPUT in self._hosted else None
        if stream is None or self.room is None:
            yield
            return
        room, start = self.room, stream.data_ptr()
        del args, stream

        def pack(tensor: Tensor) -> Sent | tuple[Tensor, int]:
            sent = room.send(tensor) if tensor.data_ptr() == start else None
            return (tensor, tensor._version) if sent is None else sent  # hooks switch off torch's own look at versions

        def unpack(kept: Sent | tuple[Tensor, int]) -> Tensor:
            return kept.get() if isinstance(kept, Sent) else unwritten(*kept)

        with saved_tensors_hooks(pack, unpack):
            yield

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """The forward, on caches of its own each time: a replay must find them as the first run did."""
        with self.around():
            return self.forward(*map(_copied, args), **{name: _copied(value) for name, value in kwargs.items()})

    def _contexts(self, seen: Seen | None) -> Contexts:
        found = self._effects.begin()
        forwards: list[AbstractContextManager[Any]] = [found.first(), *([seen] if seen is not None else [])]
        agains: list[AbstractContextManager[Any]] = [found]
        if self._written is None:
            return Within(forwards), Within(agains)  # the first time nothing is kept
        kept, hosted = self._kept - self._written - self._hosted, (self._hosted - {INPUT}) - self._written
        if hosted and self.room is not None:
            sending = Sending(self._block, kept, hosted, self.room)
            forwards.append(sending)
            agains.append(Receiving(sending))
        if kept:
            forward, again = create_selective_checkpoint_contexts(self._policy(kept))
            forwards.append(forward)  # above the others
            agains.append(again)
        return Within(forwards), Within(agains)

    def _policy(self, kept: Collection[str]) -> Callable[..., CheckpointPolicy]:
        # Torch before 2.13 asks again when it replays: those calls are counted on their own.
        names = {False: Names(self._block), True: Names(self._block)}

        def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            found = names[context.is_recompute].of(func, args, kwargs) in kept
            return CheckpointPolicy.MUST_SAVE if found else CheckpointPolicy.PREFER_RECOMPUTE

        return policy

    def _look(self, seen: Seen, inputs: list[Tensor]) -> None:
        if self.watch is not None:
            for tensor in (*inputs, *seen.tensors_of(self._kept - self._hosted)):  # the first time: that will be kept
                self.watch(tensor)
        if self._written is None:
            self._written = seen.written


class Within(AbstractContextManager[None]):
    """Several contexts, the first one outermost. May be entered again: a graph that is retained is replayed again."""

    def __init__(self, contexts: Sequence[AbstractContextManager[Any]]) -> None:
        self._contexts, self._stack = contexts, ExitStack()

    def __enter__(self) -> None:
        for context in self._contexts:
            self._stack.enter_context(context)

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)


def stream_in(args: tuple[Any, ...]) -> Tensor | None:
    """The hidden states among a block's arguments: the first one, as Hugging Face's blocks have it."""
    return args[0] if args and isinstance(args[0], Tensor) else None


def recompute(model: nn.Module, plan: Plan, transfer: Transfer | None = None) -> None:
    """Change the blocks of ``model`` as ``plan`` says what forward keeps.

    Args:
        transfer: moves what waits on the host; None: what suits the device. Tests give one that delays or watches.

    Raises:
        ValueError: one of them is recomputed already.
    """
    keeps = [plan.keep(unit.name) for unit in plan.facts.units if unit.kind is UnitKind.BLOCK]
    room = None
    if any(keep.hosted for keep in keeps):
        room = HostRoom([model.get_submodule(keep.unit) for keep in keeps], plan.hosted_bytes(), transfer)
    kept = {keep.unit: keep.kept for keep in keeps if keep.recomputes}
    checkpoint_blocks(model, kept, {keep.unit: keep.hosted for keep in keeps}, room)
    log_applied("recompute", ((keep.unit, _effect(keep)) for keep in keeps if keep.recomputes))


def _effect(keep: Keep) -> str:
    hosted = f"; waiting on the host: {', '.join(keep.hosted)}" if keep.hosted else ""
    return f"{keep.policy}, keeps {', '.join(('its input', *keep.kept))}{hosted}"


def room_of(model: nn.Module) -> HostRoom | None:
    """Where saved tensors of ``model`` wait on the host, if any do."""
    found = (checkpointed(module) for module in model.modules())
    return next((each.room for each in found if each is not None and each.room is not None), None)


def checkpoint_blocks(
    model: nn.Module,
    kept: Mapping[str, Collection[str]],
    hosted: Mapping[str, Collection[str]] = MappingProxyType({}),
    room: HostRoom | None = None,
) -> None:
    """Recompute the blocks named in ``kept`` (dotted paths), keeping the outputs that are listed for each.

    Args:
        hosted: what of these, and of the inputs, waits in ``room``.

    Raises:
        ValueError: one of them is recomputed already.
    """
    for path, names in kept.items():
        block: Any = model.get_submodule(path)
        if checkpointed(block) is not None or getattr(block, "gradient_checkpointing", False):
            raise ValueError(f"{path} is recomputed already")
        block.forward = Checkpointed(block, names, hosted.get(path, ()), room, path)


def checkpointed(module: nn.Module) -> Checkpointed | None:
    """What stands in for the forward of ``module``, if anything does."""
    found = module.__dict__.get("forward")
    return found if isinstance(found, Checkpointed) else None


def _copied(value: Any) -> Any:
    """A cache of keys and values that may be written to without changing ``value``; anything else as it is.

    The one that the model returns stays empty. It is not left out: with it a model may lay its keys out differently,
    and the kernels' bits follow the layout.
    """
    if not hasattr(value, "get_seq_length"):
        return value
    cache = copy(value)
    cache.layers = [copy(layer) for layer in value.layers]
    return cache
