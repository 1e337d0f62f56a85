"""Tensor ranks that exchange fewer tokens in fewer bits, against one process that leaves out the same tokens.

Bits have nothing to be equal to, so what is shown of them is that ranks decode the same, and by how much they are off.
"""

import random
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from deepstow.strategies.parallel import tensor_shards
from deepstow.strategies.plugins.codec_rows import Codec
from deepstow.strategies.plugins.exchanged import Exchange, among_zeros, exchange_of, of_tokens, start
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from tests.helpers.moves import Kind, different, in_turn
from tests.helpers.tiny import QWEN3, VOCAB
from tests.parity.test_tensor import MODELS, STEPS, in_fp64_with_biases, step_of_both

pytestmark = pytest.mark.ranks


def left_out(layer: Any, ranks: int, tokens: float, inputs: Tensor) -> Tensor:
    """What a whole layer divided by rows has of the tokens that ``ranks`` would choose."""
    parts = zip(inputs.chunk(ranks, -1), layer.weight.chunk(ranks, -1), strict=True)
    scores = sum(linear(part, weight).detach().float().square().sum(-1) for part, weight in parts)
    assert isinstance(scores, Tensor)
    many = ceil(tokens * scores.shape[-1])
    mask = torch.zeros_like(scores, dtype=inputs.dtype).scatter(-1, scores.topk(many).indices, 1)
    found = linear(inputs, layer.weight) * mask[..., None]
    return found if layer.bias is None else found + layer.bias


def in_fp64(ranks: Ranks, models: Mapping[str, Any], tokens: float) -> dict[str, float]:
    """Of each model the largest difference of losses, norms and weights; evaluations without and with exchange."""
    found = {}
    for name, given in models.items():
        plain = in_fp64_with_biases(given)
        model = deepcopy(plain)
        tensor_shards.divide(model, ranks.world_size, tied=plain.config.tie_word_embeddings)
        start(model, Exchange(tokens, None, tensor_shards.group()))
        exact = {layer: layer.forward for layer in plain.modules() if isinstance(layer, torch.nn.Linear)}
        fewer = {
            layer: partial(left_out, layer, ranks.world_size, tokens)
            for path, layer in plain.named_modules()
            if path.endswith(("o_proj", "down_proj"))
        }
        exchange, worst = exchange_of(model), 0.0
        assert exchange is not None
        rules = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (plain, model)]
        for step in range(STEPS):
            ids = torch.randint(0, VOCAB, (3, 15), generator=torch.Generator().manual_seed(step))
            for layer, forward in fewer.items():
                layer.forward = forward
            losses = [
                cross_entropy(each(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) for each in (plain, model)
            ]
            worst = max(worst, step_of_both(losses, rules))
            with torch.no_grad():
                exchange.evaluates = True
                worst = max(worst, float((plain(ids).logits - model(ids).logits).abs().max()))
                exchange.evaluates = False
                for layer in fewer:
                    layer.forward = exact[layer]
                worst = max(worst, float((plain(ids).logits - model(ids).logits).abs().max()))
        weights = tensor_shards.state_dict(model, keep=True)
        found[name] = max(
            worst, *(float((weights[key] - each).abs().max()) for key, each in plain.state_dict().items())
        )
    return found


def test_in_fp64() -> None:
    """The same tokens are left out in forward and in backward, and none in evaluations."""
    found = run_world(2, in_fp64, {"llama": MODELS["llama"], "qwen3": QWEN3}, 0.3)
    assert max(found.values()) < 1e-13, found


def _cases(ranks: Ranks, seeds: list[int]) -> int:
    """Random numbers of each rank: all get the same bits, near the sum, of the best tokens alone."""
    group, errors = dist.group.WORLD, {8: 0.05, 4: 0.6, 16: 1e-5}
    for seed in seeds:
        draw = random.Random(seed)
        bits, segmented, tokens = draw.choice((8, 4, 16)), draw.random() < 0.5, draw.choice((0.25, 0.5, 1.0))
        dtype = draw.choice((torch.float32, torch.bfloat16))
        exchange = Exchange(tokens, Codec(bits, segmented) if bits < 16 else None, group)
        shape = draw.randint(1, 3), draw.randint(1, 30), draw.choice((8, 48))
        generator = torch.Generator().manual_seed(100 * seed)
        every = torch.randn(ranks.world_size, *shape, generator=generator).to(dtype)
        if draw.random() < 0.3:
            every[:, :, ::2] = every[:, :, :1].clone()  # ties
        mine = every[ranks.rank]
        kept = exchange.choose(mine)
        rows = mine if kept is None else of_tokens(mine, kept)
        found = exchange.summed(rows)
        whole = found if kept is None else among_zeros(found, kept, mine)
        others = [torch.empty_like(whole) for _ in range(ranks.world_size)]
        dist.all_gather(others, whole)
        assert all(torch.equal(whole, other) for other in others), f"case {seed}: ranks have other bits"
        expected = every.float().sum(0)
        scores = every.float().square().sum(-1).sum(0)
        if kept is not None:
            left = torch.ones_like(scores, dtype=torch.bool).scatter(-1, kept, False)
            assert (whole[left] == 0).all() and kept.shape[-1] == ceil(tokens * shape[1])
            best = scores.gather(-1, kept).amin(-1, keepdim=True)
            assert (scores.masked_fill(~left, 0) <= best * (1 + 1e-6)).all(), f"case {seed}: not the best"
            expected = among_zeros(of_tokens(expected, kept), kept, expected)
        off = float((whole.float() - expected).abs().max() / (expected.abs().max() + 1e-9))
        assert off < errors[bits] + 0.02 * (dtype is torch.bfloat16), f"case {seed}: off by {off} in {bits} bits"
    return len(seeds)


def test_ranks_get_the_same_bits() -> None:
    assert run_world(4, _cases, list(range(400, 425)), deepspeed=False) == 25


def _train(ranks: Ranks, jobs: list[Any]) -> dict[str, Any]:
    return {name: each["end"] for name, each in in_turn(ranks, jobs).items()}


@pytest.mark.slow
def test_a_run_goes_on_and_all_tokens_as_they_are_are_exact(tmp_path: Path) -> None:
    """A resumed run ends with the bits of one that was not interrupted, with accumulation and clipping; with all tokens
    in 16 bits a run has the bits of ``tensor`` alone.
    """
    training = {"per_device_train_batch_size": 1, "max_grad_norm": 0.05, "gradient_accumulation_steps": 2}
    jobs: list[Any] = []
    for name, exchange in (("lossy", {"tokens": 0.5, "bits": 4}), ("all", {"tokens": 1, "bits": 16}), ("none", None)):
        options = {"tensor": {"degree": 2} | ({"exchange": exchange} if exchange else {})}
        kind = Kind(2, options, {**training, "save_steps": 2})
        folder = tmp_path / name
        jobs.append((name, kind.config(folder, 4), None))
        if name == "lossy":
            jobs.append(("resumed", kind.config(folder, 4), str(folder / "checkpoint-2")))
    found = run_world(2, _train, jobs)
    assert different(found["lossy"], found["resumed"]) == []
    assert different(found["all"], found["none"]) == [] and different(found["lossy"], found["none"])
