"""What the installed releases, or the machine, cannot do, as marks with a reason."""

from collections.abc import Mapping
from importlib.util import find_spec
from tempfile import gettempdir
from typing import Any

import pytest

from deepstow.strategies.core.protocol import Refusal, is_older
from deepstow.strategies.core.registry import find
from deepstow.strategies.engine.memory.scratch_file import ScratchFile
from deepstow.strategies.parallel.deepspeed import builds_under_stage_3
from deepstow.strategies.pipeline import RETURNS_FROM
from deepstow.trainer.tasks.task import READS_MODULES

needs_stage_3 = pytest.mark.skipif(
    not builds_under_stage_3(), reason="this release of Transformers is refused with ZeRO stage 3"
)
HIGHEST_STAGE = 3 if builds_under_stage_3() else 2

RETURNS = not is_older("torch", RETURNS_FROM)
needs_to_return = pytest.mark.skipif(not RETURNS, reason="refused with this release of torch")
needs_modules = pytest.mark.skipif(
    is_older("transformers", READS_MODULES), reason="this release of Transformers is refused with adapters and a head"
)


needs_embedding = pytest.mark.skipif(
    find_spec("sentence_transformers") is None, reason="sentence-transformers, an extra, is not installed"
)


def _no_scratch() -> str:
    """Why the folder of temporary files cannot have a file for optimizer state; empty if it can."""
    try:
        ScratchFile(gettempdir(), 1 << 20).close()
    except ValueError as error:
        return str(error)
    return ""


needs_scratch = pytest.mark.skipif(bool(_no_scratch()), reason=f"{gettempdir()} cannot have state: {_no_scratch()}")


def is_refused(name: str, *examples: Mapping[str, Any]) -> bool:
    """Whether a strategy is refused under the installed releases, with each of ``examples``, or all of its own."""
    for options in examples or find(name).examples:
        try:
            find(name).model_validate(options).check_installed()
        except Refusal:
            continue
        return False
    return True


def needs(name: str, *examples: Mapping[str, Any]) -> pytest.MarkDecorator:
    """The mark of what trains with a strategy, or is about what else is refused of it."""
    reason = f"strategies.{name} is refused under the installed releases"
    return pytest.mark.skipif(is_refused(name, *examples), reason=reason)
