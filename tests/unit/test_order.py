"""The order of effects, where nothing has to be trained to see it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from transformers import LlamaConfig

from deepstow.strategies.core.registry import find
from deepstow.trainer.data import tokenizer as tokenizers
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.run import order
from deepstow.trainer.run.changes import apply_strategies
from tests.helpers.tiny import LLAMA, VOCAB, run_config


def test_implied_strategies_are_applied_in_the_order_of_deciding(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    for name in ("buffers", "cross_entropy", "offload", "linear"):
        monkeypatch.setattr(find(name), "apply", lambda self, model, plan, name=name: seen.append(name))
    strategies = {name: find(name)() for name in ("offload", "linear")}
    config: Any = SimpleNamespace(strategies=strategies, training=SimpleNamespace(compile_backend=None), quantize=None)
    model: Any = nn.Linear(2, 2)
    apply_strategies(model, config, None)  # type: ignore[arg-type]
    assert seen == ["linear", "cross_entropy", "offload", "buffers"]


def test_a_strategy_that_drops_a_parameter_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find("buffers"), "apply", lambda self, model, plan: setattr(model, "bias", None))
    monkeypatch.setattr(find("cross_entropy"), "apply", lambda self, model, plan: None)
    config: Any = SimpleNamespace(
        strategies={"offload": find("offload")()}, training=SimpleNamespace(compile_backend=None), quantize=None
    )
    model: Any = nn.Linear(2, 2)
    with pytest.raises(AssertionError, match=r"strategies\.buffers renamed, reordered or dropped"):
        apply_strategies(model, config, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("saved", [True, False])
def test_more_tokens_than_the_model_has(saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after ``add_tokens`` without ``resize_token_embeddings``; what to do is another thing for a saved model."""
    LlamaConfig(**LLAMA).save_pretrained(tmp_path)
    monkeypatch.setattr(tokenizers, "load", lambda *args, **options: range(VOCAB + 1))
    config = run_config(None, model={"name_or_path": str(tmp_path)}) if saved else run_config()
    with pytest.raises(ConfigError, match="resize_token_embeddings" if saved else r"raise model\.config\.vocab_size"):
        order.read_data(config, Ranks(), quiet=True)
