"""A tier that the project does not have, memory of another process over a socket: a row and a class make it one."""

import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepstow.strategies.core import on_disk
from deepstow.strategies.core.on_disk import StoreKind
from deepstow.strategies.core.protocol import MemoryRefusal
from deepstow.strategies.engine.memory import tiers
from deepstow.strategies.engine.memory.scratch_file import DiskError, Store
from deepstow.strategies.planner.weight_schedule import ASSUMED
from deepstow.strategies.report import full_report
from deepstow.trainer.machine import rates
from deepstow.trainer.planning.plan_for import plan_for
from tests.helpers.engine import differences, plain, planned, stowed
from tests.memory.test_engine import MODELS, model_of

SERVER = """
import socketserver, struct
kept = {}
class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        put, offset, size = struct.unpack("<?qq", self.rfile.read(17))
        if put:
            kept[offset] = self.rfile.read(size)
        self.wfile.write(b"." if put else kept[offset][:size])
server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


class OtherProcess(Store):
    """Bytes in the memory of a process that listens at tcp://host:port."""

    @staticmethod
    def unsuitable(place: str) -> str:
        try:
            OtherProcess.connected(place).close()
        except OSError as error:
            return f"nobody answers: {error.strerror}"
        return ""

    @staticmethod
    def connected(place: str) -> socket.socket:
        host, _, port = place.removeprefix("tcp://").partition(":")
        return socket.create_connection((host, int(port)), timeout=10)

    def get(self, memory: Tensor, offset: int) -> None:
        data: Any = memory.numpy()
        with self.connected(self._place) as there, there.makefile("rwb") as stream:
            stream.write(struct.pack("<?qq", False, offset, memory.nbytes))
            stream.flush()
            if stream.readinto(memoryview(data)) < memory.nbytes:
                raise OSError(None, "the other process has ended")

    def put(self, memory: Tensor, offset: int) -> None:
        data: Any = memory.numpy()
        with self.connected(self._place) as there, there.makefile("rwb") as stream:
            stream.write(struct.pack("<?qq", True, offset, memory.nbytes) + memoryview(data))
            stream.flush()
            stream.read(1)

    def close(self) -> None:
        pass


@contextmanager
def serving() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"tcp://127.0.0.1:{process.stdout.readline().strip()}", process
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    row = StoreKind("in another process", holds_weights=False, bytes_per_s=(1e9, 5e8))
    monkeypatch.setattr(rates, "MOST_BYTES", 2 * rates.PIECE)  # to be written where rates are measured
    monkeypatch.setitem(on_disk.STORES, "tcp", row)  # type: ignore[arg-type]
    monkeypatch.setitem(tiers.KINDS, "tcp", OtherProcess)  # type: ignore[arg-type]


def test_state_rests_in_another_process(tmp_path: Path) -> None:
    """With the bits of plain training, beside a folder too; the plan has its name, rates can be measured, and
    a process that ends is one line.
    """
    facts = plan_for(model_of(MODELS["llama"]).train(), max_grad_norm=1.0, batch=(2, 16)).facts
    ids = torch.randint(0, 32, (2, 16), generator=torch.Generator().manual_seed(1))
    batches = [{"input_ids": ids, "labels": ids}] * 3
    expected = plain(model_of(MODELS["llama"]).train(), batches, max_norm=1.0)
    given: Any = {"site": "host", "weights": "streamed", "disk_memory": "64MiB"}
    with serving() as (place, process):
        for disk in (place, [place, str(tmp_path)]):
            with pytest.raises(MemoryRefusal) as refused:
                planned(facts, disk=disk, host_memory=10_000, **given)
            plan = planned(facts, disk=disk, host_memory=refused.value.needed, **given)
            assert plan.layout is not None and any(bucket.state_on_disk for bucket in plan.layout.buckets)
            model = model_of(MODELS["llama"]).train()
            assert differences(expected, stowed(model, plan, batches, max_norm=1.0)) == []
        assert any("in another process and on the disk" in line for line in full_report.disk_lines(plan, None))
        read, write, _ = rates.measure_drives([place], 0.05, lambda line: None)
        assert read > 0 and write > 0
        with closing(OtherProcess(place, 8192)) as store:
            store.write(torch.arange(8192).to(torch.uint8), 0)
            process.kill()
            process.wait()
            with pytest.raises(DiskError, match=f"the disk tier in {place}: .* could not be read: "):
                store.read(torch.empty(8192, dtype=torch.uint8), 0)
    assert tiers.unsuitable(place).startswith("nobody answers")


def test_weights_do_not_rest_where_bytes_cannot_be_mapped(tmp_path: Path) -> None:
    """On a folder they do, where the host has no room for them."""
    facts = plan_for(model_of(MODELS["llama"]).train(), max_grad_norm=0.0, eval_rows=0, batch=(2, 16)).facts
    given: Any = {"site": "host", "weights": "streamed", "gradients": "passing", "disk_memory": "64MiB"}
    there = {}
    for disk in (str(tmp_path), "tcp://nobody:1"):
        with pytest.raises(MemoryRefusal) as refused:
            planned(facts, disk=disk, host_memory=10_000, **given)
        plan = planned(facts, disk=disk, host_memory=refused.value.needed, **given)
        assert plan.layout is not None
        there[disk] = any(bucket.weight_on_disk for bucket in plan.layout.buckets)
    assert there == {str(tmp_path): True, "tcp://nobody:1": False}


def test_rates_of_kinds_and_of_what_was_measured() -> None:
    """Places share what is moved, so the slowest decides; what was measured for just these is believed."""

    drives = ASSUMED.disk_read_bytes_per_s, ASSUMED.disk_write_bytes_per_s
    assert on_disk.bytes_per_s(ASSUMED, ["/a", "/b"]) == (2 * drives[0], 2 * drives[1])
    assert on_disk.bytes_per_s(ASSUMED, ["tcp://a:1"]) == (1e9, 5e8)
    assert on_disk.bytes_per_s(ASSUMED, ["/a", "tcp://a:1"]) == (2e9, 1e9)

    measured = replace(ASSUMED, disk_folder="tcp://a:1")
    assert on_disk.bytes_per_s(measured, ["tcp://a:1"]) == drives


def test_a_scheme_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"names s3://bucket, and there is no tier s3://; name a folder"):
        on_disk.check_folders("s3://bucket")
