"""Local steps on real ranks, beside outer steps written plainly in one process; runs that evaluate, save and go on."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from deepstow.strategies.core.facts import Compression
from deepstow.strategies.plugins.local_steps import LocalSteps
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.distributed.ranks import Ranks
from tests.helpers.moves import Kind, different, in_turn
from tests.helpers.worlds import run_counted
from tests.parity.test_compressed import Known, _same_on_all

pytestmark = pytest.mark.ranks
SHAPES: list[tuple[int, ...]] = [(3,), (130,), (40, 60)]
STEPS = 6
INNER: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
}


def _gradients(ranks: int) -> list[list[list[Tensor]]]:
    """By step, rank and parameter."""
    generator = torch.Generator().manual_seed(ranks)
    return [[[torch.randn(s, generator=generator) for s in SHAPES] for _ in range(ranks)] for _ in range(STEPS)]


def _begin() -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _plainly(ranks: int, how: Compression, inner: str) -> list[Tensor]:
    """The outer weights after all steps: those of as many loops, whose differences Nesterov's momentum takes."""
    outer, momentum = _begin(), [torch.zeros(shape) for shape in SHAPES]
    loops = [[each.clone().requires_grad_() for each in outer] for _ in range(ranks)]
    optimizers = [INNER[inner](loop) for loop in loops]
    for step, every in enumerate(_gradients(ranks), 1):
        for loop, optimizer, gradients in zip(loops, optimizers, every, strict=True):
            for weight, gradient in zip(loop, gradients, strict=True):
                weight.grad = gradient
            optimizer.step()
        if step % how.local_steps == 0:
            with torch.no_grad():
                for at, weight in enumerate(outer):
                    delta = torch.stack([weight - loop[at] for loop in loops]).mean(0)
                    momentum[at] = how.outer_momentum * momentum[at] + delta
                    weight -= how.outer_lr * (delta + how.outer_momentum * momentum[at])
                    for loop in loops:
                        loop[at].copy_(weight)
    return outer


def _trained(ranks: Ranks, how: Compression, inner: str) -> dict[str, Tensor]:
    model, local = Known(SHAPES), LocalSteps(how)
    with torch.no_grad():
        for param, value in zip(model.params, _begin(), strict=True):
            param.copy_(value + ranks.rank)  # the first rank's are taken
    optimizer = INNER[inner](model.parameters())
    named = nn.ModuleDict({"a": nn.ModuleDict({"inner": model})})  # as what the state calls the optimizer's part
    local.follow(optimizer, named)
    for step, every in enumerate(_gradients(ranks.world_size), 1):
        model(every[ranks.rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        for number, param in enumerate(model.params):
            with local.outer_weights():
                _same_on_all(param.detach(), f"step {step}, outer weights {number}")
            if step % how.local_steps == 0:
                _same_on_all(param.detach(), f"step {step}, parameter {number}")
            else:
                others = [torch.empty_like(param) for _ in range(ranks.world_size)]
                dist.all_gather(others, param.detach())
                assert not torch.equal(others[0], others[1]), "ranks have exchanged in a local step"
    filled, saved = LocalSteps(how), dict(local._state())
    filled.follow(optimizer, named)
    filled._fill(dict(saved), {"steps": STEPS})
    assert different(saved, dict(filled._state())) == []
    filled._fill(dict(saved), {"steps": STEPS - 1})
    for since in (True, False):  # then, as after training, the weights of an evaluation are loaded
        filled.resumed()
        assert ("not in the model" in filled.finish()) == (since and how.local_steps > 1)
    return {str(number): param.detach().clone() for number, param in enumerate(model.params)}


def _cases(ranks: Ranks, cases: list[tuple[str, Compression, str]]) -> dict[str, Any]:
    return {name: _trained(ranks, how, inner) for name, how, inner in cases}


def test_outer_steps_are_those_written_plainly() -> None:
    """Sums of differences are rounded in another order; compressed differences, of about 0.02 each, are off by 1 % of
    the largest of a block with int8 and by 2^-8 with bf16, and with all of them sent top-k is exact."""
    cases: dict[str, tuple[Compression, str, float]] = {
        "adamw": (Compression("none", 1, 1, 0, 3, 0.7, 0.9), "adamw", 1e-5),
        "no momentum": (Compression("none", 1, 1, 0, 2, 0.5, 0.0), "adamw", 1e-5),
        "topk": (Compression("topk", 1.0, 1, 0, 3, 0.7, 0.9), "adamw", 1e-5),
        "int8": (Compression("int8", 1, 1, 0, 3, 0.7, 0.9), "adamw", 2e-3),
        "bf16": (Compression("bf16", 1, 1, 0, 3, 0.7, 0.9), "adamw", 2e-3),
    }
    found = run_counted(4, _cases, [(name, how, inner) for name, (how, inner, _) in cases.items()])
    for name, (how, inner, tolerance) in cases.items():
        for number, expected in enumerate(_plainly(4, how, inner)):
            apart = float((found[name][str(number)] - expected).abs().max())
            assert apart <= tolerance, f"{name}: parameter {number} is {apart} off"


# --- training --------------------------------------------------------------------------------------------------------


STOWED: dict[str, dict[str, Any]] = {
    "on the host": {"site": "host", "weights": "streamed"},
    "on the device": {"site": "device", "weights": "resident"},
}


def _everything(ranks: Ranks, jobs: list[tuple[str, RunConfig, str | None]]) -> list[Any]:
    """Of each rank and job the state at the end, and what it has logged."""
    every: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(every, in_turn(ranks, jobs))
    return every


@pytest.mark.parametrize("bf16", [pytest.param(False, marks=pytest.mark.slow), True])
def test_in_the_memory_engine_with_the_bits_of_plain_local_steps(tmp_path: Path, bf16: bool) -> None:
    """Clipped, accumulated, evaluated, saved and resumed between outer steps, each rank with its own state. In bf16
    the engine has masters, which plain training has not, so there it is compared with itself."""
    training = {
        "per_device_train_batch_size": 1, "max_grad_norm": 0.05, "gradient_accumulation_steps": 2,
        "eval_strategy": "steps", "eval_steps": 1, "bf16": bf16,
    }  # fmt: skip
    ways = {name: {"offload": each} for name, each in STOWED.items()} | ({} if bf16 else {"plainly": {}})
    jobs: list[tuple[str, RunConfig, str | None]] = []
    for name, more in ways.items():
        saves = {"save_steps": 1 if name == "on the host" else 3}
        kind, folder = Kind(2, {"collectives": {"local_steps": 2}, **more}, {**training, **saves}), tmp_path / name
        jobs.append((name, kind.config(folder, 7), None))
        jobs.append((f"{name}, resumed", kind.config(folder, 7), str(folder / "checkpoint-3")))
    ranks = run_counted(2, _everything, jobs)
    expected = [rank[list(ways)[-1]] for rank in ranks]
    first, other = ({k: v for k, v in each["end"].items() if k.endswith(" exp_avg")} for each in expected)
    assert different(first, other), "ranks have not trained alone"
    for number, rank in enumerate(ranks):
        for name, found in rank.items():
            assert different(expected[number]["end"], found["end"]) == [], f"{name}, rank {number}"
            if name in STOWED:
                for what in ("loss", "norm", "seen"):
                    assert found[what] == expected[number][what] != [], f"{name}: {what}"
    losses = [record["eval_loss"] for record in expected[0]["seen"] if "eval_loss" in record]
    assert losses[1] == losses[2] != losses[3], "evaluations are of the last outer step"
    files = [tmp_path / "on the host" / f"checkpoint-{step}" / "model.safetensors" for step in (2, 3, 4)]
    before, between, after = map(load_file, files)
    assert different(before, between) == [] != different(between, after), "and so are the weights that are saved"
