"""What a run says of a config that cannot be trained, before it looks for its data, which is not there."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from deepstow.trainer.config.load import load
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.planning.from_config import check_options
from deepstow.trainer.run.session import prepare


def lines_of(text: str, overrides: Sequence[str], ranks: int, folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    """The lines of the refusal of ``text``, which becomes ``x.yaml``, with ``overrides``, on so many ranks."""
    patch.chdir(folder)
    Path("x.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        config = load(Path("x.yaml"), list(overrides))
        check_options(config, ranks)
        prepare(config, Ranks())
    return list(caught.value.lines)
