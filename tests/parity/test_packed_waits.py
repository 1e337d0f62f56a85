"""The host knows how long the documents of packed rows are: no layer reads positions, which would wait for a device.

That the numbers are those of one document at a time is in ``test_varlen.py``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from transformers import masking_utils

from deepstow.strategies.engine.forward.checkpointing import Names, checkpoint_blocks
from deepstow.strategies.parallel import varlen
from deepstow.trainer.data.collate import Collator
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from tests.helpers.models import causal
from tests.helpers.moves import forget_run, made
from tests.helpers.releases import needs
from tests.helpers.tiny import LLAMA, VOCAB, run_config

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 64}
LENGTHS = ((3, 9, 4), (6, 10))
ROWS: list[dict[str, Any]] = [
    {
        "input_ids": (ids := [1 + (7 * row + 3 * place * place) % (VOCAB - 1) for place in range(16)]),
        "labels": ids,
        "position_ids": [place for length in LENGTHS[row % 2] for place in range(length)],
    }
    for row in range(8)
]


def model(*, recomputed: bool = False) -> Any:
    varlen.register()
    found = causal("mistral", varlen.NAME, **SIZES, num_key_value_heads=2, sliding_window=4)
    found.config.use_cache = False
    if recomputed:
        checkpoint_blocks(found, {f"model.layers.{index}": () for index in range(4)})
    return found


def batch(*, documents: bool) -> dict[str, Any]:
    rows = [{**row, "input_ids": [each % 64 for each in row["input_ids"]]} for row in ROWS[:2]]
    return Collator(0, packing=True, documents=documents)([{**row, "labels": row["input_ids"]} for row in rows])


@contextmanager
def _unread() -> Iterator[None]:
    """Inside, positions are read by nobody but the collator: not by a layer, and not by Transformers for a mask."""

    def read(*given: Any, **more: Any) -> Any:
        raise AssertionError("positions are read, for which a device would be waited for")

    patch, collate, at = pytest.MonkeyPatch(), Collator.__call__, varlen.Documents.at

    def collated(self: Collator, rows: Any) -> Any:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(varlen.Documents, "at", at)
            return collate(self, rows)

    patch.setattr(masking_utils, "find_packed_sequence_indices", read)
    patch.setattr(varlen.Documents, "at", read)
    patch.setattr(Collator, "__call__", collated)
    try:
        yield
    finally:
        patch.undo()


def test_no_layer_asks_for_a_value() -> None:
    """Of tensors that have none. Two forwards of each block, since blocks are recomputed."""
    ours, given = model(recomputed=True), batch(documents=True)
    varlen.prepare(ours)
    with _unread(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {key: mode.from_tensor(each) if isinstance(each, Tensor) else each for key, each in given.items()}
        grads = torch.autograd.grad(ours(**fake).loss, list(ours.parameters()))
    assert all(grad.shape == param.shape for grad, param in zip(grads, ours.parameters(), strict=True))


def test_prepared_models_have_the_same_bits() -> None:
    """Told by the collator, or by positions alone, with and without a mask that says nothing."""
    plain, found = model(), []
    for prepared, documents in ((False, False), (True, False), (True, True)):
        ours = model()
        ours.load_state_dict(plain.state_dict())
        if prepared:
            varlen.prepare(ours)
        loss = ours(**batch(documents=documents)).loss
        found.append([loss, *torch.autograd.grad(loss, list(ours.parameters()))])
    assert all(torch.equal(one, each) for other in found[1:] for one, each in zip(found[0], other, strict=True))
    padded = {"input_ids": batch(documents=False)["input_ids"], "attention_mask": torch.ones(2, 16).long()}
    padded["attention_mask"][0, 9:] = 0
    assert torch.equal(ours(**padded).logits, plain(**padded).logits), "a mask of the caller's stays"


def test_positions_alone_are_read_once_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """For four layers, twice each; and documents of other rows are an error."""
    ours, given, reads = model(recomputed=True), batch(documents=False), []
    varlen.prepare(ours)
    own = varlen.Documents.at
    monkeypatch.setattr(varlen.Documents, "at", lambda positions: reads.append(1) or own(positions))
    ours(**given).loss.backward()
    assert len(reads) == 1
    with pytest.raises(ValueError, match="documents are not of these 2 rows of 16 tokens"):
        ours(**given, documents=varlen.Documents(((16,), (6, 9))))


def _trained(ranks: Ranks, folder: Path, kinds: Any) -> list[float]:
    """The last loss of packed runs that train and evaluate without reading a position."""
    found = []
    for number, (strategies, attention) in enumerate(kinds):
        more: dict[str, Any] = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "logging_steps": 1}
        section = {"attn_implementation": attention} if attention else {}
        data = {"packing": True, "eval_fraction": 0.5}
        config = run_config(
            LLAMA, output_dir=folder / str(number), strategies=strategies, model=section, data=data,
            gradient_accumulation_steps=2, per_device_train_batch_size=2, use_cpu=True, **more,
        )  # fmt: skip
        trainer = made(ranks, config, some=ROWS)
        with _unread():
            trainer.train()
        assert sum("eval_loss" in record for record in trainer.state.log_history) == 2
        found.append(trainer.state.log_history[-1]["train_loss"])
        trainer.accelerator.free_memory()
        forget_run()
    return found


TRAVELS = {"offload": {"site": "host", "weights": "streamed"}, "recompute": {"policy": "full"}}


def test_no_run_reads_a_position(tmp_path: Path) -> None:
    _trained(Ranks(), tmp_path, [(TRAVELS, varlen.NAME)])


@pytest.mark.ranks
@needs("sequence")
def test_no_stage_and_no_slice_reads_a_position(tmp_path: Path) -> None:
    kinds: list[Any] = [({"pipeline": {"stages": 2}}, varlen.NAME)]
    kinds += [({"sequence": {"degree": 2}, "recompute": {"policy": "full"}}, None)]
    run_world(2, _trained, tmp_path, kinds, deepspeed=False)


@pytest.mark.parametrize("window", [None, 4])
def test_one_call_of_the_kernel_is_a_call_per_document(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer heads of keys, and rows that are taken some at a time. What the kernel computes is written down here:
    a CPU has none.
    """

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, begin: Tensor, other: Tensor, longest: int, most: int, **more: Any
    ) -> Tensor:
        assert begin is other and begin.dtype is torch.int32 and longest == most == int(begin.diff().max())
        assert more["window_size"] == ((-1 if window is None else window - 1), 0)
        found = []
        for start, stop in pairwise(begin.tolist()):
            one = [each[start:stop].transpose(0, 1)[None] for each in (q, k, v)]
            distance = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
            seen = (distance >= 0) & (distance < (window or len(q)))
            given = {"attn_mask": seen, "scale": more["scale"], "enable_gqa": q.shape[1] != k.shape[1]}
            found.append(scaled_dot_product_attention(*one, **given)[0].transpose(0, 1))
        return torch.cat(found)

    query = torch.randn(2, 4, 16, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, 16, 8, dtype=torch.float64)
    documents = varlen.Documents(LENGTHS, torch.tensor([0, 3, 12, 16, 22, 32], dtype=torch.int32))
    by_calls = varlen.attend(query, key, value, documents, window, 0.3)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    monkeypatch.setattr(varlen, "_takes_any_length", lambda *given: True)
    at_once = varlen.attend(query, key, value, documents, window, 0.3)
    assert torch.allclose(by_calls, at_once, rtol=0, atol=1e-12)
    for row in range(2):
        rows = (each[row : row + 1] for each in (query, key, value))
        part = varlen.attend(*rows, documents.of_rows(row, row + 1), window, 0.3)
        assert torch.allclose(part, at_once[row : row + 1], rtol=0, atol=1e-12)


def test_the_kernel_counts_as_attention() -> None:
    """So that ``recompute`` keeps what it keeps of other attentions."""
    import torch.nn.attention.varlen

    func, names = torch.ops.torch_attn._varlen_attn.default, Names(torch.nn.Identity())
    assert names.of(func, (), {}) == "attention 0"
    assert names.of(torch.ops.torch_attn._varlen_attn_backward.default, (), {}) is None
