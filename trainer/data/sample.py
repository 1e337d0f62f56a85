"""Print one row as the model will see it: trained and masked tokens, and where documents begin.

Errors in data are silent otherwise: a template that doubles newlines, a mask that is off by one. Tokens are separated
by ``|``; newlines are shown as ``\\n`` and break the line; long stretches are cut in the middle.
"""

from collections.abc import Sequence
from itertools import groupby, islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer.data.packing import MASKED
from trainer.data.prepare import Prepared

_HEAD, _TAIL = 40, 20  # tokens shown at either end of a long stretch
_GREEN, _DIM, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"


def render(prepared: Prepared, tokenizer: PreTrainedTokenizerBase, index: int = 0, colour: bool = False) -> str:
    """Row ``index`` of the training data as text, with ANSI colours or with masked stretches in brackets."""
    row: dict[str, Any] = next(islice(iter(prepared.train), index, None), {})
    ids, labels = row.get("input_ids", []), row.get("labels", [])
    positions = row.get("position_ids") or list(range(len(ids)))
    starts = [i for i, position in enumerate(positions) if position == 0]
    trained = sum(label != MASKED for label in labels)
    documents = f", documents packed: {len(starts)}" if "position_ids" in row else ""
    lines = [f"row {index} ({prepared.format}): {len(ids)} tokens, {trained} trained on{documents}"]
    for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
        if "position_ids" in row:
            lines.append(f"--- document at token {start}, positions 0 to {stop - start - 1}")
        lines.append(_document(ids[start:stop], labels[start:stop], tokenizer, colour))
    if colour:
        lines.append(f"{_GREEN}trained on{_PLAIN}, {_DIM}masked{_PLAIN}; | ends a token")
    else:
        lines.append("outside brackets: trained on; [masked: ...]: read, not trained on; | ends a token")
    return "\n".join(lines)


def _document(ids: Sequence[int], labels: Sequence[int], tokenizer: PreTrainedTokenizerBase, colour: bool) -> str:
    parts = []
    for masked, run in groupby(zip(ids, labels, strict=True), key=lambda pair: pair[1] == MASKED):
        text = _text([token for token, _ in run], tokenizer)
        if colour:
            parts.append(f"{_DIM if masked else _GREEN}{text}{_PLAIN}")
        else:
            parts.append(f"[masked: {text}]" if masked else text)
    return "".join(parts) if colour else " ".join(parts)


def _text(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    hidden = len(ids) - _HEAD - _TAIL
    if hidden > 0:
        head, tail = _pieces(ids[:_HEAD], tokenizer), _pieces(ids[-_TAIL:], tokenizer)
        pieces = [*head, f" ... {hidden} more tokens ... ", *tail]
    else:
        pieces = _pieces(ids, tokenizer)
    return "|".join(pieces).replace("\n", "\\n\n")


def _pieces(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of each token; tokens that hold part of a character are joined until it is whole."""
    pieces: list[str] = []
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        text = str(tokenizer.decode(pending, clean_up_tokenization_spaces=False))
        if "\ufffd" not in text or len(pending) == 4:
            pieces.append(text)
            pending = []
    return [*pieces, str(tokenizer.decode(pending))] if pending else pieces
