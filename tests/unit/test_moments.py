"""Moments in bf16 and int8: what rounding does to them, their bytes, and what is refused beside them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepstow.strategies.core.facts import Precision, RunFacts, Tier
from deepstow.strategies.core.formats import FORMATS
from deepstow.strategies.core.layout import Item, Site, needs
from deepstow.strategies.engine import codecs
from deepstow.strategies.engine.codecs import WEIGHTS, once_encoded
from deepstow.strategies.offload import Offload
from tests.helpers.fakes import refusals_of
from tests.helpers.layouts import bucket, layout
from tests.helpers.moments import OneParameter

KINDS = [name for name, rests in FORMATS.items() if "moments" in rests.uses and name != "fp32"]


def numbers(size: int, scale: float = 1.0, seed: int = 1) -> list[Tensor]:
    """A first and a second moment, of sizes that are orders of magnitude apart."""
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randn(2, size, generator=generator) * torch.randn(2, size, generator=generator).mul(3).exp()
    return [scale * first, (scale * second).square()]


def between(values: Tensor, unit: Tensor) -> Tensor:
    """How far the neighbours among the squares of whole numbers are apart, around ``values``, at most."""
    return 2 * (values.abs() * unit).sqrt() + unit


def alike(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 255, 256, 1000])
def test_what_was_expanded_is_compressed_to_what_it_was(kind: str, size: int) -> None:
    """With any noise, its ends among it: so a checkpoint in fp32 has all of it."""
    for scale, end in ((1e-30, None), (1e-12, None), (1e9, None), (1.0, Tensor.amin), (1.0, Tensor.amax)):
        one = OneParameter(kind, "a", size)
        noise = one.moments._noise.clone()
        one.moments._noise.copy_(noise if end is None else end(noise))
        one.put(numbers(size, scale))
        one.moments._noise.copy_(noise)
        before = one.get()
        for count in range(20):
            one.put(one.get(), count)
            assert alike(one.get(), before), (scale, count)


@pytest.mark.parametrize("kind", ["bf16", "int8"])  # whose steps are known here
def test_rounding_is_stochastic_and_without_bias(kind: str) -> None:
    """Of many roundings the mean is the number itself, but for a quarter of a unit at most where roots are rounded; to
    the nearest it would be off by half a step, each time.
    """
    values, times, copies = numbers(512), 8, 64
    one, found = OneParameter(kind, "a", 512 * copies), list[Tensor]()
    for count in range(times):
        one.put([value.repeat(copies) for value in values], count)
        found += torch.stack(one.get()).view(2, copies, 512).unbind(1)
    every, exact = torch.stack(found).double(), torch.stack(values).double()
    spread, mean, step, bias = every.std(0), every.mean(0), exact.abs() / 128, torch.zeros(2, 512)
    if kind == "int8":
        largest = exact.abs().view(2, -1, 256).amax(2, keepdim=True).expand(2, -1, 256).reshape(2, -1)
        unit = largest[0] / 127**2
        step, bias[0] = torch.stack([between(exact[0], unit), exact[1] / 8]), unit / 4 + exact[0].abs() * 2.0**-10
        # What is far below its block is lifted to the least that there is.
        exact[1] = torch.where(exact[1] < largest[1] * 2.0**-31, mean[1], exact[1])
    # The noise leaves out 1/256 at either end, which moves a mean by no more than that part of a step.
    assert ((mean - exact).abs() <= 6 * (spread + step / 16) / (times * copies) ** 0.5 + step / 256 + bias).all()
    assert (spread > 0).double().mean() > 0.8
    alone = OneParameter(kind, "a", 512)
    alone.put(values, times - 1)
    again = OneParameter(kind, "a", 512)
    again.put(values, times - 1)
    assert alike(again.get(), alone.get()), "the noise is a matter of name and number alone"
    other = OneParameter(kind, "b", 512)
    other.put(values, times - 1)
    assert not alike(other.get(), alone.get())


def test_errors_in_int8_are_bounded_by_the_block() -> None:
    """And no second moment is rounded to zero, unless all of its block is. The last block is a short one."""
    first, second = numbers(1000)
    first[:256], second[256:512], second[600] = 0.0, 0.0, 1e-30
    one = OneParameter("int8", "a", 1000)
    one.put([first, second])
    rounded, square = one.get()
    largest, largest_square = (
        torch.cat([part.abs().max().expand(part.numel()) for part in moment.split(256)]) for moment in (first, second)
    )
    assert ((rounded - first).abs() <= between(first, largest / 127**2) + first.abs() * 2.0**-10).all()
    assert ((square - second).abs() <= second / 8 + largest_square * 2.0**-31).all()
    assert (square[256:512] == 0).all() and (square[512:] > 0).all()


# --- bytes -----------------------------------------------------------------------------------------------------------


def test_bytes_of_a_bucket() -> None:
    made = bucket("b", "layers.0", 1000, 24, dtype="bfloat16", site=Site.HOST)
    assert made.num_elements == 1024 + 256
    found = {
        kind: {
            need.item: need.num_bytes for need in needs(made, layout(made, moments_as=kind)) if need.tier is Tier.HOST
        }
        for kind in ("fp32", *KINDS)
    }
    assert [found[kind][Item.MOMENTS] for kind in ("fp32", "bf16", "int8")] == [8 * 1280, 4 * 1280, 2 * 1280]
    assert found["int8"].pop(Item.SCALES) == 4 * 2 * (4 + 1)
    assert Item.SCALES not in found["bf16"]
    rounded, where = replace(made, rounds=True), layout(made, moments_as="int8")
    assert [need.num_bytes for need in needs(rounded, where) if need.item is Item.MASTER] == [2 * 1280]
    away = replace(rounded, resident_ticks=((0, 1),))
    assert Item.MASTER not in {need.item for need in needs(away, where)}  # its copy is


# --- refusals --------------------------------------------------------------------------------------------------------


def run(**changes: Any) -> RunFacts:
    known: dict[str, Any] = {"micro_batch": 1, "sequence": 8, "accumulation": 1, "max_grad_norm": 1.0}
    return RunFacts(**{**known, "precision": Precision.BF16, "world_size": 1, "optim": "adamw_torch_fused", **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"optim": "sgd"}, "is for AdamW's two, not for sgd's"), ({"world_size": 2}, "is for one rank, and there are 2")],
)
def test_what_is_refused(changes: dict[str, Any], words: str) -> None:
    (line,) = refusals_of("offload", {"offload": Offload(moments="int8")}, run(**changes))
    assert line.startswith("strategies.offload.moments = 'int8': ") and words in line
    assert not refusals_of("offload", {"offload": Offload()}, run(**changes))
    assert not refusals_of("offload", {"offload": Offload(moments="int8")}, run())


def test_masters_round_up_as_often_as_they_are_near() -> None:
    """Of numbers that lie between two in bf16; and those in bf16 stay."""
    one, step = OneParameter("int8", "a", 1 << 18, rounds=True), 2.0**-7
    for part in (0.002, 0.3, 0.75):
        found = one.round(torch.full((1 << 18,), 1 + part * step), 5).float().sub(1).div(step)
        assert set(found.unique().tolist()) == {0.0, 1.0}
        assert found.mean().item() == pytest.approx(part, rel=0.2 if part < 0.1 else 0.01)  # 3.6 times the deviation
    kept = torch.randn(1 << 12).bfloat16()
    other = OneParameter("int8", "a", 1 << 12, rounds=True)
    assert other.round(kept.float()).equal(kept) and not other.round(kept.float() * 1.001, 1).equal(
        other.round(kept.float() * 1.001, 2)
    )


def test_it_is_never_called_exact() -> None:
    parity = Offload(moments="bf16").parity(run())
    assert parity.is_lossy and parity.reason == "not exact: moments in bf16"
    both = Offload(moments="int8", masters="bf16").parity(run())
    assert both.is_lossy and both.reason == "not exact: moments in int8, masters in bf16"
    assert not Offload().parity(run()).is_lossy


# What a byte and a scale of fp8 mean: how far off, the same when rounded again, and never beyond what a byte has

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
