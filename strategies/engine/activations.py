"""Saved tensors that wait on the host: sent down under forward, brought back under backward.

Problem. What a recomputed block keeps lies on the device from its forward to its backward, and nobody reads it.

Order of things, for what block i sends:

    forward of i             a copy down begins as soon as the tensor is made
    end of forward of i + 1  compute waits for those copies; then, and not before, the device's memory is given up
    backward of i + 1 begins the copies up begin
    backward of i            waits for them where it reads them

Arithmetic. On the device, what two blocks send at a time; on the host, what all of them send in one micro-batch, in one
mapping of exact size, pinned once. Each byte crosses the link twice per micro-batch.

Invariant. What comes back has the bits, the shape and the strides of what was sent: kernels' bits follow the strides.

[Note: whose memory] Memory on the device is the allocator's: what nobody holds it gives to work that COMPUTE issues
later. So a tensor on its way down is held until COMPUTE has been told to wait for the copy, and one on its way up until
COMPUTE waits for it as its reader, or, if its graph is gone and nobody will read it, at the next border. A copy up
begins after all that COMPUTE was given before, since that may use the memory that it writes to. By then COMPUTE has
waited for every copy down, so that the host has what comes up.

A place on the host is given back when the last reference to what was sent is gone, that is, with the graph: backward
may be run again over a graph that was retained. A copy down waits for the last copy up, which may read its place.

Places are a stack: forward puts, backward takes in reverse. A tensor for which there is no place, or which has gaps, is
not sent; this is counted, and said the first time. The mapping is made when the first tensor comes: by then weights
have moved to where they rest, and the host no longer has them twice.

[Note: no graph] The room must not hold a graph: through it the graph would hold itself for ever. Outputs are given
before autograd has seen them, so it is at the end of their block that they are exchanged for aliases without one.
These share the version, by which a later write is seen.

Refused: a tensor that is written to after it was sent. What came back would be neither its old value nor its new one.
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

from strategies.core.peak import HOSTED_ALIGN
from strategies.core.sizes import human
from strategies.engine.memory.arena import Pages
from strategies.engine.tensors.nested import tensors_in
from strategies.engine.transfer.transfer import Event, Lane, Transfer, transfer_for

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Place:
    """A stretch of the host's mapping, in bytes."""

    start: int
    end: int
    free: bool = False


class Sent:
    """A tensor that waits on the host; ``get`` gives it back. Its place is free again when nobody holds this."""

    def __init__(self, room: HostRoom, place: Place, like: Tensor) -> None:
        self.place = place
        self.tensor: Tensor | None = None  # on its way up, or there
        self.up: Event | None = None
        self._room, self._shape, self._strides, self._dtype = room, like.shape, like.stride(), like.dtype

    def __del__(self) -> None:
        self.place.free = True  # that is all: this may run in any thread

    def get(self) -> Tensor:
        """The tensor on the device, for COMPUTE."""
        return self._room.give(self)

    def empty(self, device: torch.device) -> Tensor:
        """Memory on the device for it."""
        return torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=device)


@dataclass(frozen=True, slots=True)
class Leaving:
    """A tensor on its way down, held until the end of the forward of the block after ``block``."""

    block: int
    tensor: Tensor
    version: int
    event: Event


class HostRoom:
    """The host's memory for the saved tensors of some blocks, and the copies there and back.

    Args:
        blocks: all blocks of the model, in order of use.
        num_bytes: of all that waits at a time, with HOSTED_ALIGN for each tensor.
        transfer: moves the bytes; None: what suits the device of the first tensor that comes.
    """

    def __init__(self, blocks: Sequence[nn.Module], num_bytes: int, transfer: Transfer | None = None) -> None:
        self.num_bytes, self.num_refused = num_bytes, 0
        self._transfer = transfer
        self._pages: Pages | None = None
        self._places: list[Place] = []
        self._block = -1  # whose forward runs
        self._sent: dict[int, list[weakref.ref[Sent]]] = {}  # per block, in the newest forward
        self._leaving: list[Leaving] = []
        self._coming: list[tuple[weakref.ref[Sent], Tensor, Event]] = []
        self._last_up: Event | None = None
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._begin, index))
            block.register_forward_hook(partial(self._end, index), always_call=True)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes so far, up and down."""
        return (self._transfer.bytes_up, self._transfer.bytes_down) if self._transfer is not None else (0, 0)

    # --- forward -----------------------------------------------------------------------------------------------------

    def _begin(self, index: int, module: nn.Module, inputs: Any) -> None:
        if index <= self._block:
            self._release(None)  # of an earlier forward
        self._block = index
        self._sent[index] = []

    def send(self, tensor: Tensor) -> Sent | None:
        """Start to copy ``tensor`` down. The caller keeps what is returned instead; None: it cannot go."""
        transfer, pages = self._opened(tensor.device)
        source = flat(tensor)
        place = None if source is None else self._take(tensor.nbytes)
        if source is None or place is None:
            self._refuse(tensor)
            return None
        sent = Sent(self, place, tensor)  # from here on the place is free again if anything fails
        transfer.writes(Lane.COMPUTE, source)
        transfer.wait(Lane.DOWN, transfer.record(Lane.COMPUTE), self._last_up)
        transfer.copy(Lane.DOWN, self._memory(pages, place, source), source)
        self._leaving.append(Leaving(self._block, tensor, tensor._version, transfer.record(Lane.DOWN)))
        self._sent.setdefault(self._block, []).append(weakref.ref(sent))
        return sent

    def _end(self, index: int, module: nn.Module, inputs: Any, output: Any) -> None:
        self._release(index if output is not None else None)  # None: an error
        self._leaving = [replace(one, tensor=one.tensor.detach()) for one in self._leaving]  # see [Note: no graph]
        if not torch.is_grad_enabled():
            return
        soon = [*self._sent.get(index, []), *self._sent.get(index - 1, [])]
        if soon:
            for node in {tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None}:
                node.register_prehook(lambda grads: self._bring(soon))  # the first of them to run

    def _release(self, before: int | None) -> None:
        """Give up the device's memory of what blocks before this one, or all, have sent. See [Note: whose memory]."""
        gone = [one for one in self._leaving if before is None or one.block < before]
        self._leaving = [one for one in self._leaving if before is not None and one.block >= before]
        for one in gone:
            assert self._transfer is not None
            self._transfer.wait(Lane.COMPUTE, one.event)
            self._transfer.writes(Lane.COMPUTE, flat(one.tensor))  # whoever gets the memory next
            unwritten(one.tensor, one.version)
        self._forget()

    # --- backward ----------------------------------------------------------------------------------------------------

    def _bring(self, some: list[weakref.ref[Sent]]) -> None:
        """Start to copy up those that are not there yet; once, for a block may have several outputs."""
        self._release(None)
        for ref in some:
            sent = ref()
            if sent is not None and sent.tensor is None:
                self._fetch(sent)
        some.clear()

    def _fetch(self, sent: Sent) -> None:
        assert self._transfer is not None and self._pages is not None
        transfer, tensor = self._transfer, sent.empty(self._device)
        target = flat(tensor)
        assert target is not None
        transfer.writes(Lane.COMPUTE, target)  # whoever had the memory before
        transfer.wait(Lane.UP, transfer.record(Lane.COMPUTE))
        transfer.copy(Lane.UP, target, self._memory(self._pages, sent.place, target))
        sent.tensor, sent.up = tensor, transfer.record(Lane.UP)
        self._last_up = sent.up
        self._coming.append((weakref.ref(sent), tensor, sent.up))

    def give(self, sent: Sent) -> Tensor:
        """What was sent, for COMPUTE; the reader holds it from now on."""
        assert self._transfer is not None
        if sent.tensor is None:
            self._release(None)
            self._fetch(sent)
        tensor, sent.tensor = sent.tensor, None
        assert tensor is not None
        self._transfer.wait(Lane.COMPUTE, sent.up)
        self._transfer.reads(Lane.COMPUTE, flat(tensor))
        self._coming = [one for one in self._coming if one[1] is not tensor]
        return tensor

    def _forget(self) -> None:
        """Give up what came up for a graph that is gone."""
        coming, self._coming = self._coming, []
        for one in coming:
            if one[0]() is not None:
                self._coming.append(one)
            elif self._transfer is not None:
                self._transfer.wait(Lane.COMPUTE, one[2])

    # --- the host's memory -------------------------------------------------------------------------------------------

    def _opened(self, device: torch.device) -> tuple[Transfer, Pages]:
        """The transfer, and the mapping, which is made when the first tensor shows where the device is."""
        if self._transfer is None:
            self._transfer = transfer_for(device)
        if self._pages is None:
            pages = Pages(self.num_bytes, "what waits on the host for backward")
            pages.pin_for(device)
            self._device, self._pages = device, pages
        return self._transfer, self._pages

    def _take(self, num_bytes: int) -> Place | None:
        """A place on top of the stack; None, where it would be too high."""
        while self._places and self._places[-1].free:
            self._places.pop()
        start = self._places[-1].end if self._places else 0
        for border in self._pages.borders if self._pages is not None else ():
            if start < border < start + num_bytes:  # no copy may lie in two registrations
                start = border
        end = start + -(-num_bytes // HOSTED_ALIGN) * HOSTED_ALIGN
        if end > self.num_bytes:
            return None
        self._places.append(Place(start, end))
        return self._places[-1]

    def _memory(self, pages: Pages, place: Place, like: Tensor) -> Tensor:
        return pages.memory[place.start : place.start + like.nbytes].view(like.dtype)

    def _refuse(self, tensor: Tensor) -> None:
        self.num_refused += 1
        if self.num_refused == 1:
            logger.warning(
                "a saved tensor of %s does not go to the host, which has no place for it, or it has gaps: inputs stay "
                "on the device, the rest is made again",
                human(tensor.nbytes),
            )


def unwritten(tensor: Tensor, version: int) -> Tensor:
    """``tensor``, if nobody has written to it since it had that version.

    Raises:
        RuntimeError: somebody has.
    """
    if tensor._version != version:
        raise RuntimeError(
            "a saved tensor was written to before backward: write strategies.recompute.activation_offloading: false"
        )
    return tensor


def flat(tensor: Tensor) -> Tensor | None:
    """All elements of ``tensor`` in the order in which they lie in memory; None, where there are gaps or overlaps."""
    if tensor.numel() == 0:
        return tensor.detach().as_strided((0,), (1,))
    order = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    expected = 1
    for stride, size in order:
        if size != 1 and stride != expected:
            return None
        expected *= size
    return tensor.detach().as_strided((tensor.numel(),), (1,))
