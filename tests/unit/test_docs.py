"""The docs: the site builds without a dead link, their configs are ones, and each strategy has its page."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepstow.strategies.core.registry import available
from deepstow.trainer.config.check import check
from deepstow.trainer.config.doc import BEGIN, END
from deepstow.trainer.config.load import merged
from deepstow.trainer.config.yaml_file import parse

ROOT = Path(__file__).resolve().parents[2]
TWO_SCREENS = 100
YAML = re.compile(r"^```yaml\n(.*?)^```", re.S | re.M)
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if YAML.search(page.read_text())]
REST: dict[str, Any] = {
    "model": {"name_or_path": "m"},
    "data": {"path": "d", "max_length": 8, "eval_fraction": 0.1},
    "training": {"output_dir": "r"},
}


def built(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Runs what `make docs` runs; the site goes to ``site``."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", root / ".ci/mkdocs.yml"]
    return subprocess.run([*command, "--site-dir", site], check=False, capture_output=True, text=True)


def test_the_site_builds(tmp_path: Path) -> None:
    done = built(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.rglob("*.html")} >= {"index.html", "resume.html", "offload.html"}


def test_a_dead_link_ends_it(tmp_path: Path) -> None:
    """To a page, to a place in one, to a file outside of the docs, and by the name that a message says."""
    for folder in (".ci", "docs", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    links = ("nowhere.md", "resume.md#somewhere", "../benchmarks/records/neverwhere")
    (tmp_path / "docs/index.md").write_text("\n".join(f"[here]({link})" for link in links) + "\ndeepstow docs anywhere")
    found = built(tmp_path, tmp_path / "site")
    said = found.stderr + found.stdout
    assert found.returncode != 0 and all(f"{where}where" in said for where in ("/never", "#some", "no", "docs any"))


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_yaml_of_a_page_is_a_config_or_a_part_of_one(page: Path) -> None:
    """It passes the check, with what every config has; a first key that comes again begins another way to write it."""
    found = (re.split(f"^(?={text.partition(':')[0]}:)", text, flags=re.M) for text in YAML.findall(page.read_text()))
    for text in (part for parts in found for part in parts if part):
        tree, document = parse(text, page.name)
        whole = merged(REST, tree)
        for key, other in (("data.path", "data.datasets"), ("model.name_or_path", "model.config")):
            (section, name), instead = key.split("."), other.split(".")[1]
            if instead in whole[section]:
                del whole[section][name]
        assert document.problems == [] and check(whole) == [], text


@pytest.mark.parametrize("name", available())
def test_a_strategy_has_a_page_of_two_screens(name: str) -> None:
    text = (ROOT / "docs/strategies" / f"{name}.md").read_text()
    before, _, rest = text.partition(BEGIN)
    written = before + rest.partition(END)[2]
    assert len(written.splitlines()) <= TWO_SCREENS


def test_pages_outside_of_the_docs_link_to_files() -> None:
    """MkDocs sees to those of the docs."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "benchmarks").rglob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())]
    assert links and [(page.name, link) for page, link in links if not (page.parent / link).exists()] == []
