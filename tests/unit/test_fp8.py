"""What a byte and a scale of fp8 mean: how far off, the same when rounded again, and never beyond what a byte has."""

import pytest
import torch

from deepstow.strategies.core.formats import FORMATS
from deepstow.strategies.engine import codecs
from deepstow.strategies.engine.codecs import WEIGHTS, once_encoded

BLOCK = FORMATS["fp8"].block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_of_any_size_are_off_by_half_a_bit_of_four(dtype: torch.dtype) -> None:
    """Within 1/16 of themselves, down to 2^-14 of the largest of their block; rounded again they are the same."""
    torch.manual_seed(0)
    weight = (torch.randn(40, 1000) * 10 ** torch.empty(40, 1).uniform_(-30, 30)).to(dtype)
    found = once_encoded(weight, "fp8")
    assert found.dtype is dtype and found.shape == weight.shape
    assert torch.equal(once_encoded(found, "fp8"), found)
    blocks = torch.nn.functional.pad(weight.reshape(-1), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    codes, scales = WEIGHTS["fp8"].encode(blocks)
    assert (
        codes.nbytes + scales.nbytes == FORMATS["fp8"].num_bytes(codes.numel())
        and codes.numel() == scales.numel() * BLOCK
    )
    largest = weight.reshape(-1)[: 312 * BLOCK].view(-1, BLOCK).abs().amax(1, keepdim=True).float()
    own, wrong = (each.reshape(-1)[: 312 * BLOCK].view(-1, BLOCK).float() for each in (weight, found - weight))
    assert bool((wrong.abs() <= torch.maximum(own.abs() / 16, largest * 2**-17)).all())
    normal = torch.randn(64, 4096)
    assert 0.026 < float((once_encoded(normal, "fp8") - normal).norm() / normal.norm()) < 0.027


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
        codes, scales = WEIGHTS["fp8"].encode(torch.full((1, BLOCK), largest))
        assert scales.tolist() == [scale] and codes.numel() == BLOCK and codes.float().abs().max() <= 448
    for value in (torch.nan, torch.inf, 3.39e38):
        with pytest.raises(ValueError, match="NaN, infinity or"):
            WEIGHTS["fp8"].encode(torch.tensor([[1.0, value]]))
    whole = torch.randn(3, 500)
    expected = once_encoded(whole, "fp8")
    monkeypatch.setattr(codecs, "CHUNK_BLOCKS", 2)
    assert torch.equal(once_encoded(whole, "fp8"), expected), "weights are cut where a block ends"
