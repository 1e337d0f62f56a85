"""Training with Liger's kernels has the bits of Hugging Face's Trainer with them alone, wherever weights rest."""

import os
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.helpers.engine import LAYOUTS
from tests.helpers.models import build
from tests.helpers.sides import BATCHES, both_sides, train
from tests.helpers.small_runs import TRAVEL, by_the_trainer, make_rows_and_model, ran, rows_of, tree_of
from tests.helpers.tiny import LLAMA, run_config

if not (find_spec("liger_kernel") and "TRITON_INTERPRET" in os.environ):
    pytest.skip("needs liger-kernel and Triton's interpreter: make test-liger", allow_module_level=True)

from triton.runtime.interpreter import InterpretedFunction

from deepstow.trainer.errors import CountingError
from deepstow.trainer.model.attention import LIGER
from deepstow.trainer.model.counting import Counter
from deepstow.trainer.model.liger import computes
from deepstow.trainer.planning.facts import count_model
from deepstow.trainer.planning.plan_for import plan_for
from deepstow.trainer.run.checks import CHECKS, Before
from tests.helpers.interpreted import apply_liger

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def models_as_they_were() -> Iterator[None]:
    """Liger replaces classes and a function of Transformers' modules for all models of the process."""
    modules = [import_module(f"transformers.models.{family}.modeling_{family}") for family in LIGER]
    before = [dict(vars(module)) for module in modules]
    yield
    for module, was in zip(modules, before, strict=True):
        vars(module).update(was)


@pytest.mark.parametrize("layout", ["host, travelling", "mixed"])
def test_every_site(layout: str) -> None:
    """Among them a head that travels, whose weight Liger's loss reads without calling its module."""

    def with_liger() -> nn.Module:
        apply_liger(model=(model := build("llama")))
        return model

    both_sides(with_liger, partial(train, batches=BATCHES[:2]), [LAYOUTS[layout]], max_norm=1.0)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("models")
    make_rows_and_model(home)
    return home


WAYS: dict[str, tuple[Any, dict[str, bool]]] = {
    "as planned": ({}, {}),
    "streamed, recomputed": (TRAVEL, {}),
    "streamed, selective": ({"offload": TRAVEL["offload"], "recompute": {"policy": "selective"}}, {}),
    "streamed, loss in chunks": (
        {"offload": TRAVEL["offload"], "cross_entropy": {"chunked": True}},
        {"fused_linear_cross_entropy": False},
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run(way: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Triton's interpreter: a run of anybody's is refused without a GPU."""
    monkeypatch.setitem(CHECKS[Before.MEETING], "options", lambda run: None)  # type: ignore[arg-type]
    strategies, kernels = WAYS[way]
    said = {"use_liger_kernel": True, "liger_kernel_config": kernels, "max_steps": 2, "gradient_accumulation_steps": 1}
    tree = tree_of(home, tmp_path / "run", {}, strategies, **said)
    found = ran(tree)  # first: planning counts the functions that the process has
    model = transformers.LlamaForCausalLM.from_pretrained(home / "model")
    expected = by_the_trainer(model, tmp_path / "plain", rows_of(tree), **said)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_kernels_are_given_no_tensors_without_values() -> None:
    """Whose addresses are nowhere, on a GPU an error that ends the process."""
    model = build("llama")
    assert not computes(model)
    apply_liger(model=model, rms_norm=False, swiglu=False, fused_linear_cross_entropy=False)  # rotary alone
    with pytest.raises(CountingError, match="Liger's kernels need values"):
        plan_for(model, max_grad_norm=1.0, batch=(2, 16))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("family", LIGER)
def test_counted_bytes(family: str, bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins' are those that Liger's own functions save, unit by unit; no kernel has to run for that."""
    base = {**LLAMA, "model_type": family} | ({"head_dim": 8} if family == "qwen3" else {})
    config = run_config(base, data={"max_length": 16}, per_device_train_batch_size=2, bf16=bf16, use_liger_kernel=True)
    planned = {unit.name: unit.saved_bytes for unit in count_model(config).units}
    monkeypatch.setattr(InterpretedFunction, "run", lambda *_, **__: None)
    ids = torch.ones(2, 16, dtype=torch.long)
    mask = ids.clone()
    mask[0, -5:] = 0
    made = transformers.AutoConfig.for_model(**base, use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(made).train()
    apply_liger(model=model)
    with Counter(model) as found, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        model(input_ids=ids, labels=ids, attention_mask=mask)
    assert {unit.name: unit.saved_bytes for unit in found.units()} == planned
