"""Exports that are made of the exact one, after training: each in ``<output_dir>/export-NAME``.

Invariant. Each is sealed under the manifest of the exact export and what else decides it. A run that is started again
makes what is missing or damaged, of the export that is there, without a step of training. All are made on the first
rank, once training has left the device.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepstow.strategies.state.commit import replaced_folder, same_modes
from deepstow.strategies.state.sealed import MANIFEST, intact, seal, size_and_hash
from deepstow.trainer.errors import write_line
from deepstow.trainer.run import earlier, exported, quantized
from deepstow.trainer.run.earlier import FURTHER
from deepstow.trainer.run.export import ExportError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from deepstow.trainer.config.sections import RunConfig

PROGRAMS = {"torch": "torch_export", "onnx": "onnx", "gguf": "gguf"}  # by the end of the folder's name


CONVERTER = "convert_hf_to_gguf.py"  # llama.cpp's
GGUF, MAGIC = "model.gguf", b"GGUF"  # its file, and what that begins with


def folder_of(config: RunConfig, name: str) -> Path:
    """Where one is."""
    return Path(config.training.output_dir) / f"export-{name}"


def refuse(config: RunConfig) -> None:
    """Raise ConfigError for what cannot be made of the model."""
    exported.refuse(config)
    quantized.refuse(config)


def missing(config: RunConfig) -> list[str]:
    """Those that are asked for and are not there, whole and made of the export that is there."""
    names: list[str] = [*config.quantize.formats] if config.quantize else []
    names += [name for name, form in PROGRAMS.items() if config.export and config.export.format == form]
    return [name for name in names if not _is_whole(config, name)]


def _exact(config: RunConfig) -> Path:
    return Path(config.training.output_dir) / "export"


def _decides(config: RunConfig, name: str) -> dict[str, Any]:
    section = config.export if name in PROGRAMS else config.quantize
    assert section is not None
    return {"of": size_and_hash(_exact(config) / MANIFEST)[1], **section.model_dump(exclude={"formats"})}


def _is_whole(config: RunConfig, name: str) -> bool:
    try:
        return intact(folder_of(config, name), FURTHER, {"decided by": _decides(config, name)})
    except OSError:
        return False


def make(config: RunConfig, tokenizer: PreTrainedTokenizerBase, rows: Dataset | None, budget: int) -> None:
    """Make what is missing; ``rows`` are evaluated, ``budget``: bytes of the device. Raise ExportError if one is not
    what was made, after reloading.
    """
    names, exact, report = missing(config), _exact(config), None
    for name in names:
        if name == "gguf" and not shutil.which(CONVERTER):
            write_line(
                f"export: {CONVERTER} (llama.cpp's) is not on PATH; with it: {CONVERTER} {exact} --outfile {GGUF}"
            )
            continue
        if name not in PROGRAMS and report is None:
            assert rows is not None
            report = quantized.Report(config, exact, tokenizer, rows, budget)
        folder = Path(config.training.output_dir)
        if aside := earlier.move_aside([folder_of(config, name)], folder, overwrite=config.training.overwrite):
            write_line(f"the {folder_of(config, name).name} of before is now in {aside}")
        with replaced_folder(folder_of(config, name)) as draft:
            about: dict[str, Any] = {}
            if name == "gguf":
                _convert(exact, draft / GGUF)
            elif name in PROGRAMS:
                exported.make(config, exact, draft)
            elif report is not None:
                about["perplexity"] = report.make(name, draft)
            tokenizer.save_pretrained(draft)
            same_modes(draft)
            seal(draft, FURTHER, {"decided by": _decides(config, name), **about})
    if report is not None:
        report.say()


def _first(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(len(MAGIC))


def _convert(exact: Path, file: Path) -> None:
    """Let llama.cpp's converter make ``file``, in the dtype of ``exact``. Raise ExportError if that ends with an error,
    or without such a file. It is not opened again: its first bytes are looked at, and the converter is believed.
    """
    command = [str(shutil.which(CONVERTER)), str(exact), "--outfile", str(file), "--outtype", "auto"]
    # In a group of its own: Ctrl-C in a terminal, with which the run finishes its export, does not come to it.
    ended = subprocess.run(command, capture_output=True, text=True, check=False, process_group=0)
    if ended.returncode or not file.is_file() or _first(file) != MAGIC:
        said = (ended.stderr or ended.stdout).strip().splitlines()
        what = f"{command[0]} ended with {ended.returncode}: {said[-1] if said else 'it said nothing'}"
        raise ExportError(f"export: {what}")
    write_line(f"export: {file.name}, by {command[0]}; it has not been opened again")
