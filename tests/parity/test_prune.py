"""Pruned training is plain training with a mask after each step, by bits: on every site, resumed, exported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from deepstow.trainer.data.collate import Collator
from deepstow.trainer.recipes.prune.zeros import chosen, exact, keep_zeros, replace
from tests.helpers.engine import LAYOUTS
from tests.helpers.marks import in_turns, slowly
from tests.helpers.models import build
from tests.helpers.sides import BATCHES, Plain, everything, stowed, train, unequal
from tests.helpers.small_runs import TRAVEL, by_the_trainer, make_rows_and_model, ran, rows_of, tree_of

pytestmark = pytest.mark.filterwarnings("ignore")
TAKEN = ("q_proj.weight", "down_proj.weight")
ROUNDS = {1: 0.3, 3: 0.6}  # by steps that are done


@pytest.mark.parametrize(("layout", "dtype"), in_turns(LAYOUTS, (torch.float32, torch.bfloat16)))
def test_on_every_site(layout: str, dtype: torch.dtype) -> None:
    """Against a loop that multiplies the masters by masks that it keeps. Zeros of other parameters move."""
    plain, model = [build("llama", dtype=dtype) for _ in range(2)]
    for each in (plain, model):
        next(param for name, param in each.named_parameters() if name.endswith("k_proj.weight")).data[:2] = 0.0
    loop = Plain(plain, max_norm=1.0)
    taken = [param for name, param in plain.named_parameters() if name.endswith(TAKEN)]
    masks = {param: (loop.masters[param] != 0).float() for param in taken}  # an initial value in bf16 may be zero

    @torch.no_grad()
    def mask(*_: Any) -> None:
        for param, kept in masks.items():
            param.copy_(loop.masters[param].mul_(kept))

    engine = stowed(model, {**LAYOUTS[layout], "max_norm": 1.0})
    ours = [param for name, param in model.named_parameters() if name.endswith(TAKEN)]
    keep_zeros(engine, ours)
    for step, batch in enumerate(BATCHES[:5]):
        if share := ROUNDS.get(step):
            for param, twin in zip(taken, ours, strict=True):
                masks[param][chosen(loop.masters[param].detach(), "magnitude", share)] = 0.0
                value = exact(engine, twin)
                replace(engine, twin, value.masked_fill(chosen(value, "magnitude", share), 0.0))
            mask()
        assert train(plain, loop, [batch], None, mask) == train(model, engine, [batch], None, mask)
    assert all((kept == 0).float().mean() == pytest.approx(0.6, abs=1e-3) for kept in masks.values())
    assert unequal(everything(plain, loop), everything(model, engine)) == []
    engine.close()


class Masks(transformers.TrainerCallback):
    """Keeps masks of its own, made by other code than ours, and multiplies by them after each optimizer step."""

    def __init__(self, model: Any, method: str, rows: list[Any]) -> None:
        self.model, self.method, self.rows = model, method, rows
        self.layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in n}
        self.masks = {name: torch.ones_like(layer.weight) for name, layer in self.layers.items()}

    @torch.no_grad()
    def on_step_begin(self, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
        rounds = {0: 0.5} if self.method == "2:4" else {2: 0.5 * 26 / 27, 3: 0.5}  # T is 3, in two rounds
        if (share := rounds.get(state.global_step)) is None:
            return
        squares = {name: torch.zeros(layer.in_features) for name, layer in self.layers.items()}

        def hook(name: str) -> Any:
            def add(_: Any, given: Any, out: Any) -> None:
                squares[name] += (given[0] ** 2).sum((0, 1))

            return add

        hooks = [layer.register_forward_hook(hook(name)) for name, layer in self.layers.items()]
        for row in self.rows:
            batch = Collator(0, packing=False)([row])
            self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        [hook.remove() for hook in hooks]
        for name, layer in self.layers.items():
            size = layer.weight.abs() * (squares[name].sqrt() if self.method == "wanda" else 1.0)
            groups = size if self.method == "wanda" else size.reshape(-1, 4)
            lowest = groups.argsort(dim=1, stable=True)[:, : round(share * groups.shape[1])]
            self.masks[name] = torch.ones_like(groups).scatter(1, lowest, 0.0).view(layer.weight.shape)
        self.on_optimizer_step()

    @torch.no_grad()
    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        for name, layer in self.layers.items():
            layer.weight.mul_(self.masks[name])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("models")
    make_rows_and_model(home)
    return home


def pruned(home: Path, run: Path, method: str, strategies: Any = None, **training: Any) -> dict[str, Any]:
    """The config of a run that prunes."""
    prune = {"method": method, "calibration_rows": 3, **({} if method == "2:4" else {"rounds": 2})}
    return tree_of(home, run, {"prune": prune}, strategies, **training)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["wanda", slowly("2:4")])
def test_as_a_loop_that_masks(home: Path, tmp_path: Path, method: str) -> None:
    """Plainly, streamed, and streamed from the checkpoint of the step before a round and of one between two."""
    plain = pruned(home, tmp_path / "plain", method)
    found, rows = ran(plain), rows_of(plain)
    model = transformers.AutoModelForCausalLM.from_pretrained(home / "model")
    masks = Masks(model, method, [rows[index] for index in range(3)])
    stock_weights = by_the_trainer(model, tmp_path, rows, [masks])
    assert unequal(found, {name: each for name, each in stock_weights.items() if name in found}) == []
    for name, mask in masks.masks.items():
        assert int((found[f"{name}.weight"] == 0).sum()) == int((mask == 0).sum()) > 0
    saves = {"save_strategy": "steps", "save_steps": 1}
    assert unequal(found, ran(pruned(home, tmp_path / "travels", method, TRAVEL, **saves))) == []
    for step in (2, 4) if method == "wanda" else ():
        again = {"resume_from_checkpoint": str(tmp_path / "travels" / f"checkpoint-{step}")}
        assert unequal(found, ran(pruned(home, tmp_path / f"again-{step}", method, TRAVEL, **again))) == []
    records = [json.loads(line) for line in (tmp_path / "plain" / "metrics.jsonl").read_text().splitlines()]
    shares = [record for record in records if "sparsity" in record]
    assert shares[-1]["sparsity/mlp.up_proj"] == shares[-1]["sparsity"] == pytest.approx(0.5, abs=0.01)
    expected = [0.5] * 2 if method == "2:4" else [0.5 * 26 / 27, 0.5, 0.5]
    assert [record["sparsity"] for record in shares] == pytest.approx(expected, abs=0.02)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain" / "export")
    assert (stock.model.layers[0].mlp.up_proj.weight == 0).float().mean() == pytest.approx(0.5, abs=0.02)
