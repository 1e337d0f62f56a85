"""All micro-batches of a step pass a block before any of them goes on to the next one.

Each micro-batch runs the model's own forward in a coroutine (``greenlet``), which stops at the borders of blocks,
before and after each. Between two stops is a *round*: every micro-batch takes its turn. Nothing else is fetched until
the first one begins the next round, so weights that one has used are there for the others. So a weight comes up once in
forward and once in backward of a step, however many micro-batches there are, and no model has to be cut.

    forward    prologue of 3 2 1 0 | block 0 of 3 2 1 0 | block 1 of 3 2 1 0 | ...
    head       forward and backward of 0, of 1, of 2, of 3: one micro-batch's logits at a time
    backward   of all micro-batches in one graph: block 1 of 0 1 2 3 | block 0 of 0 1 2 3 | ...

[Note: order of sums] Autograd runs nodes in the reverse of the order in which they were made. In forward the last
micro-batch goes first, so backward of a block begins with the first one's, and the contributions to each weight are
added in the order of micro-batches, as plain training adds them: 0, then 1, and so on. They are added where autograd
adds contributions of one graph, so a gradient lands once per step. A weight of the head that an earlier unit uses too
(a tied embedding) gets the head's contributions of all micro-batches first, which is another order.

[Note: the head] The graph of a head is freed as soon as its gradients are known: those of its own weights, which are
summed, and those of what it has read of the blocks, from which backward goes on later. Where a loss reads more of the
blocks than the last one's output (router losses do), these gradients depend on each other. Then heads are kept
(``keeps_heads``), and backward begins with the losses.

Torch's modes belong to a thread, not to a coroutine: gradients on or off, autocast, and hooks on saved tensors (as of a
checkpoint around a block) are put back when one goes on. Casts that autocast keeps are dropped at each switch, or
micro-batches would share one, and its gradient be summed in fewer bits.

[Note: random numbers] In plain training a micro-batch draws where the one before has ended. Here each goes on from its
own states of torch's generators whenever it takes its turn. Where it begins is known before any block runs: by how much
a forward moves the generators is counted once for each shape of what the model is given, by a forward without
gradients. That each has ended where the next one began is compared before any gradient lands. If it has not, the number
depends on more than shapes: all begin again, and from then on each is counted. Checkpoints restore what they have found
at their block, which is the state of that micro-batch. A forward may exchange weights with other ranks, which draw from
generators of their own. So all ranks count, and begin again, if one of them has to.

Refused: a forward that draws from other generators or sets attributes of modules (micro-batches would draw, and read,
in another order than in plain training), that runs a block twice, or whose micro-batches take different ways.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn
from torch._C import _autograd as autograd
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_map_only

from deepstow.strategies.engine.engine import Engine
from deepstow.strategies.engine.forward import generators
from deepstow.strategies.engine.forward.activations import HostRoom
from deepstow.strategies.engine.forward.blocks import find_blocks
from deepstow.strategies.engine.forward.effects import GLOBAL, PLAIN, attributes, changed
from deepstow.strategies.engine.tensors.nested import tensors_in

logger = logging.getLogger(__name__)
R = TypeVar("R")
KEY = "strategies.offload.accumulation"
OF_TORCH = "leaf Variable that requires grad is being used in an in-place operation"
CURE = f"write {KEY}: micro_batches"


class LayersRefusedError(RuntimeError):
    """Micro-batches cannot take turns in each layer: one line with the key, why, and what to write instead."""


class _ReadsMoreError(Exception):
    """A loss reads more of the blocks than what the last one has made."""


class _MiscountedError(Exception):
    """A micro-batch has drawn more or fewer random numbers than another one of this shape."""


class Stop(NamedTuple):
    """Where a micro-batch has stopped: before a block, or after it."""

    block: str
    is_after: bool


ENTRANCE = Stop("", is_after=False)  # before the model


@dataclass(frozen=True, slots=True)
class _Modes:
    """Torch's modes of the thread that a forward may have changed. ``hooks``: on saved tensors, the innermost last."""

    gradients: bool
    autocast: bool
    dtype: torch.dtype
    keeps_casts: bool
    dispatches: int
    hooks: tuple[Any, ...]

    @classmethod
    def taken(cls, device: str) -> _Modes:
        """Those of now; the hooks are removed."""
        hooks: list[Any] = []
        while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
            hooks.insert(0, top)
            autograd._pop_saved_tensors_default_hooks()
        return cls(
            gradients=torch.is_grad_enabled(),
            autocast=torch.is_autocast_enabled(device),
            dtype=torch.get_autocast_dtype(device),
            keeps_casts=torch.is_autocast_cache_enabled(),
            dispatches=torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack(),
            hooks=tuple(hooks),
        )

    def give(self, device: str) -> None:
        """To whoever runs next, where no hooks are."""
        torch.set_grad_enabled(self.gradients)
        torch.set_autocast_enabled(device, self.autocast)
        torch.set_autocast_dtype(device, self.dtype)
        torch.set_autocast_cache_enabled(self.keeps_casts)
        for pack, unpack in self.hooks:
            autograd._push_saved_tensors_default_hooks(pack, unpack)


@dataclass(slots=True, eq=False)
class _Task:
    """One micro-batch on its way through the model.

    Args:
        blocks: how many it has passed.
        root: where its backward begins.
        leaves: what its head reads in place of what the last block has made, and then the ``gradients`` of these.
        random: the states of torch's generators at its stop; None: nothing is drawn.
    """

    work: Callable[[], Any]
    modes: _Modes
    found: Any = None  # what ``work`` has returned
    blocks: int = 0
    random: generators.States | None = None
    loss: Tensor | None = None
    root: Tensor | None = None
    leaves: list[Node] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    coroutine: greenlet = field(init=False)

    def __post_init__(self) -> None:
        self.coroutine = greenlet(self._run)
        self.coroutine.gr_context = contextvars.copy_context()  # type: ignore[misc]

    def _run(self) -> None:
        self.found = self.work()


class _Root(torch.autograd.Function):
    """Gives what the last block has ``made`` its gradients, which are in a list until then, and in no other place."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor | None], *made: Tensor) -> Tensor:
        ctx.gradients = gradients
        return made[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        gradients = tuple(ctx.gradients)
        ctx.gradients.clear()
        return (None, *gradients)


class LayersFirst:
    """Runs the micro-batches of a step through ``model``, which ``engine`` drives, layer by layer.

    Args:
        room: where saved tensors wait on the host, if any do.
        keeps_heads: see the module, note: the head.
        draws: a forward draws random numbers.
    """

    def __init__(
        self, model: nn.Module, engine: Engine, room: HostRoom | None, *, keeps_heads: bool, draws: bool
    ) -> None:
        self._model = model
        self._engine = engine
        self._room = room
        self._keeps_heads = keeps_heads
        self._draws = draws
        self._counts_each = False  # not once for each shape
        self._moves: dict[Hashable, tuple[int, ...]] = {}  # of the generators, by a forward of this shape
        self._device = engine.device
        self._generators = generators.Generators(engine.device)
        self._hub = getcurrent()
        self._running: _Task | None = None
        self._blocks = find_blocks(model)
        self._nodes = 0  # of graphs that were made when the newest micro-batch came to the model
        self._shared: set[int] = set()  # weights by id that units before the head have used, as a tied one

    @property
    def runs(self) -> bool:
        """Whether the caller is one of the works that ``run`` was given."""
        return self._task is not None

    @property
    def _task(self) -> _Task | None:
        """The micro-batch whose forward the caller is: backward, perhaps in a thread of its own, is none."""
        task = self._running
        return task if task is not None and task.coroutine is getcurrent() else None

    def backward(self, loss: Tensor) -> None:
        """What one of the works calls in place of ``loss.backward()``, once."""
        task = self._task
        assert task is not None, "only inside of run"
        if task.loss is not None:
            self._refuse("a micro-batch has more than one backward")
        task.loss = loss
        self._hub.switch(None)

    def run(self, works: Sequence[Callable[[], R]]) -> list[R]:
        """What ``works`` return, one for each micro-batch, in order. Each computes a loss and calls ``backward``.

        Raises:
            LayersRefusedError: see the module, refused. No gradient has landed then.
        """
        if not works:
            return []
        while True:
            try:
                return self._run(works)
            except _ReadsMoreError:
                logger.warning(
                    "the loss reads more of the blocks than what the last one makes: what heads save is kept, beyond "
                    "the plan"
                )
                self._keeps_heads = True
            except _MiscountedError:
                if self._counts_each:
                    self._refuse("random numbers are drawn outside of the model, or as many as others of them say")
                self._count_each("depends on more than shapes")

    def _run(self, works: Sequence[Callable[[], R]]) -> list[R]:
        ambient = _Modes.taken(self._device.type)
        tasks = [_Task(work, ambient) for work in works]
        self._hub = getcurrent()
        first, done = self._generators.states(), False
        handles = list(self._attach())
        try:
            others, model_state = [state() for state, _ in GLOBAL], attributes(self._model)
            ends = self._enter(tasks, first) if self._draws else [first] * len(tasks)
            self._engine.begin_rounds()
            if self._room is not None:
                self._room.begin_rounds()
            self._forward(tasks)
            sums = self._heads(tasks)
            if name := changed(model_state, self._model):
                self._refuse(f"the forward writes to {name}, which the next micro-batch would read")
            if not all(map(_same, others, (state() for state, _ in GLOBAL))):
                self._refuse(
                    "the forward draws random numbers of Python or NumPy, in another order than in plain training"
                )
            drawn = [task.random if task.random is not None else self._generators.states() for task in tasks]
            is_other = not all(map(generators.same, drawn, ends))
            if self._draws and self._engine.ranks.any_rank(is_other):
                raise _MiscountedError
            if is_other:
                self._refuse("the forward draws random numbers (dropout), and the plan was made of one that does not")
            done = True
        finally:
            try:
                self._end(tasks)
            finally:
                if not done:
                    self._generators.give(first)
                ambient.give(self._device.type)
                torch.clear_autocast_cache()
                for handle in handles:
                    handle.remove()
                self._engine.end_rounds()
                if self._room is not None:
                    self._room.end_rounds()
        last = self._generators.states()
        self._backward(tasks, sums)
        self._refuse_random(last)
        return [task.found for task in tasks]

    def _attach(self) -> Iterator[torch.utils.hooks.RemovableHandle]:
        """Stops at the borders of blocks, outside of all other hooks."""
        for name, block in self._blocks.items():
            yield block.register_forward_pre_hook(self._stop_before(name), prepend=True)
            yield block.register_forward_hook(self._stop_after(name))

    # --- random numbers ----------------------------------------------------------------------------------------------

    def _enter(self, tasks: Sequence[_Task], first: generators.States) -> list[generators.States]:
        """Let each go on to the model; see [Note: random numbers]. Returns the states in which each will end."""
        ends = [first]
        with self._model.register_forward_pre_hook(partial(self._count, ends), prepend=True, with_kwargs=True):
            for task in tasks:
                task.random = ends[-1]
                nodes = autograd._get_sequence_nr()
                if self._go_on(task) != ENTRANCE or self._nodes != nodes:
                    self._refuse("a forward that draws random numbers does not begin with the model")
        return ends[1:]

    def _count(self, ends: list[generators.States], model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Add to ``ends`` the states after this forward, and stop."""
        task = self._task
        if task is None:
            return  # what is counted
        # Before counting: without gradients, too, functions of autograd count as nodes in some releases of torch.
        self._nodes = autograd._get_sequence_nr()
        begins = self._generators.states()
        shape = _shape_of((args, kwargs))
        any_rank = self._engine.ranks.any_rank
        if not self._counts_each and not any_rank(shape not in self._moves):
            ends.append(generators.moved(begins, self._moves[shape]))
        else:
            versions = [tensor._version for tensor in tensors_in((args, kwargs))]
            self._running = None
            try:
                with torch.no_grad():
                    model(*args, **kwargs)
            finally:
                self._running = task
            if [tensor._version for tensor in tensors_in((args, kwargs))] != versions:
                self._refuse("a forward that draws random numbers writes to what it is given")
            ends.append(self._generators.states())
            if not self._counts_each:
                move = generators.moves(begins, ends[-1])
                if any_rank(move is None):
                    self._count_each("is not known of this kind of generator or of these numbers")
                elif move is not None:
                    self._moves[shape] = move
            self._generators.give(begins)
        self._hub.switch(ENTRANCE)

    def _count_each(self, why: str) -> None:
        """From now on."""
        if not self._counts_each:
            logger.warning("how far a forward moves random numbers %s: each micro-batch is run once more to know", why)
        self._counts_each = True

    def _refuse_random(self, before: generators.States) -> None:
        if not generators.same(before, self._generators.states()):
            self._refuse("backward draws random numbers, in another order than in plain training")

    # --- rounds ------------------------------------------------------------------------------------------------------

    def _forward(self, tasks: Sequence[_Task]) -> None:
        """Rounds, up to the end of the last block."""
        while tasks[0].blocks < len(self._blocks):
            stops = [self._go_on(task) for task in reversed(tasks)]
            if None in stops:
                self._refuse("not every block runs in a forward")
            if any(stop != stops[0] for stop in stops):
                self._refuse("micro-batches take different ways through the model")

    def _heads(self, tasks: Sequence[_Task]) -> dict[Node, Tensor]:
        """Run the heads; see [Note: the head]. Returns the sums of the gradients of their weights."""
        sums: dict[Node, Tensor] = {}
        self._shared = self._engine.entered()  # a head may read a weight of these, too
        owned = set[Node]()  # of these, whose sum nobody else holds
        for task in reversed(tasks) if self._keeps_heads else tasks:
            first = autograd._get_sequence_nr()
            try:
                stop = self._go_on(task)
            except RuntimeError as error:
                if OF_TORCH in str(error):
                    self._refuse(
                        "the forward writes in place to what the last block returns (write x = x + y for x += y)"
                    )
                raise
            if stop is not None:
                self._refuse("a block runs twice in a forward")
            if task.loss is None or not task.loss.requires_grad:
                raise RuntimeError("a micro-batch has ended without backward of a loss that requires a gradient")
            if self._keeps_heads:
                task.root = task.loss
            else:
                for weight, gradient in self._head(task, first):
                    if weight in owned:
                        sums[weight].add_(gradient)
                    elif weight in sums:
                        sums[weight] = sums[weight] + gradient
                        owned.add(weight)
                    else:
                        sums[weight] = gradient
            task.loss = None
            if not self._keeps_heads:
                self._go_on(task)
        for task in tasks if self._keeps_heads else ():  # who has begun last ends first, as in a nest of contexts
            self._go_on(task)
        return sums

    def _head(self, task: _Task, first: int) -> Iterator[tuple[Node, Tensor]]:
        """Backward of the head of one micro-batch: the gradients of its weights; those of what the last block has made
        wait in ``task``. ``first``: the number of the first node of its graph.
        """
        assert task.loss is not None
        leaves = list(self._leaves(task.loss, first))
        random = self._generators.states()
        gradients = torch.autograd.grad(task.loss, [GradientEdge(leaf, 0) for leaf in leaves], allow_unused=True)
        self._engine.end_head()
        self._refuse_random(random)
        by_leaf = {leaf: gradient for leaf, gradient in zip(leaves, gradients, strict=True) if gradient is not None}
        task.gradients += [by_leaf.pop(leaf, None) for leaf in task.leaves]
        task.leaves.clear()  # they hold what the last block has made
        yield from by_leaf.items()

    def _backward(self, tasks: Sequence[_Task], sums: dict[Node, Tensor]) -> None:
        """Gradients of the head's own weights land first, and their sums are freed; then all else, layer by layer."""
        self._engine.begin_backward_of_rounds()
        alone = [weight for weight in sums if id(_weight_of(weight)) not in self._shared]
        if alone:
            torch.autograd.backward([GradientEdge(weight, 0) for weight in alone], [sums.pop(node) for node in alone])
        edges = [GradientEdge(weight, 0) for weight in sums]
        edges += [get_gradient_edge(task.root) for task in tasks if task.root is not None]
        gradients = [*sums.values(), *(torch.ones_like(task.root) for task in tasks if task.root is not None)]
        if edges:
            torch.autograd.backward(edges, gradients)

    def _leaves(self, loss: Tensor, first: int) -> Iterator[Node]:
        """The leaves of the graph of ``loss``, in the order of a walk."""
        seen = set[Node]()
        ahead = [get_gradient_edge(loss).node]
        while ahead:
            node = ahead.pop()
            if node in seen:
                continue
            seen.add(node)
            if (weight := _weight_of(node)) is not None:
                if weight._backward_hooks:
                    self._refuse("a weight of the head has a hook on its gradient")
                yield node
            elif node._sequence_nr() < first:
                raise _ReadsMoreError
            ahead += [next_node for next_node, _ in node.next_functions if next_node is not None]

    def _go_on(self, task: _Task) -> Stop | None:
        """Let ``task`` run to its next stop; None: it has its loss, or has ended."""
        device = self._device.type
        dispatches = task.modes.dispatches
        task.modes.give(device)
        if task.random is not None:
            self._generators.give(task.random)
        self._running = task
        try:
            stop: Stop | None = task.coroutine.switch()
        finally:
            self._running = None
            if task.random is not None:
                task.random = self._generators.states()
            task.modes = _Modes.taken(device)
            torch.clear_autocast_cache()
        if task.modes.dispatches != dispatches:
            self._refuse("blocks run inside of a mode of torch's that the model sets")
        return stop

    def _stop_before(self, name: str) -> Callable[..., None]:
        stop = Stop(name, is_after=False)

        def before(module: nn.Module, args: Any) -> None:
            if self._task is not None:
                self._hub.switch(stop)

        return before

    def _stop_after(self, name: str) -> Callable[..., Any]:
        stop = Stop(name, is_after=True)

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            task = self._task
            if task is None:
                return None
            task.blocks += 1
            ends = task.blocks == len(self._blocks) and not self._keeps_heads
            cut_output = self._cut(task, output) if ends else None
            self._hub.switch(stop)
            return cut_output

        return after

    def _cut(self, task: _Task, output: Any) -> Any:
        """What the head reads in place of ``output``: the same values as leaves of a graph of its own."""
        outputs: list[Tensor] = []

        def leaf_of(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            leaf = tensor.detach().requires_grad_()
            outputs.append(tensor)
            task.leaves.append(get_gradient_edge(leaf).node)
            return leaf

        leaves = tree_map_only(Tensor, leaf_of, output)
        if outputs:
            task.root = _Root.apply(task.gradients, *outputs)
        return leaves

    def _end(self, tasks: Sequence[_Task]) -> None:
        """Let what has not come to its end leave what it is inside of."""
        for task in tasks:
            if task.coroutine:  # it has begun, and has not ended
                task.modes.give(self._device.type)
                try:
                    task.coroutine.throw(GreenletExit)
                finally:
                    _Modes.taken(self._device.type)

    def _refuse(self, why: str) -> None:
        raise LayersRefusedError(f"{KEY}: layers: {why}; {CURE}")


def _same(before: Any, after: Any) -> bool:
    """Whether two states of Python's or NumPy's generator are equal; the latter have an array in them."""
    return repr(before) == repr(after) if isinstance(before, tuple) else bool(before == after)


def _shape_of(value: Any) -> Hashable:
    """Equal for what a model is given where shapes, dtypes and plain values are."""
    leaves, structure = tree_flatten(value)
    kinds = [(*leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return repr(structure), repr([kind if type(kind) in (*PLAIN, tuple) else type(kind) for kind in kinds])


def _weight_of(node: Node) -> Any:
    """The leaf whose gradient ``node`` adds up; None if it is another node."""
    return getattr(node, "variable", None)
