"""Shared by the end-to-end tests: one pretrained model."""

from pathlib import Path

import pytest

from tests.e2e.commands import Server, write_config


@pytest.fixture(scope="session")
def pretrained(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of a tiny pretraining run."""
    config = write_config(tmp_path_factory.mktemp("pretrained"))
    server.run(1, config).check().quiet()
    return config.parent / "run" / "export"
