"""Recomputation: blocks whose forward runs again in backward, except for operators whose outputs are kept.

The mechanism is torch's: non-reentrant checkpoints, with their selective contexts if anything is kept. A checkpoint
replaces a block's ``forward``, inside all hooks of the block, so that the block's weights, which the memory engine or
ZeRO fetches in hooks, are there when backward runs it again. The engine also stands ``around`` each run, because
backward may start one before any hook of the block has run (``guard.py``).

What is kept is named by kind and number within one forward of a block: "linear 3" is its fourth product with a weight.

    linear      a product with a weight
    attention   a fused kernel, or the product of two activations after a softmax
    scores      any other product of two activations
    softmax     of any size

A product that ranks sum in place at once, as those of divided layers, is kept as the sum, and its replay neither
multiplies nor sums: the collective has the name of its product. Of one whose sum is divided the slice is kept
(``token_slices.py``).

What waits on the host (``activations.py``) is sent in two ways: the input by saved-tensor hooks around the checkpoint,
outputs by a dispatch mode beneath the selective one, for which they are not kept; in the replay the same mode returns
them instead of running the operator.

Exactness. An operator that is not found where it was expected is run again, or kept for nothing, which changes no bit.
Two kinds of output cannot be kept. One that is written to later would come back changed, so the first forward keeps
nothing and looks for such outputs, those that collectives write to in place included. One that draws random numbers
would not draw them in the replay, so operators that are replayed after it would get other numbers: a fused attention
with dropout is run again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from deepstow.strategies.core.applied import log_applied
from deepstow.strategies.core.facts import UnitKind
from deepstow.strategies.core.plan import INPUT, Keep
from deepstow.strategies.engine.forward.activations import HostRoom, Sent, arena_of_saved, unwritten
from deepstow.strategies.engine.forward.effects import Effects, Snapshot
from deepstow.strategies.engine.forward.token_slices import PRODUCT
from deepstow.strategies.engine.memory.accelerator import device_of
from deepstow.strategies.engine.tensors.nested import tensors_in

if TYPE_CHECKING:
    from deepstow.strategies.core.plan import Plan
    from deepstow.strategies.engine.transfer.transfer import Transfer

aten = torch.ops.aten
WITH_WEIGHTS = {aten.mm, aten.addmm, aten._addmm_activation, aten.convolution, aten._grouped_mm, PRODUCT}
BATCHED = {aten.bmm, aten.baddbmm}
SHAPED = {aten.view, aten._unsafe_view, aten.detach}
SUM = torch.ops.c10d.allreduce_
OVERWRITING = {SUM, torch.ops.c10d.broadcast_, torch.ops.c10d.reduce_}  # without a new version of the tensor
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class Names:
    """Names the operators of one forward of ``block``, in the order in which they run."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._counts: dict[str, int] = {}
        self._last: str | None = None  # the kind that was named last
        self._product: str | None = None  # made just now
        self._weights: set[int] | None = None

    def of(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        """The name of this call; None if its output is never kept, or must not be."""
        if func.overloadpacket in SHAPED:
            return None
        product, self._product = self._product, None
        if func.overloadpacket is SUM:
            return product
        kind = self._kind(func, args)
        if kind is None:
            return None
        again = kind == self._last == "attention"  # of another document of a packed row
        number = self._counts[kind] = self._counts.get(kind, -1) + (not again)
        self._last = kind
        name = f"{kind} {number}"
        self._product = name if kind == "linear" else None
        return None if kind == "attention" and draws(func, args, kwargs) else name

    def _kind(self, func: Any, args: tuple[Any, ...]) -> str | None:
        packet = func.overloadpacket
        if packet in WITH_WEIGHTS:
            return "linear"
        if packet in BATCHED:
            if any(isinstance(arg, Tensor) and self._is_weight(arg) for arg in args):
                return "linear"
            return "attention" if self._last == "softmax" else "scores"
        name = packet.__name__
        if "backward" in name:
            return None
        if any(
            kernel in name for kernel in ("scaled_dot_product", "flash_attention", "efficient_attention", "varlen_attn")
        ):
            return "attention"
        return "softmax" if name in ("_softmax", "_safe_softmax") else None

    def _is_weight(self, tensor: Tensor) -> bool:
        if self._weights is None:
            self._weights = {param.untyped_storage()._cdata for param in self._block.parameters()}
        return tensor.untyped_storage()._cdata in self._weights


def draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a fused attention draws random numbers."""
    values = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | {**kwargs}
    return bool(values.get("dropout_p"))


class OutputRecorder(TorchDispatchMode):
    """Records the outputs of a forward that are named in ``kept``, and whether they were written to afterwards; one in
    ``hosted`` is written to by its own sum as well, since it is sent before. Torch counts no writes of kernels that it
    does not know, as Liger's, which turns queries where they are: one that ``learns`` sums the bits of outputs, once
    made and at the end. A write that only moves them is missed.
    """

    def __init__(self, block: nn.Module, kept: Collection[str], hosted: Collection[str], *, learns: bool) -> None:
        super().__init__()
        self._names = Names(block)
        self._kept = kept
        self._hosted = hosted
        self._learns = learns
        self._made: list[tuple[str, Tensor, int, Tensor | None]] = []
        self._overwritten = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = self._names.of(func, args, kwargs or {})
        if func.overloadpacket in OVERWRITING:
            written = {tensor.untyped_storage()._cdata for tensor in tensors_in(args)}
            for output_name, tensor, *_ in self._made:
                is_its_sum = output_name == name and output_name not in self._hosted
                if is_its_sum != (tensor.untyped_storage()._cdata in written):
                    self._overwritten.add(output_name)
        elif name in self._kept:
            for tensor in tensors_in(out):
                self._made.append((str(name), tensor, tensor._version, _sum_of_bits(tensor) if self._learns else None))
        return out

    def tensors_of(self, names: Collection[str]) -> list[Tensor]:
        names = set(names) - self.written
        return [tensor for name, tensor, *_ in self._made if name in names]

    @property
    def written(self) -> frozenset[str]:
        changed = (
            name
            for name, tensor, version, bits in self._made
            if tensor._version != version or (bits is not None and not torch.equal(_sum_of_bits(tensor), bits))
        )
        return frozenset(changed) | self._overwritten


def _sum_of_bits(tensor: Tensor) -> Tensor:
    return tensor.detach().view(getattr(torch, f"int{8 * tensor.element_size()}")).sum()


class Sending(TorchDispatchMode):
    """Sends outputs of a forward that are named in ``hosted`` to the host; ``sent`` has them by operator and number.

    Calls whose outputs are ``kept`` on the device are not numbered, because a mode does not see them in a replay.
    """

    def __init__(self, block: nn.Module, kept: Collection[str], hosted: Collection[str], room: HostRoom) -> None:
        super().__init__()
        self.sent: dict[tuple[Any, int], Any] = {}
        self._names = Names(block)
        self._kept = kept
        self._hosted = hosted
        self._room = room
        self._calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = self._names.of(func, args, kwargs or {})
        if name in self._kept:
            return out
        if name in self._hosted:
            outputs = [tensor for tensor in tensors_in(out) if tensor.device == args[0].device]
            sent = {id(tensor): self._room.send(tensor) for tensor in outputs}
            if None not in sent.values():  # otherwise it runs again
                self.sent[func, self._calls[func]] = tree_map(lambda value: sent.get(id(value), value), out)
        self._calls[func] += 1
        return out


class Receiving(TorchDispatchMode):
    """In a replay: returns what ``sending`` has sent instead of running its operators again."""

    def __init__(self, sending: Sending) -> None:
        super().__init__()
        self._sending = sending
        self._calls: Counter[Any] = Counter()

    def __enter__(self) -> Any:
        self._calls.clear()  # a graph that was retained is replayed again
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = (func, self._calls[func])
        self._calls[func] += 1
        if call in self._sending.sent:
            return tree_map(lambda value: value.get() if isinstance(value, Sent) else value, self._sending.sent[call])
        return func(*args, **(kwargs or {}))


class Checkpointed:
    """Replaces the ``forward`` of ``block``: keeps its inputs and the outputs named in ``kept``; those in ``hosted``,
    and the input if it is among them, wait in ``room``.
    """

    def __init__(
        self,
        block: nn.Module,
        kept: Collection[str],
        hosted: Collection[str] = (),
        room: HostRoom | None = None,
        name: str = "",
    ) -> None:
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext  # entered for forward and for each replay
        self.watch: Callable[[Tensor], object] | None = None  # the plan check's: called with what stays on the device
        self.forward = block.forward
        self.room = room if hosted else None
        self._block, self._kept, self._hosted = block, frozenset(kept), frozenset(hosted)
        self._written: frozenset[str] | None = None if kept else frozenset()
        self._effects = Effects(block, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's forward; without gradients nothing is kept or recomputed."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        args = tuple(map(_copied, args))
        kwargs = {name: _copied(value) for name, value in kwargs.items()}
        learns = self._written is None and not any(isinstance(leaf, FakeTensor) for leaf in tensors_in((args, kwargs)))
        # A mode, inside of which torch compiles nothing, only where outputs are kept: compiled blocks keep none.
        looks = bool(self._kept) and (learns or self.watch is not None)
        recorder = OutputRecorder(self._block, self._kept, self._hosted, learns=learns) if looks else None
        with self._input_sent(args):
            contexts = partial(self._contexts, recorder)
            out = checkpoint(self._run, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        if self.watch is not None:
            on_device = args[1:] if INPUT in self._hosted else args
            outputs = recorder.tensors_of(self._kept - self._hosted) if recorder is not None else ()  # kept, or to be
            for tensor in (*tensors_in(on_device), *tensors_in(kwargs), *outputs):
                self.watch(tensor)
        if recorder is not None and learns:
            self._written = recorder.written
        return out

    @contextmanager
    def _input_sent(self, args: tuple[Any, ...]) -> Iterator[None]:
        """Send the hidden states that the checkpoint saves to the host, if the plan says so."""
        stream = stream_in(args) if INPUT in self._hosted else None
        if stream is None or self.room is None:
            yield
            return
        room, start = self.room, stream.data_ptr()
        del args, stream

        def pack(tensor: Tensor) -> Sent | tuple[Tensor, int]:
            sent = room.send(tensor) if tensor.data_ptr() == start else None
            return (tensor, tensor._version) if sent is None else sent  # hooks switch off torch's check of versions

        def unpack(kept: Sent | tuple[Tensor, int]) -> Tensor:
            return kept.get() if isinstance(kept, Sent) else unwritten(*kept)

        with saved_tensors_hooks(pack, unpack):
            yield

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """The forward, with its own copies of caches each time: a replay must find them as the first run did."""
        with self.around():
            return self.forward(*map(_copied, args), **{name: _copied(value) for name, value in kwargs.items()})

    def _contexts(self, recorder: OutputRecorder | None) -> Contexts:
        snapshot = Snapshot(self._effects)
        forwards: list[AbstractContextManager[Any]] = [snapshot.first(), *([recorder] if recorder is not None else [])]
        replays: list[AbstractContextManager[Any]] = [snapshot]
        if self._written is None:
            return Within(forwards), Within(replays)  # the first time nothing is kept
        kept, hosted = self._kept - self._written - self._hosted, (self._hosted - {INPUT}) - self._written
        if hosted and self.room is not None:
            sending = Sending(self._block, kept, hosted, self.room)
            forwards.append(sending)
            replays.append(Receiving(sending))
        if kept:
            forward, replay = create_selective_checkpoint_contexts(self._policy(kept))
            forwards.append(forward)  # above the others
            replays.append(replay)
        return Within(forwards), Within(replays)

    def _policy(self, kept: Collection[str]) -> Callable[..., CheckpointPolicy]:
        # Torch before 2.13 calls the policy in replays, too: those calls are numbered separately.
        names = {False: Names(self._block), True: Names(self._block)}

        def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            is_kept = names[context.is_recompute].of(func, args, kwargs) in kept
            return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

        return policy


class Within(ExitStack):
    """Several contexts, the first one outermost. Can be entered repeatedly, for graphs that are retained."""

    def __init__(self, contexts: Sequence[AbstractContextManager[Any]]) -> None:
        super().__init__()
        self._contexts = contexts

    def __enter__(self) -> Self:
        for context in self._contexts:
            self.enter_context(context)
        return self


def stream_in(args: tuple[Any, ...]) -> Tensor | None:
    """The hidden states among a block's arguments: the first one, as Hugging Face's blocks have it."""
    return args[0] if args and isinstance(args[0], Tensor) else None


def recompute(
    model: nn.Module, plan: Plan, transfer: Transfer | None = None, device: torch.device | str | None = None
) -> None:
    """Change the blocks of ``model`` to keep in forward what ``plan`` says, and reserve host memory for it; with
    ``strategies.offload`` that memory is part of its host arena, which ``stow`` takes. ``device``: the one to train on;
    by default the accelerator, if the plan counts on one.

    Raises:
        ValueError: one of the blocks is recomputed already, or there is no such device.
        OutOfMemoryError: the host memory that the plan counts on is not there.
    """
    keeps = [plan.keep(unit.name) for unit in plan.facts.units if unit.kind is UnitKind.BLOCK]
    room = None
    if any(keep.hosted for keep in keeps):
        arena = None
        if plan.addresses is None:
            where = device_of(device if device is not None or plan.facts.machine.has_accelerator else "cpu")
            arena = arena_of_saved(plan.hosted_bytes(), where)
        room = HostRoom([model.get_submodule(keep.unit) for keep in keeps], arena, transfer)
    kept = {keep.unit: keep.kept for keep in keeps if keep.recomputes}
    checkpoint_blocks(model, kept, {keep.unit: keep.hosted for keep in keeps}, room)
    log_applied("recompute", ((keep.unit, _effect(keep)) for keep in keeps if keep.recomputes))


def _effect(keep: Keep) -> str:
    hosted = f"; waiting on the host: {', '.join(keep.hosted)}" if keep.hosted else ""
    return f"{keep.policy}, keeps {', '.join(('its input', *keep.kept))}{hosted}"


def room_of(model: nn.Module) -> HostRoom | None:
    """The room on the host for saved tensors of ``model``, if there is one."""
    forwards = (checkpointed(module) for module in model.modules())
    return next((forward.room for forward in forwards if forward is not None and forward.room is not None), None)


def checkpoint_blocks(
    model: nn.Module,
    kept: Mapping[str, Collection[str]],
    hosted: Mapping[str, Collection[str]] = MappingProxyType({}),
    room: HostRoom | None = None,
) -> None:
    """Recompute blocks by dotted path, keeping the outputs listed for each; those in ``hosted`` wait in ``room``."""
    for path, names in kept.items():
        block: Any = model.get_submodule(path)
        if checkpointed(block) is not None or getattr(block, "gradient_checkpointing", False):
            raise ValueError(f"{path} is recomputed already")
        block.forward = Checkpointed(block, names, hosted.get(path, ()), room, path)


def checkpointed(module: nn.Module) -> Checkpointed | None:
    """What replaces the forward of ``module``, if it is recomputed."""
    forward = module.__dict__.get("forward")
    return forward if isinstance(forward, Checkpointed) else None


def _copied(value: Any) -> Any:
    """A copy of a cache of keys and values, which can be written to without changing ``value``; anything else as it is.

    The cache that the model returns stays empty. It is not left out, because with it a model may lay its keys out
    differently, and the kernels' bits depend on the layout.
    """
    if not hasattr(value, "get_seq_length"):
        return value
    cache = _with_own_states(value)
    if hasattr(value, "layers"):
        cache.layers = [_with_own_states(layer) for layer in value.layers]
    else:  # an encoder-decoder's
        cache.self_attention_cache = _copied(value.self_attention_cache)
        cache.cross_attention_cache = _copied(value.cross_attention_cache)
        cache.is_updated = dict(value.is_updated)
    return cache


def _with_own_states(holder: Any) -> Any:
    """A copy whose lists and dicts are its own, and tensors in them, since states of linear attention and convolutions
    are overwritten there. Keys and values are attributes, which are made anew.
    """
    clone = copy(holder)
    for name, value in vars(holder).items():
        if isinstance(value, dict):
            setattr(clone, name, {key: _own(item) for key, item in value.items()})
        elif isinstance(value, list):
            setattr(clone, name, [_own(item) for item in value])
    return clone


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
