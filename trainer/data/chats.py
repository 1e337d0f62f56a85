"""Conversations: the forms in which they are published, and from messages to token ids and labels.

Read are OpenAI's ``messages`` with ``tools`` and ``tool_calls``, and ShareGPT's ``conversations`` (``from``,
``value``). What a template would leave out without a word (tools, calls, reasoning) and what is no text is refused.

``data.assistant_only_loss`` trains on the stretches that a template marks with ``{% generation %}``. A row in which
Transformers finds others is refused. Where a template marks none, answers are what it writes for a turn after the
prompt of that turn: both must be beginnings of the whole text, or the row is refused. There a token is trained on if
all its characters are, in a mark if one of them is. ``train`` or ``weight`` of a message switch one turn off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate, compress, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
from transformers import PreTrainedTokenizerBase

from deepstow.trainer.data import bounds
from deepstow.trainer.data.bounds import bounded
from deepstow.trainer.data.packing import MASKED
from deepstow.trainer.data.templates import READY
from deepstow.trainer.errors import DataError, first_line, kind, nearest, nearest_file

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import DataSection

Span = tuple[int, int]  # characters, from and to
ROLES = ("system", "user", "assistant", "tool", "developer")
SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can contain half a pair of them, which tokenizers refuse
NO_TEXT = "holds half a surrogate pair (\\ud800 to \\udfff), which is no character"

_GENERATION = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
_BORDERS = ("\U000ff1a0", "\U000ff1a1")  # private characters, which no text has
_PIECES = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
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
        sender = message.pop("from")
        message |= {"role": _SHAREGPT.get(str(sender), sender), "content": message.pop("value")}
        if sender == "function_call":
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
        media = next((part.get("type", "no type") for part in parts if not isinstance(part.get("text"), str)), None)
        if media is not None:
            raise Fault(f"has a part that is no text ({media}); images, sound and files are not trained on")
        content = "".join(part["text"] for part in parts)
    if not isinstance(content, str):
        raise Fault(f"has content that is {kind(content)}; every message needs a string")
    if SURROGATE.search(content):
        raise Fault(NO_TEXT)
    return content


def _trained(message: dict[str, Any], only_assistant: bool) -> bool:
    """Whether a turn is trained on by its ``train`` or ``weight``, which are taken out."""
    choices = {key: message.pop(key) for key in ("train", "weight") if key in message}
    shown = " and ".join(f"{key} {value!r}" for key, value in choices.items())
    if choices and not only_assistant:
        raise Fault(f"has {shown}; turns are chosen where data.assistant_only_loss is true")
    if len(choices) > 1 or any(value not in (0, 1) for value in choices.values()):
        raise Fault(f"has {shown}; one of them, and 0 or 1")
    if any(choices.values()) and message["role"] != "assistant":
        raise Fault(f"has {shown}; only turns of the assistant are trained on")
    return all(choices.values())


def _call(call: object) -> dict[str, Any]:
    """A call as templates know it: arguments are an object, which OpenAI writes as JSON text."""
    outer = call if isinstance(call, Mapping) else {}
    function = outer.get("function", outer)
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    arguments = _json(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, Mapping) or not isinstance(function.get("name"), str):
        raise Fault("has a tool call that is none; a call is {name: text, arguments: an object, or one as JSON text}")
    call_id = {"id": outer["id"]} if outer.get("id") is not None else {}
    return {"type": "function", **call_id, "function": {"name": function["name"], "arguments": arguments}}


def _tools(tools: object) -> list[Any] | None:
    if not (tools.strip() if isinstance(tools, str) else tools):
        return None
    functions = _json(tools) if isinstance(tools, str) else tools
    if not isinstance(functions, list) or not all(isinstance(tool, Mapping) for tool in functions):
        raise Fault("field 'tools' is no list of functions, each {type: function, function: {name, ...}}")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in functions] or None


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
        spoken = {name for message in chat.messages for name in _SPOKEN if message.get(name)}
        for name in ({"tools"} if chat.tools else set()) | spoken:
            if not re.search(rf"\b{name}\b", self.text):
                raise Fault(f"has {name}, which {self.name} does not write; name one that does in data.chat_template")
        if only_assistant:
            return self._by_marks(chat) if self.marks else self._by_prefixes(chat)
        ids = list(self._tokens(self._text(chat))["input_ids"])
        return ids, list(ids)

    def try_out(self, messages: list[dict[str, Any]]) -> None:
        """Raise DataError if it does not render ``messages`` within bounds, for who lets others render them."""
        with suppress(Fault):
            self._text(Chat(messages, None, []))

    def _text(self, chat: Chat, upto: int | None = None, template: str | None = None, *, prompts: bool = False) -> str:
        """The conversation as text, by another ``template`` if one is given; ``prompts`` for the next answer. Raises
        Fault.
        """
        how: dict[str, Any] = {"chat_template": template or self.text, "add_generation_prompt": prompts}
        with self._faults(), bounded(self.name):
            return str(
                self.tokenizer.apply_chat_template(chat.messages[:upto], tools=chat.tools, tokenize=False, **how)
            )

    def _tokens(self, text: str, **options: Any) -> Any:
        return self.tokenizer(text, add_special_tokens=False, verbose=False, **options)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except jinja2.TemplateSyntaxError as error:  # not an error of this row
            raise DataError(f"{self.name}:{error.lineno}: {error.message}") from None
        except DataError:
            raise
        except Exception as error:  # a template can raise anything
            why = str(error).partition("\n")[0]
            raise Fault(f"field 'messages': the chat template refuses it: {why}") from None

    def _by_marks(self, chat: Chat) -> tuple[list[int], list[int]]:
        """Where the template marks answers: a token is trained on if one of its characters is in a stretch of them.

        Transformers finds the tokens of a stretch by its first and its last character. Where a tokenizer drops one of
        them it goes on to the end of the row, so both ways are compared on every row.
        """
        text, stretches = self._stretches(chat)
        if not all(chat.chosen) and len(stretches) != len(chat.chosen):
            raise Fault(
                "the chat template marks another number of answers than there are turns, so none can be left out"
            )
        borders = [0, *(border for stretch in stretches for border in stretch), len(text)]
        pieces = [
            {"role": "assistant" if index % 2 else "user", "content": text[start:stop]}
            for index, (start, stop) in enumerate(pairwise(borders))
        ]
        with self._faults():
            encoded: Any = self.tokenizer.apply_chat_template(
                pieces,
                chat_template=_PIECES,
                return_assistant_tokens_mask=True,
                return_dict=True,
                tokenizer_kwargs={"verbose": False, "return_offsets_mapping": True},
            )
        ids, spans = list(encoded["input_ids"]), encoded["offset_mapping"]
        self._refuse_other_tokens(text, spans, _touched(text, spans, stretches), encoded["assistant_masks"])
        chosen = stretches if all(chat.chosen) else list(compress(stretches, chat.chosen))
        trained = _touched(text, spans, chosen)
        return ids, [token if mark else MASKED for token, mark in zip(ids, trained, strict=True)]

    def _stretches(self, chat: Chat) -> tuple[str, list[Span]]:
        """The conversation as text, and which characters of it are marked.

        The template is rendered once more with two characters written at the borders of the marks. Transformers counts
        what was written before a mark instead, which is wrong in a macro.
        """
        begin, end = _BORDERS
        text, bordered = self._text(chat), self._text(chat, template=_with_borders(self.text))
        pieces = re.split(f"([{begin}{end}])", bordered)
        if "".join(pieces[::2]) != text or pieces[1::2] != [begin, end] * (len(pieces) // 4):
            raise Fault(f"{self.name} marks answers inside of others, or changes what it has marked: mark each once")
        lengths = list(accumulate(map(len, pieces[::2])))
        return text, list(zip(lengths[:-1:2], lengths[1::2], strict=True))

    def _refuse_other_tokens(
        self, text: str, spans: Sequence[Span], by_text: Sequence[bool], by_tokens: Sequence[int]
    ) -> None:
        """Raise Fault if both ways find other tokens. Of a last character that is several tokens Transformers marks
        one, and all of them are the answer's.
        """
        for index, (in_text, in_tokens) in enumerate(zip(by_text, by_tokens, strict=True)):
            if in_text is not bool(in_tokens) and not (in_text and index and spans[index] == spans[index - 1]):
                side, token = "inside" if in_text else "outside", text[slice(*spans[index])]
                raise Fault(
                    f"token {index + 1} ({token!r}) is {side} of the answers by its characters, and Transformers "
                    f"finds the opposite by {_MARKS}: this tokenizer drops characters where a mark begins or ends, as "
                    f"spaces; move them out of the marks in a copy of {self.name}, and name it in data.chat_template"
                )

    def _by_prefixes(self, chat: Chat) -> tuple[list[int], list[int]]:
        """Where the template marks nothing: an answer is what it writes for a turn after the prompt of that turn."""
        text = self._text(chat)
        trained = bytearray(len(text))
        chosen = iter(chat.chosen)
        for index, message in enumerate(chat.messages):
            if message["role"] == "assistant" and next(chosen):
                stop = self._text(chat, index + 1)
                start = self._text(chat, max(index, 1), prompts=True)
                if index == 0:  # Transformers takes no empty chat: the prompt of the next turn is that of this one
                    start = stop[: stop.find(start[len(stop) :])] + start[len(stop) :]
                if not (text.startswith(stop) and stop.startswith(start)):
                    raise Fault(
                        f"{self.name} writes the first {index + 1} messages otherwise than where more follow, so turn "
                        f"{index + 1} cannot be told from the others; put {_MARKS} around answers in a copy and name "
                        "it in data.chat_template"
                    )
                trained[len(start) : len(stop)] = b"\x01" * (len(stop) - len(start))
        encoding = self._tokens(text, return_offsets_mapping=True)
        places = zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
        labels = [token if start < stop and all(trained[start:stop]) else MASKED for token, (start, stop) in places]
        return list(encoding["input_ids"]), labels


def _with_borders(template: str) -> str:
    """``template`` that writes a character of its own at both borders of each mark.

    The empty ``if`` stands where the mark stood, so that as much white space around it is left out.
    """
    inside = rf"{{%\1 generation %}}{{{{ '{_BORDERS[0]}' }}}}{{% if true %}}{{% endif \2%}}"
    after = rf"{{%\1 if true %}}{{% endif %}}{{{{ '{_BORDERS[1]}' }}}}{{% endgeneration \2%}}"
    return _END.sub(after, _GENERATION.sub(inside, template))


def _touched(text: str, spans: Sequence[Span], stretches: Sequence[Span]) -> list[bool]:
    """For each span of characters of ``text``, whether one of them is in a stretch."""
    marked = bytearray(len(text))
    for start, stop in stretches:
        marked[start:stop] = b"\x01" * (stop - start)
    return [any(marked[start:stop]) for start, stop in spans]


def find_template(options: DataSection, tokenizer: PreTrainedTokenizerBase) -> Template:
    """The template of ``options``, or else the tokenizer's; DataError if there is none, or it cannot be used."""
    chosen, path = options.chat_template, options.chat_template_path
    if chosen is not None and chosen in READY:
        template = Template(READY[chosen], f"data.chat_template {chosen}", tokenizer)
    elif chosen is not None and "{" in chosen:
        template = Template(chosen, "data.chat_template", tokenizer)
    elif chosen is not None or path is not None:
        key, name = ("chat_template", chosen) if chosen is not None else ("chat_template_path", path)
        file = Path(str(name)).expanduser()
        if not file.is_file():
            hint = f" and is none of {', '.join(READY)}{nearest(str(name), READY)}" if key == "chat_template" else ""
            raise DataError(f"data.{key}: {name} does not exist{hint or nearest_file(file)}")
        try:
            template = Template(file.read_text(encoding="utf-8"), str(file), tokenizer)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"data.{key}: {file} cannot be read: {first_line(error)}") from None
    else:
        try:
            template = Template(str(tokenizer.get_chat_template()), "the tokenizer's chat template", tokenizer)
        except ValueError:
            ways = f"write {', '.join(READY)}, the path of a .jinja file, or the template itself"
            raise DataError(f"data.chat_template: messages need one and the tokenizer has none; {ways}") from None
    bounds.refuse(template.name, template.text)
    if options.assistant_only_loss and not template.marks and not tokenizer.is_fast:
        what = f"{template.name} marks no answers, and this tokenizer does not say where its tokens are"
        raise DataError(f"data.assistant_only_loss: {what}; put {_MARKS} around them in a copy")
    return template
