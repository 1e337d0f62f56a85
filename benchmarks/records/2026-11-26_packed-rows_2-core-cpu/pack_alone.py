"""pack_alone.py DOCUMENTS: MiB in no file before packing that many lengths, at the first row, and at most."""

import sys
import tempfile
from pathlib import Path

import numpy as np

from trainer.data import mapped, packing


def own() -> float:
    """MiB of this process that are in no file."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


with tempfile.TemporaryDirectory() as folder:
    make = mapped.makes(Path(folder))
    lengths = make((int(sys.argv[1]),), np.int32)
    for part in mapped.blocks(lengths):
        part[:] = np.arange(len(part)) % 8 + 3
    before, first, most = own(), 0.0, 0.0
    for number, _ in enumerate(packing.pack(lengths, 128, make)):
        first = first or own()
        if number % 2000 == 0:
            most = max(most, own())
print(f"{len(lengths):,} documents, {number + 1:,} rows: {before:.0f} {first:.0f} {most:.0f} MiB")
