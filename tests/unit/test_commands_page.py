"""docs/commands.md has each command as ``deepstow`` knows it."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_is_written() -> None:
    made = runpy.run_path(str(ROOT / ".ci" / "commands.py"))["text"]()
    assert (ROOT / "docs" / "commands.md").read_text(encoding="utf-8") == made, "run python .ci/commands.py"
