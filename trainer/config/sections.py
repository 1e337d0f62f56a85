"""The sections of a config as types: ``model``, ``data``, ``training`` and ``strategies``.

Name, type, range, default and meaning of each key are stated once, here and in ``trainer.config.arguments``. Error
lines (``trainer.config.wording``), the JSON schema (``trainer.config.load``) and ``docs/config.md``
(``trainer.config.doc``) are derived from that. The section of a strategy has the fields of the class in its file.

Refused: unknown keys, conversions (the text "8" is not a number), and the combinations in ``trainer.config.conflicts``.
Only the file is checked here; whether a path exists or a model has a certain module is checked later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, PrivateAttr, SerializeAsAny, model_validator

from strategies.core.protocol import Strategy
from trainer.config.arguments import Count, NonEmpty, Ratio, Section, TrainingSection, unset
from trainer.config.conflicts import conflicts
from trainer.config.wording import MISSING, Allowed
from trainer.config.yaml_file import Key, Location, dotted, error_line, location_of, write
from trainer.errors import ConfigError

Attention = Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"]
Columns = Literal["text", "prompt", "completion", "messages", "instruction", "input", "output", "input_ids", "labels"]


class TrainTokenizer(Section):
    """A tokenizer trained on the run's own data before the first step."""

    train: Literal["bpe"] = Field(description="Kind of tokenizer: byte-level BPE.")
    vocab_size: Annotated[int, Field(ge=300)] = Field(description="Entries of the vocabulary.")


class LoraSection(Section):
    """Low-rank adapters; names as in peft.LoraConfig (task_type is always CAUSAL_LM)."""

    r: Count = Field(default=8, description="Rank of the adapters.")
    lora_alpha: Count = Field(default=16, description="Scale of the adapters; they are multiplied by lora_alpha / r.")
    lora_dropout: Ratio = Field(default=0.0, description="Dropout before the adapters.")
    target_modules: Annotated[
        list[NonEmpty] | NonEmpty | None, Allowed("a list of module names, or a pattern, or all-linear")
    ] = unset("Modules that get adapters; not set means peft's choice for the model.")
    bias: Literal["none", "all", "lora_only"] = Field(default="none", description="Which biases are trained.")
    modules_to_save: list[NonEmpty] | None = unset("Modules trained in full besides.")
    use_rslora: bool = Field(default=False, description="Scale by lora_alpha / sqrt(r).")
    use_dora: bool = Field(default=False, description="Train magnitude and direction apart (DoRA).")


class ModelSection(Section):
    """Which model is trained: exactly one of name_or_path and config."""

    name_or_path: NonEmpty | None = unset("Folder or hub name of a pretrained model.")
    config: dict[str, Any] | None = unset("Hugging Face model config (model_type, hidden_size, ...): random weights.")
    tokenizer: Annotated[
        NonEmpty | TrainTokenizer | None, Allowed("a name or folder, or a mapping {train: bpe, vocab_size: N}")
    ] = unset("Name or folder, or one to train; not set means the model's own.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="Type in which the weights are loaded; see also training.bf16."
    )
    attn_implementation: Attention | None = unset("Attention kernel; not set means the model's default.")
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that comes with the model. It can do anything you can."
    )
    lora: LoraSection | None = unset("Train low-rank adapters instead of all weights; needs peft.")


class DataSection(Section):
    """What it is trained on."""

    path: NonEmpty = Field(description="A file, a folder, a hub name, or pydoc: the interpreter's own documentation.")
    name: NonEmpty | None = unset("Subset of a hub data set; for pydoc: text or pairs.")
    split: NonEmpty = Field(default="train", description="Split to train on.")
    eval_path: NonEmpty | None = unset("Evaluation data apart from path, in the same forms.")
    eval_split: NonEmpty | None = unset("Split to evaluate on.")
    eval_fraction: Annotated[float, Field(ge=0, le=0.5)] = Field(
        default=0.0, description="Share of the training data set aside for evaluation."
    )
    columns: Annotated[
        dict[Columns, NonEmpty], Allowed(f"a mapping from our fields ({', '.join(get_args(Columns))}) to columns")
    ] = Field(default={}, description="Our field -> their column, where the two differ.")
    max_length: Annotated[int, Field(ge=8)] = Field(default=1024, description="Tokens per sample; longer ones are cut.")
    packing: bool = Field(default=False, description="Fill each sequence with several samples; they do not mix.")
    completion_only_loss: bool | None = unset(
        "Loss on the completion only; not set means yes for prompt/completion data."
    )
    assistant_only_loss: bool = Field(default=False, description="Loss on the assistant's turns of messages only.")
    chat_template_path: NonEmpty | None = unset("Jinja chat template; else the tokenizer's.")
    streaming: bool = Field(default=False, description="Read while training; needs training.max_steps.")
    num_proc: Count | None = unset("Processes that prepare the data.")


SECTIONS: Mapping[str, type[Section]] = {
    "model": ModelSection,
    "data": DataSection,
    "training": TrainingSection,
}


class RunConfig(Section):
    """Everything that decides a run. ``trainer.config.load`` makes it from files; equal configs give equal runs."""

    model: ModelSection
    data: DataSection
    training: TrainingSection
    strategies: dict[str, SerializeAsAny[Strategy]] = Field(
        default={}, description="Strategy by name; one that is present is on."
    )

    # Where each key was written; empty for a config built in Python.
    _locations: dict[Key, Location] = PrivateAttr(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        """Equal if all keys are; where they were written does not matter."""
        return isinstance(other, RunConfig) and self.tree() == other.tree()

    __hash__ = None  # type: ignore[assignment]  # it holds mappings

    def note_locations(self, locations: Mapping[Key, Location]) -> None:
        """Remember where keys were written, for errors that are found after loading."""
        self._locations.update(locations)

    def like(self, other: RunConfig) -> RunConfig:
        """This config, with the keys of ``other`` where they were written there."""
        self.note_locations(other._locations)
        return self

    def located(self, key: str, text: str) -> str:
        """``text`` after the file and line of the dotted ``key``, or of the section that it belongs to."""
        location = location_of(tuple(key.split(".")), self._locations)
        return f"{location}: {text}" if location else text

    def error(self, key: str, value: object, what: str) -> ConfigError:
        """The error about the ``value`` of a dotted ``key``, in the same words as those found while loading."""
        return ConfigError(self.located(key, error_line(tuple(key.split(".")), value, what)))

    @model_validator(mode="after")
    def _no_conflicts(self) -> RunConfig:
        """Check combinations as ``load`` does, for configs that are built in Python."""
        found = conflicts(flat(self.tree()))
        if found:
            raise ValueError("; ".join(f"{dotted(fault.key)}: {fault.what}" for fault in found))
        return self

    def tree(self) -> dict[str, Any]:
        """All sections as plain values, without keys that are not set."""
        sections: dict[str, Any] = {name: _without_none(getattr(self, name)) for name in SECTIONS}
        return sections | {"strategies": {name: _without_none(item) for name, item in self.strategies.items()}}

    def dump(self) -> str:
        """The config as YAML; ``load`` reads it back to an equal one."""
        return write(self.tree())


def _without_none(section: Section | Strategy) -> dict[str, Any]:
    """Only the fields that are set. Values inside free mappings (model.config) are kept, null included."""
    plain = section.model_dump()
    return {
        name: _without_none(value) if isinstance(value := getattr(section, name), Section) else plain[name]
        for name in type(section).model_fields
        if plain[name] is not None
    }


def flat(tree: Mapping[str, Any], invalid: frozenset[tuple[str, ...]] = frozenset()) -> dict[str, Any]:
    """Dotted key -> value or default, as ``conflicts`` takes them, without the keys under ``invalid``."""
    strategies = tree.get("strategies")
    values: dict[str, Any] = {"strategies": strategies if isinstance(strategies, dict) else {}}
    for name, model in SECTIONS.items():
        section = tree.get(name, {})
        if (name,) in invalid or not isinstance(section, dict):
            continue
        for key, field in model.model_fields.items():
            if not any(bad[:2] == (name, key) for bad in invalid):
                values[f"{name}.{key}"] = section.get(key, MISSING if field.is_required() else field.default)
    return values
