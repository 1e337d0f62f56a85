"""What a byte and a scale of fp8 mean: how far off, the same when rounded again, and never beyond what a byte has."""

import pytest
import torch

from deepstow.strategies.core.fp8 import BLOCK, packed_bytes
from deepstow.strategies.engine.tensors import fp8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_of_any_size_are_off_by_half_a_bit_of_four(dtype: torch.dtype) -> None:
    """Within 1/16 of themselves, down to 2^-14 of the largest of their block; rounded again they are the same."""
    torch.manual_seed(0)
    weight = (torch.randn(40, 1000) * 10 ** torch.empty(40, 1).uniform_(-30, 30)).to(dtype)
    found = fp8.as_rounded(weight)
    assert found.dtype is dtype and found.shape == weight.shape
    assert torch.equal(fp8.as_rounded(found), found)
    codes, scales = fp8.rounded(weight)
    assert codes.nbytes + scales.nbytes == packed_bytes(codes.numel()) and codes.numel() == scales.numel() * BLOCK
    largest = weight.reshape(-1)[: 312 * BLOCK].view(-1, BLOCK).abs().amax(1, keepdim=True).float()
    own, wrong = (each.reshape(-1)[: 312 * BLOCK].view(-1, BLOCK).float() for each in (weight, found - weight))
    assert bool((wrong.abs() <= torch.maximum(own.abs() / 16, largest * 2**-17)).all())
    normal = torch.randn(64, 4096)
    assert 0.026 < float((fp8.as_rounded(normal) - normal).norm() / normal.norm()) < 0.027


def test_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """448 is the largest number of a byte: what is above goes to a larger scale, and no row becomes NaN."""
    for largest, scale in (
        (448.0, 1.0),
        (448.1, 2.0),
        (224.1, 1.0),
        (224.0, 0.5),
        (0.0, 2.0**-126),
        (1e-40, 2.0**-126),
    ):
        codes, scales = fp8.rounded(torch.full((1, 3), largest))
        assert scales.tolist() == [scale] and codes.numel() == BLOCK and codes.float().abs().max() <= 448
    for value in (torch.nan, torch.inf, 3.39e38):
        with pytest.raises(ValueError, match="NaN, infinity or"):
            fp8.rounded(torch.tensor([[1.0, value]]))
    whole = torch.randn(3, 500)
    expected = fp8.as_rounded(whole)
    monkeypatch.setattr(fp8, "CHUNK", 2 * BLOCK)
    assert torch.equal(fp8.as_rounded(whole), expected), "weights are cut where a block ends"
