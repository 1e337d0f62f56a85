"""Update sites: where a bucket's optimizer step is computed, and how its new weights reach their home.

    DEVICE     state on the device. One kernel on COMPUTE.
    STREAMED   state on the host, brought through a visit slot: UP, kernel on COMPUTE, DOWN. The same kernel.
    HOST       state on the host. The worker computes; the new weights go UP when they are next needed.

A bucket gets its job when the factor of the clipping is known (without clipping: when its gradients have landed), and
is settled when its weights are next needed, so that updates run under the next forward. Until then its parameters show
NaN.

In mixed precision the update reads the gradient in chunks, as fp32, through scratch memory; the gradient is never
copied whole. Host updates of residents write the new weight over the gradient they have read (PARKED).

Ordering, by memory that two streams touch; what passes through slots waits for their last users, too (``slots.py``):
    visit slot   COMPUTE writes after UP (``arrived``, which came after ``stored`` of overlapping buckets); DOWN reads
                 after COMPUTE (``used``)
    host state   UP reads after the DOWN that wrote it (``stored``); the worker's own state is written by nobody else.
                 State on the disk is used by the host alone, inside of ``at_hand`` (``memory/disk_state.py``)
    PARKED       the worker reads after DOWN (``sent``); UP reads after the worker (its future, or ``added``); the
                 next DOWN waits for that UP (``arrived``). A new weight goes to the disk from there before the update
                 counts as done (its future; ``memory/disk_weights.py``)
    COPY         written by DOWN (``stored``) or the worker (future), read by UP (``arrived``)
    both in one  (``parks_in_copy``) DOWN writes the gradient after UP has read the copy (``arrived``), and so after
                 whoever wrote that. The update reads the gradient before it writes the new weight over it: the worker
                 in program order; of a streamed bucket UP reads (``arrived``), then COMPUTE updates (``used``), then
                 DOWN writes. The next UP reads the weight after the worker (future) or DOWN (``stored``). A skipped
                 update writes the old weight, rounded from the master, on the same way

[Note: split points] Element-wise CUDA kernels give an element the same bits wherever a call is cut. Torch's CPU kernels
process the last elements of a call, fewer than a vector, in a scalar loop that may round differently; so cuts are made
at multiples of a vector from the start of the parameter, and the last chunk ends where plain training's call ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deepstow.strategies.core.formats import HOST_CHUNK
from deepstow.strategies.core.layout import SCRATCH_ELEMENTS, Item, Site
from deepstow.strategies.engine.buckets.bucket_state import BucketState, Job, Pending, Scale
from deepstow.strategies.engine.memory.pieces import Chunk, Stretch, chunks_of, in_memory
from deepstow.strategies.engine.ranks.replicas import OneRank
from deepstow.strategies.engine.residency import Residency
from deepstow.strategies.engine.slots import Ring
from deepstow.strategies.engine.transfer.transfer import Event, Stream, Transfer
from deepstow.strategies.engine.transfer.worker import Worker
from deepstow.strategies.engine.updating.moments import Moments
from deepstow.strategies.engine.updating.optim import Operands, UpdateRule, zeros_stay


class GradientSlots:
    """Slots on the device through which the gradients of several buckets pass. Backward writes them (COMPUTE), and so
    does an update on the device whose gradient has waited on the host (UP). ``settle`` finishes an update that has
    begun.
    """

    def __init__(self, transfer: Transfer, settle: Callable[[BucketState], None]) -> None:
        self._transfer = transfer
        self._settle = settle
        self._ring = Ring(self._left)

    def last(self, bucket: BucketState) -> BucketState | None:
        """Whose gradients the slot of ``bucket`` had last."""
        return self._ring.last(bucket.memory[Item.GRAD])

    def enter(self, bucket: BucketState, stream: Stream) -> None:
        """Let ``stream`` write the slot of ``bucket``, which may have it still."""
        if self.last(bucket) is not bucket:
            self._transfer.wait(stream, *self._ring.take(bucket.memory[Item.GRAD], bucket))
        self._transfer.wait(stream, bucket.grads.sent)

    def _left(self, former: BucketState) -> Iterable[Event | None]:
        if former.pending is Pending.VISITING:
            self._settle(former)
        return former.grads.sent, former.used


class Updates:
    """Carries out jobs. ``scratch``: fp32, on the device; None where no mixed-precision bucket is updated there.
    ``moments`` expands those that rest in less than fp32; None where none do.
    """

    def __init__(
        self,
        rule: UpdateRule,
        residency: Residency,
        ranks: OneRank,
        transfer: Transfer,
        worker: Worker,
        scratch: Tensor | None,
        moments: Moments | None,
    ) -> None:
        self.moments = moments
        self._rule = rule
        self._residency = residency
        self._ranks = ranks
        self._transfer = transfer
        self._worker = worker
        self._scratch = scratch
        self._host_scratch = torch.empty(HOST_CHUNK, dtype=torch.float32)
        self._visits = Ring(self._left_by_visit)
        self.gradient_slots = GradientSlots(transfer, self.settle)

    def submit(self, bucket: BucketState, job: Job) -> None:
        """Start the update, or let it wait until ``begin`` or ``settle``. The parameters are absent until then."""
        bucket.submit(job)
        if bucket.spec.site is Site.HOST:
            waits = (bucket.grads.sent, bucket.arrived)
            future = self._worker.submit(bucket.index, lambda: self._on_host(bucket, job, waits))
            bucket.future = self._residency.rewritten(bucket, future)
            bucket.grads.take(bucket.future)
        elif bucket.updates_in_place:
            self.settle(bucket)

    def begin(self, bucket: BucketState) -> None:
        """Start to copy up what a pending update on the device needs. Does nothing if that has begun."""
        if bucket.pending is not Pending.DEVICE:
            return
        transfer = self._transfer
        if Item.VISIT in bucket.memory:
            self._visit(bucket)
        if bucket.grads_on_host:
            self.gradient_slots.enter(bucket, Stream.UP)
            if bucket.grads.added is not None:
                transfer.wait(Stream.UP, bucket.grads.added.result())
            transfer.copy(Stream.UP, bucket.own(bucket.memory[Item.GRAD]), bucket.memory[Item.PARKED])
        if not bucket.present and not bucket.spec.resident:  # last: UP waits until the home is free
            self._residency.claim(bucket)
            if not bucket.spec.mixed:  # in fp32 the weight is the master; else it is written from the master
                assert bucket.copy is not None
                transfer.copy(Stream.UP, bucket.own(bucket.weight), bucket.copy)
        bucket.begin_visit(arrived=transfer.record(Stream.UP))

    def _visit(self, bucket: BucketState) -> None:
        self._transfer.wait(Stream.UP, *self._visits.take(bucket.memory[Item.VISIT], bucket), bucket.stored)
        for place, state in zip(_visit_views(bucket), bucket.states(), strict=True):
            self._transfer.copy(Stream.UP, place, state)

    def _left_by_visit(self, former: BucketState) -> Iterable[Event | None]:
        if former.pending is Pending.VISITING:
            self.settle(former)
        return (former.stored,)

    def may_begin(self, bucket: BucketState) -> bool:
        """Whether no slot that ``begin`` needs is used by an update under way."""
        visit = bucket.memory.get(Item.VISIT)
        users = [] if visit is None else [self._visits.last(visit)]
        if bucket.grads_on_host and Item.GRAD in bucket.memory:
            users.append(self.gradient_slots.last(bucket))
        return not any(user is not None and user.pending is Pending.VISITING for user in users)

    def settle(self, bucket: BucketState) -> None:
        """Finish the pending update, if there is one: afterwards ``weight_of`` gives the newest weights."""
        if bucket.pending is Pending.HOST:
            self._from_worker(bucket)
        elif bucket.pending is not Pending.NOTHING:
            self.begin(bucket)
            self._on_device(bucket)

    # --- device ----------------------------------------------------------------------------------------------------

    def _on_device(self, bucket: BucketState) -> None:
        job, transfer = bucket.job, self._transfer
        assert job is not None
        transfer.wait(Stream.COMPUTE, bucket.arrived, bucket.stored)
        visits = Item.VISIT in bucket.memory
        state = _visit_views(bucket) if visits else bucket.states()
        weight = bucket.own(bucket.weight)
        grad = bucket.memory[Item.PARKED] if bucket.spec.grad_split else bucket.own(bucket.memory[Item.GRAD])
        transfer.uses(Stream.COMPUTE, reads=[grad], writes=[bucket.weight, *state])
        mixed, flagged = bucket.spec.mixed, self._rule.flagged
        master, *moments = state if mixed else [weight, *state]
        stretch = Stretch(0, bucket.spec.share, master, moments, in_memory)
        if flagged or not self._known_bad(job.scale):
            self._apply(
                bucket, job, grad, stretch, self._scratch if mixed else None, job.scale.factor,
                job.scale.bad if flagged else None,
            )  # fmt: skip
        if mixed:
            bucket.round_stretch(weight, stretch)
        bucket.settled_on_device(used=transfer.record(Stream.COMPUTE))
        self._ranks.gather(bucket)
        if not visits and bucket.copy is None:
            return
        transfer.wait(Stream.DOWN, bucket.used)
        if visits:
            for place, target in zip(state, bucket.states(), strict=True):
                transfer.copy(Stream.DOWN, target, place)
        if bucket.copy is not None:
            transfer.copy(Stream.DOWN, bucket.copy, weight)
        bucket.write_back(stored=transfer.record(Stream.DOWN))
        self._ranks.written(bucket, bucket.stored)

    def _known_bad(self, scale: Scale) -> bool:
        self._transfer.host_wait(scale.known)
        return scale.skips

    # --- host ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _on_host(self, bucket: BucketState, job: Job, waits: Sequence[Event | None]) -> tuple[bool, Event]:
        """In the worker: compute the update. Returns whether it changed the weights, and the event after it."""
        updated = self._compute_on_host(bucket, job, waits)
        self._ranks.written(bucket)
        return updated, self._transfer.record(Stream.HOST)

    def _compute_on_host(self, bucket: BucketState, job: Job, waits: Sequence[Event | None]) -> bool:
        transfer = self._transfer
        parked = bucket.memory[Item.PARKED]
        transfer.host_wait(*waits)
        if self._known_bad(job.scale):
            if bucket.parks_in_copy:  # the gradient has overwritten the weight
                transfer.uses(Stream.HOST, writes=[parked])
                bucket.round_masters(parked)
            return False
        for stretch in bucket.stretches():
            with stretch.at_hand(writes=True, behind=True):
                self._apply_on_host(bucket, job, parked, stretch)
                if bucket.spec.mixed:
                    transfer.uses(Stream.HOST, writes=[bucket.new])
                    bucket.round_stretch(bucket.new, stretch)
        return True

    def _apply_on_host(self, bucket: BucketState, job: Job, parked: Tensor, stretch: Stretch) -> None:
        if stretch.master is None:
            assert bucket.copy is not None
            stretch = stretch.of_masters(bucket.copy)
        self._transfer.uses(Stream.HOST, reads=[parked], writes=[stretch.master, *stretch.moments])
        factor = None if job.scale.factor is None else job.scale.on_host[0]
        self._apply(bucket, job, parked, stretch, self._host_scratch, factor)

    def _from_worker(self, bucket: BucketState) -> None:
        assert bucket.future is not None
        updated, done = bucket.future.result()
        bucket.settled_on_host()
        self._transfer.wait(Stream.UP, done)
        if bucket.spec.resident and updated:
            source = bucket.memory[Item.PARKED if bucket.spec.mixed else Item.MASTER]
            self._residency.receive(bucket, source)

    # --- both ------------------------------------------------------------------------------------------------------

    def _apply(
        self,
        bucket: BucketState,
        job: Job,
        grad: Tensor,
        stretch: Stretch,
        scratch: Tensor | None,
        factor: Tensor | None,
        bad: Tensor | None = None,
    ) -> None:
        """Apply the update rule to what ``stretch`` has of all parameters that have a gradient, in calls of as many
        elements as ``scratch`` has, which takes gradients of a lower precision as fp32. ``grad`` is a flat view of this
        rank's span; ``stretch``, whose master is in fp32 the weight, is on the device if that is, and else on the host.
        Moments that rest in less than fp32 are expanded for each call, and so are weights that are their own masters in
        bf16.
        """
        counts = bucket.memory[Item.STEPS]
        most = bucket.spec.share if self._rule.flagged else SCRATCH_ELEMENTS  # others take memory of their own
        limit = most if scratch is None else scratch.numel()
        if bucket.zeros_stay:
            limit = min(limit, SCRATCH_ELEMENTS)
        if self.moments is not None:
            limit = min(limit, self.moments.chunk)
        assert stretch.master is not None
        calls = list(chunks_of(bucket.pieces_in(job.touched), limit, stretch))
        operands = (self._operands(bucket, call, grad, stretch, scratch, counts) for call in calls)
        if self.moments is None and not bucket.zeros_stay:
            self._rule.update_all(list(operands), job.group, factor, bad)
            return
        for call, on in zip(calls, operands, strict=True):
            at_rest = on
            if self.moments is not None:
                on = replace(on, state=self.moments.expand(bucket, call))
            if bucket.spec.rounds:
                assert self.moments is not None
                on = replace(on, params=self.moments.expand_masters(at_rest.params))
            masked = [param for param, chunk in zip(on.params, call, strict=True) if chunk.index in bucket.zeros_stay]
            with zeros_stay(masked):
                self._rule.update_all([on], job.group, factor, bad)
            if self.moments is not None:
                self.moments.compress(bucket, call, on.state, on.steps)
                if bucket.spec.rounds:
                    self.moments.round_masters(bucket, call, on.params, at_rest.params, on.steps)

    def _operands(
        self,
        bucket: BucketState,
        call: Sequence[Chunk],
        grad: Tensor,
        stretch: Stretch,
        scratch: Tensor | None,
        counts: Tensor,
    ) -> Operands:
        """The views of one call, as they rest."""
        assert stretch.master is not None
        state = (stretch.master, *stretch.moments)
        masters, *moments = ([flat[c.start - stretch.start : c.stop - stretch.start] for c in call] for flat in state)
        grads, at_rest = [grad[chunk.start : chunk.stop] for chunk in call], list[Tensor]()
        if bucket.spec.dtype != "float32":
            assert scratch is not None
            sizes = [view.numel() for view in grads]
            grads, at_rest = list(scratch[: sum(sizes)].split(sizes)), grads
        # Torch counts an update per call: of a parameter in several chunks the last one counts, the others count on
        # copies.
        steps = [counts[chunk.index] if chunk.last else counts[chunk.index].clone() for chunk in call]
        return Operands(masters, grads, moments, steps, at_rest)


def _visit_views(bucket: BucketState) -> list[Tensor]:
    return list(bucket.memory[Item.VISIT].view(-1, bucket.spec.share))
