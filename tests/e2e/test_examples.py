"""The scripts in docs/examples run as they are, and do what they say."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
SAYS = {"plain_loop": "predicted peak per rank, device", "stock_trainer": "host arena"}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_runs_as_a_script(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, which has imported all that takes long."""
    runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr().out
    assert SAYS[path.stem] in said
    losses = [float(line.split()[3]) for line in said.splitlines() if line.startswith("step ")]
    if path.stem == "plain_loop":  # single batches of prose and of tables differ much
        assert "fetched for use" in said and sum(losses[-10:]) / 10 < losses[0] - 1.5
