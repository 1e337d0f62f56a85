"""Sums and gathers over the ranks of several machines: phases inside each machine, and across machines.

    all-reduce of W bytes on M machines of g ranks
    inside    each rank gets, from the ranks of its machine, their values of W/g, and adds them in the order of ranks
    across    ranks at the same place of their machines do so with W/g/M, in the order of machines: the sum of a span
    across    they give each other the sums of their spans
    inside    so do the ranks of a machine, of W/g each

The first two are a sum to owners of spans, the last two a gather; spans are of one size, in the order of ranks, and the
last ones may be shorter or empty. Of W bytes (M-1)/M W/g leave a rank's machine each time. Every phase is made of
messages between two ranks, since those have no order of sums of their own, and need no memory but what they receive.

Invariant. An element's sum is ((r0 + r1) + (r2 + r3)) on two machines of two ranks, whatever the number of slices and
wherever the element is, and all ranks end with the bits of its owner. On one machine, or one rank on each, that is the
order of ranks.

Ordering. Slices are parts of every span, so no two of them use the same elements. A phase of a slice is issued when its
former one is over, both what it sent and what it received; in the meantime other slices are in other phases. Every
rank issues the same phases of the same slices in the same order, and messages between two ranks are in the order of
machines. Inside and across are groups of their own, so neither waits for the other's messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from deepstow.strategies.core.plan import Plan

Part: TypeAlias = tuple[int, int]  # of each span: the first element, and the one behind the last
Finish: TypeAlias = Callable[[], None]
Phase: TypeAlias = Callable[[Tensor, Tensor, Part], Finish]


class TwoLevel:
    """The exchanges of all ranks of a job, ``here`` neighbours on each machine. Making it is a collective."""

    def __init__(self, here: int, slices: int) -> None:
        self.ranks = dist.get_world_size()
        self._here = here
        self._slices = slices
        assert self.ranks % here == 0, "machines have as many ranks"
        self._machine, self._place = divmod(dist.get_rank(), here)
        machines = [list(range(first, first + here)) for first in range(0, self.ranks, here)]
        self._inside, _ = dist.new_subgroups_by_enumeration(machines)
        self._across, _ = dist.new_subgroups_by_enumeration([list(peers) for peers in zip(*machines, strict=True)])
        self._machines = range(len(machines))
        self._neighbours = [place for place in range(here) if place != self._place]
        self._others = [machine for machine in self._machines if machine != self._machine]

    def room(self, num_elements: int) -> int:
        """Elements that ``received`` must have for a flat tensor of so many."""
        return self._share(num_elements) * self.ranks

    def all_reduce(self, flat: Tensor, received: Tensor) -> None:
        """``flat`` becomes the sum over the ranks."""
        self._run([self._add_inside, self._add_across, self._gather_across, self._gather_inside], flat, received)

    def sum_to_owners(self, flat: Tensor, received: Tensor) -> None:
        """This rank's span of ``flat`` becomes the sum over the ranks; the others are overwritten."""
        self._run([self._add_inside, self._add_across], flat, received)

    def gather(self, flat: Tensor) -> None:
        """Every span of ``flat`` becomes that of its rank."""
        self._run([self._gather_across, self._gather_inside], flat, flat)

    def _run(self, phases: Sequence[Phase], flat: Tensor, received: Tensor) -> None:
        share, many = self._share(flat.numel()), self._slices
        under_way: dict[int, Finish] = {}
        for tick in range(many + len(phases)):
            for number in range(len(phases) + 1):
                slice_index = tick - number
                if not 0 <= slice_index < many:
                    continue
                if number > 0:
                    under_way.pop(slice_index)()
                if number < len(phases):
                    bounds = (share * slice_index // many, share * (slice_index + 1) // many)
                    under_way[slice_index] = phases[number](flat, received, bounds)

    # --- phases: each issues its messages, and returns what to do until they are over ------------------------------

    def _add_inside(self, flat: Tensor, received: Tensor, part: Part) -> Finish:
        mine = [self._of(flat, machine, self._place, part) for machine in self._machines]
        sends, gets = [], []
        for place in self._neighbours:
            for machine in self._machines:
                sends.append((place, self._of(flat, machine, place, part)))
                gets.append((place, self._of(received, machine, place, part)[: mine[machine].numel()]))
        wait = self._exchange(self._inside, sends, gets)

        def finish() -> None:
            wait()
            for machine, own_part in enumerate(mine):
                came = [self._of(received, machine, place, part)[: own_part.numel()] for place in range(self._here)]
                _add_up(own_part, came, self._place)

        return finish

    def _add_across(self, flat: Tensor, received: Tensor, part: Part) -> Finish:
        own_part = self._of(flat, self._machine, self._place, part)
        came = [self._of(received, machine, self._place, part)[: own_part.numel()] for machine in self._machines]
        sends = [(machine, self._of(flat, machine, self._place, part)) for machine in self._others]
        wait = self._exchange(self._across, sends, [(machine, came[machine]) for machine in self._others])

        def finish() -> None:
            wait()
            _add_up(own_part, came, self._machine)

        return finish

    def _gather_across(self, flat: Tensor, received: Tensor, part: Part) -> Finish:
        own_part = self._of(flat, self._machine, self._place, part)
        gets = [(machine, self._of(flat, machine, self._place, part)) for machine in self._others]
        return self._exchange(self._across, [(machine, own_part) for machine in self._others], gets)

    def _gather_inside(self, flat: Tensor, received: Tensor, part: Part) -> Finish:
        pairs = [(place, machine) for place in self._neighbours for machine in self._machines]
        sends = [(place, self._of(flat, machine, self._place, part)) for place, machine in pairs]
        gets = [(place, self._of(flat, machine, place, part)) for place, machine in pairs]
        return self._exchange(self._inside, sends, gets)

    # --- spans and messages ----------------------------------------------------------------------------------------

    def _share(self, num_elements: int) -> int:
        return -(-num_elements // self.ranks)

    def _of(self, flat: Tensor, machine: int, place: int, part: Part) -> Tensor:
        """A part of the span of the rank at ``place``; fewer elements, or none, where ``flat`` ends."""
        first = (machine * self._here + place) * self._share(flat.numel())
        return flat[first + part[0] : first + part[1]]

    @staticmethod
    def _exchange(group: Any, sends: Sequence[tuple[int, Tensor]], gets: Sequence[tuple[int, Tensor]]) -> Finish:
        """Issue messages to and from ranks of ``group``; what is returned waits for them."""
        ops = []
        for call, messages in ((dist.isend, sends), (dist.irecv, gets)):
            ops += [dist.P2POp(call, flat, group=group, group_peer=peer) for peer, flat in messages if flat.numel()]
        works = dist.batch_isend_irecv(ops) if ops else []

        def wait() -> None:
            for work in works:
                work.wait()

        return wait


def _add_up(own: Tensor, received: Sequence[Tensor], place: int) -> None:
    """``own`` becomes the sum of all in order; it is the one at ``place``, and not received."""
    first, *others = [own if number == place else part for number, part in enumerate(received)]
    for other in others:
        first.add_(other)
    if first is not own:
        own.copy_(first)


def exchange_of(plan: Plan, group: dist.ProcessGroup | None) -> TwoLevel | None:
    """What the ranks of ``group`` exchange by, if the plan says so; None: by one ring, or straight. A collective."""
    slices = plan.facts.run.two_level
    if slices and group is not dist.group.WORLD:
        raise ValueError("exchanges inside and across machines are those of all ranks: stow all, or plan without them")
    return TwoLevel(plan.facts.machine.ranks, slices) if slices else None
