"""Run a step's micro-batches through the stages of a pipeline, with ``torch.distributed.pipelining``.

Torch's schedules cut one batch into equal micro-batches, and every tensor that travels has one shape. Here
micro-batches are those of gradient accumulation, which differ in length, and the last of an epoch in rows. So a
schedule is given the numbers of the micro-batches, and each part looks its inputs up: every stage loads the same
batches. What travels are the tokens' hidden states laid end to end, padded to the longest micro-batch. The padding is
cut off on arrival, and gets no gradient. A schedule holds buffers of that length and no weights; it is made again when
a micro-batch is longer, when all are less than half as long, or when there are more or fewer of them.

The sums of one parameter's gradients are in the order of micro-batches in every schedule, as in one process that
accumulates; ``scale_grads`` is off, since losses are divided already.

A step at the end of an epoch may have fewer micro-batches than a schedule takes. As many as it takes go through it; the
others follow one by one, so that no stage ever has more of them under way than was planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from deepstow.strategies.core.grid import Grid
from deepstow.strategies.parallel.stages import Stage
from deepstow.strategies.planner.cuts import Schedule

CLASSES: Mapping[Schedule, str] = {
    Schedule.GPIPE: "ScheduleGPipe",
    Schedule.ONE_F_ONE_B: "Schedule1F1B",
    Schedule.INTERLEAVED: "ScheduleInterleaved1F1B",
    Schedule.INTERLEAVED_ZERO_BUBBLE: "ScheduleInterleavedZeroBubble",
    Schedule.ZBV: "ScheduleZBVZeroBubble",
    Schedule.DUALPIPEV: "ScheduleDualPipeV",
}
ONE: Mapping[Schedule, str] = {  # take a single micro-batch, with as many parts
    Schedule.ONE_F_ONE_B: "ScheduleGPipe",
    Schedule.INTERLEAVED: "ScheduleLoopedBFS",
    Schedule.INTERLEAVED_ZERO_BUBBLE: "ScheduleLoopedBFS",
    Schedule.DUALPIPEV: "ScheduleZBVZeroBubble",
}
Inputs = Mapping[str, Any]
LossOf = Callable[[Inputs], Tensor]


class _Part(nn.Module):
    """One part as torch's schedules call it: the number of a micro-batch in, hidden states or a loss out. Weights are
    listed for schedules that compute their gradients apart.
    """

    def __init__(self, pipeline: Pipeline, part: int) -> None:
        super().__init__()
        self._run = pipeline.run
        self._part = part
        if pipeline.kind.splits_backward:
            for number, weight in enumerate(pipeline.stage.parameters(part)):
                self.register_parameter(str(number), weight)

    def forward(self, hidden: Tensor, number: Tensor) -> Tensor:
        return self._run(self._part, None if self._part == 0 else hidden, int(number))


class Pipeline:
    """The stages of one copy of the model, seen from one of them."""

    before_backward: Callable[[], None] | None = None  # called when the backward of a micro-batch begins

    def __init__(
        self,
        stage: Stage,
        schedule: Schedule,
        group: dist.ProcessGroup,  # of the ranks that this copy's micro-batches go through, in their order
        device: torch.device,
        # Around the forward of every part but the last, which the loss has around it: autocast.
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.stage = stage
        self.group = group
        self.device = device
        self._context = context
        self._width = stage.form.width
        self._dtype = stage.form.dtype
        self.position, self.stages = dist.get_rank(group), dist.get_world_size(group)
        self.kind = schedule
        self._made: tuple[tuple[int, int, bool], Any] | None = None
        self._batches: Sequence[Inputs] = ()
        self._loss_of: LossOf | None = None
        self._rows = 0

    @property
    def has_loss(self) -> bool:
        return self.stage.is_last(max(self.stage.mine))

    @property
    def last(self) -> int:
        """The place in the group of the rank that has the last part."""
        return self.kind.stage_of(len(self.stage.parts) - 1, self.stages)

    def step(self, batches: Sequence[Inputs], loss_of: LossOf) -> Tensor:
        """Forward and backward of all micro-batches. Gradients are added to ``grad`` of the weights.

        Args:
            batches: the same on all stages.
            loss_of: of a micro-batch; called with the model as the last part.

        Returns:
            The losses, on every stage. [micro-batches]
        """
        longest = max(batch["input_ids"].numel() for batch in batches)
        if not longest <= self._rows <= 2 * longest:
            self._rows = longest
        return self.from_last(torch.cat([self._run_together(turn, loss_of) for turn in self._turns(batches)]))

    def _turns(self, batches: Sequence[Inputs]) -> Iterator[Sequence[Inputs]]:
        """As many as the schedule takes together, then the others one by one."""
        counts = range(len(batches), 0, -1)
        most = next((count for count in counts if self.kind.takes(count, self.stages)), 0)
        if most:
            yield batches[:most]
        yield from ([batch] for batch in batches[most:])

    def _run_together(self, batches: Sequence[Inputs], loss_of: LossOf) -> Tensor:
        """Losses, where the last part is. [micro-batches]"""
        self._batches = batches
        self._loss_of = loss_of
        schedule, losses = self._schedule(len(batches)), list[Tensor]()
        numbers = torch.arange(len(batches))
        first = (numbers,) if 0 in self.stage.mine else ()
        ends = {"target": numbers, "losses": losses} if self.has_loss else {}
        with _as_raised():
            schedule.step(*first, number=numbers, return_outputs=False, **ends)
        self._batches = ()
        self._loss_of = None
        stacked = torch.stack([loss.detach().reshape(()) for loss in losses]) if losses else torch.empty(len(batches))
        return stacked.float().to(self.device)

    def from_last(self, tensor: Tensor) -> Tensor:
        """``tensor`` of the rank that has the last part, on every stage."""
        dist.broadcast(tensor, dist.get_global_rank(self.group, self.last), group=self.group)
        return tensor

    def forward(self, inputs: Inputs, outputs_of: Callable[[Inputs], Tensor], shape: tuple[int, ...]) -> Tensor:
        """``outputs_of`` a batch in fp32, called with the model as the last part. On every stage; no gradients."""
        rows, hidden = inputs["input_ids"].numel(), None
        for part in range(len(self.stage.parts) - 1):
            sender, receiver = (self.kind.stage_of(index, self.stages) for index in (part, part + 1))
            if sender == self.position:
                hidden = self._flat(self._hidden_states(part, hidden, inputs), rows)
            if sender != receiver and self.position in (sender, receiver):
                peer = dist.get_global_rank(self.group, receiver if self.position == sender else sender)
                if self.position == sender:
                    assert hidden is not None
                    dist.send(hidden, peer, group=self.group)
                else:
                    hidden = torch.empty(rows, self._width, dtype=self._dtype, device=self.device)
                    dist.recv(hidden, peer, group=self.group)
            if receiver == self.position:
                assert hidden is not None
                hidden = hidden.view(*inputs["input_ids"].shape, self._width)
        outputs = torch.empty(shape, device=self.device)
        if self.has_loss:
            with self.stage.only(len(self.stage.parts) - 1, hidden):
                outputs = outputs_of(inputs).float().contiguous()
        return self.from_last(outputs)

    def run(self, part: int, given: Tensor | None, number: int) -> Tensor:
        """Forward of one part for a micro-batch, as a schedule asks for it."""
        inputs = self._batches[number]
        ids = inputs["input_ids"]
        hidden = None if given is None else given[: ids.numel()].view(*ids.shape, self._width)
        if not self.stage.is_last(part):
            output = self._flat(self._hidden_states(part, hidden, inputs), self._rows)
        else:
            assert self._loss_of is not None
            with self.stage.only(part, hidden):
                output = self._loss_of(inputs).reshape(1)
        if (begin := self.before_backward) is not None and output.requires_grad:
            output.register_hook(lambda grad: begin())  # runs before the first node of its backward
        return output

    def _hidden_states(self, part: int, hidden: Tensor | None, inputs: Inputs) -> Tensor:
        with self._context():
            output = self.stage.hidden_states(part, hidden, inputs)
        assert output.dtype is self._dtype, (
            f"hidden states of part {part} are {output.dtype}, and travel as {self._dtype}"
        )
        return output

    def _flat(self, hidden: Tensor, rows: int) -> Tensor:
        """``hidden`` states end to end, padded. Schedules that split backward detach it in place: not a view then."""
        flat = hidden.reshape(-1, self._width)
        if len(flat) < rows:
            return nn.functional.pad(flat, (0, 0, 0, rows - len(flat)))
        return flat.clone() if self.kind.splits_backward else flat.contiguous()

    def _schedule(self, count: int) -> Any:
        key = (count, self._rows, self.kind.takes(count, self.stages))
        if self._made is None or self._made[0] != key:
            self._made = (key, self._make(count, CLASSES[self.kind] if key[2] else ONE[self.kind]))
        return self._made[1]

    def _make(self, count: int, name: str) -> Any:
        parts = len(self.stage.parts)
        stages = [
            pipelining.PipelineStage(
                _Part(self, part),
                part,
                parts,
                self.device,
                self._example(part),
                self._example(part + 1),
                group=self.group,
            )
            for part in self.stage.mine
        ]
        kind = getattr(pipelining, name, None) or getattr(pipelining.schedules, name)
        single = self.kind.parts_per_stage == 1
        return kind(stages[0] if single else stages, count, loss_fn=_only, scale_grads=False)

    def _example(self, border: int) -> Tensor:
        """What crosses the ``border`` in front of a part: numbers at the first, a loss behind the last."""
        if border == 0:
            return torch.empty(1, dtype=torch.int64, device="meta")
        if border == len(self.stage.parts):
            return torch.empty(1, device="meta")
        return torch.empty(self._rows, self._width, dtype=self._dtype, device="meta", requires_grad=True)


@contextmanager
def _as_raised() -> Iterator[None]:
    """Errors of a stage as they were raised. Torch's stages raise another one from them, which does not say whether
    memory is short or another rank has ended.
    """
    try:
        yield
        return
    except RuntimeError as error:
        if (cause := error.__cause__) is None:
            raise
    raise cause  # without the other one, whose frames would be kept


def _only(losses: Tensor, numbers: Tensor) -> Tensor:
    """The loss that a last part has given, as a scalar that is not a view."""
    return losses.sum()


def groups(grid: Grid) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The group of this rank's pipeline, and that of the ranks with the same stage in all copies; a collective."""
    mine, _ = dist.new_subgroups_by_enumeration(grid.groups("stage"))
    copies, _ = dist.new_subgroups_by_enumeration(grid.groups("replica"))
    return mine, copies
