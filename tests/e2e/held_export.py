"""``launch/train.py``, whose first rank stays in the export, before that has its name, as long as the file ``$HELD`` is
there. ``$HOW``: "full" for a disk that is full then.
"""

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deepstow.launch.train import main
from deepstow.trainer.run.exporting import export

seal, held = export.seal, Path(os.environ["HELD"])


def holding(*args: Any) -> None:
    """As the one that is called when everything is in the draft."""
    held.write_text(str(os.getpid()))
    while held.exists():
        time.sleep(0.02)
    if os.environ.get("HOW") == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(args[0]))
    seal(*args)


export.seal = holding

if __name__ == "__main__":
    sys.exit(main())
