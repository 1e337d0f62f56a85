"""Where weights are used: the modules at whose borders buckets come and go, and in what order they are visited.

A scope is a block (a child of an outermost ``nn.ModuleList``) or, outside of blocks, a module that owns parameters.
Hooks stand at the borders of scopes only.

[Note: order of sums] A hook that puts an autograd node inside a block changes the order in which gradient contributions
are added, and the last bits differ. Ours puts none anywhere: it is attached to the node that made the scope's output.

[Note: order of backward] Autograd runs the ready node that was made last. When the node that made the output of block
i - 1 runs, every node made after it has run, all of block i among them: a node made later can only wait for nodes made
later still. So when backward enters a scope, it has left every scope whose forward came later, and nothing will read
their weights again in this pass. Weights whose gradients have all landed are likewise not read again.

Recomputation runs a scope's forward inside its backward, and may stop in the middle, so that the end of that forward is
never seen; a forward that raised has no end either. Therefore a scope is left when another one is entered that is not
inside it, in whichever direction, and nowhere else is it taken for left. Recomputation of several blocks begins in the
backward of the last of them, which is left by that and entered again before its backward goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from strategies.runtime.held import Held

Handle = torch.utils.hooks.RemovableHandle


@dataclass(slots=True, eq=False)
class Scope:
    """A module, the buckets that it uses, and the scopes it lies in."""

    name: str
    module: nn.Module
    held: list[Held]
    outer: frozenset[str] = field(default_factory=frozenset)
    is_block: bool = True

    @property
    def saves_weights(self) -> bool:
        """Whether its backward reads weights. A table of embeddings is read by forward alone."""
        return not isinstance(self.module, nn.Embedding)


def find_scopes(model: nn.Module, held_of: dict[int, Held]) -> list[Scope]:
    """All scopes of ``model`` in order of registration; ``held_of`` maps the id of a parameter to its bucket."""
    blocks = set(block_names(model))
    found: list[Scope] = []
    for name, module in model.named_modules():
        if any(_inside(name, block) for block in blocks):
            continue
        owned = module.parameters(recurse=name in blocks)
        held = list({held_of[id(param)].index: held_of[id(param)] for param in owned}.values())
        if held:
            outer = frozenset(scope.name for scope in found if _inside(name, scope.name))
            found.append(Scope(name, module, held, outer, name in blocks))
    return found


def block_names(model: nn.Module) -> Iterator[str]:
    """Names of the children of outermost module lists."""
    lists: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(_inside(name, other) for other in lists):
            lists.append(name)
            yield from (f"{name}.{child}" if name else child for child, _ in module.named_children())


def _inside(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(outer + "."))


@dataclass(frozen=True, slots=True)
class Visit:
    """A scope that will be entered in so many steps, in forward or in backward."""

    scope: Scope
    steps: int
    back: bool


class Itinerary:
    """Which scope comes next. A guess from the last forward; where it is wrong, weights come later, never wrong."""

    def __init__(self, scopes: list[Scope]) -> None:
        self._order = list(scopes)
        self._seen: list[Scope] = []
        self._at = -1

    def begin(self) -> None:
        """A forward begins; the last one, if there was any, shows the order."""
        if self._seen:
            self._order = self._seen
        self._seen, self._at = [], -1

    def forward(self, scope: Scope) -> None:
        self._seen.append(scope)
        later = [i for i in range(self._at + 1, len(self._order)) if self._order[i] is scope]
        self._at = later[0] if later else self._at

    def backward(self, scope: Scope) -> None:
        if self._seen:
            self._order, self._seen, self._at = self._seen, [], len(self._seen)
        earlier = [i for i in range(min(self._at, len(self._order)) - 1, -1, -1) if self._order[i] is scope]
        self._at = earlier[0] if earlier else self._at

    def ahead_in_forward(self) -> Iterator[Visit]:
        """From here to the end of forward, then back as backward will go."""
        later = list(_visits(self._order[self._at + 1 :], self._here))
        yield from later
        if torch.is_grad_enabled():
            yield from _visits(self._order[::-1], None, 1 + (later[-1].steps if later else 0), back=True)

    def ahead_in_backward(self) -> Iterator[Visit]:
        yield from _visits(self._order[: max(self._at, 0)][::-1], self._here, back=True)

    def from_start(self) -> Iterator[Visit]:
        yield from _visits(self._order, None)

    @property
    def _here(self) -> Scope | None:
        return self._order[self._at] if 0 <= self._at < len(self._order) else None


def _visits(scopes: Iterable[Scope], here: Scope | None, steps: int = 0, *, back: bool = False) -> Iterator[Visit]:
    """What comes, and in how many steps; scopes outside of blocks that follow each other are one step."""
    for scope in scopes:
        steps += here is not None and (here.is_block or scope.is_block)
        here = scope
        yield Visit(scope, steps, back)


class Borders:
    """Hooks the borders of all scopes and tells the engine what happens there.

    Args:
        enter_forward, enter_backward: called when a scope's weights are needed.
        left: called when what was launched so far includes every use of a scope's weights for now.
    """

    def __init__(
        self,
        scopes: list[Scope],
        enter_forward: Callable[[Scope], None],
        enter_backward: Callable[[Scope], None],
        left: Callable[[Scope], None],
    ) -> None:
        self._enter_forward, self._enter_backward, self._left = enter_forward, enter_backward, left
        self._scopes = scopes
        self._in_forward: list[Scope] = []
        self._in_backward: list[Scope] = []
        self._backward = False  # backward has begun

    def attach(self) -> list[Handle]:
        handles: list[Handle] = []
        for scope in self._scopes:
            handles.append(scope.module.register_forward_pre_hook(partial(self._before, scope)))
            handles.append(scope.module.register_forward_hook(partial(self._after, scope)))
        return handles

    @property
    def recomputing(self) -> bool:
        """Whether a forward now would be part of a backward."""
        return self._backward

    def pinned(self, held: Held) -> bool:
        """Whether a scope that is open uses the bucket."""
        return any(held in scope.held for scope in (*self._in_forward, *self._in_backward))

    def close_all(self) -> None:
        """Forward and backward are over, regularly or by an error."""
        self._close(self._in_forward, None)
        self._close(self._in_backward, None)
        self._backward = False

    def _before(self, scope: Scope, module: nn.Module, inputs: Any) -> None:
        self._close(self._in_forward, scope)
        self._close(self._in_backward, scope)
        self._in_forward.append(scope)
        self._enter_forward(scope)

    def _after(self, scope: Scope, module: nn.Module, inputs: Any, output: Any) -> None:
        self._close(self._in_forward, scope)
        if scope in self._in_forward:
            self._in_forward.remove(scope)
            self._left(scope)
        if torch.is_grad_enabled() and scope.saves_weights:
            for node in {tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None}:
                node.register_prehook(partial(self._before_backward, scope))

    def _before_backward(self, scope: Scope, grads: Any) -> None:
        if self._in_backward and self._in_backward[-1] is scope:
            return  # another output of it
        if self._backward:
            self._close(self._in_forward, scope)  # what was recomputed
        self._close(self._in_backward, scope)
        self._backward = True
        self._in_backward.append(scope)
        self._enter_backward(scope)

    def _close(self, opened: list[Scope], entered: Scope | None) -> None:
        """Leave every scope that does not contain ``entered``."""
        while opened and (entered is None or (opened[-1].name not in entered.outer and opened[-1] is not entered)):
            self._left(opened.pop())


def tensors_in(output: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists and mappings."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors_in(value)
