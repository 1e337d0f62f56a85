"""Gradients after a pipeline's step: ends of a tied weight, copies of the model, and the norm over all stages.

Invariant. The norm is that of ``torch.nn.utils.clip_grad_norm_`` on the whole model, with its bits: each weight's norm
is taken by the stage that has it, and the norm of norms in the order of ``model.parameters()``. Where the layers of a
stage are divided it is that of ``tensor_shards.clip_grad_norm_``, with its bits.

Over copies gradients are averaged as torch's DistributedDataParallel does, each divided by the number of copies before
they are added. A weight that one copy used and another did not has zeros there; one that none used has no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.utils import clip_grads_with_norm_

from deepstow.strategies.parallel import tensor_shards
from deepstow.strategies.parallel.pipelining import Pipeline
from deepstow.strategies.planner.engine_bytes import MESSAGE_BYTES


class StageGradients:
    """The gradients of one stage. ``copies``: the ranks with the same stage in all copies of the model."""

    def __init__(self, pipeline: Pipeline, copies: dist.ProcessGroup) -> None:
        self._group = pipeline.group
        self._copies = copies
        self._params = pipeline.stage.names()
        self._order = [name for name, _ in pipeline.stage.whole.named_parameters()]
        holders: list[list[str]] = [[] for _ in range(pipeline.stages)]
        dist.all_gather_object(holders, list(self._params), group=self._group)
        held_by = {name: [place for place, names in enumerate(holders) if name in names] for name in self._order}
        self._tied = {name: places for name, places in held_by.items() if len(places) > 1}
        self._place = pipeline.position
        self._divided = {name for name, param in self._params.items() if tensor_shards.shard_of(param) is not None}
        self._number = {name: number for number, name in enumerate(self._order)}
        self.own = [name for name in self._params if held_by[name][0] == self._place]

    def complete(self) -> None:
        """Add up what the other end and the other copies have; a collective."""
        for name, ends in self._tied.items():
            if self._place in ends:
                self._add_ends(self._params[name], *ends)
        if dist.get_world_size(self._copies) > 1:
            grads = self._used_by_any()
            torch._foreach_div_(grads, dist.get_world_size(self._copies))
            for message in messages(grads):
                flat = _flatten_dense_tensors(message)
                dist.all_reduce(flat, group=self._copies)
                torch._foreach_copy_(message, list(_unflatten_dense_tensors(flat, message)))

    def _used_by_any(self) -> list[Tensor]:
        """The gradients of weights that any of the copies used: the same ones on each, for messages to fit."""
        params = list(self._params.values())
        used = torch.tensor([param.grad is not None for param in params], dtype=torch.int32, device=params[0].device)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self._copies)
        used_grads = []
        for param, is_used in zip(params, used.tolist(), strict=True):
            if is_used:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                used_grads.append(param.grad)
        return used_grads

    def _add_ends(self, param: nn.Parameter, front: int, back: int) -> None:
        """Both ends get the sum of the two gradients, added in the same order."""
        mine = torch.zeros_like(param) if param.grad is None else param.grad
        theirs = torch.empty_like(mine)
        peer = dist.get_global_rank(self._group, back if self._place == front else front)
        order = (dist.isend, mine), (dist.irecv, theirs)
        works = dist.batch_isend_irecv([dist.P2POp(kind, tensor, peer, self._group) for kind, tensor in order])
        for work in works:
            work.wait()
        param.grad = mine + theirs if self._place == front else theirs + mine

    def clip(self, max_norm: float) -> Tensor:
        """Clip all gradients of the copy to a norm of ``max_norm`` and return the norm before; a collective."""
        grads = {name: grad for name in self.own if (grad := self._params[name].grad) is not None}
        norms = dict(zip(grads, torch._foreach_norm(list(grads.values()), 2.0), strict=True)) if grads else {}
        norm = self.total_norm(norms, next(iter(self._params.values())).device)
        clip_grads_with_norm_(self._params.values(), max_norm, norm)
        return norm

    def total_norm(self, norms: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """The norm of all gradients of the copy, from the norm of each that this stage owns; a collective."""
        table = torch.zeros(3, len(self._order), dtype=torch.float64, device=device)  # norms; which there are; of parts
        if norms:
            numbers = [self._number[name] for name in norms]
            table[0, numbers] = torch.stack(list(norms.values())).double()
            table[1, numbers] = 1
            table[2, [self._number[name] for name in norms if name in self._divided]] = 1
        dist.all_reduce(table, group=self._group)
        dtype = next((norm.dtype for norm in norms.values()), torch.float32)
        present, in_parts = table[1] > 0, table[2] > 0
        of_whole: Tensor = torch.linalg.vector_norm(table[0][present & ~in_parts].to(dtype), 2.0)
        if not self._divided:
            return of_whole
        return tensor_shards.whole_norm(torch.linalg.vector_norm(table[0][in_parts].to(dtype), 2.0), of_whole)


def messages(grads: list[Tensor]) -> list[list[Tensor]]:
    """Gradients or weights of one dtype, in messages of about ``MESSAGE_BYTES``."""
    batches: list[list[Tensor]] = []
    filled = 0
    for grad in sorted(grads, key=lambda grad: str(grad.dtype)):
        if not batches or filled > MESSAGE_BYTES or batches[-1][0].dtype is not grad.dtype:
            batches.append([])
            filled = 0
        batches[-1].append(grad)
        filled += grad.nbytes
    return batches
