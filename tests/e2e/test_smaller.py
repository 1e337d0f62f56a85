"""The benchmark of smaller models: a row for each export, with what it has and what it cost."""

import json
from pathlib import Path

import pytest
import yaml

from deepstow.benchmarks import smaller
from tests.e2e.commands import write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_a_row_for_each_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    from deepstow.trainer.data import tokenizer as tokenizers

    pytest.importorskip("bitsandbytes")
    monkeypatch.setitem(smaller.WAYS, "none", ["quantize={formats: [int8, nf4]}"])  # with torchao installed or not
    texts = [{"text": f"the {number} of {number * 7} and more"} for number in range(40)]
    write_jsonl(tmp_path / "rows.jsonl", texts)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "teacher")
    tokenizers.trained(300, tmp_path, (row["text"] for row in texts)).save_pretrained(tmp_path / "teacher")
    given = {
        "model": {"config": {"model_type": "llama"}, "tokenizer": "none"},
        "data": {"path": str(tmp_path / "rows.jsonl"), "max_length": 16, "eval_fraction": 0.2},
        "training": {"output_dir": "unused", "use_cpu": True, "report_to": "none"},
    }
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(given))
    where = [
        "--teacher",
        str(tmp_path / "teacher"),
        "--config",
        str(tmp_path / "given.yaml"),
        "--out",
        str(tmp_path / "out"),
    ]
    few = ["--steps", "2", "--student-steps", "1", "--only"]
    assert smaller.main([*where, *few, "none", "layers 34 %"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert [(row["way"], row["export"]) for row in rows] == [
        ("none", "export"), ("none", "export-int8"), ("none", "export-nf4"), ("layers 34 %", "export"),
    ]  # fmt: skip
    exact, eight, four, layers = rows
    assert exact["parameters"] == eight["parameters"] > layers["parameters"]
    assert exact["bytes"] > eight["bytes"] > four["bytes"]
    assert all(row["perplexity before"] > 1 and row["after"] > 1 and row["tokens/s"] > 0 for row in rows)
    assert smaller.main([*where, "--seeds", "42", "43", *few, "none", "student, taught"]) == 0  # goes on
    after = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert after[:4] == rows and [(row["way"], row["seed"]) for row in after[4:]] == [
        ("student, taught", 42), *[("none", 43)] * 3, ("student, taught", 43),
    ]  # fmt: skip
    assert after[4]["parameters"] < exact["parameters"] and after[5]["after"] != exact["after"]
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    mean = (exact["after"] + after[5]["after"]) / 2
    assert len(lines) == 7 and f"| {mean:,.1f} |" in lines[2] and lines[2].endswith("2 |")
    assert (tmp_path / "out" / "smaller.png").read_bytes().startswith(b"\x89PNG")
