"""What every way of making a step is asked, and the plain one's answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from deepstow.strategies.core.grid import Grid
from deepstow.strategies.engine.optimizer import StowOptimizer
from deepstow.strategies.state.torch_state import plain_state
from deepstow.trainer.tasks.task import scores

Batch: TypeAlias = Any  # what the Trainer's collator makes
Place: TypeAlias = Callable[[Tensor], Tensor]  # puts a weight where it stays, and returns it from there


class Execution:
    """Each rank has a whole model, as Accelerate has it."""

    stowed: StowOptimizer | None = None  # the memory engine's, once it drives the model
    wraps = True  # Accelerate may wrap the model in DistributedDataParallel
    gives_logits = True  # evaluations have them; else the losses of tokens
    forward_is_collective = False
    position = 0  # among ranks that a forward goes through
    pipeline: Pipeline | None = None  # what these ranks run
    experts: ExpertParts | None = None  # of the experts that ranks divide

    def __init__(self, grid: Grid | None = None) -> None:
        """``grid``: of ranks; a plain one says nothing about their number."""
        self.grid = Grid() if grid is None else grid

    # --- the model and its optimizer ----------------------------------------------------------------------------------

    def start(self, trainer: Any) -> None:
        """``trainer`` has been made; a collective."""

    def adopt(self, optimizer: StowOptimizer) -> None:
        """The memory engine drives the model from now on."""
        raise TypeError(f"{type(self).__name__} has no memory engine")

    def among_ranks(self, model: Any) -> dict[str, Any]:
        """What ``stow`` is told about other ranks, if the defaults are not right; a collective."""
        return {}

    def wrapped(self, model: Any) -> None:
        """Accelerate has wrapped ``model`` in DistributedDataParallel."""

    def follow(self, optimizer: Any, model: Any) -> None:
        """``optimizer`` has been made for ``model``. May be told again."""

    def whole(self, model: Any) -> Any:
        """The model with all its names and shapes; ``model`` is what this rank has."""
        return model

    # --- a step -------------------------------------------------------------------------------------------------------

    def begin_step(self, batches: Sequence[Batch]) -> None:
        """The micro-batches of the next optimizer step."""

    def training_step(self, step: Callable[[Batch], Tensor], batch: Batch, num_items: Any) -> Tensor:
        """The loss of a micro-batch, after its backward; ``step`` is Hugging Face's. ``num_items``: tokens that the
        whole update trains, or None.
        """
        return step(batch)

    def loss(self, compute: Callable[..., Any], inputs: Batch, *, outputs: bool, num_items: Any) -> Any:
        """The loss of a micro-batch; with ``outputs``, a pair. ``compute``: Hugging Face's, of inputs, outputs and
        ``num_items``.
        """
        return compute(inputs, outputs, num_items)

    def backward(self, loss: Tensor, accelerator: Any, backward: Callable[..., None], **options: Any) -> None:
        """Backward of a micro-batch; ``backward`` is Accelerate's, of the loss and ``options``."""
        backward(loss, **options)

    def clip(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float, accelerator: Any, clip: Any) -> Any:
        """Clip the gradients of a step. Returns their norm before. ``clip``: Accelerate's, of the first three."""
        return clip(parameters, max_norm, norm_type)

    def forward_again(self, trainer: Any) -> None:
        """Forward of the last micro-batch."""
        trainer.compute_loss(trainer.model_wrapped, trainer.last_inputs)

    def backward_again(self, trainer: Any) -> None:
        """Forward and backward of the last micro-batch."""
        model = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
        trainer.compute_loss(model, trainer.last_inputs).backward()

    def figures(self) -> dict[str, float]:
        """What a record of training says besides; a collective."""
        return {}

    def finish(self) -> str:
        """After the last step; a line to say, or nothing."""
        return ""

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def predict(self, predict: Callable[[Batch], Any], model: Any, inputs: Batch) -> Any:
        """Loss, logits or losses of tokens, and labels; ``predict`` is Hugging Face's."""
        return predict(inputs)

    def logits(self, model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        """The logits of a row of tokens, on every rank. [1, tokens, vocabulary]"""
        return scores(model(**inputs))

    def evaluating(self) -> AbstractContextManager[None]:
        """Within it the model is what it is to others: evaluated and saved."""
        return nullcontext()

    def as_trained(self, model: Any) -> AbstractContextManager[None] | None:
        """Within it evaluations compute as training does; None: they do so anyway."""
        return None

    # --- weights and state --------------------------------------------------------------------------------------------

    def gathered(
        self, model: Any, *, keep: bool, place: Place | None = None, base: bool = True
    ) -> dict[str, Tensor] | None:
        """The state dict of the whole model, on ranks that ``keep`` it; a collective. None: Accelerate's own is right.
        ``model``: unwrapped. Without its ``base`` adapters may come alone.
        """
        return None

    def holder(self, trainer: Any) -> Any:
        """The training state that this rank has: a ``Holder`` (``strategies/state/saved_state.py``)."""
        return plain_state(trainer.inner_optimizer, trainer.model, writes=trainer.args.should_save)

    def save(self, folder: Path, rank: int) -> None:
        """Write what only this rank has beside that into a checkpoint. Raise OSError if it cannot be written."""

    def load(self, folder: Path, rank: int) -> str:
        """Take that over from a checkpoint. Returns a line to say, or nothing. Raise ValueError if it is damaged."""
        return ""

    def resumed(self) -> None:
        """Weights and optimizer are those of a checkpoint from now on."""


if TYPE_CHECKING:
    from deepstow.strategies.parallel.expert_parts import ExpertParts
    from deepstow.strategies.parallel.pipelining import Pipeline

    _Execution = Execution
else:
    _Execution = object


class Around(_Execution):
    """Another execution, ``inner``, but for what a subclass says."""

    def __init__(self, inner: Execution) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
