"""The grid of ranks as a picture: who holds which part, and who talks to whom.

ranks: pipeline 2 x data 2 x tensor 2
           data 0   data 1
  stage 0  0 = 1    2 = 3
             |        |
  stage 1  4 = 5    6 = 7
  =  exchange within every layer; |  send hidden states and their gradients; a row adds up gradients once per step
"""

from __future__ import annotations

from collections.abc import Sequence

from strategies.core.grid import Cell, Grid
from strategies.core.plan import Home, Plan
from strategies.core.sizes import human
from strategies.report.table import table

SHOWN = 8  # copies and stages side by side; of more, the first ones


def picture(grid: Grid) -> list[str]:
    """Lines; none if every rank has a whole copy."""
    if grid.is_plain:
        return []
    copies, stages = range(min(grid.replicas, SHOWN)), range(min(grid.stages, SHOWN))
    cells = [[_ranks(grid, stage, copy) for copy in copies] for stage in stages]
    widths = [max(len(f"data {copy}"), *(len(row[copy]) for row in cells)) for copy in copies]
    names = [f"stage {stage}" for stage in stages] if grid.stages > 1 else [""]
    lead = max(map(len, names))

    def line(name: str, parts: Sequence[str]) -> str:
        padded = (part.ljust(width) for part, width in zip(parts, widths, strict=True))
        return "  ".join([f"  {name.ljust(lead)}", *padded]).rstrip()

    more = ["..."] if grid.replicas > SHOWN else []
    lines = [f"ranks: {grid}", line("", [f"data {copy}" for copy in copies]) + "".join(f"  {each}" for each in more)]
    for stage in stages:
        lines += [line("", [" " * (len(cells[stage][copy]) // 2) + "|" for copy in copies])] if stage else []
        lines.append(line(names[stage], cells[stage]))
    lines += [line("...", [""] * len(copies))] if grid.stages > SHOWN else []
    said = ["= exchange in every layer"] if grid.tensor > 1 else []
    said += ["| send hidden states and their gradients"] if grid.stages > 1 else []
    said += ["ranks of a row add up gradients once per step"] if grid.replicas > 1 else []
    return [*lines, "  " + "; ".join(said)]


def _ranks(grid: Grid, stage: int, copy: int) -> str:
    found = [str(grid.rank(Cell(stage, copy, part))) for part in range(grid.tensor)]
    return " = ".join(found if len(found) <= SHOWN // 2 else [found[0], found[1], "..", found[-1]])


def stage_table(plans: Sequence[Plan]) -> list[str]:
    """What each stage holds, by the ``plans`` of the stages in order; none for a single one."""
    if len(plans) < 2:
        return []
    header = ("stage", "units", "parameters", "training state", "saved", "peak", "of")
    rows = []
    for number, plan in enumerate(plans):
        facts = plan.facts
        assert facts.cut is not None
        parts = [facts.cut.parts[part] for part in facts.cut.of_stage(number)]
        units = ", ".join(part[0] if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in parts)
        saved = facts.run.in_flight * sum(plan.saved_bytes(unit.name) for unit in facts.units)
        sizes = (plan.states(Home.DEVICE), saved, plan.peak(Home.DEVICE), facts.machine.device_bytes)
        rows.append((str(number), units, f"{facts.num_params / 1e6:,.1f} M", *map(human, sizes)))
    return ["each rank of a stage, on its device:", *table(header, rows, header[2:])]
