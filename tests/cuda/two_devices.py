"""A process with two devices: each has its streams, memory and generator. Training on either has the same bits, under
every layout, also where the device is not the current one, and puts nothing on the other."""

from typing import Any

import torch

from deepstow.strategies.engine.transfer.transfer import AcceleratorTransfer
from tests.helpers import fake_cuda
from tests.helpers.engine import differences, plain, plan_of, stowed
from tests.helpers.grid import batches_on
from tests.helpers.models import build, on

FIRST, SECOND = "cuda:0", "cuda:1"
STEPS = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "resident": {"site": "device"},
    "host": {"site": "host", "weights": "travelling", "park": "host", "prefetch": 1},
    "streamed": {"site": "streamed", "weights": "travelling", "park": "host", "prefetch": 1},
}


def refused(call: object, line: str) -> None:
    try:
        call()  # type: ignore[operator]
    except RuntimeError as error:
        assert line in str(error), error
    else:
        raise AssertionError(f"not refused: {line}")


def main() -> None:
    fake = fake_cuda.Fake()
    fake.delay(300, 100)
    one, two = torch.arange(6.0, device=FIRST), torch.arange(6.0, device=SECOND)
    assert (two + 1).device == two.device and torch.cuda.current_device() == 0
    assert torch.equal(one.to(SECOND) * 2, two + two) and torch.equal(one[::2].to(SECOND), two[::2])
    refused(lambda: one + two, "Expected all tensors to be on the same device")
    with torch.cuda.device(SECOND):
        event = torch.cuda.Event()
        event.record()
    refused(lambda: event.record(torch.cuda.current_stream(FIRST)), "")  # torch's own check
    torch.cuda.synchronize(SECOND)
    assert torch.cuda.memory_allocated(SECOND) > 0
    fake.limit(torch.cuda.memory_allocated(SECOND) + (8 << 20), 1)
    refused(lambda: torch.empty(64 << 20, device=SECOND), "out of memory")
    assert torch.empty(64 << 20, device=FIRST).numel()
    fake.limit(0, 1)
    known = fake_cuda.complaints(fake)
    expected = plain(on(FIRST, build("llama")), batches_on(FIRST, "llama", STEPS), max_norm=0.5)
    for device in (FIRST, SECOND):
        batches = batches_on(device, "llama", STEPS)
        assert differences(expected, plain(on(device, build("llama")), batches, max_norm=0.5)) == [], device
        elsewhere = SECOND if device == FIRST else FIRST
        for name, wishes in LAYOUTS.items():
            before = torch.cuda.memory_stats(elsewhere)["allocation.all.allocated"]
            plan, transfer = plan_of(build("llama"), max_norm=0.5, **wishes), AcceleratorTransfer(torch.device(device))
            found = stowed(build("llama"), plan, batches, max_norm=0.5, device=device, transfer=transfer)
            assert differences(expected, found) == [], (device, name)
            assert torch.cuda.memory_stats(elsewhere)["allocation.all.allocated"] == before, (device, name)
    assert torch.cuda.current_device() == 0
    assert fake_cuda.complaints(fake) == known


if __name__ == "__main__":
    main()
