"""How long the rows of a run's batches are, and whether attention needs a mask for them, as the prepared rows say.

Without rows a plan counts ``data.max_length`` tokens and a mask. A run knows its rows before it plans: collators pad
to the longest of a micro-batch, and full rows of one document each need no mask. Ranks and compiled code may take rows
of one length: these have ``data.max_length`` tokens in any case.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from deepstow.strategies.core.compose import degrees
from deepstow.strategies.core.protocol import Axis

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig

IDS = "input_ids"
LABELS = "labels"
POSITIONS = "position_ids"


class Collated(NamedTuple):
    """The config with the lengths of the longest rows, and whether attention needs a mask for any micro-batch."""

    config: RunConfig
    masked: bool = True


def collated(config: RunConfig, rows: Any) -> Collated:
    """What batches of ``rows`` are planned as: a dataset, or a stream, of which nothing is known before it is read."""
    divided = degrees(config.strategies)
    table: Any = getattr(rows, "data", None)
    one_length = config.training.compile_backend or any(
        divided.get(axis, 1) > 1 for axis in (Axis.STAGES, Axis.SEQUENCE)
    )
    if one_length or not hasattr(table, "column_names"):
        return Collated(config)
    from deepstow.trainer.data.collate import MULTIPLE

    lengths = {name: extremes for name in table.column_names if (extremes := _lengths(table.column(name))) is not None}
    ids = lengths if IDS not in lengths else {IDS: lengths[IDS]}  # texts of an embedding are not called so
    if not ids:
        return Collated(config)
    multiple = MULTIPLE if IDS in ids else 1
    longest, shortest = max(most for _, most in ids.values()), min(least for least, _ in ids.values())
    data, update = config.data, {"max_length": min(config.data.max_length, -(-longest // multiple) * multiple)}
    if "data.max_target_length" in config.chosen_task.keys and LABELS in lengths:
        limit = data.max_target_length or data.max_length
        update["max_target_length"] = min(limit, -(-lengths[LABELS][1] // multiple) * multiple)
    full = config.chosen_task.language and shortest == longest and longest % multiple == 0
    if full and data.packing:
        full = POSITIONS in lengths and all(_ends(table.column(POSITIONS), longest))
    return Collated(config.model_copy(update={"data": data.model_copy(update=update)}), not full)


def _lengths(column: Any) -> tuple[int, int] | None:
    """Of the shortest and the longest list in a column of tokens; None: it is none."""
    import pyarrow

    kinds, form = pyarrow.types, column.type
    if (
        not (kinds.is_list(form) or kinds.is_large_list(form))
        or not kinds.is_integer(form.value_type)
        or not len(column)
    ):
        return None
    extremes = pyarrow.compute.min_max(pyarrow.compute.list_value_length(column)).as_py()
    return extremes["min"], extremes["max"]


def _ends(positions: Any, length: int) -> Iterator[bool]:
    """Whether the last token of each row is at the last position of a document as long as the row."""
    for chunk in positions.chunks:
        yield bool((chunk.flatten().to_numpy()[length - 1 :: length] == length - 1).all())
