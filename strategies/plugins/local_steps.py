"""Local steps, DiLoCo (Douillard et al., 2023): ranks train alone, and exchange what they have learned now and then.

Each rank has weights and an inner optimizer of its own. After every H steps the differences between the last outer
weights and those of each rank are averaged over ranks, by the exchange of ``compress``, and given as a gradient to SGD
with Nesterov momentum, the outer optimizer, on the host. All ranks go on from the weights that it makes.

Invariant. After an outer step all ranks have the same bits of weights, outer weights and momentum. Between two of them
the model is its outer weights: those are evaluated, saved as the model, and exported. A checkpoint also has each rank's
own weights, inner state and what it owes, so a run goes on from any step with the same bits.

The memory engine trains each rank's copy as if there were one rank; its exact weights (masters, where it has them) are
read and written where they rest, parameter by parameter (``_Stowed``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepstow.strategies.core.facts import Compression
from deepstow.strategies.engine.optimizer import StowOptimizer
from deepstow.strategies.planner.engine_bytes import MESSAGE_BYTES
from deepstow.strategies.plugins.compressed import SENT, Compressed, average, codec_of
from deepstow.strategies.state.saved_state import MASTER


def exchange_of(how: Compression | None) -> Compressed | None:
    """What exchanges gradients, or differences of weights, in place of plain data parallelism. A collective."""
    return None if how is None else LocalSteps(how) if how.local_steps else Compressed(how)


class _Plain:
    """The exact weights and the inner state of trained parameters, by name: torch's."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._params = params

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def settle(self) -> None:
        """Before weights are read."""

    def weight(self, name: str) -> Tensor:
        return self._params[name].detach()

    def write(self, name: str, value: Tensor) -> None:
        self._params[name].copy_(value)

    def state(self, name: str) -> dict[str, Tensor]:
        inner = self._optimizer.state[self._params[name]]
        return {key: value for key, value in inner.items() if isinstance(value, Tensor)}

    def write_state(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        for key, tensor in self.state(name).items():
            tensor.copy_(tensors[key])


class _Stowed(_Plain):
    """The same of a model in the memory engine, wherever it rests."""

    _optimizer: StowOptimizer

    def settle(self) -> None:
        self._optimizer.drain()

    def weight(self, name: str) -> Tensor:
        access, param = self._optimizer.access, self._params[name]
        master = access.state_of(param).get(MASTER)
        return access.newest_of(param).detach() if master is None else master

    def write(self, name: str, value: Tensor) -> None:
        self._optimizer.access.set_state(self._params[name], {MASTER: value})

    def state(self, name: str) -> dict[str, Tensor]:
        state = self._optimizer.access.state_of(self._params[name])
        return {key: value for key, value in state.items() if key != MASTER}

    def write_state(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self._optimizer.access.set_state(self._params[name], tensors)


def _batches(params: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours that are exchanged together: as torch's buckets, a message has about ``MESSAGE_BYTES``."""
    batch: list[Tensor] = []
    for param in params:
        batch.append(param)
        if sum(tensor.numel() for tensor in batch) * 4 >= MESSAGE_BYTES:
            yield batch
            batch = []
    yield from [batch] if batch else []


class LocalSteps(Compressed):
    """How the ranks of the default group learn from each other; a collective."""

    afresh = "ranks go on from the outer weights"

    @torch.no_grad()
    def follow(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self._inner = (_Stowed if isinstance(optimizer, StowOptimizer) else _Plain)(optimizer, params)
        self._found: Mapping[str, Tensor] = {}
        self._inner.settle()
        for name in self._inner:
            value = self._inner.weight(name).contiguous()
            dist.broadcast(value, 0, self._group)
            self._inner.write(name, value)
        self._outer = {name: self._inner.weight(name).to("cpu", copy=True) for name in self._inner}
        self._momenta = {name: torch.zeros_like(outer) for name, outer in self._outer.items()}
        self._codec = codec_of(self.compression, params.items(), self._group)
        optimizer.register_step_post_hook(self._step)

    def norm_of_all(self, norm: Tensor) -> Tensor:
        """The mean over ranks, since each has clipped its own gradients, so that all see what is not finite."""
        dist.all_reduce(norm.div_(self._group.size()), group=self._group)
        return norm

    @torch.no_grad()
    def _step(self, *_: Any) -> None:
        self._steps += 1
        if self._since:
            return
        self._inner.settle()
        names = {id(outer): name for name, outer in self._outer.items()}
        for batch in _batches(self._outer.values()):
            weights = {names[id(outer)]: self._inner.weight(names[id(outer)]) for outer in batch}
            differences = [self._outer[name].to(weight.device) - weight for name, weight in weights.items()]
            self._average([*weights], differences)
            for name, difference in zip(weights, differences, strict=True):
                rate = self.compression.outer_lr
                keeps = self.compression.outer_momentum
                gradient = difference.cpu()
                momentum = self._momenta[name].mul_(keeps).add_(gradient)
                self._inner.write(name, self._outer[name].sub_(gradient.add_(momentum, alpha=keeps), alpha=rate))

    def _average(self, names: list[str], differences: list[Tensor]) -> None:
        if self._codec is not None:
            self._codec.exchange(names, differences)
        else:
            average(differences, SENT[self.compression.method], self._group)

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
        if not self._since:
            return
        self._inner.settle()
        for name, outer in self._outer.items():
            inner_weight = self._inner.weight(name).to("cpu", copy=True)
            self._inner.write(name, outer)
            outer.copy_(inner_weight)

    @torch.no_grad()
    def finish(self) -> str:
        self._inner.settle()
        for name, outer in self._outer.items():
            self._inner.write(name, outer)
        return f"the last {self._since} steps, since the last outer step, are not in the model" if self._since else ""

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._codec.state.items() if self._codec is not None else ()
        self._inner.settle()
        for name in self._inner:
            yield from ((f"{name}.momentum", self._momenta[name]), (f"{name}.weight", self._inner.weight(name)))
            yield from ((f"{name}.inner.{key}", value) for key, value in self._inner.state(name).items())

    def _fill(self, tensors: Mapping[str, Tensor], numbers: dict[str, Any]) -> None:
        """Weights and the inner state wait for ``resumed``."""
        targets = {f"{name}.momentum": tensor for name, tensor in self._momenta.items()}
        targets |= self._codec.state if self._codec is not None else {}
        weights = {f"{name}.weight": outer for name, outer in self._outer.items()}
        if any(tensors[name].shape != tensor.shape for name, tensor in (targets | weights).items()):
            raise ValueError
        for name, tensor in targets.items():
            tensor.copy_(tensors[name])
        self._found, self._steps = tensors, int(numbers["steps"])

    @torch.no_grad()
    def resumed(self) -> None:
        self._inner.settle()
        for name in self._inner:
            self._outer[name].copy_(self._inner.weight(name))
            if self._found:
                self._inner.write(name, self._found[f"{name}.weight"])
                state = {key: self._found[f"{name}.inner.{key}"] for key in self._inner.state(name)}
                self._inner.write_state(name, state)
        if not self._found:
            self._steps = 0  # none since these outer weights
        self._found = {}
