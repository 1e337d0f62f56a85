"""Exports that are made of the exact one, after training: each in ``<output_dir>/export-NAME``.

Invariant. Each is sealed under the manifest of the exact export and what else decides it. A run that is started again
makes what is missing or damaged, of the export that is there, without a step of training. All are made on the first
rank, once training has left the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepstow.strategies.state.commit import replaced_folder, same_modes
from deepstow.strategies.state.sealed import MANIFEST, intact, seal, size_and_hash
from deepstow.trainer.config.recipe import Writer
from deepstow.trainer.errors import write_line
from deepstow.trainer.registry import blamed, codes
from deepstow.trainer.run import earlier
from deepstow.trainer.run.earlier import FURTHER

if TYPE_CHECKING:
    from deepstow.trainer.config.recipe import Exact, Recipe
    from deepstow.trainer.config.sections import RunConfig


def folder_of(config: RunConfig, name: str) -> Path:
    """Where one is."""
    return Path(config.training.output_dir) / f"export-{name}"


def refuse(config: RunConfig) -> None:
    """Raise ConfigError for what cannot be made of the model."""
    for recipe in config.switched_on:
        recipe.refuse(config)


def names(config: RunConfig) -> list[str]:
    """Those that are asked for."""
    return [name for recipe in config.switched_on for name in recipe.exports(config)]


def missing(config: RunConfig) -> list[str]:
    """Those that are asked for and are not there, whole and made of the export that is there."""
    return [name for recipe in config.switched_on for name in _missing(config, recipe)]


def _missing(config: RunConfig, recipe: Recipe) -> dict[str, dict[str, Any]]:
    """What decides each that ``recipe`` has to make."""
    found, code = dict[str, dict[str, Any]](), codes([recipe])
    for name, by_recipe in recipe.exports(config).items():
        own = dict(by_recipe) | ({"recipe": code} if code else {})
        with suppress(OSError):  # there is no exact one
            if intact(folder_of(config, name), FURTHER, {"decided by": _decided(config, own)}):
                continue
        found[name] = own
    return found


def exact_of(config: RunConfig) -> Path:
    """Where the exact export is."""
    return Path(config.training.output_dir) / "export"


def _decided(config: RunConfig, own: Mapping[str, Any]) -> dict[str, Any]:
    """What decides an export: the exact one, and what its recipe says."""
    return {"of": size_and_hash(exact_of(config) / MANIFEST)[1], **own}


def make(config: RunConfig, exact: Exact) -> None:
    """Make what is missing. Raise ExportError if one is not what was made, after reloading."""
    output, writers = Path(config.training.output_dir), list[Writer]()
    for recipe in config.switched_on:
        absent = _missing(config, recipe)
        if not absent:
            continue
        writer, is_outside = recipe.writer(config, exact), bool(codes([recipe]))
        writers.append(writer)
        for name, own in absent.items():
            folder = folder_of(config, name)
            if aside := earlier.move_aside([folder], output, overwrite=config.training.overwrite):
                write_line(f"the {folder.name} of before is now in {aside}")
            with replaced_folder(folder) as draft:
                with blamed(recipe.name, "write") if is_outside else nullcontext():
                    about = writer.write(name, draft)
                exact.tokenizer.save_pretrained(draft)
                same_modes(draft)
                seal(draft, FURTHER, {"decided by": _decided(config, own), **about})
            writer.wrote(name, folder)
    for writer in writers:
        writer.end()
