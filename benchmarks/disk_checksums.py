"""What checksums cost the disk tier: seconds on the clock, and of processors, of passes over a file with and without.

    python benchmarks/disk_checksums.py FOLDER --gib 2 --rounds 5

As the tier does, three slots with a thread each read pieces of 4 million parameters ahead and write them behind, while
one thread updates them by AdamW (bf16: masters and two moments, 48 MiB). ``--still`` leaves the update out, so that
nothing but the drive is waited for. With and without take turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from statistics import median

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deepstow.strategies.engine.memory.arena import HostMemory
from deepstow.strategies.engine.memory.scratch_file import Checksums
from deepstow.strategies.engine.memory.tiers import Striped

PIECE, SLOTS = 48 << 20, 3


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", help="on the drive")
    parser.add_argument("--gib", type=float, default=2.0, help="of the file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--still", action="store_true", help="without updates")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    given = parse(argv)
    pieces = max(SLOTS, int(given.gib * (1 << 30)) // PIECE)
    slots = [HostMemory(PIECE, torch.device("cpu"), "a slot").memory for _ in range(SLOTS)]
    for slot in slots:
        slot.zero_()
    times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for _ in range(given.rounds):
        for checked in times:
            with closing(Striped([str(given.folder)], pieces * PIECE, checked=checked)) as file:
                for piece in range(pieces):
                    file.write(slots[0], piece * PIECE)
                began = time.perf_counter(), time.process_time()
                _step(file, slots, pieces, still=given.still)
                times[checked].append((time.perf_counter() - began[0], time.process_time() - began[1]))
                wall_s, cpu_s = times[checked][-1]
                print(f"{'with' if checked else 'without'} checksums: {wall_s:.3f} s, processors {cpu_s:.3f} s")
    sums, began_s = Checksums(), time.thread_time()
    for _ in range(20):
        sums.note(slots[0], 0)
    alone = 20 * PIECE / (time.thread_time() - began_s)
    moved = 2 * pieces * PIECE
    wall, cpu = ([median(step[at] for step in times[kind]) for kind in times] for at in (0, 1))
    print(
        f"a checksum alone: {alone / 1e9:.1f} GB/s of one thread, {moved / alone:.3f} s of {moved / 1e9:.2f} GB moved"
    )
    print(f"clock: {wall[0]:.3f} s without, {wall[1]:.3f} s with: {wall[1] / wall[0] - 1:+.1%}")
    print(f"processors: {cpu[0]:.3f} s without, {cpu[1]:.3f} s with: {(cpu[1] - cpu[0]) / wall[0]:+.1%} of the clock")
    return 0


def _step(file: Striped, slots: list[torch.Tensor], pieces: int, *, still: bool) -> None:
    """Every piece is read, updated and written."""
    threads = [ThreadPoolExecutor(1) for _ in slots]
    ready = [
        thread.submit(file.read, slot, at * PIECE) for at, (thread, slot) in enumerate(zip(threads, slots, strict=True))
    ]
    count, numbers = torch.ones(()), PIECE // 12
    grad = torch.full((numbers,), 1e-3)
    for piece in range(pieces):
        number = piece % SLOTS
        ready[number].result()
        master, mean, square = slots[number].view(torch.float32).view(3, numbers)
        if not still:
            torch._fused_adamw_(
                [master], [grad], [mean], [square], [], [count], lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.0,
                eps=1e-8, amsgrad=False, maximize=False,
            )  # fmt: skip
        threads[number].submit(file.write, slots[number], piece * PIECE)
        if piece + SLOTS < pieces:
            ready[number] = threads[number].submit(file.read, slots[number], (piece + SLOTS) * PIECE)
    for thread in threads:
        thread.shutdown()


if __name__ == "__main__":
    sys.exit(main())
