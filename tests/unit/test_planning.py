"""From a config to a plan: what is refused once the plan is known."""

from dataclasses import replace
from pathlib import Path

import pytest

from deepstow.strategies.core.compose import compose
from deepstow.strategies.core.plan import INPUT, Keep, Plan
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError, TooLargeError
from deepstow.trainer.machine.probe import probe
from deepstow.trainer.planning.from_config import plans_of, refuse_impossible
from tests.helpers.fakes import GPU, block, facts, head
from tests.helpers.tiny import LLAMA, run_config


def test_places_on_the_host_are_as_certain_as_the_state() -> None:
    machine = replace(GPU, host_bytes=1000)
    plan = compose({}, facts(block(0, 8, 100), head(8), machine=machine))
    refuse_impossible(plan)
    sent = Keep(
        unit="layers.0", reason="", policy="full", saved_bytes=0, hosted=(INPUT,), hosted_bytes=machine.host_bytes
    )
    with pytest.raises(
        ConfigError, match=r"each rank's host.*write strategies\.recompute\.activation_offloading: false"
    ):
        refuse_impossible(plan.amend([sent], by="a test"))


def test_a_budget_that_is_named_is_enough_for_all_stages(tmp_path: Path) -> None:
    """The first stage needs less than the last one here, and is planned first."""

    def plans(budget: int) -> list[Plan]:
        strategies = {"pipeline": {"stages": 2, "blocks": [1, 3]}, "offload": {"gpu_memory": budget}}
        config = run_config(
            {**LLAMA, "num_hidden_layers": 4}, output_dir=tmp_path, strategies=strategies, gradient_accumulation_steps=4
        )
        return plans_of(config, Ranks(world_size=2, local_world_size=2), probe())

    with pytest.raises(TooLargeError) as small:
        plans(10_000)
    assert len(plans(small.value.needed)) == 2
    with pytest.raises(TooLargeError):
        plans(small.value.needed - 64)
