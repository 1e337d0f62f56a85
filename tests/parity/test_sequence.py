"""Rows divided over real ranks against plain training of one rank per row: every architecture that is not refused.

SGD with clipping is what is compared: Adam divides each gradient by its own size and would hide a wrong norm, and it
enlarges rounding. Rows have different numbers of trained tokens, so that losses are weighted, too.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from deepstow.strategies.core.grid import Grid
from deepstow.strategies.parallel import ulysses, varlen
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.verify.verify import compare, full_weights
from tests.helpers.moves import ROWS, Kind, made
from tests.helpers.releases import needs
from tests.helpers.tiny import LLAMA, QWEN3, VOCAB
from tests.helpers.worlds import run_counted

pytestmark = [pytest.mark.ranks, needs("sequence")]
STEPS, TOLERANCE = 4, 2e-6
SGD: Mapping[str, Any] = {
    "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.05, "save_strategy": "no", "warmup_steps": 0,
    "gradient_accumulation_steps": 2, "weight_decay": 0.0, "eval_strategy": "steps", "eval_steps": 2,
}  # fmt: skip
# Rows of 9 to 12 tokens: batches get padding, and what is divided by 4 ranks is not.
UNEVEN = [
    {"input_ids": row["input_ids"][: 12 - number % 4], "labels": row["labels"][: 12 - number % 4]}
    for number, row in enumerate(ROWS)
]
for number, row in enumerate(UNEVEN):
    row["labels"] = [-100] * (5 * number % 9) + row["labels"][5 * number % 9 :]
PACKED = [
    {**row, "position_ids": [place % (3 + number % 8) for place in range(len(row["input_ids"]))]}
    for number, row in enumerate(UNEVEN)
]
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {**LLAMA, "num_key_value_heads": 1, "attention_bias": True},
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": 4},
    "qwen2": {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**QWEN3, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
}


def config(
    folder: Path, ranks: int, strategies: Mapping[str, Any], model: Any, *, packed: bool = False, **more: Any
) -> Any:
    found = Kind(ranks, strategies, {**SGD, **more}, model).config(folder, STEPS)
    return found.model_copy(update={"data": found.data.model_copy(update={"packing": packed})})


def trained(ranks: Ranks, config: Any, packed: bool = False) -> dict[str, Any]:
    """Weights, and all losses and norms that were logged."""
    trainer = made(ranks, config, some=PACKED if packed else UNEVEN)
    try:
        trainer.train()
        found = {
            key: [record[key] for record in trainer.state.log_history if key in record]
            for key in ("loss", "grad_norm", "eval_loss")
        }
        return {"weights": full_weights(trainer, ranks), **found}
    finally:
        trainer.accelerator.free_memory()


def same(plain: dict[str, Any], found: dict[str, Any]) -> None:
    worst = {each.name: each.relative for each in compare(plain["weights"], found["weights"])}
    assert max(worst.values(), default=0.0) < TOLERANCE, worst
    for key in ("loss", "grad_norm", "eval_loss"):
        assert len(found[key]) > 1 and found[key] == pytest.approx(plain[key], rel=TOLERANCE), key
    assert min(plain["grad_norm"]) > 10 * SGD["max_grad_norm"], "clipping has to trigger"


# Beside what each architecture is divided; two have rows of several documents. ``test_executions.py`` has Llama.
BESIDE: Mapping[str, Mapping[str, Any]] = {
    "mistral": {"zero": {"stage": 3}},
    "qwen2": {"offload": {"site": "host", "weights": "streamed"}, "zero": {"stage": 3}},
    "qwen3": {"zero": {"stage": 1}, "recompute": {"policy": "selective"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("model", BESIDE)
def test_as_plain(model: str, tmp_path: Path) -> None:
    packed = model in ("mistral", "qwen2")
    plain = run_world(1, trained, config(tmp_path, 1, {}, MODELS[model], packed=packed), packed)
    divided = {"sequence": {"degree": 2}, **BESIDE[model]}
    same(plain, run_counted(2, trained, config(tmp_path, 2, divided, MODELS[model], packed=packed), packed))


@pytest.mark.slow
def test_more_slices_than_heads_of_keys(tmp_path: Path) -> None:
    """On four ranks, where a row of 12 tokens and one head of keys do not divide evenly, recomputed, loss by chunks."""
    plain = run_world(1, trained, config(tmp_path, 1, {}, MODELS["llama"], packed=True), True)
    beside = {"recompute": {"policy": "full"}, "cross_entropy": {"chunked": True}}
    divided = config(tmp_path, 4, {"sequence": {"degree": 4}, **beside}, MODELS["llama"], packed=True)
    same(plain, run_counted(4, trained, divided, True))


def test_slices_and_other_rows(tmp_path: Path) -> None:
    """Four ranks as sequence 2 x data 2, as two ranks of plain training, whose rows have other numbers of tokens."""
    plain = run_counted(2, trained, config(tmp_path, 2, {}, MODELS["mistral"]))
    same(plain, run_counted(4, trained, config(tmp_path, 4, {"sequence": {"degree": 2}}, MODELS["mistral"])))


def in_fp64(ranks: Ranks) -> float:
    """The largest difference of losses, norms and weights after some steps with a window, four heads over two of keys,
    and rows of several documents; every rank has a part of the gradient of the sum.
    """
    from copy import deepcopy

    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    plain: Any = MistralForCausalLM(MistralConfig(**MODELS["mistral"])).double()
    model = deepcopy(plain)
    ulysses.start(model, Grid(slices=ranks.world_size))
    rules = [torch.optim.SGD(each.parameters(), lr=1.0) for each in (plain, model)]
    worst = 0.0
    for step in range(STEPS):
        ids = torch.randint(0, VOCAB, (2, 18), generator=torch.Generator().manual_seed(step))
        positions = torch.cat([torch.arange(11), torch.arange(7)]).expand(2, -1).contiguous()
        batch = {"input_ids": ids, "labels": ids, "position_ids": positions}
        mine = ulysses.of(model).slice_of(batch)
        targets = [torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100), mine.pop("labels")]
        logits = [plain(**batch, use_cache=False).logits, model(**mine, use_cache=False).logits]
        losses = [  # Transformers' are in fp32
            torch.nn.functional.cross_entropy(each.transpose(1, 2), target, reduction="sum") / 34
            for each, target in zip(logits, targets, strict=True)
        ]
        for loss in losses:
            loss.backward()
        for param in model.parameters():
            torch.distributed.all_reduce(param.grad)
        torch.distributed.all_reduce(losses[1].detach_())
        norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each in (plain, model)]
        assert norms[0] > 0.5
        for rule in rules:
            rule.step()
            rule.zero_grad()
        worst = max(worst, *(abs(float(one - other)) for one, other in (losses, norms)))
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    worst = max(worst, *(float((one - other).abs().max()) for one, other in pairs))
    ids = torch.arange(18)[None]
    with torch.no_grad():  # whole rows are plain attention
        model.load_state_dict(plain.state_dict())
        assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    return worst


def test_in_fp64() -> None:
    """What differs in fp32 is rounding: in fp64 there are nine more digits of equality."""
    assert run_world(2, in_fp64) < 1e-14


def test_windows_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries of a window are computed some at a time, and see what they see under a mask of all pairs."""
    monkeypatch.setattr(varlen, "BLOCK", 5)
    query, key, value = torch.randn(3, 2, 4, 23, 8, dtype=torch.float64)
    place = torch.arange(23)
    mask = (place <= place[:, None]) & (place > place[:, None] - 3)
    whole = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    assert torch.allclose(varlen.causal(query, key, value, 3, None), whole, rtol=0, atol=1e-15)
