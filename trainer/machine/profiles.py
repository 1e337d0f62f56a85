"""How fast machines are: named ones, so that plans can be made for one that is not here, and what was measured here.

``launch/doctor.py --rates`` measures this machine (``rates.py``) and stores a file; ``known_rates`` reads it back. A
file says what it was measured on. If that is another machine, another torch, or nothing that can be read, it is ignored
with one line that says why: a plan made with another machine's numbers looks right and is not.

Sources of the named cards' rates. Whatever is not marked as published is an assumption; measuring replaces all of it.

    GEMM     peak of the data sheet times an efficiency. bf16: 0.80 for H100 SXM, 0.81 for A100 PCIe (published:
             highest matmul rates of S. Bekman, "Machine Learning Engineering", compute/accelerator); 0.94 for RTX 4090
             (published: LoHan's evaluation_data.md, 13 B at 156 of 165 Tflop/s), assumed for the other GeForce cards;
             0.70 assumed for H100 PCIe and 0.50 for L4, which meet their power limit first. fp32: 0.80 assumed.
    Memory   data sheet times 0.85, assumed.
    Link     PCI Express by generation and lanes times 0.85, assumed; published by users of nvbandwidth are 52.8 GB/s
             down on H100 (its issue 24), and on generation 4 24.8 to 26 either way (its issues 11 and 53).
    Duplex   generation 5: 26 to 31 GB/s each way when both run, from offload_adam's published steps on an RTX PRO 6000;
             the middle of it over the link alone. Generation 4: 24 down and 11 to 13 up, of 25 alone, on two A100
             systems (nvbandwidth, issues 11 and 53); their mean over the link alone.
    Latency  10 us per copy, assumed.
    DRAM     servers 150 GB/s (8 channels or more, of which 16 to 32 cores reach this much), desktops with two channels
             of DDR5 60 and of DDR4 40, a rented slice of six cores 50; all assumed.
    Update   32 bytes per parameter at that rate, but at most what the cores compute: 2.2 and 1.4 G parameters per
             second and core for fp32 and bf16 gradients (measured: benchmarks/records/2026-11-21_cpu-update_2-core).
"""

from __future__ import annotations

import difflib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from strategies.core.commit import replace_file
from strategies.core.facts import Rates
from trainer.errors import ConfigError
from trainer.machine.probe import GIB, ROOT, Machine, PeakFlops, peak_flops

# --- named -------------------------------------------------------------------------------------------------------

# A PCI Express x16 link in one direction after 128b/130b encoding: gen 4 is 16 GT/s, gen 5 is 32 GT/s per lane.
# 0.85 of it is assumed for large copies of pinned memory: packet headers alone cost 8 to 10 %, flow control and
# the host's side the rest. Copies below a few MiB, pageable memory and a shared switch all reach less.
PCIE4_BYTES_PER_S = 16e9 * 16 * 128 / 130 / 8
PCIE5_BYTES_PER_S = 32e9 * 16 * 128 / 130 / 8
LINK_EFFICIENCY = 0.85
PCIE4_DUPLEX = (24 + 12) / 2 / 25
PCIE5_DUPLEX = 28.5e9 / (PCIE5_BYTES_PER_S * LINK_EFFICIENCY)
LINK_LATENCY_S = 10e-6

FP32_EFFICIENCY = 0.80
MEMORY_EFFICIENCY = 0.85

# Per parameter: master and two moments read and written (24), and the gradient clipped in place (8), or in bf16 the
# gradient read, and the master once more for the new weight, which is written (8).
UPDATE_BYTES = 32
UPDATE_PARAMS_PER_S_AND_CORE = {"fp32": 2.2e9, "bf16": 1.4e9}

CONTEXT_BYTES = 600 * 1024**2  # what a CUDA context and its libraries take before the first tensor, about


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    """The machine around a card; ``dram`` in bytes per second."""

    gib: int
    cores: int
    dram: float


def _card(
    device: str,
    device_gib: float,
    pcie_bytes_per_s: float,
    host: _Host,
    *,
    gemm: float,
    memory: float,
    duplex: float,
) -> Machine:
    """One card in a typical host. ``device_gib`` is what torch reports, less than the name on the box.

    Args:
        gemm: the part of the bf16 peak that matrix products reach.
        memory: bytes per second of the data sheet.
        duplex: see ``Rates.duplex_factor``.
    """
    total_bytes, host_bytes = int(device_gib * GIB), host.gib * GIB
    peaks = peak_flops(device)
    assert peaks is not None, f"{device} is not among the peaks"
    link_bytes_per_s = pcie_bytes_per_s * LINK_EFFICIENCY
    return Machine(
        name=device,
        origin="profile",
        device_kind="cuda",
        num_devices=1,
        device_total_bytes=total_bytes,
        device_free_bytes=total_bytes - CONTEXT_BYTES,
        peak_flops=peaks,
        link_up_bytes_per_s=link_bytes_per_s,
        link_down_bytes_per_s=link_bytes_per_s,
        host_total_bytes=host_bytes,
        host_available_bytes=host_bytes * 9 // 10,  # a tenth for the system and other processes
        physical_cores=host.cores,
        usable_cores=host.cores,
        shm_free_bytes=host_bytes // 2,  # the kernel's default size of /dev/shm
        disk_free_bytes=1000 * GIB,
        rates=_rates(peaks, link_bytes_per_s, host, gemm=gemm, memory=memory, duplex=duplex),
    )


def _rates(
    peaks: PeakFlops, link_bytes_per_s: float, host: _Host, *, gemm: float, memory: float, duplex: float
) -> Rates:
    """Rates from data sheets and the efficiencies above."""
    update = {
        name: min((host.cores - 1) * each, host.dram / UPDATE_BYTES)  # one core is Python's
        for name, each in UPDATE_PARAMS_PER_S_AND_CORE.items()
    }
    return Rates(
        gemm_fp32_flops_per_s=peaks.fp32 * FP32_EFFICIENCY,
        gemm_bf16_flops_per_s=peaks.bf16 and peaks.bf16 * gemm,
        up_bytes_per_s=link_bytes_per_s,
        down_bytes_per_s=link_bytes_per_s,
        duplex_factor=duplex,
        link_latency_s=LINK_LATENCY_S,
        dram_bytes_per_s=host.dram,
        update_fp32_params_per_s=update["fp32"],
        update_bf16_params_per_s=update["bf16"],
        device_bytes_per_s=memory * MEMORY_EFFICIENCY,
        origin="profile",
    )


_CPU = Machine(
    name="cpu",
    origin="profile",
    device_kind="cpu",
    num_devices=0,
    device_total_bytes=0,
    device_free_bytes=0,
    peak_flops=None,
    link_up_bytes_per_s=None,
    link_down_bytes_per_s=None,
    host_total_bytes=16 * GIB,
    host_available_bytes=14 * GIB,
    physical_cores=8,
    usable_cores=8,
    shm_free_bytes=8 * GIB,
    disk_free_bytes=100 * GIB,
)

_PCIE4: Any = {"pcie_bytes_per_s": PCIE4_BYTES_PER_S, "duplex": PCIE4_DUPLEX}
_PCIE5: Any = {"pcie_bytes_per_s": PCIE5_BYTES_PER_S, "duplex": PCIE5_DUPLEX}
_SERVER, _DDR5, _DDR4, _SLICE = 150e9, 60e9, 40e9, 50e9

# ``memory`` is the data sheet's bandwidth.
PROFILES: dict[str, Machine] = {
    "cpu": _CPU,  # without rates: CPUs differ too much
    "h100-pcie5": _card(
        "NVIDIA H100 PCIe", 79.1, host=_Host(gib=256, cores=32, dram=_SERVER), gemm=0.70, memory=2.0e12, **_PCIE5
    ),
    "h100-sxm-pcie5": _card(
        "NVIDIA H100 80GB HBM3", 79.1, host=_Host(gib=256, cores=24, dram=_SERVER), gemm=0.80, memory=3.35e12, **_PCIE5
    ),
    "a100-40g-pcie4": _card(
        "NVIDIA A100-PCIE-40GB", 39.4, host=_Host(gib=128, cores=16, dram=_SERVER), gemm=0.81, memory=1.555e12, **_PCIE4
    ),
    "a100-80g-pcie4": _card(
        "NVIDIA A100 80GB PCIe", 79.3, host=_Host(gib=256, cores=16, dram=_SERVER), gemm=0.81, memory=1.935e12, **_PCIE4
    ),
    "rtx5090-pcie5": _card(
        "NVIDIA GeForce RTX 5090", 31.4, host=_Host(gib=128, cores=16, dram=_DDR5), gemm=0.94, memory=1.792e12, **_PCIE5
    ),
    "rtx4090-pcie4": _card(
        "NVIDIA GeForce RTX 4090", 23.6, host=_Host(gib=128, cores=16, dram=_DDR5), gemm=0.94, memory=1.008e12, **_PCIE4
    ),
    "rtx3090-pcie4": _card(
        "NVIDIA GeForce RTX 3090", 23.7, host=_Host(gib=64, cores=12, dram=_DDR4), gemm=0.94, memory=0.936e12, **_PCIE4
    ),
    "l4-pcie4": _card(  # the L4 has 8 lanes
        "NVIDIA L4",
        22.0,
        PCIE4_BYTES_PER_S / 2,
        _Host(gib=48, cores=6, dram=_SLICE),
        gemm=0.50,
        memory=0.3e12,
        duplex=PCIE4_DUPLEX,
    ),
}


def profile(name: str) -> Machine:
    """A named machine, so that plans can be made for one that is not here. Its numbers are assumptions.

    Raises:
        ConfigError: no such profile; the line lists them and names the nearest.
    """
    if name in PROFILES:
        return PROFILES[name]
    near = difflib.get_close_matches(name.lower(), PROFILES, n=1, cutoff=0.3)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"unknown machine profile {name!r}: known are {', '.join(PROFILES)}{hint}")


# --- measured ----------------------------------------------------------------------------------------------------

FORMAT = 1
COMMAND = "python launch/doctor.py --rates"


def stored_at() -> Path:
    """Where the rates of this machine are kept unless somebody says otherwise."""
    return Path.home() / ".cache/deepstow/machine.json"


@dataclass(frozen=True, slots=True)
class Key:
    """What rates were measured on; they hold for nothing else."""

    device: str
    cpu: str
    cores: int
    torch: str

    def difference(self, here: Key) -> str:
        """What is another here, as a clause; empty where nothing is."""
        pairs = zip(asdict(self).items(), asdict(here).values(), strict=True)
        return ", ".join(f"{name} {was}, here {now}" for (name, was), now in pairs if was != now)


@dataclass(frozen=True, slots=True)
class Stored:
    """What a file held.

    Args:
        others_share: the part of the cores that others used while the rates were measured.
        ignored: the line that says why nothing of it is used, empty otherwise.
    """

    rates: Rates | None = None
    date: str = ""
    others_share: float = 0.0
    ignored: str = ""


def key_of(machine: Machine, root: Path = ROOT) -> Key:
    """The key of this machine. ``root`` is where ``proc`` lies."""
    import torch

    return Key(machine.name, _cpu_model(root), machine.usable_cores, str(torch.__version__))


def _cpu_model(root: Path) -> str:
    """The processor's name and model numbers: virtual machines often show the first line only in part."""
    try:
        lines = (root / "proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return "unknown"
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    words = (said.get("model name", "unknown"), said.get("cpu family", ""), said.get("model", ""))
    return " ".join(word for word in words if word)


def save(path: Path, key: Key, stored: Stored, points: dict[str, Any]) -> None:
    """Write a file that ``load`` reads; whole or not at all. ``points`` are what the rates were taken from.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {name: value for name, value in asdict(stored).items() if name != "ignored"}
    content = {"format": FORMAT, "key": asdict(key), **found, "points": points}
    replace_file(path, json.dumps(content, indent=1) + "\n")


def load(path: Path, here: Key) -> Stored:
    """The rates in ``path`` if they were measured on ``here``; nothing at all where there is no file."""
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            return _ignored(path, f"its format is {content['format']!r}, this is {FORMAT}")
        key, rates = Key(**content["key"]), Rates(**content["rates"])
        stored = Stored(rates, str(content["date"]), float(content["others_share"]))
    except FileNotFoundError:
        return Stored()
    except OSError as error:
        return _ignored(path, str(error.strerror))
    except KeyError as error:
        return _ignored(path, f"not a machine profile: {error} is missing")
    except (ValueError, TypeError) as error:  # no JSON, no object, an unknown field, a number that cannot be
        return _ignored(path, f"not a machine profile: {error}")
    if difference := key.difference(here):
        return _ignored(path, f"measured with {difference}")
    return stored


def _ignored(path: Path, reason: str) -> Stored:
    return Stored(ignored=f"{path} is ignored: {reason}; to measure again: {COMMAND}")


def known_rates(machine: Machine, path: Path | None = None) -> Stored:
    """The best that is known of ``machine``: of a named one its profile, of this one what was measured here.

    Args:
        path: of the file; None: where the doctor puts it. Without a file that fits, a named profile of the same device
            does, if there is one.
    """
    if machine.origin == "profile":
        return Stored(machine.rates)
    stored = load(path or stored_at(), key_of(machine))
    if stored.rates is not None:
        return stored
    named = next((each.rates for each in PROFILES.values() if each.name == machine.name), None)
    return Stored(named, ignored=stored.ignored)


def one_line(rates: Rates) -> str:
    """The rates on one line."""
    half, each = rates.gemm_bf16_flops_per_s, f"{rates.duplex_factor:.0%}"
    return (
        f"fp32 {rates.gemm_fp32_flops_per_s / 1e12:.3g}, bf16 {f'{half / 1e12:.3g}' if half else 'none'} Tflop/s; "
        f"link up {rates.up_bytes_per_s / 1e9:.3g}, down {rates.down_bytes_per_s / 1e9:.3g} GB/s, both at once {each} "
        f"of each, {rates.link_latency_s * 1e6:.3g} us; DRAM {rates.dram_bytes_per_s / 1e9:.3g}, "
        f"device memory {rates.device_bytes_per_s / 1e9:.4g} GB/s; update fp32 "
        f"{rates.update_fp32_params_per_s / 1e9:.3g}, bf16 {rates.update_bf16_params_per_s / 1e9:.3g} G parameters/s"
    )
