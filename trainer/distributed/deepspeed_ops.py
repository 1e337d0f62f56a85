"""DeepSpeed's compiled extensions: which are needed, whether they are built, and what killed runs have left of them.

DeepSpeed compiles its C++ at first use, silently, for a minute or two. So a run says beforehand what will be built,
about how long that takes and where it is cached; without a compiler it ends before anything is prepared.

A build that is killed leaves its lock, and the next one would wait for it without end. A builder keeps the lock file
open, so a lock that no process of this machine has open is deleted. On CPUs DeepSpeed's collectives for inference keep
66 MiB per rank under ``/dev/shm`` and never delete them: our runs have none (``ranks.settle_environment``), and delete
what others have left.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from deepstow.trainer.errors import ConfigError


class Op(NamedTuple):
    """A DeepSpeed extension that is compiled at first use."""

    name: str
    builder: str
    takes: str
    use: str


SHM = Op("deepspeed_shm_comm", "ShareMemCommBuilder", "20 to 100 s", "collectives between ranks on CPUs")
CPU_ADAM = Op("cpu_adam", "CPUAdamBuilder", "about 50 s", "the optimizer for offloaded state")
FUSED_ADAM = Op("fused_adam", "FusedAdamBuilder", "1 to 3 minutes", "DeepSpeed's Adam on the device")
YOUNG_S, OLD_S = 5.0, 600.0
SHARED = Path("/dev/shm")


def cache_folder() -> Path:
    """Where torch keeps compiled extensions. This repeats torch.utils.cpp_extension, which has no function for it."""
    import torch

    # Otherwise it warns on import if there is a CUDA compiler and no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from torch.utils.cpp_extension import get_default_build_root

    if "TORCH_EXTENSIONS_DIR" in os.environ:
        return Path(os.environ["TORCH_EXTENSIONS_DIR"])
    kind = f"cu{torch.version.cuda.replace('.', '')}" if torch.version.cuda else "cpu"
    kind = f"rocm{torch.version.hip.replace('.', '')}" if torch.version.hip else kind
    return Path(get_default_build_root()) / f"py{sys.version_info.major}{sys.version_info.minor}_{kind}"


def announcement() -> str | None:
    """A line about what DeepSpeed's engine will compile on this machine; None if nothing."""
    from deepstow.strategies.engine.memory import accelerator

    if accelerator.kind() is not None:
        return None  # with Hugging Face's optimizers none of its extensions for devices is needed
    folder = cache_folder() / SHM.name
    if (folder / f"{SHM.name}.so").exists():
        return None
    return f"building DeepSpeed's {SHM.name} ({SHM.use}): once, {SHM.takes}, cached in {folder}"


def compiler() -> str | None:
    """The C++ compiler that torch would use; None without one."""
    return shutil.which(os.environ.get("CXX", "c++"))


def refuse_what_cannot_be_built() -> None:
    """Raise ConfigError if DeepSpeed's engine has to compile something and there is no compiler."""
    if announcement() is not None and compiler() is None:
        raise ConfigError(
            f"strategies.zero: DeepSpeed has to compile {SHM.use} on this machine, and there is no C++ compiler: "
            f"apt-get install g++, or train without it, as with strategies.offload"
        )


def clear_abandoned_builds() -> None:
    """Delete the locks of killed builds; to be called on one rank of a machine before any rank builds."""
    _delete_abandoned(cache_folder().glob("*/lock"), YOUNG_S)


def clear_abandoned_buffers(folder: Path = SHARED) -> None:
    """Delete this user's buffers of collectives of which no process knows any more; on one rank of a machine."""
    _delete_abandoned(folder.glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*"), OLD_S)


def _delete_abandoned(files: Iterable[Path], age_s: float) -> None:
    """Delete those that are older than ``age_s`` and that no process of this machine has open.

    Not younger ones: who has made one may have started after the processes were listed.
    """
    old_files: dict[Path, int] = {}
    for file in files:
        with suppress(OSError):  # its owner has just removed it
            if time.time() - (status := file.stat()).st_mtime > age_s:
                old_files[file] = status.st_ino
    opened = _opened() if old_files else set()
    for file, number in old_files.items():
        with suppress(OSError):
            if file.resolve() not in opened and file.stat().st_ino == number:
                file.unlink()


def _opened() -> set[Path]:
    """The files that processes of this machine, of those that we may inspect, have open."""
    import psutil

    opened: set[Path] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has just ended, or belongs to another user
            opened.update(Path(file.path) for file in process.open_files())
    return opened
