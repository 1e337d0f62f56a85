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
import shutil
import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi
from transformers.integrations.integration_utils import MLflowCallback, TensorBoardCallback

from trainer.errors import ExitCode, first_line, write_line

if TYPE_CHECKING:
    from transformers import Trainer

    from trainer.config.sections import RunConfig

PROJECTS = {"wandb": "WANDB_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME"}
ROOM = 1 << 20  # bytes; a record is some kilobytes
READS_WEIGHTS = {"WANDB_LOG_MODEL": ("end",), "WANDB_WATCH": ("all", "gradients", "parameters")}


def names(config: RunConfig) -> list[str]:
    """The trackers that are on."""
    given = config.training.report_to
    return [name for name in ([given] if isinstance(given, str) else given) if name != "none"]


def refuse(config: RunConfig) -> None:
    """Raise ConfigError for a tracker that cannot work, known from the packages and variables that are there."""
    key, project = "training.report_to", config.training.project
    for name in names(config):
        if find_spec(name) is None:
            cure = f"pip install {name.replace('_', '-')}, or leave it out"
            raise config.error(key, name, f"the package {name} is not installed; {cure}")
        variable = PROJECTS.get(name, "")
        if project is not None and (said := os.environ.get(variable, project)) != project:
            raise config.error("training.project", project, f"{variable} is {said!r}; keep one of the two")
    for variable, refused in READS_WEIGHTS.items() if "wandb" in names(config) else ():
        if (said := os.environ.get(variable, "")) in refused:
            what = "reads weights where strategies may not have them; leave it out, or write WANDB_LOG_MODEL=checkpoint"
            raise config.error(key, "wandb", f"{variable}={said} {what}")


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


class Curves(TensorBoardCallback):  # type: ignore[misc]
    """TensorBoard's callback; what a full disk does not take is missing in its curves, and training goes on."""

    said = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or shutil.disk_usage(args.output_dir).free >= ROOM:
            super().on_log(args, state, control, logs=logs, **kwargs)
        elif not self.said:  # the thread that writes would end, and the run with it
            self.said = True
            write_line(f"{args.output_dir}: no space for TensorBoard; training goes on, with gaps in the curves")


class Tracked(MLflowCallback):  # type: ignore[misc]
    """MLflow's callback, which would say that the run is finished when training is over, or was ended by an error."""

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
    """TensorBoard's and MLflow's callbacks are ours, in their place among the others."""
    ours = {TensorBoardCallback: Curves, MLflowCallback: Tracked}
    callbacks = trainer.callback_handler.callbacks
    callbacks[:] = [ours[type(each)]() if type(each) in ours else each for each in callbacks]
