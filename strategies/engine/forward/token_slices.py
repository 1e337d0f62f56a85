"""Tokens that are divided over ranks: gathered, and summed so that each rank keeps its slice of the sum.

[tokens, width] is cut into as many equal slices as there are ranks; the last one is filled up with zeros. Ranks are
named by their process group's name, as torch's functional collectives take it, so that all can be counted on fake
tensors without any rank.

A product whose inner dimension is divided is one operator together with its sum: what a recomputed block keeps of it is
the slice, and its replay neither multiplies nor exchanges.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

_c10d = torch.ops._c10d_functional


def gather(part: Tensor, ranks: int, group: str) -> Tensor:
    """[tokens / ranks, width] of each rank -> [tokens, width], with the filling; a collective."""
    return cast(Tensor, _c10d.wait_tensor(_c10d.all_gather_into_tensor(part.contiguous(), ranks, group)))


def scatter_sum(whole: Tensor, ranks: int, group: str) -> Tensor:
    """[tokens, width] of each rank -> this rank's slice of their sum; a collective."""
    whole = filled(whole, ranks).contiguous()
    return cast(Tensor, _c10d.wait_tensor(_c10d.reduce_scatter_tensor(whole, "sum", ranks, group)))


def filled(whole: Tensor, ranks: int) -> Tensor:
    """``whole`` with zeros behind its last token, if ``ranks`` do not divide their number."""
    more = -len(whole) % ranks
    return pad(whole, (0, 0, 0, more)) if more else whole


@torch.library.custom_op("deepstow::scattered_product", mutates_args=())
def scattered_product(inputs: Tensor, weight: Tensor, ranks: int, group: str) -> Tensor:
    """This rank's slice of the sum of all ranks' products; a collective. [tokens, inner], [width, inner]."""
    return scatter_sum(inputs @ weight.t(), ranks, group)


@scattered_product.register_fake
def _(inputs: Tensor, weight: Tensor, ranks: int, group: str) -> Tensor:
    return inputs.new_empty(-(-len(inputs) // ranks), len(weight))


PRODUCT = torch.ops.deepstow.scattered_product
