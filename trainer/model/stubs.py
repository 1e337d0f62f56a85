"""Stand-ins for blocks that are like others, so that counting a model does not take longer the deeper it is.

A stub makes an output of the right shape and does nothing else. Which blocks are alike is seen before any runs: same
class, same parameters, same attributes of all modules inside with the same numbers, flags and texts, as many hooks, and
the same in the lists of the config that have an entry for each block. An attribute that is the block's own number
(``layer_idx``) does not count.

Of those that are alike the first two and the last one run. The second one's numbers are taken for all in between; the
first one saves what all share, such as masks. Whoever counts compares the second with the last, and lets all blocks
run if they differ. Not seen: one in between that differs by what no attribute shows, as by a function in a list.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from strategies.engine.forward.blocks import find_blocks
from strategies.engine.forward.checkpointing import stream_in
from strategies.engine.tensors.nested import tensors_in

if TYPE_CHECKING:
    from torch import nn

PLAIN = (bool, int, float, str, type(None))


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
        kinds.setdefault((_looks(block, numbers), *(repr(each[number]) for each in lists)), []).append(name)
    return [names for names in kinds.values() if len(names) > 3]


def _numbers(blocks: Sequence[nn.Module]) -> set[tuple[str, str]]:
    """Attributes that are a block's own number, by the module's path in it and by name."""

    def equal_to(number: int, block: nn.Module) -> set[tuple[str, str]]:
        attributes = ((path, *each) for path, module in block.named_modules() for each in vars(module).items())
        return {(path, key) for path, key, value in attributes if type(value) is int and value == number}

    return equal_to(0, blocks[0]) & equal_to(len(blocks) - 1, blocks[-1])


def _looks(block: nn.Module, numbers: Container[tuple[str, str]]) -> Hashable:
    """What is seen of a block without running it, but for its own number."""
    found: list[Hashable] = []
    for path, module in block.named_modules():
        own_values = ((key, value) for key, value in vars(module).items() if (path, key) not in numbers)
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        shapes = tuple((key, each.shape, each.dtype, each.requires_grad) for key, each in own)
        found.append((path, type(module), tuple((key, _shown(value)) for key, value in own_values), shapes))
    return tuple(found)


def _shown(value: Any) -> Hashable:
    """Numbers, flags and texts as they are; of others the type, and how many hooks or other entries a dict has."""
    if type(value) in PLAIN or (isinstance(value, list | tuple) and all(type(each) in PLAIN for each in value)):
        return repr(value)
    return type(value), len(value) if isinstance(value, dict) else 0


class _Stub(torch.autograd.Function):
    """An output of a block that was not computed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, anchor: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """``anchor`` makes the output require a gradient."""
        ctx.like = (hidden.shape, hidden.dtype)
        return hidden.new_empty(shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shape, dtype = ctx.like
        return grad.new_empty(shape, dtype=dtype) if ctx.needs_input_grad[0] else None, None, None, None


@contextmanager
def stubs(model: nn.Module, names: Collection[str], output_like: Callable[[str], Any]) -> Iterator[None]:
    """Inside, these blocks do not run; each returns something like what ``output_like`` says of its name."""
    replaced: list[tuple[Any, Any]] = []
    try:
        for name in names:
            block = model.get_submodule(name)
            replaced.append((block, vars(block).get("forward")))
            block.forward = partial(_stub, name, output_like)
        yield
    finally:
        for block, own in replaced:
            del block.forward
            if own is not None:
                block.forward = own


def _stub(name: str, output_like: Callable[[str], Any], *args: Any, **kwargs: Any) -> Any:
    hidden = stream_in(args)
    hidden = hidden if hidden is not None else kwargs.get("hidden_states")
    if hidden is None:
        hidden = next(tensor for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point())
    anchor = torch.empty(0, dtype=torch.float32, device=hidden.device, requires_grad=True)  # no bytes to be counted

    def made(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            through: Tensor = _Stub.apply(hidden, anchor, tensor.shape, tensor.dtype)
            return through
        return torch.empty_like(tensor)

    return tree_map_only(Tensor, made, output_like(name))
