"""Reading and writing a stowed model from outside: state dicts, chosen parameters, optimizer state.

state_dict          views of the newest weights, with storages of their own: the host's copy of offloaded ones, the
                    home of residents; for copies see ``loans.py``. A module that customizes what is saved gets
                    copies of its weights; its result is not changed
load_state_dict     before a module is loaded its parameters are plain views of the newest weights; afterwards
                    masters and homes get the loaded values
present             chosen parameters are on loan (``loans.py``), with copies on the device; changes are kept
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from deepstow.strategies.core.layout import Item
from deepstow.strategies.engine.buckets.bucket_state import BucketState
from deepstow.strategies.engine.engine import Engine
from deepstow.strategies.engine.keeper import Keeper, lent_value
from deepstow.strategies.engine.memory.arena import alone
from deepstow.strategies.engine.memory.pieces import AtHand, Chunk
from deepstow.strategies.engine.tensors.loans import LentParameter
from deepstow.strategies.engine.tensors.nested import same_bits
from deepstow.strategies.engine.tensors.parameters import RAW_DATA, Copied
from deepstow.strategies.engine.transfer.transfer import Stream

SWAPPED = (
    "torch.__future__.set_swap_module_params_on_conversion(True) makes load_state_dict replace what a plan has given "
    "its memory: set it to False"
)

Place: TypeAlias = Callable[[Tensor], Tensor]


class StatePart(NamedTuple):
    """A part of a parameter's state: its first element, and flat views by torch's names, which have their values inside
    of ``at_hand()``, and keep what is written inside of ``at_hand(writes=True)``.
    """

    start: int
    state: dict[str, Tensor]
    at_hand: AtHand


class StateAccess(Copied):
    """Access to a stowed model's weights, gradients and optimizer state."""

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self.engine = engine
        self.model = model
        self._handles: list[Any] = []
        self.out: dict[nn.Parameter, tuple[BucketState, int]] = {}  # parameters on loan
        self._place: Place | None = None  # puts what a state dict has where it stays
        self._placed: dict[nn.Parameter, Tensor] = {}  # a tied one stays one
        self._base = True  # encoded weights are made whole
        self._lent_to_modules: dict[int, list[nn.Parameter]] = {}  # while a state dict is made, by id of the module
        # Torch does not swap a tensor that has a weak reference. Without one, ``model.to`` would swap parameters where
        # torch is set to do so, and the new ones would not be in planned memory.
        self._referred = [weakref.ref(param) for param in model.parameters()]
        for name, param in model.named_parameters():
            bucket, index = engine.bucket_of[id(param)]
            param._keeper = Keeper(engine, bucket, index, name)  # type: ignore[attr-defined]
        self._handles.append(model.register_forward_pre_hook(lambda *_: self.keep_edits(), prepend=True))
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                # torch marks these hooks with an attribute, which a bound method cannot have
                self._handles.append(module.register_state_dict_pre_hook(partial(self._before_state_dict)))
                self._handles.append(module.register_state_dict_post_hook(partial(self._after_state_dict)))
                self._handles.append(module.register_load_state_dict_pre_hook(self._before_load))
                self._handles.append(module.register_load_state_dict_post_hook(self._after_load))

    def drain(self) -> None:
        """Complete all updates that are under way, and make what is on loan the newest weights."""
        self.engine.refuse_partly_updated()
        self.engine.drain()
        self.keep_edits()
        self._keep(tuple(self.out))

    def release(self) -> None:
        """Give every parameter ordinary memory on the CPU, or its view of the disk, and remove all hooks."""
        self._referred.clear()
        for bucket in self.engine.buckets:
            for index, param in enumerate(bucket.params):
                del param._keeper  # type: ignore[attr-defined]
                value, stays = self.engine.newest(bucket, index), bucket.copy_is_on_disk
                bucket.views.lend(index, value if stays else value.to("cpu", copy=True), nn.Parameter)
        for handle in self._handles:
            handle.remove()

    # --- weights -----------------------------------------------------------------------------------------------------

    def newest_of(self, param: nn.Parameter) -> Tensor:
        """The newest weight of ``param`` itself, which the host may read."""
        return self.engine.newest(*self._settle(param))

    def _settle(self, param: nn.Parameter) -> tuple[BucketState, int]:
        """The bucket of ``param`` and its index there, settled, so that the host may read its newest weight."""
        self.engine.refuse_partly_updated()
        bucket, index = self.engine.bucket_of[id(param)]
        self.engine.settle(bucket)
        self.engine.transfer.host_wait(bucket.stored, bucket.arrived)
        return bucket, index

    @torch.no_grad()
    def set_weight(self, param: nn.Parameter, value: Tensor, *, master: bool = True) -> None:
        """Copy a new weight to every place that has the weight, and to the master unless ``master`` is False."""
        bucket, index = self._settle(param)
        if bucket.copy is None or value.untyped_storage().data_ptr() != bucket.copy.untyped_storage().data_ptr():
            self.engine.refuse_damaged(
                bucket, index
            )  # what is beside it stays; a view of it was checked when it was made
        if bucket.sources:
            self.engine.ranks.stop_reading()
        bucket.load()
        value = bucket.as_kept(value)
        bucket.put_codes(index, value)
        copy = None if bucket.given_up else bucket.copy  # if it is, the gradient stays, and the master is the weight
        if copy is not None:
            bucket.fill(copy, {index: value.reshape(-1)})
            self.engine.written(bucket, index)
        if master:
            bucket.fill_masters({index: value.reshape(-1)})
        if bucket.present and bucket.part(bucket.weight, index).data_ptr() != value.data_ptr():
            bucket.part(bucket.weight, index).copy_(value.reshape(-1))
        loan = lent_value(param)
        if loan is not None and loan.data_ptr() != value.data_ptr():
            loan.copy_(value)
        self.engine.ranks.written(bucket)
        bucket.used = self.engine.transfer.record(Stream.COMPUTE)
        self._restore(param)

    def keep_edits(self) -> None:
        """Make what was written to values of a state dict the newest weights; see ``loans.py``, note: edits. Before
        weights are used or replaced.
        """
        for bucket in self.engine.buckets:
            for shown in bucket.handed_out.edits(bucket.replaced):
                value = shown.view if shown.is_copy else bucket.weight_of(shown.index)
                assert value is not None
                self.set_weight(bucket.params[shown.index], value)

    def _restore(self, param: nn.Parameter) -> None:
        bucket, index = self.engine.bucket_of[id(param)]
        if index in bucket.views.own:
            bucket.views.restore(index)

    # --- loans -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def lend(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Lend those of ``params`` that are not on loan until ``give_back``, and return them."""
        self.keep_edits()
        chosen = [param for param in dict.fromkeys(params) if param not in self.out]
        places = [self._settle(param) for param in chosen]  # all first: settling one bucket may hide another
        values = [param._keeper.value_to_lend() for param in chosen]  # type: ignore[attr-defined]
        for param, (bucket, index), value in zip(chosen, places, values, strict=True):
            bucket.views.lend(index, value, LentParameter)
            self.out[param] = bucket, index
        return chosen

    def _keep(self, params: Iterable[nn.Parameter]) -> None:
        for param in params:
            if not self._is_as_lent(param):
                self.set_weight(param, param.data)

    def _is_as_lent(self, param: nn.Parameter) -> bool:
        bucket, index = self._settle(param)
        self.engine.refuse_damaged(bucket, index)
        exact = param.data.reshape(-1).to("cpu", copy=True)
        bucket.read_exact(exact, index)
        return self.engine.ranks.everywhere(same_bits(param.data.reshape(-1).cpu(), exact))

    def give_back(self, params: Sequence[nn.Parameter]) -> None:
        """End the loan of ``params`` and keep what was written to them."""
        try:
            self._keep(params)
        finally:
            for param in params:
                bucket, index = self.out.pop(param)
                bucket.views.take_back(index)
                bucket.used = self.engine.transfer.record(Stream.COMPUTE)  # after all reads and writes by outside code

    def end_module_loans(self, *modules: int) -> None:
        """The state dicts of ``modules``, by id and by default of all, were made or interrupted."""
        for module in modules or tuple(self._lent_to_modules):
            self.give_back(self._lent_to_modules.pop(module, ()))

    def refuse_loans(self, what: str) -> None:
        """Raise RuntimeError if a parameter is on loan while ``what`` changes weights."""
        self.end_module_loans()
        if self.out:
            raise RuntimeError(f"{what} inside of `with optimizer.present(...)`: leave the block before")

    # --- state dicts -------------------------------------------------------------------------------------------------

    def state_dict(self, place: Place | None, *, base: bool) -> dict[str, Any]:
        """The model's. ``place`` is given each weight once and puts it where it stays; None: views are handed out.
        Without its ``base`` encoded weights have no values.
        """
        self._place = place
        self._placed = {}
        self._base = base
        try:
            return self.model.state_dict()
        finally:
            self._place = None
            self._placed = {}
            self._base = True

    def _before_state_dict(self, module: nn.Module, *rest: Any) -> None:
        """Make this module's parameters plain ones, with values if the module customizes its state dict."""
        self.engine.refuse_partly_updated()
        self.end_module_loans(id(module))  # an earlier one was interrupted
        self.keep_edits()
        mine = list(module.parameters(recurse=False))
        if any(_customizes_state_dict(submodule) for submodule in module.modules()):
            self._lent_to_modules[id(module)] = self.lend(mine)
            return
        for param in mine:
            if lent_value(param) is None:
                param.__class__ = nn.Parameter

    def _after_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        lent = {id(param): param.data for param in self._lent_to_modules.get(id(module), ())}
        self.end_module_loans(id(module))
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            saved = state.get(prefix + name)
            if lent_value(param) is not None:  # by ``present``, until the end of its block
                continue
            self._restore(param)
            if not isinstance(saved, Tensor) or isinstance(saved, nn.Parameter):  # keep_vars
                continue
            if id(param) not in lent or _same_memory(saved, lent[id(param)]):
                state[prefix + name] = self._hand_out(param)
        # What else views the copies moves to the host, since the plan has no device memory for them.
        copies = {value.untyped_storage().data_ptr(): param for param, value in lent.items()}
        for key, value in state.items() if lent else ():
            strided = isinstance(value, Tensor) and value.layout is torch.strided
            plain = strided and not isinstance(value, nn.Parameter)
            if plain and key.startswith(prefix) and value.untyped_storage().data_ptr() in copies:
                state[key] = value.detach().to("cpu", copy=True)
                bucket, index = self.engine.bucket_of[copies[value.untyped_storage().data_ptr()]]
                bucket.hand_out(state[key], index, is_weight=False)

    def _hand_out(self, param: nn.Parameter) -> Tensor:
        bucket, index = self.engine.bucket_of[id(param)]
        if bucket.codes is not None and not self._base:
            return without_values(bucket.weight)
        with torch.inference_mode(False):  # whose tensors do not count writes
            view = alone(self.newest_of(param))
        if self._place is not None:
            if param not in self._placed:
                self._placed[param] = self._place(view)
            return self._placed[param]
        bucket.hand_out(view, index)
        return view

    def _before_load(self, module: nn.Module, state: Any, prefix: str, metadata: Mapping[str, Any], *rest: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise RuntimeError(
                "load_state_dict(assign=True) would replace what a plan has given its memory: copy instead"
            )
        if torch.__future__.get_swap_module_params_on_conversion():
            raise RuntimeError(SWAPPED)
        self.engine.drain()  # all buckets: to settle another one before ``_after_load`` would hide these
        self.keep_edits()
        for param in module.parameters(recurse=False):
            if lent_value(param) is None:
                value = self.newest_of(param)
                param.__class__ = nn.Parameter
                if not torch._has_compatible_shallow_copy_type(param, value):
                    value = value.to(self.engine.device)  # ``_after_load`` copies it back
                RAW_DATA.__set__(param, value)

    def _after_load(self, module: nn.Module, *rest: Any) -> None:
        for param in module.parameters(recurse=False):
            if lent_value(param) is None:
                self.set_weight(param, param.data)

    # --- optimizer state ---------------------------------------------------------------------------------------------

    def state_of(self, param: nn.Parameter) -> dict[str, Tensor]:
        """Views, or copies (``copies_state_of``), by torch's names; ``master`` if the weight has a lower precision."""
        bucket, index = self.engine.bucket_of[id(param)]
        if bucket.is_shared:
            raise RuntimeError(
                f"the optimizer's state of {bucket.spec.params[index]} is shared over ranks, and no rank has all of "
                f"it: save it in a checkpoint of the run"
            )
        parts: dict[str, list[Tensor]] = {}
        for part in self.parts_of(param):
            with part.at_hand():
                for name, tensor in part.state.items():
                    parts.setdefault(name, []).append(tensor.clone() if self.copies_state_of(bucket) else tensor)
        tensors = {name: pieces[0] if len(pieces) == 1 else torch.cat(pieces) for name, pieces in parts.items()}
        return {"step": self.count_of(param)} | {name: tensor.view(param.shape) for name, tensor in tensors.items()}

    def copies_state_of(self, bucket: BucketState) -> bool:
        """Whether state that is read from outside is a copy: what rests is on the disk, or in less than fp32."""
        return bucket.spec.on_disk or self.engine.updates.moments is not None

    def count_of(self, param: nn.Parameter) -> Tensor:
        """How many updates ``param`` has had, as a view; on a rank that has a piece of it."""
        bucket, index = self.engine.bucket_of[id(param)]
        return bucket.memory[Item.STEPS][index]

    def parts_of(self, param: nn.Parameter) -> Iterator[StatePart]:
        """What this rank has of the moments and the master of ``param``."""
        bucket, index = self.engine.bucket_of[id(param)]
        moments, names = self.engine.updates.moments, self.engine.rule.names
        pieces = bucket.pieces_in([index])
        for stretch, piece in ((s, cut) for s in bucket.stretches() for full in pieces for cut in full.within(s)):
            step = max(1, piece.size if moments is None else moments.chunk)
            for start in range(0, max(1, piece.size), step):
                stop = min(piece.size, start + step)
                low, high = piece.at - stretch.start + start, piece.at - stretch.start + stop
                flats, at_hand = [flat[low:high] for flat in stretch.moments], stretch.at_hand
                if moments is not None:
                    chunk = Chunk(index, piece.at + start, piece.at + stop, stop == piece.size)
                    flats, at_hand = moments.places(chunk), partial(moments.held, bucket, chunk)
                state = dict(zip(names, flats, strict=True))
                if bucket.spec.low_precision:
                    assert stretch.master is not None
                    state["master"] = stretch.master[low:high]
                yield StatePart(piece.start + start, state, at_hand)

    @torch.no_grad()
    def set_state(self, param: nn.Parameter, state: Mapping[str, Any]) -> None:
        """Copy ``state`` into the arenas; a master also becomes the weight."""
        if "step" in state:
            self.count_of(param).copy_(torch.as_tensor(state["step"]).reshape(()))
        elif state.keys() & set(self.engine.rule.names):
            self.count_of(param).fill_(1)  # torch does not count SGD's updates
        for part in self.parts_of(param):
            with part.at_hand(writes=True):
                for name in state.keys() & part.state.keys():
                    flat, place = torch.as_tensor(state[name]).reshape(param.shape).view(-1), part.state[name]
                    place.copy_(flat[part.start : part.start + place.numel()])
        if "master" in state:
            mixed = self.engine.bucket_of[id(param)][0].spec.low_precision
            value = self.state_of(param)["master"] if mixed else torch.as_tensor(state["master"]).reshape(param.shape)
            self.set_weight(param, value.to(param.dtype), master=not mixed)

    @torch.no_grad()
    def forget_state(self, param: nn.Parameter) -> None:
        """As if ``param`` had never been updated; its master stays."""
        self.count_of(param).zero_()
        for part in self.parts_of(param):
            with part.at_hand(writes=True):
                for name, place in part.state.items():
                    if name != "master":
                        place.zero_()


class State(MutableMapping[nn.Parameter, dict[str, Tensor]]):
    """``optimizer.state``, as torch's optimizers have it: a mapping from each parameter that was updated to views of
    its state in the arenas. To delete a parameter is to reset its state; then its dict is empty, and it is not listed.
    """

    def __init__(self, access: StateAccess) -> None:
        self._access = access

    def __getitem__(self, param: nn.Parameter) -> dict[str, Tensor]:
        self._access.drain()
        if not self._access.count_of(param) > 0:
            return {}
        bucket, index = self._access.engine.bucket_of[id(param)]
        if self._access.copies_state_of(bucket):
            where = "on the disk" if bucket.spec.on_disk else f"in {self._access.engine.layout.moments_as}"
            raise RuntimeError(
                f"the optimizer's state of {bucket.spec.params[index]} rests {where}, and there is no memory for "
                f"all of it: read it by optimizer.state_of(param), or save it by optimizer.save(folder)"
            )
        return self._access.state_of(param)

    def __setitem__(self, param: nn.Parameter, state: Mapping[str, Any]) -> None:
        del self[param]
        self._access.set_state(param, state)

    def __delitem__(self, param: nn.Parameter) -> None:
        self._access.drain()
        self._access.forget_state(param)

    def __iter__(self) -> Iterator[nn.Parameter]:
        for group in self._access.engine.groups():
            yield from (param for param in group["params"] if self[param])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, param: object) -> bool:
        return any(param is other for other in self)


def _same_memory(first: Any, second: Tensor) -> bool:
    if not isinstance(first, Tensor) or first.layout is not torch.strided:
        return False
    same = (first.dtype, first.shape, first.stride()) == (second.dtype, second.shape, second.stride())
    return same and first.data_ptr() == second.data_ptr()


def _customizes_state_dict(module: nn.Module) -> bool:
    ours = 2 if next(module.parameters(recurse=False), None) is not None else 0
    hooks = len(module._state_dict_pre_hooks) + len(module._state_dict_hooks)
    return hooks > ours or any(
        getattr(getattr(module, name), "__func__", None) is not getattr(nn.Module, name)
        for name in ("state_dict", "_save_to_state_dict", "get_extra_state")
    )


def without_values(weight: Tensor) -> Tensor:
    """What a state dict has of ``weight`` where another rank reads it, with this one's help."""
    return weight.new_empty(0)
