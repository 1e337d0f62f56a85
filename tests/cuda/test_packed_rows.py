"""Packed rows on a CUDA device: no attention makes the host wait, and in 16 bits one kernel takes all documents."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen as kernels

from deepstow.strategies.parallel import varlen
from tests.parity.test_packed_waits import LENGTHS, batch, model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICE = torch.device("cuda")


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Inside, torch raises where the host would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def moved(given: dict[str, Any]) -> dict[str, Any]:
    return {name: each.to(DEVICE) for name, each in given.items()}


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_step_waits(dtype: torch.dtype, recomputed: bool) -> None:
    ours = model(recomputed=recomputed).to(DEVICE, dtype)
    varlen.prepare(ours)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    batches = [moved(batch(documents=True)) for _ in range(3)]
    for number, given in enumerate(batches):
        with nothing_waits() if number else torch.enable_grad():  # the first step starts libraries
            ours(**given).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad(), nothing_waits():
        ours.eval()(**batches[0])


def test_positions_alone_wait_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read where they are, and then nothing else is."""
    ours, given, own = model().to(DEVICE), moved(batch(documents=False)), varlen.Documents.at
    varlen.prepare(ours)

    def read(positions: Any) -> varlen.Documents:
        torch.cuda.set_sync_debug_mode("default")
        found = own(positions)
        torch.cuda.set_sync_debug_mode("error")
        return found

    ours(**given).loss.backward()
    monkeypatch.setattr(varlen.Documents, "at", read)
    with nothing_waits():
        ours(**given).loss.backward()


def test_one_call_takes_all_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each layer, under autocast too, and not in fp32. It gives what a call per document gives, but for rounding."""
    own, calls = kernels.varlen_attn, []
    monkeypatch.setattr(kernels, "varlen_attn", lambda *given, **more: calls.append(1) or own(*given, **more))
    for dtype, casts, expected in ((torch.bfloat16, False, 4), (torch.float32, False, 0), (torch.float32, True, 4)):
        calls.clear()
        with torch.autocast("cuda", torch.bfloat16, enabled=casts):
            model().to(DEVICE, dtype)(**moved(batch(documents=True)))
        assert len(calls) == expected
    query = torch.randn(2, 4, 16, 8, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    key, value = torch.randn(2, 2, 2, 16, 8, device=DEVICE, dtype=torch.bfloat16)
    monkeypatch.setattr(varlen, "_takes_any_length", lambda *given: True)
    alone = varlen.attend(query, key, value, varlen.Documents(((1,) * 16,) * 2), None, None)
    if not torch.equal(alone, value.repeat_interleave(2, dim=1).transpose(1, 2)):
        pytest.skip("this device does not compute the kernel: a token that sees itself alone has another value")
    for window in (None, 4):
        sides = []
        for takes in (True, False):
            monkeypatch.setattr(varlen, "_takes_any_length", lambda *given, takes=takes: takes)
            out = varlen.attend(query, key, value, varlen.Documents(LENGTHS), window, None)
            sides.append([out, *torch.autograd.grad(out.float().square().sum(), [query])])
        for one, other in zip(*sides, strict=True):
            assert torch.allclose(one, other, rtol=2e-2, atol=2e-2)
