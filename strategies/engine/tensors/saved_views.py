"""What a module has put into a state dict: its parameters' own memory, copies of it, or something of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def same_memory(first: Any, second: Tensor) -> bool:
    """Whether both are the same elements at the same address."""
    if not isinstance(first, Tensor) or first.layout is not torch.strided:
        return False
    same = (first.dtype, first.shape, first.stride()) == (second.dtype, second.shape, second.stride())
    return same and first.data_ptr() == second.data_ptr()


def copies_to_host(state: dict[str, Any], prefix: str, lent: Iterable[Tensor]) -> None:
    """Move saved views of copies to the host, since the plan has no device memory for the copies."""
    copies = {tensor.untyped_storage().data_ptr() for tensor in lent}
    for key, value in state.items():
        strided = isinstance(value, Tensor) and value.layout is torch.strided and not isinstance(value, nn.Parameter)
        if strided and key.startswith(prefix) and value.untyped_storage().data_ptr() in copies:
            state[key] = value.detach().to("cpu", copy=True)


def customizes_state_dict(module: nn.Module) -> bool:
    """Whether the module has its own state dict methods, or hooks other than ours."""
    ours = 2 if next(module.parameters(recurse=False), None) is not None else 0
    hooks = len(module._state_dict_pre_hooks) + len(module._state_dict_hooks)
    return hooks > ours or any(
        getattr(getattr(module, name), "__func__", None) is not getattr(nn.Module, name)
        for name in ("state_dict", "_save_to_state_dict", "get_extra_state")
    )
