"""``training.push_to_hub``: the export, and nothing else, is uploaded to the Hugging Face hub when the run is over.

Hugging Face's Trainer would upload the run's folder at each save: weights that nothing has compared yet, logs, and the
tokenised data. Here it is told nothing of the hub. What is uploaded was reloaded and compared (``export.py``), with the
card that says how it was made.

Refused: a hub that is not there, or that does not know the user, before data is read; a repository that the user may
not write, before a weight exists. If the upload itself fails the export stays, and starting the run again uploads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import UserError, first_line
from trainer.model.hub import unreachable

if TYPE_CHECKING:
    from trainer.config.sections import RunConfig


class NotUploaded(UserError):
    """The export is whole, and the hub has not taken it."""


def refuse(config: RunConfig) -> None:
    """Raise ConfigError if there is something to upload, and the hub cannot be reached or does not know the user."""
    from huggingface_hub import HfApi

    if not config.training.push_to_hub:
        return
    why, cure = unreachable(), f"leave it out, and upload the export when there is one: {_command(config)}"
    if why is None:
        try:
            HfApi().whoami()
        except Exception as error:
            why, cure = first_line(error), "log in with `hf auth login`, or set HF_TOKEN"
    else:
        why = f"the hub cannot be reached ({why})"
    if why is not None:
        raise config.error("training.push_to_hub", True, f"{why}; {cure}")


def repository(config: RunConfig) -> str | None:
    """The repository, which is made if it is not there, and so is its branch; None if nothing is to be uploaded. Raise
    ConfigError if the user may not make them.
    """
    from huggingface_hub import HfApi

    training = config.training
    if not training.push_to_hub:
        return None
    try:
        name = str(HfApi().create_repo(_name(config), private=training.hub_private_repo, exist_ok=True).repo_id)
        if training.hub_revision is not None:
            HfApi().create_branch(name, branch=training.hub_revision, exist_ok=True)
        return name
    except Exception as error:
        what = f"the hub does not let it be made: {first_line(error)}"
        raise config.error("training.hub_model_id", _name(config), what) from None


def upload(config: RunConfig) -> str | None:
    """Upload the export; files that are there already are not sent again. Returns a line, or raises NotUploaded."""
    from huggingface_hub import HfApi

    if (name := repository(config)) is None:
        return None
    folder = _folder(config)
    try:
        HfApi().upload_folder(
            repo_id=name,
            folder_path=folder,
            revision=config.training.hub_revision,
            commit_message="Trained with DeepStow",
        )
    except Exception as error:
        line = f"{folder} is whole, and was not uploaded to {name}: {first_line(error)}"
        raise NotUploaded(f"{line}; start the run again, or: {_command(config)}") from None
    return f"uploaded:   {folder}, as {name}"


def _name(config: RunConfig) -> str:
    return config.training.hub_model_id or Path(config.training.output_dir).absolute().name


def _folder(config: RunConfig) -> Path:
    return Path(config.training.output_dir) / "export"


def _command(config: RunConfig) -> str:
    return f"hf upload {_name(config)} {_folder(config)}"
