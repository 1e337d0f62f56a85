"""Long runs: nothing grows in 2,000 steps with a save every 20, and a run that is killed again and again ends the same.

Part of ``make faults``, not of ``make test`` (minutes).
"""

import os
import random
import signal
import time
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import psutil
import pytest

from tests.e2e.commands import Server, digest
from tests.e2e.interrupted import at_step, checkpoints, config_in, ranks_of, start

pytestmark = pytest.mark.ranks
STEPS, FIRST, EVERY = 2000, 400, 200
MOST_MORE = 8 * 1024**2  # bytes; glibc's heaps and the log of losses that Hugging Face keeps grow by less
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "offload": (1, {"offload": {"site": "host", "weights": "streamed", "prefetch": 0}}),
    "stage 2 on two ranks": (2, {"zero": {"stage": 2}}),
    "shared on two ranks": (
        2,
        {"zero": {"stage": 3}, "offload": {"site": "host", "weights": "streamed", "prefetch": 0}},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_grows(variant: str, server: Server, tmp_path: Path) -> None:
    num_ranks, strategies = VARIANTS[variant]
    config = config_in(tmp_path, strategies, max_steps=STEPS, save_steps=20, save_total_limit=2)
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
    print(f"{variant}: resident bytes, descriptors, threads every {EVERY} steps: {samples}")
    memory, descriptors, threads = zip(*samples, strict=True)
    assert memory[-1] - memory[0] < MOST_MORE, samples
    assert len(set(descriptors[1:])) == 1 and len(set(threads[1:])) == 1, samples


ON_DISK = {"bucket_size": "16KiB", "host_memory": "1900KiB", "disk": gettempdir(), "disk_memory": "10MiB"}
KILLED: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": VARIANTS["plain"],
    "offload, recomputed on the host": (
        1,
        {**VARIANTS["offload"][1], "recompute": {"policy": "selective", "activation_offloading": True}},
    ),
    "stage 0": (1, {"zero": {"stage": 0}}),
    "stage 1 on two ranks": (2, {"zero": {"stage": 1}}),
    "stage 3 on two ranks": (2, {"zero": {"stage": 3}}),
    "shared on two ranks": VARIANTS["shared on two ranks"],
    "state on the disk": (1, {"offload": {**VARIANTS["offload"][1]["offload"], **ON_DISK}}),
}
LENGTH, SAVE, KILLS = 420, 3, 60


@pytest.mark.parametrize("variant", KILLED)
def test_killed_again_and_again(variant: str, server: Server, tmp_path: Path) -> None:
    """Whenever there is a new checkpoint, a moment later: all ranks, or one of them."""
    num_ranks, strategies = KILLED[variant]
    draw = random.Random(variant)
    configs = [
        config_in(tmp_path / name, strategies, max_steps=LENGTH, save_steps=save, save_total_limit=2)
        for name, save in (("whole", LENGTH), ("killed", SAVE))
    ]
    kills = 0
    server.run(num_ranks, configs[0]).check()
    while True:
        job, before = start(server, num_ranks, configs[1]), max(checkpoints(configs[1]), default=0)
        while job.poll() is None and max(checkpoints(configs[1]), default=0) == before:
            time.sleep(0.002)
        time.sleep(draw.random() * 0.1)
        if job.poll() is None and num_ranks > 1 and draw.random() < 0.2:
            os.kill(draw.choice(ranks_of(job)), signal.SIGKILL)
            job.wait(60.0)
        elif job.poll() is None:
            job.kill()
        else:
            job.wait().check()
            break
        kills += 1
    print(f"{variant}: killed {kills} times")
    assert kills >= KILLS
    assert digest(configs[1].parent / "run" / "export") == digest(configs[0].parent / "run" / "export")
