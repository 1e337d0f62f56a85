"""What the installed releases cannot do, as marks with a reason."""

from importlib.metadata import version

import pytest

from strategies.backends.deepspeed import builds_under_stage_3
from strategies.pipeline import RETURNS_FROM

needs_stage_3 = pytest.mark.skipif(
    not builds_under_stage_3(), reason="this release of Transformers is refused with ZeRO stage 3"
)
HIGHEST_STAGE = 3 if builds_under_stage_3() else 2

RETURNS = tuple(int(part) for part in version("torch").split(".")[:2]) >= RETURNS_FROM
needs_to_return = pytest.mark.skipif(not RETURNS, reason="refused with this release of torch")
