"""Where metrics go besides ``metrics.jsonl``: Hugging Face's callbacks, for the trackers in ``training.report_to``.

Each tracker has an environment variable for the project, and the callbacks of wandb and mlflow read nothing else. They
take a run that is open already, so it is opened here, in the project that ``training.project`` names. That is also when
a tracker says that nobody is logged in, or that its server is silent: on the first rank, before a weight exists.

Refused: packages that are not there, before data is read; a variable that names another project; and what wandb's
callback does to the model itself, which reads weights where strategies may not have them (``WANDB_LOG_MODEL=end``,
``WANDB_WATCH``). A whole checkpoint may be logged.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi
from transformers import TrainerCallback
from transformers.integrations.integration_utils import MLflowCallback, TensorBoardCallback, WandbCallback

from deepstow.trainer.errors import ExitCode, first_line
from deepstow.trainer.run.appended import Appended

if TYPE_CHECKING:
    from transformers import Trainer

    from deepstow.trainer.config.sections import RunConfig

PROJECTS = {"wandb": "WANDB_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME"}
READS_WEIGHTS = {"WANDB_LOG_MODEL": ("end",), "WANDB_WATCH": ("all", "gradients", "parameters")}


def names(config: RunConfig) -> list[str]:
    """The trackers that are on."""
    report_to = config.training.report_to
    return [name for name in ([report_to] if isinstance(report_to, str) else report_to) if name != "none"]


def refuse(config: RunConfig) -> None:
    """Raise ConfigError for a tracker that cannot work, known from the packages and variables that are there."""
    key, project = "training.report_to", config.training.project
    for name in names(config):
        if find_spec(name) is None:
            cure = f"pip install {name.replace('_', '-')}, or leave it out"
            raise config.error(key, name, f"the package {name} is not installed; {cure}")
        variable = PROJECTS.get(name, "")
        if project is not None and (value := os.environ.get(variable, project)) != project:
            raise config.error("training.project", project, f"{variable} is {value!r}; keep one of the two")
    for variable, refused in READS_WEIGHTS.items() if "wandb" in names(config) else ():
        if (value := os.environ.get(variable, "")) in refused:
            what = "reads weights where strategies may not have them; leave it out, or write WANDB_LOG_MODEL=checkpoint"
            raise config.error(key, "wandb", f"{variable}={value} {what}")


def start(config: RunConfig) -> None:
    """Open the run that the callback of a tracker goes on with. Raise ConfigError with the tracker's own words."""
    training = config.training
    for name in names(config):
        try:
            if name == "wandb":
                import wandb

                if wandb.run is None:
                    project = training.project or os.environ.get(PROJECTS[name], "huggingface")
                    wandb.init(project=project, name=training.run_name)
            elif name == "mlflow":
                import mlflow

                mlflow.search_experiments(max_results=1)
                if training.project is not None:
                    mlflow.set_experiment(training.project)
            elif name == "trackio":
                import trackio  # noqa: F401 - whether it can be

                if training.trackio_space_id is not None:
                    HfApi().whoami()
        except Exception as error:
            raise config.error("training.report_to", name, f"it does not start: {first_line(error)}") from None


class Events:
    """Writes TensorBoard's file in a folder, in place of a ``SummaryWriter``: the thread of that ends with the first
    error of the disk, and the run would with it.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary

        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = Appended(folder / name, "TensorBoard's curves")
        self._records: Any = RecordWriter(SimpleNamespace(write=self._file.add))
        self._event: Any = Event
        self._summary: Any = summary
        self._add(file_version="brain.Event:2")

    def _add(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self._add(summary=self._summary.scalar(tag, value), step=step)

    def add_text(self, tag: str, text: str, step: int = 0) -> None:
        self._add(summary=self._summary.text(tag, text), step=step)

    def flush(self) -> None:
        self._file.flush()


class Curves(TensorBoardCallback):  # type: ignore[misc]
    """TensorBoard's callback, with a writer that a disk which fails does not end."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            named = os.environ.get("TENSORBOARD_LOGGING_DIR")
            usual = f"runs/{time.strftime('%b%d_%H-%M-%S')}_{socket.gethostname()}"  # as Hugging Face's
            folder = Path(named).expanduser() if named else Path(args.output_dir, usual)
            self.tb_writer = Events(folder)
        super().on_train_begin(args, state, control, **kwargs)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """The evaluation after training is still to come."""
        if self.tb_writer is not None:
            self.tb_writer.flush()


class SkipsFailedSaves(TrainerCallback):  # type: ignore[misc]
    """Before a tracker's callback: a save that has failed leaves no checkpoint to log, which it would end the run for.

    Attributes:
        logs_checkpoints: it is asked for checkpoints; else nothing waits for them.
    """

    logs_checkpoints: bool

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if Path(args.output_dir, f"checkpoint-{state.global_step}").is_dir():
            super().on_save(args, state, control, **kwargs)


class Wandb(SkipsFailedSaves, WandbCallback):  # type: ignore[misc]
    """wandb's callback."""

    @property
    def logs_checkpoints(self) -> bool:  # type: ignore[override]
        return bool(self._log_model.value == "checkpoint")


class MLflow(SkipsFailedSaves, MLflowCallback):  # type: ignore[misc]
    """MLflow's callback, which would say that the run is finished when training is over, or was ended by an error."""

    @property
    def logs_checkpoints(self) -> bool:  # type: ignore[override]
        return bool(self._log_artifacts)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        pass  # ``end`` says how

    def __del__(self) -> None:
        pass


def end(code: int) -> None:
    """Tell MLflow with which ``code`` the run has ended. wandb takes the process's own."""
    mlflow = sys.modules.get("mlflow")
    if mlflow is not None and mlflow.active_run() is not None:
        asked = code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)
        with suppress(Exception):  # a server that does not answer
            mlflow.end_run("FINISHED" if code == ExitCode.FINISHED else "KILLED" if asked else "FAILED")


def take_over(trainer: Trainer) -> None:
    """TensorBoard's, wandb's and MLflow's callbacks are ours, in their place among the others."""
    ours = {TensorBoardCallback: Curves, WandbCallback: Wandb, MLflowCallback: MLflow}
    callbacks = trainer.callback_handler.callbacks
    callbacks[:] = [ours[type(callback)]() if type(callback) in ours else callback for callback in callbacks]
