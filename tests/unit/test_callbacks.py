"""Callbacks fed with made-up records: exact lines, valid JSON, one consistent history, honest seconds."""

import json
import math
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding, EvalPrediction, MptConfig, TrainerControl, TrainerState

from deepstow.strategies.core.sizes import human_duration, human_number
from deepstow.strategies.engine.memory import accelerator
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.run.callbacks import reports
from deepstow.trainer.run.callbacks.reports import EarlyStopping, Meter, MetricsFile, ProgressLine, SampleText
from deepstow.trainer.tasks.task import mean_over_tokens

RECORD = {
    "loss": 4.8123, "learning_rate": 9.2e-4, "grad_norm": 1.35, "tokens_per_s": 5_210.4, "mfu": 0.4118,
    "device_peak_bytes": 3.1 * 2**30, "host_peak_bytes": 1.9 * 2**30, "eta_s": 72.0,
}  # fmt: skip


def state(step: int, max_steps: int = 200, rank_zero: bool = True) -> TrainerState:
    return TrainerState(global_step=step, max_steps=max_steps, epoch=0.5, is_world_process_zero=rank_zero)


def fire(callback: Any, event: str, at: TrainerState, **kwargs: Any) -> None:
    getattr(callback, event)(None, at, TrainerControl(), **kwargs)


def read(path: Path) -> list[dict[str, Any]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_progress_line_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine()
    fire(line, "on_log", state(40), logs=RECORD)
    fire(line, "on_log", state(41), logs={"loss": math.nan, "grad_norm": torch.tensor(2.5)})
    fire(line, "on_log", state(200), logs={"eval_loss": 3.91, "eval_perplexity": 49.9, "eval_runtime": 2.0})
    fire(line, "on_log", state(200), logs={"train_loss": 4.1, "train_runtime": 192.0})
    fire(line, "on_log", state(7, max_steps=0), logs={"loss": 1.0, "eval_wiki_loss": 1e9, "eval_wiki_f1": 0.5})
    fire(line, "on_log", state(40, rank_zero=False), logs=RECORD)
    assert capsys.readouterr().out.splitlines() == [
        "step 40/200  20%  loss 4.812  lr 9.2e-04  grad 1.35  5,210 tok/s  mfu 41.2%  "
        "device 3.1 GiB  host 1.9 GiB  eta 1m12s",
        "step 41/200  20%  loss nan  grad 2.50",
        "eval at step 200: loss 3.91  perplexity 49.9",
        "trained to step 200: mean loss 4.100  in 3m12s",
        "step 7  loss 1.000",
        "eval wiki at step 7: loss 1.00e+09  f1 0.500",
    ]


def test_numbers_for_people() -> None:
    durations = {0: "0s", 0.44: "0.4s", 5.4: "5s", 59.7: "1m00s", 3_700: "1h01m", 90_000: "1d01h", math.inf: "?"}
    assert {seconds: human_duration(seconds) for seconds in durations} == durations
    numbers = {4.8: "4.80", 49.91: "49.9", 22_026.4: "22,026", 0.00123: "0.00123", 1.5e-7: "1.50e-07", 3e9: "3.00e+09"}
    numbers |= {0.0: "0", -math.inf: "-inf"}
    assert {number: human_number(number, 3) for number in numbers} == numbers


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds that pass only when told to."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(reports.time, "perf_counter", lambda: clock.now_s)
    return clock


def test_meter_leaves_evaluations_and_saves_out_of_training_time(clock: SimpleNamespace) -> None:
    meter = Meter(flops_per_token=1e9, peak_flops=2e12, sum_over_ranks=lambda n: 2 * n)
    fire(meter, "on_train_begin", state(100))

    def step(seconds_s: float) -> None:
        meter.count(500)
        clock.now_s += seconds_s
        fire(meter, "on_step_end", state(101))

    step(1.0)
    clock.now_s += 50  # an evaluation, then a save, without a record before them
    fire(meter, "on_evaluate", state(101))
    clock.now_s += 7
    fire(meter, "on_save", state(101))
    clock.now_s += 0.5  # loading the next batch is training time
    step(1.5)
    logs = {"loss": 1.0}
    meter.add_to(logs, state(102))
    assert logs["tokens"] == 2_000
    assert logs["tokens_per_s"] == 2_000 / 3.0
    assert math.isclose(logs["mfu"], 2_000 / 3.0 * 1e9 / 2e12)
    assert logs["eta_s"] == 60.0 / 2 * 98  # wall time, pauses included, over the two steps of this run
    assert logs["host_peak_bytes"] > 2**20
    assert ("device_peak_bytes" in logs) == (accelerator.kind() is not None)

    clock.now_s += 20  # an evaluation right after the record belongs to no lap
    fire(meter, "on_evaluate", state(102))
    step(4.0)
    logs = {"loss": 1.0}
    meter.add_to(logs, state(103))
    assert (logs["tokens"], logs["tokens_per_s"]) == (1_000, 250.0)


@pytest.mark.usefixtures("clock")
def test_meter_adds_perplexity_and_leaves_the_unknown_out() -> None:
    logs = {"eval_loss": 0.0, "eval_tokens": 3, "eval_labels_loss": 0.5}  # one is a mean over tokens
    meter = Meter(flops_per_token=1e9, peak_flops=None, sum_over_ranks=lambda n: n)
    fire(meter, "on_evaluate", state(0))  # an evaluation without training
    fire(meter, "on_train_begin", state(0))
    meter.add_to(logs, state(5))
    assert logs == {"eval_loss": 0.0, "eval_tokens": 3, "eval_perplexity": 1.0, "eval_labels_loss": 0.5}
    logs = {"loss": 1.0}
    meter.add_to(logs, state(0))  # no time, no step, no peak
    meter.add_to(logs, state(5, max_steps=-1))  # no known end
    assert set(logs) - {"device_peak_bytes"} == {"loss", "tokens", "host_peak_bytes"}


def test_the_file_of_metrics_is_one_history_in_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run/metrics.jsonl"
    monkeypatch.setattr(reports.time, "time", lambda: 12.3456)
    file = MetricsFile(path)
    path.parent.mkdir()
    path.write_text('{"step": 5}\nnonsense\n[1]\n')
    fire(file, "on_train_begin", state(0, rank_zero=False))
    assert path.read_text()
    fire(file, "on_train_begin", state(0))
    fire(file, "on_log", state(1), logs={"loss": math.nan, "grad_norm": torch.tensor(math.inf), "x": -math.inf})
    fire(file, "on_log", state(2), logs={"loss": 1.5, "grad_norm": torch.tensor(0.5), "note": "a\nb"})
    fire(file, "on_log", state(3, rank_zero=False), logs={"loss": 1.5})
    fire(MetricsFile(path), "on_train_end", state(3, rank_zero=False))
    assert read(path) == [
        {"step": 1, "epoch": 0.5, "time": 12.346, "loss": "nan", "grad_norm": "inf", "x": "-inf"},
        {"step": 2, "epoch": 0.5, "time": 12.346, "loss": 1.5, "grad_norm": 0.5, "note": "a\nb"},
    ]
    for step in (20, 30):
        fire(file, "on_log", state(step), logs={"loss": 1.0})
    with path.open("a") as torn:
        torn.write('{"step": 35, "los')
    fire(file, "on_train_begin", state(20))  # resumed: records beyond the step and a torn line go
    fire(file, "on_log", state(30), logs={"loss": 0.5})
    assert [(record["step"], record["loss"]) for record in read(path)] == [(1, "nan"), (2, 1.5), (20, 1.0), (30, 0.5)]
    assert [entry.name for entry in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_has_every_record_later_and_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, limits = MetricsFile(tmp_path / "metrics.jsonl"), resource.getrlimit(resource.RLIMIT_FSIZE)
    fire(file, "on_train_begin", state(0))
    fire(file, "on_log", state(1), logs={"loss": 1.0})
    whole = (tmp_path / "metrics.jsonl").read_text()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 5, limits[1]))  # there is room for five bytes
        for step in (2, 3):
            fire(file, "on_log", state(step), logs={"loss": 1.0})
        assert (tmp_path / "metrics.jsonl").read_text() == whole
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    fire(file, "on_log", state(4), logs={"loss": 1.0})
    assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    (line,) = capsys.readouterr().out.splitlines()
    assert "training goes on, and records wait" in line


def test_records_do_not_go_into_another_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which is there where a disk was unmounted. They come when it is back, or it is said that they are lost."""
    run, file = tmp_path / "run", MetricsFile(tmp_path / "run" / "metrics.jsonl")
    fire(file, "on_train_begin", state(0))
    run.rename(tmp_path / "away")
    run.mkdir()
    fire(file, "on_log", state(1), logs={"loss": 1.0})
    fire(file, "on_train_end", state(1))
    assert list(run.iterdir()) == []
    waits, lost = capsys.readouterr().out.splitlines()
    assert "another folder is in its place; training goes on, and records wait" in waits and "are lost if" in lost
    run.rmdir()
    (tmp_path / "away").rename(run)
    fire(file, "on_log", state(2), logs={"loss": 1.0})
    assert [record["step"] for record in read(run / "metrics.jsonl")] == [1, 2]


def test_records_of_a_file_that_cannot_be_read_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    file, resumed = MetricsFile(tmp_path / "metrics.jsonl"), state(2)
    resumed.log_history = [{"step": step, "loss": 1.0} for step in (1, 2)]
    fire(file, "on_train_begin", resumed)
    assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == [1, 2]


def test_sample_runs_on_every_rank_and_is_shown_by_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[int] = []

    def continuation(*_: object) -> str:
        called.append(1)
        return " a time\n\nThe end.\n"

    monkeypatch.setattr(reports, "continuation", continuation)
    sample = SampleText("Once upon")
    fire(sample, "on_train_end", state(9, rank_zero=False), model=None, processing_class=None)
    assert capsys.readouterr().out == ""
    fire(sample, "on_train_end", state(9), model=None, processing_class=None)
    assert (
        capsys.readouterr().out == "sample at step 9, the prompt in brackets:\n    [Once upon] a time\n\n    The end.\n"
    )
    assert len(called) == 2


def test_asked_prompts_of_a_chat_are_the_user_s_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(reports, "continuation", lambda model, words, prompt: asked.append(prompt) or "")

    class Words:
        chat_template = "x"

        def apply_chat_template(self, turns: Any, add_generation_prompt: bool, tokenize: bool) -> str:
            return f"<{turns[0]['role']}>{turns[0]['content']}" + "<assistant>" * add_generation_prompt

        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [len(text), int(add_special_tokens)]}

    for chats in (True, False):
        sample = SampleText("", ["hello"], chats=chats)
        fire(sample, "on_evaluate", state(9), model=None, processing_class=Words())
    assert asked == [[len("<user>hello<assistant>"), 0], "hello"]


def test_an_evaluation_over_hardly_any_token_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine()
    fire(line, "on_log", state(1), logs={"eval_loss": 1.0, "eval_tokens": 100})
    assert "WARNING" not in capsys.readouterr().out
    for tokens in (0, 12):
        fire(line, "on_log", state(2), logs={"eval_loss": 1.0, "eval_tokens": tokens})
    said = [each for each in capsys.readouterr().out.splitlines() if each.startswith("WARNING")]
    assert len(said) == 1 and "evaluations are over no token on which there is a loss" in said[0]
    assert math.isnan(mean_over_tokens(EvalPrediction(np.zeros((2, 2)), np.zeros(2)))["loss"])


def test_a_model_that_cannot_generate_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = type("Tokens", (), {"__call__": lambda *_, **__: {}})()
    fire(SampleText("Once upon"), "on_train_end", state(9), model=None, processing_class=tokens)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("no sample: the model cannot generate (AttributeError: ")


def test_continuation_is_greedy_without_the_prompt_and_restores_the_mode() -> None:
    class Tokenizer:
        pad_token_id, eos_token_id = None, 9

        def __call__(self, text: str, return_tensors: str) -> BatchEncoding:
            return BatchEncoding({"input_ids": torch.tensor([[1, 2]])})

        def decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> str:
            return " ".join(map(str, ids.tolist()))

    class Model(torch.nn.Module):
        device, config = "cpu", MptConfig(max_seq_len=50)

        def generate(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
            assert options["do_sample"] is False and options["pad_token_id"] == 9
            assert options["min_new_tokens"] == 20 and options["max_new_tokens"] == 48, "no more than there are places"
            assert not self.training
            return torch.cat([input_ids, torch.tensor([[7, 8]])], dim=1)

    model = Model()
    assert reports.continuation(model, Tokenizer(), "prompt") == "7 8"
    assert model.training
    model.config = MptConfig(max_seq_len=1)
    with pytest.raises(ValueError, match="the prompt has 2 tokens, and the model 1 positions"):
        reports.continuation(model, Tokenizer(), "prompt")


def test_early_stopping_names_the_metrics_that_there_are() -> None:
    args = SimpleNamespace(metric_for_best_model="perplexty", greater_is_better=False)
    with pytest.raises(
        ConfigError, match="evaluations give eval_loss, eval_perplexity; did you mean 'eval_perplexity'"
    ):
        EarlyStopping(2).on_evaluate(args, state(3), TrainerControl(), {"eval_loss": 1.0, "eval_perplexity": 2.7})


def test_a_metric_that_is_not_a_number_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for metric, value in (("f1", math.nan), ("f1", 0.5), (None, math.nan), ("eval_f1", np.float64("nan"))):
        args = SimpleNamespace(metric_for_best_model=metric)
        ProgressLine().on_evaluate(args, state(3), TrainerControl(), {"eval_f1": value, "eval_loss": 1.0})
    line = "eval_f1 is not a number at step 3: this evaluation is never the best"
    assert capsys.readouterr().out.splitlines() == [line, line]
