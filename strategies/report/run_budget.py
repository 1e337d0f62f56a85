"""What a run over many tokens takes: operations, days, cost, energy; at the simulated step, and at a share of the peak.

A run of D tokens takes 6 P D operations (Kaplan et al. 2020, arXiv 2001.08361): P are the weights that a token meets,
of experts only those it is sent to. Attention's own products are not in it, and what is recomputed is said by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from deepstow.strategies.core.facts import Facts, UnitKind
from deepstow.strategies.planner.step_cost import unit_flops
from deepstow.strategies.report.table import table

MULTIPLES = {"T": 1e12, "B": 1e9, "M": 1e6, "K": 1e3, "": 1}
HOUR_S = 3600
Step: TypeAlias = tuple[int, int, float | None]  # ranks, tokens, and simulated seconds, if they are known


@dataclass(frozen=True, slots=True)
class Asked:
    """Tokens of the run, the price of an hour of a GPU and its watts (0: not asked), and a share of the peak."""

    tokens: float
    price_per_gpu_hour: float = 0.0
    power_watts: float = 0.0
    mfu: float = 0.4  # 0.38 to 0.43 in the pre-training of Llama 3 405B (arXiv 2407.21783, table 4)


def read(given: Mapping[str, str | None]) -> Asked:
    """From the texts of flags, None if they are not given. ``tokens`` is.

    Raises:
        ValueError: one of them cannot be meant.
    """
    values = {}
    for name, text in given.items():
        if text is not None:
            parsed = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?)([KMBT]?)", text.strip(), re.IGNORECASE)
            values[name] = float(parsed[1]) * MULTIPLES[parsed[2].upper()] if parsed else 0.0
            if not 0 < values[name] < (1.0 + 1e-9 if name == "mfu" else float("inf")):
                limit = " and at most 1" if name == "mfu" else ""
                raise ValueError(f"{_flag(name)} {text}: must be a number above 0{limit}, as in 15B, 2.5 or 0.4")
    return Asked(**values)


def active_params(facts: Facts) -> float:
    """Weights of the whole model of ``facts`` that a token meets, by the products that were counted."""
    tokens, units = facts.run.micro_batch * facts.run.sequence, facts.units
    operators = (op for unit in units if unit.choices for op in unit.choices.operators)
    attention = sum(op.work.flops for op in operators if not op.name.startswith("linear"))
    looked_up = sum(unit.num_params for unit in units if unit.kind is UnitKind.EMBEDDING and not facts.run.tied)
    return min(facts.num_params, looked_up + (facts.run.forward_flops - attention) / 2 / tokens)


def repeated(parts: Iterable[Facts]) -> float:
    """The share of the forward of a model's ``parts`` that backward does again."""
    forward = again = 0.0
    for facts in parts:
        for unit, flops in zip(facts.units, unit_flops(facts), strict=True):
            forward += flops
            again += unit.again.flops + flops * (facts.run.recomputes and unit.kind is UnitKind.BLOCK)
    return again / forward if forward else 0.0


def lines(asked: Asked, params: float, again: float, peak: float | None, steps: Iterable[Step]) -> Iterator[str]:
    """Operations, what they take at the share of the peak that was asked for, and a row per number of ranks.

    Args:
        params: active ones; ``again`` is the share of forward that backward repeats, ``peak`` a rank's flop/s.
    """
    flops, rows = 6 * params * asked.tokens, list[dict[str, str]]()
    total = f"{flops:.3g} FLOPs (6 x {_short(params)} active parameters x tokens), {again * flops / 3:.3g} recomputed"
    yield f"a run of {_short(asked.tokens)} tokens: {total}"
    for ranks, tokens, seconds in steps:
        if peak and not rows:
            hours = flops / peak / asked.mfu / HOUR_S
            spent = "".join(f", {name} {number}" for name, number in _spent(asked, hours).items())
            words = f"{hours / ranks / 24:.3g} days on {ranks:,} ranks, GPU-hours {hours:,.0f}{spent}"
            yield f"at {asked.mfu:.0%} MFU: {words}"
        days = asked.tokens / tokens * (seconds or 0.0) / HOUR_S / 24
        row = {"ranks": f"{ranks:,}", "tokens/step": f"{tokens:,}"}
        if seconds:
            row |= {"seconds/step": f"{seconds:.4g}", "days": f"{days:.3g}"} | _spent(asked, days * 24 * ranks)
            row |= {"MFU": f"{flops / peak / ranks / days / 24 / HOUR_S:.0%}"} if peak else {}
        rows.append(row)
    yield from table(list(rows[0]), [list(row.values()) for row in rows], rows[0])
    yield "more ranks are more copies with the same micro-batches; days are of steps alone, without saving or restarts"


def _spent(asked: Asked, gpu_hours: float) -> dict[str, str]:
    """Cost and energy, if they are asked for."""
    amounts = {"cost": gpu_hours * asked.price_per_gpu_hour, "kWh": gpu_hours * asked.power_watts / 1000}
    return {name: f"{amount:,.0f}" for name, amount in amounts.items() if amount}


def _short(number: float) -> str:
    """``15B``."""
    unit = next((unit for unit, multiple in MULTIPLES.items() if number >= multiple), "")
    return f"{number / MULTIPLES[unit]:.4g}{unit}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
