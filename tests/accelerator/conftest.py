"""These tests run on a simulated accelerator (``tests/helpers/simulated``), in processes of their own.

The device becomes the accelerator of the whole process, which other tests do not expect: ``pytest tests/accelerator``.
With ``--device cuda`` they run on the fake CUDA (``tests/helpers/fake_cuda``, ``make test-cuda``), but for those that
are marked ``simulated``.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from deepstow.strategies.engine.transfer.transfer import AcceleratorTransfer
from tests.accelerator import chosen
from tests.helpers import fake_cuda, sides, simulated

HERE = Path(__file__).parent
COPIES_US, KERNELS_US = 300, 100  # the longest delays; many times what the small models' kernels take


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", choices=(simulated.NAME, "cuda"), default=simulated.NAME, help="where tests/accelerator runs"
    )


def pytest_configure(config: pytest.Config) -> None:
    chosen.kind = config.getoption("--device")  # before tests are imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        mark = item.get_closest_marker("simulated")
        if mark and chosen.kind != simulated.NAME:
            item.add_marker(pytest.mark.skip(reason=f"the simulated device alone: {mark.args[0]}"))


@cache
def library() -> Any:
    torch.set_num_threads(1)
    return simulated.load() if chosen.kind == simulated.NAME else fake_cuda.Fake()


@pytest.fixture(scope="session", autouse=True)
def _loaded(request: pytest.FixtureRequest) -> None:
    if chosen.kind == simulated.NAME and not simulated.can_be_built():
        pytest.skip("the simulated accelerator is compiled, and there is no C++ compiler here")
    if any(HERE not in item.path.parents for item in request.session.items):
        pytest.skip("the simulated accelerator needs a process of its own: pytest tests/accelerator")
    library()


@pytest.fixture(autouse=True)
def device(_loaded: None) -> Iterator[Any]:
    """The device's switches and counts, with delays; what a test leaves behind fails here."""
    found = library()
    found.delay(COPIES_US, KERNELS_US)
    found.limit(0)
    known = fake_cuda.complaints(found)
    yield found
    torch.accelerator.synchronize()
    assert fake_cuda.complaints(found) == known


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device, on which scripts train under two layouts: the others mix what these do, or move nothing."""
    where = torch.device(chosen.kind, 0)
    monkeypatch.setattr(sides.ground, "device", where)
    monkeypatch.setattr(sides.ground, "transfer", lambda: AcceleratorTransfer(where))
    monkeypatch.setattr(sides.ground, "layouts", sides.TWO)
    return where
