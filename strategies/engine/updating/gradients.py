"""Gradients: from autograd into their slots, to the place where they wait for the update, and their norm.

Autograd makes each gradient in a tensor of its own. The hook moves it into the bucket's slot at once and removes it
from the parameter, so that no other code can add to it or free it; ``param.grad`` then stands for it
(``pending_gradient.py``). ``gradient_state.py`` has the state of each bucket's gradients.

    waits on the device   the slot is the bucket's own; further micro-batches are added in it
    waits there, shared   the slot is one of a ring; of the ranks' sum each rank keeps its span
    waits on the host     the slot is one of a ring; when the bucket is complete it goes DOWN (``gradients_down.py``)
    waits there, direct   no slot: it goes DOWN from where autograd made it, parameter by parameter
    updated on the host   what waits on the device goes DOWN once, after the last micro-batch

Exactness. Adding in the slot is what autograd does with a gradient that it finds. The norm is that of
``torch.nn.utils.clip_grad_norm_``: of the norms of all parameters, in bf16 of the gradient as fp32, in the order of
``model.parameters()``, so that it does not depend on buckets. Over ranks gradients are averaged bucket by bucket,
always in the order of the buckets, and norms of owners are combined, so that all ranks skip the same steps.

Refused: sparse gradients, and more backward passes than the plan's accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor, nn

from deepstow.strategies.core.layout import Item, Layout, Site
from deepstow.strategies.engine.buckets.bucket_state import BucketState
from deepstow.strategies.engine.ranks.replicas import OneRank, Place
from deepstow.strategies.engine.tensors.parameters import on_gradient, take_grad
from deepstow.strategies.engine.transfer.transfer import Stream, Transfer
from deepstow.strategies.engine.transfer.worker import Worker
from deepstow.strategies.engine.updating.gradients_down import GradientsDown
from deepstow.strategies.engine.updating.norms import TotalNorm, norms_of, together
from deepstow.strategies.engine.updating.updates import Updates


class Gradients:
    """Takes gradients as they land. ``order`` has the places of all trained parameters in the order of
    ``model.parameters()``. ``complete`` is called when all gradients of a bucket for one update are where they wait for
    it; ``settle`` computes the last update of a bucket, if that was not done yet.
    """

    def __init__(
        self,
        layout: Layout,
        order: Sequence[Place],
        ranks: OneRank,
        transfer: Transfer,
        worker: Worker,
        updates: Updates,
        complete: Callable[[BucketState], None],
        settle: Callable[[BucketState], None],
        total_norm: TotalNorm,
    ) -> None:
        self._layout = layout
        self._order = order
        self._ranks = ranks
        self._transfer = transfer
        self._updates = updates
        self._total_norm = total_norm
        self._complete = complete
        self._settle = settle
        self._down = GradientsDown(layout.accumulation, transfer, worker, updates.settle)
        self._buckets = sorted({bucket.index: bucket for bucket, _ in order}.values(), key=lambda bucket: -bucket.index)
        self.window = 0  # how often all gradients were taken or discarded
        self.passes = 0  # backward passes since the last update
        self._waiting: dict[int, BucketState] = {}  # by index: those that get further gradients for it, last first
        self._landed_in: list[Place] = []  # in the order of backward
        self._fresh = True  # the next gradient belongs to a new pass
        self.finished = False  # no more gradients may come before the next update
        self._combined = False  # every rank has the norms of all
        self._used = set[int]()  # buckets of the forward whose gradients land, where ranks share them

    def attach(self) -> list[torch.utils.hooks.RemovableHandle]:
        return [on_gradient(bucket.params[index], partial(self._land, bucket, index)) for bucket, index in self._order]

    @property
    def empty(self) -> bool:
        return self.passes == 0

    @property
    def last_pass(self) -> bool:
        return self.passes >= self._layout.accumulation

    def new_pass(self) -> None:
        """A forward with gradients has begun, or a backward: the next gradient is of another micro-batch."""
        self._fresh = True

    @torch.no_grad()
    def _land(self, bucket: BucketState, index: int, param: nn.Parameter) -> None:
        grad = take_grad(param)
        if grad is None:  # the parameter was frozen after forward: torch has dropped its gradient
            return
        if grad.layout is not torch.strided:
            raise RuntimeError(f"{bucket.name}: sparse gradients are not supported: build it with sparse=False")
        bucket.grads.refuse_spent(index)
        if self._fresh or index in bucket.grads.landed:
            self._start_pass()
        if bucket.index not in self._waiting:
            self._refuse_pass()
        if not bucket.spec.grad_direct:
            self._into_slot(bucket, index, grad)
        if index not in bucket.grads.touched:
            self._landed_in.append((bucket, index))
        bucket.grads.land(index)
        if bucket.spec.grad_direct:
            self._down.send_direct(bucket, index, grad)
        if bucket.grads.complete:
            self._landed(bucket)

    def _start_pass(self) -> None:
        if self.finished or self.last_pass:
            self._refuse_pass()
        for bucket in self._buckets:
            if bucket.spec.grad_passes:
                self._down.send(bucket)  # incomplete, since some parameters got no gradient
            bucket.grads.new_pass()
        self._fresh = False
        self.passes += 1
        self._waiting = {bucket.index: bucket for bucket in self._buckets}

    def _refuse_pass(self) -> NoReturn:
        raise RuntimeError(
            f"a backward pass after the gradients of {self._layout.accumulation} were complete: call step() or "
            f"zero_grad() first, or plan with the accumulation that the loop has. (Gradients in parts, as of reentrant "
            f"checkpointing, each count: write use_reentrant=False. Over ranks, two forwards need two backwards)"
        )

    def _into_slot(self, bucket: BucketState, index: int, grad: Tensor) -> None:
        if bucket.spec.grad_passes:
            self._enter_slot(bucket)
        else:  # a gradient that no update has taken may still be on its way down
            self._transfer.wait(Stream.COMPUTE, bucket.grads.sent)
        place = bucket.shaped(bucket.memory[Item.GRAD], index)
        self._transfer.uses(Stream.COMPUTE, writes=[bucket.memory[Item.GRAD]])
        if index in bucket.grads.touched and not bucket.spec.grad_passes:
            place.add_(grad)
        else:
            place.copy_(grad)

    def _enter_slot(self, bucket: BucketState) -> None:
        """Give COMPUTE the slot of ``bucket`` if several pass through it."""
        if not bucket.spec.grad_passes:
            return
        former = self._updates.gradient_slots.last(bucket)
        if former is bucket and bucket.grads.unsent:
            return
        if former is not None and former is not bucket and former.grads.unsent:
            if self._ranks.many and former.index in self._waiting:
                raise RuntimeError(
                    f"{bucket.name} needs the slot of {former.name}, whose gradients the ranks have not exchanged (a "
                    f"parameter has none, or both get theirs at once): set strategies.offload.gradients: device"
                )
            self._down.send(former)  # incomplete: send what has landed
        self._updates.gradient_slots.enter(bucket, Stream.COMPUTE)

    def _landed(self, bucket: BucketState) -> None:
        """All gradients of one micro-batch are in the bucket's slot."""
        if self.last_pass:
            self._average(self._ranks.due(self._waiting.values(), bucket))
        elif bucket.spec.grad_passes:
            self._down.send(bucket)

    @torch.no_grad()
    def exchange(self, used: set[int], to_come: set[int]) -> None:
        """Exchange the gradients of buckets ``used`` by this forward that backward has passed: all but ``to_come``.

        A rank may have no gradient for a parameter for which others have one. So where ranks share buckets, what each
        exchanges, and when, follows from where backward is, and not from what has landed. The last update of a bucket
        that is not used may still wait for the memory of its gradients: ``finish`` settles it first.
        """
        if self._fresh:
            self._start_pass()
            self._ranks.begin_backward()
        self._used = used
        if self.last_pass:
            self._average(self._waiting_of(used - to_come))

    def _waiting_of(self, indices: set[int]) -> list[BucketState]:
        return [bucket for index, bucket in self._waiting.items() if index in indices]

    def _average(self, buckets: Sequence[BucketState]) -> None:
        for bucket in buckets:
            self._ranks.average(bucket, self._enter_slot)
            self._finish(bucket)

    @torch.no_grad()
    def learn(self) -> None:
        """Find out which parameters have a gradient on any rank. A collective, if there are several."""
        if self._ranks.many and self.last_pass:
            self.finish()

    @torch.no_grad()
    def finish(self) -> None:
        """Before norm or update: average over the ranks and send to the host whatever has not been. A collective."""
        if self.empty or self.finished:
            return
        self.finished = True
        self._average(self._waiting_of(self._used))  # before others get their slots
        late = list(self._waiting.values())
        for bucket in late:
            self._ranks.average(bucket, self._settle_and_enter)
        self._ranks.end_backward(self._order)
        for bucket in late:
            if bucket.grads.touched:
                self._finish(bucket)

    def _settle_and_enter(self, bucket: BucketState) -> None:
        """Where only other ranks have used it, its last update may wait for the memory of the gradient."""
        self._settle(bucket)
        self._enter_slot(bucket)

    def _finish(self, bucket: BucketState) -> None:
        """No further gradient of ``bucket`` comes for this update."""
        del self._waiting[bucket.index]
        if bucket.spec.grad_passes or bucket.spec.site is Site.HOST:
            self._down.send(bucket)
        if bucket.spec.grad_passes and self._layout.accumulation > 1:
            self._down.measure(bucket)
        self._complete(bucket)

    def norms_in(self, bucket: BucketState, device: torch.device) -> list[Tensor]:
        """The norm of each gradient of a finished bucket, as fp32 numbers on ``device``."""
        if bucket.grads.host_norms is not None:
            touched, future = bucket.grads.host_norms
            bucket.grads.measured(touched, together(future.result(), device))
        if not bucket.grads.norms and bucket.grads.touched:
            self._measure([bucket])
        return list(bucket.grads.norms.values())

    def _measure(self, buckets: Sequence[BucketState]) -> None:
        """The norms of gradients that are whole in their slots, in one call: one kernel for all of them."""
        measurable = [[index for index in sorted(bucket.grads.touched) if bucket.measures(index)] for bucket in buckets]
        pairs = list(zip(buckets, measurable, strict=True))
        norms = iter(norms_of([grad for bucket, indices in pairs for grad in bucket.gradients(indices)]))
        for bucket, indices in pairs:
            bucket.grads.measured(indices, [next(norms) for _ in indices])

    def norm(self, device: torch.device) -> Tensor:
        """The norm of all gradients of this update, a single fp32 number on ``device``."""
        self.refuse_leftovers()
        self.finish()
        self._measure([bucket for bucket in self._buckets if not bucket.spec.grad_passes and not bucket.grads.norms])
        for bucket in self._buckets:
            self.norms_in(bucket, device)
        if not self._combined:
            self._ranks.tell_norms(self.waiting(), device)
            self._combined = True
        measured = [(b.spec.params[index], b.grads.norms.get(index)) for b, index in self._order]
        return self._total_norm({name: norm for name, norm in measured if norm is not None}, device)

    def waiting(self) -> list[Place]:
        """The places of all gradients of this update."""
        return [(bucket, index) for bucket, index in self._order if index in bucket.grads.touched]

    def norms(self) -> dict[str, Tensor]:
        """The norms that were computed, by parameter, in the order in which backward made the gradients."""
        places = [(bucket, index) for bucket, index in self._landed_in if index in bucket.grads.norms]
        return {bucket.spec.params[index]: bucket.grads.norms[index] for bucket, index in places}

    def value(self, bucket: BucketState, index: int, device: torch.device) -> Tensor:
        self._refuse_shared(bucket, index)
        if self.last_pass:
            self.finish()
        elif bucket.spec.grad_passes:
            self._down.send(bucket)
        if not bucket.spec.grad_passes:
            return bucket.shaped(bucket.memory[Item.GRAD], index).clone()
        if bucket.grads.added is not None:
            self._transfer.host_wait(bucket.grads.added.result())
        self._transfer.host_wait(bucket.grads.sent)
        return bucket.shaped(bucket.memory[Item.PARKED], index).to(device, copy=True)

    def write(self, bucket: BucketState, index: int, value: Tensor) -> None:
        """Put ``value``, from COMPUTE, into every place of a gradient that waits, and learn its norm."""
        self._refuse_shared(bucket, index)
        self.norm(value.device)  # of those beside it, too, which is done once for all of a bucket
        if bucket.grads.added is not None:
            self._transfer.host_wait(bucket.grads.added.result())
        self._transfer.host_wait(bucket.grads.sent)
        if not bucket.spec.grad_passes:
            self._transfer.wait(Stream.COMPUTE, bucket.grads.sent)
            self._transfer.uses(Stream.COMPUTE, writes=[bucket.memory[Item.GRAD]])
            bucket.shaped(bucket.memory[Item.GRAD], index).copy_(value)
        if index in bucket.grads.summed:
            self._transfer.uses(Stream.HOST, writes=[bucket.memory[Item.PARKED]])
            bucket.shaped(bucket.memory[Item.PARKED], index).copy_(value)
            self._transfer.wait(Stream.UP, self._transfer.record(Stream.HOST))
        bucket.grads.rewritten(index, *norms_of([value]))

    def _refuse_shared(self, bucket: BucketState, index: int) -> None:
        if bucket.is_shared:
            name = bucket.spec.params[index]
            raise RuntimeError(
                f"the gradient of {name} is shared over ranks: it can be multiplied once, by one factor for all, or "
                f"clipped by optimizer.clip_grad_norm_"
            )

    def refuse_leftovers(self) -> None:
        """Raise RuntimeError if plain torch would step with other gradients; see ``gradient_state.py``."""
        for bucket in self._buckets:
            bucket.grads.refuse_leftovers()

    def discard(self) -> None:
        """Drop the gradients since the last step, after the worker has added what was sent."""
        self._down.finish_sums()
        self._clear()

    def spend(self) -> None:
        for bucket in self._buckets:
            bucket.grads.spend()
        self._clear()

    def _clear(self) -> None:
        for bucket in self._buckets:
            bucket.grads.reset()
        self._landed_in.clear()
        self.passes = 0
        self._waiting = {}
        self._fresh = True
        self.finished = False
        self._combined = False
        self.window += 1
