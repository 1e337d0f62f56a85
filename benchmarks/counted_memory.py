"""Bytes that plans predict against bytes that are counted: 30 runs, 6 families of models by 5 ways to train.

    OMP_NUM_THREADS=1 python -m deepstow.benchmarks.counted_memory [FAMILY ...]

Counted on the device: the arena, or weights and moments, and the most that operators of the last of three steps had
made and not yet freed (``tests/helpers/live.py``); of an evaluation after it with ``EVALUATED`` rows the same, while
the arena or the state stays. On the host the arena, without what libraries take. No allocator and no library has a part
in it. What is off by more than ``OFF`` is marked: of the larger of training and evaluation, since a run has to do both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from torch import Tensor

from deepstow.strategies.core.compose import compose
from deepstow.strategies.core.facts import Tier
from deepstow.strategies.engine import AdamW, stow
from deepstow.strategies.report.table import table
from deepstow.trainer.planning.plan_for import plan_for
from tests.helpers.live import Live

ROWS, LENGTH, EVALUATED, OFF, WORDS = 2, 64, 8, 0.03, 2048  # evaluated: Hugging Face's default
HEADS: Mapping[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
NO_DROPOUT: Mapping[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA: Mapping[str, Any] = {
    "intermediate_size": 160, "num_key_value_heads": 2, "vocab_size": WORDS, "use_cache": False, **HEADS,
}  # fmt: skip
WAYS: Mapping[str, tuple[torch.dtype, Mapping[str, Any] | None]] = {
    "plain": (torch.float32, None),
    "updates on the host": (torch.float32, {"site": "host"}),
    "weights streamed, bf16": (torch.bfloat16, {"site": "host", "weights": "streamed"}),
    "state streamed, bf16": (torch.bfloat16, {"site": "streamed", "weights": "streamed", "gradients": "host"}),
    "int8 moments, bf16": (torch.bfloat16, {"site": "host", "weights": "streamed", "moments_as": "int8"}),
}
Batch = dict[str, Tensor]


def words(rows: int) -> Batch:
    """Rows of words; the first ends early, as the collator pads it."""
    ids = torch.randint(3, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def images(rows: int) -> Batch:
    """Squares with one of ten labels."""
    drawn = torch.Generator().manual_seed(rows)
    pixels = torch.randn(rows, 3, 32, 32, generator=drawn)
    return {"pixel_values": pixels, "labels": torch.randint(0, 10, (rows,), generator=drawn)}


def _gpt2() -> Any:
    config = transformers.GPT2Config(
        n_embd=64, n_layer=4, n_head=4, n_positions=LENGTH, vocab_size=WORDS, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _mixtral() -> Any:
    config = transformers.MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def _t5() -> Any:
    sizes: dict[str, Any] = {
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 160,
        "num_layers": 3,
        "num_heads": 4,
        "vocab_size": WORDS,
    }
    config: Any = transformers.T5Config(**sizes, dropout_rate=0.0, use_cache=False)
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


def _bert() -> Any:
    sizes: dict[str, Any] = {"vocab_size": WORDS, "intermediate_size": 160, "max_position_embeddings": LENGTH}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **HEADS, **NO_DROPOUT))


def _vit() -> Any:
    config: Any = transformers.ViTConfig(image_size=32, patch_size=4, intermediate_size=160, **HEADS, **NO_DROPOUT)
    config.num_labels = 10
    return transformers.ViTForImageClassification(config)


FAMILIES: Mapping[str, tuple[Callable[[], Any], Callable[[int], Batch]]] = {
    "llama": (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)), words),
    "gpt2": (_gpt2, words),
    "mixtral": (_mixtral, words),
    "t5": (_t5, words),
    "bert": (_bert, words),
    "vit": (_vit, images),
}


def case(family: str, way: str) -> tuple[int, int, int, int, int]:
    """Predicted on the device; counted there in training and in evaluation; predicted and counted on the host."""
    make, batch_of = FAMILIES[family]
    dtype, offload = WAYS[way]
    torch.manual_seed(0)
    model = make().to(dtype).train()
    batch, evaluated = (
        {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch_of(n).items()} for n in (ROWS, EVALUATED)
    )
    plan = plan_for(model, batch=batch, max_grad_norm=1.0, **offload or {})
    optimizer: Any
    if offload is None:
        plan = compose({}, plan.facts)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        at_rest, hosted = 3 * sum(param.nbytes for param in model.parameters()), 0
    else:
        optimizer = stow(model, plan, rule=AdamW(), device="cpu")
        at_rest, hosted = optimizer.device_bytes, optimizer.host_bytes
    for step in range(3):
        with Live() if step == 2 else nullcontext() as live:
            model(**batch).loss.backward()
        if offload is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad(), Live() as looked:
        model(**evaluated)
    assert live is not None
    host = plan.peak(Tier.HOST) - plan.facts.machine.runtime_host_bytes
    return plan.peak(Tier.DEVICE), at_rest + live.peak, at_rest + looked.peak, host, hosted


def off(predicted: int, counted: int) -> float:
    """How much too large the prediction is, relatively."""
    return predicted / counted - 1 if counted else float(predicted > 0)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    rows, marked = [], 0
    for family in sys.argv[1:] or FAMILIES:
        for way in WAYS:
            device, training, evaluation, host, hosted = case(family, way)
            errors = off(device, max(training, evaluation)), off(host, hosted) if hosted else 0.0
            mark = any(abs(error) > OFF for error in errors)
            marked += mark
            bytes_ = [f"{number / 1024:,.0f}" for number in (device, training, evaluation, host, hosted)]
            rows.append((family, way, *bytes_, *(f"{error:+.1%}" for error in errors), "off" if mark else ""))
            print(*rows[-1], file=sys.stderr, flush=True)
    title = (
        "family", "way", "predicted, KiB", "training", "evaluation", "host, predicted", "host", "device by", "host by",
        "",
    )  # fmt: skip
    print("\n".join(table(title, rows, markdown=True)))
    print(f"\n{marked} of {len(rows)} are off by more than {OFF:.0%}")


if __name__ == "__main__":
    main()
