"""The engine: what happens at each border of a scope and at each call of the optimizer.

    forward enters a scope     settle its updates, fetch what is absent, fetch ahead
    backward enters a scope    the scopes after it are left; the same in the other direction
    a weight is read           where no border announced it: settled and brought (``guard.py``, ``state_dict.py``)
    a gradient lands           into its slot, and on to where it parks (``gradients.py``)
    norm, step                 jobs in forward order (``updates.py``), settled when their buckets are next used

Invariant. Whoever uses a bucket finds its newest weights in its home. Fetching ahead and the order in which the worker
takes its work decide how long that takes, never what is found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from strategies.core.layout import Addresses, Item, Layout, Site
from strategies.engine.bucket_state import BucketOf, BucketState, Pending, Presence, find_overlapping, hold
from strategies.engine.clipping import Clipping
from strategies.engine.gradients import Gradients
from strategies.engine.memory.arena import Arena
from strategies.engine.module_hooks import Itinerary, ModuleHooks, Scope, Visit, find_scopes
from strategies.engine.optim import UpdateRule
from strategies.engine.outside_modes import unseen
from strategies.engine.rank_sync import SharedBuffers, share_start
from strategies.engine.residency import Residency
from strategies.engine.skipped_steps import SkippedSteps
from strategies.engine.tensors.guard import refuse_transforms
from strategies.engine.tensors.parameters import Copied, put
from strategies.engine.transfer.transfer import Transfer
from strategies.engine.updates import Job, Scale, Updates
from strategies.engine.worker import Worker, spare_cores

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Engine(Copied):
    """Drives ``model`` as ``layout`` and ``addresses`` say. Built by ``stow``, which has checked that they fit.

    Args:
        groups: gives hyperparameters by optimizer group; asked when a job is made.
        transfer: moves the bytes; tests give one that delays or watches them.
        beside: host updates run beside the caller, in a worker of their own.
        group: ranks to take the mean of gradients over; None for one rank.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        addresses: Addresses,
        rule: UpdateRule,
        groups: Callable[[], Sequence[Mapping[str, Any]]],
        transfer: Transfer,
        device: torch.device,
        *,
        group: ProcessGroup | None = None,
        debug: bool = False,
        beside: bool = True,
    ) -> None:
        self.layout, self.device, self.rule, self.transfer = layout, device, rule, transfer
        self._groups = groups
        self.arena = Arena(addresses, device)
        dtypes = {param.dtype for param in model.parameters()}
        self._nans = {dtype: torch.full((), math.nan, dtype=dtype, device=device) for dtype in dtypes}
        self._buffers = None if group is None else SharedBuffers(model, group)
        if group is not None:
            share_start(model, device, group)
        self.buckets = list(self._hold(model))
        self.arena.pin()
        find_overlapping(self.buckets, self.arena)
        bucket_of = {id(param): bucket for bucket in self.buckets for param in bucket.params}
        scopes = find_scopes(model, bucket_of)
        self.residency = Residency(transfer, debug=debug)
        self.hooks = ModuleHooks(
            scopes,
            self._enter_forward,
            self._enter_backward,
            unseen(self.residency.left),
            self._bring_unannounced,
            debug=debug,
        )
        self.worker = Worker(spare_cores() if beside else None, device)
        scratch = self.arena.of("", Item.SCRATCH, torch.float32)
        self.updates = Updates(rule, self.residency, transfer, self.worker, scratch)
        self.bucket_of = BucketOf(
            {id(param): (bucket, i) for bucket in self.buckets for i, param in enumerate(bucket.params)}
        )
        order = [self.bucket_of[id(param)] for param in model.parameters() if param.requires_grad]
        self.trained = {id(bucket.params[index]) for bucket, index in order}
        self.gradients = Gradients(
            layout, order, transfer, self.worker, self.updates, self._completed, self._catch_up, group
        )
        self._itinerary = Itinerary(scopes)
        self._used: dict[int, dict[str, Any]] = {}  # hyperparameters of this step's updates, by group
        self._ready: list[BucketState] = []  # complete buckets whose update starts in backward
        self.clipping = Clipping(layout, self.gradients, transfer, device)
        self.skipped_steps = SkippedSteps(transfer)
        self._travels = not all(bucket.spec.resident for bucket in self.buckets)
        self.unannounced = 0  # reads in backward that no border announced and that had to bring their weights
        self._handles = [model.register_forward_pre_hook(self._begin_forward)]
        self._handles += [*self.hooks.attach(), *self.gradients.attach()]

    # --- before the first step ---------------------------------------------------------------------------------------

    def _hold(self, model: nn.Module) -> Iterator[BucketState]:
        params = dict(model.named_parameters())
        fused = {id(p) for module in model.modules() if isinstance(module, FUSED) for p in module.parameters()}
        for index, spec in enumerate(self.layout.buckets):
            members = [params[name] for name in spec.params]
            bucket = hold(spec, index, members, self.arena, self._nans[members[0].dtype], self.layout, fused)
            self._move_in(bucket)
            yield bucket

    @torch.no_grad()
    def _move_in(self, bucket: BucketState) -> None:
        """The model's own weights into their places, after which the model's own memory is free."""
        for index, param in enumerate(bucket.params):
            bucket.part(bucket.rest(), index).copy_(param.detach().reshape(-1))
            if bucket.master is not None:
                bucket.part(bucket.master, index).copy_(param.detach().reshape(-1))
            put(param, bucket.nan.expand(param.shape))
        if bucket.spec.site is Site.DEVICE:
            for moment in bucket.moments:
                moment.zero_()  # the host's pages are zero as they come
        if bucket.steps is not None:
            bucket.steps.zero_()
        bucket.hide()
        if bucket.spec.resident:
            bucket.presence = Presence.PRESENT
            bucket.show()

    # --- borders -----------------------------------------------------------------------------------------------------

    def _begin_forward(self, module: nn.Module, inputs: Any) -> None:
        if self._travels:
            refuse_transforms()
        self.refuse_halfway()
        self.hooks.forget_calls()
        self.hooks.close_all()
        self._itinerary.begin()
        if torch.is_grad_enabled():
            if self._buffers is not None:
                self._buffers.forward(is_last=self.gradients.passes + 1 >= self.layout.accumulation)
            self.gradients.new_pass()

    @unseen
    def _enter_forward(self, scope: Scope) -> None:
        recomputing = self.hooks.recomputing
        if not recomputing:
            self._itinerary.forward(scope)
        self._ensure(scope)
        if not recomputing:
            self._fetch_ahead(self._itinerary.ahead_in_forward())

    def _ensure(self, scope: Scope) -> None:
        for bucket in scope.buckets:
            self.ensure(bucket)

    @unseen
    def _enter_backward(self, scope: Scope) -> None:
        self._itinerary.backward(scope)
        self._update_ready()
        self._ensure(scope)
        self._fetch_ahead(self._itinerary.ahead_in_backward())

    @unseen
    def _bring_unannounced(self, bucket: BucketState) -> None:
        self.unannounced += not bucket.present
        self.ensure(bucket)

    @unseen
    def reads_along(self, bucket: BucketState) -> None:
        """A resident bucket is read outside of the modules that own it; from now on the scope that did has it ready."""
        self.ensure(bucket)
        self.hooks.joins(bucket)

    def ensure(self, bucket: BucketState) -> None:
        """The newest weights of ``held`` are in its home, for COMPUTE."""
        self.settle(bucket)
        if not bucket.present:
            self.residency.fetch(bucket)
        self.residency.use(bucket)

    @unseen
    def settle(self, bucket: BucketState) -> None:
        """The newest weights of ``held`` are where they rest."""
        if bucket.settled:
            if not bucket.present:
                self._settle_visiting(bucket)
            return
        self._settle_visiting(bucket)
        self.updates.settle(bucket)

    def _settle_visiting(self, bucket: BucketState) -> None:
        for other in bucket.overlapping:
            if other.pending is Pending.VISITING:
                self.updates.settle(other)

    def _fetch_ahead(self, visits: Iterable[Visit]) -> None:
        """Start bringing what comes next, in order of need, up to the first that cannot be brought yet.

        A weight that travels comes no earlier than the plan says: before, its place belongs to others. Updated weights
        of residents come as soon as they are there.
        """
        soon: set[int] = set()
        for visit in visits:
            for bucket in visit.scope.buckets:
                if bucket.spec.resident:
                    if not bucket.settled and not self._bring_early(bucket, soon):
                        return
                elif visit.steps <= bucket.leads[visit.back] and not self._bring_early(bucket, soon):
                    return
                soon.add(bucket.index)

    def _bring_early(self, bucket: BucketState, soon: set[int]) -> bool:
        """Start bringing ``held`` unless it would disturb somebody; whether the next one may be tried."""
        if bucket.pending is Pending.HOST:
            if bucket.future is None or not bucket.future.done():
                return False
            self.updates.settle(bucket)
        if not bucket.present or bucket.pending is Pending.DEVICE:
            for other in bucket.overlapping:
                if other.pending is Pending.VISITING or (other.present and (other.open or other.index in soon)):
                    return False
        if bucket.pending is Pending.DEVICE:
            if not self.updates.may_begin(bucket):
                return False
            self.updates.begin(bucket)
        elif not bucket.present:
            self.residency.fetch(bucket)
        return True

    # --- gradients and updates ---------------------------------------------------------------------------------------

    def refuse_halfway(self) -> None:
        """Do nothing where all weights are of one moment.

        Raises:
            RuntimeError: some are updated already and others not, between backward and step.
        """
        if self.layout.in_backward and self._used:
            raise RuntimeError(f"{HALFWAY}: call step() before weights are read")

    def _completed(self, bucket: BucketState) -> None:
        if self.layout.in_backward:
            self._ready.append(bucket)

    def _catch_up(self, bucket: BucketState) -> None:
        """After backward: the last update of a bucket that this rank did not use since, before it gets another."""
        self.hooks.close_all()
        self.settle(bucket)

    def _update_ready(self) -> None:
        """Without clipping: update what is complete and no longer used in this backward."""
        waiting = [bucket for bucket in self._ready if bucket.open]
        for bucket in self._ready:
            if not bucket.open:
                self._submit(bucket, self.clipping.in_backward(bucket))
                bucket.cover()  # nobody reads it before step; see ``refuse_halfway``
        self._ready = waiting

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """The norm of all gradients, which the update will clip; see ``clipping.py``."""
        self.hooks.close_all()
        return self.clipping.clip(max_norm)

    @torch.no_grad()
    def step(self) -> None:
        """Give every bucket with gradients its job, in the order in which forward will need them.

        Raises:
            NonFiniteError: nothing has changed for several steps.
        """
        self.hooks.close_all()
        if self._buffers is not None:
            self._buffers.step()
        self.gradients.leftovers.refuse()
        self.gradients.finish()
        if self.gradients.empty:
            return
        if self.layout.in_backward:
            self._update_ready()
            self._refuse_changed()
        else:
            touched = [bucket for bucket in self.buckets if bucket.touched]
            scale = self.clipping.of_step(touched)
            for bucket in touched:
                self._submit(bucket, scale)
        if self.clipping.scale is not None:
            self.skipped_steps.add(self.clipping.scale, self.gradients.norms())
        self.clipping.clear()
        self.gradients.spend()
        self._used.clear()
        self.hooks.choose_guards()
        self._fetch_ahead(self._itinerary.from_start())
        self.skipped_steps.refuse()

    def _submit(self, bucket: BucketState, scale: Scale) -> None:
        assert bucket.spec.group is not None
        bucket.refuse_loans()
        if bucket.spec.group not in self._used:
            group = self._groups()[bucket.spec.group]
            # Copies: a scheduler may change a rate, even in place, before the update is computed.
            self._used[bucket.spec.group] = {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in group.items()
                if name != "params"
            }
        self.updates.submit(bucket, Job(tuple(sorted(bucket.touched)), self._used[bucket.spec.group], scale))

    def _refuse_changed(self) -> None:
        """Do nothing where the hyperparameters are those that updates in backward were made with.

        Raises:
            RuntimeError: one was changed between backward and step.
        """
        for number, used in self._used.items():
            now = self._groups()[number]
            for name, value in used.items():
                if bool(now.get(name) != value):
                    raise RuntimeError(
                        f"{name} of parameter group {number} was changed between backward and step(), and the plan "
                        f"updates in backward: change it before backward, or plan with max_grad_norm > 0"
                    )

    def zero(self, *, to_none: bool) -> None:
        """Gradients become None, or zero where there were any."""
        self.gradients.leftovers.zero(to_none=to_none)
        if not self.gradients.empty:
            self.discard()

    def discard(self) -> None:
        """Forget the gradients since the last step.

        Raises:
            RuntimeError: updates with them have begun.
        """
        if self.layout.in_backward and self._used:
            raise RuntimeError(f"{HALFWAY}: call step(), or if backward was interrupted, start from a checkpoint")
        self.hooks.close_all()
        self.gradients.discard()
        self.clipping.clear()
        self._ready.clear()

    def forget(self, bucket: BucketState, index: int) -> None:
        """A gradient is not wanted; when it was the last one that waits, all that waited are discarded."""
        bucket.zeroed.discard(index)
        if index in bucket.spent:
            bucket.spent.discard(index)
            return
        if not self.layout.in_backward:
            self.clipping.forget(bucket, index)
        if self.layout.in_backward or not any(each.touched for each in self.buckets):
            self.discard()

    @torch.no_grad()
    def drain(self) -> None:
        """Settle every bucket: all weights and state are where they rest, and the host may read them."""
        self.hooks.close_all()
        for bucket in self.buckets:
            self.settle(bucket)
        for bucket in self.buckets:
            self.transfer.host_wait(bucket.stored, bucket.arrived, bucket.used)
            if bucket.spec.resident:
                self.residency.use(bucket)
        self.skipped_steps.look()

    def close(self) -> None:
        """Take all hooks off, end the worker and unpin the host's memory, in which the weights stay as they are."""
        for handle in self._handles:
            handle.remove()
        self.hooks.detach()
        self.worker.close()
        self.arena.close()


FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
HALFWAY = "the plan updates in backward (without max_grad_norm), and updates have begun"
