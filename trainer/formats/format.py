"""What a data format is: the columns of a row, and what it says of them. Tokenising is in ``trainer/data/formats.py``.

A format writes one of three methods. ``segments`` gives strings, each of which is tokenised alone. ``conversation``
gives messages, which the tokenizer's chat template writes. ``tokens`` gives ids that are there already.

If a format of the tree gives other rows than before, raise ``_LAYOUT`` in ``trainer/data/prepare.py``: rows that were
prepared are kept by content, and only the code of formats from outside is part of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepstow.trainer.registry import Registry

Segment = tuple[str, bool]  # a string that is tokenised alone, and whether it is trained on


class Format:
    """The columns of a row, and what is trained on.

    Attributes:
        name: in messages; a format from outside is given the one that it is used by.
        required, optional: fields of a row, the columns of the same name unless ``data.columns`` has others.
        kinds: types of fields that are no text.
        also: names of columns that can mean one field only, with that field.
        answers: prompts come before what is trained on, so ``data.completion_only_loss`` has a meaning.
        splits: a row that is too long becomes several, unless ``data.excess_length_strategy`` says otherwise.
        plain: it is text, without answers.
    """

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    kinds: Mapping[str, type] = {}
    also: Mapping[str, str] = {}
    answers = False
    splits = False
    plain = False

    def segments(self, row: Mapping[str, Any]) -> list[Segment] | str:
        """The strings of a row, which has ``required`` and those of ``optional`` that are there; or a line about what
        is wrong with it. An empty list: the row is dropped. A format with ``answers`` says False of prompts, and
        ``data.completion_only_loss: false`` trains on them, too.
        """
        raise NotImplementedError

    def conversation(self, row: Mapping[str, Any]) -> Mapping[str, Any] | str:
        """``messages`` of a row, as OpenAI's API has them, and ``system`` and ``tools`` if there are any; or a line
        about what is wrong with it.
        """
        raise NotImplementedError

    def tokens(self, row: Mapping[str, Any]) -> tuple[list[int], list[int]] | str:
        """Ids of a row, and labels: the ids, or -100 where nothing is learned. Or a line about what is wrong."""
        raise NotImplementedError

    @property
    def makes(self) -> str:
        """Which of the three methods it has. TypeError: none, or several."""
        ways = [way for way in WAYS if getattr(type(self), way) is not getattr(Format, way)]
        if len(ways) != 1:
            raise TypeError(f"must have one of the methods {', '.join(WAYS)}, and has {' and '.join(ways) or 'none'}")
        return ways[0]

    def __init__(self) -> None:
        if not (getattr(self, "required", None) and {*map(type, self.required)} == {str}):
            raise TypeError("required must name its columns, as in required = ('question', 'answer')")
        assert self.makes


WAYS = ("segments", "conversation", "tokens")
FORMATS: Registry[Format] = Registry(Format, "deepstow.data_formats", "deepstow.trainer.formats")
