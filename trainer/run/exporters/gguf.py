"""The trained model for llama.cpp, by its own converter. It is not opened again, and the converter is believed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from deepstow.trainer.config.exporter import EXPORTERS, Exporter

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig

CONVERTER = "convert_hf_to_gguf.py"  # llama.cpp's
FILE, MAGIC = "model.gguf", b"GGUF"  # its file, and what that begins with


@EXPORTERS.add
class Gguf(Exporter):
    """One file, for llama.cpp and Ollama."""

    name = "gguf"
    language = True

    def waits(self, exact: Path) -> str:
        if shutil.which(CONVERTER):
            return ""
        return f"{CONVERTER} (llama.cpp's) is not on PATH; with it: {CONVERTER} {exact} --outfile {FILE}"

    def export(self, exact: Path, out: Path, config: RunConfig) -> str:
        """In the dtype of ``exact``. Raise ExportError if the converter fails, or writes no such file."""
        from deepstow.trainer.errors import write_line
        from deepstow.trainer.run.export import ExportError

        file = out / FILE
        command = [str(shutil.which(CONVERTER)), str(exact), "--outfile", str(file), "--outtype", "auto"]
        # In a group of its own: Ctrl-C in a terminal, with which the run finishes its export, does not come to it.
        ended = subprocess.run(command, capture_output=True, text=True, check=False, process_group=0)
        if ended.returncode or not file.is_file() or _first(file) != MAGIC:
            said = (ended.stderr or ended.stdout).strip().splitlines()
            what = f"{command[0]} ended with {ended.returncode}: {said[-1] if said else 'it said nothing'}"
            raise ExportError(f"export: {what}")
        write_line(f"export: {file.name}, by {command[0]}; it has not been opened again")
        return ""


def _first(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(len(MAGIC))
