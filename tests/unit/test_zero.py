"""ZeRO: the published numbers, frozen parameters, bucket sizes, and DeepSpeed's config to the letter."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepstow.strategies.core import protocol
from deepstow.strategies.core.compose import compose
from deepstow.strategies.core.facts import Facts, Precision
from deepstow.strategies.core.plan import RUN, EngineSet, Plan, Tier, When
from deepstow.strategies.core.protocol import Phase, Requirement
from deepstow.strategies.core.registry import find
from deepstow.strategies.parallel import deepspeed as backend
from deepstow.strategies.parallel.deepspeed import ds_config, torch_clips
from deepstow.strategies.planner.engine_bytes import MAX_BUCKET
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.run.checks import Before, check, refuse_min_lr
from deepstow.trainer.verify.verify import real_plan, verify
from tests.helpers.fakes import CPU, block, embedding, facts, fake, head
from tests.helpers.releases import needs_stage_3
from tests.helpers.tiny import GPT2, LLAMA, run_config


def plan_of(stage: int, known: Facts) -> Plan:
    return compose({"zero": find("zero").model_validate({"stage": stage})}, known)


def billions(**run: Any) -> Facts:
    """7.5e9 parameters on 64 ranks: the example of the ZeRO paper, figure 1."""
    return facts(*(block(index, 1_500_000_000) for index in range(5)), world_size=64, **run)


@pytest.mark.parametrize(
    ("stage", "published", "in_fp32"),
    [
        (0, 120.0, (4 + 4 + 0 + 8) * 7.5e9),  # the weight is its own master
        (1, 31.4, (4 + 4) * 7.5e9 + (4 + 8) * 7.5e9 / 64),
        (2, 16.6, 4 * 7.5e9 + (4 + 4 + 8) * 7.5e9 / 64),
        (3, 1.88, (4 + 4 + 4 + 8) * 7.5e9 / 64),
    ],
)
def test_state_as_published(stage: int, published: float, in_fp32: float) -> None:
    """In mixed precision; in fp32 as counted by hand."""
    state = plan_of(stage, billions(precision=Precision.BF16)).states(Tier.DEVICE) / 10**9
    assert float(f"{state:.3g}") == published
    assert plan_of(stage, billions()).states(Tier.DEVICE) == pytest.approx(in_fp32, rel=1e-9)


# DeepSpeed's config

GOLDEN: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "gradient_clipping": 1.0,
    "bf16": {"enabled": True}, "fp16": {"enabled": False}, "zero_allow_untested_optimizer": True,
    "steps_per_print": 1 << 60, "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 3, "reduce_bucket_size": 2000, "allgather_bucket_size": 2000, "overlap_comm": True,
        "contiguous_gradients": True, "stage3_prefetch_bucket_size": 2000, "stage3_max_live_parameters": 10_000,
        "stage3_max_reuse_distance": 2000, "stage3_param_persistence_threshold": 80,
        "stage3_gather_16bit_weights_on_model_save": True, "memory_efficient_linear": False,
    },
}  # fmt: skip


def golden_facts(**changes: Any) -> Facts:
    run: dict[str, Any] = {"world_size": 2, "accumulation": 3, "max_grad_norm": 1.0, "hidden_size": 8}
    run |= {"precision": Precision.BF16}
    return facts(embedding(6000), block(0, 2000), block(1, 2000), head(600), **(run | changes))


def test_deepspeed_config_to_the_letter() -> None:
    assert ds_config(plan_of(3, golden_facts())) == GOLDEN
    below = dict(list(GOLDEN["zero_optimization"].items())[:5])  # without those of stage 3
    for stage, expected in ((0, {}), (1, below), (2, below)):
        assert ds_config(plan_of(stage, golden_facts()))["zero_optimization"] == {**expected, "stage": stage}


def test_deepspeed_config_of_other_runs() -> None:
    for stage, precision, ours in ((0, Precision.FP32, True), (0, Precision.BF16, False), (1, Precision.FP32, False)):
        plan = plan_of(stage, golden_facts(precision=precision))
        config = ds_config(plan)
        assert torch_clips(plan) is ours and config["gradient_clipping"] == (0.0 if ours else 1.0)
        assert [config[name]["enabled"] for name in ("bf16", "fp16")] == [precision is Precision.BF16, False]
    config = ds_config(plan_of(2, replace(golden_facts(precision=Precision.FP16), machine=CPU)))
    assert config["zero_optimization"]["overlap_comm"] is False, "a CPU has no second stream"
    assert config["fp16"] == {"enabled": True}
    without = compose({}, golden_facts())
    assert (ds_config(without), backend.stage(without)) == ({}, None)


def test_each_key_has_one_writer() -> None:
    engine = frozenset([Requirement.DEEPSPEED])
    of_the_run = fake(Phase.KEEP, [EngineSet(unit=RUN, reason="", key="gradient_clipping", value=0.5)], engine)
    with pytest.raises(AssertionError, match="two writers of DeepSpeed's gradient_clipping"):
        ds_config(compose({"other": of_the_run}, golden_facts()))


# Buckets


def test_buckets_are_bounded_and_even() -> None:
    for largest in (1, 6001, 10**9):
        zero = ds_config(plan_of(2, facts(block(0, largest), block(1, 1), world_size=2)))["zero_optimization"]
        for key in ("reduce_bucket_size", "allgather_bucket_size"):
            assert 2 <= zero[key] <= min(MAX_BUCKET, largest + 1)
            assert zero[key] % 2 == 0  # DeepSpeed refuses others: it aligns shares to two elements


def test_reserved_buffers_as_labelled_sums() -> None:
    def reserves(stage: int, **changes: Any) -> dict[str, tuple[int, When]]:
        plan = plan_of(stage, golden_facts(**changes))
        return {reserve.owner: (reserve.num_bytes, reserve.when) for reserve in plan.reserves(Tier.DEVICE)}

    trainable = 6000 + 2000 + 2000 + 600
    bucket = 2 * 2000 * 2  # two of them overlap, bf16
    assert reserves(0) == {"zero: fp32 gradients": (4 * trainable, When.STEP)}
    assert reserves(0, precision=Precision.FP32) == {}
    for stage in (1, 2):
        assert reserves(stage) == {
            "zero: reduce bucket": (bucket, When.ALWAYS),
            "zero: fp32 gradients": (4 * trainable // 2, When.STEP),
        }
    assert reserves(3) == {
        "zero: reduce bucket": (bucket, When.ALWAYS),
        "zero: gathered weights": (2 * (6000 + 2 * 2000), When.ALWAYS),  # the largest unit and two blocks
        "zero: fp32 gradients": (4 * trainable // 2, When.STEP),
    }
    assert "zero: gathered weights" not in reserves(3, world_size=1)


# Real processes


@pytest.mark.slow
@needs_stage_3
@pytest.mark.ranks
@pytest.mark.parametrize(("model", "modules"), [(LLAMA, ["q_proj", "down_proj"]), (GPT2, ["c_attn", "c_fc"])])
def test_stage_3_trains_adapters_on_a_frozen_base_bit_for_bit(model: dict[str, Any], modules: list[str]) -> None:
    """Behind a frozen embedding no gradient reaches the first block's input; see ``parallel/deepspeed.py``. GPT-2 keeps
    its matrices the other way round.
    """
    lora = {"lora": {"r": 3, "target_modules": modules}}
    config = run_config(model, stage=3, model=lora, max_grad_norm=0.0, learning_rate=1e-2)
    assert verify(config, num_ranks=2, steps=3) == []


def test_stage_3_is_refused_where_transformers_builds_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither training nor verifying begins."""
    for release, stage in (("5.23.0", 3), ("5.17.2", 2)):
        monkeypatch.setattr(protocol, "version", lambda package, release=release: release)
        find("zero").model_validate({"stage": stage}).check_installed()
    config = run_config(LLAMA, output_dir=tmp_path, stage=3, max_steps=1)
    for begin in (lambda: check(Before.MEETING, config=config, ranks=Ranks()), lambda: real_plan(config, 1)):
        with pytest.raises(ConfigError, match=r"stage = 3: under it Transformers .* install 5\.23, or write stage 2$"):
            begin()


def test_a_rate_that_deepspeeds_optimizer_does_not_know_is_refused(tmp_path: Path) -> None:
    scheduler = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}}
    config = run_config(LLAMA, output_dir=tmp_path, learning_rate=1e-3, **scheduler)
    for stage in (None, 0):
        refuse_min_lr(config, stage)
    with pytest.raises(ConfigError, match=r"^training.lr_scheduler_kwargs.min_lr = 0.0001: not with .*zero.stage 2"):
        refuse_min_lr(config, 2)
