"""The model stays a model: state dicts, chosen parameters, optimizer state, whatever is on the device at the moment.

Problem. Libraries read ``param.data`` at any time. A bucket that is away shows NaN there; these are the doors through
which right values come out and new ones go in.

    state_dict          each module that owns parameters replaces its entries by where the weights rest: the host's copy
                        of what travels, the home of what does not. Views with storages of their own, no copies
    load_state_dict     before a module is loaded its parameters show where they rest; afterwards masters and homes
                        follow
    present             chosen parameters show copies on the device; if those were changed, the change is kept
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from strategies.runtime.arena import alone
from strategies.runtime.engine import Engine
from strategies.runtime.held import Held, Presence
from strategies.runtime.transfer import Lane


class Surface:
    """Doors into a stowed model."""

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self._model, self._engine = model, engine
        self._handles: list[Any] = []
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                # torch marks these hooks with an attribute, which a bound method cannot have
                self._handles.append(module.register_state_dict_post_hook(partial(self._show)))
                self._handles.append(module.register_load_state_dict_pre_hook(self._open))
                self._handles.append(module.register_load_state_dict_post_hook(self._shut))

    # --- weights -----------------------------------------------------------------------------------------------------

    def weight_of(self, param: nn.Parameter) -> Tensor:
        """Where the newest weight of ``param`` rests; the host may read it."""
        held, index = self._settled(param)
        return held.shaped(held.rest(), index)

    def _settled(self, param: nn.Parameter) -> tuple[Held, int]:
        held, index = self._engine.place_of[id(param)]
        self._engine.settle(held)
        self._engine.transfer.host_wait(held.stored, held.arrived)
        return held, index

    def _show(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, param in module.named_parameters(recurse=False):
            key = prefix + name
            if key in state and not isinstance(state[key], nn.Parameter):
                state[key] = alone(self.weight_of(param))

    def _open(self, module: nn.Module, *rest: Any) -> None:
        self._engine.drain()  # everything: an update of another bucket, settled before ``_shut``, would hide these
        for param in module.parameters(recurse=False):
            param.data = self.weight_of(param)

    def _shut(self, module: nn.Module, *rest: Any) -> None:
        for param in module.parameters(recurse=False):
            self._adopt(param, param.data)

    @torch.no_grad()
    def _adopt(self, param: nn.Parameter, value: Tensor, *, master: bool = True) -> None:
        """``value`` is the new weight: put it wherever the weight lies, and where its ``master`` does."""
        held, index = self._settled(param)
        self._engine.transfer.host_wait(held.used)
        for place in (held.rest(), held.master if master else None, held.weight if held.present else None):
            if place is not None and held.part(place, index).data_ptr() != value.data_ptr():
                held.part(place, index).copy_(value.reshape(-1))
        held.used = self._engine.transfer.record(Lane.COMPUTE)
        self._show_again(held, index)

    def _show_again(self, held: Held, index: int) -> None:
        param = held.params[index]
        visible = held.presence is Presence.PRESENT and held.settled
        param.data = held.shaped(held.weight, index) if visible else held.nan.expand(param.shape)

    @contextmanager
    def present(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
        """See ``StowOptimizer.present``."""
        shown: list[tuple[nn.Parameter, Tensor]] = []
        with torch.no_grad():
            places = [self._settled(param) for param in params]  # all first: settling one bucket may hide another
            for param, (held, index) in zip(params, places, strict=True):
                self._engine.transfer.wait(Lane.COMPUTE, held.stored, held.arrived)
                value = held.shaped(held.rest(), index).to(self._engine.device, copy=True)
                param.data = value
                shown.append((param, value))
        try:
            yield
        finally:
            for param, value in shown:
                held, index = self._settled(param)
                if _same_bits(value.cpu(), held.shaped(held.rest(), index).cpu()):
                    self._show_again(held, index)
                else:
                    self._adopt(param, value)

    def take_out(self) -> None:
        """Ordinary tensors on the CPU for every parameter; the doors are removed."""
        for held in self._engine.held:
            for index, param in enumerate(held.params):
                param.data = held.shaped(held.rest(), index).to("cpu", copy=True)
        for handle in self._handles:
            handle.remove()

    # --- optimizer state ---------------------------------------------------------------------------------------------

    def state_of(self, param: nn.Parameter) -> dict[str, Tensor]:
        """Views by torch's names; ``master`` where the weight is in a lower precision."""
        held, index = self._engine.place_of[id(param)]
        assert held.steps is not None, "a frozen parameter has no state"
        names = self._engine.rule.names
        state = {"step": held.steps[index]}
        state |= {name: held.shaped(moment, index) for name, moment in zip(names, held.moments, strict=True)}
        if held.bucket.mixed:
            assert held.master is not None
            state["master"] = held.shaped(held.master, index)
        return state

    @torch.no_grad()
    def set_state(self, param: nn.Parameter, state: Mapping[str, Any]) -> None:
        """Copy ``state`` to where it lives; a master also becomes the weight."""
        for name, place in self.state_of(param).items():
            if name in state:
                place.copy_(torch.as_tensor(state[name]))
        if "master" in state:
            self._adopt(param, self.state_of(param)["master"].to(param.dtype), master=False)

    @torch.no_grad()
    def forget_state(self, param: nn.Parameter) -> None:
        """As if ``param`` had never been updated; its master stays."""
        for name, place in self.state_of(param).items():
            if name != "master":
                place.zero_()


def _same_bits(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))
