"""The disk tier: optimizer state that rests in stores (``tiers.py``) and visits the host for its update.

The state of each bucket that is ``on_disk`` is cut into pieces (``core/on_disk.py``). Each has a place in the files,
and one slot of the window, which pieces of all buckets pass in turn: WINDOW of the layout. A slot has a thread, which
moves state between the two. What will be updated is ``expect``-ed: it is read ahead as soon as its slot is free, and
written behind when it was updated, while others are read and updated. Updates that wait run in the order of buckets, so
pieces are read in that order; but those of an update that has begun are first: in backward earlier buckets come later.

Ordering. Everything that concerns a piece happens in its one slot, whose thread does what it is given in that order
(``slots.py``): what it reads next is read after what it was to write.
    read, then use          ``held`` waits for all that the slot's thread was given, before it shows the state
    use, then write         ``held`` gives the write to the thread when it is left; until then the slot's lock keeps
                            others out, and nothing is read ahead into it
    then a checkpoint       it reads by way of ``held``, as everybody does
    two threads             each holds one piece at a time, so none waits for a slot while another waits for its own
The first error is kept, and raised by all who come later: what was to be written is lost, whatever is read well.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.layout import Item, Layout, aligned
from deepstow.strategies.core.on_disk import pieces_on_disk, state_file_bytes
from deepstow.strategies.engine.memory.arena import Arena
from deepstow.strategies.engine.memory.pieces import Stretch
from deepstow.strategies.engine.memory.tiers import Striped
from deepstow.strategies.engine.slots import FirstError, WindowSlot


class _Slot(WindowSlot):
    """One slot, of pieces by their numbers; what is to come is sorted."""

    def __init__(self, first: FirstError) -> None:
        super().__init__(first)
        self.lock = threading.RLock()  # of whoever uses the state
        self.changed = False  # it differs from the file
        self.users = 0


class DiskState:
    """The state of ``layout`` that is on the disk. Raise ValueError if there cannot be such a file."""

    def __init__(self, layout: Layout, arena: Arena) -> None:
        self._file = Striped(layout.disk, state_file_bytes(layout), checked=layout.disk_checksums)
        self._issuing = threading.Lock()  # of what slots hold, and what threads are given; held for moments
        self._first = FirstError()
        self._closed = False
        self._written = set[int]()  # pieces of which there is something in the file
        self._places: list[tuple[_Slot, Tensor, int]] = []  # of each piece: slot, memory, offset in the file
        self._pieces: dict[int, range] = {}  # of each bucket, by index
        self._begun = range(0)  # those of the update that has begun
        self.stretches: dict[int, list[Stretch]] = {}  # likewise
        self._slots = [_Slot(self._first) for _ in range(layout.window_slots)]
        window = arena.of("", Item.WINDOW, torch.uint8)
        assert window is not None
        size = max(layout.window_of(bucket)[1] for bucket in layout.buckets if bucket.state_on_disk)
        for number, (index, piece) in enumerate(pieces_on_disk(layout)):
            numbers, count = layout.moments + layout.buckets[index].mixed, piece.stop - piece.start
            memory = window[piece.slot * size :][: aligned(4 * numbers * count, Tier.HOST)]
            self._places.append((self._slots[piece.slot], memory, piece.offset))
            self._pieces[index] = range(self._pieces[index].start if index in self._pieces else number, number + 1)
            state = list(memory.view(torch.float32)[: numbers * count].view(numbers, count))
            master = state.pop(0) if layout.buckets[index].mixed else None
            stretch = Stretch(piece.start, piece.stop, master, state, partial(self.held, index, number))
            self.stretches.setdefault(index, []).append(stretch)

    def expect(self, buckets: Iterable[int]) -> None:
        """These buckets, by index, will be updated: read them ahead. Others are none of ours."""
        with self._issuing:
            for index in buckets:
                for number in self._pieces.get(index, ()):
                    insort(self._places[number][0].expected, number)
            for slot in self._slots:
                self._read_ahead(slot)

    @contextmanager
    def held(self, index: int, number: int, *, writes: bool = False, behind: bool = False) -> Iterator[None]:
        """Piece ``number``, of bucket ``index``, is in its slot, and nobody else uses that. ``writes``: it may be
        changed meanwhile; ``behind``: and goes to the file at once, not only when the slot is needed.
        """
        if self._closed:
            raise RuntimeError("optimizer state on the disk ends with close(); save it, or read it, before")
        slot, *_ = self._places[number]
        with slot.lock:
            with self._issuing:
                assert not slot.users or slot.holds == number, "two pieces of one slot are wanted at the same time"
                slot.users += 1
                if number in slot.expected:
                    slot.expected.remove(number)
                    self._begun = self._pieces[index]
                self._load(slot, number)
            try:
                slot.wait()
                yield
            finally:
                with self._issuing:
                    slot.users -= 1
                    slot.changed = slot.changed or writes
                    if behind:
                        self._store(slot)
                    self._read_ahead(slot)

    def _read_ahead(self, slot: _Slot) -> None:
        if slot.expected and not slot.users:
            first = bisect_left(slot.expected, self._begun.start)
            begun = [number for number in slot.expected[first : first + 1] if number in self._begun]
            self._load(slot, (begun or slot.expected)[0])

    def _load(self, slot: _Slot, number: int) -> None:
        if slot.holds == number:
            return
        self._store(slot)
        _, memory, offset = self._places[number]
        if number in self._written:
            slot.give(lambda: self._file.read(memory, offset))
        else:
            slot.give(memory.zero_)
        slot.holds = number

    def _store(self, slot: _Slot) -> None:
        if slot.changed and slot.holds is not None:
            _, memory, offset = self._places[slot.holds]
            slot.give(lambda: self._file.write(memory, offset))
            self._written.add(slot.holds)
            slot.changed = False

    def close(self) -> None:
        for slot in self._slots:
            slot.close()
        self._file.close()
        self._closed = True
