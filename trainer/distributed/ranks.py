"""Ranks and process groups: this process's place in the job, and groups that are always closed.

All launchers (``deepspeed``, ``torchrun``, ``accelerate launch``) describe a job in the same five environment
variables. Without a launcher a job has one rank, and the variables are set accordingly, because Accelerate and
DeepSpeed read them.

[Note: closing gloo] Groups are closed before the interpreter ends. A gloo worker thread that drops a finished
collective may drop the last reference to a tensor that Python knows, for which it needs the interpreter lock. If the
interpreter is already shutting down, Python ends the thread inside a C++ destructor that must not throw, and the
process dies with "terminate called without an active exception" after its work is done (in one run of eight). So every
reference to a group is dropped first (engine and trainer with the frames of the run, DeepSpeed's own with
``deepspeed.comm.destroy_process_group``), and destroying the last one joins the threads.

[Note: the store] torch's store, through which ranks find each other, listens on every interface of the machine, and
whoever reaches its port can change what the ranks tell each other (some of it is unpickled). Ranks of one machine need
no network: one has a store in its own memory; of several the first one's listens on a socket that is bound to 127.0.0.1
beforehand, and gloo and NCCL are told the loopback interface. With ``torchrun`` and ``accelerate launch`` the store is
the launcher's, and with several machines the network is needed: both stay as torch has them.
"""

from __future__ import annotations

import errno
import gc
import importlib.util
import io
import logging
import os
import random
import socket
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from deepstow.trainer.distributed.deepspeed_ops import announcement, clear_abandoned_buffers, clear_abandoned_builds
from deepstow.trainer.distributed.watchdog import Watchdog
from deepstow.trainer.errors import ConfigError

# A launcher ends all ranks as soon as one has failed, and reports that one's exit code. The rank with the cause should
# be that one, so a rank that only lost its peer waits this long.
GRACE_S = 10.0
LOOPBACK, BACKLOG = "127.0.0.1", 512
OWN_PORTS = (20_000, 32_000)  # below what Linux, macOS and Windows give to connections
LOOKED_FOR = frozenset(["cpu", "cuda", "hpu", "mlu", "mps", "musa", "neuron", "npu", "sdaa", "tpu", "xpu"])


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place in the job; ``local`` counts within one machine."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this rank prints, writes metrics and exports."""
        return self.rank == 0

    @property
    def is_local(self) -> bool:
        """Whether all ranks are on this machine."""
        return self.local_world_size == self.world_size

    @property
    def is_first_local(self) -> bool:
        """Whether this rank prepares files that every rank of this machine reads."""
        return self.local_rank == 0


def from_environment(environment: Mapping[str, str] = os.environ) -> Ranks:
    """The ranks that a launcher describes, or the single rank of a job without one."""
    rank, local_rank = (int(environment.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    world_size = environment.get("WORLD_SIZE", "1")
    local_world_size = environment.get("LOCAL_WORLD_SIZE", environment.get("LOCAL_SIZE", world_size))
    return Ranks(rank, local_rank, int(world_size), int(local_world_size))


def describe(ranks: Ranks) -> dict[str, str]:
    """The launchers' five variables for a job that was started without a launcher."""
    return {
        "RANK": str(ranks.rank),
        "LOCAL_RANK": str(ranks.local_rank),
        "WORLD_SIZE": str(ranks.world_size),
        "LOCAL_WORLD_SIZE": str(ranks.local_world_size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(unused_port()),
    }


def unused_port() -> int:
    """A port of the loopback interface on which nobody listens, for a rank that will listen there in a while.

    It is none of those that a system gives to programs that name no port: another program's connection, or one of the
    other ranks looking for the first, could have got it by then.
    """
    draw = random.SystemRandom()  # tasks set the seed of the module's own
    while True:
        with socket.socket() as probe:
            port = draw.randrange(*OWN_PORTS)
            with suppress(OSError):
                probe.bind((LOOPBACK, port))
                return port


def settle_environment(ranks: Ranks, usable_cores: int) -> None:
    """Set what libraries read from the environment when they are loaded; to be called before torch is imported.

    * each rank gets its part of the machine's cores, unless the user or the launcher has set it: two ranks that each
      start a thread per core run several times slower than two that share the cores;
    * oneDNN, whose products in bf16 torch takes on CPUs, keeps 64 prepared kernels instead of 1,024: there is one for
      each number of rows, and experts get another number at each step. A mixture of 80 M parameters took 1.4 GiB more
      after 20 steps, with the same losses at the same speed;
    * torch's C++ logs errors only: in plain training it would warn that every parameter was used;
    * the settings of `accelerate launch` are dropped: only ranks come from the launcher, all else from the config
      (with `--cpu` Accelerate would wrap a model that ZeRO has already split);
    * programs that pip installed beside this interpreter come first: torch builds DeepSpeed's C++ with ``ninja``, and
      this version and the system's would each compile it anew;
    * the number of local ranks has torch's name only. By the name of DeepSpeed's launcher DeepSpeed decides whether to
      make buffers for inference, see ``deepspeed_ops.py``.
    """
    if (local := os.environ.pop("LOCAL_SIZE", None)) is not None:
        os.environ.setdefault("LOCAL_WORLD_SIZE", local)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores // ranks.local_world_size)))
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    programs, path = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    if programs not in path.split(os.pathsep):
        os.environ["PATH"] = f"{programs}{os.pathsep}{path}"


def name_device(ranks: Ranks, kind: str, *, on_cpu: bool) -> None:
    """Tell Accelerate and Transformers the device if it is of a kind that they do not detect themselves."""
    if on_cpu or kind in LOOKED_FOR:
        os.environ.pop("ACCELERATE_TORCH_DEVICE", None)
    else:
        os.environ["ACCELERATE_TORCH_DEVICE"] = f"{kind}:{ranks.local_rank}"


def collectives_of(kind: str) -> str:
    """The backend of collectives for a kind of device. Raise ConfigError if torch has none."""
    import torch.distributed

    try:
        return torch.distributed.get_default_backend_for_device(kind)
    except ValueError:
        raise ConfigError(
            f"torch has no collectives for {kind}: train in one process without strategies.zero, or on the CPU with "
            f"training.use_cpu: true"
        ) from None


def spare_peer_access() -> None:
    """Several RTX 40 cards whose driver is too old for peer access: let NCCL do without, as `accelerate launch` does.

    With other launchers Accelerate would raise an error that asks for these variables.
    """
    from accelerate.utils import check_cuda_p2p_ib_support

    if not check_cuda_p2p_ib_support():
        for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"):
            os.environ.setdefault(name, "1")


@contextmanager
def process_group(ranks: Ranks, timeout_s: int, *, single: bool, on_cpu: bool = False) -> Iterator[Watchdog | None]:
    """The job's default group, closed at the end in any case, with torch's backend for the device; and its watchdog.
    Raise ConfigError if the port at which the ranks meet is in use.

    Args:
        timeout_s: how long a collective may wait for a peer.
        single: open a group for one rank too (DeepSpeed's engine needs one).
    """
    if ranks.world_size == 1 and not single:
        for name in describe(ranks):
            os.environ.pop(name, None)  # or Accelerate would open a group as well, on all interfaces, and not close it
        yield None
        return
    import torch
    import torch.distributed

    from deepstow.strategies.engine.memory import accelerator

    for name, value in describe(ranks).items():
        os.environ.setdefault(name, value)  # `accelerate launch` with one rank sets the master only
    kind = None if on_cpu else accelerator.kind()
    if kind is not None:
        torch.accelerator.set_device_index(ranks.local_rank)
    backend = collectives_of(kind or "cpu")
    if kind == "cuda":
        spare_peer_access()
    store = _store(ranks, timedelta(seconds=timeout_s))
    torch.distributed.init_process_group(
        backend, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=timedelta(seconds=timeout_s)
    )
    watchdog = Watchdog(store, ranks.rank, ranks.world_size, timeout_s).start() if ranks.world_size > 1 else None
    del store
    try:
        if single:
            _open_deepspeed(ranks)
        yield watchdog
    finally:
        if watchdog is not None:
            watchdog.close()
        _close()


def _store(ranks: Ranks, timeout: timedelta) -> Any:
    """The store of this job, see [Note: the store]; ConfigError if its port is in use."""
    import torch.distributed

    dist: Any = torch.distributed
    if ranks.is_local and (interface := loopback_interface()) is not None:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if ranks.world_size == 1:
        return dist.HashStore()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # the launcher has opened it
        return dist.TCPStore(host, port, is_master=False, timeout=timeout)
    options = {"is_master": ranks.is_first, "timeout": timeout}
    if ranks.is_local:
        handle = listening(port) if ranks.is_first else None
        return dist.TCPStore(LOOPBACK, port, ranks.world_size, master_listen_fd=handle, **options)
    try:
        return dist.TCPStore(host, port, ranks.world_size, multi_tenant=True, **options)
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise _in_use(port) from None


def loopback_interface() -> str | None:
    """The name of the loopback interface; None if there is none of a known name."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


def listening(port: int) -> int:
    """The descriptor of a socket that listens on ``port`` of the loopback interface; ConfigError if it is in use."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((LOOPBACK, port))
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        raise _in_use(port) from None
    return bound.detach()


def _in_use(port: int) -> ConfigError:
    return ConfigError(f"port {port} is in use by another program: give the launcher another one (--master_port)")


def limit_groups(timeout_s: float) -> None:
    """Give every group that is open the run's timeout; DeepSpeed and others make theirs without one."""
    import torch.distributed
    from torch.distributed import distributed_c10d

    if torch.distributed.is_initialized():
        for group in list(distributed_c10d._world.pg_map):
            group.set_timeout(timedelta(seconds=timeout_s))


def _open_deepspeed(ranks: Ranks) -> None:
    """Initialise DeepSpeed's communication. On CPUs that compiles an extension at first use, which is announced."""
    import deepspeed.comm
    import torch.distributed

    if torch.distributed.get_backend() == "gloo":  # on CPUs
        if ranks.is_first_local:
            clear_abandoned_builds()
            clear_abandoned_buffers()
        torch.distributed.barrier()
    note = announcement()
    if ranks.is_first and note is not None:
        print(note, flush=True)
    with redirect_stdout(io.StringIO()):  # every rank would print what it has found
        deepspeed.comm.init_distributed(verbose=False)


def _close() -> None:
    """Close all groups, see [Note: closing gloo]. An engine that still lives keeps its groups, so cycles go first."""
    import torch.distributed

    hooks = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    if hooks is not None:
        hooks.FWD_MODULE_STACK.clear()  # stage 3 leaves a reference to the model there
    gc.collect()
    deepspeed_comm = sys.modules.get("deepspeed.comm")
    if deepspeed_comm is not None and deepspeed_comm.is_initialized():
        deepspeed_comm.destroy_process_group()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    gc.collect()


def quiet_libraries() -> None:
    """Silence what libraries say of themselves and of each other, as DeepSpeed while it is imported."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    warnings.filterwarnings("ignore", r"`\w+` is deprecated and will be removed in v6", FutureWarning)
    logging.disable(logging.WARNING)
    from transformers.utils import logging as transformers_logging

    if importlib.util.find_spec("deepspeed") is not None:
        importlib.import_module("deepspeed")
    logging.disable(logging.NOTSET)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    logging.getLogger("transformers.distributed.tensor_parallel").setLevel(logging.ERROR)  # nothing is sharded so here
    transformers_logging.disable_progress_bar()
    if importlib.util.find_spec("datasets") is not None:
        importlib.import_module("datasets").disable_progress_bars()
