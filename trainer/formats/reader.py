"""What a reader of files is; those of the tree are in ``trainer/data/readers.py``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from deepstow.trainer.registry import Registry, needed

# The number of each row in messages, and the row, or a sentence about what is wrong with it.
Numbered = Iterator[tuple[int | str, Mapping[str, Any] | str]]


class Reader:
    """Reads the rows of one kind of file, always in the same order.

    Attributes:
        name: the suffix of its files, as ``.csv``; one that ``data.reader`` names reads whatever file it is given.
    """

    name: str

    @needed
    def rows(self, path: Path, columns: Collection[str]) -> Numbered:
        """Each row with at least these ``columns``, where it has them; if there are none, the names in the
        first row are all that is read. DataError: the file cannot be read at all.
        """
        raise NotImplementedError

    def count(self, path: Path) -> int | None:
        """How many rows there are, as far as that can be known at once."""
        return None


READERS: Registry[Reader] = Registry(Reader, "deepstow.readers", "deepstow.trainer.data.readers")
