"""What the functions that tests hand to ranks need besides ``deepstow.trainer.distributed.preloaded``, imported once.

Like there, nothing runs a kernel and all is frozen for the garbage collector.
"""

import gc
import importlib

NAMES = (
    "pytest", "unittest.mock", "deepstow.trainer.distributed.preloaded", "tests.helpers.engine", "tests.helpers.grid",
    "tests.helpers.moves", "tests.helpers.models",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "opt", "mixtral", "gpt_neox", "qwen3")),
)  # fmt: skip

for name in NAMES:
    importlib.import_module(name)
gc.collect()
gc.freeze()
