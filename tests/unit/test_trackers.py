"""One run that reports to trackers in their offline modes, and uploads its export to a hub that notes what it gets."""

import gc
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from deepstow.trainer.config.load import load
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.stopping import Stop
from deepstow.trainer.errors import ConfigError, ExitCode
from deepstow.trainer.run import failures
from deepstow.trainer.run.callbacks import trackers
from deepstow.trainer.run.checks import Before, check
from deepstow.trainer.run.exporting import upload
from deepstow.trainer.run.session import run
from deepstow.trainer.run.trainer import _reads_saves
from tests.e2e.commands import metrics, write_config
from tests.helpers.tiny import LLAMA, run_config

VARIABLES = ("WANDB_PROJECT", "WANDB_LOG_MODEL", "WANDB_WATCH", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID")


class Hub:
    """What the client's methods are asked, noted; ``fails`` has the errors of those that fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.uploads: list[dict[str, Any]] = []
        self.fails: dict[str, Exception] = {}
        monkeypatch.setattr(upload, "unreachable", lambda: None)
        for name in ("whoami", "create_repo", "create_branch", "upload_folder"):
            monkeypatch.setattr(f"huggingface_hub.HfApi.{name}", partial(self._asked, name))

    def _asked(self, name: str, *asked: str, **given: Any) -> SimpleNamespace:
        self.calls.append(name)
        if name in self.fails:
            raise self.fails[name]
        if name == "upload_folder":
            self.uploads.append({**given, "files": sorted(path.name for path in given["folder_path"].iterdir())})
        assert not name.startswith("create_") or given["exist_ok"] is True
        return SimpleNamespace(repo_id=f"owner/{asked[0]}" if asked else None)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The run, in ``folder``, and what the ``hub`` and each tracker know of it."""
    import mlflow
    import wandb

    folder = tmp_path_factory.mktemp("told")
    with pytest.MonkeyPatch.context() as patch:
        for name in VARIABLES:
            patch.delenv(name, raising=False)
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_DIR", str(folder))
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setenv("MLFLOW_TRACKING_URI", f"file:{folder / 'mlruns'}")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        known = Hub(patch)
        training = {
            "report_to": ["wandb", "mlflow"], "project": "the-project", "run_name": "the-run",
            "push_to_hub": True, "hub_model_id": "mine", "hub_private_repo": True, "hub_revision": "v1",
            "use_cpu": True, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
            "compute_metrics": "tests.unit.test_metrics:above",
            "preprocess_logits_for_metrics": "tests.unit.test_metrics:most_likely",
        }  # fmt: skip
        config = write_config(folder, training=training, data={"eval_fraction": 0.2})
        assert run(load(config), Ranks(), Stop()) == ExitCode.FINISHED
        summary = dict(wandb.run.summary) if wandb.run else {}
        of_wandb = SimpleNamespace(project=wandb.run.project, name=wandb.run.name, summary=summary)
        wandb.finish()
        (one,) = mlflow.search_runs(experiment_names=["the-project"], output_format="list")
        asked = mlflow.MlflowClient().get_metric_history
        history = {
            key: {point.step: point.value for point in asked(one.info.run_id, key)} for key in ("loss", "eval_above")
        }
        yield SimpleNamespace(folder=folder / "run", hub=known, wandb=of_wandb, mlflow=one, history=history)


def test_the_project_is_the_one_of_the_config(told: SimpleNamespace) -> None:
    """And each gets what the file gets."""
    assert (told.wandb.project, told.wandb.name, told.mlflow.info.run_name) == ("the-project", "the-run", "the-run")
    for key, number, in_wandb in (("loss", 4, "train/loss"), ("eval_above", 2, "eval/above")):
        found = {record["step"]: record[key] for record in metrics(told.folder) if key in record}
        assert len(found) == number and told.history[key] == found
        assert told.wandb.summary[in_wandb] == found[4]
    assert {"train/tokens_per_s", "train/host_peak_bytes"} <= told.wandb.summary.keys()
    assert told.mlflow.info.status == "FINISHED"


def test_only_the_export_is_uploaded_and_only_at_the_end(told: SimpleNamespace) -> None:
    export = told.folder / "export"
    assert (told.folder / "checkpoint-2").is_dir()
    assert told.hub.calls == ["whoami", *["create_repo", "create_branch"] * 2, "upload_folder"]
    (given,) = told.hub.uploads
    assert (given["repo_id"], given["folder_path"], given["revision"]) == ("owner/mine", export, "v1")
    assert given["files"] == sorted(path.name for path in export.iterdir())
    card = (export / "README.md").read_text()
    assert "Settings: learning_rate 0.01, " in card
    assert "every tensor has its bits, and logits differ by 0.0e+00 of the largest at most." in card
    assert "README.md" in given["files"] and "model.safetensors" in given["files"]


def test_an_upload_that_fails_is_made_when_the_run_is_started_again(
    told: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = told.folder.parent / "config.yaml"
    again = ["training.resume_from_checkpoint=auto", "training.report_to=none"]
    known = Hub(monkeypatch)
    known.fails["upload_folder"] = OSError("502 Bad Gateway\nmore")
    assert run(load(config, again), Ranks(), Stop()) == ExitCode.FAILED
    export = told.folder / "export"
    line = f"{export} is whole, and was not uploaded to owner/mine: OSError: 502 Bad Gateway; start the run again, or: "
    assert f"{line}hf upload mine {export}\n" in capsys.readouterr().err
    known.fails.clear()
    assert run(load(config, again), Ranks(), Stop()) == ExitCode.FINISHED
    assert len(known.uploads) == 1 and f"uploaded:   {export}, as owner/mine\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fails", "asks", "said"),
    [
        ("look", upload.refuse, "push_to_hub = true: the hub cannot be reached (no route); leave it out, and upload "
         "the export when there is one: hf upload mine runs/mine/export"),
        ("whoami", upload.refuse, "push_to_hub = true: OSError: 401; log in with `hf auth login`, or set HF_TOKEN"),
        ("create_repo", upload.repository, 'hub_model_id = "mine": the hub does not let it be made: OSError: 401'),
    ],
)  # fmt: skip
def test_a_hub_that_does_not_let_anybody_in(fails: str, asks: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(monkeypatch).fails[fails] = OSError("401")
    monkeypatch.setattr(upload, "unreachable", lambda: "no route" if fails == "look" else None)
    with pytest.raises(ConfigError) as caught:
        asks(run_config(LLAMA, output_dir="runs/mine", push_to_hub=True))
    assert caught.value.lines == (f"training.{said}",)
    assert asks(run_config(LLAMA, output_dir="runs/mine")) is None  # nothing is to be uploaded


@pytest.mark.parametrize(
    ("report_to", "variable", "said"),
    [
        ("swanlab", "", 'report_to = "swanlab": the package swanlab is not installed; pip install swanlab, or leave'),
        (["comet_ml"], "", "the package comet_ml is not installed; pip install comet-ml, or leave it out"),
        ("wandb", "WANDB_PROJECT=b", "training.project = \"a\": WANDB_PROJECT is 'b'; keep one of the two"),
        (["wandb", "mlflow"], "MLFLOW_EXPERIMENT_NAME=b", "MLFLOW_EXPERIMENT_NAME is 'b'; keep one of the two"),
        ("wandb", "WANDB_LOG_MODEL=end", 'report_to = "wandb": WANDB_LOG_MODEL=end reads weights where strategies'),
        ("wandb", "WANDB_WATCH=all", "WANDB_WATCH=all reads weights"),
    ],
)
def test_trackers_that_cannot_work(report_to: Any, variable: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    config = run_config(LLAMA, report_to=report_to, project="a" if variable else None)
    if variable:
        trackers.refuse(config)
        monkeypatch.setenv(*variable.split("="))
    with pytest.raises(ConfigError) as caught:
        check(Before.MEETING, config=config, ranks=Ranks())
    assert len(caught.value.lines) == 1 and said in caught.value.lines[0]


def test_a_save_is_waited_for_where_a_tracker_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has failed is not logged."""
    from transformers.integrations import MLflowCallback, WandbCallback

    monkeypatch.delenv("WANDB_LOG_MODEL", raising=False)
    mlflow, wandb = trackers.MLflow(), trackers.Wandb()
    assert not _reads_saves(mlflow) and not _reads_saves(wandb)
    mlflow._log_artifacts = True
    monkeypatch.setenv("WANDB_LOG_MODEL", "checkpoint")
    wandb = trackers.Wandb()
    assert _reads_saves(mlflow) and _reads_saves(wandb)
    logged: list[type] = []
    for kind in (MLflowCallback, WandbCallback):
        monkeypatch.setattr(kind, "on_save", lambda self, *given, kind=kind, **more: logged.append(kind))
    for step in (1, 2):
        (tmp_path / "checkpoint-2").mkdir(exist_ok=True)
        for each in (mlflow, wandb):
            each.on_save(SimpleNamespace(output_dir=str(tmp_path)), SimpleNamespace(global_step=step), None)
        assert logged == [MLflowCallback, WandbCallback][: 2 * (step - 1)]


@pytest.mark.parametrize(
    ("tracker", "asked"),
    [("wandb", "wandb.init"), ("mlflow", "mlflow.search_experiments"), ("trackio", "huggingface_hub.HfApi.whoami")],
)
def test_a_tracker_that_does_not_start(tracker: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its own words, and before a weight exists."""

    def ask(*api: Any, **given: Any) -> None:
        raise RuntimeError("No API key configured.\nmore")

    monkeypatch.setattr(asked, ask)
    monkeypatch.setitem(sys.modules, "trackio", ModuleType("trackio"))
    trackers.start(run_config(LLAMA, report_to="trackio"))  # on this machine alone
    with pytest.raises(ConfigError) as caught:
        trackers.start(run_config(LLAMA, report_to=[tracker], trackio_space_id="me/mine"))
    line = f'training.report_to = "{tracker}": it does not start: RuntimeError: No API key configured.'
    assert caught.value.lines == (line,)


@pytest.mark.parametrize(("code", "status"), [(0, "FINISHED"), (130, "KILLED"), (10, "KILLED"), (14, "FAILED")])
def test_mlflow_hears_how_the_run_has_ended(
    code: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no sooner: the export comes after training."""
    import mlflow
    from transformers.integrations.integration_utils import MLflowCallback

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    former = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"file:{tmp_path}")
    mlflow.set_experiment("ends")
    trainer: Any = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[MLflowCallback()]))
    trackers.take_over(trainer)
    (ours,) = trainer.callback_handler.callbacks
    args: Any = SimpleNamespace(run_name="one", to_dict=dict)
    state: Any = SimpleNamespace(is_world_process_zero=True)
    try:
        ours.on_train_begin(args, state, None)
        started = mlflow.active_run().info.run_id
        ours.on_train_end(args, state, None)
        del ours, trainer
        gc.collect()
        assert mlflow.get_run(started).info.status == "RUNNING"
        trackers.end(code)
        assert mlflow.get_run(started).info.status == status and mlflow.active_run() is None
    finally:
        mlflow.end_run()
        mlflow.set_tracking_uri(former)


def test_curves_wait_for_a_disk_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The thread of TensorBoard's own writer would end, and the error at the next record would end training."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from transformers.integrations.integration_utils import TensorBoardCallback

    trainer: Any = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[TensorBoardCallback()]))
    trackers.take_over(trainer)
    (curves,) = trainer.callback_handler.callbacks
    args = SimpleNamespace(output_dir=str(tmp_path / "run"), to_json_string=lambda: "{}")
    state = SimpleNamespace(is_world_process_zero=True, is_hyper_param_search=False, global_step=0)
    curves.on_train_begin(args, state, None)
    for state.global_step in (1, 2, 3, 4):
        if state.global_step == 2:
            (tmp_path / "run").rename(tmp_path / "away")
        if state.global_step == 4:
            (tmp_path / "away").rename(tmp_path / "run")
        curves.on_log(args, state, None, logs={"loss": float(state.global_step)})
    assert capsys.readouterr().out.count("; training goes on, and TensorBoard's curves wait") == 1
    (file,) = tmp_path.rglob("events*")
    points = [(event.step, each) for event in EventFileLoader(str(file)).Load() for each in event.summary.value]
    losses = [(step, each.tensor.float_val[0]) for step, each in points if each.tag == "train/loss"]
    assert losses == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]


def test_a_full_disk_before_training_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    error = OSError(28, "No space left on device", "/cache/rows")
    assert failures.ended(error, run_config(), None, Ranks(), Stop(), None) == ExitCode.DISK
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "/cache/rows is full; make room, and start again"
