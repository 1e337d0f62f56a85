"""Rates: fits on made-up numbers, files that hold and files that are ignored, named cards, one small measurement."""

import json
import os
import threading
import time
from contextlib import closing
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepstow.launch import doctor
from deepstow.strategies.core.facts import HOST_UPDATE_BYTES, Precision, Rates
from deepstow.strategies.engine.transfer.worker import Worker
from deepstow.strategies.planner.weight_schedule import ASSUMED
from deepstow.trainer.errors import ExitCode
from deepstow.trainer.machine import profiles, rates
from deepstow.trainer.machine.probe import GIB, cores, probe
from deepstow.trainer.machine.profiles import MachineKey, StoredRates, one_line
from deepstow.trainer.machine.rates import Effort, duplex_factor, fit_line, measure_network
from deepstow.trainer.planning.facts import machine_facts
from tests.helpers.releases import needs_scratch

SIZES = [1 << power for power in range(16, 29)]
HERE: MachineKey = {"device": "card", "cpu": "AMD EPYC 26 2", "cores": 16, "torch": "2.13.0+cu130"}
TINY = Effort(
    seconds=0.01, link_seconds=0.002, largest_bytes=1 << 20, num_params=1 << 12, network_bytes=0,
    shapes=((8, 16, 8), (16, 16, 16)),
)  # fmt: skip


def some_rates(**changes: Any) -> Rates:
    return replace(ASSUMED, **{"origin": "measured", "update_bf16_params_per_s": 4e9, **changes})


# --- fits --------------------------------------------------------------------------------------------------------


def times(latency_s: float, bytes_per_s: float) -> list[tuple[int, float]]:
    return [(size, latency_s + size / bytes_per_s) for size in SIZES]


@pytest.mark.parametrize(("index", "factor"), [(0, 0.1), (6, 2.0), (12, 10.0)])
def test_a_line_is_found_again_with_one_point_disturbed(index: int, factor: float) -> None:
    points = times(10e-6, 25e9)
    points[index] = (points[index][0], points[index][1] * factor)
    assert fit_line(points) == pytest.approx((10e-6, 25e9), rel=1e-6)


def test_what_is_no_line() -> None:
    with pytest.raises(ValueError, match="one size"):
        fit_line([(4, 1.0), (4, 2.0)])
    # A latency is never negative, as where a cache makes small copies faster than the line through the large ones.
    assert fit_line([(1 << 16, 1e-6), (1 << 20, 100e-6), (1 << 24, 1600e-6)]).latency_s == 0
    # Times that fall with size have no asymptote; the nearest line is one through the origin.
    assert fit_line([(4, 3.0), (8, 1.0)]).latency_s == 0


def test_duplex_factor_undoes_the_simulators_rule() -> None:
    """Both run at ``factor`` of their rates until the shorter is done, then the other alone."""
    for up_s, down_s, factor in ((1.0, 1.5, 0.5), (3.0, 1.0, 0.72)):
        shared = min(up_s, down_s) / factor
        both_s = shared + max(up_s, down_s) - shared * factor
        assert duplex_factor(up_s, down_s, both_s) == pytest.approx(factor)
    assert duplex_factor(1.0, 1.0, 0.9) == duplex_factor(1.0, 3.0, 1.5) == 1.0, "noise"
    assert duplex_factor(1.0, 1.0, 2.5) == pytest.approx(0.4), "worse than one after the other"


def test_dram_counts_with_what_copies_and_updates_reach_together() -> None:
    shared = rates.shared_dram
    assert shared(alone=80e9, link=50e9, update=60e9, together=75e9) == 75e9  # they slow each other down
    assert shared(alone=80e9, link=20e9, update=40e9, together=59e9) == 80e9  # it is fast enough for both
    assert shared(alone=50e9, link=20e9, update=40e9, together=59e9) == 59e9  # more than scaling a buffer reaches


# --- the value ---------------------------------------------------------------------------------------------------


def test_rates_that_cannot_be() -> None:
    wrong = {"up_bytes_per_s": 0, "device_bytes_per_s": float("nan"), "link_latency_s": -1e-9}
    for name, value in {**wrong, "gemm_bf16_flops_per_s": float("inf")}.items():
        with pytest.raises(ValueError, match=name):
            some_rates(**{name: value})
    assert some_rates(link_latency_s=0.0, launch_s=0.0), "as if there were none"


# --- files -------------------------------------------------------------------------------------------------------


def stored_file(folder: Path, key: MachineKey = HERE) -> Path:
    path = folder / "some/folder/machine.json"
    profiles.save(path, StoredRates(some_rates(), "2026-11-21 06:00:00Z", 0.01, key=key, points={"gemm": [1]}))
    return path


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = stored_file(tmp_path)
    assert profiles.load(path, HERE) == StoredRates(some_rates(), "2026-11-21 06:00:00Z", 0.01, key=HERE)
    assert [each.name for each in path.parent.iterdir()] == ["machine.json"]
    assert profiles.load(tmp_path / "none.json", HERE) == StoredRates()


def test_foreign_and_stale_files_are_ignored(tmp_path: Path) -> None:
    path = stored_file(tmp_path)
    found = profiles.load(path, {**HERE, "cpu": "Xeon", "cores": 8})
    said = "measured with cpu AMD EPYC 26 2, here Xeon, cores 16, here 8; to measure again: "
    assert found == StoredRates(ignored=f"{path} is ignored: {said}{profiles.COMMAND}")


def broken(**changes: Any) -> str:
    content: dict[str, Any] = {"format": 3, "date": "d", "others_share": 0.0, "key": HERE, "points": {}}
    return json.dumps({**content, "rates": asdict(some_rates()), **changes})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a machine profile: Invalid JSON"),
        ("{}", "measured with device None, here card, "),
        (broken(format=2), "not a machine profile: format: Input should be 3"),
        (
            broken(rates={**asdict(some_rates()), "duplex_factor": 7.0}),
            "not a machine profile: rates: Value error, duplex_factor = 7.0",
        ),
        (broken(rates={**asdict(some_rates()), "net_byts_per_s": 7.0}), "not a machine profile: net_byts_per_s: "),
    ],
    ids=range(5),
)
def test_broken_files_are_ignored_with_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    found = profiles.load(path, HERE)
    assert found.rates is None and found.ignored.startswith(f"{path} is ignored: {said}")
    assert profiles.load(tmp_path, HERE).ignored.startswith(f"{tmp_path} is ignored: Is a directory;")
    assert "\n" not in found.ignored


def test_the_key_tells_processors_apart(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    text = "processor\t: 0\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\nmodel\t\t: 9\n"
    (tmp_path / "proc/cpuinfo").write_text(text)
    assert profiles.key_of(probe(), tmp_path)["cpu"] == "AMD EPYC 26 2"
    assert profiles.key_of(probe(), tmp_path / "elsewhere")["cpu"] == "unknown"


# --- what a plan sees --------------------------------------------------------------------------------------------


def test_facts_take_what_was_measured_then_a_named_card_then_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "machine.json"
    monkeypatch.setattr(profiles, "stored_at", lambda: path)
    here = replace(probe(), name="card", device_kind="cuda", device_total_bytes=GIB)
    assert machine_facts(here, 1).rates is None
    card = replace(here, name="NVIDIA H100 80GB HBM3")
    assert machine_facts(card, 1).rates == profiles.profile("h100-sxm-pcie5").rates
    profiles.save(path, StoredRates(some_rates(), key=profiles.key_of(card)))
    assert machine_facts(card, 2).rates == some_rates().shared_by(2)
    assert machine_facts(here, 1).rates is None and "device NVIDIA H100" in profiles.known_rates(here).ignored


def test_a_card_of_this_machine_is_known_by_the_names_that_torch_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "stored_at", lambda: tmp_path / "none.json")
    here = replace(probe(), device_kind="cuda", device_total_bytes=GIB)
    for name, named in {
        "NVIDIA H200": "h200-sxm-pcie5", "NVIDIA B200": "b200-pcie5", "NVIDIA L40S": "l40s-pcie4",
        "AMD Instinct MI300X": "mi300x-pcie5", "AMD Instinct MI300X OAM": "mi300x-pcie5", "Tesla T4": "t4-pcie3",
        "NVIDIA T4": "t4-pcie3", "NVIDIA A10": "a10-pcie4", "NVIDIA A10G": "a10g-pcie4",
        "NVIDIA RTX A6000": "a6000-pcie4", "NVIDIA GeForce RTX 4080": "rtx4080-pcie4",
        "NVIDIA GeForce RTX 3060": "rtx3060-pcie4",
    }.items():  # fmt: skip
        assert profiles.known_rates(replace(here, name=name)).rates == profiles.PROFILES[named].rates
    for other in ("NVIDIA H200 NVL", "NVIDIA GeForce RTX 3060 Laptop GPU", "NVIDIA RTX 6000 Ada Generation"):
        assert profiles.known_rates(replace(here, name=other)).rates is None


@pytest.mark.parametrize("name", [name for name in profiles.PROFILES if name != "cpu"])
def test_named_cards_are_complete_and_possible(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "stored_at", lambda: pytest.fail("what was measured here does not count"))
    card = profiles.profile(name)
    known, peak = profiles.known_rates(card).rates, card.peak_flops
    assert card.origin == "profile" and 0 < card.device_total_bytes < card.host_available_bytes
    assert known is not None and known.origin == "profile"
    half = Precision.BF16 if "bf16" in peak else Precision.FP16
    assert 0.39 * peak[half.value] < known.gemm_flops(half) < peak[half.value]
    assert 0.4 * peak["fp32"] < known.gemm_flops(Precision.FP32) < peak["fp32"]
    assert 0.5 <= known.duplex_factor < 1 and 0 < known.link_latency_s < 1e-4
    for precision in Precision:
        assert 0 < HOST_UPDATE_BYTES * known.update_params_per_s(precision) <= known.dram_bytes_per_s * 1.001
    assert known.dram_bytes_per_s < known.device_bytes_per_s


def test_updates_are_made_beside_launches() -> None:
    launched, seen = threading.Event(), list[bool]()
    with closing(Worker(1)) as worker:
        rates.beside_launches(lambda: worker.submit(0, lambda: seen.append(launched.wait(10))), launched.set)
    assert seen == [True]


# --- the command -------------------------------------------------------------------------------------------------


def test_the_command_measures_and_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new/machine.json"
    monkeypatch.setattr(rates, "FULL", TINY)
    assert doctor.main(["--rates", "--out", str(path)]) == ExitCode.FINISHED
    out = capsys.readouterr().out.splitlines()
    assert len([line for line in out if line.endswith("Tflop/s")]) == 4
    assert len([line for line in out if " MiB  up " in line]) == 5
    assert out[-1].startswith(f"stored in {path} after ")
    found = profiles.load(path, profiles.key_of(probe()))
    assert found.rates is not None and found.rates.origin == "measured" and not found.ignored
    assert doctor.rates_row(found).value in out[-2]
    assert {"gemm", "link", "memory"} == set(json.loads(path.read_text())["points"])


@needs_scratch
def test_the_disks_of_folders_are_measured_besides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rates, "FULL", replace(TINY, disk_seconds=0.01))
    monkeypatch.setattr(rates, "measure", lambda say, effort: (some_rates(), {}))
    monkeypatch.setattr(rates, "MOST_BYTES", 1)  # the file has two pieces
    seconds = SimpleNamespace(perf_counter=count().__next__, strftime=time.strftime, gmtime=time.gmtime)
    monkeypatch.setattr(rates, "time", seconds)  # a second for each
    path = tmp_path / "machine.json"
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
    folders = [str(tmp_path / "one"), str(tmp_path / "other")]
    assert doctor.main(["--rates", "--out", str(path), "--disk", *folders]) == ExitCode.FINISHED
    found = profiles.load(path, profiles.key_of(probe())).rates
    assert found is not None and found.disk_folder == ", ".join(folders) and 1 <= found.disk_overlap <= 2
    assert found.disk_read_bytes_per_s == found.disk_write_bytes_per_s == rates.PIECE / 2, "of each drive"
    assert not any(map(os.listdir, folders)), "the files are gone"
    assert doctor.main(["--rates", "--out", str(path), "--disk", folders[0], str(tmp_path / "none")]) == ExitCode.CONFIG
    assert capsys.readouterr().err.rstrip().endswith(f"{tmp_path}/none: no such folder")


def test_the_command_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert doctor.main(["--rates", "--out", str(tmp_path / "file/machine.json")]) == ExitCode.CONFIG
    found = capsys.readouterr()
    assert found.out == "" and found.err.startswith(f"--out {tmp_path}/file/machine.json: ")
    for wrong in (["--rates", "--build"], ["--out", "x"], ["--disk", "x"]):
        with pytest.raises(SystemExit):
            doctor.main(wrong)


def test_rows_of_the_doctor() -> None:
    fine = doctor.rates_row(StoredRates(some_rates(), "2026-11-21 06:00:00Z"))
    assert fine.status is doctor.Status.OK and "bf16 600 Tflop/s" in fine.value and "measured 2026-11-21" in fine.value
    assert "of a named profile" in doctor.rates_row(StoredRates(some_rates(origin="profile"))).value
    assert "not measured" in doctor.rates_row(StoredRates()).value
    loud = doctor.rates_row(StoredRates(some_rates(), "2026-11-21", 0.4))
    assert loud.status is doctor.Status.WARN and "others used 40% of the cores" in loud.value
    ignored = doctor.rates_row(StoredRates(ignored=f"x is ignored: because; to measure again: {profiles.COMMAND}"))
    assert ignored == doctor.Row(doctor.Status.WARN, "rates", "x is ignored: because", profiles.COMMAND)


# --- network -----------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_exchanges_of_ranks_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    rate = measure_network(1 << 20, 0.01, said.append)
    if cores()[1] < 2:
        assert rate is None
        return
    assert rate is not None and 1e6 < rate < 1e12
    plan_rates = some_rates(net_bytes_per_s=rate)
    assert plan_rates.exchange_bytes_per_s() == rate and f"exchanges {rate / 1e9:.3g} GB/s" in one_line(plan_rates)
    monkeypatch.setattr(rates, "cores", lambda: (1, 1))
    assert measure_network(1 << 20, 0.01, print) is None, "one rank has no exchanges"
