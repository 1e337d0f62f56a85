"""Give a model without values those of the parameters that a rank holds, so that its host never has the whole model.

    fill    the parameters of a pipeline's stage, or all, of experts those that are the rank's
    pour    one parameter after the other into the memory engine, of which a rank takes its spans

Random weights are drawn as ``build`` draws them: Transformers initialises all modules in their order. What is not held
has memory from the first operator on it until the turn of another module comes, so that the generator goes on as
always: the bits are those of the whole model. Of a saved model the tensors are read from its safetensors by name, in
place of the whole files; what its files do not have (tables of positions) is initialised as Transformers does it.

Invariant. What is not held is on the device ``meta``, where nobody can read a value that is not there. Tied weights
stay tied, and buffers are whole.

How tensors are found in files, and made of several as experts are: ``saved_tensors.py``.

Where that cannot be done the whole model is built, its part is kept, and a line says why: files that are no
safetensors, adapters, names that the files do not have, conversions that Transformers does not make of one tensor
alone, and initialisation that goes on with a parameter after the turn of another module has come.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepstow.strategies.engine.tensors.nested import tensors_in
from deepstow.strategies.engine.tensors.parameters import LATER, is_placeholder, placeholder
from deepstow.strategies.parallel.tensor_shards import Shard
from deepstow.trainer.model.build import forget_marks, refuse_uninitialised, tensors_of
from deepstow.trainer.model.saved_tensors import NotInParts, saved_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from deepstow.strategies.engine import StowOptimizer

Give = Callable[[str, Tensor], None]
OVERWRITES = ("normal_", "uniform_", "zero_", "fill_", "copy_")  # that need no value from before


def fill(
    model: PreTrainedModel,
    held: Collection[str],
    name_or_path: str | None,
    seed: int,
    whole: Callable[[], Any],
    give: Give = lambda name, value: None,
    shards: Mapping[str, Shard] = MappingProxyType({}),
) -> str | None:
    """Give ``model``, which is on the device ``meta``, the parameters ``held`` and all buffers.

    Args:
        name_or_path: of a saved model; None: weights are random.
        seed: of random weights.
        whole: builds the whole model, with the same names.
        give: where nothing is ``held``, it is called with each parameter once that has its value; a tied one has one
            name. Of what is given again the last value counts.
        shards: of parameters of which the rank has some rows, not tied; each becomes its part, with the shard on it.

    Returns:
        A line that says why the whole model was built; None if it was not.
    """
    tied: Mapping[str, str] = model.all_tied_weights_keys
    needed = {tied.get(name, name) for name in held} - shards.keys()
    cut: dict[str, Tensor] = {}

    def pass_on(name: str, value: Tensor) -> None:
        if name in shards:
            cut[name] = value.detach()[shards[name].rows].clone()
        elif name not in tied:
            give(name, value)

    try:
        if name_or_path is None:
            _draw(model, needed, seed, pass_on)
        else:
            cut = _read(model, needed, tied, name_or_path, pass_on, shards)
        line = None
    except NotInParts as error:
        _take(model, held, whole(), pass_on)
        line = f"each rank loads the whole model before it keeps its part: {error}"
    else:
        model.tie_weights(recompute_mapping=False)
        _leave(model, needed)
    for name, shard in shards.items():
        put(model, name, nn.Parameter(cut.pop(name), model.get_parameter(name).requires_grad)).shard = shard
    return line


def hollow(model: PreTrainedModel) -> None:
    """Put placeholders on the CPU in the place of parameters of ``model``, which is on the device ``meta``."""
    placeholders: dict[int, nn.Parameter] = {}  # tied ones stay tied
    for name, param in list(model.named_parameters(remove_duplicate=False)):
        put(model, name, placeholders.setdefault(id(param), placeholder(param)))
    _allocate_buffers(model)


def pour(
    model: PreTrainedModel,
    make: Callable[..., Any],
    name_or_path: str | None,
    seed: int,
    optimizer: StowOptimizer,
    *,
    say: Callable[[str], None],
) -> None:
    """Give the ``hollow`` model, which is stowed, all of its values, those that the first rank has; a collective.
    ``make`` builds the whole model, or one on the device ``meta``.
    """
    params = dict(model.named_parameters(remove_duplicate=False))
    of_first = optimizer.engine.ranks.of_first

    def give(name: str, value: Tensor) -> None:
        param = params[name]
        optimizer.access.set_weight(param, of_first(value.detach().to(optimizer.engine.device, param.dtype)))
        vars(param).pop(LATER, None)

    twin = make(on_meta=True)
    if line := fill(twin, (), name_or_path, seed, make, give):
        say(line)
    unfilled = [name for name, param in params.items() if is_placeholder(param)]
    assert not unfilled, f"{unfilled[0]} was given no value"
    for buffer, value in zip(model.buffers(), twin.buffers(), strict=True):
        buffer.copy_(of_first(value.to(buffer.device)))


def _draw(model: PreTrainedModel, names: Collection[str], seed: int, give: Give) -> None:
    """Initialise ``names`` with random weights. Afterwards other parameters have no memory."""
    absent: dict[int, _Absent] = {}
    for name, param in list(model.named_parameters(remove_duplicate=False)):  # tied ones apart: each has its own draw
        drawn = put(model, name, nn.Parameter(torch.empty_like(param, device="cpu"), param.requires_grad))
        if name not in names:
            drawn.untyped_storage().resize_(0)
            absent[drawn.untyped_storage()._cdata] = _Absent(name, drawn)
    _allocate_buffers(model)
    versions = {name: tensor._version for name, tensor in tensors_of(model)}
    torch.manual_seed(seed)
    forget_marks(model)
    with _Turns(absent, give) as turns:
        model.initialize_weights()
    turns.end()
    refuse_uninitialised(model, versions)


class _Absent(NamedTuple):
    name: str
    param: nn.Parameter

    @property
    def owner(self) -> str:
        return self.name.rpartition(".")[0]


class _Turns(TorchDispatchMode):
    """Gives ``absent`` parameters, by their storages, memory while operators of their module run, and then away."""

    def __init__(self, absent: Mapping[int, _Absent], give: Give) -> None:
        super().__init__()
        self._absent, self._give = absent, give
        self._present: list[_Absent] = []  # of one module
        self._seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs)):
            storage = tensor.untyped_storage()
            absent = self._absent.get(storage._cdata)
            if absent is not None and storage.nbytes() < absent.param.nbytes:
                overwrites = func.overloadpacket.__name__ in OVERWRITES and tensor is args[0]
                if absent.name in self._seen and not (overwrites and tensor.nbytes == absent.param.nbytes):
                    raise NotInParts(f"a weight of {absent.owner} is initialised in two turns")
                if self._present and self._present[0].owner != absent.owner:
                    self.end()
                self._seen.add(absent.name)
                storage.resize_(absent.param.nbytes)
                self._present.append(absent)
        return func(*args, **(kwargs or {}))

    def end(self) -> None:
        """The turn of a module is over."""
        for name, param in self._present:
            self._give(name, param)
            param.untyped_storage().resize_(0)
        self._present = []


# --- saved models ----------------------------------------------------------------------------------------------------


def _read(
    model: PreTrainedModel,
    names: Collection[str],
    tied: Mapping[str, str],
    name_or_path: str,
    give: Give,
    shards: Mapping[str, Shard],
) -> dict[str, Tensor]:
    """Read ``names`` and buffers from the files of a saved model; returns the rows of ``shards``. Raise NotInParts
    before anything is read.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        raise NotInParts("it is saved as adapters")
    saved = saved_tensors(model, name_or_path)
    for name, source in tied.items():
        if name in saved and source not in saved:
            saved[source] = saved[name]
    for name, param in model.named_parameters():
        if (at := saved.get(name)) is None or at.shape != tuple(param.shape):
            raise NotInParts(f"its files have no {name} of that shape")
    forget_marks(model)
    cut: dict[str, Tensor] = {}
    for name, param in list(model.named_parameters()):
        param._is_hf_initialized = True  # type: ignore[attr-defined]
        if name in shards:
            cut[name] = saved[name].read(param.dtype, shards[name].rows)
        elif name in names:
            filled = put(model, name, nn.Parameter(saved[name].read(param.dtype), param.requires_grad))
            filled._is_hf_initialized = True
        elif not names:  # who keeps nothing in the model is given all, and a stage reads no more than its own
            give(name, saved[name].read(param.dtype))
    _allocate_buffers(model)
    for name, buffer in model.named_buffers():
        if (at := saved.get(name)) is not None:
            buffer.copy_(at.read(buffer.dtype))
            buffer._is_hf_initialized = True  # type: ignore[attr-defined]
    model.initialize_weights()
    return cut


# --- places in a model -----------------------------------------------------------------------------------------------


def put(model: nn.Module, name: str, tensor: Any) -> Any:
    """``tensor``, which is a parameter or buffer of ``model`` from now on."""
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    (module._parameters if isinstance(tensor, nn.Parameter) else module._buffers)[key] = tensor
    return tensor


def _allocate_buffers(model: nn.Module) -> None:
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        put(model, name, torch.empty_like(buffer, device="cpu"))


def _leave(model: nn.Module, held: Collection[str]) -> None:
    """Take the memory of parameters none of whose names is ``held``."""
    named_params = list(model.named_parameters(remove_duplicate=False))
    stays = {id(param) for name, param in named_params if name in held}
    emptied: dict[int, nn.Parameter] = {}  # tied ones stay tied
    for name, param in named_params:
        if id(param) not in stays:
            empty = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
            put(model, name, emptied.setdefault(id(param), empty))


def _take(model: nn.Module, held: Collection[str], whole: nn.Module, give: Give) -> None:
    """Give ``model`` the tensors of the ``whole`` one, parameters that are ``held`` and buffers."""
    for name, param in whole.named_parameters():
        give(name, param)
    for name, tensor in tensors_of(whole):
        put(model, name, tensor)
    _leave(model, held)
