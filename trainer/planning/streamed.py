"""A model that only runs forward, on a device that need not hold its weights: the memory engine streams them then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from deepstow.strategies.core.plan import Plan
from deepstow.strategies.core.protocol import Refusal
from deepstow.strategies.core.sizes import human
from deepstow.strategies.engine import stow
from deepstow.strategies.engine.tensors.quantised import scales_bytes
from deepstow.trainer.errors import first_line
from deepstow.trainer.machine.probe import Machine
from deepstow.trainer.planning.plan_for import plan_for


def weights_of(model: Any) -> int:
    """Bytes of parameters, with their scales, and buffers."""
    tensors = {*model.parameters(), *model.buffers()}
    total: int = sum(tensor.numel() * tensor.element_size() for tensor in tensors) + scales_bytes(model)
    return total


def plan_within(model: Any, room: int, machine: Machine | None = None) -> tuple[Plan | None, str]:
    """The plan that streams the weights through ``room`` bytes (of ``machine``, or of this one), None: all fit; and
    what is said of it. All parameters are frozen but for one. Raise ValueError if that is too little.
    """
    weights = f"{human(weights_of(model))} of weights"
    if weights_of(model) <= room:
        return None, f"{weights}, all on the device"
    for param in model.parameters():
        param.requires_grad_(False)
    # The engine plans what is trained. The smallest parameter stands for that, and never gets a gradient.
    least = min(model.parameters(), key=torch.numel).requires_grad_()
    if room <= 1:  # which the engine would take for a share
        raise ValueError("nothing is left for weights")
    try:
        plan = plan_for(model, [least], max_grad_norm=None, gpu_memory=room, world_size=1, machine=machine)
    except Refusal as error:
        raise ValueError(first_line(error).replace("strategies.offload.", "")) from None
    return plan, f"{weights}, streamed through {human(room)}"


@contextmanager
def placed(model: Any, plan: Plan | None, device: torch.device) -> Iterator[Callable[..., Any]]:
    """The model in evaluation, to be called with tensors of the host, without gradients. Other ranks may wait.

    Inside, ``use_cache`` is off: with a cache Transformers lets documents of a packed row see each other.
    """
    stowed = None
    group = None
    use_cache = getattr(model.config, "use_cache", None)
    if use_cache is not None:
        model.config.use_cache = False
    if plan is None:
        model.to(device)
    else:
        if dist.is_initialized() and dist.get_world_size() > 1:
            group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        trained = [param for param in model.parameters() if param.requires_grad]
        stowed = stow(model, plan, trained, device=device, process_group=group)
    model.eval()
    try:
        with torch.no_grad():
            yield lambda **batch: model(**{name: value.to(device) for name, value in batch.items()})
    finally:
        if use_cache is not None:
            model.config.use_cache = use_cache
        if stowed is not None:
            stowed.close()
        if group is not None:
            dist.destroy_process_group(group)
