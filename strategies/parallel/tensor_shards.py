"""Weights that DeepSpeed's AutoTP has divided: which part this rank has, whole weights again, and the norm over parts.

DeepSpeed notes on each divided parameter along which dimension it was divided and into which sizes; experts that are
divided over ranks (``expert_parts.py``) have a ``shard``. A parameter without a note is the same on all ranks of a
copy, and counts once in the norm.

[Note: dropout] All ranks of a copy draw the same numbers, since dropout on the hidden states must be the same on each
of them. Inside attention that would give head 0 and the first head of the next rank the same mask. So on entry a number
is drawn from the common sequence, which is then put aside; attention draws from a sequence that follows from this
number and the rank. Afterwards the common sequence goes on, equally long on all ranks. A recomputed forward starts from
the same state and draws the same masks.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepstow.strategies.core.grid import Grid
from deepstow.strategies.engine.memory import accelerator
from deepstow.strategies.parallel import autotp
from deepstow.strategies.state.blocks import Columns

ATTENTION = "self_attn"


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part of a parameter: ``sizes[index]`` elements of dimension ``dim`` of ``shape``."""

    dim: int
    sizes: tuple[int, ...]
    index: int
    shape: tuple[int, ...]

    @property
    def start(self) -> int:
        return sum(self.sizes[: self.index])

    @property
    def stop(self) -> int:
        return self.start + self.sizes[self.index]

    @property
    def rows(self) -> slice:
        """Of a parameter that is divided along its first dimension."""
        assert self.dim == 0
        return slice(self.start, self.stop)


def shard_of(param: Any) -> Shard | None:
    """This rank's part of ``param``; None if it has the whole."""
    shard: Shard | None = getattr(param, "shard", None)
    if shard is not None:
        return shard
    note = getattr(param, "ds_autotp_universal_checkpoint_meta", None)
    if note is None or note["partition_dim"] is None:
        return None
    return Shard(note["partition_dim"], tuple(note["partition_sizes"]), tensor_rank(), tuple(note["original_shape"]))


def within(param: Any, start: int) -> tuple[int, Columns | None]:
    """Where element ``start`` of this rank's part is in the whole parameter: in all of it, or among some columns."""
    shard = shard_of(param)
    if shard is None:
        return start, None
    if shard.dim == 0:
        return start + shard.start * math.prod(shard.shape[1:]), None
    return start, Columns(shard.start, shard.stop, shard.shape[1])


def divide(model: Any, degree: int, *, tied: bool, in_slices: bool = False) -> None:
    """Divide the layers of ``model``, or of the stage that is left of it, over the ranks of a copy as DeepSpeed's
    engine does, which leaves alone what it finds divided; a collective. ``tied``: the whole model's head shares its
    embedding; ``in_slices``: between its layers ranks have slices of the tokens (``scattered.py``).
    """
    from deepspeed.module_inject.auto_tp import AutoTP
    from deepspeed.module_inject.autotp_config import AutoTPConfig
    from deepspeed.module_inject.layers import TensorParallel_Layer, set_autotp_mode
    from deepspeed.utils import groups

    set_autotp_mode(training=True)
    groups._init_tp_mesh_device(degree)
    specs = AutoTPConfig.from_dict(autotp.partition(tied=tied, frozen=False, in_slices=in_slices)["partition_config"])
    defaults: dict[str, Any] = {"all_reduce_linears": (), "prefix": "", "state_dict": None, "orig_layer_impl": None}
    divider = AutoTP(
        module=model,
        linear_layer_setting=(nn.Linear, nn.Embedding),
        partition_config=specs,
        model_config=model.config,
        training_mode=True,
        **defaults,
    )
    divider.set_tensor_parallel_config(degree, group())
    with redirect_stdout(io.StringIO()):  # it prints what it finds
        divider._replace_module(model)
        divider.register_replicated_grad_hooks(model)
    for module in model.modules():
        if isinstance(module, TensorParallel_Layer):
            module.replaced = True


def tensor_rank() -> int:
    """This rank among those of its copy of the model."""
    from deepspeed.utils import groups

    return int(groups.get_tensor_model_parallel_rank())


def is_first(params: Iterable[Any]) -> bool:
    """Whether this rank writes what all ranks of its copy have; any rank does where no layers are divided."""
    return not any(shard_of(param) and not hasattr(param, "shard") for param in params) or tensor_rank() == 0


def whole_shape(tensor: Any) -> tuple[int, ...]:
    """The shape of a weight before any rank divided it, also under ZeRO stage 3."""
    shard = shard_of(tensor)
    return shard.shape if shard is not None else tuple(getattr(tensor, "ds_shape", tensor.shape))


def group() -> Any:
    """The ranks of this copy of the model."""
    from deepspeed.utils import groups

    return groups.get_tensor_model_parallel_group()


@torch.no_grad()
def state_dict(
    model: nn.Module, *, keep: bool, group: Any = None, place: Callable[[Tensor], Tensor] | None = None
) -> dict[str, Tensor]:
    """The state dict, whole and on the CPU, empty unless ``keep``. A collective, one tensor at a time; of the ``group``
    that has all parts, by default the ranks of this copy of the model. ``place``: puts a whole tensor where it stays.
    """
    tensors: dict[str, Tensor] = {}
    same: dict[int, Tensor] = {}  # a tied weight is gathered once
    values = model.state_dict()  # of the memory engine's, read together
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in same:
            whole = gathered(tensor, group, values[name])
            if not keep:
                same[id(tensor)] = torch.empty(0)
            elif place is not None:
                same[id(tensor)] = place(whole)
            else:
                same[id(tensor)] = whole.to("cpu", copy=shard_of(tensor) is None)
        tensors[name] = same[id(tensor)]
    return tensors if keep else {}


def gathered(tensor: Tensor, ranks: Any = None, value: Tensor | None = None) -> Tensor:
    """The whole of a ``tensor`` of which this rank may have a part, with its ``value`` if that is elsewhere. A
    collective. ``ranks``: see ``state_dict``.
    """
    local = tensor if value is None else value
    shard = shard_of(tensor)
    if shard is None:
        return local.detach()
    largest = max(shard.sizes)
    part = local.detach().movedim(shard.dim, 0)
    mine = part.new_zeros(largest, *part.shape[1:])
    mine[: part.shape[0]] = part
    parts = [torch.empty_like(mine) for _ in shard.sizes]
    torch.distributed.all_gather(parts, mine, group=ranks or group())
    cut = [padded[:size] for padded, size in zip(parts, shard.sizes, strict=True)]
    return torch.cat(cut).movedim(0, shard.dim).contiguous()


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """As torch's, over all parts of the gradients; a collective. Returns the norm before clipping."""
    params = [param for param in parameters if param.grad is not None]
    device = params[0].device
    of_parts = norm_of(device, (param.grad for param in params if shard_of(param) is not None))
    norm = whole_norm(of_parts, norm_of(device, (param.grad for param in params if shard_of(param) is None)))
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return norm


def whole_norm(of_parts: Tensor, of_whole: Tensor) -> Tensor:
    """The norm of all gradients of a copy, from that of this rank's parts and that of what all its ranks have; a
    collective.
    """
    squares = of_parts.square()
    torch.distributed.all_reduce(squares, group=group())
    return (squares + of_whole.square()).sqrt()


def norm_of(device: torch.device, grads: Iterator[Tensor | None]) -> Tensor:
    """The norm of all ``grads``; of none it is zero."""
    norms = [torch.linalg.vector_norm(grad) for grad in grads if grad is not None]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=device)


def apart(model: nn.Module, grid: Grid) -> int:
    """Let the attention of every block draw another mask on each rank of a copy, see [Note: dropout]; how many do."""
    probability = getattr(getattr(model, "config", None), "attention_dropout", 0.0) or 0.0
    if grid.tensor == 1 or not probability:
        return 0
    place = grid.cell(torch.distributed.get_rank()).tensor
    attentions = [module for name, module in model.named_modules() if name.rpartition(".")[2] == ATTENTION]
    for module in attentions:
        _draw_apart(module, place, grid.tensor)
    return len(attentions)


def _draw_apart(module: nn.Module, place: int, ranks: int) -> None:
    """Give ``module`` a sequence of its own on each of ``ranks``, of which this one is at ``place``."""
    device, aside = accelerator.current(), ExitStack()

    def enter(module: nn.Module, args: Any) -> None:
        if module.training:
            seed = int(torch.randint(2**31, (1,)).item()) * ranks + place
            devices, kind = ([], "cpu") if device is None else ([device], device.type)
            aside.enter_context(torch.random.fork_rng(devices, device_type=kind))
            torch.manual_seed(seed)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(lambda *_: aside.close(), always_call=True)
