"""Memory budgets: what ``gpu_memory`` and ``host_memory`` allow on this machine, in bytes.

The only place where a config value becomes bytes. ``placement_search.py`` then subtracts what forward saves, once; the
rest is the size that the arenas may have.
"""

from __future__ import annotations

from strategies.core.facts import MachineFacts
from strategies.core.sizes import AUTO, SHARE, parse_bytes


def device_budget(machine: MachineFacts, value: str | float = AUTO) -> int:
    """Bytes of the device that may be used; without an accelerator, auto means all of the memory."""
    if value == AUTO and not machine.has_accelerator:
        return machine.device_bytes
    return _bytes(value, machine.device_bytes)


def host_budget(machine: MachineFacts, value: str | float) -> int:
    """Bytes of host memory that may be used; auto and shares leave out what the process itself needs."""
    named = isinstance(value, int) or (isinstance(value, str) and value != AUTO)
    return max(0, _bytes(value, machine.host_bytes) - (0 if named else machine.runtime_host_bytes))


def _bytes(value: str | float, whole: int) -> int:
    if value == AUTO:
        return int(SHARE * whole)
    if isinstance(value, str):
        return parse_bytes(value)
    return value if isinstance(value, int) else int(value * whole)
