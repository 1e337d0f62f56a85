"""Which modules of a model are its blocks: the one definition for counting, hooks, recomputation and timing.

A block is a module with parameters and a forward of its own that stands in an ``nn.ModuleList``: ``model.layers.0`` of
a Llama. Members of containers in a list, which are never called (another list, a dict, a bare ``nn.Module``), stand in
their place. Of nested blocks the outermost counts. A module with several names is one block, under the first of them.
"""

from __future__ import annotations

from torch import nn


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of ``model`` by dotted path, in order of registration."""
    blocks: dict[nn.Module, str] = {}
    seen: set[tuple[nn.Module, bool]] = set()

    def look(path: str, module: nn.Module, listed: bool) -> None:
        if module in blocks or (module, listed) in seen:
            return
        seen.add((module, listed))
        if listed and type(module).forward is not nn.Module.forward:
            if any(True for _ in module.parameters()):
                blocks[module] = path
            return
        for name, child in module.named_children():
            look(f"{path}.{name}" if path else name, child, listed or isinstance(module, nn.ModuleList))

    look("", model, False)
    inner = {module for block in blocks for module in block.modules() if module is not block}
    return {path: block for block, path in blocks.items() if block not in inner}


def around_blocks(model: nn.Module) -> set[str]:
    """Names of parameters of modules that contain blocks: they are in use as long as these modules run."""
    paths = [f"{path}." for path in find_blocks(model)]
    owners = {name: name.rpartition(".")[0] for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name for name, owner in owners.items() if any(not owner or path.startswith(f"{owner}.") for path in paths)}
