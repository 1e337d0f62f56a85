"""What is different between tasks, each in its class: which columns a row needs, which of Transformers' classes makes
the model, which Trainer trains it with which arguments, and what its forward computes.

The trainers, losses and collators are those of Transformers and TRL; nothing of them is written again. ``sft`` and
``pretrain`` predict the next token of rows that come from ``trainer/data/formats.py``.

Invariant. A run trains what the same Trainer alone trains on the same rows, to the last bit.

Refused: strategies that cut the layers of language models for other tasks; what a task's own file says.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from deepstow.strategies.core.protocol import Refusal, is_older
from deepstow.trainer.registry import Registry, needed
from deepstow.trainer.values import Found, Values

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import EvalPrediction, PretrainedConfig, PreTrainedTokenizerBase

    from deepstow.trainer.config.sections import RunConfig

READS_MODULES = (5, 18)  # the release of Transformers that loads what is trained in full beside adapters
WITH_HEAD = ("SEQ_CLS", "TOKEN_CLS")  # tasks of peft whose new heads it trains in full
MASKED = -100  # a label that is not trained
MULTIPLE = 8  # batches are padded to a multiple of it

Saved = Callable[[str], Path | None]  # from the name of a file to the file of the saved model, if it has one


class Field(NamedTuple):
    """A column of the data: its name here, the types that it may have, and whether each row needs it."""

    name: str
    kinds: tuple[type, ...]  # empty: the task looks at them
    required: bool = True
    chats: bool = False  # a list in it is of messages


class Task:
    """What can be learned.

    Attributes:
        name: in a config; a task from outside is given the one that it is used by.
        fields: columns of a row; empty if they are those of language models.
        model_class: dotted name of the class.
        trainer, arguments: dotted names of classes, or the classes.
        labels: those of its models, if it has always the same.
        plain: its rows are text, without answers that alone are trained on.
        keys: dotted keys of a config that not every task has, and this one does.
        metrics: what its evaluations give; empty if that is not known.
        own_loss: what evaluations say of a loss that is not the model's own, and takes no option of it; empty: it is.
        quantised: a base in few bits has been compared with the stock Trainer.
        adapters: peft's name of the task.
        adds_adapters: the Trainer wraps the model in adapters, and not the run.
        runs_once: a loss runs the model's forward once, by itself.
        has_reference: the loss compares the model with what it was before training.
        drops_columns: the Trainer leaves out what rows have and forward does not take.
        pipeline_tag: of the model card.
    """

    name: str
    fields: tuple[Field, ...] = ()
    model_class = "transformers.AutoModelForCausalLM"
    trainer: str | type = "transformers.Trainer"
    arguments: str | type = "transformers.TrainingArguments"
    keys: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    plain = False
    metrics: tuple[str, ...] = ()
    own_loss = ""
    quantised = False
    adapters = "CAUSAL_LM"
    adds_adapters = False
    runs_once = True
    has_reference = False
    drops_columns = False  # the collator takes what it needs
    pipeline_tag = "text-generation"

    def __init__(self) -> None:
        if not self.language and not all(isinstance(field, Field) for field in self.fields or ("",)):
            raise TypeError("fields must name the columns, as in fields = (Field('words', (list,)),)")

    @property
    def language(self) -> bool:
        """Whether it predicts the next token of rows of text."""
        return isinstance(self, Language)

    @property
    def generates(self) -> bool:
        """Whether the model continues a text."""
        return self.model_class.endswith("CausalLM")

    @property
    def has_decoder(self) -> bool:
        """Whether a decoder writes a text after an encoder has read one."""
        return self.model_class.endswith("Seq2SeqLM")

    def conflicts(self, m: Values, d: Values, t: Values) -> Found:
        """Keys of the sections ``model``, ``data`` and ``training`` that cannot be combined, and what would work."""
        yield from ()

    def sequences(self, config: RunConfig) -> int:
        """Sequences of a row in one forward."""
        return 1

    def refusals(self, config: RunConfig) -> Iterator[Refusal]:
        """What cannot work, known from the config alone."""
        for name, strategy in config.strategies.items():
            if strategy.divides() and not self.language:
                what = f"divides the layers of language models, and cannot train task {self.name}; leave it out"
                yield Refusal(f"strategies.{name}", strategy.model_dump(exclude_unset=True), what)
        lora = config.model.lora
        in_full = lora and (lora.modules_to_save or self.adapters in WITH_HEAD)
        if lora and in_full and not config.model.merges and is_older("transformers", READS_MODULES):
            what = "Transformers before 5.18 does not load the modules that are trained in full beside adapters"
            yield Refusal(
                "model.lora", lora.model_dump(exclude_unset=True), f"{what}; install 5.18, or write export: merged"
            )

    def refuses_model(self, config: RunConfig, model: PretrainedConfig, saved: Saved) -> Iterator[Refusal]:
        """What cannot work with this model, known from its configuration and other small files of a ``saved`` one."""
        yield from ()

    @needed
    def features(
        self, rows: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, model: PretrainedConfig, data: Any
    ) -> list[dict[str, Any] | str]:
        """What the Trainer is given of each of some rows, or a line about what is wrong. ``data``: the section. Raise
        DataError for what is no matter of a row.
        """
        raise NotImplementedError

    def note(self, columns: Collection[str]) -> str:
        """A line about how rows with these fields are read; empty if there is nothing to say."""
        return ""

    def cure(self, rows: Iterable[Mapping[str, Any]], model: PretrainedConfig) -> str:
        """The one line for rows that are refused, if the model is what is wrong with them; empty otherwise."""
        return ""

    def name_tokens(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write into the model's config which tokens its forward has to know."""

    def complete(self, given: dict[str, Any], config: RunConfig) -> dict[str, Any]:
        """The keyword arguments for ``arguments``, from those that are the same for all tasks."""
        return {**given, "remove_unused_columns": self.drops_columns}

    def counts_items(self, model: Any) -> bool:
        """Whether forward divides its loss by a number of items that it is given, so that a step's loss is the mean
        over all of them. Else it is the mean of its micro-batches. By default models that continue a text do.
        """
        return self.generates

    @needed
    def options(self, model: Any, tokenizer: PreTrainedTokenizerBase, config: RunConfig) -> dict[str, Any]:
        """Further keyword arguments for ``trainer``."""
        raise NotImplementedError

    # --- for planning --------------------------------------------------------------------------------------------

    def adapted(self, model: Any, config: RunConfig, adapt: Callable[[Any], Any]) -> Any:
        """What ``adapt`` makes of ``model``, in the dtypes that the Trainer gives its weights."""
        return adapt(model)

    def targets(self, ids: Tensor, config: RunConfig) -> dict[str, Any]:
        """What forward takes besides tokens of this shape."""
        return {"labels": ids}

    def forward(self, model: Any, config: RunConfig) -> Callable[..., Any]:
        """One forward with its loss, as the Trainer calls ``model``."""
        run: Callable[..., Any] = model
        return run

    # --- for the export's check ----------------------------------------------------------------------------------

    def probe(self, ids: Tensor) -> dict[str, Any]:
        """The keyword arguments of a forward that gives logits, for one row of tokens."""
        return {"input_ids": ids}


TASKS: Registry[Task] = Registry(Task, "deepstow.tasks", "deepstow.trainer.tasks")
OF_TOKENS = ("loss", "perplexity", "tokens")  # what an evaluation of each token's loss gives


@TASKS.add
class Language(Task):
    """Prediction of the next token."""

    name = "sft"
    keys = (
        "data.datasets",
        "data.packing",
        "data.excess_length_strategy",
        "data.completion_only_loss",
        "data.assistant_only_loss",
        "data.streaming",
        "data.format",
    )
    metrics = OF_TOKENS
    quantised = True


@TASKS.add
class Pretrain(Language):
    """The same on plain text."""

    name = "pretrain"
    plain = True


LANGUAGE = Language()
PROBE_TOKENS = 32  # of the row that an export is compared on
PROBED = "forward, of what probe returns,"  # who is blamed for what a task from outside probes with


def takes_no_count(model: Any) -> None:
    """Have Transformers' Trainer take the mean of a step's micro-batches, for a loss that does not count its items."""
    getattr(model, "get_base_model", lambda: model)().accepts_loss_kwargs = False


def token_types(model: Any, config: RunConfig, ids: Tensor) -> dict[str, Tensor]:
    """The token types of ``ids`` without values, if the forward of ``model`` takes any."""
    takes = inspect.signature((model.get_base_model() if config.model.lora else model).forward).parameters
    return {"token_type_ids": ids} if "token_type_ids" in takes else {}


def loaded(dotted: str | type) -> Any:
    """The class of a dotted name; a class is one already."""
    if isinstance(dotted, type):
        return dotted
    module, _, name = dotted.rpartition(".")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are importing from 'trl.experimental'")
        return getattr(import_module(module), name)


def scores(outputs: Any) -> Tensor:
    """The logits of a forward; of a model without a head what its last layer says of each token."""
    logits: Tensor = outputs.logits if "logits" in outputs else outputs.last_hidden_state
    return logits


def losses_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Per sequence: summed negative log-likelihood and number of tokens. [B, S, V], [B, S] -> [B, 2]

    Logits are cast to fp32 by chunks of rows: they are the largest tensor of an evaluation.
    """
    import torch

    from deepstow.strategies.engine.forward.chunked_loss import losses_of_rows

    losses = torch.stack([losses_of_rows(*pair, MASKED).sum() for pair in zip(logits, targets, strict=True)])
    return torch.stack([losses, targets.ne(MASKED).sum(dim=1).float()], dim=1)


def token_losses(logits: Tensor | tuple[Any, ...], labels: Tensor) -> Tensor:
    """``losses_of`` the next tokens. Other outputs may come with the logits, as a router's loss does, before them."""
    outputs = logits if isinstance(logits, tuple) else (logits,)
    scored = next(output for output in outputs if getattr(output, "ndim", 0) == 3)
    return losses_of(scored[:, :-1], labels[:, 1:])


def mean_over_tokens(prediction: EvalPrediction) -> dict[str, float]:
    """Metrics of an evaluation; Hugging Face puts its prefix before them, and this loss in the place of its own."""
    rows: Any = prediction.predictions  # what was made of each sequence: summed loss and number of tokens, [N, 2]
    loss, tokens = rows.astype("float64").sum(axis=0)
    return {"loss": float(loss / tokens) if tokens else math.nan, "tokens": int(tokens)}


def only_language(config: RunConfig, what: str) -> None:
    """Raise ConfigError unless the task of ``config`` predicts the next token, as ``what`` needs."""
    if not config.chosen_task.language:
        raise config.error("task", config.task, f"{what} is for sft and pretrain only")
