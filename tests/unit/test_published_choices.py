"""Published degrees beside ours: the published tables are what the command writes; 70 B on 512 ranks."""

import pytest

from deepstow.benchmarks import published_choices as published
from deepstow.strategies.planner.hybrid.degrees import Degrees
from deepstow.strategies.planner.hybrid.step_seconds import Pricing
from deepstow.strategies.planner.step_cost import NEAR
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.machine.profiles import profile
from deepstow.trainer.planning.hybrid import Shares, cluster_of
from tests.helpers.tiny import run_config


def test_published_steps_are_within_what_is_assumed_of_the_network() -> None:
    """ZeRO 3 alone: not faster than the hopeful end, and at most a third slower than the careful one."""
    for case in published.ALONE:
        *_, seconds, simulated, between = published.alone(*case)
        hopeful, careful = map(float, between.split("-"))
        assert hopeful < float(simulated) < careful and hopeful < float(seconds) < 1.4 * careful, case


SMALL = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
LARGE = {"model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64}
LLAMA_8 = {**SMALL, "intermediate_size": 14_336, "num_key_value_heads": 8, "vocab_size": 128_256}
LIKE_MPT = {**SMALL, "intermediate_size": 11_008, "vocab_size": 50_368}
LLAMA_70 = {**LARGE, "intermediate_size": 28_672, "num_key_value_heads": 8, "vocab_size": 32_000}
RUNS = (
    pytest.param(LLAMA_8, 8, 8192, "selective", (5762, 6667), marks=pytest.mark.slow),
    (LIKE_MPT, 8, 2048, "none", (10_643,)),
    pytest.param(LLAMA_70, 64, 2048, "full", (1039,), marks=pytest.mark.slow),
)


@pytest.mark.parametrize(("model", "ranks", "tokens", "recompute", "published"), RUNS)
def test_published_speeds_are_near_what_the_search_says(
    model: dict[str, object], ranks: int, tokens: int, recompute: str, published: tuple[int, ...]
) -> None:
    """Tokens per second of an H100: torchtitan's Llama-3 8B, eager and compiled, and MosaicML's 7 and 70 B."""
    rows = 8192 // tokens
    data = {"path": "random tokens", "max_length": tokens}
    built = {**model, "max_position_embeddings": tokens}
    config = run_config(built, data=data, bf16=True, per_device_train_batch_size=rows)
    machine = profile("h100-sxm-pcie5")
    on = Ranks(world_size=ranks, local_world_size=8)
    shares = Shares(config, on, machine, lambda line: None)
    assert machine.rates is not None
    degrees = Degrees(data=ranks, zero=3, recompute=recompute, micro_batch=rows)
    pricing = Pricing(shares.of(degrees), cluster_of(machine.rates, on, None), machine.rates, trained=True)
    ours = rows * tokens / pricing.price(degrees).seconds
    assert all(abs(theirs - ours) <= NEAR * ours for theirs in published), ours
