"""Training with weights that forward rounds: a loop of torchao by bits, with weights that travel, resumed, exported."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear

from strategies.core.sealed import read
from tests.e2e.commands import write_jsonl
from tests.helpers.engine import LAYOUTS
from tests.helpers.models import build
from tests.helpers.sides import BATCHES, Plain, everything, stowed, train, unequal
from trainer.config.load import load_tree
from trainer.data import pydoc_rows
from trainer.data import tokenizer as tokenizers
from trainer.data.collate import Collator
from trainer.dist.ranks import Ranks
from trainer.dist.stopping import Stop
from trainer.run import further
from trainer.run import run as runs
from trainer.run.order import read_data

pytestmark = pytest.mark.filterwarnings("ignore")
LENGTH, WORDS, STEPS, GROUP = 24, 300, 4, 16
NO_TORCHAO = "needs torchao: pip install 'deepstow[torchao]'"
TRAVEL = {"offload": {"site": "host", "weights": "streamed", "prefetch": 0}, "recompute": {"policy": "full"}}


class Rounded(nn.Linear):
    """Straight through, as torchao's layer."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight + ((self.weight * 8).round() / 8 - self.weight).detach(), self.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_computed_weights_on_every_site(layout: str, dtype: torch.dtype) -> None:
    """Products with a weight that forward has computed anew from one that comes and goes."""
    plain, model = [build("llama", dtype=dtype) for _ in range(2)]
    for each in (*plain.modules(), *model.modules()):
        if type(each) is nn.Linear:
            each.__class__ = Rounded
    loop, engine = Plain(plain, max_norm=1.0), stowed(model, {**LAYOUTS[layout], "max_norm": 1.0})
    for batch in BATCHES[:3]:
        assert train(plain, loop, [batch], None) == train(model, engine, [batch], None)
    assert unequal(everything(plain, loop), everything(model, engine)) == []
    engine.close()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows and a model."""
    home = tmp_path_factory.mktemp("models")
    texts = [{"text": row["text"]} for _, row in islice(pydoc_rows.rows("labels"), 16)]
    write_jsonl(home / "rows.jsonl", texts)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=0, eos_token_id=1, max_position_embeddings=LENGTH, initializer_range=0.3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(home / "model")
    tokenizers.trained(WORDS, home, (row["text"] for row in texts)).save_pretrained(home / "model")
    return home


SAID: dict[str, Any] = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": STEPS, "learning_rate": 1e-2,
    "use_cpu": True, "report_to": "none", "logging_steps": 1, "save_strategy": "no",
}  # fmt: skip


def tree_of(home: Path, run: Path, strategies: Any = None, **training: Any) -> dict[str, Any]:
    return {
        "model": {"name_or_path": str(home / "model")},
        "data": {"path": str(home / "rows.jsonl"), "max_length": LENGTH, "eval_fraction": 0.3},
        "training": {**SAID, "output_dir": str(run), **training},
        "quantize": {"formats": ["int4_group"], "group_size": GROUP, "qat": "int4_group"},
        "strategies": strategies or {},
    }


def ran(home: Path, run: Path, strategies: Any = None, **training: Any) -> dict[str, Tensor]:
    """The weights that a run exports."""
    assert runs.run(load_tree(tree_of(home, run, strategies, **training)), Ranks(), Stop()) == 0
    return load_file(run / "export" / "model.safetensors")


@pytest.mark.slow
def test_as_a_loop_of_torchao(home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Hugging Face's Trainer over a model that torchao has prepared as its documentation does. Then with weights that
    travel, and from a checkpoint of that. What is exported in 4 bits is what forward has computed with.
    """
    pytest.importorskip("torchao", reason=NO_TORCHAO)
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    run = tmp_path / "plain"
    found = ran(home, run)
    said = capfd.readouterr().out
    assert "largest difference of a logit 0.0e+00" in said and "int4_group, trained for" in said
    prepared: Any = read_data(load_tree(tree_of(home, run)), Ranks(), quiet=True)[1]
    given = {key: value for key, value in SAID.items() if key != "report_to"}
    arguments = transformers.TrainingArguments(
        str(tmp_path), **given, report_to="none", remove_unused_columns=False, optim="adamw_torch_fused"
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(home / "model")
    rounds = QATConfig(
        weight_config=IntxFakeQuantizeConfig(torch.int4, group_size=GROUP, is_symmetric=True, scale_precision=None)
    )
    quantize_(model, rounds, filter_fn=lambda each, name: isinstance(each, nn.Linear) and name != "lm_head")
    collate = Collator(0, packing=False)
    transformers.Trainer(model=model, args=arguments, train_dataset=prepared.train, data_collator=collate).train()
    assert unequal(found, {name: each.detach() for name, each in model.named_parameters() if name in found}) == []

    saves = {"save_strategy": "steps", "save_steps": 1}
    assert unequal(found, ran(home, tmp_path / "travels", TRAVEL, **saves)) == []
    again = {"resume_from_checkpoint": str(tmp_path / "travels" / "checkpoint-2")}
    assert unequal(found, ran(home, tmp_path / "again", TRAVEL, **again)) == []

    four = transformers.AutoModelForCausalLM.from_pretrained(run / "export-int4_group")
    own, stock = dict(model.named_modules()), dict(four.named_modules())
    trained_for = [name for name, each in own.items() if hasattr(each, "weight_fake_quantizer")]
    assert trained_for == [name for name, each in stock.items() if hasattr(getattr(each, "weight", None), "qdata")]
    for name in trained_for:
        computed = own[name].weight_fake_quantizer(own[name].weight)
        assert torch.equal(computed, stock[name].weight.dequantize())
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = next(record["eval_perplexity"] for record in records if "eval_perplexity" in record)
    exact, after = read(run / "export-int4_group", further.KIND).about["perplexity"]
    assert after == pytest.approx(logged, rel=1e-5) != exact
    assert "trained for it (QAT)" in (run / "export-int4_group" / "README.md").read_text()
    assert "these are the exact ones" in (run / "export" / "README.md").read_text()
