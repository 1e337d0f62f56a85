"""What a machine can do: cgroups on made-up files, the card table, profiles, and one real probe."""

import os
from pathlib import Path

import pytest
import torch

from deepstow.strategies.core.cgroups import usable_cores
from deepstow.strategies.engine.memory import accelerator
from deepstow.strategies.engine.transfer.worker import spare_cores
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.machine import probe, profiles
from deepstow.trainer.machine.probe import GIB, Memory


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


CGROUPS: dict[str, tuple[dict[str, str], Memory | None, int]] = {
    "v2, the tightest ancestor, without cache that can be dropped": (
        {
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/step/memory.max": "max\n",
            "sys/fs/cgroup/job/step/memory.current": f"{2 * GIB}\n",
            "sys/fs/cgroup/job/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/job/memory.current": f"{5 * GIB}\n",
            "sys/fs/cgroup/job/memory.stat": f"anon 7\ninactive_file {GIB}\n",
            "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
            "sys/fs/cgroup/job/cpu.max": "250000 100000\n",
        },
        Memory(8 * GIB, 4 * GIB),
        2,
    ),
    "v1, where the path is the host's": (
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        Memory(4 * GIB, 2 * GIB),
        1,
    ),
    "over the limit for a moment: nothing is left": (
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "1000000\n",
            "sys/fs/cgroup/memory.current": "2000000\n",
            "sys/fs/cgroup/cpu.max": "50000 100000\n",
        },
        Memory(1_000_000, 0),
        1,
    ),
    "none": ({}, None, 64),
    "v1 without a limit": (
        {
            "proc/self/cgroup": "4:memory:/\n1:cpu:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        None,
        64,
    ),
}


@pytest.mark.parametrize("case", CGROUPS)
def test_limits_of_cgroups(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine of 64 cores, where one is Python's and the worker has what is left of a quota."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    files, memory, cores = CGROUPS[case]
    root = write(tmp_path, files)
    assert (probe.cgroup_memory(root), usable_cores(root)) == (memory, cores)
    assert spare_cores(root) == max(1, cores - 1) and probe.cores(root)[1] == cores
    assert memory is None or probe.host_memory(root) == memory


def test_probe_of_this_machine(tmp_path: Path) -> None:
    assert probe.disk_free_bytes(tmp_path / "a/b/c") > 0, "of a folder that does not exist yet"
    here = probe.probe()
    assert here.origin == "probed" and here.rates is None
    assert here.host_available_bytes > 0
    assert here.usable_cores >= 1
    if here.device_kind == "cpu":
        assert (here.name, here.device_total_bytes, here.peak_flops) == ("cpu", 0, {})


def test_an_accelerator_of_any_kind_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "current", lambda: torch.device("xpu", 1))
    monkeypatch.setattr(accelerator, "name_of", lambda device: f"card {device.index}")
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (3 + device.index, 7))  # free, total
    here = probe.probe()
    assert (here.device_kind, here.name) == ("xpu", "card 1")
    assert here.device_total_bytes == 7


def test_cards_are_told_apart() -> None:
    for name, bf16, fp16 in (
        ("NVIDIA H100 80GB HBM3", 989.4e12, 989.4e12),
        ("NVIDIA H100 PCIe", 756e12, 756e12),
        ("Tesla V100-SXM2-16GB", None, 125e12),
        ("NVIDIA A10", 125e12, 125e12),
        ("NVIDIA A10G", 70e12, 70e12),
        ("AMD Instinct MI300X VF", 1307.4e12, 1307.4e12),
    ):
        peak = probe.peak_flops(name)
        assert (peak.get("bf16"), peak.get("fp16")) == (bf16, fp16), name
    for name in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4080 SUPER", "cpu", ""):
        assert probe.peak_flops(name) == {}, name


def test_profiles_state_efficiency_of_the_link() -> None:
    for name, rate in (("h100-pcie5", 53.6e9), ("rtx4090-pcie4", 26.8e9), ("l4-pcie4", 13.4e9)):
        known = profiles.profile(name).rates
        assert known is not None and known.up_bytes_per_s == known.down_bytes_per_s == pytest.approx(rate, rel=0.01)
    assert profiles.profile("cpu").peak_flops == {}


def test_unknown_profile_lists_all_and_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as error:
        profiles.profile("H100-pcie4")
    line = error.value.lines[0]
    assert "'H100-pcie4'" in line and "did you mean 'h100-pcie5'?" in line
    assert all(name in line for name in profiles.PROFILES)


def test_a_profile_is_named_by_what_it_alone_begins_with() -> None:
    for short, whole in (("h200-sxm", "h200-sxm-pcie5"), ("a10", "a10-pcie4"), ("t4", "t4-pcie3")):
        assert profiles.profile(short) is profiles.PROFILES[whole]
    for several in ("a100-80g", "h100", ""):
        with pytest.raises(ConfigError, match="unknown machine profile"):
            profiles.profile(several)
