"""An ``Accelerator`` for the three ways in which an optimizer step is made.

Plain: Accelerate wraps model and optimizer, and torch clips. DeepSpeed: its engine reduces, clips and steps inside
``backward``. The memory engine (``stow``) has hooked the model itself, so nothing may be wrapped or moved, and it clips
the gradients that it holds.

Under ZeRO stage 0 in fp32 DeepSpeed would multiply by the reciprocal of the norm and report no norm. The gradients are
whole on every rank after reduction there, so torch's own clipping runs between backward and step, with the same bits.

Ranks that hold one copy of the model together are given the same rows: data is divided among the copies, and results of
an evaluation are gathered from one rank of each. Gradients of divided experts, which DistributedDataParallel leaves
out, are completed after the backward of a step.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DistributedType
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils._pytree import tree_map_only

from deepstow.strategies.core.grid import Grid
from deepstow.strategies.engine import StowOptimizer, stowed_by
from deepstow.strategies.parallel import tensor_shards
from deepstow.strategies.plugins import two_level
from deepstow.trainer.run import loading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from deepstow.strategies.engine.ranks.two_level import TwoLevel
    from deepstow.strategies.parallel.expert_parts import ExpertParts
    from deepstow.strategies.parallel.pipeline_gradients import StageGradients
    from deepstow.strategies.plugins.compressed import Compressed


class StowAccelerator(Accelerator):
    """Accelerate's Accelerator, unchanged for plain training and for DeepSpeed with stages 1 to 3."""

    stowed: StowOptimizer | None = None
    grid: Grid = Grid()  # of ranks; a plain one says nothing about their number
    gradients: StageGradients | None = None  # of a pipeline's stage
    two_level: TwoLevel | None = None  # what data parallelism exchanges by, where not by one ring
    compressed: Compressed | None = None  # how it exchanges less
    experts: ExpertParts | None = None  # where they are divided over ranks
    divides_by = 1  # the loss, while all micro-batches of a step pass a layer before the next
    _of_copies = False  # ``gather`` takes from one rank of each copy of the model
    loading_s = 0.0  # how long a batch may be waited for; 0: without end
    max_grad_norm: float | None = None  # if set, torch clips here before DeepSpeed steps
    last_norm: Any = None  # of the newest clipping, whichever library did it
    _norm: Tensor | None = None

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's, but with the memory engine the model is neither wrapped nor moved; it gets its autocast."""
        self.stowed = next((arg for arg in args if isinstance(arg, StowOptimizer)), self.stowed)
        if self.stowed is None:
            return super().prepare(*args, **kwargs)
        made = tuple(self._prepare_stowed(arg, kwargs) for arg in args)
        return made if len(made) > 1 else made[0]

    def _prepare_stowed(self, arg: Any, kwargs: dict[str, Any]) -> Any:
        if isinstance(arg, torch.nn.Module):
            return self.prepare_model(arg)
        if isinstance(arg, torch.optim.Optimizer) and self.scaler is not None:  # torch's, which decides about each step
            return self.prepare_optimizer(arg, device_placement=False)
        return super().prepare(arg, **kwargs) if isinstance(arg, torch.utils.data.DataLoader) else arg

    def prepare_data_loader(self, data_loader: Any, device_placement: bool | None = None, *args: Any) -> Any:
        """As Accelerate's; copies of the model are given different rows, ranks of one copy the same."""
        loading.guard(data_loader, self.loading_s)
        if self.grid.is_plain or getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, *args)
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=self.grid.replicas,
            process_index=self.grid.cell(self.process_index).replica,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,  # every rank reads: the one that would send knows nothing of copies
            even_batches=self.even_batches,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
        )
        self._dataloaders.append(prepared)
        return prepared

    def gather(self, tensor: Any) -> Any:
        """As Accelerate's; within ``gather_for_metrics`` one rank of each copy of the model is taken."""
        found = super().gather(tensor)
        if not self._of_copies:
            return found
        mine = self.grid.cell(self.process_index)
        chosen = [self.grid.rank(mine._replace(replica=replica)) for replica in range(self.grid.replicas)]

        def of_copies(each: Tensor) -> Tensor:
            return each.view(self.grid.world_size, -1, *each.shape[1:])[chosen].flatten(0, 1)

        return tree_map_only(torch.Tensor, of_copies, found)

    def gather_for_metrics(self, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's, from one rank of each copy of the model."""
        self._of_copies = not self.grid.is_plain
        try:
            return super().gather_for_metrics(*args, **kwargs)
        finally:
            self._of_copies = False

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """As Accelerate's, but a stowed model is neither moved nor wrapped, before training as well."""
        if stowed_by(model) is not None:
            device_placement, evaluation_mode = False, True
        if self.gradients is not None:
            evaluation_mode = True  # stages are not wrapped: their ranks hold different weights
        if self.compressed is not None and self.compressed.compression.local_steps:
            evaluation_mode = True  # nor are ranks that train alone
        prepared = super().prepare_model(model, device_placement, evaluation_mode)
        if isinstance(prepared, DistributedDataParallel):
            if self.two_level is not None:
                two_level.hook_of(self.two_level).hang_on(prepared)
            if self.compressed is not None:
                self.compressed.hang_on(prepared)
        return prepared

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Backward; under DeepSpeed also the step, when gradients are complete."""
        if self.stowed is not None and self.stowed.layers is not None and self.stowed.layers.runs:
            # Of all micro-batches, when they have come so far.
            self.stowed.layers.backward(loss / self.divides_by if self.divides_by > 1 else loss)
            return
        if self.max_grad_norm is None or self.distributed_type is not DistributedType.DEEPSPEED:
            with self.stowed.scaled_loss() if self.stowed is not None else nullcontext(1) as ranks:
                super().backward(loss / ranks if ranks > 1 else loss, **kwargs)
            if self.experts is not None and self.sync_gradients and not self.experts.is_in_zero:
                self.experts.complete()
            return
        engine = self.deepspeed_engine_wrapped.engine
        engine.set_gradient_accumulation_boundary(is_boundary=self.sync_gradients)
        with engine.no_sync() if self.two_level is not None else nullcontext():
            engine.backward(loss, **kwargs)
        if self.sync_gradients:
            if self.two_level is not None:
                two_level.average_gradients(self.two_level, engine.module.parameters())
            limit = self.max_grad_norm or float("inf")  # 0 switches clipping off; the norm is still logged
            clip = tensor_shards.clip_grad_norm_ if self.grid.tensor > 1 else clip_grad_norm_
            self._norm = clip(engine.module.parameters(), limit)
            engine.step()

    def get_state_dict(self, model: Any, unwrap: bool = True, place: Callable[[Tensor], Tensor] | None = None) -> Any:
        """As Accelerate's. Where ranks divide the weights of a copy, only the first has values, and they are whole.
        ``place``: puts one that was gathered where it stays.
        """
        keep = self.is_main_process
        if self.stowed is not None and self.stowed.makes_copies:
            return self.stowed.gathered(keep=keep, place=place)
        if self.experts is not None:
            return self.experts.state_dict(self.unwrap_model(model), keep=keep, place=place)
        if self.grid.tensor > 1:
            return tensor_shards.state_dict(self.unwrap_model(model), keep=keep, place=place)
        return super().get_state_dict(model, unwrap)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Any:
        """The norm before clipping. Gradients that the engine holds, or that were clipped in ``backward``, stay there.
        With the engine raise ValueError for another norm, or if parameters that have a gradient are left out.
        """
        if self.stowed is not None:
            self.unscale_gradients()
            self.last_norm = self._clip_stowed(self.stowed, parameters, max_norm, norm_type)
            if self.compressed is not None:  # the engine clips by its own, which stays as it is
                self.last_norm = self.compressed.norm_of_all(self.last_norm.clone())
        elif self.gradients is not None:
            self.last_norm = self.gradients.clip(max_norm)
        elif self.experts is not None and not self.experts.is_in_zero:
            self.last_norm = self.experts.clip(parameters, max_norm)
        elif self._norm is not None:
            self.last_norm = self._norm
        else:
            self.last_norm = super().clip_grad_norm_(parameters, max_norm, norm_type)
            if self.compressed is not None:
                self.last_norm = self.compressed.norm_of_all(self.last_norm)
        return self.last_norm

    @staticmethod
    def _clip_stowed(stowed: StowOptimizer, chosen: Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
        if norm_type != 2:
            raise ValueError(f"norm_type={norm_type}: a stowed model clips by the Euclidean norm, 2")
        ids = {id(parameter) for parameter in chosen}
        trained = [parameter for group in stowed.param_groups for parameter in group["params"]]
        left_out = sum(id(parameter) not in ids and parameter.grad is not None for parameter in trained)
        if left_out:
            raise ValueError(
                f"clip_grad_norm_ leaves out {left_out} of {len(trained)} parameters: all of a stowed model's are "
                f"clipped together; give it model.parameters()"
            )
        return stowed.clip_grad_norm_(max_norm)
