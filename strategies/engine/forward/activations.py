"""Saved tensors that wait on the host: copied down during forward, brought back during backward.

    forward of i             a copy down begins as soon as the tensor is made
    end of forward of i + 1  compute waits for those copies; only then is the device's memory released
    backward of i + 1 begins the copies up begin
    backward of i            waits for them where it reads them

On the host is what all blocks send in one micro-batch, in a region of planned size. What comes back has the bits, the
shape and the strides of what was sent: kernels' bits depend on strides.

[Note: lifetimes] Memory on the device belongs to torch's allocator, which gives what nobody references to work that
COMPUTE issues later. So a tensor on its way down is referenced until COMPUTE has been told to wait for the copy. One on
its way up is referenced until COMPUTE waits for it as its reader or, if its graph was freed and nobody will read it,
until the next block begins or ends. A copy up begins after everything that was issued on COMPUTE before, since that
may use the memory that the copy writes to. By then COMPUTE has waited for every copy down, so the host has what is
brought back. A slot on the host is free again when the graph is gone: backward may run again over a graph that was
retained. A copy down waits for the last copy up, which may read its slot. Slots are a stack: forward pushes, backward
pops. A tensor that finds no slot, or that has gaps, is not sent; the first time this is logged.

[Note: no graph] The graph references the room, so the room must not reference a graph. Outputs of operators are sent
before autograd has seen them, so at the end of their block they are replaced by detached aliases. These share the
version counter, by which a later write is noticed, and refused.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.layout import Addresses, Item, Spot, aligned
from deepstow.strategies.core.sizes import human
from deepstow.strategies.engine.memory.arena import Arena
from deepstow.strategies.engine.tensors.nested import tensors_in
from deepstow.strategies.engine.transfer.transfer import Event, Stream, Transfer, transfer_for

logger = logging.getLogger(__name__)


class Sent:
    """A tensor that waits on the host in ``memory``, which is free again when nothing references this object."""

    def __init__(self, room: HostRoom, memory: Tensor, like: Tensor) -> None:
        self.memory = memory
        self.tensor: Tensor | None = None  # on its way up, or there
        self.up: Event | None = None
        self._room = room
        self._shape = like.shape
        self._strides = like.stride()
        self._device = like.device

    def get(self) -> Tensor:
        return self._room.give(self)

    def allocate(self) -> Tensor:
        return torch.empty_strided(self._shape, self._strides, dtype=self.memory.dtype, device=self._device)


@dataclass(frozen=True, slots=True)
class Leaving:
    """A tensor on its way down, referenced until the end of the forward of the block after that of ``call``."""

    call: int
    tensor: Tensor
    version: int
    event: Event


class HostRoom:
    """The host's memory for the saved tensors of ``blocks``, which are all in order of use, and the copies there and
    back. Nothing is sent before ``use`` names an arena; ``transfer`` is by default what suits the first tensor.
    """

    def __init__(self, blocks: Sequence[nn.Module], arena: Arena | None, transfer: Transfer | None = None) -> None:
        self.num_refused = 0
        self._transfer = transfer
        self._call = -1  # the one in forward, by the index of its block, or in rounds by number
        self._rounds = False
        self._sent: dict[int, list[weakref.ref[Sent]]] = {}  # per call, in the newest forward
        self._leaving: list[Leaving] = []
        self._coming: list[tuple[weakref.ref[Sent], Tensor, Event]] = []
        self._last_up: Event | None = None
        self._arena: Arena | None = None
        self.use(arena)
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._begin, index))
            block.register_forward_hook(partial(self._end, index), always_call=True)

    def use(self, arena: Arena | None, transfer: Transfer | None = None) -> None:
        """Send to the spot for saved tensors of ``arena`` from now on; None: send nothing any more. What was sent
        before can still be read. Returns when no copy uses the former arena.
        """
        if self._transfer is not None and self._arena is not None:
            self._transfer.host_wait(self._transfer.record(Stream.DOWN), self._transfer.record(Stream.UP))
        self._transfer = self._transfer or transfer
        self._arena = arena  # it stays pinned as long as it is referenced
        self._memory = None if arena is None else arena.of("", Item.SAVED, torch.uint8)
        self._borders = [] if arena is None else arena.borders(arena.addresses.of("", Item.SAVED))
        self._slots: list[tuple[int, weakref.ref[Sent]]] = []  # a stack: where each ends, in bytes, and whose it is

    @property
    def transfer(self) -> Transfer | None:
        """Who makes the copies; None before the first."""
        return self._transfer

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes so far, up and down."""
        return (self._transfer.bytes_up, self._transfer.bytes_down) if self._transfer is not None else (0, 0)

    # --- forward -----------------------------------------------------------------------------------------------------

    def begin_rounds(self) -> None:
        """Several micro-batches take turns in each block (``layers_first.py``): one forward of all of them follows."""
        self._release(None)
        self._rounds, self._call = True, -1
        self._sent.clear()

    def end_rounds(self) -> None:
        """That forward has ended."""
        self._rounds = False

    def _begin(self, index: int, module: nn.Module, inputs: Any) -> None:
        if not self._rounds and index <= self._call:
            self._release(None)  # of an earlier forward
        self._call = self._call + 1 if self._rounds else index
        self._sent[self._call] = []

    def send(self, tensor: Tensor) -> Sent | None:
        """Start to copy ``tensor`` down. The caller keeps what is returned instead; None: it cannot be sent."""
        source = flat(tensor)
        start = None if source is None else self._top(tensor.nbytes)
        if source is None or start is None or self._memory is None:
            self.num_refused += 1
            if self.num_refused == 1:
                logger.warning(
                    "a saved tensor of %s is not sent to the host: it has gaps, or the memory there is full (before "
                    "stow and after close there is none); inputs then stay on the device, outputs are computed again",
                    human(tensor.nbytes),
                )
            return None
        if self._transfer is None:
            self._transfer = transfer_for(tensor.device)
        transfer, memory = self._transfer, self._memory[start : start + tensor.nbytes].view(tensor.dtype)
        sent = Sent(self, memory, tensor)
        self._slots.append((start + aligned(tensor.nbytes), weakref.ref(sent)))
        transfer.uses(Stream.COMPUTE, writes=[source])
        transfer.wait(Stream.DOWN, transfer.record(Stream.COMPUTE), self._last_up)
        transfer.copy(Stream.DOWN, memory, source)
        self._leaving.append(Leaving(self._call, tensor, tensor._version, transfer.record(Stream.DOWN)))
        self._sent.setdefault(self._call, []).append(weakref.ref(sent))
        return sent

    def _top(self, num_bytes: int) -> int | None:
        """Where the memory on top of the stack begins; None if it would reach beyond the room."""
        while self._slots and self._slots[-1][1]() is None:
            self._slots.pop()
        start = self._slots[-1][0] if self._slots else 0
        for border in self._borders:
            if start < border < start + num_bytes:  # no copy may lie in two registrations
                start = border
        return start if self._memory is not None and start + aligned(num_bytes) <= self._memory.numel() else None

    def _end(self, index: int, module: nn.Module, inputs: Any, output: Any) -> None:
        self._release(self._call if output is not None else None)  # None: an error
        self._leaving = [replace(item, tensor=item.tensor.detach()) for item in self._leaving]  # see [Note: no graph]
        if not torch.is_grad_enabled():
            return
        soon = [*self._sent.get(self._call, []), *self._sent.get(self._call - 1, [])]
        if soon:
            for node in {tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None}:
                node.register_prehook(lambda grads: self._bring(soon))  # the first of them to run

    def _release(self, before: int | None) -> None:
        """Release the device's memory of what blocks before this one, or all, have sent. See [Note: lifetimes]."""
        gone = [saved for saved in self._leaving if before is None or saved.call < before]
        self._leaving = [saved for saved in self._leaving if before is not None and saved.call >= before]
        for saved in gone:
            assert self._transfer is not None
            self._transfer.wait(Stream.COMPUTE, saved.event)
            self._transfer.uses(Stream.COMPUTE, writes=[flat(saved.tensor)])  # by whoever gets the memory next
            unwritten(saved.tensor, saved.version)
        self._forget()

    # --- backward ----------------------------------------------------------------------------------------------------

    def _bring(self, waiting: list[weakref.ref[Sent]]) -> None:
        self._release(None)
        for ref in waiting:
            sent = ref()
            if sent is not None and sent.tensor is None:
                self._fetch(sent)
        waiting.clear()

    def _fetch(self, sent: Sent) -> None:
        assert self._transfer is not None
        transfer, tensor = self._transfer, sent.allocate()
        target = flat(tensor)
        assert target is not None
        transfer.uses(Stream.COMPUTE, writes=[target])  # by whoever had the memory before
        transfer.wait(Stream.UP, transfer.record(Stream.COMPUTE))
        transfer.copy(Stream.UP, target, sent.memory)
        sent.tensor, sent.up = tensor, transfer.record(Stream.UP)
        self._last_up = sent.up
        self._coming.append((weakref.ref(sent), tensor, sent.up))

    def give(self, sent: Sent) -> Tensor:
        """What was sent, for COMPUTE; from now on only the reader references it."""
        assert self._transfer is not None
        if sent.tensor is None:
            self._release(None)
            self._fetch(sent)
        tensor, sent.tensor = sent.tensor, None
        assert tensor is not None
        self._transfer.wait(Stream.COMPUTE, sent.up)
        self._transfer.uses(Stream.COMPUTE, reads=[flat(tensor)])
        self._coming = [arrival for arrival in self._coming if arrival[1] is not tensor]
        return tensor

    def _forget(self) -> None:
        """Release what came up for a graph that was freed."""
        coming, self._coming = self._coming, []
        for arrival in coming:
            if arrival[0]() is not None:
                self._coming.append(arrival)
            elif self._transfer is not None:
                self._transfer.wait(Stream.COMPUTE, arrival[2])


def arena_of_saved(num_bytes: int, device: torch.device) -> Arena:
    """A pinned arena on the host for saved tensors alone."""
    arena = Arena(Addresses({Tier.HOST: num_bytes}, {("", Item.SAVED): Spot(Tier.HOST, 0, num_bytes)}), device)
    arena.pin()
    return arena


def unwritten(tensor: Tensor, version: int) -> Tensor:
    """``tensor``, which must not have been written to since it had that version."""
    if tensor._version != version:
        raise RuntimeError(
            "a saved tensor was written to before backward: write strategies.recompute.activation_offloading: false"
        )
    return tensor


def flat(tensor: Tensor) -> Tensor | None:
    """All elements of ``tensor`` in their order in memory; None if there are gaps or overlaps."""
    if tensor.numel() == 0:
        return tensor.detach().as_strided((0,), (1,))
    order = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    expected = 1
    for stride, size in order:
        if size != 1 and stride != expected:
            return None
        expected *= size
    return tensor.detach().as_strided((tensor.numel(),), (1,))
