"""The exact export as one file for llama.cpp, by llama.cpp's own converter if it is on PATH; else its command is shown.

Nothing here opens the file again: its first bytes are looked at, and what the converter says of itself is believed.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from trainer.errors import write_line
from trainer.run.export import ExportError

CONVERTER = "convert_hf_to_gguf.py"
FILE, MAGIC = "model.gguf", b"GGUF"


def is_here(exact: Path) -> bool:
    """Whether the converter is on PATH; else say with which command one is made of ``exact``."""
    if shutil.which(CONVERTER):
        return True
    write_line(f"export: {CONVERTER} (llama.cpp's) is not on PATH; with it: {CONVERTER} {exact} --outfile {FILE}")
    return False


def _first(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(len(MAGIC))


def make(exact: Path, draft: Path) -> None:
    """Convert, in the dtype of ``exact``. Raise ExportError if that ends with an error, or without such a file."""
    found, file = shutil.which(CONVERTER), draft / FILE
    assert found is not None
    ended = subprocess.run(
        [found, str(exact), "--outfile", str(file), "--outtype", "auto"], capture_output=True, text=True, check=False
    )
    if ended.returncode or not file.is_file() or _first(file) != MAGIC:
        said = (ended.stderr or ended.stdout).strip().splitlines()
        raise ExportError(f"export: {found} ended with {ended.returncode}: {said[-1] if said else 'it said nothing'}")
    write_line(f"export: {file.name}, by {found}; it has not been opened again")
