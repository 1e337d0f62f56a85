"""A config and a live model are two doors to a plan. What both know is the same, field by field, and so is the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from deepstow.strategies.core.compose import compose
from deepstow.strategies.core.facts import Precision, Work
from deepstow.strategies.planner.activation_policy import work_seconds
from deepstow.strategies.planner.step_cost import plan_cost
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.machine.profiles import profile
from deepstow.trainer.model import build
from deepstow.trainer.model.params import decay_groups
from deepstow.trainer.planning.facts import cast_weights, config_of, gather
from deepstow.trainer.planning.plan_for import plan_for
from deepstow.trainer.tasks.task import TASKS
from tests.helpers.tiny import GPT2, LLAMA, MIXTRAL, run_config

ROWS = 3
MACHINE = profile("rtx4090-pcie4")
# What only a config says, and why nothing is planned otherwise for it.
MAY_DIFFER = {
    "run.optim": "a live model's plan is told how many numbers the rule keeps, which is all that is planned with",
}
T5 = {
    "model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 128,
    "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
LORA = {"lora": {"r": 4, "target_modules": ["q_proj", "v_proj"]}}
HALF = {"dtype": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and how it is trained. ``live``: what a loop of one's own says of it."""

    config: Mapping[str, Any] = field(default_factory=lambda: LLAMA)
    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    offload: Mapping[str, Any] = field(default_factory=lambda: {"site": "device", "weights": "resident"})  # no search
    task: str = "sft"
    live: Mapping[str, Any] = field(default_factory=dict)

    @property
    def run(self) -> RunConfig:
        training = {"per_device_train_batch_size": ROWS, **self.training}
        made = run_config(self.config, model=self.model, strategies={"offload": self.offload}, **training)
        return made.model_copy(update={"task": self.task})


CASES = {
    "llama": Case({**LLAMA, "num_hidden_layers": 3}, offload={"gpu_memory": "1MiB"}),
    "gpt2, tied": Case(GPT2, training={"gradient_accumulation_steps": 2, "max_grad_norm": 0.0}),
    "experts": Case(MIXTRAL, HALF, {"bf16": True}),
    "t5": Case(T5, task="seq2seq"),
    "adapters": Case(model=LORA),
    "recomputed, sgd": Case(training={"gradient_checkpointing": True, "optim": "sgd"}, live={"moments": 0}),
    "fp16": Case(training={"fp16": True}),
}


def groups_of(model: Any) -> list[dict[str, Any]]:
    """As Hugging Face's Trainer divides them."""
    number = decay_groups(model)
    trained = [(number[name], param) for name, param in model.named_parameters() if param.requires_grad]
    groups = [[param for other, param in trained if other == each] for each in (0, 1)]
    return [{"params": params} for params in groups if params]


class Inputs:
    """Called as the model, it returns what the model would be given."""

    def __init__(self, model: Any) -> None:
        self.config, self.forward = model.config, model.forward

    def __call__(self, **given: Any) -> dict[str, Any]:
        return given


def inputs_of(config: RunConfig, model: Any) -> dict[str, Any]:
    """A padded batch of the task, as its Trainer calls the model."""
    task, ids = TASKS[config.task], torch.zeros(ROWS, 16, dtype=torch.long)
    found: dict[str, Any] = task.forward(Inputs(model), config)(
        input_ids=ids, attention_mask=torch.zeros_like(ids), **task.targets(ids, config)
    )
    return found


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Paths of all fields that are not equal, whichever there are."""
    if is_dataclass(one) and type(one) is type(other):
        for each in fields(one):
            yield from differences(getattr(one, each.name), getattr(other, each.name), f"{path}.{each.name}")
    elif isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{path}.{index}")
    elif one != other:
        yield path.removeprefix(".")


@pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", CASES)
def test_both_doors_know_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # no counts of an earlier run
    case = CASES[name]
    config = case.run
    facts = gather(config, 1, 1, MACHINE)

    model: Any = build.build(config.model, config_of(config), seed=0, partitioned=False, task=TASKS[case.task])
    cast_weights(config, model)
    if config.training.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    batch = (ROWS, 16) if case.task == "sft" else inputs_of(config, model)
    with torch.autocast("cpu", torch.float16, enabled=bool(config.training.fp16)):
        plan = plan_for(
            model, groups_of(model), batch=batch, machine=MACHINE, max_grad_norm=config.training.max_grad_norm,
            eval_rows=0, accumulation=config.training.gradient_accumulation_steps, **case.offload, **case.live,
        )  # fmt: skip
    assert set(differences(facts, plan.facts)) <= MAY_DIFFER.keys()
    assert plan.layout == compose(config.strategies, facts).layout
    cost = plan_cost(plan)
    assert cost is not None and cost.seconds > 0
    assert plan.facts.run.forward_flops > 0 and plan.facts.run.accelerated


def test_a_model_without_storage_counts_as_on_the_cpu() -> None:
    """A 70 B model can be planned in a loop of one's own before it is loaded."""
    config = run_config(LLAMA)
    there, here = (
        build.build(config.model, config_of(config), seed=0, partitioned=False, on_meta=on_meta)
        for on_meta in (True, False)
    )
    plans = [plan_for(model, batch=(2, 16), max_grad_norm=1.0, machine=MACHINE) for model in (there, here)]
    assert plans[0].facts == plans[1].facts
    assert {each.device.type for each in there.parameters()} == {"meta"}, "left as it was"


def test_autocast_is_computed_with_at_its_rate() -> None:
    """As any Trainer with bf16=True does it: weights and gradients in fp32, products in bf16."""
    config = run_config(LLAMA)
    model = build.build(config.model, config_of(config), seed=0, partitioned=False)
    plain = plan_for(model, eval_rows=0, batch=(2, 16), max_grad_norm=1.0, machine=MACHINE).facts
    with torch.autocast("cpu", torch.bfloat16):
        cast = plan_for(model, eval_rows=0, batch=(2, 16), max_grad_norm=1.0, machine=MACHINE).facts
    assert (cast.run.precision, cast.run.computes_in) == (Precision.FP32, Precision.BF16)
    assert {param.dtype for param in cast.params} == {"float32"}
    assert cast.units != plain.units
    products = Work(flops=1 << 40)
    assert MACHINE.rates is not None
    assert (
        work_seconds(cast)(products) == MACHINE.rates.seconds(products, Precision.BF16) < work_seconds(plain)(products)
    )
