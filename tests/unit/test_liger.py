"""What Liger's kernels save, as its functions do (liger-kernel 0.8.5), by shapes written out: it runs on no CPU."""

from typing import Any

import pytest
from transformers.models.llama import modeling_llama

from deepstow.strategies.core.facts import Unit
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.model.build import load_config
from deepstow.trainer.planning.facts import check_model, count_model
from tests.helpers.tiny import LLAMA, MIXTRAL, VOCAB, run_config

BATCH, LENGTH, HIDDEN, INNER = 2, 16, LLAMA["hidden_size"], LLAMA["intermediate_size"]
TOKENS = BATCH * LENGTH


def units(base: Any = LLAMA, *, model: Any = None, **training: Any) -> tuple[Unit, ...]:
    data = {"max_length": LENGTH}
    return count_model(run_config(base, model=model, data=data, per_device_train_batch_size=BATCH, **training)).units


def saves_less(**training: Any) -> int:
    """In the second block, than without Liger."""
    return units()[2].saved_bytes - units(use_liger_kernel=True, **training)[2].saved_bytes


@pytest.mark.slow
def test_norms_and_products_of_a_block() -> None:
    """Not the normalised input of either norm, and not the activation of the gate."""
    norms, gate = 2 * 4 * TOKENS * HIDDEN, 4 * TOKENS * INNER
    assert saves_less() == norms + gate
    assert saves_less(liger_kernel_config={"swiglu": False}) == norms
    assert saves_less(liger_kernel_config={"rms_norm": False}) == gate


@pytest.mark.parametrize("trained", [True, False])
def test_the_head_keeps_two_gradients_and_no_logits(trained: bool) -> None:
    """Of the hidden states and, if it is trained, of the weight; the last norm its input and a number per row."""
    model = None if trained else {"lora": {"r": 2, "target_modules": ["q_proj"]}}
    head = units(model=model, use_liger_kernel=True)[-1]
    norm = 4 * TOKENS * (HIDDEN + 1)
    assert head.saved_bytes == norm + 4 * TOKENS * HIDDEN + trained * 4 * VOCAB * HIDDEN
    assert head.in_chunks is None and head.temporaries is not None
    if not trained:  # logits of so many tokens that they are as large as the hidden states, to a power of two
        assert head.temporaries.forward < 4 * TOKENS * VOCAB


def test_what_was_not_read_counts_as_without() -> None:
    assert units(MIXTRAL, use_liger_kernel=True) == units(MIXTRAL)
    smoothed = units(use_liger_kernel=True, label_smoothing_factor=0.1)[-1]
    assert smoothed.saved_bytes > 4 * BATCH * (LENGTH - 1) * VOCAB, "Transformers' smoothing takes logits"


@pytest.mark.parametrize("strategy", ["offload", "recompute", "cross_entropy"])
def test_other_families_are_refused_where_memory_is_planned(strategy: str) -> None:
    config = run_config(MIXTRAL, use_liger_kernel=True, strategies={strategy: {}})
    with pytest.raises(
        ConfigError, match=rf"use_liger_kernel = true: strategies.{strategy} was compared .*not for mix"
    ):
        check_model(config, load_config(config.model))
    check_model(run_config(MIXTRAL, use_liger_kernel=True), load_config(config.model))
    llama = run_config(LLAMA, use_liger_kernel=True, strategies={strategy: {}})
    check_model(llama, load_config(llama.model))


@pytest.mark.parametrize("liger", [True, False])
def test_a_second_plan_in_a_process_where_liger_has_been_applied(liger: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It replaces this function of Transformers' module, for all Llamas."""

    def rotary(*args: Any) -> Any:
        raise NotImplementedError("Triton needs values")

    rotary.__module__ = "liger_kernel.transformers.rope"
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotary)
    with pytest.raises(ConfigError, match="llama: Liger has replaced parts of all its models in this process"):
        units(use_liger_kernel=liger)
