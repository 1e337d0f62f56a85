"""Rows, and what a run makes of them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepstow.trainer.config.sections import DataSection
from deepstow.trainer.data import prepare as preparing
from deepstow.trainer.data import tokenizer as tokenizers

VOCAB = 400


def trained(folder: Path) -> Any:
    """The fixture ``tokenizer``."""
    return tokenizers.trained(VOCAB, folder, preparing.texts(DataSection(path="pydoc")))


def write(rows: Sequence[Mapping[str, Any]], name: str = "d.jsonl") -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def prepare(tokenizer: Any, *, seed: int = 0, said: list[str] | None = None, **options: Any) -> Any:
    """In the current folder, of ``d.jsonl`` unless another path is given."""
    options = options if "datasets" in options else {"path": "d.jsonl"} | options
    say = (lambda line: None) if said is None else said.append
    return preparing.prepare(DataSection(**options), tokenizer, VOCAB, seed, Path("prepared"), say)
