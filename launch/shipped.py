"""The configs that come with the package, for ``--config NAME`` where the folder has no file of that name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import deepstow
from deepstow.trainer.config import load as reader
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.config.yaml_file import dotted, leaves, read
from deepstow.trainer.errors import ConfigError, nearest, write_line

FOLDER = Path(deepstow.__file__).parent / "configs"


def to_stderr(line: str) -> None:
    """Beside what a command prints."""
    write_line(line, sys.stderr)


def load(name: str, overrides: Sequence[str] = (), say: Callable[[str], None] = to_stderr) -> RunConfig:
    """The config of a file, or else of the package, which is said, changed by ``overrides``. Raise ConfigError with one
    line per problem.
    """
    if "/" in name or Path(name).is_file():
        return reader.load(name, overrides)
    if (local := Path(f"{name}.yaml")).is_file():
        say(f"config: {local}")
        return reader.load(local, overrides)
    packaged = FOLDER / f"{name.removesuffix('.yaml')}.yaml"
    if not packaged.exists() and name.endswith(".yaml"):
        return reader.load(name, overrides)  # which says what is here
    if not packaged.exists():
        names = [path.stem for path in sorted(FOLDER.glob("*.yaml"))]
        what = f"no such file here, and no config of deepstow: {', '.join(names)}{nearest(name, names)}"
        raise ConfigError(f"--config {name}: {what}")
    say(f"config: {packaged.name} of deepstow, {packaged}")
    return reader.load(packaged, [*_folders(packaged), *overrides])


def _folders(ours: Path) -> list[str]:
    """Overrides for what a config of the package names beside it."""
    entries = leaves((), read(ours).tree)
    return [
        f"{dotted(key)}={FOLDER.parent / value}"
        for key, value in entries
        if isinstance(value, str) and value.startswith(f"{FOLDER.name}/")
    ]
