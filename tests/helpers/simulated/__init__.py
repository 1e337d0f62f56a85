"""A simulated accelerator for tests: torch's device "sim". See ``device.cpp`` for what it does and refuses.

Loading it changes what the accelerator of the process is, so the tests that use it run in processes of their own.
"""

from __future__ import annotations

import shutil
import types
from pathlib import Path
from typing import Any

import torch

from deepstow.strategies.engine.memory import accelerator
from deepstow.trainer.distributed.deepspeed_ops import clear_abandoned_builds

HERE = Path(__file__).parent
NAME = "sim"


class Driver:
    """Registers host memory with the simulated device; see ``strategies/engine/memory/accelerator.py``."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def register(self, pointer: int, num_bytes: int) -> str | None:
        failed = self._library.host_register(pointer, num_bytes)
        return f"error {failed}" if failed else None

    def unregister(self, pointer: int) -> None:
        self._library.host_unregister(pointer)


def can_be_built() -> bool:
    return shutil.which("c++") is not None


def load() -> Any:
    """Compile the device, once per machine, and make it this process's accelerator; its switches and counts."""
    from torch.utils.cpp_extension import load as compiled

    clear_abandoned_builds()
    torch.utils.rename_privateuse1_backend(NAME)
    flags = ["-O1", "-g0", "-w"]
    library = compiled("deepstow_simulated", [str(HERE / "device.cpp")], extra_cflags=flags)
    library.init()
    torch._register_device_module(NAME, _module(library))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    accelerator.TABLE[NAME] = accelerator.Row(Driver(library), lambda: "simulated")
    return library


class _On:
    """The device as a context; there is but one."""

    def __init__(self, device: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def _module(library: Any) -> types.ModuleType:
    """``torch.sim``: what torch and the libraries on it ask of a device's module."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    generator = library.generator()

    module.device = _On
    module.is_available = module.is_initialized = module.is_bf16_supported = lambda: True
    module._initialized = True  # so that checkpoints keep its random state
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = module._lazy_init = lambda *given: None
    module.synchronize = lambda device=None: torch.accelerator.synchronize()
    module.get_device_name = lambda device=None: "simulated device"
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.manual_seed = module.manual_seed_all = generator.manual_seed
    module.get_rng_state = lambda device=None: generator.get_state()
    module.set_rng_state = lambda state, device=None: generator.set_state(state)
    return module
