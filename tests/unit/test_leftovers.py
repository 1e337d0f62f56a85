"""A test session that leaves something behind in the checkout fails, and names it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEST = "from pathlib import Path\ndef test_it(): {}\n"


def session(folder: Path, line: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(TEST.format(line))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.helpers.leftovers", "--rootdir", folder, *options]
    variables = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.run([*command, folder], cwd=folder, check=False, capture_output=True, text=True, env=variables)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "workers"])
def test_an_empty_folder_is_found(options: tuple[str, ...], tmp_path: Path) -> None:
    done = session(tmp_path, "Path('trainer_output/inner').mkdir(parents=True)", *options)
    assert done.returncode == 1 and "1 passed" in done.stdout
    assert "left behind: trainer_output\n" in done.stdout


def test_what_git_tracks_caches_and_earlier_runs_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    made = "[Path(name).touch() for name in ('runs/a', 'new.py')], __import__('os').system('git add new.py')"
    done = session(tmp_path, made)
    assert done.returncode == 0, done.stdout
