"""Frozen weights that rest on the disk: the bits of plain training, whatever is late, and one line when one is lost."""

import errno
import mmap
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.layout import Layout
from deepstow.strategies.core.on_disk import disk_bytes, weights_on_disk
from deepstow.strategies.core.protocol import MemoryRefusal
from deepstow.strategies.engine import AdamW, StowOptimizer, slots, stow
from deepstow.strategies.engine.memory.scratch_file import DiskError
from deepstow.strategies.engine.transfer.transfer import Transfer
from deepstow.trainer.planning.plan_for import plan_for
from tests.helpers.doubles import Delayed, RaceDetector, Vacant
from tests.helpers.engine import checkpointing, differences, plain, plan_of, planned, stowed
from tests.helpers.late import Late
from tests.helpers.models import build, tokens
from tests.helpers.releases import needs_scratch
from tests.helpers.sides import BATCHES, train
from tests.memory.test_engine import MODELS, model_of

pytestmark = needs_scratch

MAPS = Path("/proc/self/maps")
BF16, FP32 = torch.bfloat16, torch.float32
CASES: dict[str, tuple[torch.dtype, dict[str, Any], dict[str, Any]]] = {  # dtype, the loop, the plan
    "whole blocks": (FP32, {"max_norm": 0.05}, {}),
    "half blocks": (BF16, {"max_norm": 0.05}, {"bucket": "half", "prefetch": 1}),
    "accumulated": (BF16, {"accumulation": 2}, {"bucket": "half", "site": "host"}),
    "three drives": (FP32, {}, {"bucket": "half", "drives": ("a", "b", "c"), "prefetch": 0}),
}


def base(dtype: torch.dtype, config: dict[str, Any] | None = None) -> Any:
    """Norms learn, and no matrix does."""
    model = model_of(config).to(dtype).train() if config else build("llama", dtype=dtype)
    for param in model.parameters():
        param.requires_grad_(param.dim() == 1)
    return model


def folders(path: Path, *names: str) -> list[str]:
    for name in names:
        (path / name).mkdir()
    return [str(path / name) for name in names]


def layout_of(model: nn.Module, path: Path, *drives: str, **wished: Any) -> Any:
    plan = plan_of(model, weights="travelling", disk=folders(path, *(drives or ("a",))), **wished)
    number, slots = len(weights_on_disk(plan.layout)), plan.layout.window_slots + len(plan.layout.disk) - 1
    assert number > slots, "some slot has two weights"
    return plan


MOVES = [(Transfer, True, False), (Delayed, False, True), (Vacant, True, True), (RaceDetector, False, False)]


@pytest.mark.parametrize(
    ("case", "make", "late", "again"), [(case, *how) for case, how in zip(CASES, MOVES, strict=True)]
)
def test_the_bits_are_those_of_plain_training(
    case: str, make: Callable[[], Transfer], late: bool, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads are as late as somebody waits for them, or ahead."""
    dtype, loop, wished = CASES[case]
    if late:
        monkeypatch.setattr(slots, "thread", Late)
    batches, sides = tokens("llama", 4 * loop.get("accumulation", 1)), [base(dtype), base(dtype)]
    for model in sides if again else ():
        checkpointing(model, "full")
    drives, wished = wished.get("drives", ()), {key: value for key, value in wished.items() if key != "drives"}
    plan = layout_of(sides[0], tmp_path, *drives, **wished, **loop)
    expected = plain(sides[1], batches, **loop)
    assert differences(expected, stowed(sides[0], plan, batches, transfer=make(), **loop)) == []


def stowed_on(path: Path, **wished: Any) -> tuple[nn.Module, StowOptimizer]:
    model = base(BF16)
    plan: Any = layout_of(model, path, bucket="half", **wished)
    return model, stow(model, plan, rule=AdamW(lr=1e-2), device="cpu")


def test_what_comes_next_is_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second step no block waits for a read that begins only then."""
    model, optimizer = stowed_on(tmp_path)
    disk = optimizer.engine.disk_weights
    assert disk is not None
    train(model, optimizer, BATCHES[:1])
    late, bring_in = list[int](), disk.bring_in

    def watched(index: int) -> None:
        slot = disk._places[index][0]
        late.extend([index] * (slot.holds != index))
        bring_in(index)

    monkeypatch.setattr(disk, "bring_in", watched)
    before = optimizer.engine.transfer.bytes_up
    train(model, optimizer, BATCHES[1:2])
    assert late == [] and optimizer.engine.transfer.bytes_up > before
    with torch.no_grad():
        model(**BATCHES[0])
        model(**BATCHES[0])
    optimizer.close()


def test_the_planner_puts_there_what_the_host_has_no_room_for(tmp_path: Path) -> None:
    """As little as is enough; what a refusal names is enough; the base is larger than host and device together."""
    sizes = {"num_hidden_layers": 12, "vocab_size": 32, "hidden_size": 192, "intermediate_size": 384}
    made = partial(base, BF16, MODELS["llama"] | sizes)
    model = made()
    facts = plan_for(model, max_grad_norm=0.0, eval_rows=0, batch=(1, 8)).facts
    weights = 2 * sum(param.numel() for param in model.parameters())
    given: Any = {
        "gpu_memory": weights // 3,
        "bucket_size": "64KiB",
        "disk": str(tmp_path),
        "disk_memory": "64MiB",
    }
    plan = planned(facts, **given, host_memory=weights // 2)
    assert plan.layout is not None and plan.place is not None
    assert plan.place.addresses.num_bytes(Tier.HOST) <= weights // 2
    assert weights // 3 < disk_bytes(plan.layout)
    largest = max(bucket.weight_bytes for bucket in plan.layout.buckets if bucket.weight_on_disk)
    assert weights // 2 - plan.place.addresses.num_bytes(Tier.HOST) < 2 * largest, "more is there than has to be"
    for roomy in ({"gpu_memory": weights}, {"host_memory": 9 * weights // 8}):  # for copies of all, and the state
        found = planned(facts, **{**given, "host_memory": weights // 4, **roomy}).layout
        assert found is not None and disk_bytes(found) == 0
    with pytest.raises(MemoryRefusal) as refused:
        planned(facts, **given, host_memory=10_000)
    assert refused.value.needed < weights // 3
    enough = planned(facts, **given, host_memory=refused.value.needed)
    assert enough.place is not None and enough.place.addresses.num_bytes(Tier.HOST) <= refused.value.needed
    with pytest.raises(MemoryRefusal):
        planned(facts, **given | {"disk_memory": "64KiB"}, host_memory=weights // 2)
    ids = torch.randint(0, 32, (1, 8), generator=torch.Generator().manual_seed(1))
    batches = [{"input_ids": ids, "labels": ids}] * 3
    expected = plain(made(), batches)
    for each in (plan, enough):
        assert differences(expected, stowed(made(), each, batches)) == []


def test_the_files_are_within_what_they_may_take() -> None:
    """Weights are whole on one drive each, so that their files are uneven."""
    facts = plan_for(
        base(BF16, MODELS["llama"] | {"num_hidden_layers": 12}), max_grad_norm=0.0, eval_rows=0, batch=(2, 16)
    ).facts
    given: Any = {"weights": "streamed", "disk": [f"/{number}" for number in range(3)], "bucket_size": "4KiB"}
    taken = set[int]()
    for most in range(64 << 10, 256 << 10, 24 << 10):
        for host in (256 << 10, 128 << 10):
            try:
                found = planned(facts, **given, disk_memory=f"{most}B", host_memory=host).layout
            except MemoryRefusal:
                continue
            assert isinstance(found, Layout) and disk_bytes(found) <= most
            taken.add(disk_bytes(found))
    assert max(taken) > 0


# --- from outside ----------------------------------------------------------------------------------------------------


def test_weights_from_outside(tmp_path: Path) -> None:
    """State dicts show the file, and what is written reaches the next forward: by a state dict, by ``present``, and
    after ``close``, when the parameters still rest there.
    """
    found = list[dict[str, Tensor]]()
    for on_disk in (False, True):
        model = base(BF16)
        plan: Any = layout_of(model, tmp_path) if on_disk else plan_of(model, weights="travelling")
        optimizer = stow(model, plan, rule=AdamW(lr=1e-2), device="cpu")
        train(model, optimizer, BATCHES[:1])
        state = model.state_dict()
        seen = {name: tensor.clone() for name, tensor in state.items()}
        if on_disk:
            places = [line.split()[0] for line in MAPS.read_text().splitlines() if str(tmp_path) in line]
            start, stop = (int(text, 16) for text in places[0].split("-"))
            frozen = "model.layers.1.mlp.up_proj.weight"
            assert start <= state[frozen].data_ptr() < stop, "no memory is taken for it"
        model.load_state_dict({name: tensor * 2 for name, tensor in seen.items()})
        with torch.no_grad():
            loss = {"loss": model(**BATCHES[2])["loss"].clone()}
        with optimizer.present(model.parameters()), torch.no_grad():
            for param in model.parameters():
                param.add_(0.5)
        train(model, optimizer, BATCHES[1:2])
        optimizer.close()
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(0.25)
        found.append(seen | loss | {f"{name} after": tensor for name, tensor in model.state_dict().items()})
    assert found[0].keys() == found[1].keys()
    assert [name for name in found[0] if not torch.equal(found[0][name], found[1][name])] == []


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EIO, 0])
def test_a_read_that_fails_ends_training(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = stowed_on(tmp_path)
    train(model, optimizer, BATCHES[:1])
    done, calls = os.preadv, list[Any]()

    def fails(*given: Any) -> int:
        calls.append(given)
        if len(calls) == 3 and number:
            raise OSError(number, os.strerror(number))
        return 0 if len(calls) == 3 else done(*given)

    monkeypatch.setattr(os, "preadv", fails)
    for _ in range(2):  # by a slot's thread, which nobody reads from at the second
        with pytest.raises(DiskError, match=f"the disk tier in {tmp_path}/a: .* of weights could not be read: "):
            train(model, optimizer, BATCHES[1:3])


def test_a_file_that_was_emptied_is_not_read(tmp_path: Path) -> None:
    """Neither by forward nor for a state dict, where the system would end the process."""
    model, optimizer = stowed_on(tmp_path)
    assert optimizer.engine.disk_weights is not None
    os.truncate(f"/proc/self/fd/{optimizer.engine.disk_weights._file.on(0)._handle}", 0)
    with pytest.raises(DiskError, match="of weights could not be read: some of the file's space was taken away"):
        model.state_dict()
    with pytest.raises(DiskError, match="of weights could not be read: "):
        model(**BATCHES[0])


def test_a_write_that_fails_ends_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(mmap.mmap):
        def flush(self, *_: Any) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(mmap, "mmap", Broken)
    with pytest.raises(DiskError, match="of weights could not be written: Input/output error"):
        stowed_on(tmp_path)


def test_a_folder_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"of weights are to be there, and .* are free"):
        stowed_on(tmp_path)
