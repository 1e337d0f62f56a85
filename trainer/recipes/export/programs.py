"""The trained model as a program, of ``torch.export`` or ONNX; ``graph.py`` makes and compares it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deepstow.trainer.recipes.export.exporter import EXPORTERS, Exporter

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig


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
