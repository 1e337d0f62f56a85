"""Gradients: from autograd into their slots, to where they park, and their norm.

Autograd hands over each gradient in a tensor of its own. The hook moves it into the bucket's slot at once and takes
it off the parameter, so that nothing else can add to it or free it; ``param.grad`` then stands for it
(``parameters.py``).

    parks on the device   the slot is the bucket's own; further micro-batches are added in it
    parks on the host     the slot is one of a ring; when the bucket is complete it goes DOWN. The first micro-batch
                          lands in PARKED, later ones in ARRIVAL, from where the worker adds them to PARKED
    updated on the host   what parks on the device goes DOWN once, after the last micro-batch

Exactness. Adding in the slot is what autograd does with a gradient it finds. The norm is that of
``torch.nn.utils.clip_grad_norm_``: one norm per parameter, by the same function, then the norm of the norms in the
order of ``model.parameters()``; buckets are not visible in it. In bf16 the norm is taken of the gradient as fp32.

Over ranks, plain data parallelism: a complete bucket is divided by the number of ranks and summed over them, always in
the order of the buckets, so that all ranks call the same collectives. Afterwards all ranks hold the same norm and so
skip the same steps.

Refused: a gradient for a bucket that has been sent for this update (more backward passes than the plan's accumulation);
sparse gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn

from strategies.core.layout import Layout, Site
from strategies.engine.bucket_state import BucketState
from strategies.engine.leftover_gradients import Leftovers
from strategies.engine.skipped_steps import Norms
from strategies.engine.tensors.parameters import on_gradient, take_grad
from strategies.engine.transfer.transfer import Event, Lane, Transfer
from strategies.engine.updates import Updates
from strategies.engine.worker import Worker

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Gradients:
    """Takes gradients as they land.

    Args:
        order: for each trained parameter in the order of ``model.parameters()``: its bucket and its place there.
        complete: called when all gradients of a bucket for one update are where they park.
        settle: computes the last update of a bucket, if that was not done yet.
    """

    def __init__(
        self,
        layout: Layout,
        order: Sequence[tuple[BucketState, int]],
        transfer: Transfer,
        worker: Worker,
        updates: Updates,
        complete: Callable[[BucketState], None],
        settle: Callable[[BucketState], None],
        group: ProcessGroup | None,
    ) -> None:
        self._layout, self._order = layout, order
        self._transfer, self._worker, self._updates = transfer, worker, updates
        self._complete, self._settle, self._group = complete, settle, group
        self._all = sorted({bucket.index: bucket for bucket, _ in order}.values(), key=lambda bucket: -bucket.index)
        self.leftovers = Leftovers(self._all)
        self.window = 0  # counts the times that all gradients were taken or given up
        self._arrivals: dict[int, Future[Event]] = {}  # by address of the arrival slot: the last addition from it
        self._to_reduce: list[BucketState] = []  # buckets whose turn has not come yet, last of forward first
        self._done: set[int] = set()  # buckets finished for this update
        self._landed_in: list[tuple[BucketState, int]] = []  # in the order of backward
        self.passes = 0  # backward passes since the last update
        self._fresh = True  # the next gradient belongs to a new pass
        self._finished = False  # nothing more comes in this window

    def attach(self) -> list[torch.utils.hooks.RemovableHandle]:
        """Hook every trained parameter; the handles take the hooks off again."""
        return [on_gradient(bucket.params[index], partial(self._land, bucket, index)) for bucket, index in self._order]

    @property
    def empty(self) -> bool:
        """Whether no gradient waits for an update."""
        return self.passes == 0

    @property
    def last_pass(self) -> bool:
        return self.passes >= self._layout.accumulation

    def new_pass(self) -> None:
        """A forward with gradients has begun: the next gradient that lands belongs to another micro-batch."""
        self._fresh = True

    @torch.no_grad()
    def _land(self, bucket: BucketState, index: int, param: nn.Parameter) -> None:
        grad = take_grad(param)
        assert grad is not None and bucket.grad is not None
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"{bucket.name}: sparse gradients are not supported; build the embedding with sparse=False"
            )
        self.leftovers.refuse_spent(bucket, index)
        if self._fresh or index in bucket.landed:
            self._start_pass()
        if bucket.index in self._done:
            self._refuse_pass()
        if bucket.parks_down:
            self._enter_slot(bucket)
        place = bucket.shaped(bucket.grad, index)
        self._transfer.writes(Lane.COMPUTE, bucket.grad)
        if index in bucket.touched and not bucket.parks_down:
            place.add_(grad)
        else:
            place.copy_(grad)
        if index not in bucket.touched:
            self._landed_in.append((bucket, index))
        bucket.landed.add(index)
        bucket.unsent.add(index)
        bucket.touched.add(index)
        if len(bucket.landed) == len(bucket.params):
            self._landed(bucket)

    def _refuse_pass(self) -> NoReturn:
        raise RuntimeError(
            f"a backward pass after the gradients of {self._layout.accumulation} were complete: call step() or "
            f"zero_grad() first, or plan with the accumulation that the loop has. (Where a weight's gradient comes in "
            f"parts, as under reentrant checkpointing, each part counts: write use_reentrant=False)"
        )

    def _start_pass(self) -> None:
        if self._finished or self.passes >= self._layout.accumulation:
            self._refuse_pass()
        self._end_pass()
        for bucket in self._all:
            bucket.landed.clear()
        self._fresh = False
        self.passes += 1
        self._to_reduce = list(self._all)

    def _enter_slot(self, bucket: BucketState) -> None:
        assert bucket.grad is not None
        former = self._updates.slots.get(bucket.grad.data_ptr())
        if former is bucket and bucket.unsent:
            return
        if former is not None and former is not bucket and former.unsent:
            if self._group is not None:
                raise RuntimeError(
                    f"a parameter of {former.name} has no gradient, which the ranks must learn before the bucket "
                    f"leaves: set strategies.offload.gradients: device"
                )
            self._send(former)  # not all of it has landed; what has goes now
        self._updates.enter_slot(bucket, Lane.COMPUTE)

    def _landed(self, bucket: BucketState) -> None:
        """All gradients of one micro-batch are in the bucket's slot."""
        if self.last_pass and self._group is None:
            self._finish(bucket)
        elif self.last_pass:
            self._reduce_in_turn()
        elif bucket.parks_down:
            self._send(bucket)

    def _reduce_in_turn(self) -> None:
        # All ranks reduce in one order, whatever the order in which their gradients land.
        while self._to_reduce and len(self._to_reduce[0].landed) == len(self._to_reduce[0].params):
            bucket = self._to_reduce.pop(0)
            self._reduce(bucket)
            self._finish(bucket)

    def _end_pass(self) -> None:
        """Send what waits in slots of buckets that had parameters without gradient."""
        for bucket in self._all:
            if bucket.unsent and bucket.parks_down and not self.last_pass:
                self._send(bucket)

    @torch.no_grad()
    def learn(self) -> None:
        """Before somebody asks who has a gradient: over ranks, whoever has one on any of them. Then a collective."""
        if self._group is not None and self.last_pass:
            self.finish()

    @torch.no_grad()
    def finish(self) -> None:
        """Before norm or update: everything that has landed is where it parks, summed over the ranks. A collective."""
        if self.empty or self._finished:
            return
        self._finished = True
        late = [bucket for bucket in self._all if bucket.index not in self._done]
        if self._group is not None:
            for bucket in late:
                self._settle(bucket)  # where only other ranks have used it, its last update may wait for this memory
                self._reduce(bucket)
            self._share_touched()
        for bucket in late:
            if bucket.touched:
                self._finish(bucket)

    def _finish(self, bucket: BucketState) -> None:
        """For this update no further gradient of ``held`` will come."""
        self._done.add(bucket.index)
        if bucket.parks_down or bucket.spec.site is Site.HOST:
            self._send(bucket)
        if bucket.parks_down and self._layout.accumulation > 1:
            self._measure_on_host(bucket)
        self._complete(bucket)

    def _reduce(self, bucket: BucketState) -> None:
        """Mean over the ranks, in place; as torch's data parallelism does it: divide, then sum."""
        import torch.distributed as dist

        assert bucket.grad is not None and self._group is not None
        if bucket.parks_down:
            self._enter_slot(bucket)
        missing = [index for index in range(len(bucket.params)) if index not in bucket.touched]
        for index in missing:
            bucket.part(bucket.grad, index).zero_()
        bucket.grad.div_(dist.get_world_size(self._group))
        dist.all_reduce(bucket.grad, group=self._group)

    def _share_touched(self) -> None:
        """A parameter that had a gradient on any rank has one on all."""
        import torch.distributed as dist

        flags = torch.tensor(
            [float(i in bucket.touched) for bucket, i in self._order], device=self._all[0].weight.device
        )
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        for (bucket, index), flag in zip(self._order, flags.tolist(), strict=True):
            if flag and index not in bucket.touched:
                bucket.touched.add(index)
                bucket.unsent.add(index)

    def _send(self, bucket: BucketState) -> None:
        """DOWN with what has landed: the whole bucket in one copy, or parameter by parameter where some are missing."""
        if not bucket.unsent:
            return
        assert bucket.grad is not None and bucket.parked is not None
        if bucket.parks_down and self._layout.accumulation == 1:  # the slot may be another's before the rest has landed
            leaving = sorted(bucket.unsent)
            bucket.norms |= zip(leaving, norms_of(bucket.gradients(leaving)), strict=True)
        transfer, adds = self._transfer, bool(bucket.unsent & bucket.summed)
        target = bucket.arrival if adds else bucket.parked
        assert target is not None, f"{bucket.name}: a second gradient, and nowhere to add it"
        if adds:
            self._wait_for_arrivals(target)
        elif bucket.added is not None:  # by now long done: PARKED was read by an update since
            transfer.wait(Lane.DOWN, bucket.added.result())
        transfer.wait(Lane.DOWN, transfer.record(Lane.COMPUTE), bucket.arrived)
        if len(bucket.unsent) == len(bucket.params):
            transfer.copy(Lane.DOWN, target, bucket.grad)
        else:
            for index in sorted(bucket.unsent):
                transfer.copy(Lane.DOWN, bucket.part(target, index), bucket.part(bucket.grad, index))
        bucket.sent = transfer.record(Lane.DOWN)
        if adds:
            work = partial(self._add, bucket, target, sorted(bucket.unsent), frozenset(bucket.summed), bucket.sent)
            bucket.added = self._arrivals[target.data_ptr()] = self._worker.submit(bucket.index, work)
        bucket.summed |= bucket.unsent
        bucket.unsent.clear()

    def _wait_for_arrivals(self, slot: Tensor) -> None:
        former = self._arrivals.pop(slot.data_ptr(), None)
        if former is not None:
            self._transfer.wait(Lane.DOWN, former.result())

    def _add(
        self, bucket: BucketState, arrival: Tensor, indices: list[int], summed: frozenset[int], sent: Event
    ) -> Event:
        """In the worker: add what has arrived to what is parked."""
        assert bucket.parked is not None
        self._transfer.host_wait(sent)
        self._transfer.reads(Lane.HOST, arrival)
        self._transfer.writes(Lane.HOST, bucket.parked)
        for index in indices:
            target, source = bucket.part(bucket.parked, index), bucket.part(arrival, index)
            if index in summed:
                target.add_(source)
            else:
                target.copy_(source)
        return self._transfer.record(Lane.HOST)

    def _measure_on_host(self, bucket: BucketState) -> None:
        """The norms of gradients that were summed on the host, taken there."""
        touched, sent = sorted(bucket.touched), bucket.sent

        def measure() -> list[Tensor]:
            assert bucket.parked is not None
            self._transfer.host_wait(sent)
            return norms_of([bucket.shaped(bucket.parked, index) for index in touched])

        future = self._worker.submit(bucket.index, measure)
        bucket.norms_later = (touched, future)

    def norms_in(self, bucket: BucketState, device: torch.device) -> list[Tensor]:
        """The norm of each gradient of a finished bucket, as fp32 numbers on ``device``."""
        if bucket.norms_later is not None:
            touched, future = bucket.norms_later
            bucket.norms = dict(zip(touched, _together(future.result(), device), strict=True))
            bucket.norms_later = None
        if not bucket.norms and bucket.touched:
            self._measure([bucket])
        return list(bucket.norms.values())

    def _measure(self, several: Sequence[BucketState]) -> None:
        """The norms of gradients that park on the device, in one call: one kernel for all of them."""
        places = [(bucket, index) for bucket in several for index in sorted(bucket.touched)]
        grads = [grad for bucket in several for grad in bucket.gradients(sorted(bucket.touched))]
        for (bucket, index), norm in zip(places, norms_of(grads), strict=True):
            bucket.norms[index] = norm

    def norm(self, device: torch.device) -> Tensor:
        """The norm of all gradients of this update, a single fp32 number on ``device``."""
        self.leftovers.refuse()
        self.finish()
        self._measure([bucket for bucket in self._all if not bucket.parks_down and not bucket.norms])
        for bucket in self._all:
            self.norms_in(bucket, device)
        in_order = [bucket.norms[index] for bucket, index in self._order if index in bucket.norms]
        if not in_order:
            return torch.zeros((), device=device)
        total: Tensor = torch.linalg.vector_norm(torch.stack(in_order), 2.0)
        return total

    def norms(self) -> Norms:
        """What is known of single norms, in the order in which backward came by."""
        known = [(bucket, index) for bucket, index in self._landed_in if index in bucket.norms]
        return Norms(
            [bucket.spec.params[index] for bucket, index in known], [bucket.norms[index] for bucket, index in known]
        )

    def value(self, bucket: BucketState, index: int, device: torch.device) -> Tensor:
        """A copy of one gradient of this update, as far as it has come."""
        if self.last_pass:
            self.finish()
        elif bucket.parks_down:
            self._send(bucket)
        if not bucket.parks_down:
            assert bucket.grad is not None
            return bucket.shaped(bucket.grad, index).clone()
        assert bucket.parked is not None
        if bucket.added is not None:
            self._transfer.host_wait(bucket.added.result())
        self._transfer.host_wait(bucket.sent)
        return bucket.shaped(bucket.parked, index).to(device, copy=True)

    def forget(self, bucket: BucketState, index: int) -> None:
        """As if parameter ``index`` had got no gradient for this update."""
        self.finish()
        bucket.touched.discard(index)
        bucket.unsent.discard(index)
        bucket.norms.pop(index, None)

    def discard(self) -> None:
        """As ``clear``, when nobody has taken the gradients: what the worker still adds is awaited."""
        for former in self._arrivals.values():
            former.result()
        self.clear()

    def spend(self) -> None:
        """As ``clear``, when a step has taken the gradients."""
        self.leftovers.spend()
        self.clear()

    def clear(self) -> None:
        """The window is over: its gradients were taken, or are not wanted."""
        for bucket in self._all:
            bucket.landed.clear()
            bucket.unsent.clear()
            bucket.touched.clear()
            bucket.summed.clear()
            bucket.norms, bucket.norms_later = {}, None
        self._done.clear()
        self._landed_in.clear()
        self.passes, self._fresh, self._finished = 0, True, False
        self.window += 1


def _together(numbers: list[Tensor], device: torch.device) -> list[Tensor]:
    """Single numbers from the host on ``device``, in one copy that nobody waits for."""
    stacked = torch.stack(numbers)
    if device.type != "cpu":
        stacked = stacked.pin_memory().to(device, non_blocking=True)
    return list(stacked.unbind())


def norms_of(grads: Sequence[Tensor]) -> list[Tensor]:
    """The Euclidean norm of each, as fp32, by the function that ``torch.nn.utils.clip_grad_norm_`` takes there."""
    if not grads:
        return []
    return list(torch._foreach_norm(list(grads), 2.0, torch.float32))
