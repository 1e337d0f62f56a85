"""A drive that lies, without an error of its own: flipped bits, lost writes, writes to another place. What it gives
reaches no update and no checkpoint.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepstow.strategies.core.on_disk import part_bytes
from deepstow.strategies.engine import SGD, AdamW, StowOptimizer, stow
from deepstow.strategies.engine.memory.scratch_file import CHUNK, Checksums, DiskError, ScratchFile
from tests.helpers.engine import LR, plan_of
from tests.helpers.models import build
from tests.helpers.releases import needs_scratch
from tests.helpers.sides import BATCHES, train
from tests.parity.test_disk_weights import base

pytestmark = needs_scratch

BF16, FP32 = torch.bfloat16, torch.float32
HOST: dict[str, Any] = {"site": "host", "weights": "travelling", "bucket": "half"}
THERE: dict[str, Any] = HOST | {"in_backward": True, "park": "host", "weights_there": True, "passing": True}


def state(path: Path, dtype: torch.dtype, drives: int = 1, sgd: bool = False) -> tuple[nn.Module, StowOptimizer]:
    model = build("llama", dtype=dtype)
    plan: Any = plan_of(model, disk=folders(path, drives), **HOST, **({"moments": 1} if sgd else {}))
    rule = SGD(lr=LR, momentum=0.9) if sgd else AdamW(lr=1e-2)
    return model, stow(model, plan, rule=rule, device="cpu")


def trained(path: Path, dtype: torch.dtype) -> tuple[nn.Module, StowOptimizer]:
    model = build("llama", dtype=dtype)
    plan: Any = plan_of(model, disk=folders(path, 1), **THERE)
    return model, stow(model, plan, rule=AdamW(lr=1e-2), device="cpu")


def frozen(path: Path, dtype: torch.dtype, drives: int = 1) -> tuple[nn.Module, StowOptimizer]:
    model = base(dtype)
    plan: Any = plan_of(model, weights="travelling", bucket="half", disk=folders(path, drives))
    return model, stow(model, plan, rule=AdamW(lr=1e-2), device="cpu")


def folders(path: Path, number: int) -> list[str]:
    for drive in range(number):
        (path / str(drive)).mkdir()
    return [str(path / str(drive)) for drive in range(number)]


def places_of(optimizer: StowOptimizer, what: str) -> tuple[ScratchFile, list[tuple[int, int]]]:
    """A file, and the places in it, each an offset and a number of bytes, that are read before they are written."""
    engine = optimizer.engine
    if what == "optimizer state":
        assert engine.disk is not None
        files = engine.disk._file._stores
        held = {slot.holds for slot in engine.disk._slots}
        places = [
            (offset, part_bytes(memory.numel(), len(files)))
            for number, (_, memory, offset) in enumerate(engine.disk._places)
            if number not in held
        ]
        return files[0], places
    assert engine.disk_weights is not None
    file = engine.disk_weights._file._stores[-1]
    of_it = [(slot, memory, at) for slot, memory, where, at in engine.disk_weights._places.values() if where is file]
    held = {id(slot): slot.holds for slot, _, _ in of_it}
    index_of = {at: index for index, (_, _, where, at) in engine.disk_weights._places.items() if where is file}
    return file, [(at, memory.numel()) for slot, memory, at in of_it if held[id(slot)] != index_of[at]]


def damage(file: ScratchFile, offset: int) -> None:
    """Flip a bit as no program does that has the file open."""
    with Path(f"/proc/self/fd/{file._handle}").open("r+b", buffering=0) as drive:
        drive.seek(offset)
        (byte,) = drive.read(1)
        drive.seek(offset)
        drive.write(bytes([byte ^ 1]))


CASES: dict[str, tuple[Callable[[Path], tuple[nn.Module, StowOptimizer]], str]] = {
    "moments": (lambda path: state(path, FP32), "optimizer state"),
    "momentum": (lambda path: state(path, FP32, sgd=True), "optimizer state"),
    "state on three drives": (lambda path: state(path, BF16, drives=3), "optimizer state"),
    "trained weights": (lambda path: trained(path, BF16), "weights"),
    "frozen weights": (lambda path: frozen(path, FP32, drives=2), "weights"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_changed_on_the_drive_is_not_used(case: str, tmp_path: Path) -> None:
    """Neither for training nor for what is saved; the line names the drive and where on it."""
    make, what = CASES[case]
    model, optimizer = make(tmp_path)
    train(model, optimizer, BATCHES[:2])
    optimizer.drain()
    if what == "optimizer state":
        optimizer.save(tmp_path / "saved")
    file, places = places_of(optimizer, what)
    for offset, size in places:
        damage(file, offset + size // 2)
    said = f"the disk tier in {file._folder}: .* of {what} could not be read: at byte [0-9]+ of the file the drive has "
    if what == "weights":
        with pytest.raises(DiskError, match=said):
            model.state_dict()
    else:
        kept = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
        with pytest.raises(DiskError, match=said):
            optimizer.save(tmp_path / "saved")
        assert {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()} == kept
    with pytest.raises(DiskError, match=said):
        train(model, optimizer, BATCHES[2:])


def test_drives_are_believed_where_the_config_says_so(tmp_path: Path) -> None:
    model = build("llama", dtype=BF16)
    plan: Any = plan_of(model, disk=folders(tmp_path, 1), **HOST)
    plan = replace(plan, layout=replace(plan.layout, disk_checksums=False))
    optimizer = stow(model, plan, rule=AdamW(lr=1e-2), device="cpu")
    train(model, optimizer, BATCHES[:1])
    optimizer.drain()
    file, places = places_of(optimizer, "optimizer state")
    for offset, size in places:
        damage(file, offset + size // 2)
    train(model, optimizer, BATCHES[1:2])


@pytest.mark.parametrize(
    ("case", "fault"),
    [("moments", "lost"), ("momentum", "to another place"), ("trained weights", "to another place")],
)
def test_a_write_that_did_not_arrive(case: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drive says that it has written, and has the content of the step before."""
    make, what = CASES[case]
    model, optimizer = make(tmp_path)
    train(model, optimizer, BATCHES[:1])
    file, places = places_of(optimizer, what)
    done, lost = os.pwritev, list[int]()

    def lies(handle: int, memory: Any, offset: int) -> int:
        if handle != file._handle or lost:
            return done(handle, memory, offset)
        lost.append(offset)
        if fault == "lost":
            return sum(len(each) for each in memory)
        return done(handle, memory, next(at for at, _ in places if at != offset))

    monkeypatch.setattr(os, "pwritev", lies)
    with pytest.raises(DiskError, match=f"in {file._folder}: .* of {what} could not be read: at byte "):
        train(model, optimizer, BATCHES[1:] * 2)
    assert lost


def test_what_is_written_beside_damaged_bytes_does_not_hide_them(tmp_path: Path) -> None:
    """A weight of the same bucket is set from outside, which makes the checksum of their chunk anew."""
    model, optimizer = frozen(tmp_path, BF16)
    file, places = places_of(optimizer, "weights")
    assert all(size < CHUNK for _, size in places)
    named = dict(model.named_parameters())
    bucket, index = optimizer.engine.bucket_of[id(named["model.layers.1.mlp.up_proj.weight"])]
    assert len(bucket.params) > 1 and optimizer.engine.disk_weights is not None
    _, _, _, offset = optimizer.engine.disk_weights._places[bucket.index]
    other = next(each for number, each in enumerate(bucket.params) if number != index)
    value = torch.ones(other.shape, dtype=BF16)
    damage(file, offset + bucket.bytes_of(index)[0].start)
    with pytest.raises(DiskError):
        optimizer.access.set_weight(other, value)


def test_each_byte_that_was_written_counts_and_no_other() -> None:
    """Of a place of several chunks, the last of which is not whole, and of a part of it."""
    sums, memory = Checksums(), torch.randint(0, 256, (2 * CHUNK + 4096,), dtype=torch.uint8)
    assert sums.first_difference(torch.zeros(4096, dtype=torch.uint8), 0) == 0, "nothing was written there"
    sums.note(memory, 4096)
    for at in (0, CHUNK - 1, CHUNK, 2 * CHUNK, len(memory) - 1):
        memory[at] ^= 1
        assert sums.first_difference(memory, 4096) == at // CHUNK * CHUNK
        assert sums.first_difference(memory, 4096, range(at, at + 1)) == at // CHUNK * CHUNK
        memory[at] ^= 1
        assert sums.first_difference(memory, 4096) is None
    memory[CHUNK + 5] ^= 1
    assert sums.first_difference(memory, 4096, range(CHUNK)) is None
    sums.note(memory, 4096, range(CHUNK + 5, CHUNK + 6))
    assert sums.first_difference(memory, 4096) is None


@pytest.mark.parametrize("by", ["an update", "somebody"])
def test_a_read_that_is_under_way_is_no_fault(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the old weight and is compared with its checksum; then the weight is written, and read again."""
    model, optimizer = trained(tmp_path, BF16)
    train(model, optimizer, BATCHES[:1])
    optimizer.drain()
    disk, done = optimizer.engine.disk_weights, os.preadv
    assert disk is not None
    bucket = next(
        bucket
        for bucket in optimizer.engine.buckets
        if bucket.index in disk._places and disk._places[bucket.index][0].holds != bucket.index
    )

    def slow(*given: Any) -> int:
        count = done(*given)
        time.sleep(0.1)
        return count

    monkeypatch.setattr(os, "preadv", slow)
    disk.expect([bucket.index])
    if by == "somebody":
        param = bucket.params[0]
        optimizer.access.set_weight(param, torch.ones(param.shape, dtype=BF16))
    else:
        updated = Future[Any]()
        updated.set_result((True, None))
        disk._new[bucket.index][1].fill_(1)
        disk.rewrite(bucket.index, updated).result()
    disk.bring_in(bucket.index)
    assert disk._places[bucket.index][1][0] == (0x80 if by == "somebody" else 1)
