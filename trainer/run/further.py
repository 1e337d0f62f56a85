"""Exports that are made of the exact one, after training: each in ``<output_dir>/export-NAME``.

Invariant. Each is sealed under the manifest of the exact export and what else decides it. A run that is started again
makes what is missing or damaged, of the export that is there, without a step of training. All are made on the first
rank, once training has left the device.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepstow.strategies.state.commit import replaced_folder, same_modes
from deepstow.strategies.state.sealed import MANIFEST, intact, seal, size_and_hash
from deepstow.trainer.errors import write_line
from deepstow.trainer.registry import codes
from deepstow.trainer.run import earlier, quantized
from deepstow.trainer.run.earlier import FURTHER
from deepstow.trainer.run.export import after

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from deepstow.trainer.config.sections import RunConfig


def folder_of(config: RunConfig, name: str) -> Path:
    """Where one is."""
    return Path(config.training.output_dir) / f"export-{name}"


def refuse(config: RunConfig) -> None:
    """Raise ConfigError for what cannot be made of the model."""
    if config.export and config.exporter and (what := config.exporter.refuse(config)):
        raise config.error("export.format", config.export.format, what)
    quantized.refuse(config)


def missing(config: RunConfig) -> list[str]:
    """Those that are asked for and are not there, whole and made of the export that is there."""
    names: list[str] = [*config.quantize.formats] if config.quantize else []
    names += [config.exporter.place] if config.exporter else []
    return [name for name in names if not _is_whole(config, name)]


def _exact(config: RunConfig) -> Path:
    return Path(config.training.output_dir) / "export"


def _decides(config: RunConfig, name: str) -> dict[str, Any]:
    exporter = config.exporter if config.exporter and config.exporter.place == name else None
    section = config.export if exporter else config.quantize
    assert section is not None
    code = codes([exporter])
    own = {"code": code} if code else {}
    return {"of": size_and_hash(_exact(config) / MANIFEST)[1], **section.model_dump(exclude={"formats"}), **own}


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
        exporter = config.exporter if config.exporter and config.exporter.place == name else None
        if exporter and (line := exporter.waits(exact)):
            write_line(f"export: {line}")
            continue
        if exporter is None and report is None:
            assert rows is not None
            report = quantized.Report(config, exact, tokenizer, rows, budget)
        folder = Path(config.training.output_dir)
        if aside := earlier.move_aside([folder_of(config, name)], folder, overwrite=config.training.overwrite):
            write_line(f"the {folder_of(config, name).name} of before is now in {aside}")
        with replaced_folder(folder_of(config, name)) as draft:
            about: dict[str, Any] = {}
            if exporter is not None:
                said = exporter.export(exact, draft, config)
                if said:
                    after(exact, said).save(draft / "README.md")
            elif report is not None:
                about["perplexity"] = report.make(name, draft)
            tokenizer.save_pretrained(draft)
            same_modes(draft)
            seal(draft, FURTHER, {"decided by": _decides(config, name), **about})
        if getattr(exporter, "code", None):
            write_line(f"export: {folder_of(config, name)}, by {name}")
    if report is not None:
        report.say()
