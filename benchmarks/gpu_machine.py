"""A machine with an accelerator: names, sizes, and the time to pin memory and to copy. Prints lines of JSON.

python -m benchmarks.gpu_machine --gib 1,40
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import time
from typing import Any

import torch

from benchmarks.harness.child import surroundings
from strategies.engine.memory import accelerator
from strategies.engine.memory.arena import PIECE_BYTES, HostMemory

QUERY = "name,driver_version,pcie.link.gen.max,pcie.link.width.max,memory.total,clocks.max.sm"


def about() -> dict[str, Any]:
    """Names, sizes, versions."""
    found, device = surroundings(), accelerator.current()
    if device is not None:
        free, total = torch.accelerator.get_memory_info(device)
        found |= {"context_bytes": total - free, "software": accelerator.row_of(device).software()}
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv"]
        found["nvidia_smi"] = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return found


def pinning(gib: float) -> dict[str, Any]:
    """Seconds to map and to pin memory, bytes per second of copies up and down, seconds to unpin."""
    size = int(gib * (1 << 30))
    device = accelerator.current()
    began = time.perf_counter()
    pages = HostMemory(size, device or torch.device("cpu"), "this measurement")
    found: dict[str, Any] = {"gib": gib, "map_s": time.perf_counter() - began}
    if device is None:
        return found
    began = time.perf_counter()
    pages.pin(range(0, size, PIECE_BYTES))
    found |= {"pin_s": time.perf_counter() - began, "registrations": len(pages.borders) + 1}
    piece = pages.memory[: min(size, 1 << 30)]
    there = torch.empty_like(piece, device=device)
    for name, target, source in (("up", there, piece), ("down", piece, there)):
        target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize()
        began = time.perf_counter()
        for _ in range(3):
            target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize()
        found[f"{name}_bytes_per_s"] = 3 * piece.nbytes / (time.perf_counter() - began)
    began = time.perf_counter()
    pages.release()
    return found | {"unpin_s": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gib", default="1,40", help="how much to pin, one after the other")
    given = parser.parse_args()
    print(json.dumps(about()), flush=True)
    for gib in given.gib.split(","):
        print(json.dumps(pinning(float(gib))), flush=True)


if __name__ == "__main__":
    main()
