"""Where weights are used: the modules at whose borders buckets come and go, and in what order they are visited.

A scope is a block (``blocks.py``) or, outside of blocks, a module that owns parameters.
Hooks stand at the borders of scopes only.

[Note: order of sums] A hook that puts an autograd node inside a block changes the order in which gradient contributions
are added, and the last bits differ. Ours puts none anywhere: it is attached to the node that made the scope's output.

[Note: order of backward] Autograd runs the ready node that was made last, and every node waits only for nodes that
were made later. So nodes run in the reverse of the order in which they were made: when a node of a scope runs, all
scopes that were entered later are over, and no scope that was entered earlier has begun. Two kinds of tensor in a
scope's output say nothing about that scope: those that were made before it and are handed on (T5's position bias),
which is why only nodes made inside are hooked, and those that the loss does not use. A node that was made after the
output, or where no output can be hooked, runs unannounced. Weights whose gradients have all landed are not read again.

[Note: unannounced nodes] Whatever runs, it reads right weights or raises (``bucket_state.py``, Note: versions). That it
reads right weights is what the guard is for (``guard.py``), which costs time in every forward. So it stands around a
scope until a step in which the scope had a node of its output that was made last, so that all others run after it, and
no unannounced read. A scope that has ever been otherwise keeps it. It stands in any case where others have hooks on
what is saved, since these switch off torch's own check. Whether it stands changes at ``step`` only: a checkpoint must
find in backward what it found in forward.

Recomputation runs a scope's forward inside its backward, and may stop in the middle, so that the end of that forward is
never seen; a forward that raised has no end either. Therefore a scope is left when another one is entered that is not
inside it, in whichever direction, and nowhere else is it taken for left. Recomputation of several blocks begins in the
backward of the last of them, which is left by that and entered again before its backward goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn

from strategies.engine.blocks import find_blocks
from strategies.engine.bucket_state import BucketState
from strategies.engine.checkpointing import checkpointed
from strategies.engine.tensors.guard import DOUBLE, guard, hooked, refuse_transforms
from strategies.engine.tensors.nested import tensors_in

Handle = torch.utils.hooks.RemovableHandle
logger = logging.getLogger(__name__)


class Seen(Enum):
    """What has been seen of a scope's nodes; see [Note: unannounced nodes]."""

    NOTHING = "it has not run with gradients"
    ANNOUNCED = "all of them run after a border, each time"
    UNANNOUNCED = "some ran without, or may have"


@dataclass(slots=True, eq=False)
class Scope:
    """A module, the buckets that it uses, and the scopes it lies in."""

    name: str
    module: nn.Module
    held: list[BucketState]
    outer: frozenset[str] = field(default_factory=frozenset)
    is_block: bool = True
    seen: Seen = Seen.NOTHING
    guarded: bool = True

    @property
    def saves_weights(self) -> bool:
        """Whether its backward reads weights. A table of embeddings is read by forward alone."""
        return not isinstance(self.module, nn.Embedding)

    def contains(self, other: Scope) -> bool:
        return self is other or self.name in other.outer


def find_scopes(model: nn.Module, held_of: dict[int, BucketState]) -> list[Scope]:
    """All scopes of ``model`` in order of registration; ``held_of`` maps the id of a parameter to its bucket."""
    found_blocks = set(find_blocks(model).values())
    blocks = {name for name, module in model.named_modules() if module in found_blocks}  # by their first names
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


@dataclass(frozen=True, slots=True)
class Call:
    """A forward of a scope that is running: the first autograd node that will be made in it, and its guard."""

    scope: Scope
    first_node: int
    guard: AbstractContextManager[Any] | None


class ModuleHooks:
    """Hooks the borders of all scopes and tells the engine what happens there.

    Args:
        enter_forward, enter_backward: called when a scope's weights are needed.
        left: called with buckets; what was launched so far includes every use of them for now, but by open scopes.
        bring: called with a bucket that a node of backward reads unannounced.
        debug: guards stand around all scopes.
    """

    def __init__(
        self,
        scopes: list[Scope],
        enter_forward: Callable[[Scope], None],
        enter_backward: Callable[[Scope], None],
        left: Callable[[Iterable[BucketState]], None],
        bring: Callable[[BucketState], None],
        *,
        debug: bool,
    ) -> None:
        self._enter_forward, self._enter_backward, self._left, self._bring = enter_forward, enter_backward, left, bring
        self._scopes, self._debug = scopes, debug
        self._calls: list[Call] = []
        self._in_forward: list[Scope] = []
        self._in_backward: list[Scope] = []
        self._partly: Scope | None = None  # open in backward because of an unannounced read, not entered
        self._over: list[Scope] = []  # left by an unannounced read, whose node may have read their weights, too
        self._backward = False  # backward has begun
        self._node = -1  # whose number a hook has said last

    def attach(self) -> list[Handle]:
        handles: list[Handle] = []
        for scope in self._scopes:
            handles.append(scope.module.register_forward_pre_hook(partial(self._before, scope)))
            handles.append(scope.module.register_forward_hook(partial(self._after, scope), always_call=True))
            own = checkpointed(scope.module)
            if own is not None:
                own.around = partial(self._run_again, scope)
        return handles

    def forget_calls(self) -> None:
        """No forward runs. One that a KeyboardInterrupt ended has not left its guard."""
        while self._calls:
            call = self._calls.pop()
            if call.guard is not None:
                call.guard.__exit__(None, None, None)

    def detach(self) -> None:
        """Undo what handles do not."""
        self.forget_calls()
        for scope in self._scopes:
            own = checkpointed(scope.module)
            if own is not None:
                own.around = nullcontext

    @property
    def recomputing(self) -> bool:
        """Whether a forward now would be part of a backward."""
        return self._backward

    def joins(self, held: BucketState) -> None:
        """The scope whose forward runs, if one does, uses this bucket, too."""
        scope = self._in_forward[-1] if self._in_forward and not self._backward else None
        if scope is not None and held not in scope.held:
            scope.held.append(held)
            held.open += self._in_forward.count(scope)

    def choose_guards(self) -> None:
        """At a step: from now on, guards stand where what has been seen asks for them."""
        for scope in self._scopes:
            scope.guarded = self._debug or scope.seen is not Seen.ANNOUNCED

    def close_all(self) -> None:
        """Forward and backward are over, regularly or by an error."""
        self._leave_again()
        self._close(self._in_forward, None)
        self._close(self._in_backward, None)
        self._backward, self._partly, self._node = False, None, -1

    def _before(self, scope: Scope, module: nn.Module, inputs: Any) -> None:
        self._leave_again()
        self._close(self._in_forward, scope)
        self._close(self._in_backward, scope)
        self._open(self._in_forward, scope)
        self._calls.append(Call(scope, torch._C._autograd._get_sequence_nr(), self._guarded(scope)))
        self._enter_forward(scope)
        if not torch.is_grad_enabled():
            for held in scope.held:
                held.show_plainly()

    def _guarded(self, scope: Scope) -> AbstractContextManager[Any] | None:
        if not (torch.is_grad_enabled() and scope.saves_weights and (scope.guarded or hooked())):
            return None
        travelling = [held for held in scope.held if not held.bucket.resident]
        if not travelling:
            return None
        refuse_transforms()
        hooks = guard(travelling, partial(self._unannounced, scope))
        hooks.__enter__()
        return hooks

    def _after(self, scope: Scope, module: nn.Module, inputs: Any, output: Any) -> None:
        if not self._calls or self._calls[-1].scope is not scope:
            return  # somebody's hook has raised before ours
        call = self._calls.pop()
        if call.guard is not None:
            call.guard.__exit__(None, None, None)
        if output is None:
            return  # an error, perhaps; see above
        self._close(self._in_forward, scope)
        if scope in self._in_forward:
            self._in_forward.remove(scope)
            self._shut(scope)
        if torch.is_grad_enabled() and scope.saves_weights:
            made = {tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None}
            inside = {node: number for node in made if (number := node._sequence_nr()) >= call.first_node}
            for node, number in inside.items():
                node.register_prehook(partial(self._before_backward, scope, number))
            self._look(scope, max(inside.values(), default=call.first_node - 1))

    def _look(self, scope: Scope, announced: int) -> None:
        """The newest node of its output has this number; has it made any after that?"""
        if torch._C._autograd._get_sequence_nr() - 1 > announced:
            if not scope.guarded:
                logger.warning(
                    "%s made a node of backward after its output, for the first time: if backward raises now that a "
                    "parameter was modified in place, train with strategies.buffers.debug: true",
                    scope.name,
                )
            scope.seen = Seen.UNANNOUNCED
        elif scope.seen is Seen.NOTHING:
            scope.seen = Seen.ANNOUNCED

    def _before_backward(self, scope: Scope, number: int, grads: Any) -> None:
        if torch.is_grad_enabled() and not all(held.bucket.resident for held in scope.held):
            raise RuntimeError(DOUBLE)
        self._leave_again()
        same, self._node = number == self._node, number
        if self._in_backward and self._in_backward[-1] is scope and self._partly is not scope:
            return  # another output of it
        if same and self._in_backward and scope.contains(self._in_backward[-1]):
            # A block's output that its surroundings hand on: the block, which was told first, is not over.
            if scope in self._in_backward:
                return
            place = next(place for place, other in enumerate(self._in_backward) if scope.contains(other))
            self._open(self._in_backward, scope, place)
        elif self._partly is not scope:
            self._turn_to(scope)
        self._partly = None
        self._enter_backward(scope)

    @contextmanager
    def _run_again(self, scope: Scope) -> Iterator[None]:
        """Around the forward of a checkpointed block, the first time inside its borders, later wherever it begins."""
        replays = self._backward or scope not in self._in_forward  # a backward may begin with a replay
        if replays and (scope not in self._in_backward or scope is self._partly):
            self._unannounced(scope, *scope.held)
        hooks = self._guarded(scope)
        try:
            yield
        finally:
            if hooks is not None:
                hooks.__exit__(None, None, None)

    def _unannounced(self, scope: Scope, *several: BucketState) -> None:
        """A node of ``scope`` reads buckets in backward that are not there for it.

        Scopes that do not contain this one are over, but for this very node, which may have read their weights before.
        So they are left once more when it is done; until then nobody but ``several`` takes an address, and what one
        node reads was present together in forward: it does not overlap.
        """
        scope.seen = Seen.UNANNOUNCED
        self._leave_again()
        if not (self._in_backward and self._in_backward[-1] is scope):
            opened = (*self._in_forward, *self._in_backward)
            self._over = [other for other in opened if not other.contains(scope)]
            self._turn_to(scope)
            self._partly = scope
        for held in several:
            self._bring(held)

    def _turn_to(self, scope: Scope) -> None:
        if self._backward:
            self._close(self._in_forward, scope)  # what was recomputed
        self._close(self._in_backward, scope)
        self._backward = True
        self._open(self._in_backward, scope)

    def _open(self, opened: list[Scope], scope: Scope, place: int | None = None) -> None:
        opened.insert(len(opened) if place is None else place, scope)
        for held in scope.held:
            held.open += 1

    def _shut(self, scope: Scope) -> None:
        if scope is self._partly:
            self._partly = None
        for held in scope.held:
            held.open -= 1
        self._left(scope.held)

    def _leave_again(self) -> None:
        for scope in self._over:
            self._left(scope.held)
        self._over.clear()

    def _close(self, opened: list[Scope], entered: Scope | None) -> None:
        """Leave every scope that does not contain ``entered``."""
        while opened and (entered is None or not opened[-1].contains(entered)):
            self._shut(opened.pop())
