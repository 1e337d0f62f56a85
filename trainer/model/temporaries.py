"""Count forward and backward of a model on fake tensors, and what is on the device besides saved tensors.

Of blocks that are alike three run (``stubs.py``). Where these differ, or where the model needs more of a block than a
stub has, all run. If backward fails even so, as with operators whose backward fake tensors lack, a warning says that
nothing temporary is counted.

A storage counts from the operator that made it until nothing holds it any more. What is alive in a unit, less what it
and the units before it save for backward (``counting.py``), is temporary. The gradient of a weight is taken away as
soon as autograd has accumulated it, as the memory engine does. That of a tied weight waits for its second part; until
then it is a temporary of all units in between.

Not seen: memory that a kernel takes for itself, and kernels of an accelerator where fake tensors run those of the CPU.
What a loop keeps of the model's output besides the loss counts as freed before backward, as in Transformers' Trainer.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepstow.strategies.core.facts import NO_WORK, InChunks, Temporaries
from deepstow.strategies.engine.forward import chunked_loss
from deepstow.strategies.engine.tensors.nested import tensors_in
from deepstow.trainer.model.compiled import NotCompilable, as_graphs
from deepstow.trainer.model.counting import ALLOCATE, Counter, touched_by
from deepstow.trainer.model.params import EMBEDDING, HEAD
from deepstow.trainer.model.stubs import find_alike, likes_of, materialise, stubs

logger = logging.getLogger(__name__)
Call = Callable[[], Any]  # one forward
FORWARD, BACKWARD, LANDING = range(3)


def count(model: nn.Module, call: Call) -> Counter:
    """Count ``call``, one forward of ``model``, and its backward, inside of ``fake_tensors()``."""
    alike = find_alike(model)
    if alike:
        materialise(model, [name for names in alike for name in names[2:-1]])
        try:
            with as_graphs(model):
                return _count(model, call, alike)
        except NotCompilable:
            raise
        except Exception as error:  # its forward may ask anything of a block that a stub has not
            logger.info("the model is counted on all blocks: %s", error)
    materialise(model)
    with as_graphs(model):
        return _count(model, call, ())


def peak_of(model: nn.Module, call: Call) -> int:
    """The most bytes that ``call`` has at once: a forward of ``model`` without gradients, on fake tensors."""
    like = {name: names[1] for names in find_alike(model) for name in names[2:-1]}
    materialise(model, list(like))
    try:
        return _peak_of(model, call, like)
    except Exception as error:  # as in ``count``
        if not like:
            raise
        logger.info("an evaluation is counted on all blocks: %s", error)
    materialise(model)
    return _peak_of(model, call, {})


def _peak_of(model: nn.Module, call: Call, like: Mapping[str, str]) -> int:
    live, outputs = _Live(), dict[str, Any]()

    def note(name: str, module: nn.Module, args: object, output: Any) -> None:
        outputs[name] = likes_of(output)

    with ExitStack() as within:
        for name in {*like.values()}:
            within.callback(model.get_submodule(name).register_forward_hook(partial(note, name)).remove)
        within.enter_context(stubs(model, like, lambda name: outputs[like[name]]))
        within.enter_context(live)
        call()
    return max(forward for forward, *_ in live.highest.values())


def _count(model: nn.Module, call: Call, alike: Sequence[list[str]]) -> Counter:
    """Count, with stubs for most of those ``alike``. Raise ValueError if they were not alike."""
    counter = Counter(model, {name: names[1] for names in alike for name in names[2:-1]})
    with counter:
        call()
    for _, second, *_, last in alike:
        if not counter.same(second, last):
            raise ValueError(f"{second} and {last} are not alike")
    try:
        counter.temporaries = _temporaries(counter, call)
    except Exception as error:
        if alike:
            raise
        logger.warning("temporaries of backward are not counted: %s", error)
        return counter
    if HEAD in counter.temporaries:
        counter.in_chunks = _in_chunks(counter, call)
    return counter


def _in_chunks(counter: Counter, call: Call) -> InChunks | None:
    """The head with its loss by chunks, without any block; None if its loss is another one."""
    with chunked_loss.counting(counter.model) as calls:
        alone = Counter(counter.model, {name: name for name in counter.blocks}, counter.outputs)
        try:
            with alone:
                call()
            if len(calls) != 1:
                return None
            return InChunks(calls[0], alone.saved.get(HEAD, 0), _temporaries(alone, call).get(HEAD))
        except Exception as error:
            logger.info("the loss by chunks is not counted: %s", error)
            return None


def _temporaries(counted: Counter, call: Call) -> dict[str, Temporaries]:
    """Run forward and backward of ``call``, whose saved bytes are ``counted``; the temporaries of all units that run,
    and of blocks that are like these.
    """
    live, like = _Live(), counted.like
    with ExitStack() as within:
        for param in counted.model.parameters():
            if param.requires_grad:
                within.callback(param.register_post_accumulate_grad_hook(live.land).remove)
        for name, block in counted.blocks.items():
            entering = block.register_forward_pre_hook(partial(live.enter_block, name), with_kwargs=True)
            within.callback(entering.remove)
            within.callback(block.register_forward_hook(partial(live.leave_block, name)).remove)
        within.enter_context(stubs(counted.model, like, counted.outputs.__getitem__))
        within.enter_context(live)
        _backward(live, call)
    counted.launches_back = live.launched | {name: live.launched.get(alike, 0) for name, alike in like.items()}
    by_unit, below = {}, 0
    for name in (EMBEDDING, *(name for name in counted.blocks if name not in like), HEAD):
        below += counted.saved.get(name, 0)
        if name in live.highest:
            by_unit[name] = Temporaries(*(max(0, value - below) for value in live.highest[name]))
    return by_unit | {name: by_unit[alike] for name, alike in like.items() if alike in by_unit}


def _backward(live: _Live, call: Call) -> None:
    """Backward of the loss in the output of ``call``, or of all that it holds where the loss is computed elsewhere.

    The output is made here and not passed in: after a compilation that dynamo has refused, Python's frames in this
    process hold on to what they pass, and the logits would count as alive.
    """
    output = call()
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    roots = [loss] if isinstance(loss, Tensor) else list(tensors_in(output))
    roots = [root for root in roots if root.requires_grad]
    del loss, output
    live.begin_backward()
    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def _launches(func: Any, args: Any, kwargs: Any, out: Any) -> bool:
    """Whether a device is given a kernel for this call: not for views and memory without values."""
    if func.overloadpacket in ALLOCATE:
        return False
    return touched_by(func, list(tensors_in((args, kwargs))), list(tensors_in(out))) != NO_WORK


class _Live(TorchDispatchMode):
    """Follows the bytes that operators make. ``highest``: by unit, the most in forward, in backward, and there with the
    unit's landed gradients; ``launched``: kernels in its backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.highest: dict[str, list[int]] = {}
        self.launched: dict[str, int] = {}
        self._made: dict[int, weakref.ref[Any]] = {}
        self._bytes = self._landed = 0
        self._unit = EMBEDDING
        self._outer = EMBEDDING
        self._backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.prim.device.default:
            return out
        if self._backward and _launches(func, args, kwargs, out):
            self.launched[self._unit] = self.launched.get(self._unit, 0) + 1
        storages = [tensor.untyped_storage() for tensor in tensors_in(out)]
        storages = [storage for storage in storages if storage._cdata not in self._made]
        if storages:
            of_inputs = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
            for storage in storages:
                if storage._cdata not in of_inputs and storage._cdata not in self._made:
                    self._follow(storage)
            self._note()
        return out

    def _follow(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()

        def gone(_: object) -> None:
            self._bytes -= size
            self._made.pop(key, None)

        self._bytes += size
        self._made[key] = weakref.ref(storage, gone)

    def _note(self) -> None:
        highest = self.highest.setdefault(self._unit, [0, 0, 0])
        phase = BACKWARD if self._backward else FORWARD
        highest[phase] = max(highest[phase], self._bytes)
        if self._backward:
            highest[LANDING] = max(highest[LANDING], self._bytes + self._landed)

    def land(self, param: Tensor) -> None:
        """A gradient is complete: it moves to where gradients are kept."""
        if param.grad is not None:
            self._landed += param.grad.untyped_storage().nbytes()
            param.grad = None
            self._note()

    def enter_block(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A block's forward begins: in training, or again in the backward of a checkpoint."""
        if self._backward:
            return
        if self._outer == EMBEDDING:
            for tensor in tensors_in((args, kwargs)):
                if tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(partial(self._enter_backward, EMBEDDING))
        self._unit, self._outer = name, HEAD
        self._note()

    def leave_block(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A block's forward has ended; its backward begins with the gradient of its output."""
        if self._backward:
            return
        self._unit = self._outer
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._enter_backward, name))

    def begin_backward(self) -> None:
        """Forward has ended, and nothing holds its outputs but the loss."""
        self._backward = True
        self._unit = self._outer
        self._landed = 0
        self._note()

    def _enter_backward(self, name: str, grad: Tensor) -> None:
        if self._unit != name:
            self._unit, self._landed = name, 0
        self._note()
