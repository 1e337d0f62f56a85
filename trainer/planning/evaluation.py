"""How many rows an evaluation takes at a time, so that it stays within the memory that training was planned for.

An evaluation keeps nothing for backward, and its rows may be more than those of a micro-batch: Hugging Face takes 8 by
default. What one row of full length needs at once, and what all need, is counted on fake tensors, as for training. A
number between lies below the line through both, since what is alive at each moment grows by the row. Between two steps
the arena, or the states, are on the device; the rest of the budget is the evaluation's, and at least as much as forward
and backward take.

A number of rows that the config does not set is lowered until it fits. One that it sets is refused if it does not fit.
Not counted: metrics of one's own, generated samples, and evaluations of a pipeline, whose stages have parts of a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.sizes import human
from deepstow.trainer.errors import ConfigError, first_line
from deepstow.trainer.model.count_cache import cached
from deepstow.trainer.planning import facts
from deepstow.trainer.planning.from_config import budget_of

if TYPE_CHECKING:
    from deepstow.strategies.core.plan import Plan
    from deepstow.trainer.config.sections import RunConfig

KEY = "training.per_device_eval_batch_size"
DEFAULT = 8  # Hugging Face's


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Bytes of the device that a forward of one row of full length takes, and that each further row adds at most."""

    first: int
    more: int

    @classmethod
    def through(cls, one: int, many: int, rows: int) -> Evaluation:
        """From the bytes of ``one`` row and of ``many``, which are so many ``rows``."""
        return cls(one, -(-(many - one) // max(1, rows - 1)))

    def of(self, rows: int) -> int:
        """Bytes of so many rows at a time."""
        return self.first + (rows - 1) * self.more

    def fitting(self, room: int) -> int:
        """The most rows that ``room`` bytes hold; 0: not even one."""
        return 0 if room < self.first else 1 + (room - self.first) // max(1, self.more)


def asked(config: RunConfig) -> bool:
    """Whether the config has rows to evaluate."""
    return any((config.data.eval_path, config.data.eval_split, config.data.eval_fraction))


class Taken(NamedTuple):
    """How many ``rows`` an evaluation takes at a time; the ``peak`` of the device in it, bytes, with what training has
    there (0: not counted); and a ``line`` about it, where there is something to say.
    """

    rows: int
    peak: int = 0
    line: str = ""


def rows(config: RunConfig, plan: Plan, *, masked: bool = True) -> Taken:
    """How many rows an evaluation takes. Raise ConfigError if those of the config do not fit, or not even one does."""
    by_user = config.training.per_device_eval_batch_size
    num_rows = by_user or DEFAULT
    if plan.facts.run.stages > 1:
        return Taken(num_rows)
    try:
        what = f"evaluation of {num_rows}{' without mask' * (not masked)}"
        counted = cached(config, Evaluation, lambda: count(config, num_rows, masked=masked), what=what)
    except ConfigError:
        raise  # held-out rows may be longer than those of training, and than the model has positions
    except Exception as error:  # forward without labels may do what the one that was counted for training does not
        return Taken(num_rows, line=f"evaluation: its memory is not counted: {first_line(error)}")
    room = room_of(config, plan)
    most = counted.fitting(room)
    if num_rows <= most:
        return _taken(counted, num_rows, plan)
    what = f"{human(counted.of(num_rows))} on the device, where the plan leaves {human(room)}"
    if most == 0:
        cure = "lower data.max_length, give training more memory, or leave the held-out rows out"
        raise ConfigError(f"evaluation: one row of {config.data.max_length} tokens takes {what}; {cure}")
    if by_user is not None:
        raise config.error(KEY, by_user, f"an evaluation of so many rows takes {what}; the largest that fits is {most}")
    return _taken(counted, most, plan, f", since {DEFAULT} take {what}")


def _taken(counted: Evaluation, number: int, plan: Plan, why: str = "") -> Taken:
    """``why``: they are fewer than Hugging Face's."""
    peak = plan.beside() + counted.of(number)
    more = f"; the device has {human(peak)} then, more than in training" if peak > plan.peak(Tier.DEVICE) else ""
    line = f"evaluation: {number} row{'s' if number > 1 else ''} at a time{why}{more}" if why or more else ""
    return Taken(number, peak, line)


def room_of(config: RunConfig, plan: Plan) -> int:
    """Bytes of the device that an evaluation may take."""
    return max(budget_of(config, plan) - plan.beside(), plan.saved_peak())


def count(config: RunConfig, rows: int, *, masked: bool = True) -> Evaluation:
    """Run one row and so many ``rows`` forward on fake tensors, without gradients, with the losses of tokens."""
    import torch

    from deepstow.strategies.engine.tensors import quantised
    from deepstow.trainer.model.stubs import fake_tensors
    from deepstow.trainer.model.temporaries import peak_of

    task = config.chosen_task
    model = facts.meta_model(config)
    facts.cast_weights(config, model)
    with fake_tensors(), quantised.counted_with(model, lambda meta: torch.empty_like(meta, device="cpu")):
        model.eval()
        model.config.use_cache = False
        peaks = []
        for number in (1, rows):
            shape = (number * task.sequences(config), config.data.max_length)
            inputs = facts.inputs_of(config, model, shape, masked=masked)
            peaks.append(peak_of(model, lambda: _forward(config, model, inputs)))  # noqa: B023
    first, last = peaks
    return Evaluation.through(first, last, rows)


def _forward(config: RunConfig, model: Any, inputs: dict[str, Any]) -> Any:
    """One step of an evaluation, as the Trainer makes it."""
    import torch
    from accelerate.utils import convert_to_fp32

    from deepstow.trainer.tasks.task import losses_of, scores

    task, autocast = config.chosen_task, facts.autocast_of(config)
    arguments, labels = dict(inputs), None
    if task.language and not any(recipe.own_loss for recipe in config.switched_on):
        labels = arguments.pop("labels")
        labels = arguments.pop("shift_labels", labels)  # of a slice of a row
    with torch.no_grad(), torch.autocast("cpu", autocast, enabled=autocast is not None):
        outputs = task.forward(model, config)(**arguments)
    outputs = outputs if autocast is None else convert_to_fp32(outputs)
    return outputs if labels is None else losses_of(scores(outputs), labels)  # not shifted: as many, but for one
