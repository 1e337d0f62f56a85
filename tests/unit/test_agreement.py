"""What ranks say when they were started with different configs, and that all of them say it."""

from typing import Any

import pytest

from deepstow.trainer.distributed.agreement import agreement, differences
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.errors import ConfigError, ExitCode, UserError


def test_the_line_names_the_keys_and_both_values() -> None:
    first = {"training.learning_rate": "0.001", "training.seed": "1", "data.max_length": "64"}
    other = {"training.learning_rate": "0.0001", "data.max_length": "64", "model.dtype": '"float32"'}
    assert differences([first, first, other]) == (
        'the ranks were started with different configs: model.dtype = not set on rank 0, "float32" on rank 2; '
        "training.learning_rate = 0.001 on rank 0, 0.0001 on rank 2; training.seed = 1 on rank 0, not set on rank 2; "
        "start all with the same file and overrides"
    )


def refuses() -> Any:
    raise ConfigError("only the first rank knows")


def together(ranks: Ranks) -> dict[str, Any]:
    """What both ranks end with, gathered on the first."""
    said: dict[str, Any] = {}
    with agreement(ranks, 30) as group:
        said["any"] = [group.any(ranks.rank == 1), group.any(False)]
        group.refuse_different({"training.seed": 1})
        for name, work in (
            ("different", lambda: group.refuse_different({"training.seed": ranks.rank})),
            ("first", lambda: group.on_first(refuses)),
        ):
            try:
                work()
            except UserError as error:
                said[name] = [str(error), int(error.code)]
        said["value"] = group.on_first(lambda: {"a": 1})
        both = group.gathered(said)
    assert both[0] == both[1]
    return said


@pytest.mark.ranks
def test_all_ranks_end_alike() -> None:
    said = run_world(2, together)
    assert said["any"] == [True, False]
    assert said["different"][0].startswith("the ranks were started with different configs: training.seed = 0 on rank 0")
    assert said["first"] == ["only the first rank knows", int(ExitCode.CONFIG)]
    assert said["value"] == {"a": 1}
