"""The store through which ranks find each other; of a job on one machine it listens on the loopback interface only.

Problem. torch's store listens on every interface of the machine, and whoever reaches its port can change what the ranks
tell each other (some of it is unpickled). A job on one machine needs no network at all.

* one rank: a store in its own memory;
* ranks of one machine: the first one's store, on a socket that is bound to 127.0.0.1 beforehand, and gloo and NCCL are
  told the loopback interface;
* with ``torchrun`` and ``accelerate launch`` the store is the launcher's, and with several machines the network is
  needed: both stay as torch has them.

Refused: a port that another program uses.
"""

from __future__ import annotations

import errno
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.dist.ranks import Ranks

LOOPBACK = "127.0.0.1"
BACKLOG = 512


def loopback_interface() -> str | None:
    """The name of the loopback interface; None if there is none of a known name."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


def is_local(ranks: Ranks) -> bool:
    """Whether all ranks are on this machine."""
    return ranks.local_world_size == ranks.world_size


def open_store(ranks: Ranks, host: str, port: int, timeout: timedelta, *, launchers: bool) -> Any:
    """The store of this job: a ``torch.distributed.Store``.

    Args:
        launchers: whether the launcher has opened it, on ``host`` and ``port``.

    Raises:
        ConfigError: the port is in use.
    """
    import torch.distributed

    dist: Any = torch.distributed

    if ranks.world_size == 1:
        return dist.HashStore()
    if launchers:
        return dist.TCPStore(host, port, is_master=False, timeout=timeout)
    if not is_local(ranks):
        try:
            return dist.TCPStore(host, port, ranks.world_size, is_master=ranks.is_first, timeout=timeout, multi_tenant=True)
        except RuntimeError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise in_use(port) from None
    handle = listening(port) if ranks.is_first else None
    return dist.TCPStore(
        LOOPBACK, port, ranks.world_size, is_master=ranks.is_first, timeout=timeout, master_listen_fd=handle
    )


def listening(port: int) -> int:
    """The descriptor of a socket that listens on ``port`` of the loopback interface.

    Raises:
        ConfigError: the port is in use.
    """
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((LOOPBACK, port))
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        raise in_use(port) from None
    return bound.detach()


def in_use(port: int) -> ConfigError:
    """The error about a port that cannot be had."""
    return ConfigError(f"port {port} is in use by another program: give the launcher another one (--master_port)")
