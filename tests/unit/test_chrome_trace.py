"""Steps as Chrome traces: valid events, a track for each resource, in microseconds, and no slice upon another."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from deepstow.launch import cli
from deepstow.strategies.planner.simulate import TraceEvent
from deepstow.strategies.planner.tasks import Resource
from deepstow.trainer.planning import chrome_trace

DID = [
    TraceEvent(Resource.UP, 0.3, 0.5, "saved tensors"),
    TraceEvent(Resource.UP, -0.1, 0.4, "weight copy layers.0"),  # of the step before
    TraceEvent(Resource.UP, 0.4, 1.5, "weight copy layers.1"),  # into the next one
    TraceEvent(Resource.CPU, 0.1, 0.2, "update layers.1"),
    TraceEvent(Resource.CPU, 1.1, 1.2, "update layers.0"),
]


def tracks(path: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Slices by the names of their step and track, in the order of the file; each event is as the format has it."""
    events = json.loads(path.read_text())["traceEvents"]
    assert all({"name", "ph", "pid", "tid"} <= each.keys() and each["ph"] in "MX" for each in events)
    names = {(one["pid"], one["tid"], one["name"]): one["args"].get("name") for one in events if one["ph"] == "M"}
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in (one for one in events if one["ph"] == "X"):
        process, track = (names[one["pid"], 0, "process_name"], names[one["pid"], one["tid"], "thread_name"])
        found.setdefault((process, track), []).append(one)
    return found


def test_what_is_done_at_once_is_on_two_tracks(tmp_path: Path) -> None:
    chrome_trace.write({"simulated": (1.0, DID), "measured": (2.0, DID[3:])}, tmp_path / "step.json")
    shown = {
        at: [(one["name"], one["cat"], one["ts"], one["dur"]) for one in slices]
        for at, slices in tracks(tmp_path / "step.json").items()
    }
    assert shown == {
        ("simulated step, 1 s", "link up"): [
            ("weight copy layers.0", "weight", 0.0, 400_000.0),
            ("weight copy layers.1", "weight", 400_000.0, 600_000.0),
        ],
        ("simulated step, 1 s", "link up 2"): [("saved tensors", "saved", 300_000.0, 200_000.0)],
        ("simulated step, 1 s", "cpu"): [("update layers.1", "update", 100_000.0, 100_000.0)],
        ("measured step, 2 s", "cpu"): [
            ("update layers.1", "update", 100_000.0, 100_000.0),
            ("update layers.0", "update", 1_100_000.0, 100_000.0),
        ],
    }


@pytest.mark.slow
def test_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(Path(__file__).parents[2] / "configs" / "offload.yaml")
    given = ["plan", "--config", config, "--profile", "rtx4090-pcie4", "--trace", str(tmp_path / "step.json")]
    assert cli.main(given) == 0
    seconds = float(capsys.readouterr().out.split("\ntime per step ")[1].split()[0])
    shown = tracks(tmp_path / "step.json")
    assert {name for _, name in shown} >= {"compute", "link up", "link down", "cpu"}
    for slices in shown.values():
        assert all(one["ts"] + one["dur"] <= two["ts"] + 1e-3 for one, two in pairwise(slices)), (
            "in order, none upon it"
        )
        assert slices[0]["ts"] >= 0 and slices[-1]["ts"] + slices[-1]["dur"] <= seconds * 1.01e6
    (compute,) = (slices for (_, name), slices in shown.items() if name == "compute")
    assert {"forward model.layers.0", "backward model.layers.31"} <= {one["name"] for one in compute}
    assert cli.main([*given, "strategies.offload=null"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("--trace ") and "no simulated step" in said
