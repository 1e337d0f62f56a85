"""Frozen weights that rest on the disk, and come to the device by way of slots on the host (COPY of the layout).

Each of them is whole in a file on one drive (``core/on_disk.py``). For its use it is read past the page cache into its
slot, by the slot's thread, and UP copies it from there. What is needed next is ``expect``-ed: it is read ahead as soon
as its slot is free. Everybody else, who reads or writes weights from outside, has a view of the file (``resting``).

Ordering. Everything that concerns a slot is done by its thread, in the order in which it was given.
    copy up, then read      the thread waits for UP (``leaves``) before it reads something else into the slot
    read, then copy up      ``bring_in`` waits for the read, and the caller lets UP wait for what the host has done
    write, then read        ``written`` waits until the file has it, and what the slot held of it is read again
A wrong guess of what is needed next costs time. The first error is kept, and raised by all who come later.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from strategies.core.layout import Item, Layout
from strategies.core.on_disk import bytes_on_disk, weight_file_bytes, weights_on_disk
from strategies.engine.memory import disk_state
from strategies.engine.memory.arena import Arena
from strategies.engine.memory.scratch_file import ScratchFile, StripedFile
from strategies.engine.transfer.transfer import Event, Lane, Transfer

FORESEEN = 4  # weights of a slot that are to come; several may be brought in at once


class _Slot:
    """One slot: the weight that it holds once its thread is done, by its bucket's index."""

    def __init__(self) -> None:
        self.thread = disk_state.thread()
        self.last: Future[None] | None = None  # what the thread was given last
        self.holds: int | None = None
        self.left: Event | None = None  # UP has read what it holds
        self.expected: list[int] = []  # what is to come, the next first


class DiskWeights:
    """The weights of all buckets of ``layout`` that rest on the disk. ValueError if there cannot be such a file."""

    def __init__(self, layout: Layout, arena: Arena, transfer: Transfer) -> None:
        self._transfer = transfer
        self._file = StripedFile(layout.disk, weight_file_bytes(layout), "frozen weights")
        self._first = disk_state.FirstError()
        slots = dict[int, _Slot]()  # by address
        self._places: dict[int, tuple[_Slot, Tensor, ScratchFile, int]] = {}  # slot, its memory, and where it rests
        for index, (drive, offset) in weights_on_disk(layout).items():
            bucket = layout.buckets[index]
            memory = arena.of(bucket.name, Item.COPY, torch.uint8)
            assert memory is not None and memory.numel() == bytes_on_disk(bucket, layout)
            slot = slots.setdefault(memory.data_ptr(), _Slot())
            self._places[index] = slot, memory, self._file.on(drive), offset
        self._slots = list(slots.values())

    def resting(self, index: int) -> Tensor | None:
        """The bytes of a weight in the file, to be read and written from outside; None: it does not rest there."""
        if index not in self._places:
            return None
        _, memory, file, offset = self._places[index]
        return file.mapped()[offset : offset + memory.numel()]

    def refuse_lost(self, index: int) -> None:
        """Raise DiskError if what rests there cannot be read any more."""
        if index in self._places:
            _, memory, file, _ = self._places[index]
            file.refuse_lost(memory)

    def written(self, index: int) -> None:
        """Somebody has written to ``resting``: return when the next read has it."""
        if index in self._places:
            slot, memory, file, _ = self._places[index]
            file.flush(memory)
            if slot.holds == index:
                slot.holds = None

    def expect(self, buckets: Iterable[int]) -> None:
        """These, by index and in this order, will be brought in. Others are none of ours."""
        for slot in self._slots:
            slot.expected = []
        full = 0
        for index in buckets:
            if index in self._places and len(expected := self._places[index][0].expected) < FORESEEN:
                expected.append(index)
                full += len(expected) == FORESEEN
                if full == len(self._slots):
                    break
        for slot in self._slots:
            self._read_ahead(slot)

    def bring_in(self, index: int) -> None:
        """Return when the slot holds the weight."""
        self._load(index)
        last = self._places[index][0].last
        assert last is not None
        last.result()
        self._first.refuse()

    def leaves(self, index: int, sent: Event | None) -> None:
        """After ``sent`` UP has read the slot, into which something else may be read."""
        slot, *_ = self._places[index]
        slot.left, slot.expected = sent, [other for other in slot.expected if other != index]
        self._read_ahead(slot)

    def _read_ahead(self, slot: _Slot) -> None:
        if slot.expected:
            self._load(slot.expected[0])

    def _load(self, index: int) -> None:
        slot, memory, file, offset = self._places[index]
        if slot.holds != index:
            slot.last = slot.thread.submit(self._first.run, partial(self._read, memory, file, offset, slot.left))
            slot.holds = index

    def _read(self, memory: Tensor, file: ScratchFile, offset: int, left: Event | None) -> None:
        self._transfer.host_wait(left)
        self._transfer.uses(Lane.HOST, writes=[memory])
        file.read(memory, offset)

    def close(self) -> None:
        for slot in self._slots:
            slot.thread.shutdown(wait=True)
        self._file.close()
