"""An ``Accelerator`` for the three ways in which an optimizer step is made.

Plain: Accelerate wraps model and optimizer, and torch clips. DeepSpeed: its engine reduces, clips and steps inside
``backward``. The memory engine (``stow``): it has hooked the model itself, so nothing may be wrapped or moved, and it
clips the gradients that it holds.

Under ZeRO stage 0 in fp32 DeepSpeed would clip with another formula (it multiplies by the reciprocal of the norm) and
report no norm. The gradients are whole on every rank after reduction there, so torch's own clipping runs between
backward and step: the result has the bits of plain training, and the gradient norm is logged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from accelerate import Accelerator
from accelerate.utils import DistributedType

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


@runtime_checkable
class DrivesModel(Protocol):
    """An optimizer that has hooked the model itself and clips the gradients that it holds."""

    param_groups: list[dict[str, Any]]

    def clip_grad_norm_(self, max_norm: float) -> Tensor: ...

    def step(self) -> None: ...


class StowAccelerator(Accelerator):
    """Accelerate's Accelerator, unchanged for plain training and for DeepSpeed with stages 1 to 3."""

    driver: DrivesModel | None = None
    max_grad_norm: float | None = None  # if set, torch clips here before DeepSpeed steps
    last_norm: Any = None  # of the newest clipping, whichever library did it
    _norm: Tensor | None = None

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's, but with the memory engine the model is neither wrapped nor moved; it gets its autocast."""
        self.driver = next((arg for arg in args if isinstance(arg, DrivesModel)), self.driver)
        if self.driver is None:
            return super().prepare(*args, **kwargs)
        made = tuple(self._prepare_driven(arg, kwargs) for arg in args)
        return made if len(made) > 1 else made[0]

    def _prepare_driven(self, arg: Any, kwargs: dict[str, Any]) -> Any:
        from torch import nn
        from torch.utils.data import DataLoader

        if isinstance(arg, nn.Module):
            return self.prepare_model(arg, device_placement=False, evaluation_mode=True)
        return super().prepare(arg, **kwargs) if isinstance(arg, DataLoader) else arg

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Backward; under DeepSpeed also the step, when gradients are complete."""
        if self.max_grad_norm is None or self.distributed_type is not DistributedType.DEEPSPEED:
            super().backward(loss, **kwargs)
            return
        from torch.nn.utils import clip_grad_norm_

        engine = self.deepspeed_engine_wrapped.engine
        engine.set_gradient_accumulation_boundary(is_boundary=self.sync_gradients)
        engine.backward(loss, **kwargs)
        if self.sync_gradients:
            limit = self.max_grad_norm or float("inf")  # 0 switches clipping off; the norm is still logged
            self._norm = clip_grad_norm_(engine.module.parameters(), limit)
            engine.step()

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Any:
        """The norm before clipping; clips unless the driver has clipped already."""
        self.last_norm = self._clip(parameters, max_norm, norm_type)
        return self.last_norm

    def _clip(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float) -> Any:
        if self.driver is not None:
            if norm_type != 2:
                raise ValueError(f"norm_type={norm_type}: a stowed model clips by the Euclidean norm, 2")
            self._refuse_some(parameters, self.driver)
            return self.driver.clip_grad_norm_(max_norm)
        if self._norm is not None:
            return self._norm
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    @staticmethod
    def _refuse_some(chosen: Iterable[Tensor], driver: DrivesModel) -> None:
        """Raise ValueError if a parameter that has a gradient is not among ``chosen``: all are clipped together."""
        ids = {id(parameter) for parameter in chosen}
        trained = [parameter for group in driver.param_groups for parameter in group["params"]]
        left_out = sum(id(parameter) not in ids and parameter.grad is not None for parameter in trained)
        if left_out:
            raise ValueError(
                f"clip_grad_norm_ leaves out {left_out} of {len(trained)} parameters: all of a stowed model's are "
                f"clipped together; give it model.parameters()"
            )
