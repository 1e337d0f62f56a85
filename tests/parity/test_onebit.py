"""1-bit Adam on real ranks, beside its two stages written plainly, with all errors in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from deepstow.strategies.backends.compressed import Compressed
from deepstow.strategies.core.compression import Compression
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from tests.helpers.moves import Kind, common_ends, different
from tests.helpers.worlds import run_counted
from tests.parity.test_compressed import Known, _same_on_all

pytestmark = pytest.mark.ranks
SHAPES = [(3,), (130,), (40, 60), (7, 300)]
LR, DECAY, EPS, BETAS, START, STEPS, BLOCK = 1e-2, 0.1, 1e-8, (0.9, 0.99), 3, 8, 128


def _gradients(ranks: int) -> list[list[list[Tensor]]]:
    """By step, rank and parameter; an element has zeros in the warm-up, a parameter on rank 1."""
    generator = torch.Generator().manual_seed(ranks)
    every = [[[torch.randn(s, generator=generator) for s in SHAPES] for _ in range(ranks)] for _ in range(STEPS)]
    for step in range(START):
        for rank in range(ranks):
            every[step][rank][2][5, 7] = 0
    for step in range(STEPS):
        every[step][1][1].zero_()
    return every


def _sign(numbers: Tensor) -> Tensor:
    """Blocks in a bit each: the mean size of what is not zero, with the sign."""
    found = torch.empty_like(numbers)
    for at, block in enumerate(numbers):
        scale = block.abs().sum() / max(1, int((block != 0).sum()))
        found[at] = torch.where(block > 0, scale, -scale)
    return found


def _plainly(ranks: int) -> list[Tensor]:
    """Both stages, in one process."""
    weights = [torch.zeros(shape) for shape in SHAPES]
    for number, weight in enumerate(weights):
        size = weight.numel()
        blocks = -(-size // (BLOCK * ranks))
        owed = [torch.zeros(ranks * blocks * BLOCK) for _ in range(ranks)]
        owners = torch.zeros(ranks * blocks, BLOCK)
        m, v = torch.zeros(SHAPES[number]), torch.zeros(SHAPES[number])
        for step, every in enumerate(_gradients(ranks), 1):
            if step <= START:
                mean = torch.stack([each[number] for each in every]).sum(0) / ranks
                m, v = BETAS[0] * m + (1 - BETAS[0]) * mean, BETAS[1] * v + (1 - BETAS[1]) * mean * mean
                update = (m / (1 - BETAS[0] ** step)) / ((v / (1 - BETAS[1] ** step)).sqrt() + EPS)
            else:
                if step == START + 1:
                    m, v = m / (1 - BETAS[0] ** START), v / (1 - BETAS[1] ** START)
                    v = torch.where(v == 0, v.mean(), v)
                total = torch.zeros(ranks * blocks, BLOCK)
                for rank, each in enumerate(every):
                    mine = BETAS[0] * m + (1 - BETAS[0]) * each[number]
                    owed[rank][:size] += mine.view(-1)
                    sent = _sign(owed[rank].view(-1, BLOCK))
                    owed[rank][:size] -= sent.view(-1)[:size]
                    total += sent
                total = (total / ranks).view(-1)
                total[size:] = 0
                owners += total.view(-1, BLOCK)
                sent = _sign(owners)
                owners = owners - sent
                m = sent.view(-1)[:size].view_as(weight)
                update = m / (v.sqrt() + EPS)
            weight.mul_(1 - LR * DECAY).sub_(LR * update)
    return weights


def _train(ranks: Ranks) -> dict[str, Any]:
    model, how = Known([tuple(shape) for shape in SHAPES]), Compressed(Compression("onebit", 1, 1, START))
    wrapped = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=0.005)
    how.hang_on(wrapped)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, betas=BETAS, eps=EPS)
    how.follow(optimizer, model)
    for step, every in enumerate(_gradients(ranks.world_size)):
        wrapped(every[ranks.rank]).backward()
        norm = how.norm_of_all(torch.tensor(float(ranks.rank)))
        assert norm == (ranks.rank if step < START else (ranks.world_size - 1) / 2)
        optimizer.step()
        optimizer.zero_grad()
        for number, param in enumerate(model.params):
            _same_on_all(param.detach(), f"step {step}, parameter {number}")
    return {str(number): param.detach().clone() for number, param in enumerate(model.params)}


@pytest.mark.parametrize("ranks", [2, 4])
def test_both_stages_are_those_written_plainly(ranks: int) -> None:
    """Sums of momenta and gradients are rounded in other orders; a sign that turns is off by 1e-2."""
    found = run_counted(ranks, _train)
    for number, expected in enumerate(_plainly(ranks)):
        apart = float((found[str(number)] - expected).abs().max())
        assert apart <= 1e-5, f"parameter {number} is {apart} off"


def _unused(ranks: Ranks) -> dict[str, int]:
    for before in (None, torch.zeros(6)):
        model, how = Known([(5,), (6,)]), Compressed(Compression("onebit", 1, 1, 2))
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        how.hang_on(wrapped)
        optimizer = torch.optim.AdamW(model.parameters())
        how.follow(optimizer, model)
        for _ in range(2):
            wrapped([torch.ones(5), before]).backward()
            optimizer.step()
            optimizer.zero_grad()
        wrapped([torch.ones(5), torch.ones(6)]).backward()
        with pytest.raises(RuntimeError, match=r"params.1 had no gradient in the warm-up.*raise"):
            optimizer.step()
    return {"cases": 1}


def test_a_parameter_without_variance_ends_the_run() -> None:
    run_world(2, _unused, deepspeed=False)


@pytest.mark.slow
def test_a_run_goes_on_in_the_second_stage_and_from_the_first(tmp_path: Path) -> None:
    """With clipping and accumulation; a checkpoint on either side of the border."""
    options = {"collectives": {"compress": "onebit", "start": 3}}
    training = {"per_device_train_batch_size": 1, "max_grad_norm": 0.05, "gradient_accumulation_steps": 2}
    kind = Kind(2, options, {**training, "save_steps": 2})
    folder = tmp_path / "onebit"
    jobs: list[tuple[str, RunConfig, str | None]] = [("whole", kind.config(folder, 6), None)]
    jobs += [(f"from {step}", kind.config(folder, 6), str(folder / f"checkpoint-{step}")) for step in (2, 4)]
    found = run_counted(2, common_ends, jobs)
    for step in (2, 4):
        assert different(found["whole"], found[f"from {step}"]) == [], step
