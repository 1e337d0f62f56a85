"""Exports in few bits: what anyone makes of the exact export, what they cost, made again where missing, refused."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

from deepstow.strategies.engine.tensors.quantised import keep_packing
from deepstow.strategies.state.sealed import read
from deepstow.trainer.config.load import load_tree
from deepstow.trainer.data import pydoc_rows
from deepstow.trainer.data import tokenizer as tokenizers
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.stopping import Stop
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.planning import from_config
from deepstow.trainer.run import session as runs
from deepstow.trainer.run.data import read_data
from deepstow.trainer.run.exporting import results
from tests.e2e.commands import write_jsonl
from tests.helpers.sides import unequal

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.filterwarnings("ignore")
LENGTH, WORDS = 24, 300


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows and a tokenizer."""
    home = tmp_path_factory.mktemp("rows")
    texts = [{"text": row["text"]} for _, row in islice(pydoc_rows.rows("labels"), 24)]
    write_jsonl(home / "rows.jsonl", texts)
    tokenizers.trained(WORDS, home, (row["text"] for row in texts)).save_pretrained(home / "words")
    return home


def tree_of(home: Path, run: Path, **quantize: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": WORDS, "max_position_embeddings": LENGTH, "initializer_range": 0.3}
    training = {
        "output_dir": str(run), "per_device_train_batch_size": 2, "max_steps": 3, "use_cpu": True, "report_to": "none",
        "save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "learning_rate": 1e-2,
        "resume_from_checkpoint": "auto", "per_device_eval_batch_size": 3,
    }  # fmt: skip
    return {
        "model": {"config": config | sizes, "tokenizer": str(home / "words")},
        "data": {"path": str(home / "rows.jsonl"), "max_length": LENGTH, "eval_fraction": 0.3},
        "training": training,
        "quantize": {"formats": ["int8", "nf4"], **quantize},
    }


def perplexity_by_rows(model: Any, rows: Any) -> float:
    """One row at a time, as a plain loop."""
    total, count = 0.0, 0
    for row in rows:
        ids, labels = torch.tensor(row["input_ids"])[None], torch.tensor(row["labels"])[1:]
        with torch.no_grad():
            found = cross_entropy(model(ids).logits[0, :-1], labels, reduction="none", ignore_index=-100)
        total, count = total + float(found.sum()), count + int((labels != -100).sum())
    return float(torch.tensor(total / count).exp())


def test_exports_are_those_of_anyone(home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Stock Transformers opens each, with the bits of the exact export as it quantises that. The numbers that are said
    are those of a plain loop. What is damaged is made again, alone and without a step of training.
    """
    run, tree = tmp_path / "run", tree_of(home, tmp_path / "run")
    assert runs.run(load_tree(tree), Ranks(), Stop()) == 0
    assert capfd.readouterr().out.count("perplexity") >= 2
    rows, ids = read_data(load_tree(tree), Ranks(), quiet=True)[1].eval, torch.arange(20)[None]
    exact = transformers.AutoModelForCausalLM.from_pretrained(run / "export")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = next(record["eval_perplexity"] for record in records if "eval_perplexity" in record)
    ways = {
        "int8": transformers.BitsAndBytesConfig(load_in_8bit=True),
        "nf4": transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    }
    sizes = {}
    for name, how in ways.items():
        stock = transformers.AutoModelForCausalLM.from_pretrained(run / f"export-{name}")
        own = transformers.AutoModelForCausalLM.from_pretrained(
            run / "export", quantization_config=how, device_map={"": "cpu"}
        )
        assert unequal(stock.state_dict(), own.state_dict()) == []
        keep_packing(stock)  # a forward may pack weights anew, and then computes in bf16
        assert not torch.equal(stock(ids).logits, exact(ids).logits)
        before, after = read(run / f"export-{name}", results.FURTHER).about["perplexity"]
        assert before == pytest.approx(logged, rel=1e-5)
        assert before == pytest.approx(perplexity_by_rows(exact, rows), rel=1e-5)
        rounds = 1e-2 if name == "int8" else 1e-5  # which columns of inputs are outliers depends on the batch
        assert after == pytest.approx(perplexity_by_rows(stock, rows), rel=rounds) and after != before
        card = (run / f"export-{name}" / "README.md").read_text()
        assert f"| {before:.2f} |" in card and f"| {after:.2f} |" in card
        sizes[name] = (run / f"export-{name}" / "model.safetensors").stat().st_size
    assert sizes["nf4"] < sizes["int8"] < (run / "export" / "model.safetensors").stat().st_size
    whole = run / "export-int8" / "manifest.json"
    stamp, lines = whole.stat().st_mtime_ns, (run / "metrics.jsonl").read_text()
    (run / "export-nf4" / "config.json").unlink()
    for _ in range(2):  # then nothing is left to do
        assert runs.run(load_tree(tree), Ranks(), Stop()) == 0
        assert results.missing(load_tree(tree)) == [] and whole.stat().st_mtime_ns == stamp
    assert (run / "metrics.jsonl").read_text() == lines


@pytest.mark.slow
def test_by_group_as_torchao_does_it(home: Path, tmp_path: Path) -> None:
    """Stock Transformers opens each, with the parts of every weight that anyone gets; the last bits cost the most."""
    pytest.importorskip("torchao")
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    run, names = tmp_path / "run", {"int8_group": torch.int8, "int4_group": torch.int4}
    tree = tree_of(home, run, formats=[*names], group_size=32)
    assert runs.run(load_tree(tree), Ranks(), Stop()) == 0
    rows, worse = read_data(load_tree(tree), Ranks(), quiet=True)[1].eval, []
    for name, dtype in names.items():
        stock = transformers.AutoModelForCausalLM.from_pretrained(run / f"export-{name}")
        how = transformers.TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=dtype, granularity=PerGroup(32)))
        own = transformers.AutoModelForCausalLM.from_pretrained(run / "export", quantization_config=how)
        weight, same = (each.model.layers[1].mlp.down_proj.weight for each in (stock, own))
        assert weight.scale.shape == (64, 128 // 32) and weight.qdata.abs().max() <= (127 if dtype is torch.int8 else 8)
        assert torch.equal(weight.qdata, same.qdata) and torch.equal(weight.scale, same.scale)
        before, after = read(run / f"export-{name}", results.FURTHER).about["perplexity"]
        assert after == pytest.approx(perplexity_by_rows(stock, rows), rel=1e-5) and after != before
        assert "by torchao" in (run / f"export-{name}" / "README.md").read_text()
        worse.append(abs(after - before))
    assert worse[0] < worse[1]


@pytest.mark.parametrize(("change", "line"), [
    ({}, "quantize.group_size = 48: does not divide the 64 inputs of model.layers.0.self_attn.q_proj; 16 does"),
    ({"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 4}, "and a gpt2 model has none; write int8"),
])  # fmt: skip
def test_groups_that_cannot_be(home: Path, tmp_path: Path, change: dict[str, Any], line: str) -> None:
    tree = tree_of(home, tmp_path, formats=["int4_group"], group_size=48)
    if change:
        tree["model"]["config"] = {"vocab_size": WORDS, **change}
    with pytest.raises(ConfigError, match=line):
        results.refuse(load_tree(tree))


@pytest.mark.parametrize(
    ("section", "change", "line"),
    [
        ("quantize", {"formats": ["int4"]}, "quantize.formats = "),
        ("quantize", {"formats": ["nf4", "nf4"]}, "must be names, all different"),
        ("data", {"eval_fraction": 0.0}, "quantize says what it costs on held-out rows; write a fraction"),
        ("model", {"lora": {"r": 2, "export": "adapter"}}, "adapters are exported without their base"),
    ],
)
def test_refused(home: Path, tmp_path: Path, section: str, change: dict[str, Any], line: str) -> None:
    tree = tree_of(home, tmp_path)
    if section == "data":
        tree["training"] |= {"eval_strategy": "no"}
    if section == "model":
        change = {"name_or_path": "some", "config": None, **change}
    with pytest.raises(ConfigError) as error:
        load_tree({**tree, section: {key: each for key, each in (tree[section] | change).items() if each is not None}})
    (found,) = error.value.lines
    assert line in found


def test_without_the_library(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepstow.trainer.recipes.quantize.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        from_config.check_options(load_tree(tree_of(home, tmp_path, formats=["nf4", "int4_group"])), 1)
    for line, (name, extra) in zip(error.value.lines, {"nf4": "qlora", "int4_group": "torchao"}.items(), strict=True):
        assert line.endswith(f"install it with: pip install 'deepstow[{extra}]'") and f'formats = ["{name}"]' in line
