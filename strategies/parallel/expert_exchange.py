"""The forward of experts that are on several ranks: rows go to the rank that has their expert, and come back.

    sort rows by expert ─► counts ─► [ exchange ─► products ─► exchange back ] per slice ─► original order, weighted sum

A slice is a few experts of every rank. While the products of one slice run, rows of the next one and results of the
one before it are under way; backward runs the same in reverse. Products are those of Hugging Face's own class with
fewer experts, whichever implementation is set.

Invariant. An expert has all its rows in one slice, from all ranks in the order of ranks. So its products, and with them
all bits, are the same for any number of slices. Hugging Face sorts rows once more, on the host not stably; there its
grouped products are a loop over experts, so each expert is a call of its own.

[Note: one order] Ranks must call collectives of a group in one order, in backward as well. Autograd runs nodes in the
reverse order of forward, and which nodes there are must not depend on where rows go. An expert without rows may leave
results without history; so sending them back depends on the rows as well, by a gradient of None.

How many rows go where is known to the host once per layer, which waits for it on an accelerator; no row is dropped.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(slots=True)
class Way:
    """How many rows this rank sends to each rank of ``group`` and receives from each; and an exchange under way."""

    group: Any
    sent: Sequence[int]
    received: Sequence[int]
    under_way: Any = None

    def start(self, rows: Tensor, *, back: bool = False) -> Tensor:
        """Begin to exchange ``rows``; ``back``: in the other direction. What is returned is not filled yet."""
        sends, gets = (self.received, self.sent) if back else (self.sent, self.received)
        rows, arriving = rows.contiguous(), rows.new_empty(sum(gets), *rows.shape[1:])
        work = dist.all_to_all_single(arriving, rows, list(gets), list(sends), group=self.group, async_op=True)
        self.under_way = (work, rows, arriving)  # both stay until it is done
        return arriving

    def finish(self) -> Tensor:
        """Wait for the rows that were begun with."""
        arrived: Tensor
        work, _, arrived = self.under_way
        self.under_way = None
        work.wait()
        return arrived


class _Start(torch.autograd.Function):
    """Begins an exchange; in backward it ends the one of gradients. ``after``: what has to be in backward after it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Way, after: Tensor | None) -> Tensor:
        ctx.way = way
        return way.start(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.way.finish(), None, None


class _Finish(torch.autograd.Function):
    """Ends an exchange; in backward it begins the one of gradients, which ``_Start`` takes from ``way``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Way) -> Tensor:
        ctx.way = way
        way.finish()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.way.start(grads[0], back=True)
        return grads[0], None


class _Sorted(torch.autograd.Function):
    """``rows``, ``times`` of each, in ``order``. Gradients of a row are added in the order of ``rows``, which no slices
    change; ``again`` is the way back from ``order``.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, again: Tensor, times: int) -> Tensor:
        ctx.save_for_backward(again)
        ctx.times = times
        return rows[order // times]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (again,) = ctx.saved_tensors
        return grads[0][again].view(-1, ctx.times, grads[0].shape[-1]).sum(dim=1), None, None, None


class DividedExperts:
    """The forward of one layer, of which this rank has as many experts as ``module.num_experts`` says.

    Args:
        group: of the ranks that have all experts together, in the order of experts.
        slices: at most as many as this rank has experts.
    """

    def __init__(self, module: nn.Module, group: Any, slices: int) -> None:
        self._module, self._group, self._degree = module, group, dist.get_world_size(group)
        self._local: int = module.num_experts  # type: ignore[assignment]
        ends = [self._local * number // slices for number in range(slices + 1)]
        self._slices = list(pairwise(ends))
        # Where each expert comes in the order of sending: slice by slice, in them rank by rank.
        every = [rank * self._local + at for a, b in self._slices for rank in range(self._degree) for at in range(a, b)]
        self._place = torch.tensor(every).argsort()
        self.routed = torch.zeros(len(every), dtype=torch.int64)  # rows of this rank in training, by expert

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As Hugging Face's forward: rows [T, H], their experts [T, K] and the weights of these [T, K] -> [T, H]."""
        experts = top_k_index.reshape(-1)
        self._place, self.routed = self._place.to(experts.device), self.routed.to(experts.device)
        sent, received = self._counts(experts)
        ways = [
            Way(self._group, *([sum(row[a:b]) for row in counts] for counts in (sent, received)))
            for a, b in self._slices
        ]
        order, again = _sorting(self._place[experts])
        rows = _Sorted.apply(hidden_states, order, again, top_k_index.shape[-1]).split([sum(way.sent) for way in ways])
        per_call = 1 if experts.device.type == "cpu" else self._local  # experts in one call
        sizes = [min(per_call, b - at) for a, b in self._slices for at in range(a, b, per_call)]
        parts = list(zip(*(param.split(sizes) for param in self._module.parameters(recurse=False)), strict=True))
        arriving, returning = _Start.apply(rows[0], ways[0], None), []
        for number, (a, b) in enumerate(self._slices):
            following = _Start.apply(rows[number + 1], ways[number + 1], None) if number + 1 < len(ways) else None
            arrived = _Finish.apply(arriving, ways[number])
            calls, parts = parts[: -(-(b - a) // per_call)], parts[-(-(b - a) // per_call) :]
            products = self._products(arrived, [row[a:b] for row in received], calls)
            back = Way(self._group, ways[number].received, ways[number].sent)
            returning.append((_Start.apply(products, back, arrived), back))
            arriving = following
        results = torch.cat([_Finish.apply(products, back) for products, back in returning])
        weighted: Tensor = results[again].view(*top_k_index.shape, -1) * top_k_weights.unsqueeze(-1)
        return weighted.sum(dim=-2).to(hidden_states.dtype)

    def _counts(self, experts: Tensor) -> tuple[list[list[int]], list[list[int]]]:
        """How many rows this rank sends for each expert of each rank, and how many it gets from each for its own."""
        sent = torch.zeros_like(self.routed).index_add_(0, experts, torch.ones_like(experts))  # bincount would wait
        if self._module.training:
            self.routed += sent
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        counts: list[Any] = torch.stack([sent, received]).view(2, self._degree, self._local).tolist()
        return counts[0], counts[1]

    def _products(self, rows: Tensor, counts: list[list[int]], calls: list[tuple[Tensor, ...]]) -> Tensor:
        """What Hugging Face's class makes of ``rows``: of each rank ``counts`` for each expert. ``calls``: weights."""
        numbers = torch.arange(len(counts[0]), device=rows.device).repeat(self._degree)
        times = torch.tensor(counts, device=rows.device).view(-1)
        experts = torch.repeat_interleave(numbers, times, output_size=len(rows))
        order, again = _sorting(experts)
        experts, of_expert = experts[order].unsqueeze(-1), [sum(column) for column in zip(*counts, strict=True)]
        sizes = [sum(of_expert[at : at + len(calls[0][0])]) for at in range(0, len(of_expert), len(calls[0][0]))]
        products = []
        for weights, mine, choice in zip(
            calls, _Sorted.apply(rows, order, again, 1).split(sizes), experts.split(sizes), strict=True
        ):
            few: Any = copy.copy(self._module)
            del few.__dict__["forward"]
            few._parameters = dict(zip(few._parameters, weights, strict=True))
            few.num_experts = len(weights[0])
            products.append(few(mine, choice % few.num_experts, torch.ones_like(choice, dtype=rows.dtype)))
        in_order: Tensor = _Sorted.apply(torch.cat(products), again, order, 1)
        return in_order


def _sorting(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The order of ``keys``, of equal ones as they come, and the way back from it."""
    order = keys.argsort(stable=True)
    return order, torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
