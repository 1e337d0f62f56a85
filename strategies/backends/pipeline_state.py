"""The training state of a pipeline's stage, as spans of the whole model's parameters.

Each stage writes what it has; of a tied weight, which both ends have, the first; of copies of the model, one. Names,
groups and shapes are those of the whole model, so that a checkpoint can be loaded by any strategy and any cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from strategies.backends.pipeline_gradients import StageGradients
from strategies.backends.pipelining import Pipeline
from strategies.engine.saving.state_file import EngineState
from strategies.state.saved_state import Described
from strategies.state.spans import Span
from strategies.state.torch_state import Held, Piece, Place, TorchState

if TYPE_CHECKING:
    from strategies.engine import StowOptimizer


class PipelineState(TorchState):
    """The ``Holder`` of one stage; making it is a collective.

    Args:
        writes: whether this copy of the model is the one that is written.
    """

    divides_weights = True

    def __init__(
        self, optimizer: torch.optim.Optimizer, pipeline: Pipeline, gradients: StageGradients, *, writes: bool
    ) -> None:
        params = pipeline.stage.names()
        name_of = {id(param): name for name, param in params.items()}
        mine = [[name_of[id(param)] for param in group["params"]] for group in optimizer.param_groups]
        groups, shapes = _of_all_stages(pipeline, mine)
        held = [_held(params[name], name) for group in mine for name in group]
        places = [Place(name, tuple(param.shape), 0, param) for name, param in params.items()]
        super().__init__(optimizer, held, groups, shapes, places, writes=writes)
        own = set(gradients.own)
        self._own = TorchState(
            optimizer,
            [each for each in held if each.pieces[0].name in own],
            groups,
            shapes,
            [place for place in places if place.name in own],
            writes=writes,
        )

    def described(self) -> dict[str, Described]:
        return self._own.described()

    def spans(self) -> Iterator[Span]:
        return self._own.spans()

    def weight_spans(self, names: set[str]) -> Iterator[Span]:
        return self._own.weight_spans(names)


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


def _of_all_stages(pipeline: Pipeline, mine: list[list[str]]) -> tuple[list[list[str]], dict[str, tuple[int, ...]]]:
    """Names in each group, and shapes, of all trained parameters, from the names that each stage has; a collective."""
    everyones: list[Any] = [None] * pipeline.stages
    dist.all_gather_object(everyones, mine, group=pipeline.group)
    whole = {name: tuple(param.shape) for name, param in pipeline.stage.whole.named_parameters()}
    groups = [
        [name for name in whole if any(name in groups[index] for groups in everyones)] for index in range(len(mine))
    ]
    trained = {name for group in groups for name in group}
    return groups, {name: shape for name, shape in whole.items() if name in trained}


def _held(param: torch.nn.Parameter, name: str) -> Held:
    piece = Piece(name, tuple(param.shape), 0, 0, param.numel())
    return Held(param, (piece,), str(param.dtype).removeprefix("torch."))


def gathered(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    """The whole model's state dict on the host of the first stage, tied weights as one tensor; empty on others.

    A collective of one copy's stages. Tensors come one at a time.
    """
    stage, group, device = pipeline.stage, pipeline.group, pipeline.device
    whole = stage.whole.state_dict(keep_vars=True)
    first = {id(value): name for name, value in reversed(list(whole.items()))}
    mine = {first[id(whole[name])]: value for name, value in stage.model.state_dict().items()}
    found: dict[str, torch.Tensor] = {}
    for place in range(pipeline.stages):
        about = [
            [(name, tuple(value.shape), value.dtype) for name, value in mine.items()]
            if place == pipeline.position
            else None
        ]
        dist.broadcast_object_list(about, dist.get_global_rank(group, place), group=group, device=device)
        for name, shape, dtype in about[0] or ():
            if place == 0 and pipeline.position == 0:
                found[name] = mine[name].detach().cpu().clone()
            elif pipeline.position == 0:
                value = torch.empty(shape, dtype=dtype, device=device)
                dist.recv(value, dist.get_global_rank(group, place), group=group)
                found.setdefault(name, value.cpu())
            elif place == pipeline.position:
                dist.send(mine[name].detach().contiguous(), dist.get_global_rank(group, 0), group=group)
    if pipeline.position != 0:
        return {}
    return {name: found[first[id(value)]] for name, value in whole.items()}
