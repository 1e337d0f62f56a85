"""These tests need a CUDA device, a real one or the fake of ``make test-cuda``."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: make test-cuda")
