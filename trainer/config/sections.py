"""The sections of a config as types: ``model``, ``data``, ``training`` and ``strategies``.

Name, type, range, default and meaning of each key are stated once, here and in ``trainer/config/arguments.py``; error
lines, the JSON schema and ``docs/config.md`` are derived from that. A strategy's section has the fields of its class.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field, PrivateAttr, SerializeAsAny, create_model, model_validator

from deepstow.strategies.core.protocol import Strategy
from deepstow.strategies.core.resume import on_resume
from deepstow.trainer.config.arguments import (
    Allowed,
    Count,
    NonEmpty,
    Ratio,
    Reference,
    Section,
    TrainingSection,
    free,
    one_of,
    option,
)
from deepstow.trainer.config.conflicts import MAPPED, conflicts
from deepstow.trainer.config.recipe import RECIPES, Recipe
from deepstow.trainer.config.yaml_file import COMMAND_LINE, Key, Location, dotted, error_line, location_of, write
from deepstow.trainer.errors import ConfigError, UserError
from deepstow.trainer.formats.format import FORMATS, Format
from deepstow.trainer.formats.reader import READERS, Reader
from deepstow.trainer.registry import Registry, Unusable
from deepstow.trainer.tasks.task import TASKS, Task
from deepstow.trainer.values import WRONG, Values

T = TypeVar("T")
Share = Annotated[float, Field(ge=0, le=0.5)]
Dtype = Literal["float32", "bfloat16", "float16"]
Attention = Literal["auto", "eager", "sdpa", "sdpa_varlen", "flash_attention_2", "flash_attention_3", "flex_attention"]
Problem = Literal["single_label_classification", "multi_label_classification", "regression"]
Excess = Literal["truncate", "drop", "split"]
if TYPE_CHECKING:
    TaskName = str
    FormatName = str
else:
    NOT_BUILT = dict.fromkeys(("ppo", "grpo", "rloo"), "not built: training that generates its own rows")
    TaskName, FormatName = one_of(TASKS, NOT_BUILT), one_of(FORMATS)
Mapped = Annotated[dict[NonEmpty, NonEmpty], Allowed(MAPPED)]


class TrainTokenizer(Section):
    """A tokenizer trained on the run's own data before the first step."""

    train: Literal["bpe"] = Field(description="Kind of tokenizer: byte-level BPE.")
    vocab_size: Annotated[int, Field(ge=300, le=10_000_000)] = Field(description="Entries of the vocabulary.")


class LoraSection(Section):
    """Low-rank adapters; names as in peft.LoraConfig (task_type follows from the task), but for the last two."""

    r: Count = option("Rank of the adapters.", 8)
    lora_alpha: Count = option("Scale of the adapters; they are multiplied by lora_alpha / r.", 16, resume="model")
    lora_dropout: Ratio = option("Dropout before the adapters.", 0.0, resume="dropout")
    target_modules: Annotated[
        list[NonEmpty] | NonEmpty | None, Allowed("a list of module names, or a pattern, or all-linear")
    ] = option("Modules that get adapters; not set means peft's choice for the model.")
    bias: Literal["none", "all", "lora_only"] = option("Which biases are trained.", "none")
    modules_to_save: list[NonEmpty] | None = option("Modules trained in full besides.")
    use_rslora: bool = option("Scale by lora_alpha / sqrt(r).", False, resume="model")
    use_dora: bool = option("Train magnitude and direction apart (DoRA).", False)
    loraplus_lr_ratio: Annotated[float, Field(ge=1)] | None = option(
        "Learning rate of B of each adapter, in multiples of that of A (LoRA+, as PEFT has it).", resume="said"
    )
    export: Literal["adapter", "merged"] | None = free(
        "What the run leaves: the adapters, or a model with them in its weights, dequantised ones among them; not set "
        "means adapters if model.name_or_path says where their base is, else merged."
    )


class QuantizationSection(Section):
    """Base weights of linear layers in 4 or 8 bits, frozen under adapters; names as in transformers.BitsAndBytesConfig.

    Needs bitsandbytes. The base is quantised while it is loaded.
    """

    load_in_4bit: bool = option("4 bits per weight (QLoRA).", False)
    load_in_8bit: bool = option("8 bits per weight (LLM.int8).", False)
    bnb_4bit_quant_type: Literal["fp4", "nf4"] = option("Which 16 values 4 bits stand for; nf4 is QLoRA's.", "fp4")
    bnb_4bit_use_double_quant: bool = option("Quantise the scales of 4-bit weights as well.", False)
    bnb_4bit_compute_dtype: Dtype = option("Type in which layers with 4-bit weights compute.", "float32")
    llm_int8_threshold: Annotated[float, Field(ge=0)] = option(
        "Columns of inputs with larger values are computed in 16 bits, beside 8-bit weights.", 6.0
    )
    llm_int8_skip_modules: list[NonEmpty] | None = option(
        "Modules that are not quantised, of either width; not set means the head."
    )


class StridedSection(Section):
    """Blocks at equal distances, as in the Sparse Transformer."""

    block: Count = Field(description="Tokens of a block; the last block is the token itself and those before it.")
    every: Annotated[int, Field(ge=2)] = Field(description="Of the blocks back, each so-many-th is seen.")


class RandomSection(Section):
    """Blocks chosen at random for each block of tokens, as in BigBird: the same in all layers, rows and runs."""

    block: Count = Field(description="Tokens of a block, counted from the document's first token.")
    number: Count = Field(description="Blocks that are chosen among those before; some may be the same.")
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = option("What they are chosen by.", 0)


class AttentionMaskSection(Section):
    """What each token sees of its document besides itself: a block-sparse mask (deepstow docs attention)."""

    window: Count = Field(description="Last tokens that are seen, itself among them.")
    sink: Annotated[int, Field(ge=0)] = option("First tokens of the document that all tokens see (attention sinks).", 0)
    strided: StridedSection | None = option("Also every so-many-th block back.")
    random: RandomSection | None = option("Also blocks chosen at random; not with data.packing.")

    @property
    def named(self) -> dict[str, Any]:
        """What is not left out."""
        return self.model_dump(exclude_none=True)


class ModelSection(Section):
    """Which model is trained: exactly one of name_or_path and config."""

    name_or_path: NonEmpty | None = option("Folder or hub name of a pretrained model.", resume="model")
    config: dict[str, Any] | None = option(
        "Hugging Face model config (model_type, hidden_size, ...): random weights.", resume="architecture"
    )
    tokenizer: Annotated[
        NonEmpty | TrainTokenizer | None, Allowed("a name or folder, or a mapping {train: bpe, vocab_size: N}")
    ] = option("Name or folder, or one to train; not set means the model's own.", resume="fixed")
    dtype: Dtype = option(
        "Type in which the weights are loaded; see also training.bf16.", "float32", resume="precision"
    )
    attn_implementation: Attention | None = option(
        "Attention kernel (deepstow docs attention); auto: the best one here; not set means the model's default.",
        resume="kernels",
    )
    attention_mask: AttentionMaskSection | None = option(
        "Fewer tokens than all before it (deepstow docs attention); not set means all, or what the model says.",
        resume="model",
    )
    trust_remote_code: bool = free("Run Python code that comes with the model. It can do anything you can.", False)
    labels: Annotated[
        list[NonEmpty] | None, Allowed("a list of names, all different, as in [good, bad] or ['0', '1']")
    ] = option(
        "classification: the labels, in the order of their numbers; not set means the saved model's own.",
        resume="fixed",
    )
    problem_type: Problem | None = option(
        "classification: one label per row, several, or numbers; not set means the saved model's own, or one label.",
        resume="fixed",
    )
    lora: LoraSection | None = option("Train low-rank adapters instead of all weights; needs peft.", resume="fixed")
    adapter: NonEmpty | None = option(
        "Folder of a saved LoRA adapter that training goes on with; it says model.lora, its base and its tokenizer.",
        resume="model",
    )
    quantization_config: QuantizationSection | None = option(
        "Base weights in 4 or 8 bits under model.lora.", resume="model"
    )

    @property
    def merges(self) -> bool:
        """Whether the export has adapters in its weights."""
        if self.lora is None:
            return False
        return self.name_or_path is None if self.lora.export is None else self.lora.export == "merged"

    @property
    def lr_ratio(self) -> float | None:
        """Of LoRA+, if adapters are trained with it."""
        return None if self.lora is None else self.lora.loraplus_lr_ratio


class DatasetSection(Section):
    """One of several data sets. What is not set is as in data."""

    path: NonEmpty = Field(description="As data.path.")
    name: NonEmpty | None = option("As data.name.")
    split: NonEmpty = option("As data.split.", "train")
    columns: Mapped = option("As data.columns.", {})
    format: FormatName | None = option("As data.format.")
    reader: Reference | None = option("As data.reader.")
    limit: Count | None = option("As data.limit.")
    completion_only_loss: bool | None = option("As data.completion_only_loss.")
    assistant_only_loss: bool | None = option("As data.assistant_only_loss.")
    weight: Annotated[float, Field(gt=0)] | None = option(
        "How often it is taken: 0.5 takes half of its tokens, 2.5 all of them twice and half once more; not set: 1."
    )
    token_share: Annotated[float, Field(gt=0, lt=1)] | None = option(
        "Its share of all tokens, for the largest mix in which no row is taken twice; for all data sets or none."
    )


class DataSection(Section):
    """What it is trained on: exactly one of path and datasets."""

    path: NonEmpty | None = option("A file, a folder, a hub name, or pydoc: the interpreter's own documentation.")
    datasets: Annotated[list[DatasetSection], Field(min_length=1)] | None = option("Several data sets, mixed.")
    name: NonEmpty | None = option("Subset of a hub data set; for pydoc: text, pairs, labels, preferences or ratings.")
    split: NonEmpty = option("Split to train on.", "train")
    eval_path: NonEmpty | None = option("Evaluation data apart from path, in the same forms.")
    eval_split: NonEmpty | None = option("Split to evaluate on.")
    eval_fraction: Share = option("Share of the training data set aside for evaluation.", 0.0)
    columns: Mapped = option("Our field -> their column, where the two differ.", {})
    format: FormatName | None = option("What the columns mean; not set: what their names say.")
    reader: Reference | None = option("What reads files of another kind (deepstow docs extending).")
    limit: Count | None = option("Rows that are read, from the first on; not set: all.")
    max_length: Annotated[int, Field(ge=8)] = option("Tokens per sample.", 1024, resume="max_length")
    excess_length_strategy: Excess | None = option(
        "What becomes of longer samples; not set: text is split, others are truncated.", resume="max_length"
    )
    max_target_length: Annotated[int, Field(ge=2)] | None = option(
        "seq2seq: tokens of a completion; longer ones are cut; not set means max_length.", resume="max_length"
    )
    packing: bool = option("Fill each sequence with several samples; they do not mix.", False, resume="packing")
    completion_only_loss: bool | None = option("Loss on completions only; not set: yes for prompt/completion data.")
    assistant_only_loss: bool = option("Loss on the assistant's turns of messages only.", False)
    chat_template: NonEmpty | None = option(
        "One of chatml, zephyr, vicuna, a .jinja file, or the template itself; not set means the tokenizer's."
    )
    chat_template_path: NonEmpty | None = option("Jinja chat template in a file: TRL's name for chat_template.")
    streaming: bool = option("Read while training; needs rows, or training.max_steps.", False)
    rows: Count | None = option("streaming: how many rows a pass over the data has, as they are trained on.")
    num_proc: Count | None = free("Processes that prepare the data.")

    _folders: tuple[Path, ...] = PrivateAttr(default=())  # in which modules are looked for first

    def asked_format(self) -> Format | None:
        """The format that the config names. Raise ConfigError if it cannot be used."""
        return None if self.format is None else _found(FORMATS, "data.format", self.format, self._folders)

    def asked_reader(self) -> Reader | None:
        """What reads the files, if the config names it. Raise ConfigError if it cannot be used."""
        return None if self.reader is None else _found(READERS, "data.reader", self.reader, self._folders)

    def __eq__(self, other: object) -> bool:
        """Equal if all keys are; where they were written does not matter."""
        return isinstance(other, DataSection) and dict(self) == dict(other)

    __hash__ = None  # type: ignore[assignment]  # it holds mappings

    def parts(self) -> list[DataSection]:
        """A section for each data set: this one, if there are no several."""
        if self.datasets is None:
            return [self]
        keys = type(self).model_fields
        sections = [{key: value for key, value in item if value is not None and key in keys} for item in self.datasets]
        return [self.model_copy(update={"datasets": None, **values}) for values in sections]


def _found(registry: Registry[T], key: str, name: str, folders: tuple[Path, ...]) -> T:
    try:
        return registry.found(name, folders)
    except Unusable as error:
        raise ConfigError(error_line(tuple(key.split(".")), name, str(error))) from None


SECTIONS: Mapping[str, type[Section]] = {"model": ModelSection, "data": DataSection, "training": TrainingSection}
# What is not done without them.
OPTIONAL: Mapping[str, type[Section]] = {name: recipe.section for name, recipe in RECIPES.items()}


class _Known(Section):
    """The sections without those of recipes."""

    task: TaskName = option(
        "What is learned; deepstow docs tasks has the columns that each needs.", "sft", resume="fixed"
    )
    model: ModelSection
    data: DataSection = Field(json_schema_extra=on_resume("data"))
    training: TrainingSection


if TYPE_CHECKING:
    _WithRecipes = _Known
else:
    _OF_RECIPES = {
        name: (recipe.section | None, Field(default=None, json_schema_extra=on_resume(recipe.resume)))
        for name, recipe in RECIPES.items()
    }
    _WithRecipes = create_model("_WithRecipes", __base__=_Known, **_OF_RECIPES)


class RunConfig(_WithRecipes):
    """Everything that decides a run. ``trainer/config/load.py`` makes it from files; equal configs give equal runs."""

    recipes: dict[NonEmpty, dict[str, Any]] = option(
        "Recipes of your own, by name or as module:Class, with their options (deepstow docs extending).",
        {},
        resume="loss",
    )
    strategies: dict[str, SerializeAsAny[Strategy]] = option("Strategy by name; one that is present is on.", {})

    # Where each key was written; empty for a config built in Python.
    _locations: dict[Key, Location] = PrivateAttr(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        """Equal if all keys are; where they were written does not matter."""
        return isinstance(other, RunConfig) and self.tree() == other.tree()

    __hash__ = None  # type: ignore[assignment]  # it holds mappings

    def note_locations(self, locations: Mapping[Key, Location]) -> RunConfig:
        """This config, after remembering where keys were written, for errors that are found after loading."""
        self._locations.update(locations)
        self.data._folders = self.folders("data")
        return self

    def folders(self, key: str) -> tuple[Path, ...]:
        """Of the file in which a dotted key, or its section, was written, and of the config; empty if it is in none."""
        places = (location_of(tuple(key.split(".")), self._locations), self._locations.get(()))
        files = (Path(place.file) for place in places if place is not None and place.file != COMMAND_LINE)
        return tuple(dict.fromkeys(file.parent for file in files))

    def thing(self, registry: Registry[T], key: str, name: str) -> T:
        """What a dotted key names, by the ``name`` that it has there. Raise ConfigError if it cannot be used."""
        try:
            return registry.found(name, self.folders(key))
        except Unusable as error:
            raise self.error(key, name, str(error)) from None

    @property
    def chosen_task(self) -> Task:
        """The task. Raise ConfigError if it is from outside, and cannot be used."""
        return self.thing(TASKS, "task", self.task)

    def like(self, other: RunConfig) -> RunConfig:
        """This config, with the keys of ``other`` where they were written there."""
        return self.note_locations(other._locations)

    def located(self, key: str, text: str) -> str:
        """``text`` after the file and line of the dotted ``key``, or of the section that it belongs to."""
        location = location_of(tuple(key.split(".")), self._locations)
        return f"{location}: {text}" if location else text

    @contextmanager
    def placing(self) -> Iterator[None]:
        """Lines of errors that are raised inside, and begin with one of our keys, get file and line before it."""
        try:
            yield
        except UserError as error:
            error.rewrite(self._placed)
            raise

    def _placed(self, line: str) -> str:
        match = re.match(r"(\w+)(?:\.(\w+))?[\w.\[\]]*(?=: | = )", line)
        section = {**SECTIONS, **OPTIONAL}.get(match[1]) if match else None
        in_section = match and section and (match[2] is None or match[2] in section.model_fields)
        return self.located(match[0], line) if match and in_section else line

    def error(self, key: str, value: object, what: str) -> ConfigError:
        """The error about the ``value`` of a dotted ``key``, in the same words as those found while loading."""
        return ConfigError(self.located(key, error_line(tuple(key.split(".")), value, what)))

    @property
    def switched_on(self) -> list[Recipe]:
        """The recipes of this run. Raise ConfigError if one is from outside, and cannot be used."""
        built_in = [recipe for name, recipe in RECIPES.items() if getattr(self, name) is not None]
        return built_in + [self.thing(RECIPES, "recipes", name) for name in self.recipes]

    @model_validator(mode="before")
    @classmethod
    def _same_labels(cls, tree: Any) -> Any:
        """The labels of tasks that have always the same: a reward model has one output."""
        task = TASKS.get(str(tree.get("task"))) if isinstance(tree, dict) else None
        if task is not None and task.labels and isinstance(tree.get("model"), dict):
            return {**tree, "model": {**tree["model"], "labels": [*task.labels]}}
        return tree

    @model_validator(mode="after")
    def _no_conflicts(self) -> RunConfig:
        """Check combinations as ``load`` does, for configs that are built in Python."""
        faults = conflicts(flat(self.tree()))
        if faults:
            raise ValueError("; ".join(f"{dotted(fault.key)}: {fault.what}" for fault in faults))
        return self

    def tree(self) -> dict[str, Any]:
        """All sections as plain values, without keys that are not set."""
        sections: dict[str, Any] = {"task": self.task} if self.task != "sft" else {}
        present = [*SECTIONS, *(name for name in OPTIONAL if getattr(self, name) is not None)]
        sections |= {name: _without_none(getattr(self, name)) for name in present}
        sections |= {"recipes": self.recipes} if self.recipes else {}
        return sections | {"strategies": {name: _without_none(item) for name, item in self.strategies.items()}}

    def dump(self) -> str:
        """The config as YAML; ``load`` reads it back to an equal one."""
        return write(self.tree())


def _without_none(section: Section | Strategy) -> dict[str, Any]:
    """Only the fields that are set. Values inside free mappings (model.config) are kept, null included."""
    plain = section.model_dump()
    return {
        name: _plain(getattr(section, name), plain[name])
        for name in type(section).model_fields
        if plain.get(name) is not None
    }


def _plain(value: object, plain: Any) -> Any:
    if isinstance(value, Section):
        return _without_none(value)
    sections = isinstance(value, list) and any(isinstance(item, Section) for item in value)
    return [_without_none(item) for item in value] if isinstance(value, list) and sections else plain


def flat(tree: Mapping[str, Any], wrong: Iterable[Key] = ()) -> dict[str, Values]:
    """Every key of all sections with its value or default, as ``conflicts`` takes them; WRONG if it is in ``wrong``."""
    strategies = tree.get("strategies")
    values = {"strategies": Values(strategies if isinstance(strategies, dict) else {})}
    bad = {key[:2] for key in wrong}
    values["task"] = Values(name=WRONG if ("task",) in bad else tree.get("task", "sft"))
    for name, model in {**SECTIONS, **OPTIONAL}.items():
        values[name] = Values()
        if name in OPTIONAL and not isinstance(tree.get(name), dict):
            continue  # a section that is not there has no values
        for key, field in model.model_fields.items():
            is_bad = (name,) in bad or (name, key) in bad
            values[name][key] = WRONG if is_bad else tree.get(name, {}).get(key, field.default)
    return values
