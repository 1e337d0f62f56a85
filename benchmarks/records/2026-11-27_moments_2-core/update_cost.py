"""CPU time of one thread, in milliseconds, for AdamW's update of 2^20 parameters by the kind of its moments: least and
median of many. The same for parts of it, and for bitsandbytes' blockwise quantisation of two moments.

    OMP_NUM_THREADS=1 python benchmarks/records/2026-11-27_moments_2-core/update_cost.py
"""

import statistics
import time
from collections.abc import Callable

import torch
from bitsandbytes import functional

from strategies.core.moments import MomentsAs
from strategies.engine.updating.chunks import Chunk
from strategies.engine.updating.optim import AdamW, Operands
from tests.helpers.moments import OneParameter

SIZE = 1 << 20
RULE = AdamW(lr=1e-3)


def milliseconds(name: str, work: Callable[[], object], times: int = 60) -> None:
    work()
    taken = []
    for _ in range(times):
        start = time.thread_time()
        work()
        taken.append(1e3 * (time.thread_time() - start))
    print(f"{name:32} least {min(taken):7.2f}  median {statistics.median(taken):7.2f}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    param, grad, first, second = torch.randn(4, SIZE, generator=generator)
    second.square_()
    group, chunk = RULE.defaults(), Chunk(0, 0, SIZE, True)

    def update(moments: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        steps = [torch.tensor(3.0)]
        RULE.update(Operands([param], [grad], moments, steps), group, None)
        return steps

    milliseconds("fp32", lambda: update([[first], [second]]))
    kinds: tuple[MomentsAs, ...] = ("bf16", "int8")
    for kind in kinds:
        one = OneParameter(kind, "a", SIZE)
        one.put([first, second])

        def whole(one: OneParameter = one) -> None:
            moments = one.moments.expand(one.bucket, [chunk])
            one.moments.compress(one.bucket, [chunk], moments, update(moments))

        milliseconds(kind, whole)
        milliseconds(f"{kind}, expanded alone", lambda one=one: one.moments.expand(one.bucket, [chunk]))
    maps = [functional.create_dynamic_map(signed=signed) for signed in (True, False)]
    values = [first, second]

    def theirs() -> None:
        for value, code in zip(values, maps, strict=True):
            functional.quantize_blockwise(value, code=code, blocksize=256)

    milliseconds("bitsandbytes, both quantised", theirs, 5)
    thresholds = torch.linspace(-1, 1, 255)
    milliseconds("torch.bucketize, both", lambda: [torch.bucketize(v, thresholds, out_int32=True) for v in values], 5)


if __name__ == "__main__":
    main()
