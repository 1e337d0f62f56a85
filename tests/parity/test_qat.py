"""Training with weights that forward rounds: a loop of torchao by bits, with weights that travel, resumed, exported."""

import json
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import linear

from deepstow.strategies.state.sealed import read
from deepstow.trainer.run.exporting import results
from tests.helpers.engine import LAYOUTS
from tests.helpers.models import build
from tests.helpers.sides import BATCHES, both_sides, train, unequal
from tests.helpers.small_runs import TRAVEL, by_the_trainer, make_rows_and_model, ran, rows_of, tree_of

pytestmark = pytest.mark.filterwarnings("ignore")
GROUP = 16
NO_TORCHAO = "needs torchao: pip install 'deepstow[torchao]'"


TRAVELLING = [name for name in LAYOUTS if "travelling" in name]


class Rounded(nn.Linear):
    """Straight through, as torchao's layer."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight + ((self.weight * 8).round() / 8 - self.weight).detach(), self.bias)


@pytest.mark.parametrize(("layout", "dtype"), zip(TRAVELLING, cycle((torch.float32, torch.bfloat16))))
def test_computed_weights_on_every_site(layout: str, dtype: torch.dtype) -> None:
    """Products with a weight that forward has computed anew from one that comes and goes."""

    def computed() -> nn.Module:
        model = build("llama", dtype=dtype)
        for each in model.modules():
            if type(each) is nn.Linear:
                each.__class__ = Rounded
        return model

    both_sides(computed, partial(train, batches=BATCHES[:3]), [LAYOUTS[layout]], max_norm=1.0)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("models")
    make_rows_and_model(home)
    return home


def rounded(home: Path, run: Path, strategies: Any = None, **training: Any) -> dict[str, Any]:
    """The config of a run that rounds weights in forward."""
    quantize = {"formats": ["int4_group"], "group_size": GROUP, "qat": "int4_group"}
    return tree_of(home, run, {"data": {"eval_fraction": 0.3}, "quantize": quantize}, strategies, **training)


@pytest.mark.slow
def test_as_a_loop_of_torchao(home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Hugging Face's Trainer over a model that torchao has prepared as its documentation does. Then with weights that
    travel, and from a checkpoint of that. What is exported in 4 bits is what forward has computed with.
    """
    pytest.importorskip("torchao", reason=NO_TORCHAO)
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    run = tmp_path / "plain"
    found = ran(rounded(home, run))
    said = capfd.readouterr().out
    assert "largest difference of a logit 0.0e+00" in said and "int4_group, trained for" in said
    model = transformers.AutoModelForCausalLM.from_pretrained(home / "model")
    rounds = QATConfig(
        weight_config=IntxFakeQuantizeConfig(torch.int4, group_size=GROUP, is_symmetric=True, scale_precision=None)
    )
    quantize_(model, rounds, filter_fn=lambda each, name: isinstance(each, nn.Linear) and name != "lm_head")
    stock_weights = by_the_trainer(model, tmp_path, rows_of(rounded(home, run)))
    assert unequal(found, {name: each for name, each in stock_weights.items() if name in found}) == []

    saves = {"save_strategy": "steps", "save_steps": 1}
    assert unequal(found, ran(rounded(home, tmp_path / "travels", TRAVEL, **saves))) == []
    again = {"resume_from_checkpoint": str(tmp_path / "travels" / "checkpoint-2")}
    assert unequal(found, ran(rounded(home, tmp_path / "again", TRAVEL, **again))) == []

    four = transformers.AutoModelForCausalLM.from_pretrained(run / "export-int4_group")
    own, stock = dict(model.named_modules()), dict(four.named_modules())
    trained_for = [name for name, each in own.items() if hasattr(each, "weight_fake_quantizer")]
    assert trained_for == [name for name, each in stock.items() if hasattr(getattr(each, "weight", None), "qdata")]
    for name in trained_for:
        computed = own[name].weight_fake_quantizer(own[name].weight)
        assert torch.equal(computed, stock[name].weight.dequantize())
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = next(record["eval_perplexity"] for record in records if "eval_perplexity" in record)
    exact, after = read(run / "export-int4_group", results.FURTHER).about["perplexity"]
    assert after == pytest.approx(logged, rel=1e-5) != exact
    assert "trained for it (QAT)" in (run / "export-int4_group" / "README.md").read_text()
    assert "these are the exact ones" in (run / "export" / "README.md").read_text()
