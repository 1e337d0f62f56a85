"""What the installed releases cannot do, as marks with a reason."""

import pytest

from strategies.backends.deepspeed import builds_under_stage_3

needs_stage_3 = pytest.mark.skipif(
    not builds_under_stage_3(), reason="this release of Transformers is refused with ZeRO stage 3"
)
HIGHEST_STAGE = 3 if builds_under_stage_3() else 2
STAGE_3 = pytest.param(3, marks=needs_stage_3)
