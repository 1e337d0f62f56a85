"""The docs: the site builds without a dead link, their configs are ones, and each strategy has its page."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepstow.trainer.config.check import check
from deepstow.trainer.config.load import merged
from deepstow.trainer.config.yaml_file import parse

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "benchmarks/README.md"])
def test_a_page_outside_of_the_docs_links_to_files(page: str) -> None:
    """MkDocs sees to those of the docs."""
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", (ROOT / page).read_text())
    assert links and [link for link in links if not ((ROOT / page).parent / link).exists()] == []
