"""Names that only the Hugging Face hub has, on a machine that does not reach it.

The hub's client asks six times, over 23 s, for each file that it wants, also for those in its cache. So the hub is
looked at once, before the first name is asked for and for 3 s at most. If it does not answer, only the cache is read,
and a name that is not in it is refused at once.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from threading import Thread

LOOK_S = 3.0
NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[\w.-]+")


@cache
def unreachable() -> str | None:
    """Why the hub cannot be reached; None if it answers, whatever it says."""
    from huggingface_hub import constants, get_session

    answers: list[str | None] = []

    def look() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=LOOK_S)
            answers.append(None)
        except Exception as error:  # of its client, of a proxy, or since it is switched off by HF_HUB_OFFLINE
            answers.append(str(error).strip().partition("\n")[0] or type(error).__name__)

    thread = Thread(target=look, daemon=True)  # since nothing limits the time in which a name server answers
    thread.start()
    thread.join(LOOK_S)
    return answers[0] if answers else f"no answer within {LOOK_S:g} s"


def is_name(name: str) -> bool:
    """Whether ``name`` is one of the hub's, and no file or folder here. ``corpus/train`` is a misspelt path and no name
    of the hub if there is a folder ``corpus``.
    """
    is_local = Path(name).expanduser().exists() or ("/" in name and Path(name).parent.is_dir())
    return not is_local and NAME.fullmatch(name) is not None


def shown(name: str) -> str:
    """How a saved model is called where others read it: by its name on the hub, or by the last part of its path."""
    return name if is_name(name) else Path(name).absolute().name


def options(name: str) -> dict[str, bool]:
    """What ``from_pretrained(name)`` needs besides, so that it does not ask a hub that is not there."""
    return {} if Path(name).exists() or unreachable() is None else {"local_files_only": True}


def file_of(name: str | None, file: str) -> Path | None:
    """A file of a saved model; None if it has none of this name, or there is no saved model."""
    from transformers.utils.hub import cached_file

    path = name and cached_file(name, file, _raise_exceptions_for_missing_entries=False, **options(name))
    return Path(path) if path else None
