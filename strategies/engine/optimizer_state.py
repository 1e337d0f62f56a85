"""``optimizer.state``, as torch's optimizers have it: what is kept of each parameter that was updated.

The tensors are those in the arenas. To write to one changes the next update; to take a parameter out is to forget what
is known of it, as if it had never been updated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from strategies.engine.optimizer import StowOptimizer
    from strategies.engine.state_dict import Surface


class State(MutableMapping[nn.Parameter, dict[str, Tensor]]):
    """By parameter, by torch's names. One that was never updated has an empty dict, and is not listed."""

    def __init__(self, optimizer: StowOptimizer, surface: Surface) -> None:
        self._optimizer, self._surface = optimizer, surface

    def __getitem__(self, param: nn.Parameter) -> dict[str, Tensor]:
        state = self._optimizer.state_of(param)
        return state if state["step"] > 0 else {}

    def __setitem__(self, param: nn.Parameter, state: Mapping[str, Any]) -> None:
        del self[param]
        self._surface.set_state(param, state)

    def __delitem__(self, param: nn.Parameter) -> None:
        self._optimizer.drain()
        self._surface.forget_state(param)

    def __iter__(self) -> Iterator[nn.Parameter]:
        for group in self._optimizer.param_groups:
            yield from (param for param in group["params"] if self[param])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, param: object) -> bool:
        return any(param is other for other in self)
