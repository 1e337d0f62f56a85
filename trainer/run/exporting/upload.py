"""``training.push_to_hub``: the export, and nothing else, is uploaded to the Hugging Face hub when the run is over.

Hugging Face's Trainer would upload the run's folder at each save: weights that nothing has compared yet, logs, and the
tokenised data. Here it is told nothing of the hub. What is uploaded was reloaded and compared (``export.py``), with the
card that says how it was made.

Invariant. Nothing that is uploaded says where it was made: the card has no paths, and of a path in a configuration only
the last part is sent. Adapters on a base in a local folder keep its path at home, so that they can be loaded there; who
loads them from the hub gives the base. The manifest that is sent is of the files as they are sent.

Refused: a hub that is not there, or that does not know the user, before data is read; a repository that the user may
not write, before a weight exists. If the upload itself fails the export stays, and starting the run again uploads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from deepstow.strategies.state.sealed import MANIFEST, File, read, signed, size_and_hash
from deepstow.trainer.errors import UserError, first_line, write_line
from deepstow.trainer.model import hub
from deepstow.trainer.model.hub import unreachable
from deepstow.trainer.run.checkpoints import finished

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig


TOKENS = re.compile(r"tokens?$|tokens_decoder$")  # keys whose values are words of a tokenizer


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


def upload(config: RunConfig) -> None:
    """Upload the export; files that are there already are not sent again. Raise UserError if it is not taken."""
    from huggingface_hub import HfApi

    if (name := repository(config)) is None:
        return
    folder = _folder(config)
    try:
        with without_places(folder) as (sent, files):
            HfApi().upload_folder(
                repo_id=name,
                folder_path=sent,
                revision=config.training.hub_revision,
                commit_message="Trained with DeepStow",
            )
    except Exception as error:
        line = f"{folder} is whole, and was not uploaded to {name}: {first_line(error)}"
        raise UserError(f"{line}; start the run again, or: {_command(config)}") from None
    note = f"; without the folders in {', '.join(files)}, of which names were sent alone" if files else ""
    write_line(f"uploaded:   {folder}, as {name}{note}")


@contextmanager
def without_places(export: Path) -> Iterator[tuple[Path, list[str]]]:
    """The folder to upload, and the names of files in it that are others than those of the ``export``."""
    changed = {path: content for path in export.rglob("*config.json") if (content := _elsewhere(path)) is not None}
    if not changed:
        yield export, []
        return
    with TemporaryDirectory(prefix="deepstow-upload-") as temporary:
        folder = Path(temporary)
        manifest = read(export, finished.KIND)
        for name in manifest.files:
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if (content := changed.get(export / name)) is None:
                place.symlink_to((export / name).absolute())
            else:
                place.write_text(content)
                num_bytes, sha256 = size_and_hash(place)
                manifest.files[name] = File(bytes=num_bytes, sha256=sha256)
        (folder / MANIFEST).write_text(signed(manifest.model_dump()))
        yield folder, sorted(path.name for path in changed)


def _elsewhere(path: Path) -> str | None:
    """A configuration as others get it; None: as it is."""
    tree = json.loads(path.read_bytes())
    shortened = _named(tree)
    return None if shortened == tree else json.dumps(shortened, indent=2) + "\n"


def _named(value: Any, key: str = "") -> Any:
    """``value`` with the last part of each path to a file or folder of this machine; tokens may look like paths."""
    if isinstance(value, dict):
        return {name: item if TOKENS.search(name) else _named(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_named(item, key) for item in value]
    if not isinstance(value, str):
        return value
    is_base = key == "base_model_name_or_path" and not hub.is_name(value)
    is_path = value.startswith(("/", "~/")) and len(Path(value).parts) > 2 and len(value.splitlines()) == 1
    return Path(value).absolute().name if is_base or is_path else value


def _name(config: RunConfig) -> str:
    return config.training.hub_model_id or Path(config.training.output_dir).absolute().name


def _folder(config: RunConfig) -> Path:
    return Path(config.training.output_dir) / "export"


def _command(config: RunConfig) -> str:
    return f"hf upload {_name(config)} {_folder(config)}"
