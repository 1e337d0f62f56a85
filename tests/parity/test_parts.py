"""Weights that ranks with spans are given one by one, against the whole model, by bits."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.model.build import build, load_config
from tests.helpers.tiny import GPT2, LLAMA, MIXTRAL, run_config

TIED_GPT2: Mapping[str, Any] = {**GPT2, "tie_word_embeddings": True, "n_layer": 3}


def poured(ranks: Ranks, configs: list[RunConfig]) -> list[Any]:
    """Of each config: whether nothing had values before, which tensors differ, and what was said."""
    from deepstow.trainer.run import order
    from deepstow.trainer.verify.verify import random_run

    found = []
    for config in configs:
        run, said = random_run(config, ranks), list[str]()
        trainer = order.make_trainer(run)
        pour, trainer._pour = trainer._pour, None
        assert pour is not None
        was_hollow = all(param.isnan().all() for param in trainer.model.parameters())
        trainer.create_optimizer()
        pour.keywords["say"] = said.append
        pour(trainer.stowed)
        state = trainer.model.state_dict()
        whole = pour.args[1]()  # as it was built at once
        expected = {**whole.state_dict(), **dict(whole.named_buffers())}
        state |= {name: buffer for name, buffer in trainer.model.named_buffers() if name not in state}
        dtype = torch.bfloat16 if config.training.bf16 else torch.float32
        cast = {
            name: tensor.to(dtype) if name in dict(whole.named_parameters()) else tensor
            for name, tensor in expected.items()
        }
        differ = [
            name
            for name in state.keys() | cast.keys()
            if not torch.equal(state[name], cast[name].to(state[name].dtype))
        ]
        found.append((was_hollow, differ, [line for line in said if "whole" in line]))
        trainer.stowed.close()
    return found


@pytest.mark.slow
def test_every_weight_and_buffer_arrives(tmp_path: Path) -> None:
    def make(config: Mapping[str, Any] | None, stage: int, offload: Mapping[str, Any], **more: Any) -> RunConfig:
        return run_config(
            config, strategies={"zero": {"stage": stage}, "offload": offload}, output_dir=tmp_path / "run", **more
        )

    for name, config in (("llama", LLAMA), ("mixtral", MIXTRAL)):
        section = run_config(config).model
        build(section, load_config(section), seed=7, partitioned=False).save_pretrained(tmp_path / name)
    saved = {
        name: {"config": None, "name_or_path": str(tmp_path / name), "tokenizer": None} for name in ("llama", "mixtral")
    }
    streamed = {"weights": "streamed"}
    configs = [
        make(LLAMA, 3, streamed | {"site": "host", "gather": "host"}),
        make(LLAMA, 3, streamed | {"site": "streamed"}, bf16=True),
        make(TIED_GPT2, 1, {"site": "streamed"}, bf16=True),
        make(None, 3, streamed, model=saved["llama"] | {"dtype": "bfloat16"}, bf16=True),
        make(None, 2, {"site": "host"}, model=saved["llama"]),
        make(None, 3, streamed, model=saved["mixtral"]),
    ]
    assert run_world(2, poured, configs) == [(True, [], [])] * 6
