"""The engine: what happens at each border of a scope and at each call of the optimizer.

    forward enters a scope     settle its updates, fetch what is absent, fetch ahead
    backward enters a scope    the scopes after it are left; the same in the other direction
    a gradient lands           into its slot, and on to where it parks (``gradients.py``)
    norm, step                 jobs in forward order (``update.py``), settled when their buckets are next used

Invariant. Whoever uses a bucket finds its newest weights in its home. Fetching ahead and the order in which the worker
takes its work decide how long that takes, never what is found.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from strategies.core.layout import Addresses, Item, Layout, Site
from strategies.runtime.arena import Arena
from strategies.runtime.gradients import Gradients
from strategies.runtime.held import Held, Pending, hold, rivals_of
from strategies.runtime.homes import Homes
from strategies.runtime.rules import Rule
from strategies.runtime.scopes import Borders, Itinerary, Scope, Visit, find_scopes
from strategies.runtime.transfer import Lane, Transfer
from strategies.runtime.update import Job, Scale, Updates
from strategies.runtime.worker import Worker, spare_cores

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)


class Engine:
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
        rule: Rule,
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
        self.held = list(self._hold(dict(model.named_parameters())))
        self.arena.pin()
        rivals_of(self.held, self.arena)
        held_of = {id(param): held for held in self.held for param in held.params}
        scopes = find_scopes(model, held_of)
        self.borders = Borders(scopes, self._enter_forward, self._enter_backward, self._left)
        self.worker = Worker(spare_cores() if beside else None)
        self.homes = Homes(transfer, self.borders.pinned, debug=debug)
        scratch = self.arena.of("", Item.SCRATCH, torch.float32)
        self.updates = Updates(rule, self.homes, transfer, self.worker, scratch)
        self.place_of = {id(param): (held, i) for held in self.held for i, param in enumerate(held.params)}
        order = [self.place_of[id(param)] for param in model.parameters() if param.requires_grad]
        self.gradients = Gradients(layout, order, transfer, self.worker, self.updates, self._completed, group)
        self._itinerary = Itinerary(scopes)
        self._ready: list[Held] = []  # complete buckets whose update starts in backward
        self._scale: Scale | None = None
        self._verdicts: list[Scale] = []
        self.skipped = 0
        self._handles = [model.register_forward_pre_hook(self._begin_forward)]
        self._handles += [*self.borders.attach(), *self.gradients.attach()]

    # --- before the first step ---------------------------------------------------------------------------------------

    def _hold(self, params: Mapping[str, nn.Parameter]) -> Iterator[Held]:
        for index, bucket in enumerate(self.layout.buckets):
            members = [params[name] for name in bucket.params]
            held = hold(bucket, index, members, self.arena, self._nans[members[0].dtype], self.layout)
            self._move_in(held)
            yield held

    @torch.no_grad()
    def _move_in(self, held: Held) -> None:
        """The model's own weights into their places, after which the model's own memory is free."""
        for index, param in enumerate(held.params):
            held.part(held.rest(), index).copy_(param.detach().reshape(-1))
            if held.master is not None:
                held.part(held.master, index).copy_(param.detach().reshape(-1))
            param.data = held.nan.expand(param.shape)
        if held.bucket.site is Site.DEVICE:
            for moment in held.moments:
                moment.zero_()  # the host's pages are zero as they come
        if held.steps is not None:
            held.steps.zero_()
        if held.bucket.resident:
            held.bind()

    # --- borders -----------------------------------------------------------------------------------------------------

    def _begin_forward(self, module: nn.Module, inputs: Any) -> None:
        self.borders.close_all()
        for nan in self._nans.values():
            nan.fill_(math.nan)
        self._itinerary.begin()
        if torch.is_grad_enabled():
            self.gradients.new_pass()

    @torch.no_grad()
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

    @torch.no_grad()
    def _enter_backward(self, scope: Scope) -> None:
        self._itinerary.backward(scope)
        self._update_ready()
        self._ensure(scope)
        self._fetch_ahead(self._itinerary.ahead_in_backward())

    def _left(self, scope: Scope) -> None:
        self.homes.left(scope.held)

    def ensure(self, held: Held) -> None:
        """The newest weights of ``held`` are in its home, for COMPUTE."""
        self.settle(held)
        if not held.present:
            self.homes.fetch(held)
        self.homes.use(held)

    @torch.no_grad()
    def settle(self, held: Held) -> None:
        """The newest weights of ``held`` are where they rest."""
        if held.settled:
            if not held.present:
                self._settle_visiting_rivals(held)
            return
        self._settle_visiting_rivals(held)
        self.updates.settle(held)

    def _settle_visiting_rivals(self, held: Held) -> None:
        for rival in held.rivals:
            if rival.pending is Pending.VISITING:
                self.updates.settle(rival)

    def _fetch_ahead(self, visits: Iterable[Visit]) -> None:
        """Start bringing what comes next, in order of need, up to the first that cannot be brought yet.

        A weight that travels comes no earlier than the plan says: before, its place belongs to others. Updated weights
        of residents come as soon as they are there.
        """
        soon = set[int]()
        for visit in visits:
            for held in visit.scope.held:
                if held.bucket.resident:
                    if not held.settled and not self._bring_early(held, soon):
                        return
                elif visit.steps <= held.leads[visit.back] and not self._bring_early(held, soon):
                    return
                soon.add(held.index)

    def _bring_early(self, held: Held, soon: set[int]) -> bool:
        """Start bringing ``held`` unless it would disturb somebody; whether the next one may be tried."""
        if held.pending is Pending.HOST:
            if held.future is None or not held.future.done():
                return False
            self.updates.settle(held)
        if not held.present or held.pending is Pending.DEVICE:
            for rival in held.rivals:
                if rival.pending is Pending.VISITING or (
                    rival.present and (self.borders.pinned(rival) or rival.index in soon)
                ):
                    return False
        if held.pending is Pending.DEVICE:
            if not self.updates.may_begin(held):
                return False
            self.updates.begin(held)
        elif not held.present:
            self.homes.fetch(held)
        return True

    # --- gradients and updates ---------------------------------------------------------------------------------------

    def _completed(self, held: Held) -> None:
        if self.layout.in_backward:
            self._ready.append(held)

    def _update_ready(self) -> None:
        """Without clipping: update what is complete and no longer used in this backward."""
        waiting = [held for held in self._ready if self.borders.pinned(held)]
        for held in self._ready:
            if not self.borders.pinned(held):
                self._submit(held, self._scale_so_far(held))
        self._ready = waiting

    def _scale_so_far(self, held: Held) -> Scale:
        # A gradient that is not finite stops the update of its bucket and of all that come after it in this step.
        # Where the loss itself is not finite that is all of them.
        norms = self.gradients.norms_in(held, self.device)
        bad = torch.logical_not(torch.stack(norms).isfinite().all()).float()
        if self._scale is not None and self._scale.bad is not None:
            bad = torch.maximum(bad, self._scale.bad)
        self._scale = self._make_scale(None, bad)
        return self._scale

    def _make_scale(self, factor: Tensor | None, bad: Tensor) -> Scale:
        on_host = torch.empty(2, pin_memory=self.device.type == "cuda")
        on_host.copy_(torch.stack([torch.ones_like(bad) if factor is None else factor, bad]), non_blocking=True)
        return Scale(factor, bad, on_host, self.transfer.record(Lane.COMPUTE))

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """The norm of all gradients; the update will multiply them with torch's factor for ``max_norm``.

        0 and infinity clip nothing.
        """
        if self.layout.in_backward and max_norm != math.inf:
            raise RuntimeError("the plan updates in backward, before the norm is known: plan with max_grad_norm > 0")
        self.borders.close_all()
        norm = self.gradients.norm(self.device)
        if self.layout.in_backward:
            return norm
        bad = torch.logical_not(norm.isfinite()).float()
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0) if 0 < max_norm < math.inf else None
        self._scale = self._make_scale(factor, bad)
        return norm

    @torch.no_grad()
    def step(self) -> None:
        """Give every bucket with gradients its job, in the order in which forward will need them."""
        self.borders.close_all()
        self._report()
        self.gradients.finish()
        if self.gradients.empty:
            return
        if self.layout.in_backward:
            self._update_ready()
        else:
            if self._scale is None:
                self.clip(self.layout.max_grad_norm)
            assert self._scale is not None
            for held in self.held:
                if held.touched:
                    self._submit(held, self._scale)
        if self._scale is not None:
            self._verdicts.append(self._scale)
        self._scale = None
        self.gradients.clear()
        self._report()
        self._fetch_ahead(self._itinerary.from_start())

    def _submit(self, held: Held, scale: Scale) -> None:
        assert held.bucket.group is not None
        group = self._groups()[held.bucket.group]
        hyperparameters = {name: value for name, value in group.items() if name != "params"}
        self.updates.submit(held, Job(tuple(sorted(held.touched)), hyperparameters, scale))

    def _report(self) -> None:
        """Say which steps were skipped, as soon as it is known without waiting."""
        while self._verdicts and self.transfer.done(self._verdicts[0].known):
            scale = self._verdicts.pop(0)
            if scale.on_host is not None and bool(scale.on_host[1]):
                self.skipped += 1
                logger.warning("a gradient was not finite: this step was skipped (%d so far)", self.skipped)

    def discard(self) -> None:
        """Forget the gradients since the last step.

        Raises:
            RuntimeError: updates with them have begun.
        """
        if self.layout.in_backward and self.gradients.last_pass:
            raise RuntimeError("the plan updates in backward: these gradients have been applied; call step()")
        self.borders.close_all()
        self.gradients.discard()
        self._scale = None

    @torch.no_grad()
    def drain(self) -> None:
        """Settle every bucket: all weights and state are where they rest, and the host may read them."""
        self.borders.close_all()
        for held in self.held:
            self.settle(held)
        for held in self.held:
            self.transfer.host_wait(held.stored, held.arrived, held.used)
        self._report()

    def close(self) -> None:
        """Take all hooks off, end the worker and unpin the host's memory. The caller has taken the weights out."""
        for handle in self._handles:
            handle.remove()
        self.worker.close()
        self.arena.close()
