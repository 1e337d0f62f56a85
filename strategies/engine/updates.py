"""Update sites: where a bucket's optimizer step is computed, and how its new weights come home.

    DEVICE     state on the device. One kernel on COMPUTE.
    STREAMED   state on the host, brought through a visit slot: UP, kernel on COMPUTE, DOWN. The same kernel.
    HOST       state on the host. The worker computes; the new weights go UP when they are next needed.

A job is given to a bucket when the factor of the clipping is known (or, without clipping, when its gradients have
landed), and settled when its weights are next needed, so that updates run under the next forward. Nothing is stale:
whoever uses a bucket settles it first, and until then its parameters show NaN.

Memory. In mixed precision the update reads a stretch of the gradient at a time, as fp32, into scratch memory; the
gradient is never copied whole. Host updates write the new compute weight over the gradient they have read (PARKED)
where the weight rests on the device, so that mixed precision needs no third buffer.

Ordering, by memory that two lanes touch:
    visit slot   UP writes after the former visitor's DOWN (``stored``, which came after its ``used``); COMPUTE after
                 UP (``arrived``, which came after the rivals' ``stored``); DOWN after COMPUTE (``used``)
    host state   UP reads after the DOWN that wrote it (``stored``); the worker's own state nobody else writes
    PARKED       the worker reads after DOWN (``sent``); UP reads after the worker (its future, or ``added``); the
                 next DOWN waits for that UP (``arrived``)
    COPY         written by DOWN (``stored``) or the worker (future), read by UP (``arrived``)

[Note: split points] Element-wise CUDA kernels give an element the same bits wherever a call is cut. Torch's CPU kernels
treat the last elements of a call, fewer than a vector, by a scalar loop that may round otherwise; so cuts are made
at multiples of a vector from the start of the parameter, and the last stretch ends where plain training's call ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strategies.core.layout import Site
from strategies.engine.bucket_state import BucketState, Pending, Presence
from strategies.engine.optim import Operands, UpdateRule
from strategies.engine.residency import Residency
from strategies.engine.transfer.transfer import Event, Lane, Transfer
from strategies.engine.worker import Worker

# Elements the worker takes at a time; fastest in benchmarks/records/2026-11-21_cpu-update_2-core.
HOST_STRETCH = 1 << 20


@dataclass(frozen=True, slots=True)
class Scale:
    """What every gradient is multiplied with, and whether the step is to be skipped.

    ``factor`` and ``bad`` (1.0: a gradient is not finite) are single fp32 numbers on the device; ``on_host`` holds
    both for the worker, once ``known`` has passed. None: there is nothing to multiply or to check.
    """

    factor: Tensor | None = None
    bad: Tensor | None = None
    on_host: Tensor | None = None
    known: Event | None = None

    @property
    def skips(self) -> bool:
        """Whether the step is to be skipped; to be asked when ``known`` has passed. The host reads its own memory."""
        return self.on_host is not None and bool(self.on_host.numpy()[1])


@dataclass(frozen=True, slots=True)
class Job:
    """One update of one bucket: which parameters have a gradient, and with which hyperparameters.

    ``group`` is a copy: a scheduler may change the rate before the update is computed.
    """

    touched: tuple[int, ...]
    group: Mapping[str, Any]
    scale: Scale


@dataclass(frozen=True, slots=True)
class Stretch:
    """Elements ``start`` to ``stop`` of parameter ``index``; ``last`` ends the parameter."""

    index: int
    start: int
    stop: int
    last: bool


def stretches(held: BucketState, touched: Sequence[int], limit: int) -> Iterator[list[Stretch]]:
    """The parameters ``touched`` cut into pieces and gathered into calls of at most ``limit`` elements."""
    call: list[Stretch] = []
    room = limit
    for index in touched:
        size = held.bucket.sizes[index]
        for start in range(0, size, limit):
            stop = min(size, start + limit)
            if stop - start > room:
                yield call
                call, room = [], limit
            call.append(Stretch(index, start, stop, stop == size))
            room -= stop - start
    if call:
        yield call


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """Where an update works: on the device or on the host, all of it flat views of one bucket.

    ``scratch`` takes gradients as fp32, where they are not; a call takes at most ``limit`` elements.
    """

    grad: Tensor
    master: Tensor
    moments: Sequence[Tensor]
    scratch: Tensor | None
    limit: int
    factor: Tensor | None
    bad: Tensor | None


class Updates:
    """Carries out jobs.

    Args:
        scratch: fp32, on the device; None where no mixed-precision bucket is updated there.
    """

    def __init__(
        self, rule: UpdateRule, homes: Residency, transfer: Transfer, worker: Worker, scratch: Tensor | None
    ) -> None:
        self._rule, self._homes, self._transfer, self._worker = rule, homes, transfer, worker
        self._scratch = scratch
        self._host_scratch = torch.empty(HOST_STRETCH, dtype=torch.float32)
        self._visitors: dict[int, BucketState] = {}  # by address of the visit slot
        self.slots: dict[int, BucketState] = {}  # by address of a gradient slot that several buckets pass through

    def submit(self, held: BucketState, job: Job) -> None:
        """Take a job. The parameters are absent until it is settled."""
        assert held.settled, f"{held.name} has an update that was not settled"
        held.job = job
        held.updated(job.touched)
        if held.bucket.site is Site.HOST:
            held.pending = Pending.HOST
            if held.bucket.resident:
                held.hide()
            else:
                held.leave()
            waits = (held.sent, held.arrived)
            held.future = self._worker.submit(held.index, lambda: self._on_host(held, job, waits))
            return
        held.pending = Pending.DEVICE
        if held.bucket.site is Site.DEVICE and held.bucket.resident:
            self.settle(held)
        else:
            held.hide()

    def begin(self, held: BucketState) -> None:
        """Start bringing what an update on the device needs, so that it is there when the kernel runs."""
        if held.pending is not Pending.DEVICE:
            return
        transfer = self._transfer
        if not held.present and not held.bucket.resident:
            self._homes.claim(held)
            if not held.bucket.mixed:  # in fp32 the weight is the master; else it is written from the master
                assert held.copy is not None
                transfer.copy(Lane.UP, held.weight, held.copy)
        if held.visit is not None:
            self._visit(held)
        if held.parks_down:
            assert held.grad is not None and held.parked is not None
            self.enter_slot(held, Lane.UP)
            if held.added is not None:
                transfer.wait(Lane.UP, held.added.result())
            transfer.copy(Lane.UP, held.grad, held.parked)
        held.arrived = transfer.record(Lane.UP)
        held.pending = Pending.VISITING

    def _visit(self, held: BucketState) -> None:
        assert held.visit is not None
        former = self._visitors.get(held.visit.data_ptr())
        if former is not None and former is not held:
            if former.pending is Pending.VISITING:
                self.settle(former)
            self._transfer.wait(Lane.UP, former.stored)
        self._visitors[held.visit.data_ptr()] = held
        self._transfer.wait(Lane.UP, held.stored)  # what is stored was used before
        for place, state in zip(_visiting(held), held.states(), strict=True):
            self._transfer.copy(Lane.UP, place, state)

    def may_begin(self, held: BucketState) -> bool:
        """Whether ``begin`` would disturb nobody: no slot it needs is held by an update under way."""
        slots = [self._visitors.get(held.visit.data_ptr()) if held.visit is not None else None]
        slots.append(self.slots.get(held.grad.data_ptr()) if held.grad is not None and held.parks_down else None)
        return not any(former is not None and former.pending is Pending.VISITING for former in slots)

    def enter_slot(self, held: BucketState, lane: Lane) -> None:
        """Let ``lane`` write the gradient slot of ``held``, after everything its former user had to do with it."""
        assert held.grad is not None
        former = self.slots.get(held.grad.data_ptr())
        if former is not None and former is not held:
            if former.pending is Pending.VISITING:
                self.settle(former)
            self._transfer.wait(lane, former.sent, former.used)
        self._transfer.wait(lane, held.sent)
        self.slots[held.grad.data_ptr()] = held

    def settle(self, held: BucketState) -> None:
        """Bring the bucket's newest weights to where they rest; present ones into their home."""
        if held.pending is Pending.HOST:
            self._from_worker(held)
        elif held.pending is not Pending.NOTHING:
            self.begin(held)
            self._on_device(held)
        held.job = None

    # --- device ----------------------------------------------------------------------------------------------------

    def _on_device(self, held: BucketState) -> None:
        job = held.job
        assert job is not None
        transfer = self._transfer
        transfer.wait(Lane.COMPUTE, held.arrived, held.stored)
        state = _visiting(held) if held.visit is not None else held.states()
        transfer.reads(Lane.COMPUTE, held.grad)
        transfer.writes(Lane.COMPUTE, held.weight, *state)
        skips = job.scale.bad is not None and not self._rule.flagged and self._known_bad(job.scale)
        assert held.grad is not None
        mixed, scratch = held.bucket.mixed, self._scratch if held.bucket.mixed else None
        ground = Ground(
            grad=held.grad,
            master=state[0] if mixed else held.weight,
            moments=state[1:] if mixed else state,
            scratch=scratch,
            limit=held.bucket.num_elements if scratch is None else scratch.numel(),
            factor=job.scale.factor,
            bad=job.scale.bad if self._rule.flagged else None,
        )
        if not skips:
            self._apply(held, job, ground)
        if mixed:
            _round(held, held.weight, ground.master)
        held.pending = Pending.NOTHING
        held.used = transfer.record(Lane.COMPUTE)
        held.presence = Presence.PRESENT
        if held.visit is not None or held.copy is not None:
            self._write_back(held, state)

    def _known_bad(self, scale: Scale) -> bool:
        self._transfer.host_wait(scale.known)
        return scale.skips

    def _write_back(self, held: BucketState, state: Sequence[Tensor]) -> None:
        transfer = self._transfer
        transfer.wait(Lane.DOWN, held.used)
        if held.visit is not None:
            for place, rests in zip(state, held.states(), strict=True):
                transfer.copy(Lane.DOWN, rests, place)
        if held.copy is not None:
            transfer.copy(Lane.DOWN, held.copy, held.weight)
        held.stored = transfer.record(Lane.DOWN)

    # --- host ------------------------------------------------------------------------------------------------------

    def _on_host(self, held: BucketState, job: Job, waits: Sequence[Event | None]) -> tuple[bool, Event]:
        """In the worker. Whether there are new weights, and the point at which they are there."""
        transfer = self._transfer
        transfer.host_wait(*waits)
        if job.scale.bad is not None and self._known_bad(job.scale):
            return False, transfer.record(Lane.HOST)
        assert held.parked is not None and held.steps is not None
        master = held.master if held.master is not None else held.copy
        assert master is not None
        transfer.reads(Lane.HOST, held.parked)
        transfer.writes(Lane.HOST, master, *held.moments)
        factor = None if job.scale.factor is None or job.scale.on_host is None else job.scale.on_host[0]
        ground = Ground(
            grad=held.parked,
            master=master,
            moments=held.moments,
            scratch=self._host_scratch if held.bucket.mixed else None,
            limit=HOST_STRETCH,
            factor=factor,
            bad=None,
        )
        with torch.no_grad():
            self._apply(held, job, ground)
            if held.bucket.mixed:
                weight = held.parked if held.copy is None else held.copy
                transfer.writes(Lane.HOST, weight)
                _round(held, weight, master)
        return True, transfer.record(Lane.HOST)

    def _from_worker(self, held: BucketState) -> None:
        assert held.future is not None
        updated, done = held.future.result()
        held.future, held.pending = None, Pending.NOTHING
        self._transfer.wait(Lane.UP, done)
        if not held.bucket.resident:
            held.presence = Presence.ABSENT
        elif updated:
            source = held.parked if held.bucket.mixed else held.master
            assert source is not None
            self._homes.receive(held, source)

    # --- both ------------------------------------------------------------------------------------------------------

    def _apply(self, held: BucketState, job: Job, ground: Ground) -> None:
        """The rule on all parameters that have a gradient, call by call."""
        assert held.steps is not None

        def cut(flat: Tensor, piece: Stretch) -> Tensor:
            return held.part(flat, piece.index)[piece.start : piece.stop]

        for call in stretches(held, job.touched, ground.limit):
            grads = [cut(ground.grad, piece) for piece in call]
            if ground.scratch is not None:
                sizes = [grad.numel() for grad in grads]
                places = list(ground.scratch[: sum(sizes)].split(sizes))
                for place, grad in zip(places, grads, strict=True):
                    place.copy_(grad)
                grads = places
            if ground.factor is not None:
                torch._foreach_mul_(grads, ground.factor)
            # Torch counts an update per call: of a parameter that is cut, the last stretch counts, the others count
            # copies.
            steps = [held.steps[piece.index] if piece.last else held.steps[piece.index].clone() for piece in call]
            moments = [[cut(moment, piece) for piece in call] for moment in ground.moments]
            on = Operands([cut(ground.master, piece) for piece in call], grads, moments, steps)
            self._rule.update(on, job.group, ground.bad)


def _round(held: BucketState, weight: Tensor, master: Tensor) -> None:
    """The compute weights of a bucket from their masters, parameter by parameter: what lies between is not theirs."""
    for index in range(len(held.params)):
        held.part(weight, index).copy_(held.part(master, index))


def _visiting(held: BucketState) -> list[Tensor]:
    """The visit slot, cut like the state that visits it."""
    assert held.visit is not None
    return list(held.visit.view(-1, held.bucket.num_elements))
