"""Print one row as the model will see it: trained and masked tokens, and where documents begin.

Errors in data are silent otherwise: a template that doubles newlines, a mask that is off by one. Tokens are separated
by ``|``; newlines are shown as ``\\n`` and break the line; long stretches are cut in the middle.
"""

from collections.abc import Sequence
from itertools import groupby, islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from deepstow.trainer.data.packing import MASKED
from deepstow.trainer.data.prepare import Prepared
from deepstow.trainer.errors import printable_lines

_HEAD, _TAIL = 40, 20  # tokens shown at either end of a long stretch
_GREEN = "\x1b[32m"
_DIM = "\x1b[2m"
_PLAIN = "\x1b[0m"


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
    plain = "outside brackets: trained on; [masked: ...]: read, not trained on"
    legend = f"{_GREEN}trained on{_PLAIN}, {_DIM}masked{_PLAIN}" if colour else plain
    return "\n".join([*lines, f"{legend}; | ends a token"])


def _document(ids: Sequence[int], labels: Sequence[int], tokenizer: PreTrainedTokenizerBase, colour: bool) -> str:
    trained, masked = (f"{_GREEN}{{}}{_PLAIN}", f"{_DIM}{{}}{_PLAIN}") if colour else ("{}", "[masked: {}]")
    runs = groupby(zip(ids, labels, strict=True), key=lambda pair: masked if pair[1] == MASKED else trained)
    texts = [shown.format(_text([token for token, _ in run], tokenizer)) for shown, run in runs]
    return ("" if colour else " ").join(texts)


def _text(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    hidden = len(ids) - _HEAD - _TAIL
    pieces = _pieces(ids[:_HEAD] if hidden > 0 else ids, tokenizer)
    if hidden > 0:
        pieces += [f" ... {hidden} more tokens ... ", *_pieces(ids[-_TAIL:], tokenizer)]
    return printable_lines("|".join(pieces)).replace("\n", "\\n\n")


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
