"""How fast drives are for optimizer state: what ``deepstow doctor --rates --disk FOLDER ...`` adds.

The engine's own stores (``strategies/engine/memory/tiers.py``), which go past the page cache, are filled in large
pieces, which does not count: drives write fast until a cache of theirs is full, and what was never written is not read
from the disk. Then they are written again for some seconds, read, and both at once by two threads, several drives
together. What they sustain for hours may still be less.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from deepstow.strategies.core.on_disk import part_bytes
from deepstow.strategies.core.sizes import human
from deepstow.strategies.engine.memory.arena import HostMemory
from deepstow.strategies.engine.memory.tiers import Striped

PIECE = 64 << 20
MOST_BYTES = 4 << 30  # of the file, or a quarter of what is free


def measure(places: Sequence[str], seconds: float, say: Callable[[str], None]) -> tuple[float, float, float]:
    """Bytes per second that each of ``places`` reads, and writes, for so many seconds, and how much of both it does at
    once (1: either or, 2: each as if it were alone). Raise ValueError: one cannot have such a file.
    """
    folders = [place for place in places if Path(place).is_dir()]
    free = min((shutil.disk_usage(folder).free for folder in folders), default=MOST_BYTES)
    pieces, part = max(2, min(MOST_BYTES, free // 4) // PIECE), part_bytes(PIECE, len(places))
    with closing(Striped(places, pieces * part, checked=False)) as file:  # checksums are made beside moves
        say(f"the disk of {', '.join(places)}: {human(pieces * PIECE)}, past the page cache")
        source, target = (HostMemory(PIECE, torch.device("cpu"), "a piece of the file").memory for _ in range(2))
        source.random_()

        def rate(move: Callable[[Tensor, int], None], memory: Tensor, first: int = 0) -> float:
            began_s = time.perf_counter()
            for number in count(1):
                move(memory, (first + number) % pieces * part)
                if (spent_s := time.perf_counter() - began_s) > seconds:
                    break
            return number * PIECE / spent_s

        for index in range(pieces):
            file.write(source, index * part)
        write, read = rate(file.write, source), rate(file.read, target)
        with ThreadPoolExecutor(2) as both:
            begun = both.submit(rate, file.read, target), both.submit(rate, file.write, source, pieces // 2)
            reading, writing = (each.result() for each in begun)
    giga = 1e9
    at_once = f"{reading / giga:.3g} and {writing / giga:.3g}"
    say(f"  read {read / giga:.3g} GB/s, written {write / giga:.3g}; both at once {at_once}")
    return read / len(places), write / len(places), max(1.0, min(2.0, reading / read + writing / write))
