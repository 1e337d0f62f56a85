"""The exactness gate of ``tests/parity/test_engine.py`` on a device that is really asynchronous.

Any two levels meet in a case; all cases of that gate run there by ``python -m benchmarks.gpu_engine --device sim``.
The simulated device is compared with itself: its kernels are the CPU's, but gradients are summed in another order.
"""

from typing import Any

import pytest
import torch

from strategies.engine.transfer.transfer import AcceleratorTransfer
from tests.helpers.engine import differences
from tests.helpers.grid import BF16, FORBIDDEN, FP32, both, noise, title
from tests.helpers.pairwise import Row, Table

DEVICE = "sim:0"


TABLE = Table(
    {
        **{name: levels for name, levels in FP32.factors.items() if name != "transfer"},
        "model": BF16.factors["model"],
        "dtype": (torch.float32, torch.bfloat16),
    },
    [*FORBIDDEN, (("dtype", torch.bfloat16), ("recompute", "reentrant"))],
)


@pytest.mark.parametrize("row", [pytest.param(row, id=title(row)) for row in TABLE.rows()])
def test_bits(row: Row) -> None:
    case: dict[str, Any] = {name: level for name, level in row.items() if name != "dtype"}
    dtype: Any = row["dtype"]
    assert differences(*both(case, dtype, DEVICE, AcceleratorTransfer(torch.device(DEVICE)))) == []


def test_plain_training_repeats_itself() -> None:
    """Else nothing could be said."""
    row = next(iter(FP32.rows()))
    assert noise(row, torch.float32, DEVICE) == []
