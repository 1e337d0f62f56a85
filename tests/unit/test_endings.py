"""Chats that do not teach where an answer ends."""

from copy import deepcopy
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import LlamaConfig

from deepstow.trainer.data.endings import ends_of, holds_chats, never_ends
from deepstow.trainer.data.packing import MASKED
from deepstow.trainer.data.prepare import Contents, Prepared


def prepared(ids: list[int], labels: list[int], form: str = "messages") -> Prepared:
    rows = Dataset.from_list([{"input_ids": ids, "labels": labels}] * 2)
    return Prepared(rows, None, form, Contents(fingerprint="rows"), chats=form == "messages")


def test_what_is_said(tokenizer: Any) -> None:
    end, turn = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert never_ends(prepared([5, 6, end], [MASKED, 6, end]), tokenizer, {end}) == ""
    no_loss = never_ends(prepared([5, 6, end], [MASKED, 6, MASKED]), tokenizer, {end})
    assert "rows have the end of a turn (<|eos|>), and no loss on it" in no_loss and "{% endgeneration %}" in no_loss
    nowhere = never_ends(prepared([5, 6, turn], [MASKED, 6, turn]), tokenizer, {end})
    assert "writes no end of a turn (<|eos|>) after an answer, but '<|im_start|>'" in nowhere and "chatml" in nowhere
    assert never_ends(prepared([5, 6, turn], [MASKED, 6, turn]), tokenizer, {end, turn}) == "", (
        "the model ends there, too"
    )
    assert never_ends(prepared([5, 6], [MASKED, 6], "text"), tokenizer, {end}) == ""
    without = deepcopy(tokenizer)
    without.eos_token = None
    assert "the tokenizer has no end token" in never_ends(prepared([5, 6], [MASKED, 6]), without, set())


def test_where_generation_ends(tokenizer: Any, tmp_path: Path) -> None:
    """Gemma's chats end with a token that only its generation_config.json names."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 106]}')
    (tmp_path / "config.json").write_text("{}")
    assert ends_of(tokenizer, LlamaConfig(eos_token_id=7), str(tmp_path)) == {tokenizer.eos_token_id, 7, 1, 106}
    assert ends_of(tokenizer, LlamaConfig(eos_token_id=None), None) == {tokenizer.eos_token_id}


def test_rows_that_are_chats() -> None:
    turns = [{"role": "user", "content": "a"}]
    for row, is_chat in (({"chosen": turns}, True), ({"prompt": "a", "chosen": "b"}, False)):
        assert holds_chats(Prepared(Dataset.from_list([row]), None, "dpo", Contents())) is is_chat
    assert holds_chats(prepared([5], [5])) and not holds_chats(prepared([5], [5], "text"))
