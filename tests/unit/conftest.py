"""What several files of tests share."""

from typing import Any

import pytest


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of Python's documentation, with a chat template."""
    from tests.helpers import data  # imports what most files do without

    return data.trained(tmp_path_factory.mktemp("tokenizer"))
