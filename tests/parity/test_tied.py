"""A model whose config ties weights of which its files have values of their own: those of the files are trained."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.releases import needs_stage_3
from tests.helpers.small_runs import TRAVEL, by_the_trainer, make_rows_and_model, ran, rows_of, tree_of
from tests.helpers.tiny import LLAMA, run_config
from tests.helpers.worlds import run_counted
from trainer.config.sections import RunConfig
from trainer.dist.ranks import Ranks
from trainer.planning.facts import count_model
from trainer.verify.verify import compare, train

pytestmark = pytest.mark.filterwarnings("ignore")
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def save_with_own_head(folder: Path, head: Tensor | None = None, **how: Any) -> None:
    """A Llama whose config ties its head to the table, and whose files have a head: ``head``, or another than it."""
    torch.manual_seed(2)
    options = {**LLAMA, "initializer_range": 0.3}
    config = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if head is not None:
        model.lm_head.weight.data.copy_(head)
    model.save_pretrained(folder, **how)
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, "tie_word_embeddings": True}))


def config_of(folder: Path, strategies: Mapping[str, Any], **model: Any) -> RunConfig:
    given = {"config": None, "name_or_path": str(folder), "tokenizer": None, **model}
    training = {"max_steps": 2, "learning_rate": 1e-2, "max_grad_norm": 0.0, "gradient_accumulation_steps": 2}
    return run_config(None, model=given, strategies=strategies, output_dir=folder, use_cpu=True, **training)


def all_trained(ranks: Ranks, configs: list[RunConfig]) -> list[Any]:
    return [train(ranks, config)["weights"] for config in configs]


@pytest.mark.ranks
@needs_stage_3
def test_every_strategy_trains_the_head_of_the_files(tmp_path: Path) -> None:
    save_with_own_head(tmp_path / "m", max_shard_size="20KB")
    travels = {"zero": {"stage": 3}, "offload": {"site": "host", "weights": "streamed"}}
    worlds: list[list[dict[str, Any]]] = [  # DeepSpeed's engines each in its own
        [{}, travels, {"pipeline": {"stages": 2}}], [{"tensor": {"degree": 2}}], [{"zero": {"stage": 3}}],
    ]  # fmt: skip
    found = [run_counted(2, all_trained, [config_of(tmp_path / "m", each) for each in world]) for world in worlds]
    (first, engine, pipeline), (tensor,), (zero,) = found
    (alone,) = run_counted(1, all_trained, [config_of(tmp_path / "m", {})])
    assert not torch.equal(first[HEAD], first[TABLE])
    bounds = [(first, engine, 0.0), (alone, pipeline, 0.0), (first, zero, 1e-4), (alone, tensor, 1e-4)]
    for expected, trained, bound in bounds:  # where sums have another order, not to the bit
        differences = {each.name: each.relative for each in compare(expected, trained)}
        assert trained.keys() == expected.keys()
        assert max(differences.values(), default=0.0) <= bound, differences


@pytest.mark.parametrize("equal", [False, True])
def test_the_export_says_what_was_trained(equal: bool, tmp_path: Path) -> None:
    """With equal values in the files both names are one weight, as in Transformers."""
    make_rows_and_model(tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
    if equal:
        model.lm_head.weight.data.copy_(model.model.embed_tokens.weight)
    model.config.tie_word_embeddings = True
    model.save_pretrained(tmp_path / "model")  # two tensors, so both are written
    assert HEAD in load_file(tmp_path / "model" / "model.safetensors")
    tree = tree_of(tmp_path, tmp_path / "run", {}, TRAVEL)
    found = ran(tree)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", use_cache=False)
    expected = by_the_trainer(base, tmp_path / "theirs", rows_of(tree))
    assert found.keys() == expected.keys() and (HEAD in found) is not equal
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export")
    assert again.config.tie_word_embeddings is equal
    assert torch.equal(again.lm_head.weight, found[TABLE if equal else HEAD])
