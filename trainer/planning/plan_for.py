"""Plans for live PyTorch models, without a config file: what ``stow`` takes.

    plan = plan_for(model, gpu_memory="20GiB", batch=(4, 2048), max_grad_norm=1.0)
    optimizer = stow(model, plan)

``max_grad_norm`` has no default, because it decides when updates may begin: a loop that clips although the plan does
not, or the other way round, would not train as it says.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from deepstow.strategies.core.compose import compose
from deepstow.strategies.core.facts import Facts, Precision, RunFacts
from deepstow.strategies.core.plan import CHUNKS, Plan
from deepstow.strategies.core.protocol import HasBudget, MemoryRefusal, Refusal, Strategy
from deepstow.strategies.core.registry import find
from deepstow.strategies.core.sizes import human
from deepstow.trainer.distributed.ranks import from_environment
from deepstow.trainer.errors import CountingError, first_line
from deepstow.trainer.machine.probe import Machine, probe
from deepstow.trainer.planning.evaluation import DEFAULT, Evaluation
from deepstow.trainer.planning.facts import ModelCount, count_of, facts_of, half_of, under_autocast

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from deepstow.trainer.model.counting import Counter

    Batch = tuple[int, int] | Mapping[str, Any]
    Groups = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Mapping[str, Any]]

logger = logging.getLogger(__name__)


def plan_for(
    model: nn.Module,
    params: Groups | None = None,
    *,
    max_grad_norm: float | None,
    gpu_memory: str | float = "auto",
    host_memory: str | float = "auto",
    batch: Batch | None = None,
    accumulation: int = 1,
    order: Literal["micro_batches", "layers", "auto"] = "micro_batches",
    world_size: int | None = None,
    moments: int = 2,
    moments_as: str = "fp32",
    machine: Machine | None = None,
    debug: bool = False,
    recompute: Mapping[str, Any] | None = None,
    cross_entropy: Mapping[str, Any] | None = None,
    eval_rows: int | None = None,
    zero: Mapping[str, Any] | None = None,
    **offload: Any,
) -> Plan:
    """Plan where each tensor of training ``model`` is stored and when it is moved.

    Args:
        params: what a torch optimizer takes: parameters, with or without names, or groups of them. None: all that
            require a gradient. An iterator is consumed; one within a group becomes a list, as in torch's optimizers.
        max_grad_norm: the norm to which the loop clips gradients in each step; None or 0: it does not clip.
        gpu_memory: "20GiB", a share such as 0.8, bytes, or "auto".
        batch: keyword arguments of forward, or (rows, tokens), to count what is saved for backward. With None that
            counts as nothing.
        accumulation: micro-batches per update.
        order: in which they run: one after the other, all through a layer before the next, or the faster one. A loop
            hands those of another order to ``optimizer.backward_all``.
        world_size: ranks that train together; by default those of the default process group.
        moments: fp32 numbers of optimizer state per parameter; AdamW keeps two, another rule ``len(rule.names)``.
        moments_as: how AdamW's two rest: "bf16" and "int8" are not exact.
        debug: the engine checks every use of memory that buckets share.
        recompute: options of ``strategies.recompute``. Pass the model to ``recompute(model, plan)``, too.
        cross_entropy: options of ``strategies.cross_entropy``; ``stow`` does what it decides.
        eval_rows: rows like those of ``batch`` that are evaluated at a time; None: 8, or as many as fit in the plan.
        zero: options of ``strategies.zero``: the ranks share the training state instead of each holding all of it.
        offload: further options of ``strategies.offload``.

    Raises:
        ValueError: an invalid option, a model that the engine cannot train, or (CountingError) a forward that fails on
            tensors without values.
        Refusal: it does not fit.
    """
    import torch.distributed as dist

    groups = _group_names(model, params)
    ranks = world_size or (dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1)
    machine = machine or probe()
    autocast = _autocast(model, machine.device_kind)
    run = RunFacts(
        micro_batch=shape_of(batch)[0],
        sequence=shape_of(batch)[1],
        accumulation=accumulation,
        max_grad_norm=max_grad_norm or 0.0,
        world_size=ranks,
        moments=moments,
        stowed=True,
        **_read_from(model, autocast),
    )
    count = count_live(model, batch, groups, autocast)
    options = {"gpu_memory": gpu_memory, "host_memory": host_memory, "moments": moments_as, "accumulation": order}
    options |= offload
    strategies = {"offload": options, "buffers": {"debug": debug}, "recompute": recompute, "zero": zero}
    strategies["cross_entropy"] = cross_entropy
    chosen = {name: find(name).model_validate(values) for name, values in strategies.items() if values is not None}
    local_ranks = min(ranks, from_environment().local_world_size) if ranks > 1 else 1
    plan = compose(chosen, facts_of(count, run, chosen, machine, local_ranks))
    evaluated = None if batch is None else partial(_evaluation_bytes, model, batch, autocast)
    return _with_evaluation(chosen, plan, eval_rows, evaluated)


def _with_evaluation(
    strategies: Mapping[str, Strategy], plan: Plan, rows: int | None, count: Callable[..., int] | None
) -> Plan:
    """``plan``, or another, with the bytes that an evaluation of ``rows`` at a time takes. None: 8, or as many as fit
    beside training. 0: nothing is evaluated. Raise Refusal where no plan has room for so many rows.

    Args:
        count: bytes of a number of rows, with the loss by chunks or without; None: there is no batch to count.
    """
    if rows == 0 or count is None:
        return plan
    needed = cache(partial(count, chunked=any(plan.keep(unit.name).policy == CHUNKS for unit in plan.facts.units)))

    def counted(number: int) -> Facts:
        run = replace(plan.facts.run, evaluation_rows=number, evaluation_bytes=needed(number) if number else 0)
        return replace(plan.facts, run=run)

    num_rows = rows or DEFAULT
    budgets = (strategy.budget(plan.facts) for strategy in strategies.values() if isinstance(strategy, HasBudget))
    room = max(min(budgets) - plan.beside(), plan.saved_peak())
    try:
        size = needed(num_rows)
        one_row = size if size <= room else needed(1)
    except Exception as error:  # a forward without gradients may do what the one of training does not
        logger.warning("the memory of an evaluation is not counted: %s", first_line(error))
        return plan
    if size <= room:
        return replace(plan, facts=counted(num_rows))
    if rows is not None:
        facts = counted(rows)
        anew = replace(facts.run, accumulation=facts.run.micro_batches, layerwise=1)  # the order is chosen again
        with suppress(MemoryRefusal):
            return compose(strategies, replace(facts, run=anew))
    most = Evaluation.through(one_row, size, num_rows).fitting(room)
    if rows is not None:
        what = f"an evaluation of so many rows takes {human(size)} on the device at once; beside training {most} fit"
        raise Refusal("eval_rows", rows, what)
    return replace(plan, facts=counted(most))


def _read_from(model: nn.Module, autocast: Precision | None) -> dict[str, Any]:
    """What ``RunFacts`` has that the model shows itself. Raise ValueError for weights in a dtype that cannot be."""
    from deepstow.strategies.engine.forward.blocks import find_blocks
    from deepstow.strategies.engine.forward.compiled import compiled
    from deepstow.strategies.engine.tensors.quantised import KINDS

    plain = (parameter for parameter in model.parameters() if type(parameter).__name__ not in KINDS)
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in plain}
    if unusable := sorted(dtypes - {"float32", "bfloat16"}):
        raise ValueError(f"parameters of dtype {', '.join(unusable)}: use float32 or bfloat16")
    precision = Precision.BF16 if "bfloat16" in dtypes else Precision.FP32
    if autocast is Precision.FP16 and precision is Precision.FP32:
        precision = Precision.FP16  # as a config says it: weights in fp32, and a loss scale
    return {
        "precision": precision,
        "autocast": autocast if autocast is not precision else None,
        "recomputes": any(getattr(module, "gradient_checkpointing", False) for module in model.modules()),
        "compiled": any(compiled(block) is not None for block in find_blocks(model).values()),
        "adapters": hasattr(model, "peft_config"),
    }


def _autocast(model: nn.Module, device_kind: str) -> Precision | None:
    """In which format operators compute here, where autocast is on for the device or for where the model is now."""
    import torch

    kinds = {device_kind, *(parameter.device.type for parameter in islice(model.parameters(), 1))} - {"meta"}
    dtypes = (torch.get_autocast_dtype(kind) for kind in sorted(kinds) if torch.is_autocast_enabled(kind))
    formats = {torch.bfloat16: Precision.BF16, torch.float16: Precision.FP16}
    return next((formats[dtype] for dtype in dtypes if dtype in formats), None)


def _group_names(model: nn.Module, params: Groups | None) -> list[list[str]]:
    """Names of the parameters in each group. Raise ValueError unless each that trains is in one."""
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    entries: list[Any] = [p for p in model.parameters() if p.requires_grad] if params is None else list(params)
    if not entries:
        raise ValueError("no parameters to train")
    groups = [_of_group(group) for group in entries] if isinstance(entries[0], Mapping) else [_unnamed(entries)]
    grouped: set[Any] = set()
    for parameter in (parameter for group in groups for parameter in group):
        if not hasattr(parameter, "requires_grad"):
            raise ValueError(f"params holds {parameter!r:.40}, which is no parameter")
        if parameter not in names:
            raise ValueError(f"a parameter of shape {tuple(parameter.shape)} is not in the model")
        if parameter in grouped:
            raise ValueError(f"{names[parameter]} is in more than one parameter group")
        grouped.add(parameter)
    ungrouped = [name for parameter, name in names.items() if parameter.requires_grad and parameter not in grouped]
    if ungrouped:
        raise ValueError(f"{ungrouped[0]} requires a gradient and is in no parameter group; freeze it or add it")
    return [[names[parameter] for parameter in group] for group in groups]


def _of_group(group: Any) -> list[Tensor]:
    """The parameters of a group. An iterator becomes a list in the group, since ``stow`` reads it again."""
    params = group["params"]
    if hasattr(params, "requires_grad"):
        return [params]
    if isinstance(params, Iterator):
        group["params"] = params = list(params)
    return _unnamed(params)


def _unnamed(params: Iterable[Any]) -> list[Tensor]:
    """Parameters without their names, which torch's optimizers also take since 2.6."""
    return [param[1] if isinstance(param, tuple) else param for param in params]


def count_live(
    model: nn.Module, batch: Batch | None, groups: Sequence[Sequence[str]], autocast: Precision | None = None
) -> ModelCount:
    """Count a live model, which is left unchanged. Every parameter is computed in its own dtype, or by ``autocast``;
    those whose names are not in ``groups`` are frozen. With no batch nothing is run. Raises CountingError.
    """
    from deepstow.trainer.model.counting import Counter

    group_of = {name: index for index, names in enumerate(groups) for name in names}
    half = half_of(autocast)
    counter = Counter(model) if batch is None else _counted(model, batch, half)
    return count_of(model, counter, group_of, lambda param: str(param.dtype).removeprefix("torch."), half)


def _counted(model: nn.Module, batch: Batch, autocast: torch.dtype | None) -> Counter:
    """Count one forward and its backward on fake tensors."""
    from deepstow.trainer.model.temporaries import count

    try:
        with _on_fakes(model, batch, autocast) as call:
            model.train()
            return count(model, call)
    except Exception as error:  # a forward may fail in any way, here only or everywhere
        raise CountingError(
            f"batch: the model's forward cannot be counted on tensors without values ({first_line(error)}); if it runs "
            f"otherwise, leave out batch=: tensors saved for backward then count as nothing"
        ) from error


def _evaluation_bytes(model: nn.Module, batch: Batch, autocast: Precision | None, rows: int, *, chunked: bool) -> int:
    """The most bytes that an evaluation of so many ``rows`` like those of ``batch`` has at once. ``chunked``: with the
    loss by chunks.
    """
    import torch

    from deepstow.strategies.engine.forward import chunked_loss
    from deepstow.trainer.model.temporaries import peak_of

    with _on_fakes(model, _with_rows(batch, rows), half_of(autocast)) as call, torch.no_grad():
        model.eval()
        with chunked_loss.counting(model) if chunked else nullcontext():
            return peak_of(model, call)


def _with_rows(batch: Batch, rows: int) -> Batch:
    """``batch`` with another number of rows, in tensors without values."""
    import torch

    if isinstance(batch, tuple):
        return rows, batch[1]
    present_rows = shape_of(batch)[0]

    def resized(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) != present_rows:
            return value
        return torch.empty(rows, *value.shape[1:], dtype=value.dtype, device="meta")

    return {name: resized(value) for name, value in batch.items()}


@contextmanager
def _on_fakes(model: nn.Module, batch: Batch, autocast: torch.dtype | None) -> Iterator[Callable[[], Any]]:
    """One forward of ``model``, to be called inside, where all tensors are fake ones. Afterwards the model is as it
    was.
    """
    import torch
    from torch.utils._pytree import tree_map_only

    from deepstow.strategies.engine.tensors.quantised import counted_with
    from deepstow.trainer.model import liger
    from deepstow.trainer.model.stubs import fake_tensors, faked

    if liger.computes(model):  # before a GPU is given addresses that are not there
        raise NotImplementedError("Liger's kernels need values")
    with _restored(model), fake_tensors() as mode, counted_with(model, mode.from_tensor), faked(model):
        inputs = tree_map_only(torch.Tensor, mode.from_tensor, _inputs(model, batch))
        yield under_autocast(lambda: model(**inputs), autocast, _device_of(model).type)


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Afterwards random numbers and the attributes of modules are as before, with what dicts and lists in them hold."""
    from deepstow.strategies.engine.forward.effects import forked_rng, source

    with ExitStack() as undo, forked_rng():
        for module in model.modules():
            for value in (vars(module), *vars(module).values()):
                if isinstance(value, dict | list):
                    undo.callback(_fill, value, value.copy())
                elif (generator := source(value)) is not None:
                    get, put = generator
                    undo.callback(put, get())
        yield


def _fill(value: Any, content: Any) -> None:
    value.clear()
    (value.update if isinstance(value, dict) else value.extend)(content)


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """The keyword arguments of forward, with tensors on the model's device. (rows, tokens) stands for ids, for
    labels unless they are one for a row, and, where it takes one, for the mask of padded rows, with which attention
    keeps the most.
    """
    import torch

    device = _device_of(model)
    if isinstance(batch, tuple):
        takes = inspect.signature(model.forward).parameters
        head: Any = getattr(model, "get_output_embeddings", lambda: model)
        by_token = head() is not None
        given_too = {"labels": by_token, "attention_mask": "attention_mask" in takes}
        names = ["input_ids", *(name for name, is_given in given_too.items() if is_given)]
        batch = {name: torch.empty(batch, dtype=torch.long, device="meta") for name in names}
    tensors = {value for value in batch.values() if isinstance(value, torch.Tensor)}  # one by two names stays one
    on_device = {value: torch.empty_like(value, device=device) for value in tensors}
    return {name: on_device[value] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def shape_of(batch: Batch | None) -> tuple[int, int]:
    """Rows and tokens of a batch, as the plan prints them."""
    if batch is None:
        return (1, 1)
    if isinstance(batch, tuple):
        return batch
    sizes = (tuple(value.shape) for value in batch.values() if hasattr(value, "shape") and len(value.shape))
    rows, tokens = (*next(sizes, ()), 1, 1)[:2]
    return rows, tokens
