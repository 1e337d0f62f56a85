"""The engine: one step of training, in the order of its effects.

    forward    enters a scope: settle the updates of its weights, fetch what is absent, prefetch
    backward   enters a scope: leave the scopes after it; then the same in the other direction
               a gradient lands: into its slot, and on to where it waits for the update (``gradients.py``)
    norm       of all gradients, over all ranks (``clipping.py``)
    step       jobs in forward order (``updates.py``), settled when their buckets are next used

A weight that is read where no hook announced it is settled and fetched first, too (``guard.py``, ``keeper.py``). What
several ranks do together is one object, ``ranks``; for one rank it does nothing (``ranks/replicas.py``).

Invariant. Every use of a bucket finds its newest weights in its home. Prefetch and the order in which the worker takes
its work decide how long that takes, never what is found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepstow.strategies.core.layout import Addresses, Item, Layout
from deepstow.strategies.core.on_disk import state_file_bytes, weight_file_bytes
from deepstow.strategies.engine.buckets.bucket_state import BucketOf, BucketState, Job, Pending, Scale, find_overlapping
from deepstow.strategies.engine.memory.arena import Arena
from deepstow.strategies.engine.memory.disk_state import DiskState
from deepstow.strategies.engine.memory.disk_weights import DiskWeights
from deepstow.strategies.engine.module_hooks import ModuleHooks, Scope, find_scopes, unseen
from deepstow.strategies.engine.prefetch import Prefetch
from deepstow.strategies.engine.ranks.shares import ranks_of
from deepstow.strategies.engine.ranks.two_level import TwoLevel
from deepstow.strategies.engine.residency import Residency
from deepstow.strategies.engine.tensors.guard import refuse_transforms
from deepstow.strategies.engine.tensors.parameters import WRITE, Copied
from deepstow.strategies.engine.transfer.transfer import Stream, Transfer
from deepstow.strategies.engine.transfer.worker import Worker, spare_cores
from deepstow.strategies.engine.updating.clipping import Clipping, SkippedSteps
from deepstow.strategies.engine.updating.gradients import Gradients
from deepstow.strategies.engine.updating.moments import Moments
from deepstow.strategies.engine.updating.norms import TotalNorm, norm_of_all
from deepstow.strategies.engine.updating.optim import UpdateRule
from deepstow.strategies.engine.updating.updates import Updates

FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass(frozen=True, slots=True)
class Runtime:
    """Where an engine runs, and beside whom."""

    device: torch.device
    transfer: Transfer
    beside: bool  # updates on the host run in a thread, beside the caller
    group: dist.ProcessGroup | None  # of ranks to average gradients over; None: there is one
    two_level: TwoLevel | None  # how they exchange, if not all at once
    total_norm: TotalNorm
    debug: bool


class Engine(Copied):
    """Drives ``model`` as ``layout`` and ``addresses`` say. Made by ``stow``, which has checked that they fit.
    ``groups`` returns the optimizer's parameter groups.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        addresses: Addresses,
        rule: UpdateRule,
        groups: Callable[[], Sequence[Mapping[str, Any]]],
        runtime: Runtime,
    ) -> None:
        transfer = runtime.transfer
        device = runtime.device
        self.layout = layout
        self.device = device
        self.rule = rule
        self.transfer = transfer
        self.groups = groups
        self._debug = runtime.debug
        self.ranks = ranks_of(
            runtime.group, model, layout, transfer, device, runtime.two_level,
            beside=runtime.beside, debug=runtime.debug,
        )  # fmt: skip
        self.arena = Arena(addresses, device, self.ranks.common)
        self.disk = DiskState(layout, self.arena) if state_file_bytes(layout) else None
        self.disk_weights = DiskWeights(layout, self.arena, transfer) if weight_file_bytes(layout) else None
        self.buckets = list(self._make_buckets(model))
        self.ranks.connect(self.buckets, self.arena)
        self.worker = Worker(spare_cores() if runtime.beside else None, device)
        for bucket in self.buckets if device.type != "cpu" else ():  # pinning takes all pages at once
            self.worker.submit(bucket.index, bucket.touch_state).result()
        self.arena.pin()
        find_overlapping(self.buckets, self.arena)
        self.bucket_of = BucketOf({id(p): (bucket, i) for bucket in self.buckets for i, p in enumerate(bucket.params)})
        self._offloads = not all(bucket.spec.resident for bucket in self.buckets)
        codes = self.arena.of("", Item.CODES, torch.uint8)
        self.residency = Residency(self.ranks, transfer, self.disk_weights, codes, debug=runtime.debug)
        scopes = find_scopes(model, self.bucket_of)
        self.hooks = ModuleHooks(
            scopes,
            self._enter_forward,
            self._enter_backward,
            unseen(self.residency.left),
            self._bring_unannounced,
            records_nodes=self.shares_weights,  # residents need no order of fetches
        )
        scratch = self.arena.of("", Item.SCRATCH, torch.float32)
        moments = None if layout.moments_as == "fp32" else Moments(layout, self.arena)
        self.updates = Updates(rule, self.residency, self.ranks, transfer, self.worker, scratch, moments)
        order = [self.bucket_of[id(param)] for param in model.parameters() if param.requires_grad]
        self.trained = {id(bucket.params[index]) for bucket, index in order}
        self.gradients = Gradients(
            layout, order, self.ranks, transfer, self.worker, self.updates, self._completed,
            self._settle_after_backward, runtime.total_norm,
        )  # fmt: skip
        self.prefetch = Prefetch(scopes, self.residency, self.updates)
        self.clipping = Clipping(layout, self.gradients, transfer, device)
        several = self.ranks.many or runtime.total_norm is not norm_of_all
        self.skipped_steps = SkippedSteps(transfer, among_ranks=several)
        self._used: dict[int, dict[str, Any]] = {}  # copies of the groups that this step's jobs have, by number
        self._ready: list[BucketState] = []  # complete buckets whose updates start in backward
        self.unannounced = 0  # reads in backward that no hook announced and that had to fetch their weights
        self._in_forward = False
        self._handles = [model.register_forward_pre_hook(self._before_forward)]
        self._handles += [model.register_forward_hook(self._end_forward, always_call=True)]
        self._handles += [*self.hooks.attach(), *self.gradients.attach()]

    def _make_buckets(self, model: nn.Module) -> Iterator[BucketState]:
        params = dict(model.named_parameters())
        nans = {
            dtype: torch.full((), math.nan if dtype.is_floating_point else 0, dtype=dtype, device=self.device)
            for dtype in {param.dtype for param in params.values()}
        }
        fused = {id(p) for module in model.modules() if isinstance(module, FUSED) for p in module.parameters()}
        for index, spec in enumerate(self.layout.buckets):
            members = [params[name] for name in spec.params]
            nan = nans[members[0].dtype]
            rank, on_disk = self.ranks.rank, () if self.disk is None else self.disk.stretches.get(index, ())
            resting = None if self.disk_weights is None else self.disk_weights.resting(index)
            bucket = BucketState(spec, index, members, self.arena, nan, self.layout, fused, rank, on_disk, resting)
            bucket.take_in()
            self.written(bucket)
            yield bucket

    def written(self, bucket: BucketState, index: int | None = None) -> None:
        """The host's copy has a weight of the model, or one from outside (``index``); it may be on the disk."""
        if self.disk_weights is not None:
            for byte_range in (None,) if index is None else bucket.bytes_of(index):
                self.disk_weights.written(bucket.index, byte_range)

    def refuse_damaged(self, bucket: BucketState, index: int) -> None:
        """Before the host's copy of a settled weight is read, or written in part: DiskError if the disk has lost it."""
        if self.disk_weights is not None:
            for byte_range in bucket.bytes_of(index):
                self.disk_weights.refuse_damaged(bucket.index, byte_range)

    # --- forward -----------------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if not self.hooks.rounds:
            self.begin_forward()

    def begin_rounds(self) -> None:
        """The micro-batches of a step take turns in each scope (``layers_first.py``): one forward of all of them."""
        self.begin_forward()
        self.hooks.rounds = self.prefetch.rounds = True

    def end_head(self) -> None:
        """The head of one of them has had its backward."""
        self.hooks.end_head()

    def end_rounds(self) -> None:
        """Forward of all of them has ended, or was interrupted."""
        self.hooks.end_rounds()
        self.prefetch.rounds = False
        self._in_forward = False

    def entered(self) -> set[int]:
        """The weights, by id, of buckets that this forward has used so far."""
        return {id(param) for bucket in self.prefetch.entered() for param in bucket.params}

    def begin_backward_of_rounds(self) -> None:
        """One backward of all of them follows. Gradients of the head land before it enters a scope."""
        self.prefetch.begin_backward()
        if self.ranks.shared:
            everything = self.prefetch.used()
            self.gradients.exchange(everything, everything)

    def begin_forward(self) -> None:
        """Before every forward; of a part that does not run the model itself, its caller says so."""
        if self._offloads:
            refuse_transforms()
        self.refuse_partly_updated()
        self.hooks.forget_calls()
        self.hooks.close_all()
        self._find_writes()
        self._in_forward, trains = True, torch.is_grad_enabled()
        self.ranks.begin_forward(trains=trains, is_last=self.gradients.passes + 1 >= self.layout.accumulation)
        self.prefetch.begin()
        if trains:
            self.gradients.new_pass()

    @unseen
    def _enter_forward(self, scope: Scope) -> None:
        if not self.hooks.backward:
            self.ranks.note("ran", scope.name)
        self.ensure(*scope.buckets)
        if not self.hooks.backward:
            self.prefetch.in_forward(scope)

    def _end_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._in_forward = self.hooks.rounds
        for bucket in self.buckets if output is not None else ():  # None: it has ended with an error
            bucket.handed_out.refuse_edits()

    # --- backward ----------------------------------------------------------------------------------------------------

    @unseen
    def begin_backward(self) -> None:
        """Before every backward of a pipeline, which may follow another one: prefetch and exchanges begin anew."""
        self.hooks.close_all()
        self.gradients.new_pass()
        self.prefetch.begin_backward()

    @unseen
    def _enter_backward(self, scope: Scope) -> None:
        if self.hooks.rounds:  # of a head, whose weights are there
            self.ensure(*scope.buckets)
            return
        self._update_ready()
        self.prefetch.come_back_to(scope)
        if self.ranks.shared:
            for backward_scope in self.hooks.scopes_of_backward():
                self.ranks.note("goes back through", backward_scope.name)
            self.gradients.exchange(self.prefetch.used(), self.prefetch.to_come())
        self.ensure(*scope.buckets)
        self.prefetch.in_backward()

    def _completed(self, bucket: BucketState) -> None:
        if self.layout.in_backward:
            self._ready.append(bucket)
            if bucket.spec.grad_taken and self.gradients.finished:  # the update frees the slot for the next bucket
                self._update_ready()

    def _update_ready(self) -> None:
        """Without clipping: update the buckets that are complete and that no open scope uses."""
        waiting = [bucket for bucket in self._ready if bucket.open]
        self._expect(bucket for bucket in self._ready if not bucket.open)
        for bucket in self._ready:
            if not bucket.open:
                self._submit(bucket, self.clipping.in_backward(bucket))
                bucket.views.make_absent()  # not read before step; see ``refuse_partly_updated``
        self._ready = waiting

    def _settle_after_backward(self, bucket: BucketState) -> None:
        """Finish the last update of a bucket that this rank has not used since, before it gets another one."""
        self.hooks.close_all()
        self.settle(bucket)

    # --- norm and step -----------------------------------------------------------------------------------------------

    def clipping_after_backward(self) -> Clipping:
        """For those who read, write or clip gradients: backward has ended."""
        self.hooks.close_all()
        return self.clipping

    @torch.no_grad()
    def step(self) -> None:
        """Give every bucket with gradients its job, in the order in which forward will need them."""
        self.hooks.close_all()
        self.ranks.step()
        self.gradients.refuse_leftovers()
        self._find_writes()
        self.gradients.finish()
        if self.gradients.empty:
            return
        if self.layout.in_backward:
            self._update_ready()
            self._refuse_changed()
        else:
            touched = [bucket for bucket in self.buckets if bucket.grads.touched]
            scale = self.clipping.of_step(touched)
            self.ranks.stop_reading()
            self._expect(touched)
            for bucket in touched:
                self._submit(bucket, scale)
        if self.clipping.scale is not None and not self.clipping.of_scaled_loss:
            self.skipped_steps.add(self.clipping.scale, self.gradients.norms())
        self.clipping.clear()
        self.gradients.spend()
        self._used.clear()
        self.prefetch.in_step()
        self.skipped_steps.refuse()

    def _find_writes(self) -> None:
        """Keep what others have written to weights, or raise RuntimeError; ``parameter_views.py``, note: unseen writes.
        In debug all places of a weight are compared as well, where no copy is under way.
        """
        for bucket in self.buckets:
            bucket.views.find_writes()
            events = (bucket.arrived, bucket.used, bucket.stored, bucket.grads.sent)
            if self._debug and all(self.transfer.done(event) for event in events):
                name = bucket.written_unseen()
                if name is not None:
                    raise RuntimeError(f"{name} was written to by its address; {WRITE}")

    def _expect(self, buckets: Iterable[BucketState]) -> None:
        """These are about to be submitted: what of them is on the disk is read ahead."""
        if self.disk is not None:
            self.disk.expect(bucket.index for bucket in buckets)

    def _submit(self, bucket: BucketState, scale: Scale) -> None:
        number = bucket.spec.group
        assert number is not None
        bucket.refuse_loans()
        if number not in self._used:
            self._used[number] = self._copy_of_group(number)
        self.updates.submit(bucket, Job(tuple(sorted(bucket.grads.touched)), self._used[number], scale))

    def _copy_of_group(self, number: int) -> dict[str, Any]:
        """Its values now: a scheduler may change a rate, even in place, before an update is computed."""
        return {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in self.groups()[number].items()
            if name != "params"
        }

    def _refuse_changed(self) -> None:
        """Raise RuntimeError if hyperparameters are not those that the updates in backward were made with."""
        for number, used in self._used.items():
            now = self.groups()[number]
            for name, value in used.items():
                if bool(now.get(name) != value):
                    raise RuntimeError(
                        f"{name} of parameter group {number} was changed between backward and step(), and the plan "
                        f"updates in backward: change it before backward, or plan with max_grad_norm > 0"
                    )

    def refuse_partly_updated(self, cure: str = "call step() before weights are read") -> None:
        """Raise RuntimeError between backward and step if only some weights are updated already."""
        if self.layout.in_backward and self._used:
            raise RuntimeError(f"the plan updates in backward (without max_grad_norm), and updates have begun: {cure}")

    # --- dropping gradients ------------------------------------------------------------------------------------------

    def zero(self, *, to_none: bool) -> None:
        """Set gradients to None, or to zero if there were any; those that wait for a step are discarded."""
        for bucket in self.buckets:
            bucket.grads.zero(to_none=to_none)
        if not self.gradients.empty:
            self.discard()

    def discard(self) -> None:
        """Drop the gradients since the last step, unless updates with them have begun."""
        self.refuse_partly_updated("call step(), or if backward was interrupted, start from a checkpoint")
        self.hooks.close_all()
        self.gradients.discard()
        self.clipping.clear()
        self._ready.clear()

    def forget(self, bucket: BucketState, index: int) -> None:
        """Drop one gradient, as by ``param.grad = None``; without any left, all of the step are discarded."""
        if bucket.grads.forget_spent(index):
            return
        if not self.layout.in_backward:
            self.clipping.forget(bucket, index)
        if self.layout.in_backward or not any(state.grads.touched for state in self.buckets):
            self.discard()

    def zero_one(self, bucket: BucketState, index: int) -> None:
        """Make one gradient zero, as ``zero_grad(set_to_none=False)`` of a module does with each."""
        if index not in bucket.grads.touched or bucket.is_shared or self.layout.in_backward:
            self.forget(bucket, index)
            bucket.grads.zero_one(index)
            return
        zero = torch.zeros_like(bucket.views.absent(index))
        self.clipping_after_backward().write(bucket, index, zero, multiplied=False)
        bucket.grads.zero_one(index)
        if all(state.grads.touched <= state.grads.zeroed for state in self.buckets):
            self.discard()

    # --- weights -----------------------------------------------------------------------------------------------------

    def ensure(self, *buckets: BucketState) -> None:
        """Bring the newest weights of ``buckets``, one after the other, into their homes and show them to COMPUTE."""
        for bucket in buckets:
            self.settle(bucket)
            if not bucket.present:
                self.residency.fetch(bucket)
            self.residency.use(bucket)

    @unseen
    def settle(self, bucket: BucketState) -> None:
        """Finish the pending update of ``bucket``, so that ``bucket.weight_of`` gives its newest weights."""
        if not (bucket.settled and bucket.present):
            for overlapping in bucket.overlapping:  # whose updates have begun and write to the same addresses
                if overlapping.pending is Pending.VISITING:
                    self.updates.settle(overlapping)
        self.updates.settle(bucket)
        self.residency.restore(bucket)

    @unseen
    def _bring_unannounced(self, bucket: BucketState) -> None:
        self.unannounced += not bucket.present
        self.ensure(bucket)

    @unseen
    def add_reader(self, bucket: BucketState) -> None:
        """A resident bucket is read outside of the modules that own it: the running scope uses it from now on."""
        self.ensure(bucket)
        self.hooks.add_to_running(bucket)

    def newest(self, bucket: BucketState, index: int, device: torch.device | str = "cpu") -> Tensor:
        """The newest weight of one parameter of a bucket that is settled. Where ranks share it: its home if that is
        always its own, else a copy on ``device``; a collective if the weight is away.
        """
        if not bucket.is_shared:
            self.refuse_damaged(bucket, index)
            return bucket.weight_of(index)
        if self.hooks.backward:  # it has ended, and its last scope was not left
            self.hooks.close_all()
        self.ensure(bucket)
        home = bucket.shaped(bucket.weight, index)
        if bucket.spec.resident:
            return home
        copy = home.to(device, copy=True)
        bucket.used = self.transfer.record(Stream.COMPUTE)
        return copy

    @property
    def shares_weights(self) -> bool:
        """Whether of some weights each rank holds a span."""
        return self.ranks.shared and self._offloads

    def refuse_alone(self, bucket: BucketState, name: str) -> None:
        """Raise RuntimeError if outside code reads a weight that only an exchange could bring: the other ranks may know
        nothing of it, but in forward and backward, where all ranks do the same.
        """
        if bucket.is_shared and not self._in_forward and torch._C._current_graph_task_id() == -1:
            raise RuntimeError(
                f"{name} is shared over ranks, and this one has a part of it: read it on all of them, inside of `with "
                f"optimizer.present([param]):`, or from model.state_dict()"
            )

    @torch.no_grad()
    def drain(self) -> None:
        """Settle every bucket and wait for it, so that the host may read all newest weights and state."""
        self.hooks.close_all()
        for bucket in self.buckets:
            self.settle(bucket)
        for bucket in self.buckets:
            self.transfer.host_wait(bucket.stored, bucket.arrived, bucket.used)
            if bucket.spec.resident:
                self.residency.use(bucket)
        self.skipped_steps.poll()

    def close(self) -> None:
        """Remove all hooks, end the worker and unpin the host's memory, which keeps the weights."""
        for handle in self._handles:
            handle.remove()
        self.hooks.detach()
        self.worker.close()
        self.ranks.close()
        self.arena.close()
