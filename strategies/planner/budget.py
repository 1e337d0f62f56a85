"""Memory budgets: what ``gpu_memory`` and ``host_memory`` allow on this machine, in bytes; and what loading takes.

The only place where a config value becomes bytes. ``placement_search.py`` then subtracts what forward saves, once; the
rest is the size that the arenas may have.
"""

from __future__ import annotations

from deepstow.strategies.core.facts import MachineFacts, Tier
from deepstow.strategies.core.plan import Plan
from deepstow.strategies.core.sizes import AUTO, SHARE, parse_bytes


def device_budget(machine: MachineFacts, value: str | float = AUTO) -> int:
    """Bytes of the device that tensors may use; without an accelerator, auto means all of the memory. Auto and shares
    are of the whole device, whose context and libraries are in what is left over, or taken off.
    """
    if value == AUTO and not machine.has_accelerator:
        return machine.device_bytes
    if isinstance(value, float) or value == AUTO:
        return min(machine.device_bytes, _bytes(value, machine.device_bytes + machine.device_overhead_bytes))
    return _bytes(value, machine.device_bytes)


def host_budget(machine: MachineFacts, value: str | float) -> int:
    """Bytes of host memory that one rank may use, of ``value`` for all ranks of its machine. Auto and shares leave out
    what the process itself needs.
    """
    if isinstance(value, int) or (isinstance(value, str) and value != AUTO):
        return _bytes(value, machine.host_bytes) // max(1, machine.ranks)
    return max(0, _bytes(value, machine.host_bytes) - machine.runtime_host_bytes)


def loading_bytes(plan: Plan) -> int:
    """What each rank has on the host while it loads the model, which it does before the plan is carried out, at most:
    pages of a file that are not changed are shared by the ranks.

    0 where there is no accelerator (the weights then count as the device's), and where DeepSpeed splits them over the
    ranks as they are made.
    """
    facts = plan.facts
    if not facts.machine.has_accelerator or plan.engine().get("zero_optimization.stage") == 3:
        return 0
    if plan.loads_spans:  # one parameter after the other, into the arenas
        return plan.peak(Tier.HOST) + facts.run.trained_bytes * facts.run.largest_param
    return facts.loaded_bytes + facts.machine.runtime_host_bytes


def writing_bytes(plan: Plan) -> int:
    """What the first rank has on the host, at most, while it writes the whole model, of which ranks have parts: besides
    its own a tensor that is put together, and what of. The others are in a file. 0: it has the whole.
    """
    facts = plan.facts
    if not facts.machine.has_accelerator or not (facts.run.model_params or facts.run.tensor > 1 or plan.loads_spans):
        return 0
    return plan.peak(Tier.HOST) + 2 * facts.run.trained_bytes * facts.run.largest_param


def _bytes(value: str | float, whole: int) -> int:
    if value == AUTO:
        return int(SHARE * whole)
    if isinstance(value, str):
        return parse_bytes(value)
    return value if isinstance(value, int) else int(value * whole)
