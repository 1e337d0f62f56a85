"""What ranks need, imported once: processes that are forked from one that has imported this module start at once.

Nothing here runs a kernel or opens a group, since a process that is forked after that may hang. At the end everything
is frozen for the garbage collector: a rank's collections, of which Accelerate starts several per run, then neither look
at what it shares with the others nor copy its pages. What is not installed is left out.
"""

import gc
import importlib
import logging
from contextlib import suppress

NAMES = (
    "torch", "torch.utils.cpp_extension", "torch.utils.tensorboard", "setuptools", "deepspeed",
    "deepspeed.module_inject.auto_ep_layer", "deepspeed.runtime.engine", "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.utils.pin_memory", "transformers.trainer", "transformers.models.llama.modeling_llama", "datasets",
    "accelerate", "peft", "torch.distributed.algorithms.ddp_comm_hooks.default_hooks", "torch.utils.serialization",
    "deepstow.strategies.parallel.deepspeed_state", "deepstow.strategies.engine.forward.routed_linear",
    "deepstow.trainer.data.collate", "deepstow.trainer.data.prepare", "deepstow.trainer.data.sample",
    "deepstow.trainer.data.tokenizer", "deepstow.trainer.run.exporting.export", "deepstow.trainer.run.oom",
    "deepstow.trainer.run.callbacks.plan_check", "deepstow.trainer.run.session", "deepstow.trainer.run.trainer",
    "deepstow.trainer.verify.verify",
)  # fmt: skip

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # as launch/cli.py does
for name in NAMES:
    with suppress(ImportError):
        importlib.import_module(name)
with suppress(ImportError, AttributeError):
    importlib.import_module("deepspeed.ops").__compatible_ops__  # looks for compilers and libraries, once  # noqa: B018
with suppress(ImportError, AttributeError):
    # A thousand patterns, which Transformers compiles before it reads or writes its first weights.
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
gc.collect()
gc.freeze()
