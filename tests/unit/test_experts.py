"""Divided experts without ranks: what is refused, one rank's part in numbers, slices."""

from pathlib import Path

import pytest
import torch

from deepstow.strategies.core.facts import Tier, UnitKind
from deepstow.strategies.core.plan import Kind
from deepstow.strategies.planner.overlap import layer_seconds
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.machine.probe import probe
from deepstow.trainer.model.build import load_config
from deepstow.trainer.planning.facts import check_model, counted
from deepstow.trainer.planning.from_config import check_options, plan_of
from deepstow.trainer.tasks.task import token_losses
from tests.helpers.refused import lines_of
from tests.helpers.releases import needs
from tests.helpers.tiny import LLAMA, MIXTRAL, run_config

CONFIG = """\
model:
  config: {model_type: mixtral, hidden_size: 32, intermediate_size: 64, num_local_experts: 6}
  tokenizer: none
data: {path: missing.jsonl}
training: {output_dir: run}
strategies:
  experts: {degree: 2}
"""
KINDS = "architectures that can be divided: deepseek_v3, gpt_oss, mixtral, olmoe, qwen2_moe, qwen3_moe"
# Numbers and models; what does not go together is in docs/compatibility.md, which is written from the rules.
CASES: list[tuple[list[str], str]] = [
    (["strategies.experts.degree=4"], "= 4: must divide the number of experts, 6: write 2 or 3 or 6"),
    (["strategies.experts.slices=4"], "a rank has 3 experts: write 3 or less"),
    (["model.config.model_type=phimoe"], f"phimoe was not compared with training on one process; {KINDS}"),
    (["training.fp16=true"], "its loss scale would follow the experts of one rank; write training.bf16"),
    (["training.sample_prompts=[a]", "training.eval_strategy=steps"], "ranks generate texts of different lengths"),
    (["task=reward"], "divides the layers of language models, and cannot train task reward; leave it out"),
]


@needs("experts")
@pytest.mark.parametrize(("overrides", "line"), CASES, ids=[overrides[0] for overrides, _ in CASES])
def test_refused_before_data_is_read(
    overrides: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = lines_of(CONFIG, overrides, 12, tmp_path, monkeypatch)
    assert any(line in each for each in lines), lines


def test_a_model_without_experts_and_a_world_of_other_ranks_are_refused() -> None:
    counted(run_config(LLAMA))
    with pytest.raises(ConfigError, match=f"degree = 2: llama has no experts; {KINDS}"):
        check_model(dense := run_config(LLAMA, strategies={"experts": {"degree": 2}}), load_config(dense.model))
    with pytest.raises(ConfigError, match="the model has no layers with experts; leave"):
        plan_of(dense, Ranks(0, 0, 2, 2), probe())  # counted before, so that its configuration is not looked at
    with pytest.raises(ConfigError, match="degree = 2: ranks must be a multiple of it: start 2 or 4, not 3"):
        check_options(run_config(MIXTRAL, strategies={"experts": {"degree": 2}}), 3)


def test_one_ranks_part() -> None:
    """Weights by formula; all else is as with all experts, but for rows that travel and buckets of gradients."""
    plans = [
        plan_of(run_config(MIXTRAL, strategies=each), Ranks(0, 0, 4, 4), probe())
        for each in ({}, {"experts": {"degree": 2}})
    ]
    whole, part = (plan.facts for plan in plans)
    experts = 4 * 3 * LLAMA["hidden_size"] * LLAMA["intermediate_size"]
    for one, other in zip(whole.units, part.units, strict=True):
        gone = experts // 2 if one.kind is UnitKind.BLOCK else 0
        assert (one.num_params - other.num_params, one.saved_bytes) == (gone, other.saved_bytes)
    assert (part.run.model_params, part.run.replicas) == (whole.num_params, 4)
    a_layer = 2 * whole.run.largest_param  # whole, while it is drawn
    assert part.run.largest_param == whole.run.largest_param
    assert part.loaded_bytes == 4 * (part.num_params + a_layer)
    held = {each.owner: each for each in plans[1].reserves(Tier.DEVICE)}
    buckets, rows = held["data parallel: buckets"], held["experts: exchanged rows"]
    assert buckets.num_bytes == plans[1].total(Kind.GRAD) - 2 * experts // 2 * 4
    assert rows.num_bytes == 2 * 8 * 16 * 2 * 32 * 4, "sequences x tokens x experts of each x width, there and back"


def test_slices_hide_what_fits_behind_products() -> None:
    """Seconds by hand: nothing overlaps in one slice; with many slices the longer of the two remains, and its ends."""
    assert layer_seconds(6.0, 2.0, 0.0, 1) == 10.0
    assert layer_seconds(6.0, 2.0, 0.0, 2) == 8.0  # 1 in, 3 and 3 of products, 1 out
    assert layer_seconds(0.0, 2.0, 0.5, 4) == 8.0  # the network alone: eight pieces of 0.5 + 0.5


def test_a_router_s_loss_is_no_token_s() -> None:
    """Evaluated models with routers give their loss before the logits, and what they routed after."""
    scores, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    others = torch.tensor(0.3), scores, (torch.randn(10, 4), torch.randn(10, 4))
    assert torch.equal(token_losses(others, labels), token_losses(scores, labels))
