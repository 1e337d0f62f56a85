"""Trains on after every damage to every file of a real checkpoint: the end has the bits of the undisturbed run.

Part of ``make faults``, not of ``make test`` (minutes).
"""

import shutil
from pathlib import Path

import pytest

from tests.faults.test_damaged_checkpoints import OFFLOAD, SAVE, STEPS, damages, train, weights

KINDS = {"plain": {}, "offload": OFFLOAD}


@pytest.mark.parametrize("kind", KINDS)
def test_every_file(kind: str, tmp_path: Path) -> None:
    whole, work = tmp_path / "whole", tmp_path / "work"
    assert train(whole, KINDS[kind]) == 0
    num = 0
    shutil.copytree(whole / "run", work / "run")
    newest, older = (work / f"run/checkpoint-{step}" for step in (STEPS, SAVE))
    spare = tmp_path / "spare"
    shutil.copytree(newest, spare)
    for what, name in damages(newest, older):
        (work / "run/export/model.safetensors").unlink()
        assert train(work, KINDS[kind], "training.resume_from_checkpoint=auto") == 0, (what, name)
        assert weights(work) == weights(whole), (what, name)
        # As it was, for the next one.
        for path in work.glob("run/earlier-*"):
            shutil.rmtree(path)
        shutil.rmtree(newest)
        shutil.copytree(spare, newest)
        num += 1
    assert num > 40
