"""What a placement takes, before it is placed: the bytes that the search adds up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Sizes(NamedTuple):
    """Bytes of a placement: on the device of weights that may be offloaded (``weights``), the most of them that one
    unit needs (``largest_unit``), what is added if any is (``codes``), and all else (``rest``); on the host while no
    weight is offloaded (``host``, with slots for those on the disk), and what is added there if all are (``copies``),
    but for slots."""

    weights: int
    largest_unit: int
    codes: int
    rest: int
    host: int
    copies: int

    @property
    def device(self) -> int:
        return self.weights + self.rest

    def room(self, device_room: int) -> int:
        """What is left of so much for the weights that may be offloaded: less if one has to be."""
        left = device_room - self.rest
        return left if self.weights <= left else left - self.codes


@dataclass(frozen=True, slots=True)
class Movable:
    """A weight that may be offloaded: its bytes, what its copy takes on the host, and the ticks that use it."""

    index: int
    num_bytes: int
    copy_bytes: int
    ticks: tuple[int, ...]
