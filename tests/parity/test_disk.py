"""Optimizer state that rests on the disk: the bits of plain training, whatever is late, and one line when it fails."""

import errno
import fcntl
import mmap
import os
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.layout import PAGE_BYTES, Layout
from deepstow.strategies.core.on_disk import disk_bytes, pieces_on_disk
from deepstow.strategies.core.protocol import MemoryRefusal
from deepstow.strategies.engine import SGD, AdamW, StowOptimizer, slots, stow
from deepstow.strategies.engine.memory import disk_state, scratch_file, tiers
from deepstow.strategies.engine.memory.arena import Arena
from deepstow.strategies.engine.memory.scratch_file import DiskError, ScratchFile
from deepstow.strategies.engine.memory.tiers import Striped
from deepstow.strategies.engine.transfer.transfer import Transfer
from deepstow.strategies.planner import places
from deepstow.trainer.planning.plan_for import plan_for
from tests.helpers.doubles import Delayed, RaceDetector
from tests.helpers.engine import LR, differences, plain, plan_of, planned, stowed
from tests.helpers.late import Early, Late
from tests.helpers.models import build, tokens
from tests.helpers.releases import needs_scratch
from tests.helpers.sides import BATCHES, everything, train, unequal
from tests.memory.test_engine import MODELS, model_of

pytestmark = needs_scratch

BF16, FP32 = torch.bfloat16, torch.float32
THERE: dict[str, Any] = {"weights": "travelling", "weights_there": True}
ALL: dict[str, Any] = THERE | {"in_backward": True, "passing": True}
CASES: dict[str, tuple[torch.dtype, dict[str, Any], dict[str, Any]]] = {  # dtype, the loop, the plan
    "clipped": (FP32, {"max_norm": 0.05}, {"park": "host"}),
    "in backward": (FP32, {"groups": 2}, {"in_backward": True, "weights": "travelling"}),
    "accumulated": (BF16, {"accumulation": 2, "max_norm": 0.05}, {"park": "host", "weights": "travelling"}),
    "masters, in backward": (BF16, {}, {"in_backward": True, "park": "host"}),
    "weights, half blocks": (BF16, {}, ALL | {"bucket": "half", "prefetch": 1}),
    "weights in fp32": (FP32, {"groups": 2}, ALL | {"disk": ("a", "b", "c")}),
    "weights, accumulated": (BF16, {"accumulation": 2, "max_norm": 0.05}, THERE | {"park": "host"}),
    "weights, their gradients accumulated on the device": (BF16, {"accumulation": 2}, ALL),
    "weights, every other one": (BF16, {}, ALL | {"weights": "some", "park": "host"}),
}
HOST: dict[str, Any] = {"site": "host", "weights": "travelling", "bucket": "half"}


@pytest.mark.parametrize(("case", "make"), zip(CASES, cycle((Delayed, RaceDetector, Transfer))))
def test_the_bits_are_those_of_plain_training(
    case: str, make: Callable[[], Transfer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads and writes are as late as somebody waits for them; the worker updates, or the caller."""
    dtype, loop, wished = CASES[case]
    monkeypatch.setattr(slots, "thread", Late)
    batches = tokens("llama", 4 * loop.get("accumulation", 1))
    model = build("llama", dtype=dtype)
    drives = folders(tmp_path, *wished.get("disk", ("a",)))
    plan = plan_of(model, site="host", **wished | {"disk": drives}, **loop)
    assert sum(b.on_disk for b in plan.layout.buckets) > plan.layout.window_slots
    expected = plain(build("llama", dtype=dtype), batches, **loop)
    assert differences(expected, stowed(model, plan, batches, transfer=make(), **loop)) == []


def folders(path: Path, *names: str) -> list[str]:
    for name in names:
        (path / name).mkdir()
    return [str(path / name) for name in names]


def test_momentum_by_threads_in_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGD, which has one number per parameter."""
    monkeypatch.setattr(scratch_file, "MOST_BYTES", 8192)
    batches, model = tokens("llama", 4), build("llama")
    make = partial(torch.optim.SGD, lr=LR, momentum=0.9, fused=True)
    plan = plan_of(model, disk=[str(tmp_path)], moments=1, **HOST)
    rule = SGD(lr=LR, momentum=0.9, fused=True)
    assert differences(plain(build("llama"), batches, make=make), stowed(model, plan, batches, rule=rule)) == []


def test_each_piece_is_read_once_though_another_update_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In backward the bucket before is complete while this one is updated, and would be the first to be read."""
    monkeypatch.setattr(slots, "thread", Early)
    plan = plan_of(build("llama"), disk=[str(tmp_path)], **HOST)
    disk = disk_state.DiskState(plan.layout, Arena(plan.place.addresses, torch.device("cpu")))
    many = 2 * plan.layout.window_slots
    earlier, later, *_ = (index for index, pieces in disk.stretches.items() if len(pieces) > many)
    pieces = [*disk.stretches[later], *disk.stretches[earlier]]
    for stretch in pieces:
        with stretch.at_hand(writes=True, behind=True):
            pass
    read: list[int] = []
    once = tiers.Striped.read
    monkeypatch.setattr(tiers.Striped, "read", lambda file, *to: (read.append(to[1]), once(file, *to)))
    disk.expect([later])
    for stretch in pieces:
        with stretch.at_hand(writes=True, behind=True):
            if stretch is pieces[0]:
                disk.expect([earlier])
    assert len(read) == len(set(read)) >= len(pieces) - plan.layout.window_slots
    disk.close()


def test_weights_that_are_written_reach_the_masters(tmp_path: Path) -> None:
    """By ``present`` and by ``load_state_dict``, as without the disk."""
    found = []
    for folder in ("", str(tmp_path)):
        model, optimizer = trained(folder, 1)
        state = {name: tensor * 2 for name, tensor in model.state_dict().items()}
        model.load_state_dict(state)
        with optimizer.present(model.parameters()), torch.no_grad():
            for param in model.parameters():
                param.add_(0.5)
        train(model, optimizer, BATCHES[1:2])
        found.append(everything(model, optimizer))
        optimizer.close()
    assert unequal(*found) == []


def test_state_of_three_times_the_memory_of_the_host(tmp_path: Path) -> None:
    """The planner puts there what the host has no room for, and no more; what a refusal names is enough."""
    sizes = {"num_hidden_layers": 12, "vocab_size": 32, "hidden_size": 96, "intermediate_size": 192}
    config = MODELS["llama"] | sizes

    def made() -> Any:
        return model_of(config).to(BF16).train()

    model = made()
    facts = plan_for(model, max_grad_norm=0.0, eval_rows=0, batch=(2, 16)).facts
    state = 12 * sum(param.numel() for param in model.parameters())
    given: Any = {"site": "host", "disk": str(tmp_path), "disk_memory": "64MiB", "host_memory": state // 3}
    plan = planned(facts, **given)
    assert plan.layout is not None and plan.place is not None
    assert plan.place.addresses.num_bytes(Tier.HOST) <= state // 3
    assert disk_bytes(plan.layout) > state // 2
    some = planned(facts, **given | {"host_memory": state})
    assert some.layout is not None and some.place is not None
    largest = max(bucket.state_bytes(2) for bucket in some.layout.buckets if bucket.on_disk)
    assert state - some.place.addresses.num_bytes(Tier.HOST) < 2 * largest, "more is there than has to be"
    assert disk_bytes(planned(facts, **given | {"host_memory": 2 * state}).layout) == 0
    with pytest.raises(MemoryRefusal) as refused:
        planned(facts, **given | {"host_memory": 10_000})
    enough = planned(facts, **given | {"host_memory": refused.value.needed})
    assert enough.place is not None and enough.place.addresses.num_bytes(Tier.HOST) <= refused.value.needed
    with pytest.raises(MemoryRefusal):
        planned(facts, **given | {"disk_memory": "64KiB"})
    ids = torch.randint(0, 32, (2, 16), generator=torch.Generator().manual_seed(1))
    batches = [{"input_ids": ids, "labels": ids}] * 3
    assert differences(plain(made(), batches), stowed(model, plan, batches)) == []


@pytest.mark.slow
def test_two_bytes_per_parameter_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """State of embedding and head goes there, too, and its pieces are small beside a bucket."""
    monkeypatch.setattr(places, "Layout", partial(Layout, window_elements=1024))
    config = MODELS["llama"] | {"vocab_size": 4096, "tie_word_embeddings": False}
    facts = plan_for(model := model_of(config).to(BF16).train(), max_grad_norm=1.0, eval_rows=0, batch=(2, 16)).facts
    number = sum(param.numel() for param in model.parameters())
    given: Any = {"site": "host", "weights": "streamed", "disk_memory": "64MiB", "host_memory": 5 * number // 2}
    plan = planned(facts, disk=str(tmp_path), **given)
    assert plan.layout is not None and all(bucket.on_disk for bucket in plan.layout.buckets)
    assert [piece.slot for _, piece in pieces_on_disk(plan.layout)][:4] == [0, 1, 2, 0], "one slot for all"
    with pytest.raises(MemoryRefusal):
        planned(facts, **given | {"disk_memory": None, "host_memory": 13 * number})
    ids = torch.randint(0, 4096, (2, 16), generator=torch.Generator().manual_seed(1))
    batches = [{"input_ids": ids, "labels": ids}] * 3
    expected = plain(model_of(config).to(BF16).train(), batches, max_norm=1.0)
    assert differences(expected, stowed(model, plan, batches, max_norm=1.0)) == []


# --- saving ----------------------------------------------------------------------------------------------------------


def trained(folder: Path | str, steps: int) -> tuple[nn.Module, StowOptimizer]:
    model = build("llama", dtype=BF16)
    plan: Any = plan_of(model, disk=[str(folder)] if folder else [], **HOST)
    optimizer = stow(model, plan, rule=AdamW(lr=1e-2), device="cpu")
    train(model, optimizer, BATCHES[:steps])
    return model, optimizer


def test_saved_from_the_disk_and_loaded_into_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From either to the other; what goes on has the bits of what was not saved."""
    there, before, after = tmp_path / "there", tmp_path / "before", tmp_path / "after"
    there.mkdir()
    first, in_memory = trained("", 2)
    in_memory.save(before)
    monkeypatch.setattr(slots, "thread", Late)
    model, optimizer = trained(there, 2)
    optimizer.save(after)
    again, loaded = trained("", 1)
    loaded.load(after)
    assert unequal(everything(first, in_memory), everything(again, loaded)) == []
    train(model, optimizer, BATCHES[2:3])
    fresh, other = trained(there, 1)
    other.load(before)
    train(fresh, other, BATCHES[2:3])
    assert unequal(everything(model, optimizer), everything(fresh, other)) == []
    optimizer.drain()
    with pytest.raises(RuntimeError, match=r"rests on the disk.*state_of"):
        optimizer.state_dict()
    assert list(there.iterdir()) == []  # two runs at once, and nobody sees a file
    optimizer.close()
    other.close()
    with pytest.raises(RuntimeError, match="state on the disk ends with close"):
        optimizer.state_of(next(model.parameters()))


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EIO, 0])
def test_a_failure_ends_training_and_no_save(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write fails, behind; or (0) a read comes to an early end. Whoever comes next says so, and nothing is saved."""
    model, optimizer = trained(tmp_path, 2)
    optimizer.save(tmp_path / "saved")
    kept = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    done = os.pwritev if number else os.preadv
    calls = []

    def fails(*given: Any) -> int:
        calls.append(given)
        if len(calls) == 3:
            if number:
                raise OSError(number, os.strerror(number))
            return 0
        return done(*given)

    monkeypatch.setattr(os, "pwritev" if number else "preadv", fails)
    with pytest.raises(DiskError, match=f"the disk tier in {tmp_path}: .* could not be (written|read): "):
        train(model, optimizer, BATCHES[2:] * 2)
    assert len(calls) == 3 or not number
    with pytest.raises(DiskError):
        optimizer.save(tmp_path / "saved")
    assert {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()} == kept


def test_a_part_that_was_taken_away_is_not_read_as_zeros(tmp_path: Path) -> None:
    """A write beyond what is gone gives the file its length again."""
    memory = torch.frombuffer(mmap.mmap(-1, PAGE_BYTES), dtype=torch.uint8).fill_(1)
    with closing(ScratchFile(tmp_path, 2 * PAGE_BYTES)) as file:
        for offset in (0, PAGE_BYTES):
            file.write(memory, offset)
        os.truncate(f"/proc/self/fd/{file._handle}", 0)
        file.write(memory, PAGE_BYTES)
        with pytest.raises(DiskError, match="could not be read: some of the file's space was taken away"):
            file.read(memory, 0)
        file.write(memory, 0)
        file.read(memory, 0)  # everything is there again


def test_each_drive_has_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of one is raised with its folder, and only when no other one moves anything any more."""
    memory = torch.frombuffer(mmap.mmap(-1, 3 * PAGE_BYTES), dtype=torch.uint8)
    for page, part in enumerate(memory.split(PAGE_BYTES)):
        part.fill_(1 + page)
    one, other = folders(tmp_path, "one", "other")
    with closing(Striped([str(one), str(other)], 4 * PAGE_BYTES)) as file:
        file.write(memory, 2 * PAGE_BYTES)
        found = [Path(f"/proc/self/fd/{part._handle}").read_bytes()[2 * PAGE_BYTES :] for part in file._stores]
        assert [set(content[::PAGE_BYTES]) for content in found] == [{1, 2}, {3, 0}]
        read = torch.frombuffer(mmap.mmap(-1, 3 * PAGE_BYTES), dtype=torch.uint8)
        file.read(read, 2 * PAGE_BYTES)
        assert read.equal(memory)
        ended = []

        def late(handle: int, *given: Any) -> int:
            if handle == file._stores[0]._handle:
                raise OSError(errno.EIO, "broken")
            time.sleep(0.05)
            ended.append(handle)
            return PAGE_BYTES

        monkeypatch.setattr(os, "pwritev", late)
        with pytest.raises(DiskError, match=f"in {one}: .*broken"):
            file.write(memory, 0)
        assert ended == [file._stores[1]._handle]
        os.truncate(f"/proc/self/fd/{ended[0]}", 0)
        with pytest.raises(DiskError, match=f"in {other}: "):
            file.read(memory, 2 * PAGE_BYTES)
    with pytest.raises(ValueError, match=f"^{tmp_path}/none: no such folder"):
        Striped([str(one), f"{tmp_path}/none"], PAGE_BYTES)


def test_folders_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()

    def refused(folder: Path | str, words: str, num_bytes: int = 8192) -> None:
        with pytest.raises(ValueError, match=words):
            ScratchFile(folder, num_bytes)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]

    refused(tmp_path / "none", "no such folder")
    refused(tmp_path / "file", "not a folder")
    refused("/dev/shm", r"is in memory \(tmpfs\), so it would save none")
    refused(tmp_path, r"of optimizer state are to be there, and .* are free", 1 << 50)
    with monkeypatch.context() as patched:
        patched.setattr(scratch_file, "file_system", lambda folder: "nfs4")
        refused(tmp_path, r"is on the network .*\(nfs4\)")
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda *_: False)
        refused(tmp_path, "cannot be written")

    def direct(handle: int, command: int, flags: int = 0) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return 0

    monkeypatch.setattr(fcntl, "fcntl", direct)
    refused(tmp_path, "has no O_DIRECT")
