"""Tensor parallelism whose ranks sum one chunk of rows while they compute the next, against plain training."""

from collections.abc import Mapping
from copy import deepcopy
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import all_reduce
from transformers import AutoConfig, AutoModelForCausalLM

from deepstow.strategies.parallel import tensor_shards
from deepstow.strategies.plugins import chunked
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from tests.helpers.moves import Kind
from tests.helpers.tiny import LLAMA, QWEN3, VOCAB
from tests.parity.test_tensor import MODELS, SGD, STEPS, in_fp64_with_biases, same, step_of_both, trained

pytestmark = pytest.mark.ranks
UNEQUAL = (1, 2, 3, 6)  # chunks of the sub-layers of two blocks: no chunk of three is in one of two


def in_fp64(ranks: Ranks, models: Mapping[str, Any]) -> dict[str, float]:
    """Of each model the largest difference of losses, norms and weights from one that is whole, after some steps with
    torch's optimizer; packed rows. In the second half two micro-batches are between forward and backward.
    """
    found = {}
    for name, given in models.items():
        plain = in_fp64_with_biases(given)
        model = deepcopy(plain)
        tensor_shards.divide(model, ranks.world_size, tied=plain.config.tie_word_embeddings)
        chunked.start(model, UNEQUAL, tensor_shards.group())
        rules = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (plain, model)]
        worst = 0.0
        for step in range(STEPS):
            losses = [torch.zeros((), dtype=torch.float64) for _ in rules]
            for rows in (6,) if step < STEPS // 2 else (6, 5):
                ids = torch.randint(0, VOCAB, (rows, 15), generator=torch.Generator().manual_seed(step))
                positions = torch.cat([torch.arange(9), torch.arange(6)]).expand(rows, -1)
                batch = {"input_ids": ids, "position_ids": positions}
                for number, each in enumerate((plain, model)):
                    logits = each(**batch).logits[:, :-1].flatten(0, 1)
                    losses[number] = losses[number] + torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
            worst = max(worst, step_of_both(losses, rules))
        weights = tensor_shards.state_dict(model, keep=True)
        worst = max(worst, *(float((weights[key] - each).abs().max()) for key, each in plain.state_dict().items()))
        found[name] = worst
    return found


def test_in_fp64() -> None:
    """Chunks of several sizes in one model; rows that they do not divide."""
    found = run_world(2, in_fp64, {"llama": MODELS["llama"], "qwen3": QWEN3})
    assert max(found.values()) < 1e-14, found


def order(ranks: Ranks, chunks: int) -> tuple[str, str]:
    """Of one block, in forward and in backward: where sums begin, where they are waited for, and in backward where
    gradients of weights of divided columns are made (lower case).
    """
    config = AutoConfig.for_model(**{**LLAMA, "num_hidden_layers": 1})
    model: Any = AutoModelForCausalLM.from_config(config)
    tensor_shards.divide(model, ranks.world_size, tied=False)
    log, numbers, made = [], count(), chunked._Later.backward

    def begun(tensor: torch.Tensor, **given: Any) -> Any:
        number, work = next(numbers), all_reduce(tensor, **given)
        log.append(f"B{number}")
        return SimpleNamespace(wait=lambda: (log.append(f"W{number}"), work.wait()))

    def later(ctx: Any, unused: torch.Tensor) -> Any:
        log.append("w")
        return made(ctx, unused)

    chunked.all_reduce = begun  # type: ignore[attr-defined]
    chunked._Later.backward = staticmethod(later)  # type: ignore[method-assign]
    chunked.start(model, [chunks, chunks], tensor_shards.group())
    ids = torch.randint(0, VOCAB, (4, 8), generator=torch.Generator().manual_seed(0))
    logits = model(input_ids=ids).logits
    forward = " ".join(log)
    log.clear()
    logits.square().mean().backward()
    return forward, " ".join(log)


def test_what_runs_while_a_sum_is_on_its_way() -> None:
    """The next chunk, of the next sub-layer as well; in backward the gradients of the same chunk's weights, too."""
    assert run_world(2, order, 2) == (
        "B0 B1 W0 B2 W1 B3 W2 W3",
        "B4 w w B5 w w W4 B6 w w w W5 B7 w w w W6 W7",
    )
    assert run_world(2, order, 1) == ("B0 W0 B1 W1", "B2 w w W2 B3 w w w W3")


def in_chunks(ranks: Ranks, config: Any) -> dict[str, Any]:
    """``trained``, and in how many chunks each sub-layer took its rows."""
    found, begin = list[Any](), chunked.start

    def start(model: Any, chunks: Any, group: Any) -> None:
        found.extend(chunks)
        begin(model, chunks, group)

    chunked.start = start
    return {**trained(ranks, config), "chunks": found}


def test_as_plain(tmp_path: Path) -> None:
    """A run, with clipping, accumulation and ZeRO; ranks of one copy have the same bits."""
    options = {"tensor": {"degree": 2, "chunks": 2}, "zero": {"stage": 2}}
    plain = run_world(1, trained, Kind(1, {}, SGD, QWEN3).config(tmp_path, STEPS))
    found = run_world(2, in_chunks, Kind(2, options, SGD, QWEN3).config(tmp_path, STEPS))
    same(plain, found)
    assert found["apart"] == [] and len(found["whole"]) > 3 and found["chunks"] == [2] * 4
