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


def rows(table: Table) -> list[Any]:
    factors = {name: levels for name, levels in table.factors.items() if name != "transfer"}
    return [pytest.param(row, id=title(row)) for row in Table(factors, FORBIDDEN).rows()]


def unlike(row: Row, dtype: torch.dtype) -> list[str]:
    return differences(*both(row, dtype, DEVICE, AcceleratorTransfer(torch.device(DEVICE))))


@pytest.mark.parametrize("row", rows(FP32))
def test_fp32(row: Row) -> None:
    assert unlike(row, torch.float32) == []


@pytest.mark.parametrize("row", rows(BF16))
def test_bf16(row: Row) -> None:
    assert unlike(row, torch.bfloat16) == []


def test_plain_training_repeats_itself() -> None:
    """Else nothing could be said."""
    row = next(iter(FP32.rows()))
    assert noise(row, torch.float32, DEVICE) == []
