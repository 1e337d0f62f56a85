"""One rank of a run on simulated accelerators, as a launcher starts it: ``python -m tests.accelerator.rank``.

Accelerate has a list of the kinds of device that may have several ranks; here it is told of one more.
"""

import sys
from typing import Any

from accelerate.state import DistributedType, PartialState

from launch.train import main
from tests.accelerator.conftest import COPIES_US, KERNELS_US, library
from tests.helpers.simulated import collectives

if __name__ == "__main__":
    library().delay(COPIES_US, KERNELS_US)
    collectives.register(library())
    state: Any = PartialState
    state._prepare_backend = lambda *_, **__: (collectives.NAME, DistributedType.MULTI_NPU)
    sys.exit(main(sys.argv[1:]))
