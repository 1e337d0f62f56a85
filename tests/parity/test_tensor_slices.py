"""Tensor parallelism whose ranks have slices of the tokens between divided layers, against plain training."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from deepstow.strategies.engine.forward.checkpointing import checkpoint_blocks
from deepstow.strategies.parallel import autotp, scattered, tensor_shards
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.verify.verify import compare
from tests.helpers.moves import Kind
from tests.helpers.tiny import QWEN3, VOCAB
from tests.helpers.worlds import run_counted
from tests.parity.test_tensor import (
    LLAMA3,
    MODELS,
    SGD,
    STEPS,
    TOLERANCE,
    in_fp64_with_biases,
    kept,
    step_of_both,
    trained,
)

pytestmark = pytest.mark.ranks
SLICES: Mapping[str, Any] = {"tensor": {"degree": 2, "sequence_parallel": True}}
IN_SLICES = {name: MODELS[name] for name in autotp.IN_SLICES}
ODD = {"per_device_train_batch_size": 3}  # of rows with 12 and 15 tokens: 4 ranks do not divide all of them


def in_fp64(ranks: Ranks, models: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Of each model the largest difference of losses, norms and weights from one that is whole, after some steps with
    torch's optimizer: packed rows, of whose tokens ranks have uneven parts; in the last steps blocks run again.
    """
    found = {}
    for name, given in models.items():
        plain = in_fp64_with_biases(given)
        model = deepcopy(plain)
        tensor_shards.divide(model, ranks.world_size, tied=plain.config.tie_word_embeddings, in_slices=True)
        group = tensor_shards.group().group_name
        scattered.start(model, scattered.Tokens(ranks.world_size, ranks.rank, group))
        rules = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (plain, model)]
        worst = 0.0
        for step in range(STEPS):
            if step == STEPS // 2:
                few = ["linear 0", "linear 3", "attention 0"]
                checkpoint_blocks(model, {"model.layers.0": few, "model.layers.1": []})
            ids = torch.randint(0, VOCAB, (3, 15), generator=torch.Generator().manual_seed(step))
            positions = torch.cat([torch.arange(9), torch.arange(6)]).expand(3, -1)
            batch = {"input_ids": ids, "position_ids": positions, "use_cache": False}
            losses = [
                torch.nn.functional.cross_entropy(each(**batch).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
                for each in (plain, model)
            ]
            worst = max(worst, step_of_both(losses, rules))
        weights = tensor_shards.state_dict(model, keep=True)
        worst = max(worst, *(float((weights[key] - each).abs().max()) for key, each in plain.state_dict().items()))
        found[name] = worst
    return found


def in_turn(ranks: Ranks, configs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """``kept`` of the configs, and what ranks of one copy have apart; in the same ranks, ``in_fp64`` of two models."""
    found = kept(ranks, configs)
    return found, in_fp64(ranks, {"llama": MODELS["llama"], "qwen3": QWEN3})


def test_in_slices(tmp_path: Path) -> None:
    """As plain training, with clipping and two micro-batches; no policy of recomputation changes a bit, and as much is
    kept as the plan says.
    """
    options = {name: {"recompute": {"policy": name}} for name in ("none", "selective", "full")}
    kinds = {name: Kind(2, {**SLICES, **each}, {**SGD, **ODD}, LLAMA3) for name, each in options.items()}
    kinds["whole"] = Kind(2, {"tensor": {"degree": 2}}, {**SGD, **ODD}, LLAMA3)
    plain = run_world(1, trained, Kind(1, {}, {**SGD, **ODD}, LLAMA3).config(tmp_path, 2))
    found, fp64 = run_counted(2, in_turn, {name: kind.config(tmp_path / name, 2) for name, kind in kinds.items()})
    for name, each in found.items():
        assert each["loss"] == pytest.approx(plain["loss"], rel=TOLERANCE)
        worst = {it.name: it.relative for it in compare(plain["weights"], each["weights"])}
        assert max(worst.values()) < TOLERANCE, (name, worst)
        assert each["kept"] == pytest.approx(each["planned"], abs=8), name
        if name != "whole":
            assert compare(found["none"]["weights"], each["weights"]) == [], name
    assert found["full"]["kept"] < found["selective"]["kept"] < found["none"]["kept"] < 0.8 * found["whole"]["kept"]
    assert max(fp64.values()) < 1e-14, fp64
