"""The memory engine over layers that are divided over ranks: the bits of ``tensor`` alone with plain optimizers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.moves import OFFLOAD, SAVED, Kind, different, plain, run, tensor
from tests.helpers.tiny import LLAMA, OPT
from tests.helpers.worlds import run_counted
from tests.parity.test_tensor import SGD, trained

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
BIASES: Mapping[str, Any] = {**LLAMA, "attention_bias": True, "mlp_bias": True}
ON_HOST: Mapping[str, Any] = {"offload": {"site": "host"}}


def stowed(ranks: int, options: Mapping[str, Any] = OFFLOAD, **training: Any) -> Kind:
    return Kind(ranks, {"tensor": {"degree": 2}, **options}, training)


@pytest.mark.parametrize(
    ("ranks", "model", "options"),
    [
        (2, BIASES, OFFLOAD),
        (4, OPT, {**ON_HOST, "zero": {"stage": 2}}),
    ],
    ids=["weights travel", "copies share"],
)
def test_as_tensor_alone(ranks: int, model: Mapping[str, Any], options: Mapping[str, Any], tmp_path: Path) -> None:
    """Clipped and accumulated."""
    alone = run_counted(ranks, trained, Kind(ranks, tensor(0).strategies, SGD, model).config(tmp_path / "alone", 4))
    found = run_counted(ranks, trained, Kind(ranks, stowed(ranks, options).strategies, SGD, model).config(tmp_path, 4))
    assert different(alone["weights"], found["weights"]) == []
    assert (alone["loss"], alone["grad_norm"], found["apart"]) == (found["loss"], found["grad_norm"], [])
    assert min(found["grad_norm"]) > 10 * SGD["max_grad_norm"], "clipping has to trigger"


@pytest.mark.parametrize(
    ("first", "same", "others"),
    [
        (stowed(2), [stowed(2), tensor(0)], [plain()]),
        (stowed(4, {**ON_HOST, "zero": {"stage": 1}}), [tensor(1, 4)], [plain(2)]),
    ],
    ids=["from it", "from shares of copies"],
)
def test_moves(first: Kind, same: list[Kind], others: list[Kind], tmp_path: Path) -> None:
    """A checkpoint is everyone's; to ``same`` with the next steps of the run that went on."""
    whole = run(first, tmp_path / "first", 3)
    for number, kind in enumerate([*same, *others]):
        found = run(kind, tmp_path / str(number), 3, tmp_path / "first" / f"checkpoint-{SAVED}")
        assert different(whole[f"saved at {SAVED}"], found["start"]) == [] != different(found["start"], found["end"])
        if kind in same:
            assert different(whole["end"], found["end"]) == []
