"""Packing: no token lost, none twice, never too long; and on real models, packed equals unpacked.

Models are tiny and random, in fp32. Equality is to 1e-5 and not bitwise: see [Rounding] in trainer/data/collate.py.
"""

import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, BloomConfig, GPT2Config, LlamaConfig, MistralConfig

from deepstow.strategies.parallel import varlen
from deepstow.trainer.data import mapped, packing
from deepstow.trainer.data.collate import Collator, packing_supported
from deepstow.trainer.data.packing import MASKED, chunk, pack, rows, split, whole

VOCAB = 64
exact = settings(derandomize=True, max_examples=40, deadline=None)
lengths_and_capacity = st.integers(3, 40).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=60), st.just(capacity))
)
document_lengths = st.lists(st.integers(2, 100), min_size=1, max_size=30)


@exact
@given(lengths_and_capacity)
def test_pack_places_every_span_once_in_few_rows(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    packed = list(pack(lengths, capacity))
    assert sorted(index for row in packed for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= capacity for row in packed)
    assert len(packed) <= 2 * -(-sum(lengths) // capacity)  # any two rows together overfill one
    assert packed == best_fit(lengths, capacity)


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """The rows as they are defined; of rows with the same room the one that has had it for the shortest time."""
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        used = {sum(lengths[each] for each in row): row for row in rows}
        fits = [each for each in used if each + lengths[index] <= capacity]
        row = used[max(fits)] if fits else []
        rows = [*(each for each in rows if each is not row), row]
        row.append(index)
    return sorted(map(sorted, rows), key=lambda row: row[0])


@exact
@given(document_lengths, st.integers(3, 40))
def test_chunk_loses_nothing_and_leaves_no_lone_token(lengths: list[int], max_length: int) -> None:
    pieces = chunk(whole(lengths), max_length).tolist()
    for document, length in enumerate(lengths):
        mine = [(start, stop) for which, start, stop in pieces if which == document]
        assert [start for start, _ in mine] == [0, *(stop for _, stop in mine[:-1])]
        assert mine[-1][1] == length and len(mine) == -(-length // max_length)
    assert all(2 <= stop - start <= max_length for _, start, stop in pieces)


@exact
@given(document_lengths, st.floats(0.01, 0.5), st.integers(0, 5))
def test_split_is_a_partition(lengths: list[int], fraction: float, seed: int) -> None:
    spans = whole([length + 2 for length in [*lengths, 5]])
    train, held = split(spans, fraction, seed)
    assert sorted([*train.tolist(), *held.tolist()]) == spans.tolist() and len(train)
    assert len(held) == max(1, round(len(spans) * fraction))


def test_split_keeps_the_end_of_a_single_document() -> None:
    for length, fraction, cut in [(100, 0.1, 90), (4, 0.01, 2)]:
        train, held = split(whole([length]), fraction, 1)
        assert (train.tolist(), held.tolist()) == ([[0, 0, cut]], [[0, cut, length]])


@exact
@given(document_lengths, st.integers(3, 40), st.booleans())
def test_rows_keep_every_token_and_reset_positions(lengths: list[int], max_length: int, packing: bool) -> None:
    starts = np.cumsum([0, *lengths])
    tokens = [np.arange(starts[i], starts[i + 1], dtype=np.int32) for i in range(len(lengths))]
    spans = chunk(whole(lengths), max_length)
    made = list(rows(spans, lambda document: (tokens[document], tokens[document]), max_length, packing))
    seen = np.concatenate([row["input_ids"] for row in made])
    assert sorted(seen.tolist()) == list(range(starts[-1]))
    first_tokens = {starts[document] + start for document, start, _ in spans}
    for row in made:
        ids, labels = row["input_ids"], row["labels"]
        assert len(ids) == len(labels) <= max_length
        masked = np.isin(ids, list(first_tokens))
        assert (labels == np.where(masked, MASKED, ids)).all()
        if packing:
            assert ((row["position_ids"] == 0) == masked).all()
            assert (np.diff(row["position_ids"])[~masked[1:]] == 1).all()
        else:
            assert "position_ids" not in row


# ------------------------------------------------------------------------------------------- collator


def row_of(*documents: Sequence[int], packing: bool) -> dict[str, list[int]]:
    ids = [token for document in documents for token in document]
    labels = [token for document in documents for token in (MASKED, *document[1:])]
    row = {"input_ids": ids, "labels": labels}
    if packing:
        row["position_ids"] = [i for document in documents for i in range(len(document))]
    return row


def test_collator_unpacked() -> None:
    """The pad token may be eos: a row's own keeps its label."""
    rows_of = [row_of(ids, packing=False) for ids in ([5, 6, 0], [8, 9, 1, 2, 3])]
    batch = Collator(0, packing=False)(rows_of)
    assert batch["input_ids"].tolist() == [[5, 6, 0, 0, 0, 0, 0, 0], [8, 9, 1, 2, 3, 0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 0, *[-100] * 5], [-100, 9, 1, 2, 3, *[-100] * 3]]
    assert batch["attention_mask"].tolist() == [[1] * 3 + [0] * 5, [1] * 5 + [0] * 3]
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


def test_collator_packed() -> None:
    made = [row_of([5, 6], [7, 8, 9], packing=True), row_of([1, 2, 3], packing=True)]
    batch = Collator(0, packing=True)(made)
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1, 2, 3, 4]]
    flat = Collator(0, packing=True, flatten=True)(made)
    assert flat["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 4]]


# --------------------------------------------------------------------------------------------- models

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "mistral, a window shorter than a document": MistralConfig(**SIZES, sliding_window=6),
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCAB, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
}


def tiny(config: Any, attention: str = "eager") -> Any:
    varlen.register()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    with torch.no_grad():  # larger weights than the initial ones, so that a leak is loud
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.config.use_cache = False
    return model.train()


def loss_and_gradient(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    loss = model(**batch, num_items_in_batch=torch.tensor(1)).loss  # a sum over trained tokens
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("attention", ["eager", "sdpa", "sdpa_varlen"])
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_equals_unpacked(name: str, attention: str) -> None:
    """Rows of several documents, or one row of all of them."""
    model = tiny(CONFIGS[name], attention)
    assert packing_supported(model) is None  # by the logits of each document
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in (9, 4, 12, 7, 2, 13)]
    groups = list(pack([len(document) for document in documents], 24))
    assert len(groups) == 2 and sum(map(len, groups)) == 6
    packed = [row_of(*(documents[index] for index in group), packing=True) for group in groups]
    unpacked = Collator(0, packing=False)([row_of(document, packing=False) for document in documents])
    expected_loss, expected_gradient = loss_and_gradient(model, unpacked)
    scale = float(expected_gradient.abs().max())
    for flatten in (False, True):
        batch = Collator(0, packing=True, flatten=flatten)(packed)
        assert (batch["labels"] != MASKED).sum() == (unpacked["labels"] != MASKED).sum()
        loss, gradient = loss_and_gradient(model, batch)
        torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
        torch.testing.assert_close(gradient / scale, expected_gradient / scale, rtol=0, atol=1e-5)


def test_packing_refused_without_position_ids() -> None:
    model = tiny(BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=VOCAB))
    assert packing_supported(model) == "BloomForCausalLM takes no position_ids"


def test_packing_refused_where_documents_leak() -> None:
    """Mamba-like layers carry a state across the whole row, whatever the positions say."""
    from transformers import JambaConfig

    config = JambaConfig(
        **SIZES, mamba_d_state=4, mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1, num_experts=1,
        expert_layer_period=2, num_experts_per_tok=1, use_mamba_kernels=False, pad_token_id=0,
    )  # fmt: skip
    reason = packing_supported(tiny(config))
    assert reason is not None and reason.startswith("JambaForCausalLM lets packed documents see each other")


@pytest.mark.parametrize("size", [0, 1, 3, 4, 9])
def test_numbers_in_files_are_those_in_memory(size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Across the borders of blocks, and added to after they were read."""
    for module in (mapped, packing):
        monkeypatch.setattr(module, "BLOCK", 3)
    make = mapped.makes(tmp_path)
    lengths = np.arange(2, 2 + size)
    assert np.array_equal(whole(lengths, make), [[index, 0, index + 2] for index in range(size)] or np.empty((0, 3)))
    if size > 1:
        assert all(map(np.array_equal, split(whole(lengths, make), 0.4, 7, make), split(whole(lengths), 0.4, 7)))
    numbers, given = mapped.Numbers(make), [index * 7 % 5 for index in range(size)]
    seen = list[int]()
    for part in (given[: size // 2], given[size // 2 :]):
        for number in part:
            numbers.append(number)
        seen = sorted(seen + part)
        assert numbers.sorted().tolist() == seen
    ordered = numbers.sorted()
    assert mapped.twice(ordered) == len(ordered) - len({*ordered.tolist()})
    assert mapped.among(ordered, [np.array([1, 4]), np.array([], int)]) == sum(each in (1, 4) for each in ordered)
    assert list(tmp_path.iterdir()) == []


def test_packing_keeps_nothing_of_a_row_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And has the same rows across the borders of blocks."""
    lengths = np.fromiter((number * 7919 % 61 + 1 for number in range(60_000)), np.int32)
    expected = list(pack(lengths, 100))
    for module in (mapped, packing):
        monkeypatch.setattr(module, "BLOCK", 1000)
    tracemalloc.start()
    rows = pack(lengths, 100, mapped.makes(tmp_path))
    found = [next(rows)]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [*found, *rows] == expected
    assert most < 4 * len(lengths), most
