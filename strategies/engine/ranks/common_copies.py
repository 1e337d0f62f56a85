"""When a rank may read the other ranks' spans of weights, in host memory that all of them have mapped.

Each rank writes its span when its update is done, and reads all spans when it fetches the weight, or receives it if it
stays. No event of one process is known in another. What is told across is one number per bucket, how often the rank's
span was replaced (``memory/common_host.py``); every rank counts the same updates and loads in the same order.

Invariant. Whoever reads gets from every rank the weights after as many updates as it has submitted itself.

    read after write   the reader waits on its host for the numbers of all ranks. An update by the worker has written
                       when it ends; one on the device when DOWN has (``stored``), for which a thread waits
    write after read   all that is read before an update was issued by ``step``. Before any update is submitted there,
                       and before weights are loaded, each rank waits for its own copies up and then for the others.
                       A gradient that takes the place of a weight (PARKED) comes after an exchange of NET, in which
                       each rank takes part after its copies up of that weight (``Shares.sum_to_owners``)

There is no deadlock: at the same place in its program, a rank has submitted what the others wait for, and none of it
waits for what comes after that place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strategies.core.layout import Layout, common_bytes, read_by_all
from strategies.engine.buckets.bucket_state import BucketState
from strategies.engine.memory.arena import Arena
from strategies.engine.memory.common_host import CommonHost
from strategies.engine.ranks.one_rank import OneRank
from strategies.engine.ranks.replicas import Replicas
from strategies.engine.ranks.shares import Shares
from strategies.engine.transfer.transfer import Event, Lane, Transfer
from strategies.engine.transfer.worker import Worker


class CommonCopies(Shares):
    """What all ranks of a group read of each other. ``beside``: a thread waits for copies down, not the caller."""

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        transfer: Transfer,
        device: torch.device,
        layout: Layout,
        *,
        beside: bool,
    ) -> None:
        super().__init__(model, group, transfer, device)
        self._layout = layout
        self._common_host = CommonHost(common_bytes(layout), len(layout.buckets), device)
        self.common = self._common_host.weights
        self._counter = Worker(1 if beside else None, device)

    def connect(self, buckets: Sequence[BucketState], arena: Arena) -> None:
        """Let ``buckets`` read from all ranks; each has taken in its own."""
        super().connect(buckets, arena)
        self._common_host.connect(self._hosts)
        starts = []
        for bucket in buckets:
            item = read_by_all(bucket.spec, self._layout)
            if item is not None:
                spot = arena.addresses.of(bucket.name, item)
                bucket.sources = self._common_host.spans(spot, bucket.weight.dtype, bucket.spec.share)
                starts.append(spot.offset)
        self._common_host.pin([*starts, self.common.numel()])

    def bring(self, bucket: BucketState, source: Tensor) -> None:
        """Copy the spans of all ranks up; nobody replaces them while they are read."""
        if not bucket.sources:
            super().bring(bucket, source)
            return
        self._common_host.wait(bucket.index, bucket.replaced)
        for home, span in zip(bucket.weight.split(bucket.spec.share), bucket.sources, strict=True):
            self._transfer.copy(Lane.UP, home, span)
        bucket.arrived = self._transfer.record(Lane.UP)

    def written(self, bucket: BucketState, after: Event | None = None) -> None:
        if not bucket.sources:
            return
        replaced = bucket.replaced

        def count() -> None:
            self._transfer.host_wait(after)
            self._common_host.count(bucket.index, replaced)

        if after is None:
            count()
        else:
            self._counter.submit(0, count)

    def stop_reading(self) -> None:
        self._transfer.host_wait(self._transfer.record(Lane.UP))
        dist.barrier(group=self._hosts)

    def close(self) -> None:
        """End the thread and unpin the memory."""
        self._counter.close()
        self._common_host.release()


def ranks_of(
    group: dist.ProcessGroup | None,
    model: nn.Module,
    layout: Layout,
    transfer: Transfer,
    device: torch.device,
    *,
    beside: bool,
) -> OneRank:
    """What the ranks of ``group`` do together under ``layout``; None: there is one rank. A collective."""
    if group is None:
        return OneRank(transfer)
    if common_bytes(layout):
        return CommonCopies(model, group, transfer, device, layout, beside=beside)
    shared = any(bucket.ways > 1 for bucket in layout.buckets)
    return (Shares if shared else Replicas)(model, group, transfer, device)
