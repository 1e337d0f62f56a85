"""What ranks exchange where each of them holds one span of every bucket (``shards`` in ``strategies/core/layout.py``).

    gather          the other ranks' spans of a weight into its home, in place: after a fetch and after an update,
                    unless each rank reads all spans on the host, in memory that all of them have mapped
    sum_to_owners   a whole gradient of each rank becomes, in each rank's span of the slot, the sum of all ranks' spans

Exactness. N ranks have the bits of one process that accumulates N micro-batches: an owner adds the gradients in the
order of ranks, and an element-wise update of a span has the bits of the update of the whole. That process divides its
losses by N. Gradients are divided by N instead, before they are added, which is the same for powers of two; for other N
losses may be divided here, too (``scaled``), and gradients are added as they are. With ``reduction: fast`` the library
adds in an order of its own. With ``strategies.collectives`` ranks of a machine are added first, and then machines
(``two_level.py``), or there is another ``exchange``, which is lossy, and gives all ranks all means. The norm of a
parameter needs all its elements in one place: most have one owner; of one that is cut the owner of its first elements
gets the others' sums, behind its own span in the slot.

Ordering. All are on the stream NET of one process group. Every rank issues them in the same order, which follows
from the plan and the model, never from timing. UP before NET: a fetch brings up this rank's span first. COMPUTE before
NET: the home is free, or the gradient is written, and what was received before has been added. NET before COMPUTE:
weights are whole, gradients are there to be added. DOWN reads this rank's span only, after COMPUTE has written it; NET
writes others.

[Note: common memory] Each rank writes its span on the host when its update is done, and reads all spans when it fetches
the weight, or receives it if it stays. Across processes one number per bucket is told: how often the rank's span was
replaced (``memory/common_host.py``), which every rank counts in the same order. So whoever reads gets from every rank
the weights after as many updates as it has submitted.
    read after write   the reader waits on its host for the numbers of all ranks. An update by the worker has written
                       when it ends; one on the device when DOWN has (``stored``), for which a thread waits
    write after read   all that is read before an update was issued by ``step``. Before any update is submitted there,
                       and before weights are loaded, each rank waits for its own copies up and then for the others.
                       A gradient that takes the place of a weight (PARKED) comes after an exchange of NET, in which
                       each rank takes part after its copies up of that weight (``sum_to_owners``)
There is no deadlock: at the same place in its program, a rank has submitted what the others wait for, and none of it
waits for what comes after that place.

Refused: ranks that take different paths through the model. Two buckets of one size would be taken for each other, and
weights be wrong in silence. So what the ranks have run and exchanged, and will go back through, has a digest, which
goes along where the hosts tell each other of which gradients there are (``_on_any``): at the latest when backward has
ended, before the norm. Nothing is exchanged for it alone. By then a rank may wait for an exchange that the others
never make, until the group's timeout; with ``debug`` digests are compared when forward and backward begin, too, so that
every such model gets its line. Weights that are away are not read by one rank alone (``Engine.refuse_alone``).
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepstow.strategies.core.layout import Bucket, Item, Layout, Site, common_bytes, read_by_all
from deepstow.strategies.engine.buckets.bucket_state import BucketState
from deepstow.strategies.engine.memory.arena import Arena
from deepstow.strategies.engine.memory.common_host import CommonHost
from deepstow.strategies.engine.memory.pieces import pieces_of
from deepstow.strategies.engine.ranks.replicas import OneRank, Place, Replicas
from deepstow.strategies.engine.ranks.two_level import TwoLevel
from deepstow.strategies.engine.transfer.transfer import Event, Stream, Transfer
from deepstow.strategies.engine.transfer.worker import Worker

REMEMBERED = 10_000  # of what ranks compare, for the message; a long evaluation has more


class Shares(Replicas):
    """The exchanges of one process group. ``beside``: a thread waits for copies down, not the caller. ``debug``: other
    paths are refused before anything is exchanged on them.
    """

    shared = True

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        transfer: Transfer,
        device: torch.device,
        layout: Layout,
        two_level: TwoLevel | None = None,
        *,
        beside: bool,
        debug: bool,
    ) -> None:
        super().__init__(model, group, transfer, device, two_level)
        self.rank = dist.get_rank(group)
        self._layout = layout
        self._debug = debug
        size = common_bytes(layout)
        self._common_host = CommonHost(size, len(layout.buckets), device) if size else None
        self.common = None if self._common_host is None else self._common_host.weights
        self._counter = Worker(1 if beside and size else None, device)
        self._scaled = set[bool]()  # of the backwards since the last step
        self._received: Tensor | None = None  # bytes for the largest gradient; None: ``reduction`` is fast
        # What was run and exchanged since the ranks have last compared it: its digest, and the newest of it.
        self._digest, self._path = hashlib.sha256(), deque[str](maxlen=REMEMBERED)

    def connect(self, buckets: Sequence[BucketState], arena: Arena) -> None:
        self._received = arena.of("", Item.RECEIVED, torch.uint8)
        if self._common_host is None:
            return
        self._common_host.connect(self._hosts)
        starts = [self._common_host.weights.numel()]
        for bucket in buckets:
            if (item := read_by_all(bucket.spec, self._layout)) is not None:
                spot = arena.addresses.of(bucket.name, item)
                bucket.sources = self._common_host.spans(spot, bucket.weight.dtype, bucket.spec.share)
                starts.append(spot.offset)
        self._common_host.pin(starts)

    def close(self) -> None:
        self._counter.close()
        if self._common_host is not None:
            self._common_host.release()

    # --- weights -----------------------------------------------------------------------------------------------------

    def bring(self, bucket: BucketState, source: Tensor) -> None:
        if not bucket.sources:
            super().bring(bucket, source)
            return
        assert self._common_host is not None
        self._common_host.wait(bucket.index, bucket.replaced)
        for home, span in zip(bucket.weight.split(bucket.spec.share), bucket.sources, strict=True):
            self._transfer.copy(Stream.UP, home, span)
        bucket.arrived = self._transfer.record(Stream.UP)

    def written(self, bucket: BucketState, after: Event | None = None) -> None:
        host, replaced = self._common_host, bucket.replaced
        if host is None or not bucket.sources:
            return

        def count() -> None:
            self._transfer.host_wait(after)
            host.count(bucket.index, replaced)

        if after is None:
            count()
        else:
            self._counter.submit(0, count)

    def stop_reading(self) -> None:
        if self._common_host is not None:
            self._transfer.host_wait(self._transfer.record(Stream.UP))
            dist.barrier(group=self._hosts)

    def brought(self, bucket: BucketState) -> None:
        super().brought(bucket)
        self.gather(bucket)

    def gather(self, bucket: BucketState) -> None:
        transfer = self._transfer
        home = bucket.weight
        span = bucket.own(bucket.weight)
        first = self.rank * bucket.spec.share
        self.note("gathered", bucket.name)
        transfer.wait(Stream.NET, bucket.arrived, bucket.used)
        transfer.uses(Stream.NET, reads=[span], writes=[home[:first], home[first + bucket.spec.share :]])
        with transfer.on(Stream.NET):
            if self._two_level is None:
                dist.all_gather_into_tensor(home, span, group=self._group)
            else:
                self._two_level.gather(home)
        bucket.arrived = transfer.record(Stream.NET)

    # --- gradients ---------------------------------------------------------------------------------------------------

    def due(self, waiting: Iterable[BucketState], landed: BucketState) -> Sequence[BucketState]:
        """None: they are exchanged as backward goes on (``Gradients.exchange``)."""
        return ()

    def _add_up(self, bucket: BucketState, grad: Tensor) -> None:
        self.sum_to_owners(bucket)

    def sum_to_owners(self, bucket: BucketState) -> None:
        """The mean of all ranks' gradients in this rank's span, and of a parameter that begins there all of it. What
        any rank has a gradient for has one on all.
        """
        self.note("added gradients of", bucket.name)
        if len(self._scaled) > 1:
            raise RuntimeError("of the losses of one step some were divided by the number of ranks, others were not")
        if not self._exchanged(bucket):
            self._add_spans(bucket, bucket.memory[Item.GRAD])
        if bucket.spec.grad_passes or bucket.spec.site is Site.HOST:  # it leaves now; others are asked about later
            super().end_backward([(bucket, index) for index in range(len(bucket.params))])

    def _exchanged(self, bucket: BucketState) -> bool:
        """On NET, and of the whole bucket on all ranks: owners need nothing more, not even where parameters are cut."""
        if self.exchange is None or Item.GRAD not in bucket.memory:
            return False
        self._let_net_have(bucket)
        with self._transfer.on(Stream.NET):
            is_exchanged = super()._exchanged(bucket)
            if is_exchanged and True in self._scaled:  # losses were divided, so these are means of what is to be summed
                bucket.memory[Item.GRAD].mul_(self.ranks)
        self._transfer.uses(Stream.NET, writes=[bucket.memory[Item.GRAD]] if is_exchanged else [])
        self._transfer.wait(Stream.COMPUTE, self._transfer.record(Stream.NET))
        return is_exchanged

    def _let_net_have(self, bucket: BucketState) -> None:
        """The gradient, which COMPUTE has written."""
        self._transfer.wait(Stream.NET, self._transfer.record(Stream.COMPUTE))
        if bucket.sources:  # gradients may take their place, which all ranks have read by then
            self._transfer.wait(Stream.NET, bucket.arrived)

    def _add_spans(self, bucket: BucketState, grad: Tensor) -> None:
        if True not in self._scaled:
            grad.div_(self.ranks)
        self._let_net_have(bucket)
        self._transfer.uses(Stream.NET, reads=[grad])
        if self._received is None:
            self._add_on_the_way(bucket, grad)
        elif self._two_level is None:
            self._add_in_order(bucket, grad, self._received)
        else:
            self._add_by_machines(self._two_level, bucket, grad, self._received)
        if bucket.spec.cut:
            self._complete_the_last(bucket, grad)

    def _add_in_order(self, bucket: BucketState, grad: Tensor, memory: Tensor) -> None:
        transfer = self._transfer
        span = bucket.own(grad)
        share = bucket.spec.share
        received = memory.view(grad.dtype)[: bucket.spec.num_elements]
        transfer.uses(Stream.NET, writes=[received])
        with transfer.on(Stream.NET):
            dist.all_to_all_single(received, grad, group=self._group)
        transfer.wait(Stream.COMPUTE, transfer.record(Stream.NET))
        transfer.uses(Stream.COMPUTE, reads=[received], writes=[grad])
        first, *others = received.split(share)
        span.copy_(first)
        for other in others:
            span.add_(other)

    def _add_by_machines(self, two_level: TwoLevel, bucket: BucketState, grad: Tensor, memory: Tensor) -> None:
        """Sums are on NET as well, between its messages; they overwrite the spans of other ranks."""
        received = memory.view(grad.dtype)[: bucket.spec.num_elements]
        self._transfer.uses(Stream.NET, writes=[received, grad])
        with self._transfer.on(Stream.NET):
            two_level.sum_to_owners(grad, received)
        self._transfer.wait(Stream.COMPUTE, self._transfer.record(Stream.NET))

    def _add_on_the_way(self, bucket: BucketState, grad: Tensor) -> None:
        """In place, as NCCL and gloo allow where the result is this rank's span of what is sent."""
        transfer, span = self._transfer, bucket.own(grad)
        transfer.uses(Stream.NET, writes=[span])
        with transfer.on(Stream.NET):
            dist.reduce_scatter_tensor(span, grad, group=self._group)
        transfer.wait(Stream.COMPUTE, transfer.record(Stream.NET))

    def _complete_the_last(self, bucket: BucketState, grad: Tensor) -> None:
        """What the other ranks have of the parameter that goes on behind this rank's span comes there, for its norm.
        Each has at most one part of a parameter that began before its span: the first elements of the span.
        """
        transfer = self._transfer
        spec = bucket.spec
        span = bucket.own(grad)
        heads = [_head_of(spec, rank) for rank in range(self.ranks)]
        gets = [size if to == self.rank and rank != to else 0 for rank, (to, size) in enumerate(heads)]
        to, size = heads[self.rank]
        sends = [size if rank == to else 0 for rank in range(self.ranks)]
        behind = grad[(self.rank + 1) * spec.share :][: sum(gets)]
        transfer.wait(Stream.NET, transfer.record(Stream.COMPUTE))
        transfer.uses(Stream.NET, reads=[span[:size]], writes=[behind])
        with transfer.on(Stream.NET):
            dist.all_to_all_single(behind, span[:size], gets, sends, group=self._group)
        transfer.wait(Stream.COMPUTE, transfer.record(Stream.NET))

    def end_backward(self, order: Sequence[Place]) -> None:
        super().end_backward(order)
        self._forget_path()

    def tell_norms(self, gradients: Sequence[Place], device: torch.device) -> None:
        """All ranks but one contribute a zero, and adding zeros is exact."""
        zero = torch.zeros((), device=device)
        mine = [b.grads.norms[i] if b.rank == b.speaker(i) else zero for b, i in gradients]
        norms = torch.stack([zero, *mine])
        dist.all_reduce(norms, group=self._group)
        for (bucket, index), norm in zip(gradients, norms[1:].unbind(), strict=True):
            bucket.grads.measured([index], [norm])

    def everywhere(self, flag: bool) -> bool:
        return not self.any_rank(not flag)

    # --- the same path -----------------------------------------------------------------------------------------------

    def begin_forward(self, *, trains: bool, is_last: bool) -> None:
        self.note("began", f"a forward {'with' if trains else 'without'} gradients")
        self._look_for_other_paths()
        if trains and self._due:
            self._scaled.clear()
        super().begin_forward(trains=trains, is_last=is_last)

    def begin_backward(self) -> None:
        self._scaled.add(self.scaled)
        self._look_for_other_paths()  # an exchange of gradients would not find its like

    def note(self, what: str, module: str) -> None:
        line = f"{what} {module}"
        self._digest.update(f"{line}\n".encode())
        self._path.append(line)

    def _look_for_other_paths(self) -> None:
        """All ranks raise if their paths differ. In debug a collective, else nothing."""
        if self._debug:
            self._on_any(())
            self._forget_path()

    def _on_any(self, flags: Iterable[bool]) -> list[bool]:
        """Compares paths as well: a number is the same on all ranks if its largest is also its least."""
        digest = float(int.from_bytes(self._digest.digest()[:6]))
        *largest, most, least = self._largest([*flags, digest, -digest])
        if most != -least:
            self._refuse_other_paths()
        return [bool(flag) for flag in largest]

    def _forget_path(self) -> None:
        """All ranks have come the same way."""
        self._digest, self._path = hashlib.sha256(), deque(maxlen=REMEMBERED)

    def _refuse_other_paths(self) -> NoReturn:
        """Say where paths differ. A collective."""
        lists: list[Any] = [None] * self.ranks
        dist.all_gather_object(lists, list(self._path), group=self._hosts)
        times = zip_longest(*lists, fillvalue="did nothing")
        actions = next((acts for acts in times if len(set(acts)) > 1), ["did something else before"] * self.ranks)
        peer = next((rank for rank, action in enumerate(actions) if action != actions[0]), 1)
        raise RuntimeError(
            f"the ranks take different paths through the model: at one time rank 0 {actions[0]}, and rank {peer} "
            f"{actions[peer]}. Ranks that share weights have to run the same blocks in the same order, without layer "
            f"drop or early exits, and to read weights together"
        )


def ranks_of(
    group: dist.ProcessGroup | None,
    model: nn.Module,
    layout: Layout,
    transfer: Transfer,
    device: torch.device,
    two_level: TwoLevel | None = None,
    *,
    beside: bool,
    debug: bool,
) -> OneRank:
    """What the ranks of ``group`` do together under ``layout``; None: there is one rank. A collective. ``two_level``:
    how they exchange, if not all at once.
    """
    if group is None:
        return OneRank(transfer)
    if any(bucket.shards > 1 for bucket in layout.buckets):
        return Shares(model, group, transfer, device, layout, two_level, beside=beside, debug=debug)
    return Replicas(model, group, transfer, device, two_level)


def _head_of(spec: Bucket, rank: int) -> tuple[int, int]:
    """Of the parameter that began before the span of ``rank`` and goes on in it: the rank in whose span it began, and
    how many elements of this span it takes, from the first one on; ``rank`` itself and 0 if there is none.
    """
    for piece in pieces_of(spec, rank):
        if piece.start > 0:
            return spec.offsets[piece.index] // spec.share, piece.size
    return rank, 0
