"""The trained model in another format as well: as a program, or as an exporter from outside writes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepstow.strategies.core.protocol import Refusal
from deepstow.trainer.config.arguments import Section, one_of, option
from deepstow.trainer.config.recipe import RECIPES, Exact, Recipe, Writer
from deepstow.trainer.errors import write_line
from deepstow.trainer.recipes.export.exporter import EXPORTERS, Exporter
from deepstow.trainer.registry import Raised, codes

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig

    ExporterName = str
else:
    ExporterName = one_of(EXPORTERS, {"gguf": "llama.cpp converts the export; deepstow docs use has the commands"})
KEY = "export.format"


class ExportSection(Section):
    """Export the trained model in another format as well, after training (deepstow docs export)."""

    format: ExporterName = option(
        "A file for torch.export.load, one of ONNX, which takes onnx, onnxscript and onnxruntime, or what an exporter "
        "of your own writes (deepstow docs extending).",
        "torch_export",
    )


@RECIPES.add
class Export(Recipe):
    """Another form of the exact export."""

    name = "export"
    section = ExportSection
    resume = "free"
    merges = True

    def refusals(self, config: RunConfig, world_size: int, *, installed: bool) -> Iterator[Refusal]:
        exporter, name = self.exporter(config), self.options(config).format
        absent = [package for package in exporter.packages if find_spec(package) is None] if installed else []
        if absent:
            yield Refusal(
                KEY, name, f"needs {', '.join(absent)}; write pip install {' '.join(absent)}, or torch_export"
            )
        if exporter.place != Path(exporter.place).name or exporter.place in ("", ".", ".."):
            yield Refusal(
                KEY, name, f"its folder is {exporter.place!r}, which is no name; it is a part of export-FOLDER"
            )
        if exporter.language and not config.chosen_task.language:
            what = f"is for tasks that predict the next token, and this is {config.task}; leave it out"
            yield Refusal(KEY, name, what)
        for other in config.switched_on:
            if other.name != self.name and exporter.place in other.exports(config):
                what = f"writes export-{exporter.place}, which {other.name} writes; give it another folder"
                yield Refusal(KEY, name, what)

    def exporter(self, config: RunConfig) -> Exporter:
        """What is asked for. Raise ConfigError if it is from outside, and cannot be used."""
        return config.thing(EXPORTERS, KEY, self.options(config).format)

    def refuse(self, config: RunConfig) -> None:
        if what := self.exporter(config).refuse(config):
            raise config.error(KEY, self.options(config).format, what)

    def exports(self, config: RunConfig) -> Mapping[str, Mapping[str, Any]]:
        exporter = self.exporter(config)
        code = codes([exporter])
        return {exporter.place: self.options(config).model_dump() | ({"code": code} if code else {})}

    def writer(self, config: RunConfig, exact: Exact) -> Writer:
        return _Writer(config, exact, self.exporter(config))


class _Writer(Writer):
    def __init__(self, config: RunConfig, exact: Exact, exporter: Exporter) -> None:
        self._config = config
        self._exact = exact
        self._exporter = exporter

    def write(self, name: str, draft: Path) -> Mapping[str, Any]:
        from deepstow.trainer.run.exporting.export import after

        text = self._exporter.export(self._exact.folder, draft, self._config)
        if not isinstance(text, str):
            raise Raised(
                f"{self._exporter.name}: export has returned {text!r:.40}, and is to return what the card says, a text"
            )
        if not any(draft.iterdir()):
            raise Raised(f"{self._exporter.name}: export has written no file")
        if text:
            after(self._exact.folder, text).save(draft / "README.md")
        return {}

    def wrote(self, name: str, folder: Path) -> None:
        if getattr(self._exporter, "code", None):
            write_line(f"export: {folder}, by {name}")
