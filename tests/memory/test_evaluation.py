"""What an evaluation takes at once, predicted and measured; how many rows it takes at a time within a budget."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from torch import Tensor, nn

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.plan import Plan
from deepstow.strategies.engine import stow
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.machine.profiles import profile
from deepstow.trainer.planning import evaluation, facts
from deepstow.trainer.planning.from_config import plan_of
from deepstow.trainer.planning.plan_for import plan_for
from deepstow.trainer.run.collated import collated
from tests.helpers.live import Live
from tests.helpers.moves import forget_run, made
from tests.helpers.tiny import GPT2, LLAMA, MIXTRAL, VOCAB, run_config

WORDS, LENGTH, ROWS = 4096, 64, 3
ON_HOST: Mapping[str, Any] = {"offload": {"site": "host", "weights": "streamed"}}
CASES: Mapping[str, Mapping[str, Any]] = {
    "autocast": {"bf16": True},
    "stowed in bf16": {"bf16": True, "strategies": ON_HOST},
    "experts": {"config": MIXTRAL},
    "smoothed labels": {"label_smoothing_factor": 0.1},
}


def measured(ranks: Ranks, configs: Mapping[str, RunConfig]) -> dict[str, int]:
    """The most bytes that were alive at once of what an evaluation of one batch has made."""
    found, ids = {}, [1 + place % (VOCAB - 1) for place in range(LENGTH)]
    for case, config in configs.items():
        trainer = made(ranks, config, [{"input_ids": ids, "labels": ids}] * ROWS)
        trainer.evaluate()  # the first one prepares
        with Live() as live:
            trainer.evaluate()
        trainer.accelerator.free_memory()
        forget_run()
        found[case] = live.peak
    return found


def config_of(case: str, folder: Path) -> RunConfig:
    given = dict(CASES[case])
    model = {**given.pop("config", LLAMA), "vocab_size": WORDS}
    given |= {"output_dir": folder, "eval_strategy": "epoch", "per_device_eval_batch_size": ROWS}
    return run_config(model, data={"eval_fraction": 0.5, "max_length": LENGTH}, **given)


@pytest.mark.ranks
def test_what_it_takes_is_what_is_planned(tmp_path: Path) -> None:
    configs = {case: config_of(case, tmp_path) for case in CASES}
    for case, found in run_world(1, measured, configs, deepspeed=False).items():
        assert found == pytest.approx(evaluation.count(configs[case], ROWS).of(ROWS), rel=0.05), case
        assert found < 6.5 * ROWS * LENGTH * WORDS, "logits, under autocast in fp32 as well, and a chunk of them"


@pytest.mark.parametrize(("rows", "chunked"), [(None, True), (16, False)])
def test_a_plan_made_in_python_counts_it(rows: int | None, chunked: bool) -> None:
    """Of words so many that the casts of the logits are most of it."""
    config = transformers.LlamaConfig(**{**LLAMA, "vocab_size": 16_000, "use_cache": False})
    model = transformers.LlamaForCausalLM(config).bfloat16()
    how: dict[str, Any] = {"site": "host", "weights": "streamed", "cross_entropy": {"chunked": chunked}}
    plan = plan_for(model, batch=(1, LENGTH), max_grad_norm=1.0, eval_rows=rows, **how)
    taken = rows or evaluation.DEFAULT
    assert plan.facts.run.evaluation_rows == taken
    optimizer = stow(model, plan, device="cpu")
    model.eval()
    ids = torch.zeros(taken, LENGTH, dtype=torch.long)
    with torch.no_grad(), Live() as live:
        model(input_ids=ids, labels=ids, attention_mask=torch.zeros_like(ids))
    optimizer.close()
    assert plan.peak(Tier.DEVICE) == pytest.approx(optimizer.device_bytes + live.peak, rel=0.01)


def test_a_plan_made_in_python_leaves_room_for_it() -> None:
    """Rows that nobody named are lowered; those that are named move the state away, or are refused."""
    config = transformers.LlamaConfig(**{**LLAMA, "vocab_size": 2048, "hidden_size": 128, "use_cache": False})
    model = transformers.LlamaForCausalLM(config)

    def planned(rows: int | None, budget: int) -> Plan:
        return plan_for(model, batch=(1, LENGTH), max_grad_norm=1.0, gpu_memory=budget, eval_rows=rows)

    budget = planned(0, 1 << 40).peak(Tier.DEVICE)
    beside = planned(None, budget)
    assert 0 < beside.facts.run.evaluation_rows < evaluation.DEFAULT
    away = planned(evaluation.DEFAULT, budget)
    assert away.facts.run.evaluation_rows == evaluation.DEFAULT and away.beside() < beside.beside()
    assert max(beside.peak(Tier.DEVICE), away.peak(Tier.DEVICE)) <= budget
    with pytest.raises(ValueError, match=r"^eval_rows = 512: .* beside training . fit$"):
        planned(512, budget)


class Pairs(nn.Module):
    """Its forward takes an even number of rows: each other one is compared with the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4096, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.head = nn.Linear(64, 4096, bias=False)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        chosen, rejected = self.head(hidden).chunk(2)
        return {"loss": (chosen - rejected).mean()}


def test_a_forward_that_takes_no_single_row_is_planned_without_it() -> None:
    """Where the usual number does not fit, one row is counted, too, which such a forward cannot have."""

    def planned(**given: Any) -> Plan:
        return plan_for(Pairs(), batch={"input_ids": torch.zeros(2, 128, dtype=torch.long)}, max_grad_norm=1.0, **given)

    alone = planned(eval_rows=0)
    assert planned().facts.run.evaluation_rows == evaluation.DEFAULT
    tight = planned(gpu_memory=alone.peak(Tier.DEVICE))
    assert tight.facts.run.evaluation_rows == 0 and tight.peak(Tier.DEVICE) <= alone.peak(Tier.DEVICE)


def test_held_out_rows_beyond_the_models_positions_are_refused() -> None:
    """Shorter rows of training are fine; an index error would end the first evaluation."""
    config = run_config(GPT2, data={"max_length": 128}, use_cpu=True)
    trained, held_out = (Dataset.from_list([{"input_ids": [1] * n, "labels": [1] * n}] * 4) for n in (16, 128))
    assert facts.counted(collated(config, trained).config).units
    plan: Any = SimpleNamespace(facts=SimpleNamespace(run=SimpleNamespace(stages=1)))
    with pytest.raises(ConfigError, match=r"data\.max_length = 128: the model has 64 positions"):
        evaluation.rows(collated(config, held_out).config, plan)


@cache
def within(budget: str, rows: int | None) -> tuple[RunConfig, Plan]:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8, "max_position_embeddings": 1024}
    config = run_config(
        {**LLAMA, **sizes, "vocab_size": 32_000}, bf16=True, data={"max_length": 512, "eval_fraction": 0.1},
        per_device_train_batch_size=1, per_device_eval_batch_size=rows, strategies={"offload": {"gpu_memory": budget}},
    )  # fmt: skip
    return config, plan_of(config, Ranks(), profile("rtx4090-pcie4"))


@pytest.mark.slow
def test_rows_that_nobody_set_are_lowered_until_they_fit() -> None:
    config, plan = within("400MiB", None)
    rows, peak, line = evaluation.rows(config, plan)
    counted = evaluation.count(config, evaluation.DEFAULT)
    assert 1 < rows < evaluation.DEFAULT and line.startswith(f"evaluation: {rows} rows at a time, since 8 take ")
    room = (400 << 20) - plan.beside()
    assert counted.of(rows) <= room < counted.of(rows + 1)
    assert peak == plan.beside() + counted.of(rows) <= 400 << 20
    assert evaluation.rows(*within("2GiB", None)).rows == evaluation.DEFAULT


def test_rows_that_the_config_sets_are_refused_with_the_most_that_fit() -> None:
    config, plan = within("400MiB", None)
    most = evaluation.rows(config, plan).rows

    def of(rows: int) -> RunConfig:
        training = config.training.model_copy(update={"per_device_eval_batch_size": rows})
        return config.model_copy(update={"training": training})

    assert evaluation.rows(of(most), plan).rows == most
    with pytest.raises(ConfigError, match=f"per_device_eval_batch_size = {most + 1}: .* that fits is {most}$"):
        evaluation.rows(of(most + 1), plan)


def test_a_row_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training by chunks of rows may take less than the logits of one row to evaluate."""
    monkeypatch.setattr(evaluation, "room_of", lambda *_: 1 << 20)
    with pytest.raises(ConfigError, match=r"^evaluation: one row of 512 tokens takes .*; lower data.max_length, "):
        evaluation.rows(*within("400MiB", None))
