"""Conversations: the forms in which they are published, and from messages to token ids and labels.

Read are OpenAI's ``messages`` with ``tools`` and ``tool_calls``, and ShareGPT's ``conversations`` (``from``,
``value``). What a template would leave out without a word (tools, calls, reasoning) and what is no text is refused.

``data.assistant_only_loss`` trains on the stretches that a template marks with ``{% generation %}``. Where it marks
none, on what it writes for a turn after the prompt of that turn: both must be beginnings of the whole text, or the row
is refused. A token is trained on if all its characters are. ``train`` or ``weight`` of a message switch one turn off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
from transformers import PreTrainedTokenizerBase

from trainer.data.packing import MASKED
from trainer.data.templates import READY
from trainer.errors import DataError, kind, nearest, nearest_file

if TYPE_CHECKING:
    from trainer.config.sections import DataSection

ROLES = ("system", "user", "assistant", "tool", "developer")
SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can contain half a pair of them, which tokenizers refuse
NO_TEXT = "holds half a surrogate pair (\\ud800 to \\udfff), which is no character"

_GENERATION = re.compile(r"\{%-?\+?\s*generation\s*[-+]?%\}")
_MARKS = "{% generation %} ... {% endgeneration %}"
# ShareGPT's roles, and what other data sets of that form call them.
_SHAREGPT = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "function_call": "assistant",
    "observation": "tool", "tool_response": "tool", "function_response": "tool",
}  # fmt: skip
_SPOKEN = ("tool_calls", "function_call", "reasoning_content", "thinking")  # of a message, besides its content


class Chat(NamedTuple):
    """Messages in OpenAI's form, and for each assistant turn whether it is trained on."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    chosen: list[bool]


class Fault(Exception):
    """What is wrong with a row, as one line."""


def read(row: Mapping[str, Any], column: str, only_assistant: bool) -> Chat:
    """The conversation of a row (``messages``, perhaps ``system`` and ``tools``); raises Fault. ``column`` has its
    messages.
    """
    messages, chosen = [], []
    for index, raw in enumerate(row["messages"]):
        try:
            messages.append(_message(raw))
            trained = _trained(messages[-1], only_assistant)
        except Fault as fault:
            raise Fault(f"field '{column}[{index}]' {fault}") from None
        chosen += [trained] if messages[-1]["role"] == "assistant" else []
    if row.get("system") and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": row["system"]})
    return Chat(messages, _tools(row.get("tools")), chosen)


def _message(raw: object) -> dict[str, Any]:
    """A message in OpenAI's form; what other keys it has stays."""
    if not isinstance(raw, Mapping):
        raise Fault(f"needs role and content; found: {kind(raw)}")
    message = {key: value for key, value in raw.items() if value is not None or key == "content"}
    if {"from", "value"} <= message.keys() and "role" not in message:
        said = message.pop("from")
        message |= {"role": _SHAREGPT.get(str(said), said), "content": message.pop("value")}
        if said == "function_call":
            calls = _json(message["content"])
            message |= {"content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}
    if message.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in message["tool_calls"]]
        message["content"] = message.get("content") or ""
    if not {"role", "content"} <= message.keys():
        raise Fault(f"needs role and content; found: {', '.join(raw)}")
    if message["role"] not in ROLES:
        hint = nearest(str(message["role"]), ROLES)
        raise Fault(f"has role {message['role']!r}; allowed: {', '.join(ROLES)}{hint}")
    message["content"] = _text(message["content"])
    return message


def _text(content: object) -> str:
    """A message's text; OpenAI writes it also as a list of parts, of which text alone is read."""
    if isinstance(content, list):
        parts = [part if isinstance(part, Mapping) else {} for part in content]
        other = next((part.get("type", "no type") for part in parts if not isinstance(part.get("text"), str)), None)
        if other is not None:
            raise Fault(f"has a part that is no text ({other}); images, sound and files are not trained on")
        content = "".join(part["text"] for part in parts)
    if not isinstance(content, str):
        raise Fault(f"has content that is {kind(content)}; every message needs a string")
    if SURROGATE.search(content):
        raise Fault(NO_TEXT)
    return content


def _trained(message: dict[str, Any], only_assistant: bool) -> bool:
    """Whether a turn is trained on by its ``train`` or ``weight``, which are taken out."""
    found = {key: message.pop(key) for key in ("train", "weight") if key in message}
    said = " and ".join(f"{key} {value!r}" for key, value in found.items())
    if found and not only_assistant:
        raise Fault(f"has {said}; turns are chosen where data.assistant_only_loss is true")
    if len(found) > 1 or any(value not in (0, 1) for value in found.values()):
        raise Fault(f"has {said}; one of them, and 0 or 1")
    if any(found.values()) and message["role"] != "assistant":
        raise Fault(f"has {said}; only turns of the assistant are trained on")
    return all(found.values())


def _call(call: object) -> dict[str, Any]:
    """A call as templates know it: arguments are an object, which OpenAI writes as JSON text."""
    outer = call if isinstance(call, Mapping) else {}
    function = outer.get("function", outer)
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    arguments = _json(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, Mapping) or not isinstance(function.get("name"), str):
        raise Fault("has a tool call that is none; a call is {name: text, arguments: an object, or one as JSON text}")
    given = {"id": outer["id"]} if outer.get("id") is not None else {}
    return {"type": "function", **given, "function": {"name": function["name"], "arguments": arguments}}


def _tools(tools: object) -> list[Any] | None:
    if not (tools.strip() if isinstance(tools, str) else tools):
        return None
    found = _json(tools) if isinstance(tools, str) else tools
    if not isinstance(found, list) or not all(isinstance(tool, Mapping) for tool in found):
        raise Fault("field 'tools' is no list of functions, each {type: function, function: {name, ...}}")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in found] or None


def _json(text: object) -> Any:
    try:
        return json.loads(str(text))
    except (ValueError, RecursionError):
        return None


@dataclass(frozen=True)
class Template:
    """A chat template and where it comes from."""

    text: str
    name: str
    tokenizer: PreTrainedTokenizerBase = field(repr=False)

    @property
    def marks(self) -> bool:
        """Whether it says which of its text is the assistant's."""
        return _GENERATION.search(self.text) is not None

    def encode(self, chat: Chat, only_assistant: bool) -> tuple[list[int], list[int]]:
        """Token ids and labels; raises Fault."""
        held = {name for message in chat.messages for name in _SPOKEN if message.get(name)}
        for name in ({"tools"} if chat.tools else set()) | held:
            if not re.search(rf"\b{name}\b", self.text):
                raise Fault(f"has {name}, which {self.name} does not write; name one that does in data.chat_template")
        if only_assistant and not self.marks:
            return self._by_prefixes(chat)
        out = self._apply(
            chat, return_dict=True, return_assistant_tokens_mask=only_assistant, tokenizer_kwargs={"verbose": False}
        )
        ids = list(out["input_ids"])
        if not only_assistant:
            return ids, list(ids)
        marks = out["assistant_masks"] if all(chat.chosen) else _chosen(out["assistant_masks"], chat.chosen)
        return ids, [token if mark else MASKED for token, mark in zip(ids, marks, strict=True)]

    def _apply(self, chat: Chat, upto: int | None = None, **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                chat.messages[:upto], tools=chat.tools, chat_template=self.text, **options
            )
        except jinja2.TemplateSyntaxError as error:  # not an error of this row
            raise DataError(f"{self.name}:{error.lineno}: {error.message}") from None
        except Exception as error:  # a template can raise anything
            raise Fault(f"field 'messages': the chat template refuses it: {error}") from None

    def _by_prefixes(self, chat: Chat) -> tuple[list[int], list[int]]:
        """Where the template marks nothing: an answer is what it writes for a turn after the prompt of that turn."""
        whole = self._apply(chat, tokenize=False)
        trained = bytearray(len(whole))
        chosen = iter(chat.chosen)
        for index, message in enumerate(chat.messages):
            if message["role"] == "assistant" and next(chosen):
                stop = self._apply(chat, index + 1, tokenize=False)
                start = self._apply(chat, max(index, 1), tokenize=False, add_generation_prompt=True)
                if index == 0:  # Transformers takes no empty chat: the prompt of the next turn is that of this one
                    start = stop[: stop.find(start[len(stop) :])] + start[len(stop) :]
                if not (whole.startswith(stop) and stop.startswith(start)):
                    raise Fault(
                        f"{self.name} writes the first {index + 1} messages otherwise than where more follow, so turn "
                        f"{index + 1} cannot be told from the others; put {_MARKS} around answers in a copy and name "
                        "it in data.chat_template"
                    )
                trained[len(start) : len(stop)] = b"\x01" * (len(stop) - len(start))
        out: Any = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        places = zip(out["input_ids"], out["offset_mapping"], strict=True)
        labels = [token if start < stop and all(trained[start:stop]) else MASKED for token, (start, stop) in places]
        return list(out["input_ids"]), labels


def _chosen(marks: Sequence[int], chosen: Sequence[bool]) -> Iterator[bool]:
    """The marks of the chosen turns alone; turns and marked stretches are the same in number, or Fault is raised."""
    runs = [(bool(mark), len(list(run))) for mark, run in groupby(marks)]
    if sum(mark for mark, _ in runs) != len(chosen):
        raise Fault("the chat template marks another number of answers than there are turns, so none can be left out")
    turns = iter(chosen)
    return (trained for mark, length in runs for trained in [mark and next(turns)] * length)


def find_template(options: DataSection, tokenizer: PreTrainedTokenizerBase) -> Template:
    """The template of ``options``, or else the tokenizer's; DataError if there is none, or it cannot be used."""
    given, path = options.chat_template, options.chat_template_path
    if given is not None and given in READY:
        template = Template(READY[given], f"data.chat_template {given}", tokenizer)
    elif given is not None and "{" in given:
        template = Template(given, "data.chat_template", tokenizer)
    elif given is not None or path is not None:
        key, name = ("chat_template", given) if given is not None else ("chat_template_path", path)
        file = Path(str(name)).expanduser()
        if not file.is_file():
            known = f" and is none of {', '.join(READY)}{nearest(str(name), READY)}" if key == "chat_template" else ""
            raise DataError(f"data.{key}: {name} does not exist{known or nearest_file(file)}")
        template = Template(file.read_text(encoding="utf-8"), str(file), tokenizer)
    else:
        try:
            template = Template(str(tokenizer.get_chat_template()), "the tokenizer's chat template", tokenizer)
        except ValueError:
            ways = f"write {', '.join(READY)}, the path of a .jinja file, or the template itself"
            raise DataError(f"data.chat_template: messages need one and the tokenizer has none; {ways}") from None
    if options.assistant_only_loss and not template.marks and not tokenizer.is_fast:
        what = f"{template.name} marks no answers, and this tokenizer does not say where its tokens are"
        raise DataError(f"data.assistant_only_loss: {what}; put {_MARKS} around them in a copy")
    return template
