"""Attention document by document: the bits of plain training with it, wherever weights rest; and what lacks a kernel.

That packed rows equal unpacked ones is in ``tests/unit/test_data_packing.py``, what they save in ``test_facts.py``.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from deepstow.strategies.engine.forward.checkpointing import checkpoint_blocks
from deepstow.strategies.parallel import varlen
from deepstow.trainer.data.collate import Collator
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.model import attention
from deepstow.trainer.planning.facts import count_model
from deepstow.trainer.planning.from_config import check_options
from tests.helpers.engine import LAYOUTS, STEPS, differences, plain, plan_of, stowed
from tests.helpers.models import causal
from tests.helpers.tiny import run_config

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 64}


def model(**more: Any) -> Any:
    varlen.register()
    made = causal("mistral", varlen.NAME, **SIZES, num_key_value_heads=2, sliding_window=4, **more)
    made.config.use_cache = False
    return made


def packed(count: int) -> list[dict[str, Tensor]]:
    """Two rows of several documents each, other ones in each batch; of the last batch one row is a single document."""
    generator, batches = torch.Generator().manual_seed(1), []
    for number in range(count):
        rows = []
        for lengths in ((3 + number, 9, 1), (6, 7 + number)) if number + 1 < count else ((16,), (9, 7)):
            ids = torch.randint(64, (sum(lengths),), generator=generator).tolist()
            places = [place for length in lengths for place in range(length)]
            rows.append({"input_ids": ids, "labels": ids, "position_ids": places})
        batches.append(Collator(0, packing=True)(rows))
    return batches


@pytest.mark.parametrize(("kept", "dropout"), [(None, 0.0), ((), 0.1), (("attention 0", "linear 3"), 0.0)])
def test_bits_of_plain_training(kept: tuple[str, ...] | None, dropout: float) -> None:
    """Also where blocks are recomputed, and numbers of dropout drawn again, or the attention of all documents kept."""
    batches = packed(2 * STEPS)
    how: dict[str, Any] = {"accumulation": 2, "max_norm": 0.05}
    expected = plain(model(attention_dropout=dropout), batches, **how)
    ours = model(attention_dropout=dropout)
    if kept is not None:
        checkpoint_blocks(ours, {f"model.layers.{index}": kept for index in range(4)})
    found = stowed(ours, plan_of(ours, **how, **LAYOUTS["host, travelling"]), batches, **how)
    assert differences(expected, found) == []


def test_only_a_mask_for_every_pair_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with padding have a mask, packed ones none; a model's own mask is refused."""
    seen: list[varlen.Documents] = []
    own = varlen.attend
    monkeypatch.setattr(varlen, "attend", lambda *given: seen.append(given[3]) or own(*given))
    batch = packed(2)[0]
    model()(**batch)
    assert [sum(map(len, found.lengths)) for found in seen] == [5 + 2] * 4, "and one of padding in each row"
    seen.clear()
    ones = torch.ones_like(batch["input_ids"])
    ones[0, 3:] = 0
    model()(input_ids=batch["input_ids"], attention_mask=ones)
    assert not seen
    with pytest.raises(NotImplementedError, match="cannot apply the mask that this model defines"):
        varlen.mask(q_length=3, kv_length=3, use_vmap=True)


def test_dropout_reaches_the_kernel() -> None:
    """Over whole documents, and in blocks of a window."""
    query = torch.randn(1, 2, 8, 4)
    for window in (None, 3):
        dropped, whole = (varlen.causal(query, query, query, window, None, dropout) for dropout in (0.5, 0.0))
        assert not torch.equal(dropped, whole)


def test_modules_that_see_what_follows_are_not_made_causal() -> None:
    """Without a mask, as in an encoder: the first token attends to all."""
    encoder: Any = torch.nn.Identity()
    encoder.is_causal = False
    query = torch.randn(1, 2, 8, 4)
    found = varlen.attention(encoder, query, query, query, None)[0].transpose(1, 2)
    whole = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert torch.allclose(found, whole, rtol=0, atol=1e-6)


def refused(config: Any, **model: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        count_model(run_config(config, model=model, data={"packing": True}))
    assert len(caught.value.lines) == 1
    return str(caught.value)


def test_models_that_ask_for_more_are_refused() -> None:
    bloom = {"model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 4}
    assert "'sdpa_varlen': bloom does not support it" in refused(bloom, attn_implementation="sdpa_varlen")
    llama4 = {"model_type": "llama4_text", **SIZES, "num_local_experts": 2, "intermediate_size_mlp": 64}
    said = refused(llama4, attn_implementation="sdpa_varlen")
    assert "llama4_text models may need more than where documents begin; leave it out" in said
    query = torch.zeros(1, 1, 2, 4)
    with pytest.raises(NotImplementedError, match="sdpa_varlen cannot compute the softcap of this model; write eager"):
        varlen.attention(torch.nn.Identity(), query, query, query, None, softcap=1.0)


@pytest.mark.parametrize(
    ("options", "on_cpu", "expected"),
    [
        ({"model": {"attn_implementation": "flash_attention_2"}}, True, "runs on a GPU only, and there is none"),
        ({"model": {"attn_implementation": "flash_attention_3"}}, False, "needs the package flash-attn-3 or kernels"),
        ({"model": {"attn_implementation": "flex_attention"}}, True, "torch has no backward of it on a CPU"),
        ({"use_liger_kernel": True}, True, "written in Triton, which has no device here"),
        ({"use_liger_kernel": True}, False, "pip install liger-kernel"),
    ],
)
def test_absent_kernels_are_refused_by_name(options: dict[str, Any], on_cpu: bool, expected: str) -> None:
    config = run_config(**options)
    (found,) = attention.refusals(config, on_cpu=on_cpu)
    assert expected in str(found)
    if on_cpu:  # as a run here says it, before anything is read; a plan may be for another machine
        with pytest.raises(ConfigError, match=expected):
            check_options(config, 1)
        check_options(config, 1, installed=False)


def test_flash_attention_needs_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils import import_utils

    monkeypatch.setattr(import_utils, "is_kernels_available", lambda: True)
    wanted = {"model": {"attn_implementation": "flash_attention_2"}}
    (found,) = attention.refusals(run_config(**wanted), on_cpu=False)
    assert "computes in 16 bits only; write training.bf16: true" in str(found)
    assert not list(attention.refusals(run_config(**wanted, bf16=True), on_cpu=False))
