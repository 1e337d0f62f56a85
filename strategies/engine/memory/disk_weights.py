"""Weights that rest on the disk, and come to the device by way of slots on the host (COPY of the layout).

Each of them is whole in a file on one drive (``core/on_disk.py``). For its use it is read past the page cache into its
slot, by the slot's thread, and UP copies it from there. What is needed next is ``expect``-ed: it is read ahead as soon
as its slot is free. Everybody else, who reads or writes weights from outside, has a view of the file (``resting``),
after it was compared with its checksums (``refuse_damaged``).

The CPU's update of a trained weight makes the new one in PARKED, over the gradient. From there it goes to its place in
the file (``rewrite``): by a thread of the drive, behind the worker, which goes on with other updates.

Ordering. Everything that concerns a slot is done by its thread (``slots.py``).
    copy up, then read      the thread waits for UP (``leaves``) before it reads something else into the slot
    read, then copy up      ``bring_in`` waits for the read, and the caller lets UP wait for what the host has done
    update, then write      the drive's thread waits for the worker's update, the future that it was given
    write, then read        a read that a slot's thread is given after ``rewrite`` waits there for the write's future.
                            One that it was given before is done before that; what it brought is not used, for the
                            slot ``holds`` it no more
                            From outside: ``written`` waits until the file has it
    read, then write        what is read is compared with the checksum of what was written last: the drive's thread, and
                            who writes from outside, waits for the reads of that weight that were given before
    write, then reuse       the bucket's update counts as done when the write is: its future is the update's. For it
                            wait who puts the next gradient into PARKED (``gradients_down.py``), and who reads the
                            weight from outside (``settle``)
A wrong guess of what is needed next costs time. The first error is kept, and raised by all who come later.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor, Future
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from deepstow.strategies.core.layout import Item, Layout
from deepstow.strategies.core.on_disk import weight_bytes_on_disk, weight_file_bytes, weights_on_disk
from deepstow.strategies.engine import slots
from deepstow.strategies.engine.memory.arena import Arena
from deepstow.strategies.engine.memory.scratch_file import ScratchFile
from deepstow.strategies.engine.memory.tiers import Striped
from deepstow.strategies.engine.slots import WindowSlot
from deepstow.strategies.engine.transfer.transfer import Event, Stream, Transfer

Updated: TypeAlias = tuple[bool, Event]  # whether an update changed the weight, and the event after it
WRITES = "stow-write"  # names of threads
FORESEEN = 4  # weights of a slot that are to come; several may be brought in at once


class _Slot(WindowSlot):
    """One slot, of weights by their buckets' indices; what is to come has the next first."""

    left: Event | None = None  # UP has read what it holds


class DiskWeights:
    """The weights of all buckets of ``layout`` that rest on the disk. ValueError if there cannot be such a file."""

    def __init__(self, layout: Layout, arena: Arena, transfer: Transfer) -> None:
        self._transfer = transfer
        self._file = Striped(layout.disk, weight_file_bytes(layout), "weights", checked=layout.disk_checksums)
        self._first = slots.FirstError()
        at = dict[int, _Slot]()  # by address
        self._places: dict[int, tuple[_Slot, Tensor, ScratchFile, int]] = {}  # slot, its memory, and where it rests
        self._new: dict[int, tuple[Executor, Tensor]] = {}  # of those that updates write: by whom, and from where
        self._rewrites: dict[int, Future[Updated]] = {}  # that the next read of a weight waits for
        self._reads: dict[int, Future[None]] = {}  # the last one of each weight
        drives = [slots.thread(WRITES) for _ in layout.disk]
        for index, (drive, offset) in weights_on_disk(layout).items():
            bucket = layout.buckets[index]
            memory = arena.of(bucket.name, Item.COPY, torch.uint8)
            assert memory is not None and memory.numel() == weight_bytes_on_disk(bucket)
            slot = at.setdefault(memory.data_ptr(), _Slot(self._first))
            self._places[index] = slot, memory, self._file.on(drive), offset
            if bucket.copy_on_disk:
                parked = arena.of(bucket.name, Item.PARKED, torch.uint8)
                assert parked is not None and parked.numel() == memory.numel()
                self._new[index] = drives[drive], parked
        self._slots = list(at.values())
        self._drives = drives

    def resting(self, index: int) -> Tensor | None:
        """The bytes of a weight in the file, to be read and written from outside; None: it does not rest there."""
        if index not in self._places:
            return None
        _, memory, file, offset = self._places[index]
        return file.mapped()[offset : offset + memory.numel()]

    def refuse_damaged(self, index: int, part: range) -> None:
        """Raise DiskError if these bytes of ``resting`` cannot be read any more, or are not what was written. Nothing
        reads the weight when it returns, so that it may be written.
        """
        place = self.resting(index)
        if place is not None:
            _, _, file, offset = self._places[index]
            if index in self._reads:
                self._reads[index].result()
            self._first.refuse()
            file.refuse_damaged(place, offset, part)

    def written(self, index: int, part: range | None = None) -> None:
        """Somebody has written to ``resting``, at first to all of it: return when the next read has it."""
        place = self.resting(index)
        if place is not None:
            slot, _, file, offset = self._places[index]
            file.keep(place, offset, part)
            if slot.holds == index:
                slot.holds = None

    def rewrite(self, index: int, update: Future[Updated]) -> Future[Updated]:
        """The worker was given ``update``, which may change the weight: what is done when the file has the new one."""
        if index not in self._new:
            return update
        drive, slot = self._new[index][0], self._places[index][0]
        self._rewrites[index] = written = drive.submit(self._write, index, update, self._reads.get(index))
        if slot.holds == index:
            slot.holds = None
        return written

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
        self._places[index][0].wait()

    def leaves(self, index: int, sent: Event | None) -> None:
        """After ``sent`` UP has read the slot, into which something else may be read."""
        slot, *_ = self._places[index]
        slot.left = sent
        slot.expected = [other for other in slot.expected if other != index]
        self._read_ahead(slot)

    def _read_ahead(self, slot: _Slot) -> None:
        if slot.expected:
            self._load(slot.expected[0])

    def _load(self, index: int) -> None:
        slot, memory, file, offset = self._places[index]
        if slot.holds != index:
            read = partial(self._read, memory, file, offset, slot.left, self._rewrites.pop(index, None))
            self._reads[index] = slot.give(read)
            slot.holds = index

    def _read(
        self, memory: Tensor, file: ScratchFile, offset: int, left: Event | None, rewrite: Future[Updated] | None
    ) -> None:
        if rewrite is not None:
            rewrite.result()
        self._transfer.host_wait(left)
        self._transfer.uses(Stream.HOST, writes=[memory])
        file.read(memory, offset)

    def _write(self, index: int, update: Future[Updated], read: Future[None] | None) -> Updated:
        changed, event = update.result()
        if not changed:
            return changed, event
        if read is not None:
            read.result()
        (_, new_weight), (_, _, file, offset) = self._new[index], self._places[index]
        self._transfer.uses(Stream.HOST, reads=[new_weight])
        self._first.run(partial(file.write, new_weight, offset))
        self._first.refuse()
        return changed, self._transfer.record(Stream.HOST)

    def close(self) -> None:
        for drive in self._drives:
            drive.shutdown(wait=True)
        for slot in self._slots:
            slot.close()
        self._file.close()
