"""Checkpoints without training: folders with a manifest."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepstow.strategies.state.sealed import digest_of, seal
from deepstow.trainer.run.checkpoints.checkpoint import KIND, About, DataFacts, Manifest, ModelFacts
from tests.helpers.tiny import LLAMA, run_config

CONTENT: Mapping[str, bytes] = {"model.safetensors": b"weights", "inner/optimizer.pt": b"moments", "empty": b""}


def about(config: Mapping[str, Any] | None = None, ranks: int = 1, arguments: Mapping[str, Any] | None = None) -> About:
    """What a run says about itself in its checkpoints."""
    tree = dict(config or run_config(LLAMA).tree())
    return About(
        config=tree,
        arguments=None if arguments is None else dict(arguments),
        config_sha256=digest_of(tree),
        versions={"torch": "1"},
        world_size=ranks,
        data=DataFacts(fingerprint="f", sources="s", tokenizer="t", rows=3),
        model=ModelFacts(config=dict(LLAMA), shapes="x"),
    )


def make(
    output_dir: Path,
    step: int,
    *,
    marked: bool = True,
    finite: bool = True,
    history: Sequence[Mapping[str, Any]] | None = None,
    run: About | None = None,
) -> Path:
    """``checkpoint-<step>`` with a few files; without a manifest if it is not ``marked``, and a log of ``history``."""
    folder = output_dir / f"checkpoint-{step}"
    for name, content in CONTENT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content + str(step).encode() if content else b"")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": history or []}))
    if marked:
        seal(folder, KIND, Manifest(step=step, finite=finite, run=run or about()).model_dump(mode="json"))
    return folder
