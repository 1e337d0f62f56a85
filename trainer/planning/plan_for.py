"""Plans for a live PyTorch model, without a config file: what ``stow`` takes.

plan = plan_for(model, gpu_memory="20GiB", batch=(4, 2048), max_grad_norm=1.0)
optimizer = stow(model, plan)

How large gradients may be has no default: it decides when updates may begin, and a loop that clips where the plan does
not, or the other way round, would train otherwise than it says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from strategies.core.compose import compose
from strategies.core.facts import Precision, RunFacts
from strategies.core.layout import ITEM_BYTES
from strategies.core.plan import Plan
from strategies.core.registry import find
from trainer.dist.ranks import from_environment
from trainer.machine.probe import Machine, probe
from trainer.planning.facts import describe, machine_facts

if TYPE_CHECKING:
    from torch import Tensor, nn

    Groups = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Mapping[str, Any]]


def plan_for(
    model: nn.Module,
    params: Groups | None = None,
    *,
    max_grad_norm: float | None,
    gpu_memory: str | float = "auto",
    host_memory: str | float = "auto",
    batch: tuple[int, int] | Mapping[str, Any] | None = None,
    accumulation: int = 1,
    world_size: int | None = None,
    moments: int = 2,
    machine: Machine | None = None,
    debug: bool = False,
    recompute: Mapping[str, Any] | None = None,
    **offload: Any,
) -> Plan:
    """Where everything rests that training ``model`` needs, and how it moves.

    Args:
        params: what a torch optimizer takes: parameters, with or without names, or groups of them. None: all that
            require a gradient. An iterator is used up; one within a group becomes a list, as torch's optimizers do.
        max_grad_norm: what gradients are clipped to in each step; None or 0: they are not.
        gpu_memory: "20GiB", a share such as 0.8, bytes, or "auto".
        batch: keyword arguments of forward, or (rows, tokens): counts what backward keeps. None counts nothing.
        accumulation: micro-batches per update.
        world_size: ranks that train together; by default those of the default process group.
        moments: fp32 numbers of optimizer state per parameter; AdamW keeps two.
        debug: the runtime checks every use of a shared place.
        recompute: options of ``strategies.recompute``; the model then goes through ``recompute(model, plan)``, too.
        offload: further options of ``strategies.offload``.

    Raises:
        ValueError: an option that cannot be, a model that the engine cannot hold, or (CountingError) a forward that
            does not run on tensors without values. Refusal: it does not fit.
    """
    groups = _group_names(model, params)
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    if dtypes - ITEM_BYTES.keys():
        raise ValueError(
            f"parameters of dtype {', '.join(sorted(dtypes - ITEM_BYTES.keys()))}: use float32 or bfloat16"
        )
    rows, tokens = _shape(batch)
    ranks = world_size or _ranks()
    run = RunFacts(
        micro_batch=rows,
        sequence=tokens,
        accumulation=accumulation,
        max_grad_norm=max_grad_norm or 0.0,
        precision=Precision.BF16 if "bfloat16" in dtypes else Precision.FP32,
        world_size=ranks,
        moments=moments,
    )
    here = min(ranks, from_environment().local_world_size) if ranks > 1 else 1
    facts = describe(model, batch, groups, run, machine_facts(machine or probe(), here))
    options = {"gpu_memory": gpu_memory, "host_memory": host_memory, **offload}
    strategies: dict[str, Mapping[str, Any]] = {"offload": options, "buffers": {"debug": debug}}
    if recompute is not None:
        strategies["recompute"] = recompute
    return compose({name: find(name).model_validate(given) for name, given in strategies.items()}, facts)


def _ranks() -> int:
    """Of the default process group; 1 where there is none."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _group_names(model: nn.Module, params: Groups | None) -> list[list[str]]:
    """Names of the parameters in each group.

    Raises:
        ValueError: a parameter in two groups, in none, or not of this model.
    """
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    given: list[Any] = [p for p in model.parameters() if p.requires_grad] if params is None else list(params)
    if not given:
        raise ValueError("no parameters to train")
    groups = [_of_group(group) for group in given] if isinstance(given[0], Mapping) else [_unnamed(given)]
    seen: set[Any] = set()
    for parameter in (parameter for group in groups for parameter in group):
        if not hasattr(parameter, "requires_grad"):
            raise ValueError(f"params holds {parameter!r:.40}, which is no parameter")
        if parameter not in names:
            raise ValueError(f"a parameter of shape {tuple(parameter.shape)} is not in the model")
        if parameter in seen:
            raise ValueError(f"{names[parameter]} is in more than one parameter group")
        seen.add(parameter)
    left = [name for parameter, name in names.items() if parameter.requires_grad and parameter not in seen]
    if left:
        raise ValueError(f"{left[0]} requires a gradient and is in no parameter group; freeze it or add it")
    return [[names[parameter] for parameter in group] for group in groups]


def _of_group(group: Any) -> list[Tensor]:
    """Its parameters. What can be read only once is kept in the group: ``stow`` reads it again."""
    params = group["params"]
    if hasattr(params, "requires_grad"):
        return [params]
    if isinstance(params, Iterator):
        group["params"] = params = list(params)
    return _unnamed(params)


def _unnamed(params: Iterable[Any]) -> list[Tensor]:
    """Torch's optimizers also take pairs of name and parameter, since 2.6."""
    return [param[1] if isinstance(param, tuple) else param for param in params]


def _shape(batch: tuple[int, int] | Mapping[str, Any] | None) -> tuple[int, int]:
    """Rows and tokens of a batch, for the table."""
    if batch is None:
        return (1, 1)
    if isinstance(batch, tuple):
        return batch
    sizes = [tuple(value.shape) for value in batch.values() if hasattr(value, "shape") and len(value.shape)]
    first = sizes[0] if sizes else ()
    return (first[0] if first else 1, first[1] if len(first) > 1 else 1)
