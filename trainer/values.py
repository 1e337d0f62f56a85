"""The values of a config while it is checked: those that are wrong by themselves compare as nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Wrong:
    """Not true, equal to nothing, different from nothing, and neither smaller nor larger."""

    def _never(self, other: object) -> bool:
        return False

    __eq__ = __ne__ = __lt__ = __gt__ = _never

    def __bool__(self) -> bool:
        return False


class Values(dict[str, Any]):
    """The keys of a section, as attributes too."""

    def __getattr__(self, key: str) -> Any:
        return self[key]


WRONG = Wrong()

Found = Iterator[tuple[str, str]]  # a key, and what would work
OFF = (None, False)  # and 0, 0.0, which are equal to False
NOT_THEIRS = ("label_smoothing_factor", "use_liger_kernel")  # what losses of our own do not have
KEEP_ONE = "keep one of the two"
