"""Rows of ``pydoc_data.topics``, English text that comes with every Python, so that a first run needs no download.

``text`` and ``pairs`` are whole topics. The others are made of their paragraphs, for tasks that need labels: whether a
paragraph is prose or code, and which of two paragraphs is about the topic that the prompt asks for.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterator
from typing import Any

COLUMNS = {
    "text": ("text",),
    "pairs": ("prompt", "completion"),
    "labels": ("text", "label"),
    "preferences": ("prompt", "chosen", "rejected"),
    "ratings": ("prompt", "completion", "label"),
}
WORDS = range(8, 80)  # of a paragraph that is used
CODE = (">>>", "::=", "      ")


def rows(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Topic and row, for each row of this name."""
    from pydoc_data.topics import topics

    pages = sorted(topics.items())
    if name == "text":
        yield from ((topic, {"text": text}) for topic, text in pages)
        return
    if name == "pairs":
        yield from (
            (topic, {"prompt": _prompt(topic, text), "completion": _body(text).strip()}) for topic, text in pages
        )
        return
    parts = {topic: [part for part in _body(text).split("\n\n") if len(part.split()) in WORDS] for topic, text in pages}
    if name == "labels":
        for topic, paragraphs in parts.items():
            for part in paragraphs:
                yield topic, {"text": part.strip(), "label": "code" if any(m in part for m in CODE) else "prose"}
        return
    bodies = list(parts.values())
    wrong_of = dict(zip(parts, [*bodies[1:], bodies[0]], strict=True))
    for topic, text in pages:
        prompt = _prompt(topic, text)
        for answer, wrong in zip(parts[topic][:20], wrong_of[topic], strict=False):
            good, bad = answer.strip(), wrong.strip()
            if name == "preferences":
                yield topic, {"prompt": prompt, "chosen": good, "rejected": bad}
            else:
                yield topic, {"prompt": prompt, "completion": good, "label": True}
                yield topic, {"prompt": prompt, "completion": bad, "label": False}


def _prompt(topic: str, text: str) -> str:
    """A question about the heading."""
    title = text.partition("\n")[0]
    if keyword.iskeyword(topic) and "statement" in title:
        return f"Explain Python's `{topic}` statement.\n"
    return f"Explain this part of Python: {title.strip()}.\n"


def _body(text: str) -> str:
    """What is below the heading: a title, a row of stars, a blank line."""
    return text.partition("\n")[2].partition("\n\n")[2]
