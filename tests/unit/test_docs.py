"""The docs: the site builds without a dead link, and each strategy has its page."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deepstow.strategies.core.registry import available
from deepstow.trainer.config.doc import BEGIN, END

ROOT = Path(__file__).resolve().parents[2]
TWO_SCREENS = 100


def built(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Runs what `make docs` runs; the site goes to ``site``."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", root / ".ci/mkdocs.yml"]
    return subprocess.run([*command, "--site-dir", site], check=False, capture_output=True, text=True)


def test_the_site_builds(tmp_path: Path) -> None:
    done = built(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.rglob("*.html")} >= {"index.html", "reliability.html", "offload.html"}


def test_a_dead_link_ends_it(tmp_path: Path) -> None:
    """To a page, to a place in one, and to a file outside of the docs."""
    for folder in (".ci", "docs", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    links = ("nowhere.md", "reliability.md#somewhere", "../benchmarks/records/neverwhere")
    (tmp_path / "docs/index.md").write_text("\n".join(f"[here]({link})" for link in links))
    found = built(tmp_path, tmp_path / "site")
    said = found.stderr + found.stdout
    assert found.returncode != 0 and all(f"{where}where" in said for where in ("/never", "#some", "no"))


@pytest.mark.parametrize("name", available())
def test_a_strategy_has_a_page_of_two_screens(name: str) -> None:
    text = (ROOT / "docs/strategies" / f"{name}.md").read_text()
    before, _, rest = text.partition(BEGIN)
    written = before + rest.partition(END)[2]
    assert len(written.splitlines()) <= TWO_SCREENS
