"""What this process may use of its machine by its cgroup, a container's limits: folders of both versions, and cores.

Torch, Python and ``psutil`` report the machine's cores. A container that has a quota of two of 64 is stopped for most
of the time if 63 threads spend it at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def usable_cores(root: Path = ROOT) -> int:
    """Cores that this process may use: its affinity, or the whole cores of the cgroup's quota if these are fewer; at
    least one. ``root`` is the folder with ``proc`` and ``sys``.
    """
    quotas = [quota for folder in folders("cpu", root) if (quota := _quota_of(folder))]
    return max(1, int(min([len(os.sched_getaffinity(0)), *quotas])))


def folders(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """Folders of this process's cgroup for ``controller``, from its own up to the mount. A limit on any applies.

    ``/proc/self/cgroup`` has lines ``id:controllers:path``; version 2 leaves the controllers empty. Inside a container
    the path is often the host's and does not exist: then the mount itself is the container's cgroup.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    paths = {name: path for _, names, path in (line.split(":", 2) for line in lines) for name in names.split(",")}
    mount = root / "sys/fs/cgroup"
    if controller in paths:  # version 1
        mount, path = mount / controller, paths[controller]
    else:
        path = paths.get("", "/")
    lowest = mount / path.lstrip("/")
    for folder in (lowest, *lowest.parents):
        if folder.is_dir():
            yield folder
        if folder == mount:
            return


def text(path: Path) -> str:
    """What is in ``path``; nothing if there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _quota_of(folder: Path) -> float | None:
    """CPU quota over period in one folder (version 2 or 1); None without a quota."""
    words = text(folder / "cpu.max").split()
    if not words:
        words = [text(folder / f"cpu.cfs_{word}_us").strip() for word in ("quota", "period")]
    quota, period = (int(word) if word.isdigit() else 0 for word in words)  # "max" and -1 mean no quota
    return quota / period if quota and period else None
