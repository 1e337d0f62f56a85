"""DeepSpeed's compiled extensions: which are needed here, whether they are built, where they are kept.

DeepSpeed compiles its C++ at first use, in the middle of somebody's first run, for a minute or two and without a
word. So a run says beforehand what will be built, about how long it takes and where it is cached; and where there is no
compiler, it ends before anything is prepared.

A build that is killed leaves its lock behind, and whoever comes next would wait for ever. Whoever builds holds the lock
open, so a lock that no process here has open is taken away. Processes of other machines are not seen: two jobs on two
machines with one home, both at their first run, may compile the same thing twice.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Op:
    """A DeepSpeed extension that is compiled at first use."""

    name: str
    builder: str
    takes: str
    use: str


SHM = Op("deepspeed_shm_comm", "ShareMemCommBuilder", "20 to 100 s", "collectives between ranks on CPUs")
CPU_ADAM = Op("cpu_adam", "CPUAdamBuilder", "about 50 s", "the optimizer for offloaded state")
YOUNG_S = 5.0
FUSED_ADAM = Op("fused_adam", "FusedAdamBuilder", "1 to 3 minutes", "DeepSpeed's Adam on the device")


def cache_folder() -> Path:
    """Where torch keeps compiled extensions; the same rule as torch.utils.cpp_extension, which names no function."""
    import torch

    # Else it says, where it is loaded, that CUDA's compiler is here and no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from torch.utils.cpp_extension import get_default_build_root

    if "TORCH_EXTENSIONS_DIR" in os.environ:
        return Path(os.environ["TORCH_EXTENSIONS_DIR"])
    kind = f"cu{torch.version.cuda.replace('.', '')}" if torch.version.cuda else "cpu"
    kind = f"rocm{torch.version.hip.replace('.', '')}" if torch.version.hip else kind
    return Path(get_default_build_root()) / f"py{sys.version_info.major}{sys.version_info.minor}_{kind}"


def announcement() -> str | None:
    """What DeepSpeed is about to compile when its engine starts on this machine; None when nothing."""
    from strategies.engine.memory import accelerator

    if accelerator.kind() is not None:
        return None  # training through Hugging Face's optimizers needs none of its extensions for devices
    folder = cache_folder() / SHM.name
    if (folder / f"{SHM.name}.so").exists():
        return None
    return f"building DeepSpeed's {SHM.name} ({SHM.use}): once, {SHM.takes}, cached in {folder}"


def compiler() -> str | None:
    """The C++ compiler that torch would take; None without one."""
    return shutil.which(os.environ.get("CXX", "c++"))


def refuse_what_cannot_be_built() -> None:
    """Raise where DeepSpeed's engine would have to compile something and cannot.

    Raises:
        ConfigError: with the cure.
    """
    if announcement() is not None and compiler() is None:
        raise ConfigError(
            f"strategies.zero: DeepSpeed has to compile {SHM.use} on this machine, and there is no C++ compiler: "
            f"apt-get install g++, or train without it, as with strategies.offload"
        )


def clear_abandoned_builds() -> None:
    """Delete the locks of builds that were killed; call it on one rank of a machine, before any rank builds."""
    for lock in cache_folder().glob("*/lock"):
        with suppress(OSError):  # whoever built has just ended
            seen = lock.stat()
            # Not a young one: its builder may have started since we began to look.
            if time.time() - seen.st_mtime > YOUNG_S and not _is_open(lock) and lock.stat().st_ino == seen.st_ino:
                lock.unlink()


def _is_open(path: Path) -> bool:
    """Whether a process of this machine that we may look at has the file open."""
    import psutil

    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has just ended, or is somebody else's
            if any(Path(opened.path) == path.resolve() for opened in process.open_files()):
                return True
    return False
