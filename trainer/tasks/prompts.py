"""The prompt of a row of preferences, in whichever form it is published.

    prompt       answers                     what is trained on
    text         text                        as it is
    messages     messages                    as it is
    none         both with the prompt        the beginning that both share is the prompt (TRL's ``extract_prompt``)
    text         messages with the prompt    the same; the text must be among the turns that both share
    text         messages, the answer alone  the text is the user's turn
    messages     text                        each text is the assistant's turn

TRL's ORPO takes the fourth form so, and its other trainers refuse the last three; what it takes trains to its bits.
hh-rlhf has the third form as text, ultrafeedback_binarized has the fourth.

Refused: answers that end with a turn that is none, share no beginning, or differ in a turn that is not the
assistant's: those answer two prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NO_PROMPT = "write the prompt in a column of its own, and name it in data.columns if it is not called prompt"
APART = f"chosen and rejected do not begin alike, so they hold no prompt; {NO_PROMPT}"
TWO_PROMPTS = f"chosen and rejected must have the same turns up to the assistant's last one; {NO_PROMPT}"
ELSEWHERE = "the prompt is none of the turns before the answers; write it as messages, or leave its column out"


def carried(row: Mapping[str, Any], answers: tuple[str, ...], *, needed: bool) -> dict[str, Any] | str:
    """The row in a form that TRL takes, or a line about what is wrong. ``answers``: the names of its columns of
    answers; ``needed``: the task has to know where the prompt ends.
    """
    form = _carried(row, answers, needed=needed)
    if isinstance(form, str):
        return form
    for name in answers:
        if isinstance(form[name], list) and (role := form[name][-1].get("role")) in ("user", "system"):
            return f"field {name!r} ends with a turn of the {role}, and not with an answer"
    return form


def _carried(row: Mapping[str, Any], answers: tuple[str, ...], *, needed: bool) -> dict[str, Any] | str:
    kinds = {type(row[name]) for name in answers}
    if len(kinds) > 1:
        return f"{' and '.join(answers)} are not all text, or all lists of messages"
    if empty := [name for name in (*answers, "prompt") if row.get(name) == []]:
        return f"field {empty[0]!r} is an empty list"
    as_messages, prompt = list in kinds, row.get("prompt")
    if prompt is None:
        return _shared(row) if needed else dict(row)
    if isinstance(prompt, list) is as_messages:
        return dict(row)
    if not as_messages:
        return {**row, **{name: [{"role": "assistant", "content": row[name]}] for name in answers}}
    first = {row[name][0].get("role") for name in answers}
    if first == {"assistant"}:
        return {**row, "prompt": [{"role": "user", "content": prompt}]}
    form = _shared(row) if len(answers) > 1 else _before_last(row, *answers)
    if isinstance(form, dict) and prompt.strip() not in [str(turn.get("content")).strip() for turn in form["prompt"]]:
        return ELSEWHERE
    return form


def _shared(row: Mapping[str, Any]) -> dict[str, Any] | str:
    """The row with the beginning that its answers share as the prompt."""
    from trl.data_utils import extract_prompt

    chosen, rejected = row["chosen"], row["rejected"]
    if not (chosen and rejected) or chosen[0] != rejected[0]:
        return APART
    form: dict[str, Any] = {**row, **extract_prompt({"chosen": chosen, "rejected": rejected})}
    if isinstance(chosen, list) and any(form[name][0].get("role") != "assistant" for name in ("chosen", "rejected")):
        return TWO_PROMPTS
    return form if form["prompt"] else APART


def _before_last(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The row with all turns but the last as the prompt of that."""
    return {**row, "prompt": row[name][:-1], name: row[name][-1:]}
