"""A run that prunes: at its rounds weights become zero, and at its end it says how many of which layers are.

A round comes before the first forward of a step, so a checkpoint of that step is of before the round, and a run that is
resumed from it makes the round itself, from the same weights. All that pruning remembers is the zeros of the weights
(``zeros.py``), from the first step on.

For wanda the first rows of the training data go through the model as it is before the round, one at a time and without
dropout; the norms of all layers are taken from that pass.

Refused: a matrix that is all zeros, which would never learn; input sizes that fours do not divide, for 2:4.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.pytorch_utils import Conv1D

from deepstow.strategies.engine.forward.blocks import find_blocks
from deepstow.strategies.report.table import table
from deepstow.trainer.errors import write_line
from deepstow.trainer.recipes.prune import asked_of
from deepstow.trainer.recipes.prune.rounds import matches, rounds
from deepstow.trainer.recipes.prune.zeros import chosen, exact, keep_zeros, replace

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig


class Layer(NamedTuple):
    """A module whose weight is pruned. ``group``: its name inside of its block."""

    name: str
    group: str
    module: Any  # nn.Linear, or GPT-2's Conv1D

    @property
    def weight(self) -> nn.Parameter:
        weight: nn.Parameter = self.module.weight
        return weight

    def by_output(self, weight: Tensor) -> Tensor:
        """A view of ``weight`` as [outputs, inputs]."""
        return weight.t() if isinstance(self.module, Conv1D) else weight


def layers_of(model: nn.Module, config: RunConfig) -> list[Layer]:
    """The layers to prune, in order. ConfigError: there are none, or one does not fit 2:4."""
    section = asked_of(config)
    linear = [
        Layer(f"{path}.{name}", name, module)
        for path, block in find_blocks(model).items()
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module.weight.requires_grad
    ]
    layers = [layer for layer in linear if matches(section, layer.name)]
    if not layers:
        groups = ", ".join(dict.fromkeys(layer.group for layer in linear)) or "none"
        raise config.error("prune.modules", section.modules, f"no linear layer of a block has such a name: {groups}")
    for layer in layers if section.method == "2:4" else ():
        if (inputs := layer.by_output(layer.weight).shape[1]) % 4:
            what = (
                f"{layer.name} has {inputs} inputs, which cannot be taken four by four; leave it out by prune.modules"
            )
            raise config.error("prune.method", section.method, what)
    return layers


class Pruning(TrainerCallback):
    """Prunes the model of ``trainer`` as ``config`` says."""

    def __init__(self, trainer: Any, config: RunConfig) -> None:
        self._trainer, self._config, self._section = trainer, config, asked_of(config)
        self._layers = layers_of(trainer.model, config)
        self._rounds: dict[int, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._optimizer = getattr(self._trainer.optimizer, "optimizer", self._trainer.optimizer)  # without Accelerate's
        self._rounds = rounds(self._section, state.max_steps)
        keep_zeros(self._optimizer, [layer.weight for layer in self._layers])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        sparsity, section = self._rounds.get(state.global_step), self._section
        if sparsity is None:
            return
        norms = self._norms(section.calibration_rows) if section.method == "wanda" else {}
        for layer in self._layers:
            value = exact(self._optimizer, layer.weight)
            if not value.any():
                what = f"{layer.name} is all zeros already, and would stay so; choose others"
                raise self._config.error("prune.modules", section.modules, what)
            mask = chosen(layer.by_output(value), section.method, sparsity, norms.get(layer.name))
            layer.by_output(value).masked_fill_(mask, 0.0)
            replace(self._optimizer, layer.weight, value)
        write_line(f"prune: {self._counted().words}, before step {state.global_step + 1}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        write_line("\n".join(self._counted().table()))

    def _counted(self) -> Counts:
        """The zeros of now, after they were logged."""
        counts = Counts()
        for layer in self._layers:
            counts.add(layer, exact(self._optimizer, layer.weight))
        self._trainer.log({"sparsity": counts.share, **counts.shares()})
        return counts

    @torch.no_grad()
    def _norms(self, rows: int) -> dict[str, Tensor]:
        """Of each input channel of each layer, on the CPU, over the first ``rows`` rows."""
        trainer = self._trainer
        model = self._trainer.model
        was_training = self._trainer.model.training
        loss_inputs = {"labels", *trainer.data_collator.columns}  # what a loss takes
        model.eval()
        with _squares(self._layers) as squares:
            for index in range(min(rows, len(trainer.train_dataset))):
                batch = send_to_device(trainer.data_collator([trainer.train_dataset[index]]), trainer.args.device)
                model(**{name: tensor for name, tensor in batch.items() if name not in loss_inputs})
        model.train(was_training)
        return {name: total.sqrt().cpu() for name, total in squares.items()}


class Counts:
    """Zeros and elements by group of layers."""

    def __init__(self) -> None:
        self._groups: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])

    def add(self, layer: Layer, value: Tensor) -> None:
        for index, amount in enumerate((1, value.numel(), value.numel() - int(value.count_nonzero()))):
            self._groups[layer.group][index] += amount

    @property
    def share(self) -> float:
        return sum(zeros for *_, zeros in self._groups.values()) / sum(size for _, size, _ in self._groups.values())

    @property
    def words(self) -> str:
        return f"{self.share:.2%} of {sum(size for _, size, _ in self._groups.values()):,} weights are zero"

    def shares(self) -> dict[str, float]:
        return {f"sparsity/{name}": zeros / size for name, (_, size, zeros) in self._groups.items()}

    def table(self) -> list[str]:
        rows = ((n, str(k), f"{size:,}", f"{zeros / size:.2%}") for n, (k, size, zeros) in self._groups.items())
        lines = table(("layer", "blocks", "weights", "zeros"), rows, {"blocks", "weights", "zeros"})
        return [f"prune: {self.words}", *lines]


@contextmanager
def _squares(layers: list[Layer]) -> Iterator[dict[str, Tensor]]:
    """The sums of squares of each input channel, in fp32, of all calls inside of the block."""
    squares: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def add(module: nn.Module, inputs: Any) -> None:
            sums = inputs[0].float().square().flatten(0, -2).sum(0)
            squares[name] = squares[name] + sums if name in squares else sums

        return add

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.module.register_forward_pre_hook(hook(layer.name)).remove)
        yield squares
