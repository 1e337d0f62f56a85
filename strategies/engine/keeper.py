"""The keeper of one parameter: what code outside of the engine does with it passes through here.

A stowed parameter may be away when a library reads it, writes it, or asks for its gradient. The classes that stand for
parameters, views and gradients (``tensors/``) ask its keeper, which brings the newest weight or says why it cannot.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from deepstow.strategies.core.sizes import human
from deepstow.strategies.engine.buckets.bucket_state import BucketState
from deepstow.strategies.engine.engine import Engine
from deepstow.strategies.engine.memory.arena import alone
from deepstow.strategies.engine.tensors.loans import LentParameter
from deepstow.strategies.engine.tensors.parameters import Alias, Copied, Elsewhere, StowedParameter
from deepstow.strategies.engine.tensors.pending_gradient import PendingGradient
from deepstow.strategies.engine.transfer.transfer import Stream

logger = logging.getLogger(__name__)


class Keeper(Copied):
    """Reads and changes one parameter, its gradient and its views, for their classes; see ``parameters.py``."""

    def __init__(self, engine: Engine, bucket: BucketState, index: int, name: str) -> None:
        self._engine = engine
        self._bucket = bucket
        self._index = index
        self.name = name
        weight = bucket.part(bucket.weight, index)
        self.home = (weight.data_ptr(), weight.data_ptr() + weight.nbytes)
        self._warned = False  # that it travels and is read outside of the module that owns it

    @property
    def here(self) -> bool:
        return self._bucket.views.shows(self._index)

    @property
    def is_sole(self) -> bool:
        """Whether what is written to the home is the newest weight."""
        return self._bucket.views.sole

    def value(self) -> Tensor:
        """A copy of the newest weight, for COMPUTE."""
        bucket, transfer = self._bucket, self._engine.transfer
        self._engine.refuse_partly_updated()
        with torch.no_grad(), torch.inference_mode(False):  # whose tensors do not count writes
            self._engine.settle(bucket)
            transfer.host_wait(bucket.stored)
            transfer.wait(Stream.COMPUTE, bucket.stored, bucket.arrived)
            newest = lent_value(bucket.params[self._index])
            if newest is None:
                newest = self._engine.newest(bucket, self._index, self._engine.device)
            return newest.to(self._engine.device, copy=True)

    def shown(self) -> Tensor:
        """``value`` for outside code, which all ranks run at once if they share the weight."""
        self._engine.refuse_alone(self._bucket, self.name)
        return self.value()

    def value_to_lend(self) -> Tensor:
        """The memory of a parameter on loan: the home of a resident weight, so that its views see writes, or a copy, as
        where what is written is rounded.
        """
        if not self._bucket.spec.resident or self._bucket.spec.frozen_as:
            return self.value()
        self._engine.ensure(self._bucket)
        return alone(self._bucket.shaped(self._bucket.weight, self._index))

    def read(self) -> Tensor:
        """The parameter itself if it is resident, else a copy through which gradients flow."""
        param = self._bucket.params[self._index]
        self._engine.refuse_partly_updated()
        if self._bucket.spec.resident:
            self._engine.refuse_alone(self._bucket, self.name)
            self._engine.add_reader(self._bucket)
            return param
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s travels and is read outside of the module that owns it: %s are copied for that each time. Plan "
                "with a batch, so that this is seen, or with weights='resident'",
                self.name,
                human(param.nbytes),
            )
        _refuse_casts(self.name, param)
        return _with_gradient(param, self.shown())

    def require_present(self, what: str) -> None:
        """Make the parameter present for ``what``, or raise RuntimeError if it travels."""
        if not self._bucket.spec.resident:
            raise RuntimeError(f"{self.name}: {what} of a parameter that travels; plan with weights='resident'")
        self.read()

    def follow(self, view: Tensor) -> Tensor:
        if not isinstance(view, StowedParameter):
            alias: Any = view
            alias.__class__ = Alias  # and not as_subclass, which would put a node into the graph
            alias._keeper = self
        return view

    def read_view(self, view: Tensor) -> Tensor:
        """``view`` itself while the weight is in its home, else a copy of the same part of the weight."""
        if self.here:
            return view
        bucket = self._bucket
        param = self._bucket.params[self._index]
        value = self.shown()
        if view.dtype != value.dtype:
            raise RuntimeError(
                f"{self.name} travels, and a view of it as {view.dtype} is used after it left the device"
            )
        start = view.storage_offset() - bucket.shaped(bucket.weight, self._index).storage_offset()
        if view.requires_grad and torch.is_grad_enabled():
            _refuse_casts(self.name, param)
            if view.retains_grad or view._backward_hooks:
                raise RuntimeError(
                    f"a view of {self.name}, which travels, has hooks, which would not run for its use after its "
                    f"block: use param.register_hook"
                )
        # From the parameter, not from the view: torch would make the view's node again, from its base's present value.
        weight = _with_gradient(param, value) if view.requires_grad else value
        return weight.as_strided(view.size(), view.stride(), start)

    # --- the gradient ------------------------------------------------------------------------------------------------

    @property
    def window(self) -> int:
        """How often all gradients were taken or discarded."""
        return self._engine.gradients.window

    def gradient(self) -> Tensor | None:
        """The stand-in for the gradient that waits for a step, if there is one."""
        self._engine.gradients.learn()
        if not self._bucket.grads.exists(self._index):
            return None
        gradient: PendingGradient = self._bucket.views.absent(self._index).as_subclass(PendingGradient)
        gradient._keeper = self
        gradient._window = self.window
        return gradient

    def forget_gradient(self) -> None:
        self._engine.forget(self._bucket, self._index)

    @torch.no_grad()
    def zero_gradient(self) -> None:
        """Make the gradient zero; if there are no others left, all are discarded and count as zero."""
        self._engine.zero_one(self._bucket, self._index)

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        return self._engine.clipping_after_backward().norm_of(self._bucket, self._index)

    @torch.no_grad()
    def gradient_value(self) -> Tensor:
        with torch.inference_mode(False):
            return self._engine.clipping_after_backward().value_of(self._bucket, self._index)

    @torch.no_grad()
    def scale_gradient(self, factor: Tensor | float) -> None:
        self._engine.clipping_after_backward().multiply(self._bucket, self._index, factor)

    @torch.no_grad()
    def write_gradient(self, value: Tensor, *, multiplied: bool) -> None:
        """``value``, which ``gradient_value`` gave, was written to; ``multiplied``: by a factor."""
        clipping = self._engine.clipping_after_backward()
        clipping.write(self._bucket, self._index, value.detach(), multiplied=multiplied)

    @property
    def engine(self) -> Engine:
        """To know which gradients are scaled together."""
        return self._engine

    @torch.no_grad()
    def unscale_gradients(self, inverse: Tensor) -> Tensor:
        """Those of all parameters. Returns 1.0 if one is not finite."""
        return self._engine.clipping_after_backward().unscale(inverse)


def _refuse_casts(name: str, param: nn.Parameter) -> None:
    """Raise RuntimeError if autocast would cast the parameter itself for backward: it keeps one cast for all uses, so
    that their gradients are added in the lower precision. Of a copy it keeps none.
    """
    is_cached = torch.is_autocast_enabled(param.device.type) and torch.is_autocast_cache_enabled()
    if is_cached and torch.is_grad_enabled() and param.requires_grad and param.dtype is torch.float32:
        raise RuntimeError(
            f"{name} travels and is read under autocast outside of the module that owns it: plan with a batch, so that "
            f"this is seen, or with weights='resident', or write torch.autocast(..., cache_enabled=False)"
        )


def _with_gradient(original: Tensor, value: Tensor) -> Tensor:
    """``value``, through which gradients flow to ``original`` if it requires any."""
    return Elsewhere.apply(original, value) if torch.is_grad_enabled() and original.requires_grad else value


def lent_value(param: nn.Parameter) -> Tensor | None:
    """The value of ``param``, if it is on loan."""
    return param.data if isinstance(param, LentParameter) else None
