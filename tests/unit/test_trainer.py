"""The loop on real processes: what evaluation means, what a step is made of, and who may touch model and gradients.

Everything here goes through ``deepstow.trainer.run.building.make_trainer`` on rows made by hand.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.data.packing import MASKED, rows, whole
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.run.trainer import Trainer
from deepstow.trainer.verify.verify import compare, full_weights
from tests.helpers.moves import forget_run, made
from tests.helpers.tiny import LLAMA, VOCAB, run_config
from tests.helpers.worlds import run_counted

Row = Mapping[str, Sequence[int]]
STEP: Mapping[str, Any] = {"max_grad_norm": 0.0, "optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant"}
OFFLOADED: Mapping[str, Any] = {"offload": {"site": "host", "weights": "streamed"}}


def document(length: int, index: int, *, masked: int = 0) -> dict[str, list[int]]:
    """Tokens that depend on ``index``; the first ``masked`` of them are not trained on."""
    ids = [1 + (7 * index + 3 * position * position) % (VOCAB - 1) for position in range(length)]
    return {"input_ids": ids, "labels": [MASKED] * masked + ids[masked:]}


def logged(trainer: Any, key: str) -> list[float]:
    return [float(record[key]) for record in trainer.state.log_history if key in record]


def train(ranks: Ranks, config: RunConfig, train_rows: Sequence[Row]) -> dict[str, Any]:
    """Weights after training on these rows, with losses and gradient norms as they were logged."""
    trainer = made(ranks, config, train_rows)
    try:
        trainer.train()
        weights = full_weights(trainer, ranks)
        return {"weights": weights, "loss": logged(trainer, "loss"), "grad_norm": logged(trainer, "grad_norm")}
    finally:
        trainer.accelerator.free_memory()


def trained(
    ranks: Ranks, configs: Mapping[str, RunConfig], data: Mapping[str, Sequence[Row]] | None = None
) -> dict[str, dict[str, Any]]:
    """What ``train`` has of each in the same ranks, on the same rows if each has no ``data`` of its own."""
    found = {}
    for name, config in configs.items():
        found[name] = train(ranks, config, data[name] if data else UNEVEN)
        forget_run()
    return found


def worst(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """The largest difference of a weight, relative to the largest of its tensor."""
    return max((difference.relative for difference in compare(one["weights"], other["weights"])), default=0.0)


def test_the_mean_loss_is_that_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's has the steps since the last record from one rank alone."""
    said: dict[str, float] = {}
    monkeypatch.setattr("transformers.Trainer.log", lambda self, logs: said.update(logs))
    trainer = Trainer.__new__(Trainer)
    two = SimpleNamespace(gather=lambda each: torch.cat([each, each + 2]))
    given = {"meter": SimpleNamespace(add_to=lambda *_: None), "state": None, "_trained": True, "accelerator": two}
    given["stop_non_finite"] = SimpleNamespace(settle=lambda: None)
    vars(trainer).update(given, args=SimpleNamespace(world_size=2, device="cpu"))
    trainer.log({"train_loss": 1.0})
    assert said == {"train_loss": 2.0}


# Evaluation


def evaluated(ranks: Ranks, configs: Sequence[RunConfig], held_out: Sequence[Row]) -> list[dict[str, float]]:
    found = []
    for config in configs:
        found.append(evaluate(ranks, config, held_out))
        forget_run()
    return found


def evaluate(ranks: Ranks, config: RunConfig, held_out: Sequence[Row]) -> dict[str, float]:
    """The loss that the Trainer reports, and two computed by hand: over tokens, and over rows."""
    trainer = made(ranks, config, held_out)
    model = trainer.model
    metrics = trainer.evaluate()
    losses, tokens = [], []
    model.eval()
    for row in held_out:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])[0, 1:]
        with torch.no_grad():
            scores = model(input_ids=ids).logits[0, :-1]
        trained = labels != MASKED
        losses.append(torch.nn.functional.cross_entropy(scores[trained], labels[trained], reduction="sum").double())
        tokens.append(int(trained.sum()))
    by_tokens = sum(losses) / sum(tokens)
    by_rows = sum(loss / count for loss, count in zip(losses, tokens, strict=True)) / len(losses)
    trainer.accelerator.free_memory()
    return {
        "reported": metrics["eval_loss"],
        "perplexity": metrics["eval_perplexity"],
        "tokens": metrics["eval_tokens"],
        "hand": float(by_tokens),
        "by_rows": float(by_rows),
        "counted": sum(tokens),
    }


@pytest.mark.ranks
def test_evaluation_is_the_mean_over_tokens(tmp_path: Path) -> None:
    """Seven rows of different length, two at a time: the last batch is smaller, and one of two ranks has a row less."""
    held_out = [document(length, index, masked=length // 3) for index, length in enumerate((5, 16, 9, 12, 6, 14, 4))]
    configs = [
        run_config(
            {**LLAMA, "initializer_range": 0.4}, output_dir=tmp_path, per_device_eval_batch_size=2,
            eval_strategy="epoch", data={"eval_fraction": 0.5}, strategies=strategies,
        )
        for strategies in ({}, OFFLOADED)
    ]  # fmt: skip
    for found in run_counted(2, evaluated, configs, held_out):
        assert found["tokens"] == found["counted"]
        assert found["reported"] == pytest.approx(found["hand"], rel=1e-6)
        assert found["perplexity"] == pytest.approx(np.exp(found["hand"]), rel=1e-5)
        assert abs(found["by_rows"] - found["hand"]) > 1e-3 * found["hand"]  # else nothing would have been tested


# What a step is made of

UNEVEN = [document(4 + index % 11, index, masked=index % 4) for index in range(32)]


@pytest.mark.ranks
def test_accumulation_is_only_a_matter_of_memory(tmp_path: Path) -> None:
    """Four times two rows weigh every trained token as eight rows do, though parts hold different numbers of them.

    Not bitwise: gradients of parts are rounded before they are added, and rows are padded to another length.
    """
    configs = {
        name: run_config(
            LLAMA, output_dir=tmp_path, stage=2, max_steps=2, logging_steps=1,
            per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, **STEP,
        )
        for name, batch, accumulation in (("parts", 2, 4), ("whole batch", 8, 1), ("other", 2, 1))
    }  # fmt: skip
    parts, whole_batch, other = run_counted(2, trained, configs).values()
    assert worst(parts, whole_batch) <= 1e-6
    assert parts["loss"] == pytest.approx(whole_batch["loss"], rel=1e-6)
    assert worst(other, whole_batch) > 1e-3  # a step on other rows is another step


def in_rows(documents: Sequence[Row], length: int, *, packing: bool) -> list[dict[str, list[int]]]:
    """The documents in rows of ``length``, one or several in each, by the function that training uses."""
    tokens = [(np.array(d["input_ids"], np.int32), np.array(d["labels"], np.int32)) for d in documents]
    made = rows(whole([len(ids) for ids, _ in tokens]), tokens.__getitem__, length, packing)
    return [{name: values.tolist() for name, values in row.items()} for row in made]


@pytest.mark.ranks
def test_packed_training_is_unpacked_training(tmp_path: Path) -> None:
    """One step of plain SGD at rate 1 shows the gradient; see [Rounding] in trainer/data/collate.py for tolerance."""
    documents = [document(length, index) for index, length in enumerate((10, 6, 9, 7, 11, 5, 16, 12))]
    filled = in_rows(documents, 16, packing=True)
    assert len(filled) == 5
    assert max(row["position_ids"].count(0) for row in filled) == 2

    def config_of(data: Sequence[Row], packing: bool) -> RunConfig:
        return run_config(
            LLAMA, output_dir=tmp_path, data={"packing": packing}, max_steps=1, logging_steps=1,
            per_device_train_batch_size=len(data), **STEP,
        )  # fmt: skip

    forgotten = [{**row, "position_ids": list(range(len(row["input_ids"])))} for row in filled]
    data = {"alone": in_rows(documents, 16, packing=False), "together": filled, "forgotten": forgotten}
    configs = {name: config_of(rows, name != "alone") for name, rows in data.items()}
    alone, together, others = run_world(1, trained, configs, data).values()
    assert worst(alone, together) <= 1e-6
    assert together["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert together["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)
    assert worst(alone, others) > 1e-4  # documents that see each other give other gradients


# What is logged


@pytest.mark.ranks
def test_stage_0_clips_as_torch_does_and_logs_the_norm(tmp_path: Path) -> None:
    configs = {
        name: run_config(
            LLAMA, output_dir=tmp_path, stage=stage, max_steps=3, logging_steps=1, per_device_train_batch_size=2,
            gradient_accumulation_steps=2, max_grad_norm=limit, learning_rate=1e-2,
        )
        for name, stage, limit in (("plain", None, 0.05), ("stage 0", 0, 0.05), ("unclipped", 0, 0.0))
    }  # fmt: skip
    plain, stage_0, unclipped = run_counted(2, trained, configs).values()
    assert compare(stage_0["weights"], plain["weights"]) == []
    assert stage_0["grad_norm"] == plain["grad_norm"]
    assert len(stage_0["grad_norm"]) == 3
    assert min(stage_0["grad_norm"]) > 0.05  # clipping had something to do
    assert compare(unclipped["weights"], stage_0["weights"]) != []
    assert unclipped["grad_norm"][0] == stage_0["grad_norm"][0]  # the norm is logged where nothing is clipped, too
