"""What compressed exchanges are predicted to send, how they are declared, and what is refused; int8's rounding."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from deepstow.launch.verify import conclude
from deepstow.strategies.collectives import Collectives
from deepstow.strategies.core.compose import compose
from deepstow.strategies.core.facts import Facts, MachineFacts, Precision
from deepstow.strategies.core.plan import Tier
from deepstow.strategies.core.registry import find
from deepstow.strategies.planner.lossy import kept_bytes, reserves, sent_bytes, words
from deepstow.strategies.plugins.codec_int8 import BLOCK, decoded, encoded
from deepstow.strategies.report import plan_table
from deepstow.trainer.errors import ExitCode
from deepstow.trainer.run.exporting.export import _exactness
from tests.helpers.fakes import block, embedding, facts, refusals_of, run_facts
from tests.unit.test_rates import some_rates

COUNT = 20_000_000


def known(method: str, ranks: int, net: float = 1e7, **options: Any) -> Facts:
    machine = MachineFacts("test gpu", 1 << 40, 1 << 40, rates=some_rates(net_bytes_per_s=net), ranks=ranks)
    found = facts(embedding(COUNT // 2), block(0, COUNT // 2), machine=machine, world_size=ranks, hidden_size=1000)
    return Collectives(compress=method, **options).narrowed(found, 0)  # type: ignore[arg-type]


def chosen(method: str) -> Collectives:
    more = {"local_steps": 50} if method == "none" else {}
    return Collectives.model_validate({"compress": method, **more})


def said(about: Facts) -> str:
    assert about.run.compression is not None
    plan = compose({"collectives": chosen(about.run.compression.method)}, about)
    return next(line for line in plan_table.summary(plan) if "lossy" in line)


@pytest.mark.parametrize(
    ("method", "ranks", "megabytes", "whole"),
    [
        ("bf16", 2, 40, 80),
        ("fp16", 4, 60, 120),
        ("int8", 4, 1.5 * 20 * 132 / 128, 120),
        ("topk", 2, 1.6, 80),
        ("topk", 4, 4.8, 120),
        # The embedding is 1,000 x 10,000; the block ten squares of 1,000: (11,000 + 20,000) x 4 numbers.
        ("powersgd", 4, 1.5 * 31_000 * 4 * 4 / 1e6, 120),
    ],
)
def test_bytes_that_a_rank_sends(method: str, ranks: int, megabytes: float, whole: float) -> None:
    assert f"{megabytes:.4g} MB per step instead of {whole:.4g} MB" in said(known(method, ranks))


def test_the_plan_says_whether_coding_takes_longer_than_it_saves() -> None:
    assert "less than it saves" in said(known("int8", 4, net=1e7))
    assert "which is more than it saves: leave it out" in said(known("int8", 4, net=1e13))
    assert "as much at a density of 0.25 with 4 ranks" in said(known("topk", 4))
    alone = known("topk", 1)
    assert "there is one rank" in compose({"collectives": Collectives(compress="topk")}, alone).idle["collectives"]


@pytest.mark.parametrize(("method", "bytes_each"), [("bf16", 0), ("topk", 4), ("int8", 5)])
def test_what_is_owed_is_planned(method: str, bytes_each: int) -> None:
    plan = compose({"collectives": chosen(method)}, known(method, 4))
    (owed,) = (each for each in plan.reserves(Tier.DEVICE) if each.owner == "collectives: owed gradients")
    assert owed.num_bytes == bytes_each * COUNT and not owed.in_passes


def test_in_the_memory_engine_what_is_owed_rests_on_the_host() -> None:
    """Gradients have 2 bytes there; spans are sent once, and means come to all nevertheless."""
    about = known("topk", 4, momentum=0.5)
    stowed = replace(about, run=replace(about.run, stowed=True, precision=Precision.BF16))
    (owed,) = (each for each in reserves(stowed) if each.owner == "collectives: owed gradients")
    assert (owed.tier, owed.num_bytes, kept_bytes(stowed)) == (Tier.HOST, 8 * COUNT, 8 * COUNT)
    assert sent_bytes(stowed) == (1.5 * 2 * COUNT, 3 * 8 * 0.01 * COUNT)
    assert sent_bytes(stowed, spans=True) == (0.75 * 2 * COUNT, 3 * 8 * 0.01 * COUNT)
    assert "60 MB" in words(stowed) and "instead of 30 MB" in words(stowed, spans=True)


def test_local_steps_are_planned() -> None:
    """On average a step sends 1/50; outer weights and momentum are on the host, and no bucket is on the device."""
    about = known("none", 4, local_steps=50)
    assert "on average 2.4 MB per step instead of 120 MB" in said(about)
    plan = compose({"collectives": Collectives(local_steps=50)}, about)
    (outer,) = (each for each in plan.reserves(Tier.HOST) if each.owner == "collectives: outer state")
    assert outer.num_bytes == 8 * COUNT
    assert not [each for each in plan.reserves(Tier.DEVICE) if each.owner == "data parallel: buckets"]
    stowed = replace(about, run=replace(about.run, stowed=True), machine=replace(about.machine, name="cpu"))
    plan = compose({"collectives": Collectives(local_steps=50)}, stowed)
    assert 8 * COUNT in [each.num_bytes for each in plan.reserves(Tier.HOST)], "of the memory engine's host"
    on_cpu = compose({"collectives": chosen("none")}, replace(about, machine=replace(about.machine, name="cpu")))
    assert 8 * COUNT in [each.num_bytes for each in on_cpu.reserves(Tier.DEVICE)]
    refused = [[*Collectives(local_steps=50).refusals(run_facts(world_size=2, steps=steps))] for steps in (40, 50)]
    assert refused[0] and not refused[1], "ranks would never exchange"
    assert kept_bytes(about) == (4 + 4 + 8) * COUNT  # momentum, a rank's own weights and moments, in its checkpoints


def test_it_is_never_called_equal(capsys: pytest.CaptureFixture[str]) -> None:
    for each, method in ((chosen("bf16"), "bf16"), (chosen("topk"), "topk"), (chosen("none"), "every 50 steps")):
        parity = each.parity(run_facts(world_size=2))
        assert parity.is_lossy and method in parity.reason
        assert conclude([], parity.tolerance, parity.reason) == ExitCode.FAILED
        assert "NOT equal, and not meant to be" in capsys.readouterr().out
        exact = Collectives(slices=2).parity(run_facts(world_size=2))
        text = _exactness({"collectives": parity, "recompute": exact})
        assert text.startswith("Training is lossy") and parity.reason in text and "bit for bit" not in text


FEEDBACK = "powersgd"


@pytest.mark.parametrize(
    ("options", "others", "run", "what"),
    [
        ({}, {"zero": {"stage": 0}}, {}, "cannot go with strategies.zero"),
        ({}, {"offload": {}, "zero": {"stage": 3}}, {"precision": Precision.BF16, "trained_bytes": 2}, ""),
        ({"compress": "bf16"}, {"offload": {}}, {"precision": Precision.BF16}, "take powersgd, topk or int8"),
        ({"compress": "bf16"}, {"offload": {}}, {"precision": Precision.BF16, "adapters": True}, ""),
        ({"compress": "topk", "momentum": 0.9}, {}, {"optim": "sgd", "moments": 0}, ""),
        ({"compress": "topk", "momentum": 0.9}, {}, {"optim": "sgd", "moments": 1}, "without optim_args"),
        ({"compress": "topk", "momentum": 0.9, "local_steps": 5}, {}, {"optim": "sgd", "moments": 0},
         "momentum = 0.9: local_steps exchanges differences"),
        ({"slices": 2}, {}, {}, "leave hierarchical and slices out"),
        ({"density": 0.1}, {}, {}, "density = 0.1: is of topk, not of powersgd"),
        ({}, {}, {"precision": Precision.FP16}, "loss scale"),
        ({"compress": "fp16"}, {"recompute": {}}, {"precision": Precision.FP16}, ""),
        ({}, {}, {"trained_bytes": 2}, "16 bits already"),
        ({}, {}, {"recomputes": True}, "take strategies.recompute instead"),
        ({"compress": "topk"}, {}, {"recomputes": True}, ""),
        ({"local_steps": 5, "compress": "int8"}, {"offload": {}}, {}, "take compress: none, bf16 or fp16"),
        ({"local_steps": 5, "compress": "bf16"}, {"offload": {}}, {"trained_bytes": 2}, ""),
        ({"local_steps": 5}, {}, {}, "take compress: none, bf16, fp16, topk or int8"),
        ({"compress": "none", "outer_lr": 0.5}, {}, {}, "outer_lr = 0.5: is of local_steps"),
        ({"compress": "int8", "local_steps": 5, "start": 3}, {}, {}, "compresses from its first exchange on"),
        ({"compress": "none", "local_steps": 5}, {}, {"optim": "adafactor"}, "take adamw_torch, "),
    ],
)  # fmt: skip
def test_refused(options: dict[str, Any], others: dict[str, Any], run: dict[str, Any], what: str) -> None:
    strategies = {name: find(name).model_validate(each) for name, each in others.items()}
    each = Collectives.model_validate({"compress": FEEDBACK, **options})
    facts = replace(run_facts(world_size=4), stowed="offload" in others, **run)
    found = refusals_of("collectives", {"collectives": each, **strategies}, facts)
    assert len(found) == bool(what) and all(what in one for one in found)
    if not what:  # nor as a run writes it down
        again = Collectives.model_validate(each.model_dump())
        assert not refusals_of("collectives", {"collectives": again, **strategies}, facts) and again == each


def test_int8_is_off_by_half_a_level_at_most_and_passes_on_what_is_not_finite() -> None:
    numbers = torch.randn(50, BLOCK, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 50)[:, None]
    numbers[3] = 0
    back, level = decoded(encoded(numbers)), numbers.abs().amax(1, keepdim=True) / 127
    assert ((back - numbers).abs() <= level * 0.5001).all() and torch.equal(back[3], numbers[3])
    assert float(back.square().mean()) > 0
    for bad in (torch.nan, torch.inf):
        numbers[7, 5] = bad
        assert not decoded(encoded(numbers))[7, 5].isfinite() and decoded(encoded(numbers))[8].isfinite().all()
