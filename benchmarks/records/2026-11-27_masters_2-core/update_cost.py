"""CPU time of one thread, in milliseconds, for AdamW's update of 2^20 parameters whose weights are in bf16: with masters
in fp32, and with weights that are their own masters.

    OMP_NUM_THREADS=1 python benchmarks/records/2026-11-27_masters_2-core/update_cost.py
"""

import statistics
import time
from collections.abc import Callable

import torch

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
    print(f"{name:20} least {min(taken):7.2f}  median {statistics.median(taken):7.2f}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    master, grad, first, second = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(1))
    second.square_()
    weight, group, chunk = master.bfloat16(), RULE.defaults(), Chunk(0, 0, SIZE, True)

    def update(params: list[torch.Tensor], moments: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        steps = [torch.tensor(3.0)]
        RULE.update(Operands(params, [grad], moments, steps), group, None)
        return steps

    def fp32() -> None:
        update([master], [[first], [second]])
        weight.copy_(master)

    milliseconds("fp32", fp32)
    for rounds in (False, True):
        one = OneParameter("int8", "a", SIZE, rounds=rounds)
        one.put([first, second])

        def whole(one: OneParameter = one, rounds: bool = rounds) -> None:
            moments = one.moments.expand(one.bucket, [chunk])
            params = one.moments.expand_masters([weight]) if rounds else [master]
            steps = update(params, moments)
            one.moments.compress(one.bucket, [chunk], moments, steps)
            if rounds:
                one.moments.round_masters(one.bucket, [chunk], params, [weight], steps)
            else:
                weight.copy_(master)

        milliseconds("int8, masters bf16" if rounds else "int8", whole)


if __name__ == "__main__":
    main()
