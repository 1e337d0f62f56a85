"""Functions of the user: found where they are, given what Hugging Face's Trainer gives, and refused in one line."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import EvalPrediction

from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.data.packing import MASKED
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.run.callbacks import metrics
from deepstow.trainer.run.callbacks.reports import eval_lines
from deepstow.trainer.run.checks import Before, check
from tests.helpers.moves import made
from tests.helpers.tiny import LLAMA, VOCAB, run_config

HERE = "tests.unit.test_metrics"

WHERE = "cannot be imported from the folder of the config, that of the command, or by Python"


def most_likely(logits: Any, labels: Any) -> Any:
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


def above(prediction: EvalPrediction) -> dict[str, float]:
    """Share of the trained tokens whose most likely one has a larger number, and how much there is of everything."""
    found, labels = np.asarray(prediction.predictions)[:, :-1], np.asarray(prediction.label_ids)[:, 1:]
    trained = labels != MASKED
    return {"above": float((found > labels)[trained].mean()), "rows": len(labels), "asked": np.int64(trained.sum())}


def evaluated(ranks: Ranks, configs: Sequence[RunConfig], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    return [evaluated_once(ranks, config, rows) for config in configs]


def evaluated_once(ranks: Ranks, config: RunConfig, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    trainer = made(ranks, config, rows)
    said = trainer.evaluate()
    hits, asked = 0, 0
    for row in rows:
        labels = torch.tensor(row["labels"])[1:]
        with torch.no_grad():
            found = trainer.model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].argmax(-1)
        hits, asked = hits + int((found > labels)[labels != MASKED].sum()), asked + int((labels != MASKED).sum())
    trainer.accelerator.free_memory()
    kept = ("eval_loss", "eval_perplexity", "eval_tokens", "eval_above", "eval_rows", "eval_asked")
    return {key: said[key] for key in kept if key in said} | {"by hand": hits / asked, "tokens": asked}


@pytest.mark.ranks
def test_functions_get_every_row_once_and_change_no_bit_of_the_loss(tmp_path: Path) -> None:
    """Rows of several lengths, an odd number of them on two ranks, weights that travel."""
    lengths = (5, 16, 9, 12, 6, 14, 4)
    ids = [[1 + (7 * i + 3 * place * place) % (VOCAB - 1) for place in range(n)] for i, n in enumerate(lengths)]
    rows = [{"input_ids": row, "labels": [MASKED] * (len(row) // 3) + row[len(row) // 3 :]} for row in ids]
    given = {
        "output_dir": tmp_path, "per_device_eval_batch_size": 2, "eval_strategy": "epoch",
        "data": {"eval_fraction": 0.5}, "strategies": {"offload": {"site": "host", "weights": "streamed"}},
    }  # fmt: skip
    config = {**LLAMA, "initializer_range": 0.4}
    functions = {"compute_metrics": f"{HERE}:above", "preprocess_logits_for_metrics": f"{HERE}:most_likely"}
    both = [run_config(config, **given, **functions), run_config(config, **given)]
    found, plain = run_world(2, evaluated, both, rows)
    assert found["eval_rows"] == len(rows) and found["eval_asked"] == found["tokens"] == found["eval_tokens"]
    assert found["eval_above"] == pytest.approx(found["by hand"]) and 0 < found["by hand"] < 1
    assert {key: found[key] for key in plain} == plain and "eval_above" not in plain


def classification(**training: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "task": "classification",
            "model": {"config": dict(LLAMA), "tokenizer": "none", "labels": ["a", "b"]},
            "data": {"path": "rows", "max_length": 16, "eval_fraction": 0.5},
            "training": {"output_dir": "r", "report_to": "none", **training},
            "strategies": {},
        }
    )


def test_numbers_of_the_task_and_of_the_user_from_one_evaluation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The user's file is found in the folder of the command, sees the logits, and has the last word on a name."""
    (tmp_path / "mine.py").write_text(
        "def compute(p):\n    return {'accuracy': 7, 'largest': p.predictions.max(), 'shape': p.predictions.shape[1]}\n"
    )
    monkeypatch.chdir(tmp_path)

    def own(prediction: EvalPrediction) -> dict[str, float]:
        return {"accuracy": float((prediction.predictions == prediction.label_ids).mean()), "f1": 0.5}

    given = metrics.beside(
        {"compute_metrics": own, "preprocess_logits_for_metrics": most_likely, "data_collator": None},
        classification(compute_metrics="mine:compute"),
    )
    logits, labels = torch.tensor([[0.0, 2.0], [3.0, 1.0]]), torch.tensor([1, 0])
    kept = given["preprocess_logits_for_metrics"](logits, labels)
    assert kept[0].tolist() == [1, 0] and kept[1] is logits
    said = given["compute_metrics"](EvalPrediction(tuple(part.numpy() for part in kept), labels.numpy()))
    assert said == {"accuracy": 7, "f1": 0.5, "largest": 3.0, "shape": 2} and given["data_collator"] is None
    (line,) = eval_lines(
        3, {f"eval_{key}": value for key, value in {"loss": 1.5, "runtime": 2.0, **said}.items()}, whole=True
    )
    assert line == "eval at step 3: loss 1.50  accuracy 7.00  f1 0.500  largest 3.00  shape 2.00"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere:f", f"nowhere {WHERE}: ModuleNotFoundError: No"),
        ("broken:f", f"broken {WHERE}: ZeroDivisionError: "),
        ("exits:f", f"exits {WHERE}: SystemExit: 0"),
        ("mine:word", "mine has no word; did you mean 'words'?"),
        ("mine:number", "number is no function"),
        ("mine:one", "must return numbers by name, and the result is int"),
        ("mine:several", "must return numbers by name, and a is Tensor"),
        ("mine:numbered", "must return numbers by name, and 1 is int"),
        ("mine:nll", "returns 'nll_loss', and names that end in loss, tokens, perplexity, runtime, per_second"),
    ],
)
def test_refused(name: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is not there before data is read, what is returned at the first evaluation."""
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "exits.py").write_text("raise SystemExit(0)\n")
    several = torch.ones(2)
    functions = {"words": {"a": "b"}, "one": 3, "nll": {"nll_loss": 1}, "several": {"a": several}, "numbered": {1: 2}}
    lines = [f"def {name}(p):\n    return {value!r}\n" for name, value in functions.items()]
    (tmp_path / "mine.py").write_text("from torch import tensor\nnumber = 3\n" + "".join(lines))
    monkeypatch.chdir(tmp_path)
    config = classification(compute_metrics=name)
    with pytest.raises(ConfigError) as caught:
        check(Before.MEETING, config=config, ranks=Ranks())
        assert name.partition(":")[2] in functions
        metrics.beside({}, config)["compute_metrics"](EvalPrediction((np.zeros(1), np.zeros(1)), np.zeros(1)))
    assert len(caught.value.lines) == 1
    assert caught.value.lines[0].startswith(f'training.compute_metrics = "{name}": {said}')


def test_a_file_runs_once_and_its_functions_share_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A dataclass whose annotations are text looks its module up."""
    head = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nopen('ran', 'a').write('x')\n"
        "@dataclass\nclass Kept:\n    number: int = 0\n"
    )
    keep, count = (
        "def keep(logits, labels):\n    seen.append(1)\n",
        "def count(p):\n    return {'batches': len(seen)}\n",
    )
    (tmp_path / "mine.py").write_text(f"{head}seen = []\n{keep}    return logits\n{count}")
    monkeypatch.chdir(tmp_path)
    functions = {"compute_metrics": "mine:count", "preprocess_logits_for_metrics": "mine:keep"}
    metrics.refuse(classification(**functions))
    given = metrics.beside({}, classification(**functions))
    assert (tmp_path / "ran").read_text() == "x"
    given["preprocess_logits_for_metrics"](None, None)
    assert given["compute_metrics"](EvalPrediction((np.zeros(1), np.zeros(1)), np.zeros(1))) == {"batches": 1}
