"""Tensor parallelism on real ranks against plain training of one copy per rank: every architecture that is not refused.

SGD with clipping is what is compared: Adam divides each gradient by its own size and would hide a wrong norm, and it
enlarges rounding. Rows have different numbers of trained tokens, so that losses are weighted, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from deepstow.strategies.core.compose import compose
from deepstow.strategies.core.grid import Grid
from deepstow.strategies.core.plan import Kind as Bytes
from deepstow.strategies.core.plan import Tier
from deepstow.strategies.core.registry import find
from deepstow.strategies.planner.cuts import Schedule
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.run import building
from deepstow.trainer.run.callbacks.plan_check import count_saved
from deepstow.trainer.run.exporting.export import export
from deepstow.trainer.verify.verify import compare, full_weights
from tests.helpers.moves import UNEVEN, Kind, forget_run, made, made_run
from tests.helpers.releases import needs_to_return
from tests.helpers.tiny import LLAMA, OPT, QWEN3, VOCAB, run_config
from tests.helpers.worlds import run_counted

pytestmark = pytest.mark.ranks
STEPS, TOLERANCE = 4, 2e-6
STAGES: Mapping[str, Any] = {"pipeline": {"stages": 2}}
SGD: Mapping[str, Any] = {
    "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.05, "save_strategy": "no", "warmup_steps": 0,
    "gradient_accumulation_steps": 2, "weight_decay": 0.0,
}  # fmt: skip
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {**LLAMA, "attention_bias": True, "mlp_bias": True, "vocab_size": VOCAB + 1},  # an odd head
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": 4},
    "opt": {**OPT, "do_layer_norm_before": False},
    "qwen2": {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": QWEN3,
}
LLAMA3 = {**MODELS["llama"], "num_hidden_layers": 3}
# Adding to all keys what queries multiply alike changes no softmax, so the gradient of OPT's is rounding alone.
NOISE = "self_attn.k_proj.bias"


def trained(ranks: Ranks, config: Any) -> dict[str, Any]:
    """Weights, losses and norms; of all ranks the elements, and what differs between ranks of one copy."""
    return results(ranks, made(ranks, config, some=UNEVEN))


def results(ranks: Ranks, trainer: Any) -> dict[str, Any]:
    try:
        trainer.train()
        history = [record for record in trainer.state.log_history if "loss" in record]
        found = {key: [record[key] for record in history] for key in ("loss", "grad_norm")}
        return {"weights": full_weights(trainer, ranks), **found, **(of_ranks(trainer) if ranks.world_size > 1 else {})}
    finally:
        trainer.accelerator.free_memory()


def of_ranks(trainer: Any) -> dict[str, Any]:
    grid, rank = trainer.execution.grid, torch.distributed.get_rank()
    mine = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
    every: list[Any] = [None] * grid.world_size
    torch.distributed.all_gather_object(every, mine)
    others = [every[other] for group in grid.groups("tensor") if rank in group for other in group]
    named = trainer.model.named_parameters()
    whole = [name for name, param in named if not getattr(param, "tensor_model_parallel", False)]
    return {
        "elements": [sum(value.numel() for value in each.values()) for each in every],
        "planned": trainer.plan.total(Bytes.PARAM) // 4,
        "apart": [name for name in whole if not all(torch.equal(mine[name], other[name]) for other in others)],
        "whole": whole,
    }


def same(plain: dict[str, Any], found: dict[str, Any]) -> None:
    worst = {each.name: each.relative for each in compare(plain["weights"], found["weights"]) if NOISE not in each.name}
    assert max(worst.values(), default=0.0) < TOLERANCE, worst
    assert found["loss"] == pytest.approx(plain["loss"], rel=TOLERANCE)
    assert found["grad_norm"] == pytest.approx(plain["grad_norm"], rel=TOLERANCE)
    assert min(plain["grad_norm"]) > 10 * SGD["max_grad_norm"], "clipping has to trigger"


# Mistral and Qwen 2 are divided as Llama is; Qwen 3 is in ``test_tensor_chunks.py``, OPT below.
def test_as_plain(tmp_path: Path) -> None:
    plain = run_world(1, trained, Kind(1, {}, SGD, MODELS["llama"]).config(tmp_path, STEPS))
    found = run_counted(2, trained, Kind(2, {"tensor": {"degree": 2}}, SGD, MODELS["llama"]).config(tmp_path, STEPS))
    same(plain, found)
    assert found["apart"] == [] and len(found["whole"]) > 3
    assert found["elements"][0] == found["planned"] < 0.8 * sum(value.numel() for value in plain["weights"].values())
    assert found["elements"][0] - found["elements"][1] == LLAMA["hidden_size"]


def test_two_copies(tmp_path: Path) -> None:
    """Four ranks as tensor 2 x data 2, as two ranks of plain training; blocks are recomputed."""
    plain = run_counted(2, trained, Kind(2, {}, SGD, MODELS["opt"]).config(tmp_path, STEPS))
    options = {"tensor": {"degree": 2}, "zero": {"stage": 2}, "recompute": {"policy": "full"}}
    found = run_counted(4, trained, Kind(4, options, SGD, MODELS["opt"]).config(tmp_path, STEPS))
    same(plain, found)
    assert found["apart"] == [] and len(found["whole"]) > 3


def of_little_memory(run: Any) -> Any:
    """The plan with a device on which about a half of all has to be recomputed."""
    chosen, known = run.config.strategies, run.plan.facts
    ends = [{**chosen, "recompute": find("recompute")(policy=each)} for each in ("none", "full")]
    half = sum(compose(each, known).peak(Tier.DEVICE) for each in ends) / 2
    return compose(chosen, replace(known, machine=replace(known.machine, device_bytes=int(half / 0.9))))


def operators_kept(plan: Any) -> list[int]:
    """Of each block that is recomputed."""
    keeps = [plan.keep(unit.name) for unit in plan.facts.units]
    return [len(keep.kept) for keep in keeps if keep.recomputes]


def kept(ranks: Ranks, configs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each config, one behind the other in the same ranks: what it trained, and what its last forward kept."""
    found = {}
    for name, config in configs.items():
        run = made_run(ranks, config, some=UNEVEN)
        if name == "auto":
            run = replace(run, plan=of_little_memory(run))
        trainer: Any = building.make_trainer(run)
        compute_loss, kept = trainer.compute_loss, []

        def counting(model: Any, *args: Any, compute_loss: Any = compute_loss, kept: Any = kept, **given: Any) -> Any:
            with count_saved(model) as storages:
                loss = compute_loss(model, *args, **given)
            kept[:] = [sum(storages.values())]
            return loss

        trainer.compute_loss = counting
        trainer.train()
        found[name] = {
            "weights": full_weights(trainer, ranks),
            "loss": [record["loss"] for record in trainer.state.log_history if "loss" in record],
            "kept": kept[0],
            "planned": sum(run.plan.saved_bytes(unit.name) for unit in run.plan.facts.units),
            "operators": operators_kept(run.plan),
        }
        trainer.accelerator.free_memory()
        forget_run()
    return found


def test_what_is_kept_of_a_block(tmp_path: Path) -> None:
    """Products that ranks have summed are kept as sums: no bit differs, and as much is kept as the plan says."""
    options = {"policy": "selective"}
    policies = {"none": {"policy": "none"}, "selective": options, "auto": {"policy": "auto"}}
    policies["host"] = {**options, "activation_offloading": True}
    kinds = {
        name: Kind(2, {"tensor": {"degree": 2}, "recompute": each}, SGD, LLAMA3) for name, each in policies.items()
    }
    found = run_counted(2, kept, {name: kind.config(tmp_path / name, 2) for name, kind in kinds.items()})
    for name, each in found.items():
        assert each["loss"] == found["none"]["loss"], name
        assert [one.name for one in compare(found["none"]["weights"], each["weights"])] == [], name
        assert each["kept"] == pytest.approx(each["planned"], abs=8), name
    assert found["selective"]["operators"] == [7, 7, 7] and sum(found["auto"]["operators"]) > 0
    assert found["host"]["kept"] < found["selective"]["kept"] < found["none"]["kept"] > found["auto"]["kept"]


def adapted(ranks: Ranks, config: Any, again: Any) -> dict[str, Any]:
    """What ``config`` trained, and then ``again`` from its checkpoint, which is exported: as adapters, then merged."""
    found = trained(ranks, config)
    forget_run()
    trainer = made(ranks, again, some=UNEVEN)
    trainer.train(resume_from_checkpoint=f"{config.training.output_dir}/checkpoint-2")
    found["again"], folder = full_weights(trainer, ranks), Path(again.training.output_dir) / "export"
    for kind in ("adapter", "merged"):
        lora = again.model.lora.model_copy(update={"export": kind})
        section = again.model.model_copy(update={"lora": lora})
        export(trainer, trainer.processing_class, again.model_copy(update={"model": section}))
        if ranks.is_first:
            (file,) = folder.glob("*.safetensors")
            found[kind] = load_file(file)
    return found


@pytest.mark.slow
def test_adapters(tmp_path: Path) -> None:
    """On a saved base, with its biases and products kept; from a checkpoint the bits are the same, and so is what the
    export leaves but for rounding.
    """
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS["llama"]))
    base.save_pretrained(tmp_path / "base")
    lora = {"r": 4, "target_modules": "all-linear", "bias": "all", "use_rslora": True}
    given = {**SGD, "max_steps": STEPS, "logging_steps": 1, "save_strategy": "steps", "save_steps": 2}
    given |= {"per_device_train_batch_size": 6}
    section = {"name_or_path": str(tmp_path / "base"), "lora": lora}

    def config(name: str, strategies: Mapping[str, Any]) -> Any:
        return run_config(None, output_dir=tmp_path / name, strategies=strategies, model=section, **given)

    options = {"tensor": {"degree": 2}, "recompute": {"policy": "selective"}}
    plain = run_world(1, trained, config("plain", {}))
    found = run_counted(2, adapted, config("first", options), config("again", options))
    same(plain, found)
    assert found["apart"] == [] and found["elements"] == [found["planned"], found["planned"] - LLAMA["hidden_size"]]
    assert compare(found["weights"], found["again"]) == []
    own = {name.replace(".default", ""): value for name, value in plain["weights"].items() if "lora_" in name}
    assert {name: value.shape for name, value in own.items()} == {
        name: found["adapter"][name].shape for name in own
    } and all(torch.allclose(value, found["adapter"][name], atol=1e-5) for name, value in own.items())
    assert found["merged"].keys() == base.state_dict().keys()


def in_fp64_with_biases(given: Mapping[str, Any]) -> Any:
    """The whole model. Where nothing has trained them biases are zero, and norms one; here they are neither."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**given)).double()
    for param in plain.parameters():
        param.data += 0.1 * torch.randn_like(param)
    return plain


def step_of_both(losses: Sequence[torch.Tensor], rules: Sequence[torch.optim.Optimizer]) -> float:
    """A clipped step of a whole model and of a divided one; the largest difference of their losses and norms."""
    from deepstow.strategies.parallel import tensor_shards

    for loss in losses:
        loss.backward()
    whole, divided = (rule.param_groups[0]["params"] for rule in rules)
    norms = torch.nn.utils.clip_grad_norm_(whole, 0.5), tensor_shards.clip_grad_norm_(divided, 0.5)
    assert norms[0] > 0.5
    for rule in rules:
        rule.step()
        rule.zero_grad()
    return max(float((one - other).detach().abs()) for one, other in (losses, norms))


def stages_in_fp64(ranks: Ranks, schedule: str) -> float:
    """The largest difference from a whole model in fp64: two stages, the layers of each divided over two ranks; Qwen 3,
    whose norms of heads are whole and have the gradients of two ranks.
    """
    from copy import deepcopy

    from transformers import Qwen3Config, Qwen3ForCausalLM

    from deepstow.strategies.parallel import pipelining, tensor_shards
    from deepstow.strategies.parallel.pipeline_gradients import StageGradients
    from deepstow.strategies.parallel.pipeline_state import gathered
    from deepstow.strategies.parallel.stages import Stage, form_of

    config, kind, grid = Qwen3Config(**{**QWEN3, "num_hidden_layers": 4}), Schedule(schedule), Grid(2, 1, 2)
    torch.manual_seed(0)
    plain: Any = Qwen3ForCausalLM(config).double()
    model, small = deepcopy(plain), deepcopy(plain)
    batches = [{"input_ids": ids, "labels": ids} for ids in torch.arange(96).view(4, 2, 12)]
    blocks = [f"model.layers.{index}" for index in range(4)]
    parts = [blocks[:2], blocks[2:]] if kind.parts_per_stage == 1 else [[block] for block in blocks]
    mine = [part for part in range(len(parts)) if kind.stage_of(part, 2) == grid.cell(ranks.rank).stage]
    stage = Stage(model, parts, mine, form_of(small, batches[0]))
    tensor_shards.divide(model, 2, tied=False)
    group, copies = pipelining.groups(grid)
    pipeline = pipelining.Pipeline(stage, kind, group, torch.device("cpu"))
    gradients = StageGradients(pipeline, copies)
    rules = [torch.optim.SGD(each.parameters(), lr=1.0) for each in (plain, model)]
    worst = 0.0
    for _ in range(STEPS):
        losses = [plain(**batch).loss / len(batches) for batch in batches]
        for loss in losses:
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        found = pipeline.step(batches, lambda batch: model(**batch).loss / len(batches))
        gradients.complete()
        worst = max(worst, float((gradients.clip(0.5) - norm).abs()))
        assert norm > 0.5 and (found - torch.stack(losses)).abs().max() < 1e-6  # losses travel in fp32
        for rule in rules:
            rule.step()
            rule.zero_grad()
    weights = gathered(pipeline)  # on the first rank
    assert weights.keys() == (plain.state_dict().keys() if ranks.is_first else {}.keys())
    return max([worst, *(float((each - plain.state_dict()[name]).abs().max()) for name, each in weights.items())])


@needs_to_return
def test_stages_in_fp64() -> None:
    assert run_world(4, stages_in_fp64, "zbv") < 1e-14


def with_dropout(ranks: Ranks, config: Any) -> dict[str, Any]:
    trainer = made(ranks, config, some=UNEVEN)
    try:
        trainer.train()
        states: list[Any] = [None] * ranks.world_size
        torch.distributed.all_gather_object(states, torch.get_rng_state())
        return {**of_ranks(trainer), "drawn alike": all(torch.equal(states[0], state) for state in states)}
    finally:
        trainer.accelerator.free_memory()


def test_dropout_keeps_ranks_together(tmp_path: Path) -> None:
    """Between layers and inside attention, recomputed: what is not divided stays equal, and so do the generators."""
    model = {**OPT, "dropout": 0.1, "attention_dropout": 0.3}
    kind = Kind(2, {"tensor": {"degree": 2}}, {**SGD, "gradient_checkpointing": True}, model)
    found = run_counted(2, with_dropout, kind.config(tmp_path, STEPS))
    assert found["apart"] == [] and found["drawn alike"]
