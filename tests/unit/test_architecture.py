"""What a process imports. Who may import whom is a contract of import-linter, who may call what one of ruff."""

import subprocess
import sys
from importlib import import_module

import pytest

from deepstow.strategies.core.registry import available

DECIDING = """
import sys
from importlib import import_module
from pkgutil import walk_packages
for name in ("core", "planner", "report"):
    package = import_module(f"deepstow.strategies.{name}")
    for found in walk_packages(package.__path__, f"{package.__name__}."):
        import_module(found.name)
for name in sys.argv[1:]:
    import_module(f"deepstow.strategies.{name}")
print(sorted({"torch", "deepspeed", "transformers", "accelerate", "numpy"} & sys.modules.keys()))
"""


def test_deciding_needs_no_torch() -> None:
    """A plan is made on a laptop, and a strategy imports torch where it changes a model."""
    command = [sys.executable, "-c", DECIDING, *available()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", ["trainer.errors", "strategies.core", "launch.cli", "benchmarks.harness"])
def test_nothing_is_imported_without_the_root(name: str) -> None:
    """By no name in a string either: it would be a second module, whose classes are others."""
    with pytest.raises(ImportError, match=f"^import deepstow.{name.partition('.')[0]}$"):
        import_module(name)
