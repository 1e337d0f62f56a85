"""Find strategies: a file in ``strategies`` is a strategy, and its name is the name in the config.

Only the files that a config names are imported.
"""

import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from deepstow.strategies.core.compatibility import RULES, Rule
from deepstow.strategies.core.protocol import Strategy

FOLDER = Path(__file__).resolve().parent.parent


@cache
def available() -> tuple[str, ...]:
    """Names of all strategies, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules([str(FOLDER)]) if not module.ispkg))


def find(name: str) -> type[Strategy]:
    """The one strategy class in ``strategies/<name>.py``. Raise KeyError if there is no such file."""
    if name not in available():
        raise KeyError(name)
    module = importlib.import_module(f"deepstow.strategies.{name}")
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Strategy) and value.__module__ == module.__name__
    ]
    assert len(classes) == 1, f"strategies/{name}.py must define exactly one Strategy, found {len(classes)}"
    return classes[0]


def rules(names: Iterable[str]) -> tuple[Rule, ...]:
    """The table of compatibility, with the rows of plug-ins among these strategies: ``RULES`` in their files."""
    modules = (importlib.import_module(f"deepstow.strategies.{name}") for name in names if name in available())
    return (*RULES, *(rule for module in modules for rule in getattr(module, "RULES", ())))
