"""Which parameters a config prunes, by their names, and after which steps how many; loads no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable

from deepstow.strategies.core.facts import Param, Unit, UnitKind
from deepstow.trainer.recipes.prune import PruneSection

SUFFIX = ".weight"


def matches(section: PruneSection, module: str) -> bool:
    """Whether a module of this dotted name is meant: as PEFT reads ``target_modules``."""
    names = section.modules
    if isinstance(names, list):
        return any(module == name or module.endswith(f".{name}") for name in names)
    return names is None or re.fullmatch(names, module) is not None


def sizes(section: PruneSection, units: Iterable[Unit], params: Iterable[Param]) -> list[int]:
    """Elements of each parameter that is pruned, with those of norms, whose shape is not known here."""
    blocks = {unit.name for unit in units if unit.kind is UnitKind.BLOCK}
    meant = [each for each in params if each.name.endswith(SUFFIX) and matches(section, each.name.removesuffix(SUFFIX))]
    return [param.num_elements for param in meant if param.unit in blocks and param.group is not None]


def rounds(section: PruneSection, steps: int) -> dict[int, float]:
    """How many optimizer steps are done at each round of pruning, of ``steps`` in all, and the sparsity after it. At
    least one step comes after the last round.

    The cubic schedule is s_t = s (1 - (1 - t/T)^3), with T = ``until`` * ``steps``.
    """
    last = min(steps - 1, max(1, round(section.until * steps)))
    if not section.is_cubic or last < 1:
        return {0: section.sparsity}
    times = {-(-last * number // section.rounds) for number in range(1, section.rounds + 1)}
    return {at: section.sparsity * (1 - (1 - at / last) ** 3) for at in sorted(times)}
