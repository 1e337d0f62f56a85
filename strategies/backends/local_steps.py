"""Local steps, DiLoCo (Douillard et al., 2023): ranks train alone, and exchange what they have learned now and then.

Each rank has weights and an inner optimizer of its own. After every H steps the differences between the last outer
weights and those of each rank are averaged over ranks, by the exchange of ``compress``, and given as a gradient to SGD
with Nesterov momentum, the outer optimizer, on the host. All ranks go on from the weights that it makes.

Invariant. After an outer step all ranks have the same bits of weights, outer weights and momentum. Between two of them
the model is its outer weights: those are evaluated, saved as the model, and exported. A checkpoint also has each rank's
own weights, inner state and what it owes, so a run goes on from any step with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strategies.backends.compressed import Compressed, codec_of
from strategies.backends.onebit_adam import batches
from strategies.core.compression import Compression

SENT = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def exchange_of(how: Compression | None) -> Compressed | None:
    """What exchanges gradients, or differences of weights, in place of plain data parallelism. A collective."""
    return None if how is None else LocalSteps(how) if how.local_steps else Compressed(how)


class LocalSteps(Compressed):
    """How the ranks of the default group learn from each other; a collective."""

    afresh, _own_gradients = "ranks go on from the outer weights", True

    def follow(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self._inner, self._found = optimizer, dict[str, Tensor]()
        self._params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self._names = {id(param): name for name, param in self._params.items()}
        for param in self._params.values():
            dist.broadcast(param.detach(), 0, self._group)
        self._outer = {name: param.detach().to("cpu", copy=True) for name, param in self._params.items()}
        self._momenta = {name: torch.zeros_like(outer) for name, outer in self._outer.items()}
        self._codec = codec_of(self.compression, self._params.items(), self._group)
        optimizer.register_step_post_hook(self._step)

    @torch.no_grad()
    def _step(self, *_: Any) -> None:
        self._steps += 1
        for some in batches(self._params.values()) if not self._since else ():
            names = [self._names[id(param)] for param in some]
            differences = [self._outer[name].to(param.device) - param for name, param in zip(names, some, strict=True)]
            self._average(names, differences)
            for name, param, difference in zip(names, some, differences, strict=True):
                rate, keeps, gradient = self.compression.outer_lr, self.compression.outer_momentum, difference.cpu()
                momentum = self._momenta[name].mul_(keeps).add_(gradient)
                param.copy_(self._outer[name].sub_(gradient.add_(momentum, alpha=keeps), alpha=rate))

    def _average(self, names: list[str], differences: list[Tensor]) -> None:
        if self._codec is not None:
            self._codec.exchange(names, differences)
            return
        flat = torch.cat([each.flatten() for each in differences]).to(SENT[self.compression.method])
        dist.all_reduce(flat.div_(self._group.size()), group=self._group)
        for each, part in zip(differences, flat.split([each.numel() for each in differences]), strict=True):
            each.copy_(part.view_as(each))

    @property
    def _since(self) -> int:
        """Steps since the last outer one."""
        return self._steps % self.compression.local_steps

    @contextmanager
    def outer_weights(self) -> Iterator[None]:
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, param in self._params.items() if self._since else ():
            kept = param.detach().to("cpu", copy=True)
            param.copy_(self._outer[name])
            self._outer[name].copy_(kept)

    @torch.no_grad()
    def finish(self) -> str:
        for name, param in self._params.items():
            param.copy_(self._outer[name])
        return f"the last {self._since} steps, since the last outer step, are not in the model" if self._since else ""

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._codec.state.items() if self._codec is not None else ()
        for name, param in self._params.items():
            yield from ((f"{name}.momentum", self._momenta[name]), (f"{name}.weight", param.detach()))
            inner = self._inner.state[param].items()
            yield from ((f"{name}.inner.{key}", each) for key, each in inner if isinstance(each, Tensor))

    def _fill(self, found: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Weights and the inner state wait for ``resumed``."""
        kept = {f"{name}.momentum": each for name, each in self._momenta.items()}
        kept |= self._codec.state if self._codec is not None else {}
        weights = {f"{name}.weight": param for name, param in self._params.items()}
        if any(found[name].shape != each.shape for name, each in (kept | weights).items()):
            raise ValueError
        for name, each in kept.items():
            each.copy_(found.pop(name))
        self._found, self._steps = found, int(numbers["steps"])

    @torch.no_grad()
    def resumed(self) -> None:
        for name, param in self._params.items():
            self._outer[name].copy_(param)
            if self._found:
                param.copy_(self._found[f"{name}.weight"])
                inner = {key: each for key, each in self._inner.state[param].items() if isinstance(each, Tensor)}
                for key, each in inner.items():
                    each.copy_(self._found[f"{name}.inner.{key}"])
        if not self._found:
            self._steps = 0  # none since these outer weights
        self._found = {}
