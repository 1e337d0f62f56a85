"""The first config of a task, a model and a card: what ``deepstow init`` writes.

``STARTS`` has the settings of each task: those that its library or the papers use, for one card and a few thousand
rows. The planner then chooses, for the card, the rows of a micro-batch and the strategies that save memory: none where
the run fits without, else the fastest. A model on the hub that cannot be reached leaves the config without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.sizes import human
from deepstow.trainer.config.load import load_tree
from deepstow.trainer.config.sections import ModelSection
from deepstow.trainer.config.yaml_file import COMMAND_LINE, one_line
from deepstow.trainer.data.rows import columns_of
from deepstow.trainer.data.sources import Source, is_on_hub, open_source
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError, first_line, nearest_file
from deepstow.trainer.machine.probe import Machine
from deepstow.trainer.model import build, folder, hub
from deepstow.trainer.model.build import config_of
from deepstow.trainer.planning.fit import FOUR_BITS, Fit, FitRow, fastest
from deepstow.trainer.planning.positions import declared
from deepstow.trainer.run.checkpoints.finished import NAME
from deepstow.trainer.tasks.task import TASKS

Tree = dict[str, Any]
MOST_LABELS = 1000
CHATS = ("messages", "conversations")


class Start(NamedTuple):
    """Where a task starts: rate, epochs, tokens of a row, rows of a step, and at ``least`` of a micro-batch; adapters
    on a base, or on one in 4 bits.
    """

    rate: float
    epochs: int
    length: int = 1024
    batch: int = 8
    least: int = 1
    task: str = ""  # the task of the config; empty: that of the same name
    adapters: bool = False
    in_4_bits: bool = False
    data: Mapping[str, Any] = {}


STARTS: Mapping[str, Start] = {
    "sft": Start(1e-5, 2),
    "lora": Start(2e-4, 2, task="sft", adapters=True),
    "qlora": Start(2e-4, 2, task="sft", adapters=True, in_4_bits=True),
    "pretrain": Start(5e-5, 1, data={"packing": True}),
    "dpo": Start(1e-6, 1),
    "kto": Start(1e-6, 1, least=2),
    "orpo": Start(8e-6, 1),
    "reward": Start(1e-5, 1),
    "classification": Start(2e-5, 3, length=512, batch=16),
    "embedding": Start(2e-5, 1, length=256, batch=16),
    "seq2seq": Start(1e-4, 3, length=512, data={"max_target_length": 256}),
}
NOTES = {
    "task": "deepstow docs tasks",
    "model.name_or_path": "a folder, or a name on the Hugging Face hub",
    "model.dtype": "of the frozen base",
    "model.lora": "what is trained: deepstow docs adapters",
    "model.labels": "in the order of their numbers",
    "data.path": "which forms rows may have: deepstow docs data",
    "data.max_length": "tokens of a row",
    "data.packing": "several texts fill a row; none sees another",
    "data.chat_template": "the model has none of its own",
    "data.assistant_only_loss": "answers are trained on, questions are read",
    "data.eval_fraction": "of the rows, held back for evaluation",
    "training.output_dir": "checkpoints, records and the export",
    "training.per_device_train_batch_size": "rows at once",
    "training.gradient_accumulation_steps": "times these rows make a step",
    "training.warmup_steps": "a share of all steps",
    "training.bf16": "computes in 16 bits",
    "training.fp16": "computes in 16 bits; this card has no bf16",
}


class First(NamedTuple):
    """A config as text, what is said of it, and whether the planner has fitted it."""

    text: str
    said: str
    fitted: bool


class Asked(NamedTuple):
    """What ``deepstow init`` was told."""

    name: str
    model: str
    data: str
    out: Path
    machine: Machine


def first_config(asked: Asked, command: str, say: Callable[[str], None]) -> First:
    """The config, begun by ``command``. Raise UserError for a model or data that cannot be read, or do not go with the
    task.
    """
    with _named(asked.model):
        if not (away := _is_away(asked.model)):
            folder.refuse(asked.model)
            if not (Path(asked.model) / folder.CONFIG).exists() and (export := Path(asked.model) / NAME).is_dir():
                raise ConfigError(f"--model {asked.model}: is the folder of a run; name its export, {export}")
        tree = _tree(asked)
        _look_at(tree)
        if away:
            summary = f"{asked.model} cannot be read here ({away}), so nothing was fitted to the card"
            how = f"deepstow fit --config {quote(str(asked.out))} does so where it can be"
            return First(_text(tree, command, [f"Not fitted to a card: {how}"]), f"{summary}; {how}", False)
        positions = declared(config_of(load_tree(tree)))
        if positions:
            tree["data"]["max_length"] = min(tree["data"]["max_length"], positions)
        say(f"fitting {asked.name} of {asked.model} to {asked.machine.name}")
        row = _fitted(tree, asked.machine, STARTS[asked.name].least)
    answer = _of(row, accelerated=asked.machine.device_kind != "cpu")
    summary = f"{asked.name} of {asked.model} on {asked.machine.name}: {answer}"
    return First(_text(tree, command, [f"On {asked.machine.name} it {answer}."]), summary, row.fits)


@contextmanager
def _named(model: str) -> Iterator[None]:
    """Inside, errors about keys, which nobody has written yet, name the option or the key alone."""
    try:
        yield
    except ConfigError as error:
        written = f"model.name_or_path = {model!r}"
        error.rewrite(lambda line: line.removeprefix(f"{COMMAND_LINE}: ").replace(written, f"--model {model}"))
        raise


def _is_away(model: str) -> str:
    """Why a model can only be on the hub, which cannot be reached; empty if it can be read."""
    build.refuse_missing_folder(ModelSection(name_or_path=model))
    try:
        if Path(model).exists() or hub.file_of(model, folder.CONFIG) is not None:
            return ""
    except OSError as error:  # of a model that is shown to some alone
        return first_line(error)
    return hub.unreachable() or "the hub has no such model, or does not show it without a token"


def _tree(asked: Asked) -> Tree:
    """The settings of the task, as far as model and card do not decide them."""
    start, machine = STARTS[asked.name], asked.machine
    accelerated = machine.device_kind != "cpu"
    half = {"bf16": True} if "bf16" in (machine.peak_flops or {"bf16": 0}) else {"fp16": True}
    model: Tree = {"name_or_path": asked.model}
    if start.adapters:
        model |= {"dtype": "bfloat16"} if half.get("bf16") and accelerated else {}
        model |= {"lora": {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}}
    if start.in_4_bits:
        compute = {"bnb_4bit_compute_dtype": "bfloat16"} if half.get("bf16") and accelerated else {}
        model |= {"quantization_config": FOUR_BITS | compute}
    return {
        "task": start.task or asked.name,
        "model": model,
        "data": {"path": asked.data, "max_length": start.length, **start.data, "eval_fraction": 0.1},
        "training": {
            "output_dir": f"runs/{asked.out.stem}", "learning_rate": start.rate, "num_train_epochs": start.epochs,
            "per_device_train_batch_size": start.batch, "gradient_accumulation_steps": 1, "warmup_steps": 0.05,
            "lr_scheduler_type": "cosine", **(half if accelerated else {}), "logging_steps": 5,
            "eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": 2,
        },
        "strategies": {},
    }  # fmt: skip


def _look_at(tree: Tree) -> None:
    """Complete ``tree`` by what the rows are. Raise DataError if they are not those of the task."""
    data = tree["data"]
    model = tree["model"]
    task = TASKS[tree["task"]]
    if not Path(data["path"]).expanduser().exists():
        return
    source = open_source(data["path"], None, "train", False)
    if task.fields:
        columns = columns_of(task, load_tree(tree).data, source)
        if "model.labels" in task.keys and (labels := _labels(source, columns["label"])):
            model["labels"] = labels
    elif any(column in CHATS for column in source.tables[0].columns):
        data |= {"assistant_only_loss": True} | (
            {} if _has_template(model["name_or_path"]) else {"chat_template": "chatml"}
        )


def _labels(source: Source, column: str) -> list[str]:
    """The labels of the rows, in order; empty if they are numbers to predict, or lists."""
    labels = set[str | int]()
    for row in source.rows([column]):
        value = row.values.get(column) if isinstance(row.values, Mapping) else None
        if isinstance(value, bool) or not isinstance(value, str | int) or len(labels) > MOST_LABELS:
            return []
        labels.add(value)
    return [str(label) for label in sorted(labels, key=lambda each: (isinstance(each, str), each))]


def _has_template(model: str) -> bool:
    """Whether a saved model brings a chat template, as far as its small files say, or may bring one."""
    if (path := hub.file_of(model, "chat_template.jinja")) is not None and path.exists():
        return True
    tokenizer_config = hub.file_of(model, "tokenizer_config.json")
    if tokenizer_config is None or not tokenizer_config.exists():
        return not Path(model).expanduser().is_dir()  # of the hub's nobody knows: it may have the right one
    return '"chat_template"' in tokenizer_config.read_text(encoding="utf-8", errors="replace")


def _fitted(tree: Tree, machine: Machine, least: int) -> FitRow:
    """Write into ``tree`` the rows of a micro-batch, as many as fit without any strategy, or else the ``least`` and
    strategies. Returns what the planner says of that.
    """
    training = tree["training"]
    total = training["per_device_train_batch_size"]

    def ways(rows: int, *, plain: bool) -> list[FitRow]:
        training.update(per_device_train_batch_size=rows, gradient_accumulation_steps=total // rows)
        return Fit(load_tree(tree), Ranks(), machine).own(plain=plain)

    rows = total if ways(least, plain=True)[0].fits else least
    while rows > least:
        if (row := ways(rows, plain=True)[0]).fits:
            return row
        rows //= 2
    fit_rows = ways(least, plain=False)
    row = fastest([way for way in fit_rows if way.fits] or fit_rows[-1:])  # if nothing fits, with all that saves memory
    tree["strategies"] = row.tree["strategies"]
    return row


def _of(row: FitRow, *, accelerated: bool) -> str:
    """What the planner says of a way of training."""
    if not row.fits:
        return f"does not fit: {row.refused or row.lacks}"
    parts = [f"{human(row.needed[tier])} of the {tier.value}" for tier in Tier if row.needed.get(tier)]
    memory = ", ".join(parts) if accelerated else f"{human(sum(row.needed.values()))} of memory"
    return f"fits: {memory}" + ("" if row.seconds is None else f", {row.seconds:.2g} s per step (simulated)")


def _text(tree: Tree, command: str, said: Sequence[str]) -> str:
    """``tree`` as a file that explains itself."""
    written = {name: section for name, section in tree.items() if name != "task" or section != "sft"}
    lines = [
        f"# Made by: {' '.join(command.split())}",
        *(f"# {line}" for line in said),
        "# Every key: deepstow docs config",
    ]
    for name, section in written.items():
        if not isinstance(section, dict):
            lines += ["", _noted(one_line(name, section), name)]
            continue
        note = "  # one that is present is on; deepstow plan says what each does" * (name == "strategies")
        lines += ["", f"{name}:{note}" if section else f"{name}: {{}}{note}"]
        lines += [_noted(f"  {_line(key, value)}", f"{name}.{key}") for key, value in section.items()]
    return "\n".join(lines) + "\n"


def _line(key: str, value: object) -> str:
    return f"{key}: {value:.0e}".replace("e-0", "e-") if key == "learning_rate" else one_line(key, value)


def _noted(line: str, key: str) -> str:
    return f"{line:<46}  # {NOTES[key]}" if key in NOTES else line


def refuse_missing(data: str) -> None:
    """Raise ConfigError for data that is neither here nor of the hub's."""
    path = Path(data).expanduser()
    if data != "pydoc" and not path.exists() and not is_on_hub(data):
        raise ConfigError(f"--data {data}: there is no such file{nearest_file(path)}")
