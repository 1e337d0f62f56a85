"""Options of the learning rate's scheduler that cannot be used end in one line, before anything is prepared."""

from pathlib import Path
from typing import Any

import pytest

from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.run.checks import Before, check
from tests.helpers.tiny import LLAMA, run_config

WRONG: dict[str, tuple[str | None, dict[str, Any] | None, str]] = {
    "a typo": ("cosine_with_restarts", {"num_cycle": 2}, r"= \{.*unexpected keyword argument 'num_cycle'"),
    "another type": ("cosine_with_restarts", {"num_cycles": "two"}, "could not convert string to float"),
    "missing": ("warmup_stable_decay", None, "missing .* 'num_decay_steps'"),
    "one of two": ("cosine_with_min_lr", {}, "One of min_lr or min_lr_rate"),
    "of another one": (None, {"num_cycles": 2}, "lr_scheduler_type linear: .*'num_cycles'"),
    "of a rate": ("polynomial", {"lr_end": 1}, "must be smaller than initial lr"),
    "of the last step": ("polynomial", {"power": -3}, "cannot be raised to a negative power at step [1-9]"),
    "would be ignored": ("constant", {"num_cycles": 2}, "constant takes no options; leave it out"),
}


@pytest.mark.parametrize("case", WRONG)
def test_options_that_cannot_be_used(case: str, tmp_path: Path) -> None:
    kind, given, said = WRONG[case]
    config = run_config(LLAMA, output_dir=tmp_path, lr_scheduler_type=kind, lr_scheduler_kwargs=given)
    with pytest.raises(ConfigError, match=rf"^training\.lr_scheduler_kwargs.*{said}") as refused:
        check(Before.MEETING, config=config, ranks=Ranks())
    assert len(refused.value.lines) == 1


@pytest.mark.parametrize(
    ("kind", "given"),
    [(None, None), ("warmup_stable_decay", {"num_decay_steps": 3}), ("reduce_lr_on_plateau", {"patience": 0}),
     ("cosine_with_min_lr", {"min_lr_rate": 0.1}), ("inverse_sqrt", None), ("polynomial", {"power": 2.0})],
)  # fmt: skip
def test_options_that_can(kind: str | None, given: dict[str, Any] | None, tmp_path: Path) -> None:
    more: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "data": {"eval_fraction": 0.1}}
    options = {"lr_scheduler_type": kind, "lr_scheduler_kwargs": given, **more}
    check(Before.MEETING, config=run_config(LLAMA, output_dir=tmp_path, **options), ranks=Ranks())
