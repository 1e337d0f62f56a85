"""The training state of a pipeline's stage, as spans of the whole model's parameters.

Each stage writes what it has; of a tied weight, which both ends have, the first; of copies of the model, one. Names,
groups and shapes are those of the whole model, so that a checkpoint can be loaded by any strategy and any cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from deepstow.strategies.engine.saving.state_file import EngineState
from deepstow.strategies.parallel import tensor_shards
from deepstow.strategies.parallel.pipeline_gradients import StageGradients
from deepstow.strategies.parallel.pipeline_zero import StateShares
from deepstow.strategies.parallel.pipelining import Pipeline
from deepstow.strategies.parallel.tensor_shards import is_first, shard_of, whole_shape, within
from deepstow.strategies.state.torch_state import Held, Piece, TorchState

if TYPE_CHECKING:
    from deepstow.strategies.engine import StowOptimizer


def pipeline_state(
    optimizer: torch.optim.Optimizer,
    pipeline: Pipeline,
    gradients: StageGradients,
    shares: StateShares | None = None,  # copies of the stage divide the state, and each writes its part
    *,
    writes: bool,
) -> TorchState:
    """The ``Holder`` of one stage, ``writes``: of the copy of the model that is written. A collective."""
    params = pipeline.stage.names()
    name_of = {id(param): name for name, param in params.items()}
    updated = [group["params"] for group in optimizer.param_groups] if shares is None else shares.groups
    mine = [[name_of[id(param)] for param in group] for group in updated]
    groups, shapes = _of_all_stages(pipeline, mine)
    first = is_first(params.values())
    own_names = {name for name in gradients.own if first or shard_of(params[name]) is not None}
    weights = {name: _held(param, name, written=writes and name in own_names) for name, param in params.items()}
    names = [name for group in mine for name in group]
    if shares is None:
        held = [weights[name] for name in names]
    else:
        held = [holding for name in names for holding in shares.held(params[name], name, written=name in own_names)]
    return TorchState(optimizer, held, groups, shapes, list(weights.values()), divides_weights=True)


class EnginesStage(EngineState):
    """The same where the memory engine trains the stage; no weight is tied then. Making it is a collective."""

    def __init__(self, optimizer: StowOptimizer, pipeline: Pipeline, *, writes: bool) -> None:
        super().__init__(optimizer.access, writes=writes)
        self.divides_weights = True
        mine = [group["params"] for group in super().groups()]
        self._groups, self._shapes = _of_all_stages(pipeline, mine)

    def groups(self) -> list[dict[str, Any]]:
        return [{**group, "params": names} for group, names in zip(super().groups(), self._groups, strict=True)]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes


def _held(param: Any, name: str, *, written: bool) -> Held:
    """All that this rank has of a weight."""
    start, columns = within(param, 0)
    piece = Piece(name, whole_shape(param), start, 0, param.numel(), columns, written)
    return Held(param, (piece,), str(param.dtype).removeprefix("torch."))


def _of_all_stages(pipeline: Pipeline, mine: list[list[str]]) -> tuple[list[list[str]], dict[str, tuple[int, ...]]]:
    """Names in each group, and shapes, of all trained parameters, from the names that each stage has; a collective."""
    everyones: list[Any] = [None] * pipeline.stages
    dist.all_gather_object(everyones, mine, group=pipeline.group)
    shapes = {name: tuple(param.shape) for name, param in pipeline.stage.whole.named_parameters()}
    groups = [
        [name for name in shapes if any(name in groups[index] for groups in everyones)] for index in range(len(mine))
    ]
    trained = {name for group in groups for name in group}
    return groups, {name: shape for name, shape in shapes.items() if name in trained}


def gathered(
    pipeline: Pipeline, place: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """The whole model's state dict on the host of the first stage, tied weights as one tensor; empty on others. A
    collective of one copy's ranks, in which tensors come one at a time. ``place``: puts one where it stays.

    Where the layers of a stage are divided, its ranks put each tensor together, and the first of them sends it.
    """
    stays = place or (lambda value: value.to("cpu", copy=True))
    stage = pipeline.stage
    group = pipeline.group
    device = pipeline.device
    whole = stage.whole.state_dict(keep_vars=True)
    first = {id(value): name for name, value in reversed(list(whole.items()))}
    mine = {first[id(whole[name])]: value for name, value in stage.model.state_dict(keep_vars=True).items()}
    values = dict(zip(mine, stage.model.state_dict().values(), strict=True))  # of the memory engine's, read together
    sends = is_first(stage.model.parameters())
    placed: dict[str, torch.Tensor] = {}
    for at in range(pipeline.stages):
        about = [
            [(name, whole_shape(value), value.dtype) for name, value in mine.items()]
            if at == pipeline.position
            else None
        ]
        dist.broadcast_object_list(about, dist.get_global_rank(group, at), group=group, device=device)
        for name, shape, dtype in about[0] or ():
            value = None
            if at == pipeline.position:
                is_part = shard_of(mine[name]) is not None
                value = tensor_shards.gathered(mine[name]) if is_part else values[name].detach()
            if sends and value is not None and at > 0:
                dist.send(value.contiguous(), dist.get_global_rank(group, 0), group=group)
            if sends and pipeline.position == 0:
                if value is None:
                    value = torch.empty(shape, dtype=dtype, device=device)
                    dist.recv(value, dist.get_global_rank(group, at), group=group)
                if name not in placed:
                    placed[name] = stays(value)
    if device.type != "cpu":  # sends run on the device, and this process may end before they are through
        torch.accelerator.synchronize(device)
    dist.barrier(group=group)  # on a device a send is only queued: who leaves now would take it along
    if pipeline.position != 0 or not sends:
        return {}
    return {name: placed[first[id(value)]] for name, value in whole.items()}
