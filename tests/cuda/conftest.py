"""These tests need a CUDA device, a real one or the fake of ``make test-cuda``, which alone collects them."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here: make test-cuda")
