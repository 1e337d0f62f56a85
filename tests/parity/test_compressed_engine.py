"""Compressed exchanges of the memory engine, on two ranks, beside those of plain data parallelism.

Top-k and int8 depend on no bucket, so all ways end with the same bits, what is owed included, and a run that began in
one of them goes on in another. PowerSGD's factors are of buckets, so what goes on there is compared with a whole run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.distributed.ranks import Ranks
from tests.helpers.moves import Kind, common_ends, different, in_turn
from tests.helpers.worlds import run_counted

pytestmark = pytest.mark.ranks

ON_HOST: Mapping[str, Any] = {"offload": {"site": "host", "weights": "streamed"}}
PASSING: Mapping[str, Any] = {"offload": {"site": "streamed", "weights": "streamed"}}
ON_DEVICE: Mapping[str, Any] = {"offload": {"site": "device", "weights": "resident"}}
SPANS: Mapping[str, Any] = {**ON_HOST, "zero": {"stage": 3}}
GATHERED: Mapping[str, Any] = {"offload": {"site": "host", "gather": "network"}, "zero": {"stage": 2}}
TRAINING = {"per_device_train_batch_size": 1, "max_grad_norm": 0.05, "gradient_accumulation_steps": 2, "save_steps": 4}
STEPS, SAVED = 6, "checkpoint-4"
TOPK = {"compress": "topk", "density": 0.1, "start": 2}
INT8 = {"compress": "int8", "start": 2}
MOMENTUM = {**TOPK, "momentum": 0.5}
SGD = {"optim": "sgd"}


def _ends(ranks: Ranks, jobs: list[tuple[str, RunConfig, str | None]]) -> dict[str, Any]:
    found = common_ends(ranks, jobs)
    owed = [_owed(config, rank) for _, config, _ in jobs[:1] for rank in range(ranks.world_size)]
    dist.barrier()
    assert owed[0] == {} or different(*owed), "ranks owe the same: each has its own gradients"
    return found


def _owed(config: RunConfig, rank: int) -> dict[str, Any]:
    file = Path(str(config.training.output_dir)) / SAVED / f"compressed-{rank:05}-of-00002.safetensors"
    return load_file(file) if file.is_file() else {}


@pytest.mark.parametrize(
    ("options", "training", "ways"),
    [
        (TOPK, {}, {"plain": {}, "spans": SPANS, "gathered": GATHERED}),
        (MOMENTUM, SGD, {"plain": {}, "host": ON_HOST}),
        pytest.param(INT8, {}, {"plain": {}, "device": ON_DEVICE, "passing": PASSING}, marks=pytest.mark.slow),
    ],
    ids=["topk", "momentum", "int8"],
)
def test_the_bits_of_plain_compressed_training(
    options: dict[str, Any], training: dict[str, Any], ways: dict[str, Any], tmp_path: Path
) -> None:
    """Clipped and accumulated; each way goes on from the checkpoint of the one before it."""
    jobs, before = list[tuple[str, RunConfig, str | None]](), tmp_path / list(ways)[-1]
    kinds = {name: Kind(2, {"collectives": options, **more}, {**TRAINING, **training}) for name, more in ways.items()}
    for name, kind in kinds.items():
        jobs.append((name, kind.config(tmp_path / name, STEPS), None))
    for name, kind in kinds.items():
        jobs.append((f"{name}, resumed", kind.config(tmp_path / f"{name} again", STEPS), str(before / SAVED)))
        before = tmp_path / name
    found = run_counted(2, _ends, jobs)
    for name, end in found.items():
        names = [each for each in different(found["plain"], end) if not (training and each.endswith(" step"))]
        assert names == [], name  # torch's SGD counts no steps, and keeps a count that it finds
    owed = [[_owed(config, rank) for rank in range(2)] for _, config, resumed in jobs if resumed is None]
    assert all(different(owed[0][rank], each[rank]) == [] for each in owed for rank in range(2))


def _norms(ranks: Ranks, jobs: list[tuple[str, RunConfig, str | None]]) -> dict[str, list[float]]:
    return {name: found["norm"] for name, found in in_turn(ranks, jobs).items()}


def test_three_ranks_whose_losses_were_divided(tmp_path: Path) -> None:
    """With spans each rank's loss is divided by three, so that a sum is wanted and not a mean; all else is rounding."""
    jobs = list[tuple[str, RunConfig, str | None]]()
    for name, more in (("whole", ON_HOST), ("spans", SPANS)):
        kind = Kind(3, {"collectives": {**TOPK, "density": 1.0}, **more}, {**TRAINING, **SGD, "max_grad_norm": 9.0})
        jobs.append((name, kind.config(tmp_path / name, 4), None))
    found = run_counted(3, _norms, jobs)
    assert found["spans"] == pytest.approx(found["whole"], rel=1e-4) and len(found["whole"]) == 4


@pytest.mark.slow
def test_powersgd_goes_on_with_what_it_owes(tmp_path: Path) -> None:
    """In fp32, and in bf16, where it owes in fp32 nevertheless."""
    jobs = list[tuple[str, RunConfig, str | None]]()
    for name, more, bf16 in (("host", ON_HOST, False), ("spans", SPANS, False), ("passing", PASSING, True)):
        options = {"compress": "powersgd", "rank": 1, "start": 2}
        kind, folder = Kind(2, {"collectives": options, **more}, {**TRAINING, "bf16": bf16}), tmp_path / name
        jobs.append((name, kind.config(folder, STEPS), None))
        jobs.append((f"{name}, resumed", kind.config(folder, STEPS), str(folder / SAVED)))
    found = run_counted(2, _ends, jobs)
    for name, end in found.items():
        assert different(found[name.removesuffix(", resumed")], end) == [], name
    for bucket in (_owed(jobs[-1][1], rank) for rank in range(2)):
        assert {str(each.dtype) for each in bucket.values()} == {"torch.float32"}
