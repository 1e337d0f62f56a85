"""The gradients of one bucket between backward and step: which parameters have one, and where it is.

In plain torch a gradient stays on the parameter until it is removed: a second backward adds to it, a second ``step``
uses it again, and ``zero_grad(set_to_none=False)`` leaves a zero, with which ``step`` decays the weight. Here ``step``
takes the gradients away, and there is no memory for a zero gradient. So loops that would train differently are refused:
a gradient is *spent* from ``step`` until ``zero_grad``, and cannot be read, added to or stepped with; a *zeroed*
parameter must get a gradient before the next step.

Only this class changes its sets; others call its methods. Parameters are given by their index in the bucket.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from deepstow.strategies.engine.transfer.transfer import Event


@dataclass(slots=True, eq=False)
class GradientState:
    """Sets of parameters of one bucket by the state of their gradient, and the copies and additions under way."""

    params: tuple[str, ...]  # names, for messages
    landed: set[int] = field(default_factory=set)  # in the slot, of this micro-batch
    unsent: set[int] = field(default_factory=set)  # of those landed: not yet on their way to the host
    touched: set[int] = field(default_factory=set)  # have a gradient since the last update
    summed: set[int] = field(default_factory=set)  # of those touched: the gradient is in PARKED
    spent: set[int] = field(default_factory=set)  # stepped with, and not zeroed since
    zeroed: set[int] = field(default_factory=set)  # set to zero instead of None
    norms: dict[int, Tensor] = field(default_factory=dict)
    host_norms: tuple[list[int], Future[list[Tensor]]] | None = None  # being computed by the worker
    sent: Event | None = None  # DOWN wrote PARKED or ARRIVAL from the gradient slot
    added: Future[Event] | None = None  # the worker's last addition to PARKED
    taken: Future[tuple[bool, Event]] | None = None  # the worker's update with what was sent last; None: not submitted

    @property
    def complete(self) -> bool:
        return len(self.landed) == len(self.params)

    def exists(self, index: int) -> bool:
        """Whether plain torch would show a gradient on this parameter."""
        return index in self.touched or index in self.spent or index in self.zeroed

    # --- from backward to the place where gradients wait -------------------------------------------------------------

    def new_pass(self) -> None:
        self.landed.clear()

    def land(self, index: int) -> None:
        """Autograd's gradient is in the slot."""
        self.landed.add(index)
        self.touch(index)

    def touch(self, index: int) -> None:
        """The slot holds a gradient for this parameter, landed here or on another rank."""
        self.touched.add(index)
        self.unsent.add(index)

    def send(self, *, sent: Event) -> None:
        """DOWN copies everything unsent."""
        self.sent = sent
        self.taken = None
        self.summed |= self.unsent
        self.unsent.clear()

    def take(self, update: Future[tuple[bool, Event]]) -> None:
        """The worker has been given the update, after which nobody reads PARKED."""
        self.taken = update

    def measured(self, indices: Iterable[int], norms: Iterable[Tensor]) -> None:
        """The norms of these gradients are known, of which some may have been forgotten since."""
        self.norms |= {index: norm for index, norm in zip(indices, norms, strict=True) if index in self.touched}
        self.host_norms = None

    def rewritten(self, index: int, norm: Tensor) -> None:
        """Outside code has written to this gradient."""
        self.norms[index] = norm
        self.zeroed.discard(index)

    def forget(self, index: int) -> None:
        """As if this parameter had got no gradient since the last update."""
        self.touched.discard(index)
        self.unsent.discard(index)
        self.norms.pop(index, None)

    def reset(self) -> None:
        for indices in (self.landed, self.unsent, self.touched, self.summed):
            indices.clear()
        self.norms = {}
        self.host_norms = None

    # --- after the step: spent and zeroed ----------------------------------------------------------------------------

    def spend(self) -> None:
        self.spent |= self.touched
        self.zeroed.clear()

    def zero(self, *, to_none: bool) -> None:
        """``zero_grad``: gradients become None, or zero where there were any."""
        self.zeroed = set() if to_none else self.zeroed | self.touched | self.spent
        self.spent.clear()

    def zero_one(self, index: int) -> None:
        self.zeroed.add(index)

    def forget_spent(self, index: int) -> bool:
        """``param.grad = None``; whether that is done already, since a step had taken the gradient."""
        self.zeroed.discard(index)
        was_spent = index in self.spent
        self.spent.discard(index)
        return was_spent

    def refuse_spent(self, index: int) -> None:
        if index in self.spent:
            raise RuntimeError(
                f"step() took the gradient of {self.params[index]}: read it before, and call zero_grad() after "
                f"every step()"
            )

    def refuse_leftovers(self) -> None:
        """Raise RuntimeError if plain torch would step with a gradient that backward has not brought since."""
        for index in self.spent:
            self.refuse_spent(index)
        for index in self.zeroed - self.touched:
            raise RuntimeError(
                f"{self.params[index]} has a gradient of zero and got none in backward, but step() would still update "
                f"it: call zero_grad() without set_to_none=False"
            )
