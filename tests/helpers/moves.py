"""Runs on real ranks that save, move to another strategy or number of ranks, and go on; what their state is meanwhile.

State is read with each library's own access to it and not with the code that saves, so that both can be compared.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepstow.strategies.parallel.autotp import Cut, cut_of
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.distributed.ranks import Ranks
from tests.helpers.engine import shared_state
from tests.helpers.tiny import LLAMA, VOCAB, run_config
from tests.helpers.trainers import in_fp16
from tests.helpers.worlds import run_counted

ROWS = [
    {"input_ids": (ids := [1 + (7 * row + 3 * place * place) % (VOCAB - 1) for place in range(12)]), "labels": ids}
    for row in range(24)
]
UNEVEN = [  # rows with other numbers of trained tokens, so that losses are weighted
    {"input_ids": row["input_ids"], "labels": [-100] * (5 * number % 11) + row["labels"][5 * number % 11 :]}
    for number, row in enumerate(ROWS)
]
OFFLOAD: Mapping[str, Any] = {"offload": {"site": "host", "weights": "streamed"}}
RECOMPUTE: Mapping[str, Any] = {"recompute": {"policy": "full"}}
SAVED = 2  # the step of the checkpoint


@dataclass(frozen=True)
class Kind:
    """A strategy on a number of ranks, and what else differs from the smallest run."""

    ranks: int = 1
    strategies: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    section: Mapping[str, Any] = field(default_factory=dict)

    @property
    def copies(self) -> int:
        """Of the model."""
        sizes = (("tensor", "degree"), ("sequence", "degree"), ("pipeline", "stages"))
        return self.ranks // math.prod(int(self.strategies.get(name, {}).get(key, 1)) for name, key in sizes)

    def config(self, folder: Path, steps: int) -> RunConfig:
        # Without clipping and accumulation all strategies compute the same in fp32; a step has 6 rows on any ranks.
        training: dict[str, Any] = {
            "max_steps": steps, "save_strategy": "steps", "save_steps": SAVED, "logging_steps": 1,
            "learning_rate": 1e-2, "per_device_train_batch_size": 6 // self.copies, "max_grad_norm": 0.0,
            "warmup_steps": 3, "weight_decay": 0.1, "lr_scheduler_type": "cosine",
        } | dict(self.training)  # fmt: skip
        model = {**({} if "model_type" in self.model else LLAMA), **self.model}
        data = {"eval_fraction": 0.5} if "eval_strategy" in training else {}
        sections = {"strategies": self.strategies, "model": self.section, "data": data}
        return run_config(model, output_dir=folder, **sections, **training)


def plain(ranks: int = 1, **training: Any) -> Kind:
    """Plain training."""
    return Kind(ranks, {}, training)


def offload(ranks: int = 1, **training: Any) -> Kind:
    """The memory engine."""
    return Kind(ranks, OFFLOAD, training)


def shared(ranks: int, stage: int = 3, **training: Any) -> Kind:
    """The memory engine, its buckets shared by the ranks; under stage 1 with all weights on each device."""
    options = OFFLOAD if stage == 3 else {"offload": {"site": "host"}}
    return Kind(ranks, {**options, "zero": {"stage": stage}}, training)


def together(ranks: int, **training: Any) -> Kind:
    """The engine's buckets shared by ranks, each with one of the micro-batches of a step of 12 rows; clipped."""
    return shared(ranks, per_device_train_batch_size=12 // ranks, max_grad_norm=0.05, **training)


def accumulating(micro_batches: int, **training: Any) -> Kind:
    """One process with the micro-batches of as many ranks."""
    kind = together(micro_batches, gradient_accumulation_steps=micro_batches, **training)
    return replace(kind, ranks=1, strategies=OFFLOAD if training.get("bf16") else {})


def zero(stage: int, ranks: int = 1, **training: Any) -> Kind:
    """A ZeRO stage."""
    return Kind(ranks, {"zero": {"stage": stage}}, training)


def tensor(stage: int, ranks: int = 2, **training: Any) -> Kind:
    """Two ranks for each copy of the model."""
    return Kind(ranks, {"tensor": {"degree": 2}, "zero": {"stage": stage}}, training)


def pipeline(stages: int, ranks: int = 0, schedule: str = "gpipe", **training: Any) -> Kind:
    """As many ranks for each copy of the model; by default one copy."""
    return Kind(ranks or stages, {"pipeline": {"stages": stages, "schedule": schedule}}, training)


def in_both(ranks: int, stage: int = 0, **training: Any) -> Kind:
    """Two stages, the layers of each divided over two ranks."""
    strategies = {**tensor(stage).strategies, **pipeline(2).strategies}
    return Kind(ranks, strategies, training)


def staged(ranks: int, schedule: str = "gpipe", **training: Any) -> Kind:
    """The memory engine in two stages; on more ranks copies of a stage share its state."""
    options = OFFLOAD if ranks == 2 else {"offload": {"site": "host"}, "zero": {"stage": 1}}
    return Kind(ranks, {**options, "pipeline": {"stages": 2, "schedule": schedule}}, training)


def run(kind: Kind, folder: Path, steps: int, resume: Path | None = None) -> dict[str, Any]:
    """Train up to ``steps``. Returns the state at the beginning, at every save and at the end, and the losses."""
    return dict(run_counted(kind.ranks, _run, kind.config(folder, steps), str(resume) if resume else None))


Job = tuple[str, RunConfig, str | None]  # a name, the run, and the checkpoint that it goes on from


def in_turn(ranks: Ranks, jobs: Sequence[Job]) -> dict[str, dict[str, Any]]:
    """``run`` of each job, one behind the other in the same ranks."""
    found = {}
    for name, config, resume in jobs:
        found[name] = _run(ranks, config, resume)
        forget_run()
    return found


def in_worlds(jobs: Iterable[tuple[Kind, Job]], timeout_s: float = 300.0) -> dict[str, dict[str, Any]]:
    """``in_turn`` on one world of ranks for each number of them; DeepSpeed never forgets ranks that divided layers, so
    each such run has its own.
    """
    worlds: dict[tuple[int, str], list[Job]] = {}
    for kind, job in jobs:
        worlds.setdefault((kind.ranks, job[0] if "tensor" in kind.strategies else ""), []).append(job)
    found: dict[str, dict[str, Any]] = {}
    for (ranks, _), some in worlds.items():
        found |= run_counted(ranks, in_turn, some, timeout_s=timeout_s + 30 * len(some))
    return found


def common_ends(ranks: Ranks, jobs: Sequence[Job]) -> dict[str, Any]:
    """``in_turn``, of which the ranks end with the same bits: these."""
    found = in_turn(ranks, jobs)
    for name, each in found.items():
        every: list[Any] = [None] * ranks.world_size
        dist.all_gather_object(every, each["end"])
        assert not any(different(each["end"], other) for other in every), f"{name}: ranks end with other bits"
    return {name: each["end"] for name, each in found.items()}


def forget_run() -> None:
    """Drop what libraries keep of a run, so that another may follow in the same process."""
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    unset_hf_deepspeed_config()
    for variable in [each for each in os.environ if each.startswith("ACCELERATE_")]:
        del os.environ[variable]


def made_run(ranks: Ranks, config: RunConfig, some: Sequence[Mapping[str, Any]] = ROWS) -> Any:
    """A run on ``some`` rows, which are evaluated on as well if the config evaluates."""
    from datasets import Dataset

    from deepstow.trainer.data.prepare import Contents, Prepared
    from deepstow.trainer.verify.verify import run_on

    rows = Dataset.from_list([dict(row) for row in some])
    prepared = Prepared(
        rows, rows if config.training.eval_strategy != "no" else None, "input_ids", Contents(fingerprint="test")
    )
    return run_on(prepared, config, ranks)


def made(ranks: Ranks, config: RunConfig, some: Sequence[Mapping[str, Any]] = ROWS) -> Any:
    """The trainer of such a run."""
    from deepstow.trainer.run import building

    trainer = building.make_trainer(made_run(ranks, config, some))
    return in_fp16(trainer) if config.training.fp16 else trainer


def _run(ranks: Ranks, config: RunConfig, resume: str | None) -> dict[str, Any]:
    from transformers import TrainerCallback

    trainer = made(ranks, config)
    found: dict[str, Any] = {}

    class Look(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            found["start"] = state_of(trainer)

        def on_save(self, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
            found[f"saved at {state.global_step}"] = state_of(trainer)

    trainer.add_callback(Look())
    try:
        trainer.train(resume_from_checkpoint=resume)
        found["end"] = state_of(trainer)
        logged = trainer.state.log_history
        found["loss"] = [record["loss"] for record in logged if "loss" in record]
        found["norm"] = [record["grad_norm"] for record in logged if "grad_norm" in record]
        found["seen"] = [{key: record[key] for key in ("tokens", "eval_loss") if key in record} for record in logged]
        return found
    finally:
        trainer.accelerator.free_memory()


def state_of(trainer: Any) -> dict[str, Tensor]:
    """Exact weights, moments, counts, and the schedule, whole and on every rank."""
    rates = {group["lr"] for group in trainer.optimizer.param_groups}  # DeepSpeed drops groups without parameters
    found = {"lr": torch.tensor(sorted(rates), dtype=torch.float64)}
    found["epoch of the schedule"] = torch.tensor(trainer.lr_scheduler.last_epoch)
    scaler = trainer.accelerator.scaler
    found |= {} if scaler is None else {f"loss {key}": torch.tensor(it) for key, it in scaler.state_dict().items()}
    in_spans = trainer.stowed is not None and trainer.stowed.is_shared
    shared = shared_state(trainer.stowed) if in_spans else {}
    weights = trainer.model.state_dict() if in_spans else {}
    for name, param in trainer.model.named_parameters():
        if param.requires_grad and in_spans:
            found[f"{name} weight"] = shared.pop(f"{name} master", weights[name].float().cpu().clone())
        elif param.requires_grad:
            for kind, value in _state_of(trainer, param).items():
                found[f"{name} {kind}"] = torch.as_tensor(value).detach().float().cpu().clone()
    found |= shared
    if trainer.execution.pipeline is not None:
        found = of_stages(trainer, found)
    if trainer.execution.experts is not None:
        return with_all_experts(trainer.model, found)
    return joined(found) if trainer.execution.grid.tensor > 1 else found


def with_all_experts(model: Any, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """``found`` on all ranks that have different experts, put together."""
    everyones: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyones, found)
    degree = {name: len(param.shard.sizes) for name, param in model.named_parameters() if hasattr(param, "shard")}
    whole = {}
    for key, value in found.items():
        count = degree.get(key.rpartition(" ")[0], 1) if value.dim() else 1
        whole[key] = torch.cat([each[key] for each in everyones[:count]]) if count > 1 else value
        assert all(torch.equal(each[key], everyones[at % count][key]) for at, each in enumerate(everyones)), key
    return whole


def of_stages(trainer: Any, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """``found`` on all stages of one copy of the model. A tied head is there under the embedding's name only."""
    everyones: list[Any] = [None] * trainer.execution.pipeline.stages
    torch.distributed.all_gather_object(everyones, found, group=trainer.execution.pipeline.group)
    return {key: value for each in reversed(everyones) for key, value in each.items()}


def joined(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """``found`` on one rank of a copy of the model and its neighbour, put together."""
    from deepspeed.utils import groups

    group = groups.get_tensor_model_parallel_group()
    both: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(both, found, group=group)
    whole = {}
    for key, value in found.items():
        layer, _, kind = key.rpartition(" ")[0].rpartition(".")
        parts, cut = [each[key] for each in both], cut_of(layer, tied=False)
        if value.dim() and cut is not None and (cut, kind) != (Cut.ROWS, "bias"):
            whole[key] = torch.cat(parts, dim=int(cut is Cut.ROWS))
        else:
            assert all(torch.equal(parts[0], part) for part in parts), f"{key}: ranks of one copy differ"
            whole[key] = value
    return whole


def _state_of(trainer: Any, param: Any) -> dict[str, Any]:
    if trainer.stowed is not None:
        state = dict(trainer.stowed.state_of(param))
        if not trainer.stowed.engine.rule.kernel.counts:
            del state["step"]  # torch counts none
        return {"weight": state.pop("master", param), **state}
    if not trainer.is_deepspeed_enabled:
        return {"weight": param, **getattr(trainer.optimizer, "optimizer", trainer.optimizer).state.get(param, {})}
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    outer = trainer.model_wrapped.optimizer
    inner = getattr(outer, "optimizer", outer)
    if type(outer).__name__ == "FP16_UnfusedOptimizer":
        groups = zip(outer.fp16_groups, outer.fp32_groups, strict=True)
        pairs = [pair for group in groups for pair in zip(*group, strict=True)]
        master = next(copy for other, copy in pairs if other is param)
        return {"weight": master, **inner.state.get(master, {})}
    if isinstance(outer, torch.optim.Optimizer):
        return {"weight": param, **outer.state.get(param, {})}
    flats = getattr(outer, "single_partition_of_fp32_groups", None) or outer.fp32_partitioned_groups_flat
    state = inner.state.get(flats[0], {})
    if state and hasattr(outer, "_lazy_init_hp_params_optimizer_state"):
        outer._hp_optimizer_states_linked = False  # DeepSpeed links all groups when the first of them has stepped
        outer._lazy_init_hp_params_optimizer_state()
    found = {"weight": safe_get_full_fp32_param(param)}
    for key, value in state.items():
        whole = isinstance(value, Tensor) and value.dim() > 0
        found[key] = safe_get_full_optimizer_state(param, key) if whole else value
    return found


def different(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """The names under which they do not have the same bits."""
    return [name for name in one.keys() | other.keys() if not _equal(one.get(name), other.get(name))]


def far(one: Mapping[str, Tensor], other: Mapping[str, Tensor], tolerance: float) -> list[str]:
    """The names under which the norm of their difference is more than ``tolerance`` of their norm."""
    pairs = {name: (one[name].double(), other[name].double()) for name in one.keys() | other.keys()}
    return [name for name, (first, second) in pairs.items() if (first - second).norm() > tolerance * first.norm()]


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.shape == other.shape and torch.equal(one, other)
