"""The scripts in docs/examples run as they are, and do what they say."""

import importlib.util
import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
SAYS = {"plain_loop": "predicted peak per rank, device", "stock_trainer": "host arena"}


def imported(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_runs_as_a_script(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, which has imported all that takes long."""
    runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr().out
    assert SAYS[path.stem] in said
    losses = [float(line.split()[3]) for line in said.splitlines() if line.startswith("step ")]
    if path.stem == "plain_loop":  # single batches of prose and of tables differ much
        assert "fetched for use" in said and sum(losses[-10:]) / 10 < losses[0] - 1.5


def test_stock_trainer_gives_the_bits_of_a_plain_one(tmp_path: Path) -> None:
    """Losses, norms, weights, and what is saved."""
    from transformers import Trainer

    example: Any = imported("stock_trainer")
    model, log = example.main(str(tmp_path / "ours"))
    plain = example.build()
    trainer = Trainer(plain, example.arguments(str(tmp_path / "plain")), train_dataset=example.rows())
    trainer.train()
    logged, alone = (
        [(record["loss"], record["grad_norm"]) for record in records if "loss" in record]
        for records in (log, trainer.state.log_history)
    )
    assert logged == alone and max(norm for _, norm in logged) > 1.0, "clipped, and said so"
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu()), name
    saved = type(plain).from_pretrained(tmp_path / "ours" / "model")
    assert all(torch.equal(a, b.cpu()) for a, b in zip(saved.parameters(), plain.parameters(), strict=True))
