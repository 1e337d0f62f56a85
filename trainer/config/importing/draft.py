"""Our config while it is filled from others, and what becomes of each of their keys.

A key is carried over, or has no effect on what is trained, or is lost: then the config does not train the same. The
first that knows a key decides: the table of its tool (``rules.py``); ``foreign.yaml``, by whose answer a value is
copied, turned round or replaced; our own key of the same name, where the tool means the same by it. What none knows is
lost, and so is a value that our check refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

from deepstow.trainer.config.check import check, elsewhere, known_keys
from deepstow.trainer.config.importing.read import NAMES, Given, Source
from deepstow.trainer.config.sections import SECTIONS
from deepstow.trainer.config.yaml_file import Fault, Key, error_line, one_line, parse, shown

LOST = "lost"  # in the outcome of a rule: why the key does not train the same
UNNEEDED = "; remove the line"  # how an answer of foreign.yaml ends where nothing is lost without the key
UNKNOWN = "is no key that is known here; correct it, or leave it out if it does nothing"
# Whose names of foreign.yaml count for a file of each.
HUGGING_FACE = ("Hugging Face", "older Hugging Face", "run_clm", "FSDP")
FRAMEWORKS = {
    "deepspeed": ("DeepSpeed",),
    "accelerate": ("Accelerate", "torchrun", "DeepSpeed", *HUGGING_FACE),
    "axolotl": ("Axolotl", *HUGGING_FACE),
    "llamafactory": ("LLaMA-Factory", "TRL", *HUGGING_FACE),
    "trl": ("TRL", *HUGGING_FACE),
    "transformers": ("TRL", *HUGGING_FACE),
}
# Our sections and keys outside of training that mean the same there, under the same name.
LORA = ("model.lora.lora_", "model.lora.use_", "model.lora.loraplus_", "model.trust_remote_code", "model.attn_")
DATA = ("data.max_length", "data.packing", "data.completion_only_loss", "data.assistant_only_loss")
SAME = {
    "deepspeed": ("training.gradient_accumulation_steps",),
    "accelerate": ("training.gradient_accumulation_steps",),
    "axolotl": ("training.", *LORA, "data.streaming"),
    "llamafactory": ("training.", *LORA),
    "trl": (
        "training.",
        *LORA,
        *DATA,
        "data.streaming",
        "data.chat_template_path",
        "model.dtype",
        "model.quantization_config.bnb_",
    ),
    "transformers": ("training.", *LORA, *DATA, "model.dtype", "model.quantization_config.bnb_"),
}


class Nothing(str):
    """The outcome of a rule: why the key has no effect on what is trained."""


class Value(NamedTuple):
    """A value of ours, what it was, and the key that it was (none: it follows from several, or is a default)."""

    value: Any
    said: str
    given: Given | None = None


@dataclass
class Draft:
    """Values by our dotted keys. ``lost`` changes what is trained, ``spare`` does not."""

    sources: list[Source]
    values: dict[str, Value] = field(default_factory=dict)
    lost: list[Fault] = field(default_factory=list)
    spare: list[Fault] = field(default_factory=list)
    ranks: int | None = None

    @property
    def trains(self) -> bool:
        """Whether a source says how to train."""
        return any(source.trains for source in self.sources)

    def of(self, target: str) -> Any:
        """The value of our key so far, or None."""
        return self.values[target].value if target in self.values else None

    def default(self, target: str, value: Any, source: Source) -> None:
        """Write what holds in the source, if nothing else is written."""
        self.values.setdefault(target, Value(value, f"default of {NAMES[source.kind]}"))

    def put(self, target: str, value: Any, given: Given, wins: bool = False) -> None:
        """Write our key. If another source wrote another value, that one stays and this one is lost, unless this one
        ``wins`` there, too.
        """
        value, words = _settled(target, value)
        before = self.values.get(target)
        if words is not None:
            self.lose(given, f"{target} {words}")
            return
        if wins and before and before.given and before.value != value:
            self.need_not(before.given, f"{given.where}: {given.name} is in force there, and that is written")
        if wins or before is None or before.given is None:
            as_written = value == given.value or isinstance(given.value, list | dict)
            was = given.name if as_written else f"{given.name} = {shown(given.key, given.value)}"
            self.values[target] = Value(value, was, given)
        elif before.value != value:
            self.lose(
                given, f"{before.given.where}: {before.given.name} is {shown((), before.value)}, and that is written"
            )

    def lose(self, given: Given, why: str) -> None:
        """Name what does not train the same; ``why`` with a cure."""
        self.lost.append(Fault(given.key, given.value, why, given.where))

    def need_not(self, given: Given, why: str) -> None:
        """Name what has no effect on what is trained."""
        self.spare.append(Fault(given.key, given.value, why, given.where))

    def carry(self, source: Source, rules: Mapping[str, Rule], wins: Collection[str]) -> None:
        """Every key of a source. ``auto`` of DeepSpeed and Accelerate is what other keys say."""
        for given in _parts(Given(source, (), source.tree), rules):
            rule = rules.get(given.name)
            if given.value in (None, "", [], {}) or (given.value == "auto" and not source.trains):
                continue
            try:
                outcome = rule(given, self) if rule else self._translated(given)
            except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
                outcome = "is of another kind than is read there"
            if isinstance(outcome, dict) and "$" in str(given.value) and not source.locations:
                outcome = "is a variable of the shell; write its value"
            if isinstance(outcome, Nothing):
                self.need_not(given, outcome)
            for target, value in outcome.items() if isinstance(outcome, dict) else [(LOST, outcome)]:
                if target == LOST and value and not isinstance(value, Nothing):
                    self.lose(given, value)
                elif target != LOST and value is not None:
                    self.put(target, value, given, wins=given.name in wins)

    def _translated(self, given: Given) -> dict[str, Any] | str | None:
        """The outcome by foreign.yaml, or by our own name."""
        answer = _answer(given)
        target, _, remark = (answer or _own(given) or "").partition("; ")
        if answer and answer.endswith(UNNEEDED):
            return Nothing(answer.removesuffix(UNNEEDED))
        if remark == "with the opposite meaning":
            return {target: not given.value}
        if answer and given.value is False:
            return None  # off, as without it
        if not _is_ours(target) or (remark and not remark.startswith("write ")):
            return answer or UNKNOWN
        return {target: parse(remark.removeprefix("write "), "")[0] if remark else given.value}

    def tree(self) -> dict[str, Any]:
        """The sections as plain values, in the order of our keys."""
        tree: dict[str, Any] = {}
        order = ["task", *known_keys(), *self.values]
        for target in sorted(self.values, key=order.index):
            *sections, name = target.split(".")
            reduce(lambda inner, section: inner.setdefault(section, {}), sections, tree)[name] = self.of(target)
        return tree

    def text(self, command: str) -> str:
        """The config file, with what each key was, and the remarks at its end."""
        of = ", ".join(f"{source.file} ({NAMES[source.kind]})" for source in self.sources)
        lines = [f"# Made by deepstow import of {of}. Start it with:", f"#   {command}", *self._lines(self.tree(), ())]
        return "\n".join((*lines, *(f"# {line}".rstrip() for line in self.remarks()))) + "\n"

    def _lines(self, tree: dict[str, Any], at: Key) -> Iterator[str]:
        for name, value in tree.items():
            if value_here := self.values.get(".".join((*at, name))):
                origin = f"{value_here.given.where}: " if value_here.given else ""
                yield f"{'  ' * len(at) + one_line(name, value):<47} # {origin}{value_here.said}"
            else:
                yield f"{'  ' * len(at)}{name}:"
                yield from self._lines(value, (*at, name))

    def remarks(self) -> Iterator[str]:
        """What does not train the same, what has no effect on that, and what our check says of the rest."""
        if self.lost:
            yield from ("", *map(differs, self.lost))
        if self.spare:
            yield from ("", "No effect on what is trained:")
        reasons = [(fault.location.file, fault.what) for fault in self.spare]
        for reason in dict.fromkeys(reasons):
            names = (".".join(fault.key) for fault, of in zip(self.spare, reasons, strict=True) if of == reason)
            yield f"  {reason[0]}: {', '.join(names)}: {reason[1]}"
        if faults := check(self.tree()):
            yield from ("", "Still to be written or changed:")
            yield from (f"  {error_line(fault.key, fault.value, fault.what)}" for fault in faults)


# The outcome: ours, by key; or why it does not train the same; or Nothing, and why; or None, which is nothing to say.
Rule = Callable[[Given, Draft], dict[str, Any] | str | None]


def _parts(given: Given, rules: Mapping[str, Rule]) -> Iterator[Given]:
    """The keys to carry over: mappings are opened, unless a rule or a key of ours takes them whole."""
    is_leaf = given.key and (given.name in rules or given.name.endswith(("_kwargs", "liger_kernel_config")))
    if isinstance(given.value, dict) and given.value and not is_leaf:
        for name in given.value:
            yield from _parts(given.at(name), rules)
    elif given.key:
        yield given


def _is_ours(target: str) -> bool:
    return target.partition(".")[0] in {*SECTIONS, "strategies"}


def differs(fault: Fault) -> str:
    """One line about a key that is not carried over."""
    return f"{fault.location}: does not train the same: {error_line(fault.key, fault.value, fault.what)}"


def _answer(given: Given) -> str | None:
    """What foreign.yaml says of a key; or of the section that it is in, if that is a remark."""
    names = [".".join(given.key[:depth]) for depth in range(len(given.key), 0, -1)]
    entries = [(name, *elsewhere()[name]) for name in names if name in elsewhere()]
    answers = [(name, answer) for name, whose, answer in entries if whose in FRAMEWORKS[given.source.kind]]
    return next((answer for name, answer in answers if name == names[0] or not _is_ours(answer)), None)


def _own(given: Given) -> str | None:
    """Our key of the same name, if the tool means the same by it."""
    names = (key for key in known_keys() if key.startswith(SAME[given.source.kind]))
    return next((key for key in names if key.endswith(f".{given.name}")), None) if len(given.key) == 1 else None


def _settled(target: str, value: Any) -> tuple[Any, str | None]:
    """The value as our check takes it: as it is, or 500.0 for 500, x for [x], "1e-4" for 1e-4. Else what it says."""
    key, words = tuple(target.split(".")), []
    readings = [value, *(value if isinstance(value, list) and len(value) == 1 else [])]
    if isinstance(value, float) and value.is_integer():
        readings.append(int(value))
    if isinstance(value, str):
        readings += [parse(value, "")[0], [item.strip() for item in value.split(",")]]
    elif not isinstance(value, list | dict):
        readings.append(str(value))
    for reading in readings:
        tree = reduce(lambda inner, name: {name: inner}, reversed(key), reading)
        faults = [fault.what for fault in check(tree, whole=False) if fault.key[:2] == key[: len(fault.key)][:2]]
        if not faults:
            return reading, None
        words += faults
    return value, words[0]
