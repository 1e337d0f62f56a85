"""The hardware of a machine as one frozen value: probed here, or named (``profiles.py``) to plan for another machine.

Offload fails when *host* memory runs out, and in a container ``psutil`` reports the memory and cores of the whole
machine, while the kernel kills by the cgroup's limit. So every host number is the smaller of what the machine has and
what the cgroup leaves, over all its ancestors (a limit on any of them applies). Page cache that the kernel can drop at
once (``inactive_file``) does not count as used; otherwise the model file that was just read would look like memory that
is gone.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from deepstow.strategies.core.cgroups import ROOT, folders, text, usable_cores
from deepstow.strategies.core.facts import Rates

GIB = 1024**3


# Dense peak per device in flop/s with fp32 accumulation, for ``bf16``, ``fp16`` and ``fp32``; a card without such units
# has none. fp32 is the plain rate, not TF32: torch multiplies fp32 in full precision unless told otherwise.
PeakFlops = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine as seen by one process. Device numbers are per device, 0 where there is none."""

    name: str
    origin: Literal["probed", "profile"]
    device_kind: str  # torch's: ``cpu``, or that of the accelerator, as ``cuda`` or ``xpu``
    device_total_bytes: int = 0
    peak_flops: PeakFlops = field(default_factory=dict)  # empty for a card that is not in the table, and for a CPU
    host_available_bytes: int
    host_own_bytes: int = 0  # that this process has taken already, which are not among those available
    usable_cores: int
    rates: Rates | None = None  # of a named card; for those of others see ``profiles.known_rates``


def _peak(bf16: float | None, fp32: float, fp16: float | None = None) -> PeakFlops:
    """Rates in Tflop/s; fp16 runs at the bf16 rate unless given."""
    peaks = {"bf16": bf16, "fp16": fp16 or bf16, "fp32": fp32}
    return {name: 1e12 * peak for name, peak in peaks.items() if peak}


# Names as the driver reports them, matched in full: an RTX 4090 D or a laptop part is another chip. Data sheets
# often print the rate "with sparsity"; these are the dense halves.
PEAKS: tuple[tuple[str, PeakFlops], ...] = (
    (r"NVIDIA B200", _peak(2250, 75)),  # DGX B200 data sheet: 36 Pflop/s fp16 sparse over 8 cards
    (r"NVIDIA H200", _peak(989.4, 67)),  # H200 data sheet, SXM: 1,979 sparse
    (r"NVIDIA H200 NVL", _peak(835.5, 60)),  # H200 data sheet, NVL: 1,671 sparse
    (r"NVIDIA H100 80GB HBM3", _peak(989.4, 67)),  # H100 data sheet, SXM5: 1,979 sparse
    (r"NVIDIA H100 PCIe", _peak(756, 51)),  # H100 data sheet, PCIe: 1,513 sparse
    (r"NVIDIA H100 NVL", _peak(835.5, 60)),  # H100 data sheet, NVL: 1,671 sparse
    (r"(NVIDIA )?A100.*", _peak(312, 19.5)),  # A100 data sheet: 312 dense, PCIe and SXM, 40 and 80 GB
    (r"NVIDIA A10", _peak(125, 31.2)),  # A10 data sheet: 125 dense
    (r"NVIDIA A10G", _peak(70, 35)),  # A10G data sheet (of AWS): 70 dense, 140 sparse
    (r"NVIDIA RTX A6000", _peak(154.8, 38.7)),  # RTX A6000 data sheet: 309.7 sparse
    (r"NVIDIA L40S", _peak(362, 91.6)),  # L40S data sheet: 362.05 dense
    (r"NVIDIA L4", _peak(121, 30.3)),  # L4 data sheet: 242 sparse
    (r"NVIDIA GeForce RTX 5090", _peak(209.5, 104.8)),  # RTX Blackwell whitepaper: fp32 accumulate, dense
    (r"NVIDIA GeForce RTX 4090", _peak(165.2, 82.6)),  # Ada whitepaper: fp32 accumulate, dense
    (r"NVIDIA GeForce RTX 4080", _peak(97.5, 48.7)),  # Ada whitepaper: fp32 accumulate, dense
    (r"NVIDIA GeForce RTX 3090", _peak(71, 35.6)),  # GA102 whitepaper: fp32 accumulate, dense
    (r"NVIDIA GeForce RTX 3060", _peak(25.5, 12.7)),  # data sheet: fp32; bf16 twice that, as in the GA102 whitepaper
    (r"(NVIDIA |Tesla )+V100-SXM2.*", _peak(None, 15.7, fp16=125)),  # V100 data sheet, SXM2; no bf16 units
    (r"(NVIDIA |Tesla )+V100-PCIE.*", _peak(None, 14, fp16=112)),  # V100 data sheet, PCIe; no bf16 units
    (r"(NVIDIA |Tesla )*T4", _peak(None, 8.1, fp16=65)),  # T4 data sheet; no bf16 units
    (r"AMD Instinct MI300X( OAM| VF)?", _peak(1307.4, 163.4)),  # MI300X data sheet: 1,307.4 dense
)


def peak_flops(device_name: str) -> PeakFlops:
    """The card's dense peak; empty for a card that is not in the table and for a CPU."""
    return next((peak for pattern, peak in PEAKS if re.fullmatch(pattern, device_name)), {})


class Memory(NamedTuple):
    """Total bytes, and those that a new program can have."""

    total_bytes: int
    available_bytes: int


def probe() -> Machine:
    """Probe this machine; with an accelerator this creates a context on the current device."""
    import torch

    from deepstow.strategies.engine.memory import accelerator

    device = accelerator.current()
    name = "cpu" if device is None else accelerator.name_of(device)
    return Machine(
        name=name,
        origin="probed",
        device_kind="cpu" if device is None else device.type,
        device_total_bytes=0 if device is None else torch.accelerator.get_memory_info(device)[1],
        peak_flops=peak_flops(name),
        host_available_bytes=host_memory().available_bytes,
        host_own_bytes=status_bytes("RssAnon"),
        usable_cores=cores()[1],
    )


def host_memory(root: Path = ROOT) -> Memory:
    """Host memory that this process may use: the machine's, or what its cgroup leaves if that is less."""
    import psutil

    machine = psutil.virtual_memory()
    group = cgroup_memory(root) or Memory(machine.total, machine.available)
    return Memory(min(machine.total, group.total_bytes), min(machine.available, group.available_bytes))


def cores(root: Path = ROOT) -> tuple[int, int]:
    """Physical cores of the machine, and cores this process may use: its affinity, or the cgroup's quota if less."""
    import psutil

    usable = usable_cores(root)
    return psutil.cpu_count(logical=False) or usable, usable


def disk_free_bytes(folder: Path) -> int:
    """Free bytes of the file system that holds ``folder`` or its nearest existing parent."""
    folder = folder.resolve()
    return shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.exists())).free


def status_bytes(name: str) -> int:
    """Resident memory of this process: ``VmHWM`` (peak; ``ru_maxrss`` starts at the parent's), ``VmRSS`` or others."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def others_cpu_s() -> float:
    """CPU seconds that this machine has spent on other processes, virtual machines on the same host included."""
    import psutil

    spent = psutil.cpu_times()
    busy = spent.user + spent.nice + spent.system + spent.irq + spent.softirq + spent.steal
    return float(busy - time.process_time())


# --- cgroups -----------------------------------------------------------------------------------------------------


def cgroup_memory(root: Path = ROOT) -> Memory | None:
    """The tightest memory limit and the least memory left, over this process's cgroup and its ancestors."""
    limits = [memory for folder in folders("memory", root) if (memory := _memory_of(folder))]
    return Memory(*map(min, zip(*limits, strict=True))) if limits else None


def _memory_of(folder: Path) -> Memory | None:
    """The memory limit in one cgroup folder (version 2 or 1) and what is left of it; None without a limit."""
    limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
    if limit is None or limit >= 2**60:  # version 1 writes "no limit" as the largest page-aligned integer
        return None
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
    stat = dict(line.split() for line in text(folder / "memory.stat").splitlines())
    droppable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    return Memory(limit, max(0, limit - max(0, used - droppable)))


def _number(path: Path) -> int | None:
    digits = text(path).strip()
    return int(digits) if digits.isdigit() else None
