"""Where DeepSpeed keeps the training state: which pieces of which parameters are in which of its tensors.

    stage 0, fp32   torch's optimizer updates the model's parameters
    stage 0, mixed  an fp32 copy of every parameter                                      FP16_UnfusedOptimizer
    stages 1, 2     this rank's share of a group's parameters, laid end to end, in fp32  DeepSpeedZeroOptimizer
    stage 3         this rank's share of every parameter, laid end to end, in fp32       DeepSpeedZeroOptimizer_Stage3

Under tensor parallelism a rank has rows or columns of the weights that are divided (``tensor_shards.py``), and of their
state; what is not divided is the same on all ranks of a copy, and the first of them writes it.

DeepSpeed's own checkpoints are pickles, and fit only the number of ranks that wrote them, so none is written or read:
its tensors are saved and filled in as spans of named parameters. Counts of steps and the loss scale are in ``extra``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from deepstow.strategies.parallel.tensor_shards import is_first, shard_of, whole_shape, within
from deepstow.strategies.state.saved_state import Weights
from deepstow.strategies.state.torch_state import Held, Piece, TorchState


class DeepSpeedState(TorchState):
    """The ``Holder`` for DeepSpeed's engine."""

    def __init__(self, engine: Any, model: nn.Module) -> None:
        self._engine = engine
        self._outer = outer = engine.optimizer
        grouped: Sequence[Sequence[Any]]
        named = dict(model.named_parameters())
        rank = torch.distributed.get_rank(engine.seq_data_parallel_group)
        # Of what all ranks of a copy have, the first writes; of what all copies have, the first copy.
        parts = _Parts({id(param): name for name, param in named.items()}, is_first(named.values()), rank)
        kind = type(outer).__name__
        if isinstance(outer, torch.optim.Optimizer):
            inner, grouped = outer, [group["params"] for group in outer.param_groups]
            held = [parts.whole(param, param) for params in grouped for param in params]
        elif kind == "FP16_UnfusedOptimizer":
            inner, grouped = outer.optimizer, outer.fp16_groups
            pairs = zip(outer.fp16_groups, outer.fp32_groups, strict=True)
            held = [parts.whole(copy, param) for pair in pairs for param, copy in zip(*pair, strict=True)]
        elif kind == "DeepSpeedZeroOptimizer":
            inner, grouped = outer.optimizer, outer.bit16_groups
            held = list(parts.of_groups(outer))
        elif kind == "DeepSpeedZeroOptimizer_Stage3":
            inner, grouped = outer.optimizer, _groups_of_stage_3(outer)
            held = list(parts.of_parameters(outer))
        else:
            raise ValueError(f"{kind} of DeepSpeed cannot be saved: its state is not known here")
        groups = [[parts.names[id(param)] for param in params] for params in grouped]
        shapes = {name: whole_shape(param) for name, param in named.items() if param.requires_grad}
        weights = [weight for param in named.values() if (weight := parts.of_weight(param)) is not None]
        divides = any(hasattr(param, "ds_id") or shard_of(param) for param in named.values())
        super().__init__(inner, held, groups, shapes, weights, divides_weights=divides)

    def fill_weights(self, weights: Weights) -> None:
        """As torch's. Under stage 3 shares are filled in, and what is kept whole is gathered again."""
        if hasattr(self._outer, "checkpoint_event_prologue"):
            self._outer.checkpoint_event_prologue()  # gives whole weights back, so that only shares are left
        super().fill_weights(weights)
        if hasattr(self._outer, "checkpoint_event_epilogue"):
            self._outer.checkpoint_event_epilogue()

    # --- counts and loss scale ---------------------------------------------------------------------------------------

    def loss_scale(self) -> dict[str, float] | None:
        """The scale, how many steps it has held, and how many overflows it bears; None if nothing is scaled."""
        scaler = self._scaler()
        if scaler is None:
            return None
        held = scaler.cur_iter - scaler.last_overflow_iter - 1
        hysteresis = getattr(scaler, "cur_hysteresis", None)
        return {"scale": scaler.cur_scale, "held": held} | ({} if hysteresis is None else {"hysteresis": hysteresis})

    def set_loss_scale(self, saved: Mapping[str, float]) -> None:
        scaler = self._scaler()
        if scaler is None:
            return
        scaler.cur_scale = saved["scale"]
        scaler.last_overflow_iter = scaler.cur_iter - saved["held"] - 1
        if "hysteresis" in saved and hasattr(scaler, "cur_hysteresis"):
            scaler.cur_hysteresis = saved["hysteresis"]

    def _scaler(self) -> Any:
        """What counts steps between overflows, if the scale is dynamic."""
        config = getattr(self._outer, "loss_scale_config", None)
        if config is not None:
            return config if config.dynamic_loss_scale else None
        scaler = getattr(self._outer, "loss_scaler", None)
        return scaler if getattr(scaler, "dynamic", False) else None

    def set_steps(self, steps: int) -> None:
        """Count as DeepSpeed would have after that many steps."""
        self._engine.global_steps = steps
        self._engine.global_samples = steps * self._engine.train_batch_size()


def _dtype(param: Any) -> str:
    return str(param.dtype).removeprefix("torch.")


class _Parts:
    """What DeepSpeed's tensors hold. ``first``: of the ranks of this copy of the model; ``rank``: of the copies."""

    def __init__(self, names: Mapping[int, str], first: bool, rank: int) -> None:
        self.names = names
        self._first = first
        self._rank = rank

    def _piece(self, param: Any, start: int, offset: int, count: int, *, by_all: bool) -> Piece:
        """``by_all``: every copy writes its own; else the first writes for all."""
        start, columns = within(param, start)
        alike = len(param.shard.sizes) if hasattr(param, "shard") else 1  # of so many ranks each has other experts
        written = (self._first or shard_of(param) is not None) and (by_all or self._rank < alike)
        return Piece(self.names[id(param)], whole_shape(param), start, offset, count, columns, written)

    def whole(self, tensor: torch.Tensor, param: Any) -> Held:
        """``tensor`` has all that this rank has of ``param``."""
        piece = self._piece(param, 0, 0, param.numel(), by_all=False)
        return Held(tensor, (piece,), _dtype(param), copied=tensor is not param)

    def of_weight(self, param: Any) -> Held | None:
        """The elements of a weight that this rank has: all, or under stage 3 its share, if there is any."""
        if not hasattr(param, "ds_id"):
            return self.whole(param, param)
        start, count = _share(param, self._rank)
        piece = self._piece(param, start, 0, count, by_all=True)
        return Held(param.ds_tensor.data.view(-1)[:count], (piece,), _dtype(param)) if count > 0 else None

    def of_groups(self, outer: Any) -> Iterator[Held]:
        """Stages 1 and 2: DeepSpeed knows which fragment of a parameter is where in the flat tensor of a group."""
        for params, flat in zip(outer.bit16_groups, outer.single_partition_of_fp32_groups, strict=True):
            pieces = []
            for param in params:
                if (mapping := param._hp_mapping) is not None:
                    offset, count = mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel
                    pieces.append(self._piece(param, mapping.lp_fragment_address.start, offset, count, by_all=True))
            if pieces:
                yield Held(flat, tuple(pieces), _dtype(params[0]), copied=True)

    def of_parameters(self, outer: Any) -> Iterator[Held]:
        """Stage 3: every parameter is divided evenly, the last share is padded, and shares are laid end to end."""
        for params, flat in zip(outer.fp16_groups, outer.fp32_partitioned_groups_flat, strict=True):
            pieces, offset = [], 0
            for param in params:
                start, count = _share(param, self._rank)
                if count > 0:
                    pieces.append(self._piece(param, start, offset, count, by_all=True))
                offset += param.partition_numel()
            if pieces:
                yield Held(flat, tuple(pieces), _dtype(params[0]), copied=True)


def _share(param: Any, rank: int) -> tuple[int, int]:
    """First element and number of elements of a rank's share under stage 3, without padding."""
    size = param.partition_numel()
    start = min(rank * size, param.ds_numel)
    return start, min(size, param.ds_numel - start)


def _groups_of_stage_3(outer: Any) -> Sequence[Sequence[Any]]:
    grouped: list[list[Any]] = [[] for _ in outer.optimizer.param_groups]
    for index, params in enumerate(outer.fp16_groups):
        grouped[outer.sub_group_to_group_id[index]] += params
    return grouped
