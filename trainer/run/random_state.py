"""States of the random number generators of one rank, as JSON: Python's, NumPy's, torch's on the CPU and on the device.

Numbers are written as they are and torch's states, which are bytes, in hexadecimal. Nothing is pickled.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strategies.engine.memory import accelerator

VERSION = 1


def file_of(folder: Path, rank: int, ranks: int) -> Path:
    """Where the states of a rank are written."""
    return folder / f"random_state-{rank:05}-of-{ranks:05}.json"


def found(folder: Path, rank: int) -> Path | None:
    """The states of ``rank`` in a checkpoint, of however many ranks."""
    return next(iter(sorted(folder.glob(f"random_state-{rank:05}-of-*.json"))), None)


def save(path: Path) -> None:
    """Write the present states."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    kind = accelerator.kind()
    content = {
        "version": VERSION,
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": _hex(torch.random.get_rng_state()),
        "device": None if kind is None else [kind, _hex(torch.get_device_module(kind).get_rng_state())],
    }
    path.write_text(json.dumps(content))


def load(path: Path) -> None:
    """Take over the states in ``path``; the device's only on a device of that kind. ValueError has changed nothing."""
    before = random.getstate(), np.random.get_state(legacy=True), torch.random.get_rng_state()
    try:
        content = json.loads(path.read_bytes())
        if content["version"] != VERSION:
            raise ValueError(f"{path}: format {content['version']}, this release reads {VERSION}")
        version, numbers, gauss = content["python"]
        on_cpu, on_device = _tensor(content["torch"]), content["device"]
        random.setstate((version, tuple(numbers), gauss))
        np.random.set_state(_numpy(content["numpy"]))
        torch.random.set_rng_state(on_cpu)
        if on_device is not None and on_device[0] == accelerator.kind():
            torch.get_device_module(on_device[0]).set_rng_state(_tensor(on_device[1]))
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, OverflowError) as error:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.random.set_rng_state(before[2])
        reason = str(error) if str(error).startswith(str(path)) else f"{path}: damaged, not the state of generators"
        raise ValueError(reason) from None


def _numpy(saved: Any) -> Any:
    name, keys, position, has_gauss, cached = saved
    return name, np.array(keys, np.uint32), position, has_gauss, cached


def _hex(state: torch.Tensor) -> str:
    return bytes(state.cpu().numpy()).hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
