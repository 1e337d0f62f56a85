"""2,000 steps with a save every 20: memory, descriptors and threads stay as they are. Part of ``make faults``."""

import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.commands import Server
from tests.e2e.interrupted import at_step, config_in, ranks_of, start

pytestmark = pytest.mark.ranks
STEPS, FIRST, EVERY = 2000, 400, 200
MOST_MORE = 8 * 1024**2  # bytes; glibc's heaps and the log of losses that Hugging Face keeps grow by less
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "offload": (1, {"offload": {"site": "host", "weights": "streamed", "prefetch": 0}}),
    "stage 2 on two ranks": (2, {"zero": {"stage": 2}}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_grows(variant: str, tmp_path: Path) -> None:
    num_ranks, strategies = VARIANTS[variant]
    config = config_in(tmp_path, strategies, max_steps=STEPS, save_steps=20, save_total_limit=2)
    server = Server()
    try:
        job = start(server, num_ranks, config)
        samples = []
        for step in range(FIRST, STEPS - EVERY + 1, EVERY):
            at_step(job, config, step, timeout_s=300.0)
            # Of the first rank, which saves; the thread of a save may be there or not.
            rank = psutil.Process(ranks_of(job)[0])
            seen = []
            for _ in range(20):
                seen.append((rank.memory_info().rss, rank.num_fds(), rank.num_threads()))
                time.sleep(0.01)
            samples.append(tuple(min(values) for values in zip(*seen, strict=True)))
        assert job.wait().check()
    finally:
        server.close()
    print(f"{variant}: resident bytes, descriptors, threads every {EVERY} steps: {samples}")
    memory, descriptors, threads = zip(*samples, strict=True)
    assert memory[-1] - memory[0] < MOST_MORE, samples
    assert len(set(descriptors[1:])) == 1 and len(set(threads[1:])) == 1, samples
