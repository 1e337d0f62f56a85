"""When a rank may read the other ranks' parts of weights, which are in host memory that all of them have mapped.

Problem. Each rank writes its span when its update is done, and reads all spans when it fetches the weight, or receives
it if it stays. No event of one process is known in another. What is told across is one number per bucket, how often the
rank's span was replaced (``memory/common_host.py``); every rank counts the same updates and loads in the same order, as
its plan and its program say.

Invariant. Whoever reads gets from every rank the weights after as many updates as it has submitted itself.

    read after write   the reader waits on its host for the numbers of all ranks. An update by the worker has written
                       when it ends; one on the device when DOWN has (``stored``), for which a thread waits. So a late
                       rank makes others wait where they first use its weights, as an exchange would
    write after read   all that is read before an update was issued by ``step``. Before any update is submitted there,
                       and before weights are loaded, each rank waits for its own copies up and then for the others.
                       A gradient that takes the place of a weight (PARKED) comes after an exchange of NET, in which
                       each rank takes part after its copies up of that weight (``Shares.sum_to_owners``)

There is no deadlock: at the same place in its program, a rank has submitted what the others wait for, and none of it
waits for what comes after that place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from strategies.core.layout import Addresses, Layout, common_bytes, read_by_all
from strategies.engine.buckets.bucket_state import BucketState
from strategies.engine.memory.common_host import CommonHost
from strategies.engine.ranks.rank_sync import timeout_of
from strategies.engine.transfer.transfer import Event, Lane, Transfer
from strategies.engine.transfer.worker import Worker

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class CommonCopies:
    """What all ranks of ``hosts`` read of each other.

    Args:
        beside: a thread waits for copies down; otherwise the caller does.
    """

    def __init__(
        self, layout: Layout, device: torch.device, hosts: ProcessGroup, transfer: Transfer, *, beside: bool
    ) -> None:
        self._layout, self._hosts, self._transfer = layout, hosts, transfer
        self._timeout_s = timeout_of(hosts).total_seconds()
        self.num_bytes = common_bytes(layout)
        self.host = CommonHost(self.num_bytes, len(layout.buckets), device)
        self._counter = Worker(1 if beside else None, device)

    def connect(self, buckets: Iterable[BucketState], addresses: Addresses) -> None:
        """Let ``buckets`` read from all ranks; each has taken in its own. A collective."""
        self.host.connect(self._hosts)
        starts = []
        for bucket in buckets:
            item = read_by_all(bucket.spec, self._layout)
            if item is not None:
                spot = addresses.of(bucket.name, item)
                bucket.read_from(self.host.spans(spot, bucket.weight.dtype, bucket.spec.share))
                starts.append(spot.offset)
        self.host.pin([*starts, self.num_bytes])

    def wait(self, bucket: BucketState) -> None:
        """Wait until all spans of ``bucket`` are the newest."""
        self.host.wait(bucket.index, bucket.replaced, self._timeout_s)

    def written(self, bucket: BucketState, after: Event | None = None) -> None:
        """This rank's span of ``bucket`` is the newest, once ``after`` has passed."""
        replaced = bucket.replaced

        def count() -> None:
            self._transfer.host_wait(after)
            self.host.count(bucket.index, replaced)

        if after is None:
            count()
        else:
            self._counter.submit(0, count)

    def stop_reading(self) -> None:
        """Before anything is replaced: return when no rank reads it any more. A collective."""
        self._transfer.host_wait(self._transfer.record(Lane.UP))
        dist.barrier(group=self._hosts)

    def close(self) -> None:
        """End the thread and unpin the memory."""
        self._counter.close()
        self.host.release()
