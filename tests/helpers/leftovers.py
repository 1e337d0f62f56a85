"""A pytest plugin: a session that leaves a file or folder behind in the checkout has failed.

The folder is listed before and after by the process that controls the workers. What git tracks by then, caches, and
``runs`` if it was there before do not count: others may work in the same checkout meanwhile.
"""

import os
import subprocess
from pathlib import Path

import pytest

CACHES = {".git", ".venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"}
BEFORE = pytest.StashKey[set[Path]]()


def listed(root: Path) -> set[Path]:
    """Every file and folder below ``root`` but for caches, relative to it."""
    found: set[Path] = set()
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in CACHES]
        found |= {(Path(folder) / name).relative_to(root) for name in (*inner, *files) if name not in CACHES}
    return found


def tracked(root: Path) -> set[Path]:
    """What git knows below ``root``, with the folders above; nothing where there is no git."""
    command = ["git", "-C", str(root), "ls-files", "-z"]
    names = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\0")
    return {path for name in names for path in (Path(name), *Path(name).parents)}


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # of the processes of pytest-xdist
        session.config.stash[BEFORE] = listed(session.config.rootpath)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """The last word, when the workers are gone."""
    root, before = session.config.rootpath, session.config.stash.get(BEFORE, None)
    if before is None:
        return
    left = listed(root) - before - tracked(root)
    runs = Path("runs")
    left = {path for path in left if path.parent not in left and not (runs in before and runs in path.parents)}
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        session.config.get_terminal_writer().line(f"\nleft behind: {', '.join(map(str, sorted(left)))}", red=True)
