"""Experts divided over ranks against one process that accumulates the micro-batches of all: every architecture that is
not refused, with its router loss. SGD with clipping is compared, as for tensor parallelism: Adam hides a wrong norm.
"""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepstow.strategies import experts
from deepstow.strategies.core.plan import Kind as Bytes
from deepstow.strategies.core.plan import Tier
from deepstow.strategies.parallel import deepspeed
from deepstow.strategies.parallel.expert_parts import ExpertParts
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.verify.verify import compare, full_weights
from tests.helpers.moves import SAVED, UNEVEN, Kind, different, made, run
from tests.helpers.releases import needs
from tests.helpers.tiny import LLAMA, MIXTRAL, VOCAB
from tests.helpers.worlds import run_counted

pytestmark = [pytest.mark.ranks, needs("experts")]
STEPS, TOLERANCE = 3, 2e-6
SGD: Mapping[str, Any] = {
    "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.05, "save_strategy": "no", "warmup_steps": 0,
    "weight_decay": 0.0, "per_device_train_batch_size": 3,
}  # fmt: skip
ROUTED: Mapping[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
QWEN3: Mapping[str, Any] = {
    **LLAMA, **ROUTED, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "decoder_sparse_step": 1,
}  # fmt: skip
OLMOE = {key: value for key, value in QWEN3.items() if key not in ("moe_intermediate_size", "decoder_sparse_step")}
LATENT: Mapping[str, Any] = {  # attention of DeepSeek, and its groups of experts; the first block has none
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "moe_intermediate_size": 24,
}  # fmt: skip
MODELS: Mapping[str, Mapping[str, Any]] = {
    "mixtral": {**MIXTRAL, **ROUTED},
    "qwen3_moe": QWEN3,
    "qwen2_moe": {**QWEN3, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 16},
    "olmoe": {**OLMOE, "model_type": "olmoe", "intermediate_size": 24},
    "gpt_oss": {**MIXTRAL, **ROUTED, "model_type": "gpt_oss", "head_dim": 8, "layer_types": ["full_attention"] * 2},
    "deepseek_v3": {
        **LLAMA, **LATENT, "model_type": "deepseek_v3", "num_key_value_heads": 4, "n_routed_experts": 8,
        "num_experts_per_tok": 2,
    },
}  # fmt: skip
# Adding to all keys what queries multiply alike changes no softmax, so the gradient of these biases is rounding alone.
NOISE = "self_attn.k_proj.bias"


def trained(ranks: Ranks, configs: list[RunConfig]) -> list[dict[str, Any]]:
    """Of each run weights, losses and norms, elements on this rank, and what is not the same on ranks that share it."""
    return [_trained(ranks, config) for config in configs]


def _trained(ranks: Ranks, config: RunConfig) -> dict[str, Any]:
    trainer = made(ranks, config, some=UNEVEN)
    try:
        trainer.train()
        history = [record for record in trainer.state.log_history if "loss" in record]
        keys = ("loss", "grad_norm", "experts_busiest")
        found = {key: [record[key] for record in history if key in record] for key in keys}
        named = dict(trainer.model.named_parameters())
        every: list[Any] = [{name: param.detach().clone() for name, param in named.items()}] * ranks.world_size
        if ranks.world_size > 1:
            dist.all_gather_object(every, every[0])
        degree = {name: len(param.shard.sizes) if hasattr(param, "shard") else 1 for name, param in named.items()}
        apart = {
            name
            for name, count in degree.items()
            for rank, each in enumerate(every)
            if not torch.equal(each[name], every[rank % count][name])
        }
        elements = sum(param.numel() for param in named.values())
        planned = trainer.plan.total(Bytes.PARAM) // 4
        more = {"apart": apart, "elements": elements, "planned": planned, **state_of(trainer)}
        return {"weights": full_weights(trainer, ranks), **found, **more}
    finally:
        trainer.accelerator.free_memory()


def state_of(trainer: Any) -> dict[str, Any]:
    """Elements of fp32 weights that this rank updates under ZeRO, and as planned."""
    flats = trainer.model_wrapped.optimizer.single_partition_of_fp32_groups if trainer.is_deepspeed_enabled else ()
    held = trainer.plan.reserves(Tier.DEVICE)
    of_experts = [each.num_bytes for each in held if each.owner == "zero: state of experts"]
    kinds = 2 if deepspeed.stage(trainer.plan) == 2 else 1  # gradients are divided, too; SGD has no moments
    planned = trainer.plan.total(Bytes.MASTER) + sum(of_experts) / kinds
    return {"state": sum(flat.numel() for flat in flats), "planned state": planned / 4}


def same(expected: dict[str, Any], found: dict[str, Any]) -> None:
    worst = {each.name: each.relative for each in compare(expected["weights"], found["weights"])}
    assert max((each for name, each in worst.items() if NOISE not in name), default=0.0) < TOLERANCE, worst
    assert found["loss"] == pytest.approx(expected["loss"], rel=TOLERANCE)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=TOLERANCE)
    assert min(expected["grad_norm"]) > 10 * SGD["max_grad_norm"], "clipping has to trigger"
    assert found["apart"] == set()
    assert found["elements"] == found["planned"] < 0.9 * expected["elements"]


@pytest.mark.slow
def test_as_one_process(tmp_path: Path) -> None:
    """Weights, losses and norms, the router's loss among them; the busiest expert has more than its even share.
    ``test_executions.py`` has Mixtral.
    """
    names = [name for name in MODELS if name != "mixtral"]
    two = {"experts": {"degree": 2, "slices": 2}}
    alone = [Kind(1, {}, {**SGD, "gradient_accumulation_steps": 2}, MODELS[name]) for name in names]
    divided = [Kind(2, two, SGD, MODELS[name]) for name in names]
    sides = [
        run_counted(kinds[0].ranks, trained, [kind.config(tmp_path, STEPS) for kind in kinds])
        for kinds in (alone, divided)
    ]
    for name, expected, found in zip(names, *sides, strict=True):
        model = MODELS[name]
        same(expected, found)
        even = 1 / next(int(model[key]) for key in experts.COUNTS if key in model)
        assert all(even < share < 0.6 for share in found["experts_busiest"])


@pytest.mark.slow
def test_two_copies_and_any_slices(tmp_path: Path) -> None:
    """Four ranks, of which two and two have the same experts, accumulated: as four plain ranks, and slices change no
    bit. Then all four have other experts, and blocks are recomputed.
    """
    training = {**SGD, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
    options: list[dict[str, Any]] = [{"degree": 2, "slices": count} for count in (1, 3, 4)]
    strategies: list[dict[str, Any]] = [{}, *({"experts": each} for each in options)]
    strategies.append({"experts": {"degree": 4}, "recompute": {"policy": "selective"}})
    kinds = [Kind(4, each, training, QWEN3) for each in strategies]
    expected, one, *others, four = run_counted(4, trained, [kind.config(tmp_path, STEPS) for kind in kinds])
    same(expected, one)
    same(expected, four)
    for other in others:
        assert compare(one["weights"], other["weights"]) == []
        assert other["loss"] == one["loss"] and other["grad_norm"] == one["grad_norm"]


def test_beside_zero(tmp_path: Path) -> None:
    """DeepSpeed adds up gradients and norms, and divides the state of experts over fewer ranks than the rest."""
    training = {**SGD, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
    options: list[dict[str, Any]] = [{"experts": {"degree": 2}, "zero": {"stage": stage}} for stage in (1, 2)]
    kinds = [Kind(2, each, training, MODELS["mixtral"]) for each in ({}, *options)]
    expected, *found = run_counted(2, trained, [kind.config(tmp_path, STEPS) for kind in kinds])
    for each in found:
        same(expected, each)
        assert each["state"] == pytest.approx(each["planned state"], rel=0.02)


def in_fp64(ranks: Ranks) -> dict[str, Any]:
    """A model with all experts on each of the ranks, and one with divided experts, on the same rows with SGD; at the
    last step the router sends all rows to the experts of one rank.
    """
    from torch.nn.parallel import DistributedDataParallel
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    whole: Any = MixtralForCausalLM(MixtralConfig(**{**MIXTRAL, **ROUTED})).double()
    whole.set_experts_implementation("eager")  # the others are for fp32 and bf16
    model = deepcopy(whole)
    parts = ExpertParts(model, 2, 2)
    worst, wrapped = 0.0, DistributedDataParallel(model)
    for step in range(STEPS):
        if step == STEPS - 1:
            parts.figures()
            for block in (*whole.model.layers, *model.model.layers):
                block.mlp.gate.weight.data.zero_()  # all experts are alike, and the first two are taken
        ids = torch.randint(0, VOCAB, (2, 2, 16), generator=torch.Generator().manual_seed(step))
        losses = [whole(input_ids=each, labels=each).loss for each in ids]
        mine = wrapped(input_ids=ids[ranks.rank], labels=ids[ranks.rank]).loss
        (sum(losses) / 2).backward()
        mine.backward()
        parts.complete()
        norms = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5), parts.clip(list(model.parameters()), 0.5)
        worst = max(worst, float((losses[ranks.rank] - mine).abs()), float((norms[0] / norms[1] - 1).abs()))
        for each in (whole, model):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()
    state = parts.state_dict(model, keep=True)
    worst = max(worst, *(float((state[name] - each).abs().max()) for name, each in whole.state_dict().items()))
    return {"worst": worst, "busiest": parts.figures()["experts_busiest"]}


def test_in_fp64() -> None:
    """What differs in fp32 is rounding; a rank whose experts get no row takes part in every exchange."""
    found = run_world(2, in_fp64)
    assert found["worst"] < 1e-14 and found["busiest"] == 0.5


@pytest.mark.slow
def test_resumed_with_other_ranks(tmp_path: Path) -> None:
    """From experts on two ranks to ZeRO and to plain training, to four ranks of which two have the same experts, and
    back: the same weights, moments and counts; evaluations see the same tokens and, but for rounding, losses.
    """
    steady = {"lr_scheduler_type": "constant", "eval_strategy": "steps", "eval_steps": SAVED}
    divided, model = {"experts": {"degree": 2}}, MODELS["mixtral"]
    two, four = (Kind(ranks, divided, steady, model) for ranks in (2, 4))
    whole, zero = Kind(2, {}, steady, model), Kind(2, {**divided, "zero": {"stage": 2}}, steady, model)
    first = run(two, tmp_path / "two", 2 * SAVED)
    saved = tmp_path / "two" / f"checkpoint-{SAVED}"
    for name, kind in (("two again", two), ("zero", zero), ("whole", whole)):
        other = run(kind, tmp_path / name, 2 * SAVED, saved)
        assert different(first[f"saved at {SAVED}"], other["start"]) == [] != different(other["start"], other["end"])
        assert (different(first["end"], other["end"]) == []) is (kind is not whole), name
    seen = [[each["eval_loss"] for each in one["seen"] if "eval_loss" in each] for one in (first, other)]
    assert seen[0] == pytest.approx(seen[1], rel=1e-3) and len(seen[0]) == 2
    for name, kind, before in (("four", four, "whole"), ("back", two, "four")):
        steps = max(int(each.name.partition("-")[2]) for each in (tmp_path / before).glob("checkpoint-*"))
        found = run(kind, tmp_path / name, steps + SAVED, tmp_path / before / f"checkpoint-{steps}")
        assert different(other["end"], found["start"]) == [] != different(found["start"], found["end"])
        other = found
