"""The table of docs/design.md and the private methods of Hugging Face's Trainer that our classes really override."""

import re
from pathlib import Path

import transformers

from trainer.run.pipeline_trainer import PipelineTrainer
from trainer.run.stowed_trainer import StowedTrainer
from trainer.run.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
OURS = (StowedTrainer, PipelineTrainer, Trainer)


def test_the_table_lists_what_is_overridden() -> None:
    """Each with the file that does it and a test that exists; a method that a release has renamed is missed here."""
    text = (ROOT / "docs/design.md").read_text()
    rows = re.findall(r"^\| `(_\w+)` \| `([\w/.]+)` \| .+ \| `([\w/.]+)::(\w+)` \|$", text, re.M)
    assert {(name, where) for name, where, _, _ in rows} == {
        (name, f"{kind.__module__.replace('.', '/')}.py")
        for kind in OURS
        for name in vars(kind)
        if re.match(r"_(?!_)", name) and hasattr(transformers.Trainer, name)
    }
    assert all(f"def {test}(" in (ROOT / file).read_text() for _, _, file, test in rows)
    assert all(kind.__module__.startswith("trainer.run.") for kind in Trainer.__mro__ if kind in OURS)
