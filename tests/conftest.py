"""What all tests share: the same random examples on every run, and how many random problems the planner is tried on."""

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from deepstow.trainer.distributed.deepspeed_ops import cache_folder, clear_abandoned_buffers

if "PYTEST_XDIST_WORKER" not in os.environ:  # which has that of its parent; before `datasets` is imported
    # Not the user's home, which has rates that `launch/doctor.py --rates` measured: plans follow from them.
    os.environ["TORCH_EXTENSIONS_DIR"] = str(cache_folder())  # stays where it is built
    os.environ["HOME"] = tempfile.mkdtemp(prefix="deepstow-home-")
    os.environ["HF_DATASETS_CACHE"] = str(Path(os.environ["HOME"], "datasets"))
    atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)

import pytest
from hypothesis import settings

from deepstow.trainer.distributed.spawn import PRELOAD
from tests.e2e.commands import Server

pytest_plugins = ["tests.helpers.leftovers"]
settings.register_profile("same", derandomize=True)
settings.load_profile("same")
PRELOAD.append("tests.helpers.preloaded")  # ranks find what they need imported


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=60, help="random problems per test of the planner (60; 500 for all)")


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> range:
    """Seeds of random problems: the same ones, as many as ``--seeds`` says."""
    return range(request.config.getoption("--seeds"))


def pytest_sessionstart() -> None:
    """Memory that runs before this session have left behind is not short in it."""
    clear_abandoned_buffers()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server of ranks (``tests/e2e/ranks_server.py``) for all tests of runs, and all processes of pytest-xdist."""
    own = tmp_path_factory.getbasetemp()
    found = Server((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "ranks")
    yield found
    found.close()


MANY = 100
frozen_modules = 0


def pytest_collection_finish() -> None:
    """What the imports of all tests have made is no garbage: collections during the tests need not look at it."""
    freeze_what_was_imported()


def pytest_runtest_logfinish() -> None:
    """Nor at what tests import, where that is a library: Accelerate collects garbage after every training."""
    if len(sys.modules) > frozen_modules + MANY:
        freeze_what_was_imported()


def freeze_what_was_imported() -> None:
    global frozen_modules
    frozen_modules = len(sys.modules)
    gc.collect()
    gc.freeze()
