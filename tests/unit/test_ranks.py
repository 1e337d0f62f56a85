"""Who am I among the ranks, and: no thread of a process group outlives the group.

The second is the deterministic form of a death that came in one run of eight; see [Note: closing gloo] in
``trainer/distributed/ranks.py``. A gloo group's worker threads are called ``pt_gloo_runloop``. They must be there while
the group is open (else the test would prove nothing) and gone when ``process_group`` has closed it, before the
interpreter ends.
"""

import os
import socket
import sys
from collections.abc import Mapping
from multiprocessing import util
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.distributed import deepspeed_ops, ranks
from deepstow.trainer.distributed.ranks import (
    Ranks,
    describe,
    from_environment,
    settle_environment,
    spare_peer_access,
    unused_port,
)
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.distributed.stopping import Stop
from deepstow.trainer.errors import ExitCode
from tests.helpers.releases import HIGHEST_STAGE
from tests.helpers.tiny import LLAMA, run_config

MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1", **MASTER}
DEEPSPEED = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_SIZE": "4", "CROSS_RANK": "1", **MASTER}


# Who am I


@pytest.mark.parametrize("environment", [TORCHRUN, DEEPSPEED], ids=["torchrun", "deepspeed"])
def test_every_launcher_describes_the_same_job(environment: Mapping[str, str]) -> None:
    ranks = from_environment(environment)
    assert ranks == Ranks(rank=5, local_rank=1, world_size=8, local_world_size=4)
    assert not ranks.is_first and not ranks.is_first_local and not ranks.is_local
    prepares = from_environment({**environment, "RANK": "4", "LOCAL_RANK": "0"})  # files of a second machine
    assert (prepares.is_first, prepares.is_first_local) == (False, True)


def test_without_a_launcher_a_job_has_one_rank() -> None:
    assert from_environment({}) == from_environment(MASTER) == Ranks()  # accelerate names the master even of one rank
    assert Ranks().is_first and Ranks().is_first_local and Ranks().is_local
    assert from_environment({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}).is_local


def test_what_is_described_is_read_back() -> None:
    ranks = Ranks(rank=3, local_rank=1, world_size=4, local_world_size=2)
    assert from_environment(describe(ranks)) == ranks and describe(ranks)["MASTER_ADDR"] == "127.0.0.1"


def test_settled_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"PATH": "/bin", "ACCELERATE_USE_CPU": "true", "LOCAL_SIZE": "2"}
    monkeypatch.setattr(os, "environ", environment)
    for cores in (7, 1000):  # what is set stays
        settle_environment(Ranks(world_size=2, local_world_size=2), cores)
        assert environment["OMP_NUM_THREADS"] == "3", "ranks of a machine share its cores"
        assert environment["PATH"] == f"{Path(sys.executable).parent}:/bin"
    assert not {"ACCELERATE_USE_CPU", "LOCAL_SIZE"} & environment.keys() and environment["LOCAL_WORLD_SIZE"] == "2"
    environment.clear()
    settle_environment(Ranks(world_size=8, local_world_size=8), 2)
    assert environment["OMP_NUM_THREADS"] == "1" and environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "64"


def test_an_unused_port_is_free_and_not_one_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks.OWN_PORTS[1] <= 32_768, "from where on Linux gives ports to connections"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port := unused_port()))
        assert ranks.OWN_PORTS[0] <= port < ranks.OWN_PORTS[1]
        monkeypatch.setattr(ranks, "OWN_PORTS", (port, port + 20))
        assert port not in {unused_port() for _ in range(200)}


@pytest.mark.parametrize(("driver", "expected"), [("535.104.05", ["1", "0"]), ("550.54.14", [None, "0"])])
def test_old_drivers_of_rtx_40_cards(driver: str, expected: list[str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the older one Accelerate refuses two of them, unless NCCL is told; what the user has set stays."""
    cards = ["NVIDIA GeForce RTX 4090"] * 2
    monkeypatch.setattr("accelerate.utils.environment.get_gpu_info", lambda: (cards, len(cards)))
    monkeypatch.setattr("accelerate.utils.environment.get_driver_version", lambda: driver)
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")
    spare_peer_access()
    assert [os.environ.get(name) for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")] == expected


def test_one_rank_opens_no_group_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: pytest.fail("a group is opened"))
    with ranks.process_group(Ranks(), 10, single=False):
        pass


# Threads


def gloo_threads() -> int:
    """Threads of this process that work for a gloo group, as the kernel knows them."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:  # ended between listing and reading
            continue
    return names.count("pt_gloo_runloop")


def write_threads(path: Path) -> None:
    path.write_text(str(gloo_threads()))


def train_guarded(ranks: Ranks, config: RunConfig, folder: Path, fails: bool) -> dict[str, int]:
    """A run through ``session.in_group``, on random tokens; what is written then is the test's."""
    from deepstow.trainer.run import session
    from deepstow.trainer.verify.verify import random_run

    # Runs when the rank's function has returned, with its group closed, and before the interpreter ends.
    util.Finalize(None, write_threads, args=(folder / f"threads-{ranks.rank}",), exitpriority=0)
    seen: dict[str, int] = {}

    def finish(_run: Any, trainer: Any, _together: Any) -> None:
        seen["during"] = gloo_threads()
        assert trainer.state.global_step == 1
        if fails:
            raise RuntimeError("as a full disk would")

    replaced: Any = session
    replaced.results.finish = finish
    replaced.prepare = lambda config, ranks, *_: random_run(config, ranks)
    seen["code"] = int(session.in_group(config, ranks, Stop()))
    return seen


@pytest.mark.ranks
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are read from Linux's /proc")
@pytest.mark.parametrize(("stage", "fails"), [(None, True), (HIGHEST_STAGE, False)], ids=["plain", "highest stage"])
def test_no_thread_outlives_its_group(tmp_path: Path, stage: int | None, fails: bool) -> None:
    config = run_config(
        LLAMA, output_dir=tmp_path, stage=stage, max_steps=1, per_device_train_batch_size=1, data={"max_length": 32}
    )
    left = deepspeed_ops.SHARED / f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{uuid4().hex}_0"
    left.touch()
    os.utime(left, (0, 0))
    seen = run_world(2, train_guarded, config, tmp_path, fails)
    assert not left.exists(), "what an earlier run's DeepSpeed left stays in memory"
    assert seen["code"] == (ExitCode.FAILED if fails else ExitCode.FINISHED)
    assert seen["during"] > 0
    assert [(tmp_path / f"threads-{rank}").read_text() for rank in (0, 1)] == ["0", "0"]
