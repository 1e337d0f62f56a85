"""Experts divided over ranks: which this rank has, their gradients and norms, and whole weights again.

Ranks 0 to N - 1 have all experts of a model together, in order; so have the next N, and so on:

    ranks 0 1 2 3, degree 2, 8 experts     0-3 4-7 0-3 4-7      experts 0 to 3 are on ranks 0 and 2

Every rank has rows of its own. The gradient of an expert on one rank is that of the rows of all N, since backward
brings it there; so it is added over the ranks that have the same expert, and divided by the number of all ranks, as
torch's DistributedDataParallel does with everything else. That one leaves experts out. Beside ZeRO 1 and 2 DeepSpeed
does both (``tell_zero``).

Invariant. The norm counts each parameter once, and has the same bits on all ranks: squares of the experts' norms are
gathered and added in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from deepstow.strategies.parallel import tensor_shards
from deepstow.strategies.parallel.expert_exchange import DividedExperts
from deepstow.strategies.parallel.tensor_shards import Shard, shard_of
from deepstow.strategies.state.torch_state import Held, Piece, TorchState, whole


class ExpertParts:
    """The experts of a model that this rank has. Making it cuts them out of layers that are whole; a collective.

    ``zero``: DeepSpeed's ZeRO adds up gradients, norms and updates.
    """

    def __init__(self, model: nn.Module, degree: int, slices: int, *, zero: bool = False) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.is_first = rank < degree  # of the ranks that have the same experts
        self._world = world
        copies = range(world // degree)
        every = [list(range(copy * degree, (copy + 1) * degree)) for copy in copies]
        self._together, _ = dist.new_subgroups_by_enumeration(every)
        self._alike, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in zip(*every, strict=True)])
        self.layers = dict(_layers(model))
        self.params: dict[str, nn.Parameter] = {}
        for name, module in self.layers.items():
            self._cut(name, module, rank % degree, degree)
            module.forward = DividedExperts(module, self._together, min(slices, module.num_experts))
        self.is_in_zero = zero
        if zero:
            tell_zero(self.layers.values(), self.params.values(), degree)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(self.params))
        model.expert_parts = self  # type: ignore[assignment]

    def _cut(self, name: str, module: Any, place: int, degree: int) -> None:
        count = module.num_experts // degree
        for key, param in list(module.named_parameters(recurse=False)):
            mine: Any = param
            if shard_of(param) is None:
                shard = Shard(0, (count,) * degree, place, tuple(param.shape))
                mine = nn.Parameter(param.detach()[shard.rows].clone(), param.requires_grad)
                mine.shard = shard
                setattr(module, key, mine)
            self.params[f"{name}.{key}"] = mine
        module.num_experts = count

    def complete(self) -> None:
        """After the backward of a step, add what other ranks have; a collective. An expert that no row came to has a
        gradient of zeros, as it has in a whole layer.
        """
        waiting = []
        for param in self.params.values():
            if param.requires_grad:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad.div_(self._world)
                waiting.append(dist.all_reduce(param.grad, group=self._alike, async_op=True))
        for work in waiting:
            work.wait()

    @torch.no_grad()
    def clip(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """As torch's ``clip_grad_norm_``, over the experts of all ranks; a collective."""
        params = [param for param in parameters if param.grad is not None]
        device = params[0].device
        mine = tensor_shards.norm_of(device, (param.grad for param in params if shard_of(param) is not None)).square()
        squares = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._together))]
        dist.all_gather(squares, mine, group=self._together)
        shared = tensor_shards.norm_of(device, (param.grad for param in params if shard_of(param) is None)).square()
        norm: Tensor = torch.stack([shared, *squares]).sum().sqrt()
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        return norm

    def state_dict(
        self, model: nn.Module, *, keep: bool, place: Callable[[Tensor], Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The state dict with all experts, on the CPU, empty unless ``keep``; a collective. ``place``: as there."""
        return tensor_shards.state_dict(model, keep=keep, group=self._together, place=place)

    def state(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> TorchState:
        """The training state of this rank: its experts, and all else, which the first rank writes."""
        writes = dist.get_rank() == 0
        weights = {name: self._held(name, param, writes=writes) for name, param in model.named_parameters()}
        name_of = {id(param): name for name, param in model.named_parameters()}
        groups = [[name_of[id(param)] for param in group["params"]] for group in optimizer.param_groups]
        held = [weights[name] for group in groups for name in group]
        shapes = {piece.name: piece.shape for holding in held for piece in holding.pieces}
        return TorchState(optimizer, held, groups, shapes, list(weights.values()), divides_weights=True)

    def _held(self, name: str, param: nn.Parameter, *, writes: bool) -> Held:
        shard = shard_of(param)
        if shard is None:
            return whole(param, name, written=writes)
        start = shard.index * param.numel()
        piece = Piece(name, shard.shape, start, 0, param.numel(), written=self.is_first)
        return Held(param, (piece,), str(param.dtype).removeprefix("torch."))

    def figures(self) -> dict[str, float]:
        """How evenly rows went to experts since the last call, over all layers and ranks; a collective."""
        routed = torch.stack([module.forward.routed for module in self.layers.values()])
        for module in self.layers.values():
            module.forward.routed = torch.zeros_like(routed[0])
        dist.all_reduce(routed)
        shares = routed.double() / routed.sum(dim=1, keepdim=True).clamp_min(1)
        return {"experts_busiest": float(shares.max())}


def of(model: Any) -> ExpertParts | None:
    """The divided experts of ``model``; None if it has none."""
    return getattr(model, "expert_parts", None)


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules that hold all experts of a layer, of the kind that Hugging Face computes by ``ExpertsInterface``."""
    for name, module in model.named_modules():
        if hasattr(module, "_is_expert_parallel") and hasattr(module, "num_experts"):
            yield name, module


def tell_zero(layers: Iterable[nn.Module], params: Iterable[nn.Parameter], degree: int) -> None:
    """Tell DeepSpeed's ZeRO 1 and 2 that ``degree`` ranks have all experts of ``layers`` together.

    Everything but experts is shared by all ranks, experts by those that have the same ones. DeepSpeed finds such layers
    by its own class (``deepspeed.moe.layer.MoE``), asks them to make process groups, and takes their weights in
    parameter groups that are marked ``moe``. So layers get that class besides Hugging Face's, whose forward stays.
    DeepSpeed adds gradients over the ranks with the same experts, divides by the number of all ranks, and adds up norms
    of parts.
    """
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    class Divided(MoE):
        """Experts of Hugging Face's in the eyes of DeepSpeed."""

        def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
            groups._create_expert_and_data_parallel(degree)

    for layer in layers:
        layer.__class__ = type(type(layer).__name__, (type(layer), Divided), {})
    param: Any
    for param in params:
        param.allreduce = False
        param.group_name = f"ep_size_{degree}"


def divide_groups(optimizer: torch.optim.Optimizer) -> None:
    """Give the experts of each parameter group a group of their own."""
    for group in list(optimizer.param_groups):
        experts = [param for param in group["params"] if shard_of(param) is not None]
        if experts:
            group["params"] = [param for param in group["params"] if shard_of(param) is None]
            marked: Mapping[str, Any] = {"params": experts, "moe": True, "name": experts[0].group_name}
            optimizer.add_param_group({**group, **marked})
