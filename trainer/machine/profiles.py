"""How fast machines are: named ones, to plan for a machine that is elsewhere, and what was measured on this one.

``deepstow doctor --rates`` measures this machine (``rates.py``) and stores a file; ``known_rates`` reads it back. One
from another machine or another torch, or one that cannot be read, is ignored, with one line that says why: a plan made
with another machine's rates looks right but is wrong.

Sources of the named cards' rates. Whatever is not marked as published is an assumption; measuring replaces all of it.

    GEMM     peak of the data sheet times an efficiency. bf16: 0.80 for H100 SXM, 0.81 for A100 PCIe, 0.78 for B200
             and 0.60 for MI300X (published: highest matmul rates of S. Bekman, "Machine Learning Engineering",
             compute/accelerator). A100 SXM is taken for A100 PCIe, and H200 for H100 SXM, whose chip it has.
             0.94 for RTX 4090 (published: LoHan's evaluation_data.md, 13 B at 156 of 165 Tflop/s), assumed for the
             other GeForce cards. Assumed: 0.80 for A10G; and for cards that meet their power limit first 0.70 (H100
             PCIe, L40S, RTX A6000), 0.50 (L4, A10) and 0.40 (T4, of fp16: it has no units for bf16, which is taken to
             be as fast as fp32). fp32: 0.80 assumed.
    Memory   data sheet times 0.85, assumed. How much of it torch reports: as users' messages say; of H200, B200 and
             MI300X within 1 GiB.
    Link     PCI Express by generation and streams times 0.85, assumed for large copies of pinned memory: packet headers
             alone cost 8 to 10 %, flow control and the host's side the rest. Published by users of nvbandwidth are 52.8
             GB/s down on H100 (its issue 24), and on generation 4 24.8 to 26 either way (its issues 11 and 53).
    Duplex   generation 5: 26 to 31 GB/s each way when both run, from offload_adam's published steps on an RTX PRO 6000;
             the middle of it over the link alone. Generation 4: 24 down and 11 to 13 up, of 25 alone, on two A100
             systems (nvbandwidth, issues 11 and 53); their mean over the link alone. Generation 3: as 4, assumed.
    Latency  10 us per copy, assumed.
    DRAM     servers 150 GB/s (8 channels or more, of which 16 to 32 cores reach this much), desktops with two channels
             of DDR5 60 and of DDR4 40, a rented slice of six cores 50; all assumed.
    Disk     5 GB/s read, 2 GB/s written, one at a time: what a drive of generation 4 sustains once its cache is full,
             assumed; peaks of data sheets are up to three times as high.
    Launch   10 us of the host per operator, assumed.
    Network  inside a machine NVLink by generation: 300 GB/s each way on A100 SXM, 450 on H100 and H200 SXM and 900 on
             B200 (data sheets: 600, 900 and 1,800 for both), times 0.82: NCCL gets 370 of 450 (published by its
             authors: nccl-tests, issue 212), and 3.4 us per hop (its src/graph/tuning.cc). MI300X: 448 GB/s over seven
             links (data sheet: 896 for both), and the same share and latency, assumed. Cards without one have no rate,
             exchange by way of the host, and take 10 us, assumed. Across machines what the reference systems have for
             each card: 200 Gb/s (DGX A100) and 400 (DGX H100, H200 and B200; assumed for MI300X), times 0.85. For
             others write --network. Where that share and the latency are from, and how far off they may be:
             strategies/planner/network.py.
    Update   32 bytes per parameter at that rate, but at most what the cores compute: 2.2 and 1.4 G parameters per
             second and core for fp32 and bf16 gradients (measured: benchmarks/records/cpu-update.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from deepstow.strategies.core.cgroups import ROOT
from deepstow.strategies.core.facts import HOST_UPDATE_BYTES, Rates
from deepstow.strategies.state.commit import replace_file
from deepstow.trainer.errors import ConfigError, nearest
from deepstow.trainer.machine.probe import GIB, Machine, peak_flops

# --- named -------------------------------------------------------------------------------------------------------

FP32_EFFICIENCY = 0.80
MEMORY_EFFICIENCY = 0.85
LINK_EFFICIENCY = 0.85
NVLINK_EFFICIENCY = 0.82
NVLINK_LATENCY_S = 3.4e-6
NETWORK_EFFICIENCY = 0.85


class _Link(NamedTuple):
    bytes_per_s: float
    duplex_factor: float


class _Host(NamedTuple):
    """The machine that a card stands in, with the bytes per second of its memory."""

    gib: int
    cores: int
    dram: float


def _pcie(gigatransfers: float, streams: int = 16) -> float:
    """Bytes per second in one direction, after 128b/130b encoding and ``LINK_EFFICIENCY``."""
    return gigatransfers * 1e9 * streams * 128 / 130 / 8 * LINK_EFFICIENCY


_PCIE3 = _Link(_pcie(8), (24 + 12) / 2 / 25)
_PCIE4 = _Link(_pcie(16), (24 + 12) / 2 / 25)
_PCIE5 = _Link(_pcie(32), 28.5e9 / _pcie(32))
_PCIE4_X8 = _PCIE4._replace(bytes_per_s=_pcie(16, streams=8))
_SERVER = 150e9
_DDR5 = 60e9
_DDR4 = 40e9
_SLICE = 50e9
_A100_SXM = (300e9, 200)
_H100_SXM = (450e9, 400)
_B200 = (900e9, 400)
_MI300X = (448e9, 400)


def across(gigabits: float) -> float:
    """Bytes per second, each way, of a rank whose card in the network has so many Gb/s."""
    return gigabits * 1e9 / 8 * NETWORK_EFFICIENCY


def _card(
    device: str,
    device_gib: float,
    link: _Link,
    host: _Host,
    *,
    gemm: float,
    memory: float,
    network: tuple[float, float] | None = None,
) -> Machine:
    """One card, with ``device_gib`` as torch reports it, in a typical host. ``gemm`` is the share of the bf16 peak that
    matrix products reach, of the fp16 peak on a card without bf16; ``memory`` the bytes per second of the data sheet;
    ``network``, by data sheets, bytes per second each way over NVLink, and Gb/s to other machines.
    """
    peaks = peak_flops(device)

    def update(params_per_s_and_core: float) -> float:
        return min((host.cores - 1) * params_per_s_and_core, host.dram / HOST_UPDATE_BYTES)  # one core is Python's

    return Machine(
        name=device,
        origin="profile",
        device_kind="cuda",
        device_total_bytes=int(device_gib * GIB),
        peak_flops=peaks,
        host_available_bytes=host.gib * GIB * 9 // 10,  # a tenth for the system and other processes
        usable_cores=host.cores,
        rates=Rates(
            gemm_fp32_flops_per_s=peaks["fp32"] * FP32_EFFICIENCY,
            gemm_bf16_flops_per_s=peaks["bf16"] * gemm if "bf16" in peaks else None,
            gemm_fp16_flops_per_s=None if "bf16" in peaks else peaks["fp16"] * gemm,
            up_bytes_per_s=link.bytes_per_s,
            down_bytes_per_s=link.bytes_per_s,
            duplex_factor=link.duplex_factor,
            link_latency_s=10e-6,
            dram_bytes_per_s=host.dram,
            update_fp32_params_per_s=update(2.2e9),
            update_bf16_params_per_s=update(1.4e9),
            device_bytes_per_s=memory * MEMORY_EFFICIENCY,
            net_bytes_per_s=network and network[0] * NVLINK_EFFICIENCY,
            net_latency_s=NVLINK_LATENCY_S if network else 1e-5,
            net_across_bytes_per_s=network and across(network[1]),
            origin="profile",
        ),
    )


PROFILES: dict[str, Machine] = {
    "cpu": Machine(  # without rates: CPUs differ too much
        name="cpu", origin="profile", device_kind="cpu", host_available_bytes=14 * GIB, usable_cores=8
    ),
    "b200-pcie5": _card("NVIDIA B200", 178.3, _PCIE5, _Host(256, 24, _SERVER), gemm=0.78, memory=8.0e12, network=_B200),
    "h200-sxm-pcie5": _card(
        "NVIDIA H200", 139.8, _PCIE5, _Host(256, 24, _SERVER), gemm=0.80, memory=4.8e12, network=_H100_SXM
    ),
    "mi300x-pcie5": _card(
        "AMD Instinct MI300X", 191.9, _PCIE5, _Host(256, 24, _SERVER), gemm=0.60, memory=5.3e12, network=_MI300X
    ),
    "h100-pcie5": _card("NVIDIA H100 PCIe", 79.1, _PCIE5, _Host(256, 32, _SERVER), gemm=0.70, memory=2.0e12),
    "h100-sxm-pcie5": _card(
        "NVIDIA H100 80GB HBM3", 79.1, _PCIE5, _Host(256, 24, _SERVER), gemm=0.80, memory=3.35e12, network=_H100_SXM
    ),
    "a100-40g-pcie4": _card("NVIDIA A100-PCIE-40GB", 39.4, _PCIE4, _Host(128, 16, _SERVER), gemm=0.81, memory=1.555e12),
    "a100-80g-pcie4": _card("NVIDIA A100 80GB PCIe", 79.3, _PCIE4, _Host(256, 16, _SERVER), gemm=0.81, memory=1.935e12),
    "a100-80g-sxm": _card(
        "NVIDIA A100-SXM4-80GB", 79.2, _PCIE4, _Host(1024, 128, _SERVER), gemm=0.81, memory=2.039e12, network=_A100_SXM
    ),
    "rtx5090-pcie5": _card("NVIDIA GeForce RTX 5090", 31.4, _PCIE5, _Host(128, 16, _DDR5), gemm=0.94, memory=1.792e12),
    "rtx4090-pcie4": _card("NVIDIA GeForce RTX 4090", 23.6, _PCIE4, _Host(128, 16, _DDR5), gemm=0.94, memory=1.008e12),
    "rtx4080-pcie4": _card("NVIDIA GeForce RTX 4080", 15.7, _PCIE4, _Host(64, 12, _DDR5), gemm=0.94, memory=0.717e12),
    "rtx3090-pcie4": _card("NVIDIA GeForce RTX 3090", 23.7, _PCIE4, _Host(64, 12, _DDR4), gemm=0.94, memory=0.936e12),
    "rtx3060-pcie4": _card("NVIDIA GeForce RTX 3060", 11.7, _PCIE4, _Host(32, 8, _DDR4), gemm=0.94, memory=0.36e12),
    "a6000-pcie4": _card("NVIDIA RTX A6000", 47.5, _PCIE4, _Host(128, 16, _DDR4), gemm=0.70, memory=0.768e12),
    "l40s-pcie4": _card("NVIDIA L40S", 44.4, _PCIE4, _Host(128, 16, _SERVER), gemm=0.70, memory=0.864e12),
    "a10-pcie4": _card("NVIDIA A10", 22.0, _PCIE4, _Host(128, 16, _SERVER), gemm=0.50, memory=0.6e12),
    "a10g-pcie4": _card("NVIDIA A10G", 22.0, _PCIE4, _Host(64, 8, _SLICE), gemm=0.80, memory=0.6e12),
    "l4-pcie4": _card("NVIDIA L4", 22.0, _PCIE4_X8, _Host(48, 6, _SLICE), gemm=0.50, memory=0.3e12),
    "t4-pcie3": _card("Tesla T4", 14.6, _PCIE3, _Host(32, 4, _SLICE), gemm=0.40, memory=0.32e12),
}


# Drivers' other names of the same card.
OTHERWISE = {"T4": "Tesla T4", "NVIDIA T4": "Tesla T4", "NVIDIA Tesla T4": "Tesla T4"}
OTHERWISE |= {f"AMD Instinct MI300X {kind}": "AMD Instinct MI300X" for kind in ("OAM", "VF")}


def profile(name: str) -> Machine:
    """The machine of that name, to plan for one that is elsewhere; what one name alone begins with is enough.
    ConfigError, with the nearest, if there is none.
    """
    names = [name] if name in PROFILES else [known for known in PROFILES if known.startswith(f"{name}-")]
    if len(names) == 1:
        return PROFILES[names[0]]
    hint = nearest(name.lower(), PROFILES, cutoff=0.3)
    raise ConfigError(f"unknown machine profile {name!r}: known are {', '.join(PROFILES)}{hint}")


def sized(machine: Machine, device_bytes: int | None, host_bytes: int | None) -> Machine:
    """``machine`` with other sizes of memory: of its device (it gets one if it has none, of which nothing else is
    known), and of what is free of its host; None: as it is.
    """
    if device_bytes and machine.device_kind == "cpu":
        machine = replace(machine, name="a GPU", origin="profile", device_kind="cuda", rates=None)
    if device_bytes:
        machine = replace(machine, device_total_bytes=device_bytes)
    if host_bytes:
        machine = replace(machine, host_available_bytes=host_bytes, host_own_bytes=0)
    return machine


# --- measured ----------------------------------------------------------------------------------------------------

T = TypeVar("T")
COMMAND = "deepstow doctor --rates"


def stored_at() -> Path:
    """The default file for the rates of this machine."""
    return Path.home() / ".cache/deepstow/machine.json"


MachineKey = dict[str, str | int]  # what rates were measured on; they are valid for nothing else


@dataclass(frozen=True, slots=True)
class StoredRates:
    """The content of a file."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # of rates, too: a misspelt one would not count

    rates: Rates | None = None
    date: str = ""
    others_share: float = 0.0  # of the cores, that other processes used during the measurement
    ignored: str = ""  # why the file is not used
    key: MachineKey = field(default_factory=dict)
    points: dict[str, Any] = field(default_factory=dict, compare=False)  # measurements that the rates were fitted to
    format: Literal[3] = 3  # before: updates alone, not beside a thread that launches


FILE = TypeAdapter(StoredRates)


def key_of(machine: Machine, root: Path = ROOT) -> MachineKey:
    """The key of ``machine``, which is this one. ``root`` is the folder with ``proc``."""
    import torch

    info = root / "proc/cpuinfo"
    lines = info.read_text().split("\n\n")[0].splitlines() if info.exists() else []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    # With its model numbers, since virtual machines often shorten the name.
    cpu = " ".join(filter(None, (fields.get("model name", "unknown"), fields.get("cpu family"), fields.get("model"))))
    return {"device": machine.name, "cpu": cpu, "cores": machine.usable_cores, "torch": str(torch.__version__)}


def save(path: Path, stored: StoredRates) -> None:
    """Write a file that ``load`` reads, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, FILE.dump_json(stored, indent=1))


def load(path: Path, machine: MachineKey) -> StoredRates:
    """What is stored in ``path`` if it was measured on ``machine``; empty if there is no file."""
    stored, ignored = kept(path, FILE, "a machine profile")
    key = machine if stored is None else stored.key
    if different := [
        f"{name} {key.get(name)}, here {value}" for name, value in machine.items() if key.get(name) != value
    ]:
        ignored = f"{path} is ignored: measured with {', '.join(different)}"
    if ignored:
        return StoredRates(ignored=f"{ignored}; to measure again: {COMMAND}")
    return stored or StoredRates()


def kept(path: Path, form: TypeAdapter[T], what: str) -> tuple[T, str] | tuple[None, str]:
    """What a file of measurements holds, and why it is ignored, for people; neither if there is no file."""
    try:
        return form.validate_json(path.read_bytes()), ""
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"{path} is ignored: {error.strerror}"
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{name}: " for name in first["loc"][-1:])
        return None, f"{path} is ignored: not {what}: {where}{first['msg']}"


def known_rates(machine: Machine) -> StoredRates:
    """The rates of ``machine``: a named one's profile, or what was measured here, or a profile of the same device."""
    if machine.origin == "profile":
        return StoredRates(machine.rates)
    stored = load(stored_at(), key_of(machine))
    if stored.rates is not None:
        return stored
    name = OTHERWISE.get(machine.name, machine.name)
    named = next((known.rates for known in PROFILES.values() if known.name == name), None)
    return StoredRates(named, ignored=stored.ignored)


def one_line(rates: Rates) -> str:
    """The rates on one line."""
    bf16 = rates.gemm_bf16_flops_per_s
    net = rates.net_bytes_per_s
    outside = rates.net_across_bytes_per_s
    giga = 1e9
    fp16 = rates.gemm_fp16_flops_per_s if not bf16 else None
    return (
        f"fp32 {rates.gemm_fp32_flops_per_s / 1e12:.3g}, bf16 {f'{bf16 / 1e12:.3g}' if bf16 else 'none'}"
        f"{f', fp16 {fp16 / 1e12:.3g}' if fp16 else ''} Tflop/s; "
        f"link up {rates.up_bytes_per_s / giga:.3g}, down {rates.down_bytes_per_s / giga:.3g} GB/s, both at once "
        f"{rates.duplex_factor:.0%} of each, {rates.link_latency_s * 1e6:.3g} us; "
        f"DRAM {rates.dram_bytes_per_s / giga:.3g}, device memory {rates.device_bytes_per_s / giga:.4g} GB/s; "
        f"update fp32 {rates.update_fp32_params_per_s / giga:.3g}, "
        f"bf16 {rates.update_bf16_params_per_s / giga:.3g} G parameters/s"
        + (f"; exchanges {net / giga:.3g} GB/s" if net else "")
        + (f", across machines {outside / giga:.3g}" if outside else "")
        + (f"; disk read {rates.disk_read_bytes_per_s / giga:.3g}, " if rates.disk_folder else "")
        + (f"written {rates.disk_write_bytes_per_s / giga:.3g} GB/s" if rates.disk_folder else "")
    )
