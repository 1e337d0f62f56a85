"""Hooks on the modules that use weights: they tell the engine when a scope is entered and left.

A scope is a block (``blocks.py``) or, outside of blocks, a module that owns parameters. In forward a module has a hook
before and one after; in backward the node that made its output has one before, and nothing marks the end. No hook adds
an autograd node: one inside a block would change the order in which gradient contributions are added.

[Note: order of backward] Autograd runs nodes in the reverse of the order in which they were made. So when a node of a
scope runs, all scopes that were entered later are finished, and no scope that was entered earlier has begun. Only nodes
made inside are hooked: a tensor that is only passed on (T5's position bias) says nothing about the scope. A node that
was made after the output, or in a scope whose output cannot be hooked or is not used, runs unannounced; then the guard
around each forward (``guard.py``) brings a weight back when the node unpacks it. Weights whose gradients have all
landed are not read again.

Recomputation runs a scope's forward inside its backward and may stop in the middle; a forward that raised has no end
either. A forward that ends leaves its scope. Otherwise a scope is left when another one is entered that is not inside
it, in whichever direction, or when everything is (``close_all``). Several blocks that are recomputed together begin in
the backward of the last of them: entering the first one leaves the last, which is entered again when its turn comes.

This file moves no weight and touches no gradient: it counts who is entered, and calls the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from deepstow.strategies.engine.buckets.bucket_state import BucketState
from deepstow.strategies.engine.forward.blocks import find_blocks
from deepstow.strategies.engine.forward.checkpointing import checkpointed
from deepstow.strategies.engine.tensors.guard import DOUBLE, guard, refuse_transforms
from deepstow.strategies.engine.tensors.nested import tensors_in

Handle = torch.utils.hooks.RemovableHandle
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True, eq=False)
class Scope:
    """A module and the buckets that it uses."""

    name: str
    module: nn.Module
    buckets: list[BucketState]
    is_block: bool = True

    @property
    def saves_weights(self) -> bool:
        """Whether its backward reads weights; that of an embedding that only looks them up does not."""
        return not (isinstance(self.module, nn.Embedding) and all(bucket.spec.looked_up for bucket in self.buckets))

    def contains(self, other: Scope) -> bool:
        return self is other or _inside(other.name, self.name)


def find_scopes(model: nn.Module, bucket_of: Mapping[int, tuple[BucketState, int]]) -> list[Scope]:
    """All scopes of ``model`` in order of registration; ``bucket_of`` has each parameter's bucket by its id."""
    block_modules = set(find_blocks(model).values())
    blocks = {name for name, module in model.named_modules() if module in block_modules}  # by their first names
    scopes: list[Scope] = []
    for name, module in model.named_modules():
        if any(_inside(name, block) for block in blocks):
            continue
        owned = module.parameters(recurse=name in blocks)
        buckets = list(dict.fromkeys(bucket_of[id(param)][0] for param in owned))
        if buckets:
            scopes.append(Scope(name, module, buckets, name in blocks))
    return scopes


def _inside(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(outer + "."))


@dataclass(frozen=True, slots=True)
class Call:
    """A running forward of a scope: the number of the first autograd node made in it, and its guard."""

    scope: Scope
    first_node: int
    guard: AbstractContextManager[Any]


class ModuleHooks:
    """Tells the engine when scopes are entered and left: ``left`` is called with the buckets of a scope that was left,
    which another open scope may still use; ``bring`` with a bucket that a backward node reads unannounced.
    ``records_nodes``: for ``scopes_of_backward``.
    """

    def __init__(
        self,
        scopes: list[Scope],
        enter_forward: Callable[[Scope], None],
        enter_backward: Callable[[Scope], None],
        left: Callable[[Iterable[BucketState]], None],
        bring: Callable[[BucketState], None],
        *,
        records_nodes: bool = False,
    ) -> None:
        self._scopes = scopes
        self._records_nodes = records_nodes
        self._enter_forward = enter_forward
        self._enter_backward = enter_backward
        self._left = left
        self._bring = bring
        self._calls: list[Call] = []
        self._in_forward: list[Scope] = []
        self._in_backward: list[Scope] = []
        self._opened_by_read: Scope | None = None  # open in backward by an unannounced read; its hook has not run
        self._leave_again: list[Scope] = []  # left by an unannounced read, whose node may still read their weights
        self.rounds = False  # several micro-batches take turns (``layers_first.py``), each inside of its scopes
        self.backward = False  # backward has begun: a forward now is recomputation
        self._node = -1  # number of the node whose hook ran last
        self._made: list[tuple[Scope, list[Any]]] = []  # in this forward, the nodes with hooks, until backward begins

    def attach(self) -> list[Handle]:
        handles: list[Handle] = []
        for scope in self._scopes:
            handles.append(scope.module.register_forward_pre_hook(partial(self._before, scope)))
            handles.append(scope.module.register_forward_hook(partial(self._after, scope), always_call=True))
            recomputed = checkpointed(scope.module)
            if recomputed is not None:
                recomputed.around = partial(self._around_checkpointed_forward, scope)
        return handles

    def forget_calls(self) -> None:
        """No forward runs any more. Leave the guards of one that a KeyboardInterrupt ended."""
        while self._calls:
            self._calls.pop().guard.__exit__(None, None, None)

    def detach(self) -> None:
        """Undo what the handles of ``attach`` do not."""
        self.forget_calls()
        for scope in self._scopes:
            recomputed = checkpointed(scope.module)
            if recomputed is not None:
                recomputed.around = nullcontext

    def add_to_running(self, bucket: BucketState) -> None:
        """Add this bucket to the scope whose forward runs, if one does."""
        scope = self._in_forward[-1] if self._in_forward and not self.backward else None
        if scope is not None and bucket not in scope.buckets:
            scope.buckets.append(bucket)
            bucket.enter(self._in_forward.count(scope))

    def scopes_of_backward(self) -> Iterator[Scope]:
        """At the first hook of a backward: the scopes that it will run, as far as they were announced in forward. They
        are forgotten when the first one is taken.
        """
        announced, self._made = self._made, []
        for scope, nodes in announced:
            if any(torch._C._will_engine_execute_node(node) for node in nodes):
                yield scope

    def end_rounds(self) -> None:
        """Each micro-batch has ended, or was interrupted, and its hooks on saved tensors are gone."""
        self.rounds = False
        self._calls.clear()

    def end_head(self) -> None:
        """Backward of one micro-batch's head has ended, in a round, in which other forwards follow."""
        self._leave_pending()
        self._close(self._in_backward, None)
        self.backward = False
        self._opened_by_read = None
        self._node = -1

    def close_all(self) -> None:
        """Forward and backward have ended or were interrupted."""
        self._leave_pending()
        self._close(self._in_forward, None)
        self._close(self._in_backward, None)
        self.backward = False
        self._opened_by_read = None
        self._node = -1
        self._made = []

    def _before(self, scope: Scope, module: nn.Module, inputs: Any) -> None:
        self._leave_pending()
        if not self.rounds:  # others are inside of their scopes
            self._close(self._in_forward, scope)
        self._close(self._in_backward, scope)
        self._open(self._in_forward, scope)
        call = Call(scope, torch._C._autograd._get_sequence_nr(), self._guarded(scope))
        call.guard.__enter__()
        self._calls.append(call)
        self._enter_forward(scope)
        if not torch.is_grad_enabled():
            for bucket in scope.buckets:
                bucket.views.show_for_fused_kernels()

    def _guarded(self, scope: Scope) -> AbstractContextManager[Any]:
        """The guard for a forward of ``scope``, if it saves weights for backward and any of them is not resident."""
        offloaded = [bucket for bucket in scope.buckets if not bucket.spec.resident]
        if not (offloaded and torch.is_grad_enabled() and scope.saves_weights):
            return nullcontext()
        refuse_transforms()
        return guard(offloaded, partial(self._unannounced, scope))

    def _after(self, scope: Scope, module: nn.Module, inputs: Any, output: Any) -> None:
        call = self._end_call(scope)
        if call is None:
            return  # another hook raised before ours
        call.guard.__exit__(None, None, None)
        if output is None:
            return  # it raised, or returned None: nobody can tell, so the next one that is entered leaves it
        if not self.rounds:
            self._close(self._in_forward, scope)
        if scope in self._in_forward:
            self._in_forward.remove(scope)
            self._leave(scope)
        if torch.is_grad_enabled() and scope.saves_weights:
            nodes = {tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None}
            inside = [node for node in nodes if node._sequence_nr() >= call.first_node]
            for node in inside:
                node.register_prehook(partial(self._before_backward, scope, node._sequence_nr()))
            if self._records_nodes and not self.backward:
                self._made.append((scope, inside))

    def _end_call(self, scope: Scope) -> Call | None:
        """The running call of ``scope``, which ends. In rounds other micro-batches may be inside of the same scopes."""
        if self.rounds:
            index = next((i for i in reversed(range(len(self._calls))) if self._calls[i].scope is scope), None)
            return None if index is None else self._calls.pop(index)
        return self._calls.pop() if self._calls and self._calls[-1].scope is scope else None

    def _before_backward(self, scope: Scope, number: int, grads: Any) -> None:
        if torch.is_grad_enabled() and not all(bucket.spec.resident for bucket in scope.buckets):
            raise RuntimeError(DOUBLE)
        self._leave_pending()
        same, self._node = number == self._node, number
        if self._in_backward and self._in_backward[-1] is scope and self._opened_by_read is not scope:
            return  # another output of it
        if same and self._in_backward and scope.contains(self._in_backward[-1]):
            # The node also made the output of a block inside, whose hook ran first: that block has not ended.
            if scope in self._in_backward:
                return
            place = next(place for place, other in enumerate(self._in_backward) if scope.contains(other))
            self._open(self._in_backward, scope, place)
        elif self._opened_by_read is not scope:
            self._open_in_backward(scope)
        self._opened_by_read = None
        self._enter_backward(scope)

    @contextmanager
    def _around_checkpointed_forward(self, scope: Scope) -> Iterator[None]:
        """Around each forward of a checkpointed block: the first one, inside of its module's hooks, and recomputations,
        which have no hooks of their own.
        """
        recomputes = self.backward or scope not in self._in_forward  # backward may begin with recomputation
        if recomputes and (scope not in self._in_backward or scope is self._opened_by_read):
            self._unannounced(scope, *scope.buckets)
        with self._guarded(scope):
            yield

    def _unannounced(self, scope: Scope, *buckets: BucketState) -> None:
        """A node of ``scope`` reads ``buckets`` in backward before a hook has announced the scope.

        Scopes that do not contain this one have ended, but this very node may have read their weights before. So they
        are left a second time when the node is done. All weights that one node reads were present together in forward,
        so their homes do not overlap.
        """
        self._leave_pending()
        if not (self._in_backward and self._in_backward[-1] is scope):
            opened = (*self._in_forward, *self._in_backward)
            self._leave_again = [other for other in opened if not other.contains(scope)]
            self._open_in_backward(scope)
            self._opened_by_read = scope
        for bucket in buckets:
            self._bring(bucket)

    def _open_in_backward(self, scope: Scope) -> None:
        if self.backward and not self.rounds:
            self._close(self._in_forward, scope)  # what was recomputed
        self._close(self._in_backward, scope)
        self.backward = True
        self._open(self._in_backward, scope)

    def _open(self, opened: list[Scope], scope: Scope, place: int | None = None) -> None:
        opened.insert(len(opened) if place is None else place, scope)
        for bucket in scope.buckets:
            bucket.enter()

    def _leave(self, scope: Scope) -> None:
        if scope is self._opened_by_read:
            self._opened_by_read = None
        for bucket in scope.buckets:
            bucket.leave()
        self._left(scope.buckets)

    def _leave_pending(self) -> None:
        for scope in self._leave_again:
            self._left(scope.buckets)
        self._leave_again.clear()

    def _close(self, opened: list[Scope], entered: Scope | None) -> None:
        """Leave every scope that does not contain ``entered``."""
        while opened and (entered is None or not opened[-1].contains(entered)):
            self._leave(opened.pop())


def unseen(work: Callable[P, R]) -> Callable[P, R]:
    """``work``, to be run without gradients and outside of all dispatch modes.

    Torch's selective checkpoints are modes that number the operators of a forward and expect the same ones in the
    replay. What the engine does when a module is entered depends on where weights are then, so it may not be counted.
    """

    @wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad():
            if not torch._C._len_torch_dispatch_stack():  # nearly always
                return work(*args, **kwargs)
            with _disable_current_modes():
                return work(*args, **kwargs)

    return run
