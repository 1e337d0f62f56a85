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
from strategies.engine.bucket_state import BucketState, Pending, Places, Presence, find_overlapping, hold
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
        self.held = list(self._hold(model))
        self.arena.pin()
        find_overlapping(self.held, self.arena)
        held_of = {id(param): held for held in self.held for param in held.params}
        scopes = find_scopes(model, held_of)
        self.homes = Residency(transfer, debug=debug)
        self.borders = ModuleHooks(
            scopes,
            self._enter_forward,
            self._enter_backward,
            unseen(self.homes.left),
            self._bring_unannounced,
            debug=debug,
        )
        self.worker = Worker(spare_cores() if beside else None, device)
        scratch = self.arena.of("", Item.SCRATCH, torch.float32)
        self.updates = Updates(rule, self.homes, transfer, self.worker, scratch)
        self.place_of = Places({id(param): (held, i) for held in self.held for i, param in enumerate(held.params)})
        order = [self.place_of[id(param)] for param in model.parameters() if param.requires_grad]
        self.trained = {id(held.params[index]) for held, index in order}
        self.gradients = Gradients(
            layout, order, transfer, self.worker, self.updates, self._completed, self._catch_up, group
        )
        self._itinerary = Itinerary(scopes)
        self._used: dict[int, dict[str, Any]] = {}  # hyperparameters of this step's updates, by group
        self._ready: list[BucketState] = []  # complete buckets whose update starts in backward
        self.clipping = Clipping(layout, self.gradients, transfer, device)
        self.verdicts = SkippedSteps(transfer)
        self._travels = not all(held.bucket.resident for held in self.held)
        self.unannounced = 0  # reads in backward that no border announced and that had to bring their weights
        self._handles = [model.register_forward_pre_hook(self._begin_forward)]
        self._handles += [*self.borders.attach(), *self.gradients.attach()]

    # --- before the first step ---------------------------------------------------------------------------------------

    def _hold(self, model: nn.Module) -> Iterator[BucketState]:
        params = dict(model.named_parameters())
        fused = {id(p) for module in model.modules() if isinstance(module, FUSED) for p in module.parameters()}
        for index, bucket in enumerate(self.layout.buckets):
            members = [params[name] for name in bucket.params]
            held = hold(bucket, index, members, self.arena, self._nans[members[0].dtype], self.layout, fused)
            self._move_in(held)
            yield held

    @torch.no_grad()
    def _move_in(self, held: BucketState) -> None:
        """The model's own weights into their places, after which the model's own memory is free."""
        for index, param in enumerate(held.params):
            held.part(held.rest(), index).copy_(param.detach().reshape(-1))
            if held.master is not None:
                held.part(held.master, index).copy_(param.detach().reshape(-1))
            put(param, held.nan.expand(param.shape))
        if held.bucket.site is Site.DEVICE:
            for moment in held.moments:
                moment.zero_()  # the host's pages are zero as they come
        if held.steps is not None:
            held.steps.zero_()
        held.hide()
        if held.bucket.resident:
            held.presence = Presence.PRESENT
            held.show()

    # --- borders -----------------------------------------------------------------------------------------------------

    def _begin_forward(self, module: nn.Module, inputs: Any) -> None:
        if self._travels:
            refuse_transforms()
        self.refuse_halfway()
        self.borders.forget_calls()
        self.borders.close_all()
        self._itinerary.begin()
        if torch.is_grad_enabled():
            if self._buffers is not None:
                self._buffers.forward(is_last=self.gradients.passes + 1 >= self.layout.accumulation)
            self.gradients.new_pass()

    @unseen
    def _enter_forward(self, scope: Scope) -> None:
        recomputing = self.borders.recomputing
        if not recomputing:
            self._itinerary.forward(scope)
        self._ensure(scope)
        if not recomputing:
            self._fetch_ahead(self._itinerary.ahead_in_forward())

    def _ensure(self, scope: Scope) -> None:
        for held in scope.held:
            self.ensure(held)

    @unseen
    def _enter_backward(self, scope: Scope) -> None:
        self._itinerary.backward(scope)
        self._update_ready()
        self._ensure(scope)
        self._fetch_ahead(self._itinerary.ahead_in_backward())

    @unseen
    def _bring_unannounced(self, held: BucketState) -> None:
        self.unannounced += not held.present
        self.ensure(held)

    @unseen
    def reads_along(self, held: BucketState) -> None:
        """A resident bucket is read outside of the modules that own it; from now on the scope that did has it ready."""
        self.ensure(held)
        self.borders.joins(held)

    def ensure(self, held: BucketState) -> None:
        """The newest weights of ``held`` are in its home, for COMPUTE."""
        self.settle(held)
        if not held.present:
            self.homes.fetch(held)
        self.homes.use(held)

    @unseen
    def settle(self, held: BucketState) -> None:
        """The newest weights of ``held`` are where they rest."""
        if held.settled:
            if not held.present:
                self._settle_visiting_rivals(held)
            return
        self._settle_visiting_rivals(held)
        self.updates.settle(held)

    def _settle_visiting_rivals(self, held: BucketState) -> None:
        for rival in held.overlapping:
            if rival.pending is Pending.VISITING:
                self.updates.settle(rival)

    def _fetch_ahead(self, visits: Iterable[Visit]) -> None:
        """Start bringing what comes next, in order of need, up to the first that cannot be brought yet.

        A weight that travels comes no earlier than the plan says: before, its place belongs to others. Updated weights
        of residents come as soon as they are there.
        """
        soon: set[int] = set()
        for visit in visits:
            for held in visit.scope.held:
                if held.bucket.resident:
                    if not held.settled and not self._bring_early(held, soon):
                        return
                elif visit.steps <= held.leads[visit.back] and not self._bring_early(held, soon):
                    return
                soon.add(held.index)

    def _bring_early(self, held: BucketState, soon: set[int]) -> bool:
        """Start bringing ``held`` unless it would disturb somebody; whether the next one may be tried."""
        if held.pending is Pending.HOST:
            if held.future is None or not held.future.done():
                return False
            self.updates.settle(held)
        if not held.present or held.pending is Pending.DEVICE:
            for rival in held.overlapping:
                if rival.pending is Pending.VISITING or (rival.present and (rival.open or rival.index in soon)):
                    return False
        if held.pending is Pending.DEVICE:
            if not self.updates.may_begin(held):
                return False
            self.updates.begin(held)
        elif not held.present:
            self.homes.fetch(held)
        return True

    # --- gradients and updates ---------------------------------------------------------------------------------------

    def refuse_halfway(self) -> None:
        """Do nothing where all weights are of one moment.

        Raises:
            RuntimeError: some are updated already and others not, between backward and step.
        """
        if self.layout.in_backward and self._used:
            raise RuntimeError(f"{HALFWAY}: call step() before weights are read")

    def _completed(self, held: BucketState) -> None:
        if self.layout.in_backward:
            self._ready.append(held)

    def _catch_up(self, held: BucketState) -> None:
        """After backward: the last update of a bucket that this rank did not use since, before it gets another."""
        self.borders.close_all()
        self.settle(held)

    def _update_ready(self) -> None:
        """Without clipping: update what is complete and no longer used in this backward."""
        waiting = [held for held in self._ready if held.open]
        for held in self._ready:
            if not held.open:
                self._submit(held, self.clipping.in_backward(held))
                held.cover()  # nobody reads it before step; see ``refuse_halfway``
        self._ready = waiting

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """The norm of all gradients, which the update will clip; see ``clipping.py``."""
        self.borders.close_all()
        return self.clipping.clip(max_norm)

    @torch.no_grad()
    def step(self) -> None:
        """Give every bucket with gradients its job, in the order in which forward will need them.

        Raises:
            NonFiniteError: nothing has changed for several steps.
        """
        self.borders.close_all()
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
            touched = [held for held in self.held if held.touched]
            scale = self.clipping.of_step(touched)
            for held in touched:
                self._submit(held, scale)
        if self.clipping.scale is not None:
            self.verdicts.add(self.clipping.scale, self.gradients.norms())
        self.clipping.clear()
        self.gradients.spend()
        self._used.clear()
        self.borders.choose_guards()
        self._fetch_ahead(self._itinerary.from_start())
        self.verdicts.refuse()

    def _submit(self, held: BucketState, scale: Scale) -> None:
        assert held.bucket.group is not None
        held.refuse_loans()
        if held.bucket.group not in self._used:
            group = self._groups()[held.bucket.group]
            # Copies: a scheduler may change a rate, even in place, before the update is computed.
            self._used[held.bucket.group] = {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in group.items()
                if name != "params"
            }
        self.updates.submit(held, Job(tuple(sorted(held.touched)), self._used[held.bucket.group], scale))

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
        self.borders.close_all()
        self.gradients.discard()
        self.clipping.clear()
        self._ready.clear()

    def forget(self, held: BucketState, index: int) -> None:
        """A gradient is not wanted; when it was the last one that waits, all that waited are discarded."""
        held.zeroed.discard(index)
        if index in held.spent:
            held.spent.discard(index)
            return
        if not self.layout.in_backward:
            self.clipping.forget(held, index)
        if self.layout.in_backward or not any(each.touched for each in self.held):
            self.discard()

    @torch.no_grad()
    def drain(self) -> None:
        """Settle every bucket: all weights and state are where they rest, and the host may read them."""
        self.borders.close_all()
        for held in self.held:
            self.settle(held)
        for held in self.held:
            self.transfer.host_wait(held.stored, held.arrived, held.used)
            if held.bucket.resident:
                self.homes.use(held)
        self.verdicts.look()

    def close(self) -> None:
        """Take all hooks off, end the worker and unpin the host's memory, in which the weights stay as they are."""
        for handle in self._handles:
            handle.remove()
        self.borders.detach()
        self.worker.close()
        self.arena.close()


FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
HALFWAY = "the plan updates in backward (without max_grad_norm), and updates have begun"
