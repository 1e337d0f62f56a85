"""What makes another form of the trained model. Programs, of ``torch.export`` or ONNX, are made by ``graph.py``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deepstow.trainer.registry import Registry, needed

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig


class Exporter:
    """Another form of the trained model, made after training, on the CPU, by the first rank.

    Attributes:
        name: in a config; an exporter from outside is given the one that it is used by.
        folder: the export is in ``export-FOLDER``; not set: the name, or that of the class from outside.
        packages: that have to be installed.
        language: it takes tasks alone that predict the next token.
    """

    name: str
    folder: str = ""
    packages: tuple[str, ...] = ()
    language = False

    @property
    def place(self) -> str:
        """The end of the folder's name."""
        return self.folder or self.name.rpartition(":")[2]

    def refuse(self, config: RunConfig) -> str:
        """What cannot work, before any weight is loaded; empty if nothing is known."""
        return ""

    @needed
    def export(self, exact: Path, out: Path, config: RunConfig) -> str:
        """Write the form of the model in folder ``exact``, as ``from_pretrained`` opens it, into the empty folder
        ``out``. Returns what is said of it, in Markdown: how it was checked, how it is opened.
        """
        raise NotImplementedError


EXPORTERS: Registry[Exporter] = Registry(Exporter, "deepstow.exporters", "deepstow.trainer.recipes.export.exporter")


@EXPORTERS.add
class TorchExport(Exporter):
    """For ``torch.export.load``, AOTInductor, ExecuTorch."""

    name = "torch_export"
    folder = "torch"
    language = True

    def refuse(self, config: RunConfig) -> str:
        from deepstow.trainer.recipes.export import graph

        return graph.refused(config, self.name)

    def export(self, exact: Path, out: Path, config: RunConfig) -> str:
        from deepstow.trainer.recipes.export import graph

        return graph.make(config, self.name, exact, out)


@EXPORTERS.add
class Onnx(TorchExport):
    """For onnxruntime and its like."""

    name = "onnx"
    folder = "onnx"
    packages = ("onnx", "onnxscript", "onnxruntime")
