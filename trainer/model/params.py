"""The parameters of a model one by one: the unit that uses each first, its dtype, and the optimizer's group.

Parameters in a block belong to it, those registered before the first block to the embedding, all others to the head. A
tied parameter is listed under its first name, with the units of its other names as further users.

The engine brings weights when the module that owns them is called, or the block around that module. Some are read at
other times: by a loss that multiplies by ``lm_head.weight`` itself, by an adapter on an embedding, from a
``ParameterList``; and those of a module that contains blocks (``masked_spec_embed`` of wav2vec2) are in use while the
blocks are. The planner keeps such parameters on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import TYPE_CHECKING

from deepstow.strategies.core.facts import Param

if TYPE_CHECKING:
    from torch import nn

EMBEDDING, HEAD = "embedding", "head"


def units_by_name(model: nn.Module) -> dict[str, str]:
    """The unit of every parameter name, further names of tied parameters and of blocks included."""
    from deepstow.strategies.engine.forward.blocks import find_blocks

    paths = {block: path for path, block in find_blocks(model).items()}
    blocks = {name: paths[module] for name, module in model.named_modules(remove_duplicate=False) if module in paths}
    unit_of: dict[str, str] = {}
    outside = EMBEDDING
    for name, _ in model.named_parameters(remove_duplicate=False):
        parts = name.split(".")
        block = next((blocks[path] for end in range(1, len(parts)) if (path := ".".join(parts[:end])) in blocks), None)
        outside = HEAD if block is not None else outside
        unit_of[name] = block or outside
    return unit_of


def list_params(
    model: nn.Module,
    group_of: Mapping[str, int],
    dtype_of: Callable[[nn.Parameter], str],
    elsewhere: Iterable[str] = (),
    computing: Container[str] | None = None,
) -> tuple[Param, ...]:
    """All parameters in order of registration.

    Args:
        group_of: index of the optimizer's group by parameter name; frozen parameters have none.
        elsewhere, computing: what ``counting.py`` saw in a forward, if one was watched.
    """
    from deepstow.strategies.engine.forward.blocks import around_blocks

    elsewhere = around_blocks(model).union(elsewhere)
    unit_of = units_by_name(model)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return tuple(
        Param(
            name=first,
            unit=unit_of[first],
            num_elements=parameter.numel(),
            dtype=dtype_of(parameter),
            group=group_of.get(first) if parameter.requires_grad else None,
            users=tuple(dict.fromkeys(unit_of[name] for name in others if unit_of[name] != unit_of[first])),
            elsewhere=not elsewhere.isdisjoint((first, *others)),
            looked_up=unit_of[first] == EMBEDDING and _is_looked_up(model, [first, *others], unit_of, computing),
            vector=parameter.ndim < 2,
        )
        for parameter, (first, *others) in names.items()
    )


def _is_looked_up(
    model: nn.Module, names: list[str], unit_of: Mapping[str, str], computing: Container[str] | None
) -> bool:
    """Whether all modules of the embedding that own a parameter of these names only look rows up in it.

    A subclass of torch's embedding may compute with it as well; if no forward was watched, it is taken to.
    """
    from torch import nn

    def only_looks_up(path: str) -> bool:
        module = model.get_submodule(path)
        as_torch_does = type(module).forward is nn.Embedding.forward if computing is None else path not in computing
        return isinstance(module, nn.Embedding) and as_torch_does

    return all(only_looks_up(name.rpartition(".")[0]) for name in names if unit_of[name] == EMBEDDING)


# The names in transformers.Trainer.get_decay_parameter_names, the same in 5.17 and 5.23. Asking it would load all of
# the Trainer for a plan; a test compares the two.
_UNDECAYED = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")


def decay_groups(model: nn.Module) -> dict[str, int]:
    """Hugging Face's groups: 0 for what weight decay applies to, 1 for norms and biases."""
    from torch import nn
    from transformers.trainer_pt_utils import get_parameter_names

    rule: Callable[..., list[str]] = get_parameter_names
    decayed = set(rule(model, [nn.LayerNorm], list(_UNDECAYED)))
    return {name: int(name not in decayed) for name, _ in model.named_parameters()}
