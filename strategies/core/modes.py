"""One mode for all files of a folder: that of a file which is made there, as the umask says.

safetensors writes files that only their owner can read (0600), all else has the umask's mode. A colleague, or a job of
another user of the group, could then read a checkpoint's names and not its weights.
"""

from __future__ import annotations

import secrets
import stat
from pathlib import Path


def same_modes(folder: Path) -> None:
    """Give every file in ``folder`` the mode of a new file, keeping that a file may be executed. Links are left alone.

    Raises:
        OSError: no file can be made in ``folder``, or a mode cannot be changed.
    """
    probe = folder / f".mode-{secrets.token_hex(4)}"
    probe.touch()
    wanted = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            has = stat.S_IMODE(path.stat().st_mode)
            if has | wanted != has:
                path.chmod(has | wanted)
