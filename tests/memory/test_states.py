"""Bytes of the training state that two real ranks hold after two steps, against the plan, kind by kind.

Each storage counts once: parameters; what the innermost torch optimizer keeps moments for, where that is not the
model's own (masters); moments; and whatever else DeepSpeed's optimizer holds, which must fit into the plan's buffers.

[Padding] Sizes are odd, so that all who round do: the plan, the share of each unit up to whole elements; stages 1 and
2, each flat group up to a multiple of 2 elements per rank (``nccl_start_alignment_factor``); stage 3, each tensor.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from deepstow.strategies.core.compose import compose
from deepstow.strategies.core.plan import Kind, Tier
from deepstow.strategies.engine.tensors.nested import tensors_in
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from tests.helpers.fakes import block, facts
from tests.helpers.releases import needs_stage_3
from tests.helpers.tiny import GPT2, run_config
from tests.helpers.worlds import run_counted

RANKS = 2
ODD: Mapping[str, Any] = {**GPT2, "n_embd": 33, "n_head": 3, "vocab_size": 601}
GROUPS = 2  # with and without weight decay
LORA = {"lora": {"r": 3, "target_modules": ["c_attn"]}}


def claim(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    """Bytes of the storages that nobody has claimed yet; scalars (the step number) and meta tensors are not state."""
    num_bytes = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.numel() > 1 and tensor.device.type != "meta" and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            num_bytes += storage.nbytes()
    return num_bytes


def held(ranks: Ranks, config: RunConfig) -> dict[str, int]:
    """Train two steps; bytes held by this rank, and what its plan says."""
    from deepstow.trainer.run import building
    from deepstow.trainer.verify.verify import random_run

    run = random_run(config, ranks)
    trainer = building.make_trainer(run)
    try:
        trainer.train()
        model = trainer.model_wrapped
        outer: Any = getattr(model, "optimizer", None) or trainer.optimizer  # DeepSpeed's, or Accelerate's
        inner = outer
        while hasattr(inner, "optimizer"):
            inner = inner.optimizer
        parameters = list(model.parameters())
        seen: set[int] = set()
        found = {"parameters": claim([getattr(p, "ds_tensor", p.data) for p in parameters], seen)}
        found["whole"] = claim([p.data for p in parameters], seen)  # stage 3 keeps small vectors whole besides
        found["master weights"] = claim(inner.state.keys(), seen)
        found["moments"] = claim(tensors_in(list(inner.state.values())), seen)
        grads = [p.grad for p in [*parameters, *inner.state.keys()] if p.grad is not None]
        found["gradients"] = claim([*grads, *tensors_in(getattr(outer, "grad_partitions_flat_buffer", None))], seen)
        found["else"] = claim(tensors_in(dict(vars(outer))), seen)
        for kind in Kind:
            found[f"plan: {kind.value}"] = run.plan.total(kind)
        found["plan: reserved"] = sum(reserve.num_bytes for reserve in run.plan.reserves(Tier.DEVICE))
        found["units"] = len(run.plan.facts.units)
        found["tensors"] = len(parameters)
        return found
    finally:
        trainer.accelerator.free_memory()


def slack(kind: Kind, stage: int | None, found: Mapping[str, int], element_bytes: int) -> int:
    """See [Padding]."""
    split_from = {Kind.MASTER: 1, Kind.MOMENT: 1, Kind.GRAD: 2, Kind.PARAM: 3}
    if not stage:
        return 0
    if stage == 3:
        return element_bytes * found["tensors"]
    if kind is Kind.PARAM:
        return element_bytes * 2 * RANKS * GROUPS
    assert stage >= split_from[kind]
    return element_bytes * (2 * GROUPS + found["units"])


def held_by_each(ranks: Ranks, configs: list[RunConfig]) -> list[dict[str, int]]:
    return [held(ranks, config) for config in configs]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("stages", "bf16", "lora"),
    [
        ((None, 0, 1, 2), (False, True), (2,)),
        *(pytest.param((3,), (bf16,), (), marks=needs_stage_3) for bf16 in (False, True)),
        pytest.param((), (), (3,), marks=needs_stage_3),
    ],
    ids=["up to 2", "3, fp32", "3, bf16", "3, adapters"],
)
def test_the_plan_is_what_deepspeed_holds(
    stages: tuple[int | None, ...], bf16: tuple[bool, ...], lora: tuple[int, ...], tmp_path: Path
) -> None:
    """Each case is one training; after one in stage 3 DeepSpeed partitions every model that its process builds. With
    adapters alone trained: frozen weights have no state."""
    cases: list[tuple[int | None, bool, dict[str, Any]]] = [(stage, each, {}) for stage in stages for each in bf16]
    cases += [(stage, False, LORA) for stage in lora]
    configs = [
        run_config(
            ODD, output_dir=tmp_path / str(number), stage=stage, bf16=each, max_steps=2, model=model,
            per_device_train_batch_size=2, data={"max_length": 32},
        )
        for number, (stage, each, model) in enumerate(cases)
    ]  # fmt: skip
    for (stage, each, model), found in zip(cases, run_counted(RANKS, held_by_each, configs), strict=True):
        compare(stage, found, compute_bytes=2 if each and stage is not None else 4)
        if model:  # adapters of rank 3 at two layers: 3 x 33 down and 99 x 3 up, halved, both moments in fp32
            assert 0 < found["moments"] <= 2 * 4 * (2 * (3 * 33 + 99 * 3) // RANKS + 2 * GROUPS + found["tensors"])


def compare(stage: int | None, found: Mapping[str, int], compute_bytes: int) -> None:
    """Each kind against the plan; nothing else is held that the plan does not reserve."""
    moment_bytes = 8  # both moments of one element
    for kind, element_bytes in ((Kind.PARAM, compute_bytes), (Kind.MASTER, 4), (Kind.MOMENT, moment_bytes)):
        planned = found[f"plan: {kind.value}"]
        assert abs(found[kind.value] - planned) <= slack(kind, stage, found, element_bytes), (kind, found)
        assert kind is Kind.MASTER or planned > 0
    assert found["gradients"] <= found["plan: gradients"] + slack(Kind.PARAM, stage, found, compute_bytes), found
    assert found["whole"] + found["else"] <= found["plan: reserved"], found


def ddp_holds(ranks: Ranks, num_params: int) -> float:
    """Bytes by which this process grows in its first backward with DistributedDataParallel."""
    import psutil

    layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(num_params >> 20)))
    rows, process = torch.ones(1, 1024), psutil.Process()
    before = process.memory_info().rss
    over_ranks = torch.nn.parallel.DistributedDataParallel(layers)  # which holds the buckets
    over_ranks(rows).sum().backward()
    return float(process.memory_info().rss - before)


@pytest.mark.ranks
def test_data_parallel_holds_gradients_twice() -> None:
    """Within 15 %: pages of the process are counted, and gloo has buffers of its own. Without buckets it is half."""
    num_params = 32 << 20
    plan = compose({}, facts(block("model.layers.0", num_params), world_size=RANKS))
    (reserved,) = plan.reserves(Tier.DEVICE)
    predicted = reserved.num_bytes + plan.total(Kind.GRAD)
    assert abs(run_world(RANKS, ddp_holds, num_params) / predicted - 1) < 0.15
    assert not compose({}, facts(block("model.layers.0", num_params))).reserves(Tier.DEVICE)
