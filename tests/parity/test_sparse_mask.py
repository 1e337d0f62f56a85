"""A window and first tokens: a softmax over what is named, by every kernel; planned, kept, and refused by name."""

from typing import Any

import pytest
import torch
from torch import Tensor

from deepstow.strategies.engine.forward.checkpointing import checkpoint_blocks
from deepstow.strategies.parallel import varlen
from deepstow.trainer.data.collate import Collator
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.model import attention, sparse_mask
from deepstow.trainer.planning.facts import count_model
from tests.helpers.engine import LAYOUTS, STEPS, differences, plain, plan_of, stowed
from tests.helpers.models import causal
from tests.helpers.tiny import LLAMA, run_config

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 64}
WINDOW, SINK = 3, 2
TOLERANCE = 1e-5  # of the largest logit or gradient, in fp32: sums in another order


STRIDED, RANDOM = {"block": 2, "every": 3}, {"block": 2, "number": 2, "seed": 7}


def model(kernel: str, window: int = WINDOW, sink: int = SINK, **blocks: Any) -> Any:
    name = sparse_mask.register(kernel, {"window": window, "sink": sink, **blocks})
    made = causal("llama", name, **SIZES, num_key_value_heads=2)
    made.config.use_cache = False
    return made


def batch(*, packing: bool) -> dict[str, Tensor]:
    """Two rows of several documents each, or two of different lengths."""
    generator, rows = torch.Generator().manual_seed(1), []
    for lengths in ((9, 4, 7), (6, 13)) if packing else ((20,), (11,)):
        ids = torch.randint(64, (sum(lengths),), generator=generator).tolist()
        rows.append(
            {"input_ids": ids, "labels": ids, "position_ids": [at for length in lengths for at in range(length)]}
        )
    given = [row if packing else {key: row[key] for key in ("input_ids", "labels")} for row in rows]
    return Collator(0, packing=packing)(given)


def chosen(block: int, draw: int, seed: int) -> int:
    """The definition, with numbers of any size."""
    mixed = block + 1
    for number, factor in ((seed, 2654435761), (draw, 2246822519), (0, 3266489917)):
        mixed = (mixed + number) * factor % 2**32
        mixed ^= mixed // 2**15
    return mixed % block


def plainly(given: dict[str, Tensor], sink: int, blocks: str = "") -> Tensor:
    """What is seen, pair by pair: [rows, 1, queries, keys]."""
    rows, length = given["input_ids"].shape
    shown = torch.zeros(rows, 1, length, length, dtype=torch.bool)
    for row in range(rows):
        places = given["position_ids"][row].tolist() if "position_ids" in given else range(length)
        begins = [at - place for at, place in enumerate(places)]
        for query in range(length):
            for key in range(query + 1):
                same = begins[query] == begins[key]
                near = query - key < WINDOW or key - begins[key] < sink
                near = near or (blocks == "strided" and (query - key) // 2 % 3 == 0)
                own, other = (query - begins[query]) // 2, (key - begins[key]) // 2
                near = near or (blocks == "random" and own > 0 and other in {chosen(own, draw, 7) for draw in (0, 1)})
                token = "attention_mask" not in given or bool(given["attention_mask"][row, key])
                shown[row, 0, query, key] = same and near and token
    return shown


def tokens(given: dict[str, Tensor]) -> Tensor:
    return given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()


def worst(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    ("kernel", "packing", "sink"),
    [("sdpa", True, SINK), ("sdpa", False, 0), ("sdpa_varlen", True, 0), ("sdpa_varlen", False, SINK)],
)
def test_it_is_a_softmax_over_what_is_named(
    kernel: str, packing: bool, sink: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against eager attention with a mask made pair by pair; logits, and the gradient of every weight."""
    monkeypatch.setattr(varlen, "BLOCK", 4)
    given, ours = batch(packing=packing), model(kernel, sink=sink)
    theirs = causal("llama", "eager", **SIZES, num_key_value_heads=2)
    hidden = torch.zeros_like(shown := plainly(given, sink), dtype=torch.float32).masked_fill(~shown, -1e30)
    expected = theirs(**{**given, "attention_mask": hidden})
    found = ours(**given)
    assert worst(found.logits[tokens(given)], expected.logits[tokens(given)]) < TOLERANCE
    for each in (found, expected):
        each.loss.backward()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert worst(one.grad, other.grad) < TOLERANCE


BLOCKS: list[tuple[bool, dict[str, Any]]] = [
    (True, {"strided": STRIDED}), (False, {"strided": STRIDED}), (False, {"random": RANDOM}),
]  # fmt: skip


@pytest.mark.parametrize(("packing", "blocks"), BLOCKS)
def test_blocks_are_those_that_are_named(packing: bool, blocks: Any) -> None:
    """The bits of the same kernel with a mask that was made pair by pair."""
    given, ours = batch(packing=packing), model("sdpa", **blocks)
    theirs = causal("llama", "sdpa", **SIZES, num_key_value_heads=2)
    shown = plainly(given, SINK, *blocks)
    assert not torch.equal(shown, plainly(given, SINK)), "they show nothing that was not seen"
    hidden = torch.eye(shown.shape[-1], dtype=torch.bool) & ~tokens(given)[:, None, :, None]  # no row of nothing
    expected, found = theirs(**{**given, "attention_mask": shown | hidden}), ours(**given)
    assert torch.equal(found.logits[tokens(given)], expected.logits[tokens(given)])
    for each in (found, expected):
        each.loss.backward()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


@pytest.mark.slow
@pytest.mark.parametrize(("packing", "blocks"), [(True, {}), *BLOCKS[1:]])
def test_flex_attention_has_the_same_mask(packing: bool, blocks: Any) -> None:
    """Forward alone: torch has no backward of it on a CPU."""
    given, kernels = batch(packing=packing), ("sdpa", "flex_attention")
    with torch.no_grad():
        expected, found = (model(kernel, **blocks).eval()(**given).logits[tokens(given)] for kernel in kernels)
    assert worst(found, expected) < TOLERANCE


@pytest.mark.parametrize(
    ("kernel", "blocks"), [("sdpa", {}), ("sdpa_varlen", {}), ("sdpa", {"strided": STRIDED, "random": RANDOM})]
)
def test_generation_sees_what_training_sees(kernel: str, blocks: Any) -> None:
    """Token by token from a cache, with padding on the left, as the last logits of whole rows."""
    ours = model(kernel, **blocks).eval()
    ids = torch.randint(64, (1, 7), generator=torch.Generator().manual_seed(2))
    row = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(1, 3, dtype=torch.long), torch.ones_like(ids)], 1)
    with torch.no_grad():
        padded = ours(input_ids=row, attention_mask=mask, use_cache=False).logits[:, 3:]
        assert worst(padded, ours(input_ids=ids).logits) < TOLERANCE
        made = ours.generate(
            row, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False, use_cache=True
        )
        for length in range(7, 13):
            told = ours(input_ids=made[:, 3 : 3 + length]).logits[0, -1].argmax()
            assert int(told) == int(made[0, 3 + length])


@pytest.mark.parametrize(("kernel", "recomputed"), [("sdpa", True), ("sdpa_varlen", False)])
def test_bits_of_plain_training(kernel: str, recomputed: bool) -> None:
    batches = [batch(packing=True)] * 2 * STEPS
    how: dict[str, Any] = {"accumulation": 2, "max_norm": 0.05}
    expected, ours = plain(model(kernel), batches, **how), model(kernel)
    if recomputed:
        checkpoint_blocks(ours, {f"model.layers.{index}": () for index in range(4)})
    assert (
        differences(expected, stowed(ours, plan_of(ours, **how, **LAYOUTS["host, travelling"]), batches, **how)) == []
    )


def counted(length: int) -> int:
    """Saved bytes of the second block."""
    options = {"attention_mask": {"window": 64, "sink": 4}, "attn_implementation": "sdpa_varlen"}
    config = run_config(LLAMA, model=options, data={"packing": True, "max_length": length})
    return count_model(config).units[1].saved_bytes


@pytest.mark.slow
def test_what_a_window_in_blocks_saves_grows_with_the_row() -> None:
    """And not with its square, as with a mask for every pair."""
    assert counted(4096) < 2.1 * counted(2048)


def refused(config: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        count_model(run_config(config, model={"attention_mask": {"window": 4}}, **options))
    assert len(caught.value.lines) == 1
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "mistral", **SIZES, "sliding_window": 4}, "layers of this model have masks of their own"),
        ({"model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 4}, "bloom"),
        (
            {"model_type": "falcon", "hidden_size": 32, "num_attention_heads": 4},
            "falcon models take no masks",
        ),  # a table of its own
        ({"model_type": "gemma2", **SIZES, "head_dim": 8}, ""),  # its masks, or sdpa, by release
    ],
)
def test_other_masks_are_refused(config: Any, expected: str) -> None:
    assert expected in (said := refused(config)) and "model.attention_mask" in said


def test_attention_without_a_mask_is_refused() -> None:
    query = torch.zeros(1, 1, 2, 4)
    with pytest.raises(NotImplementedError, match="computes attention without asking for a mask"):
        sparse_mask._masked("sdpa", torch.nn.Identity(), query, query, query, None)


def test_the_export_says_its_mask() -> None:
    section = run_config(model={"attention_mask": {"window": 4, "sink": 1}}).model
    config = causal("llama", **SIZES).config
    attention.write_down(section, config)
    assert type(config).from_dict(config.to_dict()).trained_attention_mask == {"window": 4, "sink": 1}
    assert attention.trained_otherwise(section, config) is None
    line = attention.trained_otherwise(run_config().model, config)
    assert line == 'model.attention_mask = null: None was trained with {"window": 4, "sink": 1}'
    attention.write_down(run_config().model, config)
    assert config.trained_attention_mask is None, "trained further without"
    assert "the last 4 tokens and the first 1 of its document" in attention.sentence(section)
