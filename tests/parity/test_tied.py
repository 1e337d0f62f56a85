"""A model whose config ties weights of which its files have values of their own: those of the files are trained."""

import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from deepstow.trainer.config.load import load_tree
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.data import pydoc_rows
from deepstow.trainer.data import tokenizer as tokenizers
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.stopping import Stop
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.model import parts, tying
from deepstow.trainer.planning.facts import count_model
from deepstow.trainer.run import session as runs
from deepstow.trainer.verify.verify import compare, train
from tests.e2e.commands import write_jsonl
from tests.helpers.releases import needs_stage_3
from tests.helpers.small_runs import TRAVEL, by_the_trainer, make_rows_and_model, ran, rows_of, tree_of
from tests.helpers.tiny import LLAMA, run_config
from tests.helpers.worlds import run_counted

pytestmark = pytest.mark.filterwarnings("ignore")
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def save_with_own_head(folder: Path, **how: Any) -> None:
    """A Llama whose config ties its head to the table, and whose files have a head, another than it."""
    torch.manual_seed(2)
    options = {**LLAMA, "initializer_range": 0.3}
    config = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder, **how)
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, "tie_word_embeddings": True}))


def config_of(folder: Path, strategies: Mapping[str, Any]) -> RunConfig:
    given = {"config": None, "name_or_path": str(folder), "tokenizer": None}
    training = {"max_steps": 2, "learning_rate": 1e-2, "max_grad_norm": 0.0, "gradient_accumulation_steps": 2}
    return run_config(None, model=given, strategies=strategies, output_dir=folder, use_cpu=True, **training)


def all_trained(ranks: Ranks, configs: list[RunConfig]) -> list[Any]:
    return [train(ranks, config)["weights"] for config in configs]


@pytest.mark.slow
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


def test_files_that_come_after_the_plan_are_refused(tmp_path: Path) -> None:
    """As those of a model on the hub, which is downloaded when it is loaded."""
    save_with_own_head(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tying.check(loaded, str(tmp_path), (HEAD,))
    with pytest.raises(ConfigError, match=f"have {HEAD} of their own, which its config ties; start once more"):
        tying.check(loaded, str(tmp_path), ())


def test_pickled_files_are_read_as_well(tmp_path: Path) -> None:
    save_with_own_head(tmp_path)
    weights = tmp_path / "model.safetensors"
    torch.save(load_file(weights), tmp_path / "pytorch_model.bin")
    weights.unlink()
    count = count_model(config_of(tmp_path, {}))
    assert count.untied == (HEAD,) and not count.tied


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_config_that_cannot_say_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """T5 ties three tables by one key. Plainly and stowed its own head is trained, and the export opens with it."""
    rows = [{"prompt": row["text"], "completion": row["text"][::-1]} for _, row in islice(pydoc_rows.rows("labels"), 8)]
    data = {"path": str(write_jsonl(tmp_path / "rows.jsonl", rows)), "max_length": 24, "max_target_length": 16}
    config = transformers.T5Config(
        vocab_size=300, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.save_pretrained(tmp_path / "model")
    tokenizers.trained(300, tmp_path, (row["prompt"] for row in rows)).save_pretrained(tmp_path / "model")

    def run(strategies: Mapping[str, Any]) -> dict[str, Tensor]:
        tree = tree_of(tmp_path, tmp_path / "run", {"task": "seq2seq", "data": data}, strategies, max_steps=2)
        return ran(tree)

    plain = run({})
    opened = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "run" / "export")
    assert not torch.equal(plain[HEAD], plain["shared.weight"]) and torch.equal(opened.lm_head.weight, plain[HEAD])
    assert opened.decoder.embed_tokens.weight is opened.shared.weight
    stowed = run({"offload": {"site": "host", "weights": "streamed"}})
    assert stowed.keys() == plain.keys() and all(torch.equal(stowed[name], value) for name, value in plain.items())
    tree = tree_of(tmp_path, tmp_path / "run", {"task": "seq2seq", "data": data}, {"zero": {"stage": 3}})
    assert runs.run(load_tree(tree), Ranks(), Stop()) == 2
    assert "strategies.zero.stage = 3: the files of" in capfd.readouterr().err

    export = str(tmp_path / "run" / "export")
    filled = transformers.AutoModelForSeq2SeqLM.from_pretrained(export, device_map="meta")
    tying.untie(filled, tying.untied(filled, export))
    assert parts.fill(filled, plain, export, 0, lambda: None) is None  # read from the files one by one
    assert torch.equal(filled.lm_head.weight, stowed[HEAD])
    assert torch.equal(filled.encoder.embed_tokens.weight, stowed["shared.weight"])
