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


def stretches(bucket: BucketState, touched: Sequence[int], limit: int) -> Iterator[list[Stretch]]:
    """The parameters ``touched`` cut into pieces and gathered into calls of at most ``limit`` elements."""
    call: list[Stretch] = []
    room = limit
    for index in touched:
        size = bucket.spec.sizes[index]
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
        self, rule: UpdateRule, residency: Residency, transfer: Transfer, worker: Worker, scratch: Tensor | None
    ) -> None:
        self._rule, self._residency, self._transfer, self._worker = rule, residency, transfer, worker
        self._scratch = scratch
        self._host_scratch = torch.empty(HOST_STRETCH, dtype=torch.float32)
        self._visitors: dict[int, BucketState] = {}  # by address of the visit slot
        self.slots: dict[int, BucketState] = {}  # by address of a gradient slot that several buckets pass through

    def submit(self, bucket: BucketState, job: Job) -> None:
        """Take a job. The parameters are absent until it is settled."""
        assert bucket.settled, f"{bucket.name} has an update that was not settled"
        bucket.job = job
        bucket.updated(job.touched)
        if bucket.spec.site is Site.HOST:
            bucket.pending = Pending.HOST
            if bucket.spec.resident:
                bucket.hide()
            else:
                bucket.leave()
            waits = (bucket.sent, bucket.arrived)
            bucket.future = self._worker.submit(bucket.index, lambda: self._on_host(bucket, job, waits))
            return
        bucket.pending = Pending.DEVICE
        if bucket.spec.site is Site.DEVICE and bucket.spec.resident:
            self.settle(bucket)
        else:
            bucket.hide()

    def begin(self, bucket: BucketState) -> None:
        """Start bringing what an update on the device needs, so that it is there when the kernel runs."""
        if bucket.pending is not Pending.DEVICE:
            return
        transfer = self._transfer
        if not bucket.present and not bucket.spec.resident:
            self._residency.claim(bucket)
            if not bucket.spec.mixed:  # in fp32 the weight is the master; else it is written from the master
                assert bucket.copy is not None
                transfer.copy(Lane.UP, bucket.weight, bucket.copy)
        if bucket.visit is not None:
            self._visit(bucket)
        if bucket.parks_down:
            assert bucket.grad is not None and bucket.parked is not None
            self.enter_slot(bucket, Lane.UP)
            if bucket.added is not None:
                transfer.wait(Lane.UP, bucket.added.result())
            transfer.copy(Lane.UP, bucket.grad, bucket.parked)
        bucket.arrived = transfer.record(Lane.UP)
        bucket.pending = Pending.VISITING

    def _visit(self, bucket: BucketState) -> None:
        assert bucket.visit is not None
        former = self._visitors.get(bucket.visit.data_ptr())
        if former is not None and former is not bucket:
            if former.pending is Pending.VISITING:
                self.settle(former)
            self._transfer.wait(Lane.UP, former.stored)
        self._visitors[bucket.visit.data_ptr()] = bucket
        self._transfer.wait(Lane.UP, bucket.stored)  # what is stored was used before
        for place, state in zip(_visiting(bucket), bucket.states(), strict=True):
            self._transfer.copy(Lane.UP, place, state)

    def may_begin(self, bucket: BucketState) -> bool:
        """Whether ``begin`` would disturb nobody: no slot it needs is held by an update under way."""
        slots = [self._visitors.get(bucket.visit.data_ptr()) if bucket.visit is not None else None]
        slots.append(self.slots.get(bucket.grad.data_ptr()) if bucket.grad is not None and bucket.parks_down else None)
        return not any(former is not None and former.pending is Pending.VISITING for former in slots)

    def enter_slot(self, bucket: BucketState, lane: Lane) -> None:
        """Let ``lane`` write the gradient slot of ``held``, after everything its former user had to do with it."""
        assert bucket.grad is not None
        former = self.slots.get(bucket.grad.data_ptr())
        if former is not None and former is not bucket:
            if former.pending is Pending.VISITING:
                self.settle(former)
            self._transfer.wait(lane, former.sent, former.used)
        self._transfer.wait(lane, bucket.sent)
        self.slots[bucket.grad.data_ptr()] = bucket

    def settle(self, bucket: BucketState) -> None:
        """Bring the bucket's newest weights to where they rest; present ones into their home."""
        if bucket.pending is Pending.HOST:
            self._from_worker(bucket)
        elif bucket.pending is not Pending.NOTHING:
            self.begin(bucket)
            self._on_device(bucket)
        bucket.job = None

    # --- device ----------------------------------------------------------------------------------------------------

    def _on_device(self, bucket: BucketState) -> None:
        job = bucket.job
        assert job is not None
        transfer = self._transfer
        transfer.wait(Lane.COMPUTE, bucket.arrived, bucket.stored)
        state = _visiting(bucket) if bucket.visit is not None else bucket.states()
        transfer.reads(Lane.COMPUTE, bucket.grad)
        transfer.writes(Lane.COMPUTE, bucket.weight, *state)
        skips = job.scale.bad is not None and not self._rule.flagged and self._known_bad(job.scale)
        assert bucket.grad is not None
        mixed, scratch = bucket.spec.mixed, self._scratch if bucket.spec.mixed else None
        ground = Ground(
            grad=bucket.grad,
            master=state[0] if mixed else bucket.weight,
            moments=state[1:] if mixed else state,
            scratch=scratch,
            limit=bucket.spec.num_elements if scratch is None else scratch.numel(),
            factor=job.scale.factor,
            bad=job.scale.bad if self._rule.flagged else None,
        )
        if not skips:
            self._apply(bucket, job, ground)
        if mixed:
            _round(bucket, bucket.weight, ground.master)
        bucket.pending = Pending.NOTHING
        bucket.used = transfer.record(Lane.COMPUTE)
        bucket.presence = Presence.PRESENT
        if bucket.visit is not None or bucket.copy is not None:
            self._write_back(bucket, state)

    def _known_bad(self, scale: Scale) -> bool:
        self._transfer.host_wait(scale.known)
        return scale.skips

    def _write_back(self, bucket: BucketState, state: Sequence[Tensor]) -> None:
        transfer = self._transfer
        transfer.wait(Lane.DOWN, bucket.used)
        if bucket.visit is not None:
            for place, rests in zip(state, bucket.states(), strict=True):
                transfer.copy(Lane.DOWN, rests, place)
        if bucket.copy is not None:
            transfer.copy(Lane.DOWN, bucket.copy, bucket.weight)
        bucket.stored = transfer.record(Lane.DOWN)

    # --- host ------------------------------------------------------------------------------------------------------

    def _on_host(self, bucket: BucketState, job: Job, waits: Sequence[Event | None]) -> tuple[bool, Event]:
        """In the worker. Whether there are new weights, and the point at which they are there."""
        transfer = self._transfer
        transfer.host_wait(*waits)
        if job.scale.bad is not None and self._known_bad(job.scale):
            return False, transfer.record(Lane.HOST)
        assert bucket.parked is not None and bucket.steps is not None
        master = bucket.master if bucket.master is not None else bucket.copy
        assert master is not None
        transfer.reads(Lane.HOST, bucket.parked)
        transfer.writes(Lane.HOST, master, *bucket.moments)
        factor = None if job.scale.factor is None or job.scale.on_host is None else job.scale.on_host[0]
        ground = Ground(
            grad=bucket.parked,
            master=master,
            moments=bucket.moments,
            scratch=self._host_scratch if bucket.spec.mixed else None,
            limit=HOST_STRETCH,
            factor=factor,
            bad=None,
        )
        with torch.no_grad():
            self._apply(bucket, job, ground)
            if bucket.spec.mixed:
                weight = bucket.parked if bucket.copy is None else bucket.copy
                transfer.writes(Lane.HOST, weight)
                _round(bucket, weight, master)
        return True, transfer.record(Lane.HOST)

    def _from_worker(self, bucket: BucketState) -> None:
        assert bucket.future is not None
        updated, done = bucket.future.result()
        bucket.future, bucket.pending = None, Pending.NOTHING
        self._transfer.wait(Lane.UP, done)
        if not bucket.spec.resident:
            bucket.presence = Presence.ABSENT
        elif updated:
            source = bucket.parked if bucket.spec.mixed else bucket.master
            assert source is not None
            self._residency.receive(bucket, source)

    # --- both ------------------------------------------------------------------------------------------------------

    def _apply(self, bucket: BucketState, job: Job, ground: Ground) -> None:
        """The rule on all parameters that have a gradient, call by call."""
        assert bucket.steps is not None

        def cut(flat: Tensor, piece: Stretch) -> Tensor:
            return bucket.part(flat, piece.index)[piece.start : piece.stop]

        for call in stretches(bucket, job.touched, ground.limit):
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
            steps = [bucket.steps[piece.index] if piece.last else bucket.steps[piece.index].clone() for piece in call]
            moments = [[cut(moment, piece) for piece in call] for moment in ground.moments]
            on = Operands([cut(ground.master, piece) for piece in call], grads, moments, steps)
            self._rule.update(on, job.group, ground.bad)


def _round(bucket: BucketState, weight: Tensor, master: Tensor) -> None:
    """The compute weights of a bucket from their masters, parameter by parameter: what lies between is not theirs."""
    for index in range(len(bucket.params)):
        bucket.part(weight, index).copy_(bucket.part(master, index))


def _visiting(bucket: BucketState) -> list[Tensor]:
    """The visit slot, cut like the state that visits it."""
    assert bucket.visit is not None
    return list(bucket.visit.view(-1, bucket.spec.num_elements))
