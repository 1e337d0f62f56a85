"""An ``Accelerator`` that asks the run's execution (``trainer/execution``) wherever ways of making a step differ.

Ranks that hold one copy of the model together are given the same rows: data is divided among the copies, and results of
an evaluation are gathered from one rank of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, prepare_data_loader
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from deepstow.strategies.engine import StowOptimizer, stowed_by
from deepstow.trainer.execution.base import Execution
from deepstow.trainer.execution.stowed import Stowed
from deepstow.trainer.run import loading


class StowAccelerator(Accelerator):
    """Accelerate's Accelerator; in a loop of one's own the memory engine drives what ``prepare`` is given with it."""

    execution: Execution
    loading_s = 0.0  # how long a batch may be waited for; 0: without end
    last_norm: Any = None  # of the newest clipping, whichever library did it
    _of_copies = False  # ``gather`` takes from one rank of each copy of the model

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.execution = Stowed()

    @classmethod
    def of(cls, accelerator: Accelerator) -> Self:
        """One with all that an ``accelerator`` has, which is not used any more."""
        stow_accelerator = cls.__new__(cls)
        stow_accelerator.__dict__.update(accelerator.__dict__)
        return stow_accelerator

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's, but with the memory engine the model is neither wrapped nor moved; it gets its autocast."""
        for arg in args:
            if isinstance(arg, StowOptimizer):
                self.execution.adopt(arg)
        if self.execution.stowed is None:
            return super().prepare(*args, **kwargs)
        prepared = tuple(self._prepare_stowed(arg, kwargs) for arg in args)
        return prepared if len(prepared) > 1 else prepared[0]

    def _prepare_stowed(self, arg: Any, kwargs: dict[str, Any]) -> Any:
        if isinstance(arg, torch.nn.Module):
            return self.prepare_model(arg)
        if isinstance(arg, torch.optim.Optimizer) and self.scaler is not None:  # torch's, which decides about each step
            return self.prepare_optimizer(arg, device_placement=False)
        return super().prepare(arg, **kwargs) if isinstance(arg, torch.utils.data.DataLoader) else arg

    def prepare_data_loader(self, data_loader: Any, device_placement: bool | None = None, *args: Any) -> Any:
        """As Accelerate's; copies of the model are given different rows, ranks of one copy the same."""
        grid = self.execution.grid
        loading.guard(data_loader, self.loading_s)
        if grid.is_plain or isinstance(data_loader, DataLoaderShard | DataLoaderDispatcher):
            return super().prepare_data_loader(data_loader, device_placement, *args)
        return prepare_data_loader(
            data_loader,
            self.device,
            num_processes=grid.replicas,
            process_index=grid.cell(self.process_index).replica,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,  # every rank reads: the one that would send knows nothing of copies
            even_batches=self.even_batches,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
        )

    def gather(self, tensor: Any) -> Any:
        """As Accelerate's; within ``gather_for_metrics`` one rank of each copy of the model is taken."""
        gathered = super().gather(tensor)
        if not self._of_copies:
            return gathered
        grid = self.execution.grid
        cell = grid.cell(self.process_index)
        chosen = [grid.rank(cell._replace(replica=replica)) for replica in range(grid.replicas)]

        def of_copies(tensor: Tensor) -> Tensor:
            return tensor.view(grid.world_size, -1, *tensor.shape[1:])[chosen].flatten(0, 1)

        return tree_map_only(torch.Tensor, of_copies, gathered)

    def gather_for_metrics(self, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's, from one rank of each copy of the model."""
        self._of_copies = not self.execution.grid.is_plain
        try:
            return super().gather_for_metrics(*args, **kwargs)
        finally:
            self._of_copies = False

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """As Accelerate's, but a stowed model is neither moved nor wrapped, before training as well."""
        if stowed_by(model) is not None:
            device_placement = False
            evaluation_mode = True
        prepared = super().prepare_model(model, device_placement, evaluation_mode or not self.execution.wraps)
        if isinstance(prepared, DistributedDataParallel):
            self.execution.wrapped(prepared)
        return prepared

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Backward; under DeepSpeed also the step, when gradients are complete."""
        self.execution.backward(loss, self, super().backward, **kwargs)

    def get_state_dict(self, model: Any, unwrap: bool = True, place: Callable[[Tensor], Tensor] | None = None) -> Any:
        """As Accelerate's. Where ranks divide the weights of a copy, only the first has values, and they are whole.
        ``place``: puts one that was gathered where it stays.
        """
        state = self.execution.gathered(self.unwrap_model(model), keep=self.is_main_process, place=place)
        return super().get_state_dict(model, unwrap) if state is None else state

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Any:
        """The norm before clipping. Gradients that the engine holds, or that were clipped in ``backward``, stay there.
        With the engine raise ValueError for another norm, or if parameters that have a gradient are left out.
        """
        self.last_norm = self.execution.clip(parameters, max_norm, norm_type, self, super().clip_grad_norm_)
        return self.last_norm
