"""Moments in fewer bits without an engine: of one parameter, by the codec alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from deepstow.strategies.core.formats import FORMATS, expanded_bytes
from deepstow.strategies.core.layout import Site, needs
from deepstow.strategies.engine.buckets.bucket_state import moments_of
from deepstow.strategies.engine.memory.pieces import Chunk
from deepstow.strategies.engine.updating.moments import Moments
from tests.helpers.engine import adamw
from tests.helpers.layouts import bucket, layout


class OneParameter:
    """The two moments of parameter ``name`` of ``size`` elements, at rest as ``kind``, and its master, if it rounds."""

    def __init__(self, kind: str, name: str, size: int, *, rounds: bool = False) -> None:
        spec = bucket("alone", "layers.0", size, site=Site.HOST, params=(name,))
        where = layout(spec, moments_as=kind)
        room = torch.zeros(expanded_bytes(kind, 2, where.trained_spans, masters=rounds) // 4)
        arena: Any = SimpleNamespace(of=lambda *_: room)
        self.moments = Moments(where, arena)
        memory = {each.item: torch.zeros(each.num_bytes, dtype=torch.uint8) for each in needs(spec, where)}
        resting: Any = SimpleNamespace(of=lambda _, item, dtype: memory[item].view(dtype))
        moments, scales = moments_of(spec, where, resting)
        starts = tuple(accumulate(map(FORMATS[kind].blocks, spec.sizes), initial=0))
        self.bucket: Any = SimpleNamespace(spec=spec, moments=moments, scales=scales, first_blocks=starts)
        step = self.moments.chunk
        self._chunks = [Chunk(0, at, min(size, at + step), at + step >= size) for at in range(0, size, step)]

    def put(self, values: Sequence[Tensor], count: int = 1) -> None:
        """Compress ``values`` as after update number ``count``."""
        for chunk in self._chunks:
            found = self.moments.expand(self.bucket, [chunk])
            for views, value in zip(found, values, strict=True):
                views[0].copy_(value.reshape(-1)[chunk.start : chunk.stop])
            self.moments.compress(self.bucket, [chunk], found, [count])

    def round(self, value: Tensor, count: int = 1) -> Tensor:
        """A master of bf16 numbers that update number ``count`` has made ``value`` of."""
        found = torch.empty(value.numel(), dtype=torch.bfloat16)
        for chunk in self._chunks:
            at_rest = [found[chunk.start : chunk.stop]]
            views = self.moments.expand_masters(at_rest)
            views[0].copy_(value.reshape(-1)[chunk.start : chunk.stop])
            self.moments.round_masters(self.bucket, [chunk], views, at_rest, [torch.tensor(count)])
        return found.view(value.shape)

    def get(self) -> list[Tensor]:
        parts = [[views[0].clone() for views in self.moments.expand(self.bucket, [chunk])] for chunk in self._chunks]
        return [torch.cat(some) for some in zip(*parts, strict=True)]


def rounding_adamw(
    kind: str, names: Sequence[str], groups: Iterable[dict[str, Any]], *, rounds: bool = False
) -> torch.optim.AdamW:
    """Torch's AdamW, whose moments are compressed and expanded after each step, and whose parameters are rounded to
    bf16, if so wished; ``names`` of its parameters.
    """
    made = adamw(groups)
    params = [param for group in made.param_groups for param in group["params"]]
    named = zip(params, names, strict=True)
    at_rest = {param: OneParameter(kind, name, param.numel(), rounds=rounds) for param, name in named}

    def compress(*_: Any) -> None:
        for param, one in at_rest.items():
            state = made.state[param]
            one.put([state["exp_avg"], state["exp_avg_sq"]], int(state["step"]))
            for key, value in zip(("exp_avg", "exp_avg_sq"), one.get(), strict=True):
                state[key].copy_(value.view(param.shape))
            if rounds:
                param.data.copy_(one.round(param.detach(), int(state["step"])))

    made.register_step_post_hook(compress)
    return made
