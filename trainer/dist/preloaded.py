"""What ranks need, imported once: processes that are forked from one that has imported this module start at once.

Nothing here runs a kernel or opens a group, since a process that is forked after that may hang. At the end everything is
frozen for the garbage collector: a rank's collections, of which Accelerate starts several per run, then neither look at
what it shares with the others nor copy its pages. What is not installed is left out.
"""

import gc
import importlib
from contextlib import suppress

NAMES = (
    "torch", "torch.utils.cpp_extension", "torch.utils.tensorboard", "setuptools", "deepspeed",
    "deepspeed.runtime.engine", "deepspeed.runtime.zero.stage3", "deepspeed.runtime.zero.muon.muon_optimizer",
    "transformers.trainer", "transformers.models.llama", "datasets", "accelerate", "peft", "trainer.run.order",
    "trainer.run.trainer", "trainer.data.prepare", "trainer.data.sample", "trainer.verify.verify",
)  # fmt: skip

for name in NAMES:
    with suppress(ImportError):
        importlib.import_module(name)
with suppress(ImportError, AttributeError):
    importlib.import_module("deepspeed.ops").__compatible_ops__  # looks for compilers and libraries, once  # noqa: B018
gc.collect()
gc.freeze()
