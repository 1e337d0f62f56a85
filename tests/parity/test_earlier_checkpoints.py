"""Checkpoints that an earlier commit made are resumed, and go on with what that commit got.

Where torch and its kernels are as then, these are its bits; else 1e-4 of them, since sums have another order; so have
PowerSGD's anywhere. Moments in int8 go on within 2e-2: first moments rest in another code since, and are not exact.
"""

import json
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.earlier_runs import ARCHIVE, EXACT, INT8, RUNS, gone_on, kernels, weights_of
from tests.helpers.moves import different, far

pytestmark = pytest.mark.ranks
TOLERANCE = 1e-4  # of another machine's sums
OF_INT8 = 2e-2  # of first moments that rest in another code now
# Resumed together: each kind of file, and each reader of one.
QUICK: Mapping[int, tuple[str, ...]] = {
    1: ("plain, momentum", "host, bf16", "moments int8", "masters bf16", "adapters, fp8"),
    2: ("zero 3", "shared, zero 3, bf16", "pipeline, offload", "tensor, zero 1", "experts", "topk, shared"),
}
REFUSED: Mapping[str, str] = {}  # what is not resumed any more, and a part of the line that says so


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The checkpoints, and beside each the weights at the end and what was logged."""
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    yield folder


def compare(name: str, found: Mapping[str, Any], earlier: Path, *, bits: bool) -> list[str]:
    """What is not as it was."""
    if name in REFUSED or "error" in found:
        said = found.get("error", "nothing")
        return [] if name in REFUSED and REFUSED[name] in said else [f"{name}: {said}"]
    logged, end = (
        json.loads((earlier / name / "logged.json").read_text()),
        load_file(earlier / name / "end.safetensors"),
    )
    same, tolerance = bits and name in EXACT, OF_INT8 if name in INT8 else TOLERANCE
    weights = weights_of(found)
    wrong = different(end, weights) if same else far(end, weights, tolerance)
    for key, before in logged.items():
        after = found[key]
        alike = before == after if same else before == pytest.approx(after, rel=tolerance, nan_ok=True)
        wrong += [] if alike else [f"{key}: {before}, now {after}"]
    return [f"{name}: {each}" for each in wrong]


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        *(pytest.param(ranks, names, id=f"{ranks} ranks", marks=pytest.mark.slow) for ranks, names in QUICK.items()),
        *(
            pytest.param(ranks, tuple(rest), id=f"the others of {ranks} ranks", marks=pytest.mark.slow)
            for ranks in sorted({kind.ranks for kind in RUNS.values()})
            if (rest := [n for n, kind in RUNS.items() if kind.ranks == ranks and n not in QUICK.get(ranks, ())])
        ),
    ],
)
def test_goes_on_as_the_earlier_commit_did(ranks: int, names: tuple[str, ...], earlier: Path, tmp_path: Path) -> None:
    found = gone_on(list(names), earlier, tmp_path)
    bits = kernels() == (earlier / "kernels").read_text()
    assert [line for name in names for line in compare(name, found[name], earlier, bits=bits)] == []


def test_every_run_is_there(earlier: Path) -> None:
    assert {path.parent.name for path in earlier.glob("*/end.safetensors")} == set(RUNS)


def test_a_difference_is_seen(earlier: Path) -> None:
    """A weight that is off by a bit, and a loss that is off by more than rounding."""
    name = "host, bf16"
    end = load_file(earlier / name / "end.safetensors")
    logged = json.loads((earlier / name / "logged.json").read_text())
    assert compare(name, {"end": end, **logged}, earlier, bits=True) == []
    key = next(iter(end))
    other = {**end, key: torch.nextafter(end[key], torch.full_like(end[key], torch.inf))}
    assert compare(name, {"end": other, **logged}, earlier, bits=True) == [f"{name}: {key}"]
    assert compare(name, {"end": other, **logged}, earlier, bits=False) == []
    worse = {"end": end, **logged, "loss": [1.001 * each for each in logged["loss"]]}
    assert len(compare(name, worse, earlier, bits=False)) == 1
