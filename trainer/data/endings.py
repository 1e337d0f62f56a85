"""Whether rows of chats train on the token at which generation ends. If none does, the model learns to answer, and goes
on with the user's next turn: a template that writes no such token, or a mark that leaves it out.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset

from deepstow.trainer.data.packing import MASKED
from deepstow.trainer.model import hub

if TYPE_CHECKING:
    from collections.abc import Collection

    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from deepstow.trainer.data.prepare import Prepared

AS_CHATML = "write data.chat_template: chatml, or a template that writes it after each answer"


def holds_chats(prepared: Prepared) -> bool:
    """Whether the rows are messages, so that what is asked of the model is a turn of the user's."""
    if not isinstance(prepared.train, Dataset):
        return prepared.chats
    row = prepared.train[0]
    turns = [row.get(name) for name in ("prompt", "chosen", "completion")]
    return prepared.chats or any(isinstance(turn, list) for turn in turns)


def ends_of(tokenizer: PreTrainedTokenizerBase, model: PretrainedConfig, name_or_path: str | None) -> set[int]:
    """The tokens at which generation ends, as the tokenizer and the configurations of a model name them."""
    of_generation = None
    with suppress(OSError, ValueError, AttributeError):
        file = hub.file_of(name_or_path, "generation_config.json")
        of_generation = json.loads(file.read_bytes()).get("eos_token_id") if file else None
    ends = set[Any]()
    for ids in (tokenizer.eos_token_id, getattr(model.get_text_config(), "eos_token_id", None), of_generation):
        ends |= {*ids} if isinstance(ids, list | tuple) else {ids}
    return {token for token in ends if isinstance(token, int)}


def never_ends(prepared: Prepared, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> str:
    """A line if rows of chats train on none of the tokens ``ends``; empty if one does, or nobody can know."""
    table: Any = getattr(prepared.train, "data", None)
    if not prepared.chats or not hasattr(table, "column") or _has(table, "labels", ends):
        return ""
    end = tokenizer.eos_token
    if end is None:
        what, cure = "the tokenizer has no end token", "name a tokenizer with an eos token in model.tokenizer"
    elif _has(table, "input_ids", ends):
        what = f"rows have the end of a turn ({end}), and no loss on it"
        cure = "move {% endgeneration %} behind it in a copy of the chat template, and name that in data.chat_template"
    else:
        last_token = _last(table)
        mark = "" if last_token is None else f", but {tokenizer.decode([last_token])!r}"
        what, cure = f"the chat template writes no end of a turn ({end}) after an answer{mark}", AS_CHATML
        if last_token is not None and last_token in (tokenizer.all_special_ids or ()):
            cure += ", or save the tokenizer with that as its eos_token"
    return f"data: {what}, so the model does not learn where an answer ends; {cure}"


def _has(table: Any, column: str, ends: Collection[int]) -> bool:
    return any(bool(np.isin(_numbers(chunk), list(ends)).any()) for chunk in table.column(column).chunks)


def _numbers(chunk: Any) -> Any:
    return chunk.flatten().to_numpy(zero_copy_only=False)


def _last(table: Any) -> int | None:
    """The last token of the first row that is trained on."""
    labels = [int(label) for label in table.column("labels")[0].values.to_numpy() if label != MASKED]
    return labels[-1] if labels else None
