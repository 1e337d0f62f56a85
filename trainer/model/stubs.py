"""Stand-ins with which a model is counted: fake tensors for its weights, and stubs for blocks that are like others.

With stubs counting takes hardly longer the deeper a model is. Which blocks are alike is seen before any runs: same
class, same parameters, same attributes of all modules inside with the same numbers, flags and texts, as many hooks, and
the same in the lists of the config that have an entry for each block. An attribute that is the block's own number
(``layer_idx``) does not count.

Of those that are alike the first two and the last one run: the second one's numbers are taken for all in between; the
first one saves what all share, such as masks. Whoever counts compares the second with the last, and lets all blocks
run if they differ. Not seen: one in between that differs by what no attribute shows, as by a function in a list.

Fake tensors have no values. Some are given here:

[Note: positions] Transformers makes no mask for a batch that needs none; attention then saves less. So whole numbers
that follow from real tensors or from ``arange`` keep their values. A mask among the inputs is a fake tensor, so a batch
that has one counts as padded or packed, which saves the most.

[Note: layer drop] Some models skip a block if a number that they draw is small. Here it is 1: no block is skipped.

[Note: grouped matmul] Experts of a mixture run as one grouped matmul, whose fake version takes bf16 only. So the
output's shape is given here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Hashable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from deepstow.strategies.engine.forward.blocks import find_blocks
from deepstow.strategies.engine.forward.checkpointing import stream_in
from deepstow.strategies.engine.tensors.nested import tensors_in

READ = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)  # fake tensors have none
PLAIN = (bool, int, float, str, type(None))
MOST_POSITIONS = 1 << 20  # elements of a tensor of whole numbers that keeps its values


def find_alike(model: nn.Module) -> list[list[str]]:
    """Names of blocks that are alike, by kind, where so many are that they need not all run to be counted."""
    blocks = find_blocks(model)
    if len(blocks) < 4:
        return []
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    values = vars(config).values() if config is not None else ()
    lists = [value for value in values if isinstance(value, list | tuple) and len(value) == len(blocks)]
    numbers = _numbers(list(blocks.values()))
    kinds: dict[Hashable, list[str]] = {}
    for number, (name, block) in enumerate(blocks.items()):
        kinds.setdefault((_looks(block, numbers), *(repr(per_block[number]) for per_block in lists)), []).append(name)
    return [names for names in kinds.values() if len(names) > 3]


def _numbers(blocks: Sequence[nn.Module]) -> set[tuple[str, str]]:
    """Attributes that are a block's own number, by the module's path in it and by name."""

    def equal_to(number: int, block: nn.Module) -> set[tuple[str, str]]:
        attributes = ((path, *item) for path, module in block.named_modules() for item in vars(module).items())
        return {(path, key) for path, key, value in attributes if type(value) is int and value == number}

    return equal_to(0, blocks[0]) & equal_to(len(blocks) - 1, blocks[-1])


def _looks(block: nn.Module, numbers: Container[tuple[str, str]]) -> Hashable:
    """What is seen of a block without running it, but for its own number."""
    looks: list[Hashable] = []
    for path, module in block.named_modules():
        own_values = ((key, value) for key, value in vars(module).items() if (path, key) not in numbers)
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        shapes = tuple((key, tensor.shape, tensor.dtype, tensor.requires_grad) for key, tensor in tensors)
        looks.append((path, type(module), tuple((key, _shown(value)) for key, value in own_values), shapes))
    return tuple(looks)


def _shown(value: Any) -> Hashable:
    """Numbers, flags and texts as they are; of others the type, and how many hooks or other entries a dict has."""
    if type(value) in PLAIN or (isinstance(value, list | tuple) and all(type(item) in PLAIN for item in value)):
        return repr(value)
    return type(value), len(value) if isinstance(value, dict) else 0


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """A mode in which tensors have shapes and dtypes but no values; see the notes in the module's docstring."""
    log = logging.getLogger("torch._subclasses.fake_tensor")  # of a forward that fails it shows all of torch's calls
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, _Answers():
            yield mode
    finally:
        log.setLevel(level)


def materialise(model: nn.Module, without: Collection[str] = ()) -> None:
    """Give a model on the meta device, but for blocks ``without``, fake tensors; inside of ``fake_tensors()``."""
    fakes: dict[Tensor, Tensor] = {}
    absent = tuple(f"{name}." for name in without)
    for name, tensor in sorted(_tensors(model), key=lambda each: each[0].startswith(absent)):
        if tensor.device.type == "meta" and (tensor in fakes or not name.startswith(absent)):
            _put(model, name, _fake_of(tensor, fakes))


@contextmanager
def faked(model: nn.Module) -> Iterator[None]:
    """Inside, which is inside of ``fake_tensors()``, every tensor of a live model is a fake one, also in the backward
    of its recomputed blocks; one on the meta device counts as on the CPU. Afterwards it has its own again.
    """
    tensors, fakes = list(_tensors(model)), dict[Tensor, Tensor]()
    try:
        for name, tensor in tensors:
            _put(model, name, _fake_of(tensor, fakes))
        yield
    finally:
        for name, tensor in tensors:
            _put(model, name, tensor)


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, tied ones under all their names."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, key = name.rpartition(".")
    setattr(model.get_submodule(path), key, tensor)


def _fake_of(tensor: Tensor, fakes: MutableMapping[Tensor, Tensor]) -> Tensor:
    """The fake tensor of ``tensor``, kept in ``fakes``: one for each, so that tied ones stay tied."""
    if tensor not in fakes:
        device = "cpu" if tensor.device.type == "meta" else tensor.device
        # From sizes alone: of whole numbers ``empty_like`` would be a real tensor, with whatever the memory has.
        fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
        fakes[tensor] = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
        vars(fakes[tensor]).update(vars(tensor))  # what a quantised weight is read with
    return fakes[tensor]


class _Answers(TorchDispatchMode):
    """Answers operators for which fake tensors have none; below autograd."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # more than half of all calls on fake tensors
            return func(*args, **kwargs)
        if func is torch.ops.aten._grouped_mm.default:
            rows, weight = args[:2]
            if weight.dim() == 3:
                return rows.new_empty(rows.shape[0], weight.shape[2])
            groups = args[2].shape[0]  # the gradient of the weights: tokens by tokens, for each expert
            return rows.new_empty(groups, rows.shape[0], weight.shape[1])
        if func is torch.ops.aten.rand.default and list(args[0]) == []:
            return torch.tensor(1.0)  # a fake tensor that knows its value
        tensors = list(tensors_in((args, kwargs)))
        all_known = not any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if not all_known or not (tensors or func.overloadpacket is torch.ops.aten.arange):
            return func(*args, **kwargs)
        if func not in READ:
            out = func(*args, **kwargs)
            if any(result.is_floating_point() or result.numel() > MOST_POSITIONS for result in tensors_in(out)):
                return out
        with unset_fake_temporarily():
            return func(*args, **kwargs)


class _Stub(torch.autograd.Function):
    """An output of a block that was not computed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, anchor: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """``anchor`` makes the output require a gradient."""
        ctx.like = (hidden.shape, hidden.dtype)
        return torch.empty(shape, dtype=dtype, device=hidden.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shape, dtype = ctx.like
        back = torch.empty(shape, dtype=dtype, device=grad.device) if ctx.needs_input_grad[0] else None
        return back, None, None, None


class Like(NamedTuple):
    """What is known of a tensor that a block returned, and enough to return another one like it."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


def likes_of(output: Any) -> Any:
    """``output`` of a block with a ``Like`` in place of each tensor."""
    return tree_map_only(Tensor, lambda each: Like(each.shape, each.dtype, each.device, each.requires_grad), output)


@contextmanager
def stubs(model: nn.Module, names: Collection[str], output_like: Callable[[str], Any]) -> Iterator[None]:
    """Inside, these blocks do not run; each returns what ``output_like`` says of its name (``likes_of``)."""
    replaced: list[tuple[Any, Any]] = []
    try:
        for name in names:
            block = model.get_submodule(name)
            replaced.append((block, vars(block).get("forward")))
            block.forward = partial(_stub, name, output_like)
        yield
    finally:
        for block, forward in replaced:
            del block.forward
            if forward is not None:
                block.forward = forward


def _stub(name: str, output_like: Callable[[str], Any], *args: Any, **kwargs: Any) -> Any:
    hidden = stream_in(args)
    hidden = hidden if hidden is not None else kwargs.get("hidden_states")
    if hidden is None:
        hidden = next(tensor for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point())
    anchor = torch.empty(0, dtype=torch.float32, device=hidden.device, requires_grad=True)  # no bytes to be counted

    def made(like: Like) -> Tensor:
        if like.requires_grad:
            through: Tensor = _Stub.apply(hidden, anchor, like.shape, like.dtype)
            return through
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)

    return tree_map_only(Like, made, output_like(name), is_leaf=lambda each: isinstance(each, Like))
