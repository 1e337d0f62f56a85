"""``optimizer.state``, as torch's optimizers have it: a mapping from each parameter that was updated to its state.

The tensors are views of the arenas: writing to one changes the next update. To delete a parameter is to reset its
state, as if it had never been updated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Protocol

from torch import Tensor, nn

from strategies.engine.engine import Engine
from strategies.engine.saving.state_dict import StateAccess


class Stowed(Protocol):
    """What saving needs of a ``StowOptimizer``."""

    param_groups: list[dict[str, Any]]
    engine: Engine
    access: StateAccess

    @property
    def is_shared(self) -> bool: ...

    @property
    def shares_weights(self) -> bool: ...

    def drain(self) -> None: ...

    def zero_grad(self) -> None: ...

    def state_of(self, param: nn.Parameter) -> dict[str, Tensor]: ...


class State(MutableMapping[nn.Parameter, dict[str, Tensor]]):
    """State by parameter and torch's names. A parameter that was never updated has an empty dict and is not listed."""

    def __init__(self, optimizer: Stowed) -> None:
        self._optimizer = optimizer

    def __getitem__(self, param: nn.Parameter) -> dict[str, Tensor]:
        state = self._optimizer.state_of(param)
        return state if state["step"] > 0 else {}

    def __setitem__(self, param: nn.Parameter, state: Mapping[str, Any]) -> None:
        del self[param]
        self._optimizer.access.set_state(param, state)

    def __delitem__(self, param: nn.Parameter) -> None:
        self._optimizer.drain()
        self._optimizer.access.forget_state(param)

    def __iter__(self) -> Iterator[nn.Parameter]:
        for group in self._optimizer.param_groups:
            yield from (param for param in group["params"] if self[param])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, param: object) -> bool:
        return any(param is other for other in self)
