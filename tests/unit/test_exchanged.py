"""Tokens in fewer bits between tensor ranks: rounding by known figures, what is chosen, what the plan says."""

from typing import Any

import pytest
import torch

from deepstow.strategies.core.compatibility import refusals
from deepstow.strategies.core.compose import compose
from deepstow.strategies.core.facts import MachineFacts
from deepstow.strategies.core.plan import Tier
from deepstow.strategies.core.registry import find, rules
from deepstow.strategies.plugins.codec_rows import BLOCK, Codec
from deepstow.strategies.plugins.exchanged import among_zeros, chosen, of_tokens
from deepstow.strategies.report import plan_table
from deepstow.strategies.tensor import Tensor as Strategy
from deepstow.trainer.run.checkpoints.resume_rules import compare
from tests.helpers.fakes import block, facts, run_facts
from tests.unit.test_rates import some_rates


# By the notes, relative to uniform levels over all numbers.
@pytest.mark.parametrize(("kind", "segmented", "blocks"), [("gauss", 0.60, 0.37), ("laplace", 0.29, 0.15)])
def test_mean_squared_errors(kind: str, segmented: float, blocks: float) -> None:
    random = torch.Generator().manual_seed(0)
    numbers = torch.randn(1 << 18, generator=random)
    if kind == "laplace":
        numbers = numbers.sign() * torch.empty(1 << 18).exponential_(generator=random)
    step = 2 * numbers.abs().max() / 2**8
    uniform = ((numbers / step).floor().clamp(-128, 127) + 0.5) * step
    for codec, share in ((Codec(8, segmented=True), segmented), (Codec(8, segmented=False), blocks)):
        found = codec.decoded(codec.encoded(numbers.view(1, -1, BLOCK))).flatten()
        relative = float((found - numbers).square().mean() / (uniform - numbers).square().mean())
        assert relative == pytest.approx(share, abs=0.06)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("segmented", [False, True])
def test_zeros_and_what_is_not_finite(bits: int, segmented: bool) -> None:
    """Each message by itself; of blocks no number is off by more than half a level."""
    codec, numbers = Codec(bits, segmented), torch.randn(3, 4, BLOCK, generator=torch.Generator().manual_seed(0))
    numbers[1] = 0
    numbers[2, 0, 5] = torch.inf
    coded = codec.encoded(numbers)
    assert coded.shape[1] == 4 * BLOCK * bits // 8 + (8 if segmented else 4 * 4)
    found = codec.decoded(coded)
    assert torch.equal(found[1], numbers[1]) and not found[2, 0].isfinite().any()
    step = numbers[0].abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    bound = step * 0.5001 if not segmented else 2.0 ** (2 - bits) * numbers[0].abs().max()
    assert ((found[0] - numbers[0]).abs() <= bound).all()


def test_chosen() -> None:
    """The best of each row, of equal ones the first; what is not a number is chosen, so that it is seen."""
    scores = torch.tensor([[1.0, 3.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0, torch.nan]])
    assert chosen(scores, 0.5).tolist() == [[0, 1, 2], [0, 1, 4]]
    assert chosen(torch.zeros(30), 0.1).tolist() == [0, 1, 2]
    whole = torch.arange(20.0).view(2, 5, 2)
    kept = chosen(scores, 0.4)
    found = among_zeros(of_tokens(whole, kept), kept, whole)
    assert found[0, :, 1].tolist() == [1, 3, 0, 0, 0] and found[1, :, 0].tolist() == [10, 0, 0, 0, 18]


def said(net: float, **exchange: Any) -> str:
    machine = MachineFacts("test gpu", 1 << 40, 1 << 40, rates=some_rates(net_bytes_per_s=net), ranks=2)
    known = facts(
        block(0, 1000), block(1, 1000), machine=machine, world_size=2, tensor=2, hidden_size=1000, sums=(2, 5, 7),
        micro_batch=2, sequence=500,
    )  # fmt: skip
    plan = compose({"tensor": Strategy.model_validate({"degree": 2, "exchange": exchange})}, known)
    assert any(one.owner == "tensor: exchanged rows" for one in plan.reserves(Tier.DEVICE)) or "bits" not in exchange
    return next((line for line in plan_table.summary(plan) if "lossy" in line), "")


def test_the_plan_says_what_is_sent_and_whether_coding_takes_longer() -> None:
    """Two blocks, a million numbers in fp32: seven sums of 4 MB without."""
    line = said(1e7, tokens=0.5, bits=8, codec="segmented")
    assert "sends 14.02 MB per micro-batch instead of 56 MB" in line and "less than it saves" in line
    assert "sends 20.12 MB" in (line := said(1e13, bits=8)) and "more than it saves: take 16 bits" in line
    assert "sends 20.02 MB" in (line := said(1e7, tokens=0.5)) and "coding takes 0 ms" in line
    assert said(1e7) == ""


def test_an_exact_exchange_goes_with_all_that_a_lossy_one_does_not() -> None:
    beside = {"offload": find("offload").model_validate({})}
    for exchange, refused in (
        ({}, False),
        ({"tokens": 1.0, "bits": 16}, False),
        ({"bits": 8}, True),
        ({"tokens": 0.5}, True),
    ):
        asked = {"tensor": Strategy.model_validate({"degree": 2, "exchange": exchange}), **beside}
        found = [one for one in refusals(rules(asked), asked, run_facts()) if one.key.endswith("tensor.exchange")]
        assert bool(found) is refused, exchange


def test_never_called_equal() -> None:
    lossy = Strategy.model_validate({"degree": 2, "exchange": {"tokens": 0.5}})
    assert lossy.parity(run_facts()).is_lossy
    assert not Strategy.model_validate({"degree": 2, "exchange": {}}).parity(run_facts()).is_lossy
    trees = [{"strategies": {"tensor": {"degree": 2, **more}}} for more in ({}, {"exchange": {"bits": 8}})]
    refused = compare(*trees, (1, 1), "checkpoint-4").refused
    assert "training.allow_change: [compression]" in refused[0].what, refused
    assert compare(trees[1], trees[1], (1, 1), "checkpoint-4").refused == []
