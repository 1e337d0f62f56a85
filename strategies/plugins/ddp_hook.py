"""What exchanges a bucket of gradients in place of DistributedDataParallel's own all-reduce.

Torch gives a hook each bucket when its gradients are complete. On the CPU buckets are exchanged in one thread, in the
order in which they came, which is the same on all ranks, while backward goes on; several collectives of one bucket
cannot meet those of another so. On an accelerator they are exchanged in backward's own stream, whose order is all that
is needed; nothing overlaps then, and no GPU was measured.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


class Hook:
    """The state of the hook of one wrapped model; ``exchange`` returns the means of a bucket, flat."""

    def __init__(self, exchange: Callable[[dist.GradBucket], Tensor]) -> None:  # type: ignore[name-defined]
        self._exchange = exchange
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stow-exchange")

    def hang_on(self, model: DistributedDataParallel) -> None:
        model.register_comm_hook(self, _exchanged)

    def exchanged(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        device = bucket.buffer().device
        if device.type != "cpu":
            future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device])
            future.set_result(self._exchange(bucket))
            return future
        future = torch.futures.Future()

        def work() -> None:
            try:
                future.set_result(self._exchange(bucket))
            except Exception as error:  # backward raises it
                future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation says: a result

        self._thread.submit(work)
        return future


def _exchanged(hook: Hook, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Torch looks at these annotations, which are therefore no strings in this file."""
    return hook.exchanged(bucket)
