"""The model stays a model: state dicts, chosen parameters, optimizer state, whatever is on the device at the moment.

Problem. Libraries read and write parameters at any time; these are the doors through which right values come out and
new ones go in. ``parameters.py`` sees to it that there are no others.

    state_dict          each module that owns parameters gives where the weights rest: the host's copy of what
                        travels, the home of what does not. Views with storages of their own, no copies. A module that
                        has a say in what is saved looks at copies; what it makes of them is left as it is
    load_state_dict     before a module is loaded its parameters show where they rest; afterwards masters and homes
                        follow
    present             chosen parameters are on loan (``loans.py``), with copies on the device; changes are kept
    reading             a function that reads a parameter outside of the modules that own it asks its keeper
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from strategies.core.sizes import human
from strategies.engine.bucket_state import BucketState
from strategies.engine.clipping import Clipping
from strategies.engine.engine import Engine
from strategies.engine.memory.arena import alone
from strategies.engine.tensors.loans import LentParameter, Loans
from strategies.engine.tensors.parameters import Alias, Copied, Elsewhere, StowedParameter, set_data
from strategies.engine.tensors.parked_gradient import parked
from strategies.engine.transfer.transfer import Lane

logger = logging.getLogger(__name__)


SWAPPED = (
    "torch.__future__.set_swap_module_params_on_conversion(True) makes load_state_dict replace what a plan has given "
    "its memory: set it to False"
)


class Surface(Copied):
    """Doors into a stowed model."""

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self._model, self._engine = model, engine
        self._handles: list[Any] = []
        self.loans = Loans(self)
        self._looking: dict[int, list[nn.Parameter]] = {}  # on loan to a module whose state dict is being made, by id
        self._read: set[int] = set()  # parameters that travel and were read outside of the modules that own them
        # Torch swaps no tensor that somebody refers to weakly: ``model.to`` would, where torch is asked to swap, and
        # what it swapped in would not lie where the plan says.
        self._referred = [weakref.ref(param) for param in model.parameters()]
        for name, param in model.named_parameters():
            held, index = engine.place_of[id(param)]
            param._keeper = Keeper(self, held, index, name)  # type: ignore[attr-defined]
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                # torch marks these hooks with an attribute, which a bound method cannot have
                self._handles.append(module.register_state_dict_pre_hook(partial(self._lend)))
                self._handles.append(module.register_state_dict_post_hook(partial(self._show)))
                self._handles.append(module.register_load_state_dict_pre_hook(self._open))
                self._handles.append(module.register_load_state_dict_post_hook(self._shut))

    # --- weights -----------------------------------------------------------------------------------------------------

    def weight_of(self, param: nn.Parameter) -> Tensor:
        """Where the newest weight of ``param`` rests; the host may read it."""
        held, index = self.settled(param)
        return held.shaped(held.rest(), index)

    def copy_of(self, held: BucketState, index: int) -> Tensor:
        """A copy of the newest weight, for COMPUTE."""
        self._engine.refuse_halfway()
        with torch.no_grad():
            self._engine.settle(held)
            self._engine.transfer.host_wait(held.stored)
            self._engine.transfer.wait(Lane.COMPUTE, held.stored, held.arrived)
            loan = _loan(held.params[index])
            return (held.shaped(held.rest(), index) if loan is None else loan).to(self._engine.device, copy=True)

    def shown_to_others(self, held: BucketState, index: int) -> Tensor:
        """What is lent: the home of a settled weight that stays, whose views see what is written, or a copy."""
        if not held.bucket.resident:
            return self.copy_of(held, index)
        self._engine.ensure(held)
        return alone(held.shaped(held.weight, index))

    def read(self, held: BucketState, index: int, name: str) -> Tensor:
        """The parameter, present from now on if it stays, or a copy through which gradients flow."""
        param = held.params[index]
        self._engine.refuse_halfway()
        if held.bucket.resident:
            self._engine.reads_along(held)
            return param
        if id(param) not in self._read:
            self._read.add(id(param))
            logger.warning(
                "%s travels and is read outside of the module that owns it: %s are copied for that each time. Plan "
                "with a batch, so that this is seen, or with weights='resident'",
                name,
                human(held.bucket.sizes[index] * held.weight.element_size()),
            )
        _refuse_casts(name, param)
        return _with_gradient(param, self.copy_of(held, index))

    def read_view(self, held: BucketState, index: int, view: Tensor) -> Tensor:
        """``view`` of the home itself, while the weight is there, or what it would show."""
        if held.shows(index):
            return view
        value = self.copy_of(held, index)
        if view.dtype != value.dtype:
            raise RuntimeError(
                f"{held.bucket.params[index]} travels, and a view of it as {view.dtype} outlives its stay"
            )
        start = view.storage_offset() - held.shaped(held.weight, index).storage_offset()
        if view.requires_grad and torch.is_grad_enabled():
            _refuse_casts(held.bucket.params[index], held.params[index])
            if view.retains_grad or view._backward_hooks:
                raise RuntimeError(
                    f"a view of {held.bucket.params[index]}, which travels, has hooks and is used when its block is "
                    f"over, which they would not see: use param.register_hook"
                )
        # From the parameter, and not from the view: torch makes the view's node anew, of what its base is by now.
        whole = _with_gradient(held.params[index], value) if view.requires_grad else value
        return whole.as_strided(view.size(), view.stride(), start)

    def settled(self, param: nn.Parameter) -> tuple[BucketState, int]:
        """Where ``param`` is, with its newest weight at rest."""
        self._engine.refuse_halfway()
        held, index = self._engine.place_of[id(param)]
        self._engine.settle(held)
        self._engine.transfer.host_wait(held.stored, held.arrived)
        return held, index

    def _lend(self, module: nn.Module, *rest: Any) -> None:
        """Before a state dict is made: plain parameters, which nobody is asked for. With values where others look."""
        self._engine.refuse_halfway()
        self._looked(id(module))  # an earlier one was interrupted
        mine = list(module.parameters(recurse=False))
        if any(_has_a_say(each) for each in module.modules()):
            self._looking[id(module)] = self.loans.lend(mine)
            return
        for param in mine:
            if _loan(param) is None:
                param.__class__ = nn.Parameter

    def _show(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        lent = {id(param): param.data for param in self._looking.get(id(module), ())}
        self._looked(id(module))
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            saved = state.get(prefix + name)
            if _loan(param) is not None:  # to somebody else, who gives it back later
                continue
            self._show_again(param)
            as_it_is = id(param) not in lent or _same_memory(saved, lent[id(param)])
            if as_it_is and isinstance(saved, Tensor) and not isinstance(saved, nn.Parameter):
                state[prefix + name] = alone(self.weight_of(param))
        if lent:
            _leave_no_copies(state, prefix, lent.values())

    def _looked(self, *modules: int) -> None:
        """State dicts of ``modules``, by id and by default of all, were made or interrupted."""
        for module in modules or tuple(self._looking):
            self.loans.give_back(self._looking.pop(module, ()))

    def refuse_loans(self, what: str) -> None:
        """Do nothing while no weight is in the hands of others. Raises: one is, and ``what`` changes weights."""
        self._looked()
        self.loans.refuse(what)

    def _open(self, module: nn.Module, state: Any, prefix: str, metadata: Mapping[str, Any], *rest: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise RuntimeError(
                "load_state_dict(assign=True) would replace what a plan has given its memory: copy instead"
            )
        if torch.__future__.get_swap_module_params_on_conversion():
            raise RuntimeError(SWAPPED)
        self._engine.drain()  # everything: an update of another bucket, settled before ``_shut``, would hide these
        for param in module.parameters(recurse=False):
            if _loan(param) is None:
                value = self.weight_of(param)
                param.__class__ = nn.Parameter
                if not torch._has_compatible_shallow_copy_type(param, value):  # then a copy, which ``_shut`` puts back
                    value = value.to(self._engine.device)
                set_data(param, value)

    def _shut(self, module: nn.Module, *rest: Any) -> None:
        for param in module.parameters(recurse=False):
            if _loan(param) is None:
                self.adopt(param, param.data)

    @torch.no_grad()
    def adopt(self, param: nn.Parameter, value: Tensor, *, master: bool = True) -> None:
        """``value`` is the new weight: put it wherever the weight lies, and where its ``master`` does."""
        held, index = self.settled(param)
        for place in (held.rest(), held.master if master else None, held.weight if held.present else None):
            if place is not None and held.part(place, index).data_ptr() != value.data_ptr():
                held.part(place, index).copy_(value.reshape(-1))
        loan = _loan(param)
        if loan is not None and loan.data_ptr() != value.data_ptr():
            loan.copy_(value)
        self.used(held)
        self._show_again(param)

    def used(self, held: BucketState) -> None:
        """COMPUTE has been given whatever somebody did with the home."""
        held.used = self._engine.transfer.record(Lane.COMPUTE)

    def _show_again(self, param: nn.Parameter) -> None:
        held, index = self._engine.place_of[id(param)]
        if index in held.own:
            held.restore(index)

    @contextmanager
    def present(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
        """See ``StowOptimizer.present``."""
        self._looked()
        lent = self.loans.lend(params)
        try:
            yield
        finally:
            self.loans.give_back(lent)

    def take_out(self) -> None:
        """Ordinary tensors on the CPU for every parameter; the doors are removed."""
        self._referred.clear()
        for held in self._engine.held:
            for index, param in enumerate(held.params):
                del param._keeper  # type: ignore[attr-defined]
                held.release(index)
        for handle in self._handles:
            handle.remove()

    # --- gradients ---------------------------------------------------------------------------------------------------

    @property
    def clipping(self) -> Clipping:
        """For whoever handles gradients; backward is over then."""
        self._engine.borders.close_all()
        return self._engine.clipping

    def gradient(self, held: BucketState, index: int, keeper: Keeper) -> Tensor | None:
        """What stands for the gradient that waits, if one does."""
        self._engine.gradients.learn()
        some = index in held.touched or index in held.spent or index in held.zeroed
        if not some:
            return None
        return parked(keeper, held.nan.expand(held.shapes[index]), self._engine.gradients.window)

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
            self.adopt(param, self.state_of(param)["master"].to(param.dtype), master=False)

    @torch.no_grad()
    def forget_state(self, param: nn.Parameter) -> None:
        """As if ``param`` had never been updated; its master stays."""
        for name, place in self.state_of(param).items():
            if name != "master":
                place.zero_()


class Keeper(Copied):
    """Answers for one parameter; see ``parameters.py``."""

    def __init__(self, surface: Surface, held: BucketState, index: int, name: str) -> None:
        self._surface, self._held, self._index, self.name = surface, held, index, name
        begin = held.part(held.weight, index).data_ptr()
        self.home = (begin, begin + held.part(held.weight, index).nbytes)

    def read(self) -> Tensor:
        return self._surface.read(self._held, self._index, self.name)

    def value(self) -> Tensor:
        return self._surface.copy_of(self._held, self._index)

    def require_present(self, what: str) -> None:
        if not self._held.bucket.resident:
            raise RuntimeError(f"{self.name}: {what} of a parameter that travels; plan with weights='resident'")
        self.read()

    def gradient(self) -> Tensor | None:
        return self._surface.gradient(self._held, self._index, self)

    def forget_gradient(self) -> None:
        self._surface._engine.forget(self._held, self._index)

    @property
    def window(self) -> int:
        return self._surface._engine.gradients.window

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        return self._surface.clipping.norm_of(self._held, self._index)

    @torch.no_grad()
    def gradient_value(self) -> Tensor:
        return self._surface.clipping.value_of(self._held, self._index)

    @torch.no_grad()
    def scale_gradient(self, factor: Tensor | float) -> None:
        self._surface.clipping.multiply(self._held, self._index, factor)

    def zero_gradient(self) -> None:
        self.forget_gradient()
        self._held.zeroed.add(self._index)

    def follow(self, view: Tensor) -> Tensor:
        if not isinstance(view, StowedParameter):
            view.__class__ = Alias  # and not as_subclass, which would put a node into the graph
            view._keeper = self  # type: ignore[attr-defined]
        return view

    @property
    def here(self) -> bool:
        return self._held.shows(self._index)

    def read_view(self, view: Tensor) -> Tensor:
        return self._surface.read_view(self._held, self._index, view)


def _refuse_casts(name: str, param: nn.Parameter) -> None:
    """Do nothing where autocast would not cast the parameter itself for backward.

    Autocast keeps a parameter's cast for all who use it, so that their gradients are added in the lower precision. It
    keeps none of a copy, whose gradient is added in the parameter's own.

    Raises:
        RuntimeError: it would.
    """
    kept = torch.is_autocast_enabled(param.device.type) and torch.is_autocast_cache_enabled()
    if kept and torch.is_grad_enabled() and param.requires_grad and param.dtype is torch.float32:
        raise RuntimeError(
            f"{name} travels and is read under autocast outside of the module that owns it: plan with a batch, so that "
            f"this is seen, or with weights='resident', or write torch.autocast(..., cache_enabled=False)"
        )


def _with_gradient(original: Tensor, value: Tensor) -> Tensor:
    """``value``, through which gradients flow to ``original`` if it takes any."""
    return Elsewhere.apply(original, value) if torch.is_grad_enabled() and original.requires_grad else value


def _loan(param: nn.Parameter) -> Tensor | None:
    """What ``param`` shows, if it is on loan."""
    return param.data if isinstance(param, LentParameter) else None


def _same_memory(first: Any, second: Tensor) -> bool:
    """Whether both are the same numbers at the same place."""
    if not isinstance(first, Tensor) or first.layout is not torch.strided:
        return False
    same = (first.dtype, first.shape, first.stride()) == (second.dtype, second.shape, second.stride())
    return same and first.data_ptr() == second.data_ptr()


def _leave_no_copies(state: dict[str, Any], prefix: str, lent: Iterable[Tensor]) -> None:
    """What was saved as a view of a copy goes to the host: copies on the device have no place in the plan."""
    copies = {tensor.untyped_storage().data_ptr() for tensor in lent}
    for key, value in state.items():
        strided = isinstance(value, Tensor) and value.layout is torch.strided and not isinstance(value, nn.Parameter)
        if strided and key.startswith(prefix) and value.untyped_storage().data_ptr() in copies:
            state[key] = value.detach().to("cpu", copy=True)


def _has_a_say(module: nn.Module) -> bool:
    """Whether anybody but torch and us looks at parameters, or at what is saved of them, for its state dict."""
    ours = 2 if next(module.parameters(recurse=False), None) is not None else 0
    hooks = len(module._state_dict_pre_hooks) + len(module._state_dict_hooks)
    return hooks > ours or any(
        getattr(getattr(module, name), "__func__", None) is not getattr(nn.Module, name)
        for name in ("state_dict", "_save_to_state_dict", "get_extra_state")
    )
