"""``deepstow fit``: plans of a model in several ways of training, and what to write for each, as one table.

All weights, low-rank adapters, and these on a base in 4 bits; each as it is, with every strategy that saves memory
(``Strategy.fit``), with all of those together, over more ranks with the strategies that need them, and where nothing
fits on several ranks with rows of data divided over them (``FitOptions.rows_by``). Each row is a plan of a config
that can be written; if the planner refuses it, the row has the bytes that it said are needed. What fits has its
predicted peaks within 0.9 of the memory, which is what ``auto`` uses. All plans but that of the config as it is are
brief: their steps may be some per cent longer than those of runs (``Strategy.briefly``). Every refusal
for memory ends with a short table (``explained``): ways of training up to the config's, and from there on as far as the
first that fits. Each further one has to count its model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.plan import Plan
from deepstow.strategies.core.protocol import FitOptions, Phase
from deepstow.strategies.core.registry import available, find, rules
from deepstow.strategies.core.sizes import SHARE, human
from deepstow.strategies.planner.budget import device_budget
from deepstow.strategies.planner.step_cost import TOUCHED_BYTES, cost_of, empty, plan_cost
from deepstow.strategies.report.table import table
from deepstow.trainer.config.load import build, load_tree, merged
from deepstow.trainer.config.yaml_file import one_line
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError, TooLargeError
from deepstow.trainer.planning.facts import precision_of
from deepstow.trainer.planning.from_config import plans_of
from deepstow.trainer.tasks.table import TASKS

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig
    from deepstow.trainer.machine.probe import Machine

MORE_RANKS, A_MACHINE = (2, 4, 8), 8  # times the ranks that were asked for; ranks that share a machine
LORA_SECTION = {"r": 16, "target_modules": "all-linear"}
# Of a model without a config file. The tokenizer is not read; the vocabulary is the model's.
ROWS, LENGTH, TOKENIZER = 1, 2048, "the-model's-own"
HEADER = ("fits", "training", "ranks", "device", "host", "step", "lines, in place of these sections of the config")
INEXACT = "full (inexact)"
KINDS = {"full": "full fine-tuning", INEXACT: "full fine-tuning with inexact state", "LoRA": "LoRA", "QLoRA": "QLoRA"}
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
MORE = ("", "more ways of training, and more ranks: deepstow fit")
UNKNOWN = "-"
SAME = 0.1  # relative difference of simulated seconds for which no strategy is worth writing
Tree = dict[str, Any]


def config_of(model: str | None, overrides: Sequence[str], *, accelerated: bool) -> RunConfig:
    """The config of a model by name, folder or keys of ``model.config`` among ``overrides``, with default tokens; in
    bf16 if ``accelerated``. Raises ConfigError if no model is named, or a key is wrong.
    """
    if model is None and not any(each.startswith("model.config") for each in overrides):
        raise ConfigError(
            "--fit: which model? Give --config FILE, --model NAME_OR_FOLDER, or model.config.model_type=llama "
            "model.config.hidden_size=4096 and the other sizes"
        )
    section: Tree = {"name_or_path": model} if model is not None else {"tokenizer": TOKENIZER}
    training = {"output_dir": "runs/fit", "per_device_train_batch_size": ROWS, "bf16": accelerated}
    tree = {"model": section, "data": {"path": "my.jsonl", "max_length": LENGTH}, "training": training}
    return load_tree(tree, overrides)


def unwritten(config: RunConfig) -> Tree:
    """What of a config without a file does not have to be written: all but bf16, which is no default."""
    tree = config.tree()
    return tree | {"training": tree["training"] | {"bf16": False}}


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRow:
    """One way of training, and what its plan needs."""

    kind: str = "full"  # what is trained, one of KINDS
    strategies: tuple[str, ...] = ()  # names of those that save memory
    given: bool = False  # the config as it is, whatever they are
    tree: Tree = field(default_factory=dict)  # the config
    kept: Mapping[str, Tree] = field(default_factory=dict)  # options of what saves memory that say what the machine has
    ranks: int = 1
    needed: Mapping[Tier, int] = field(default_factory=dict)  # bytes on one rank; a tier is left out if not known
    missing: Mapping[Tier, int] = field(default_factory=dict)  # bytes beyond what may be used, where any are
    refused: str = ""  # why there is no plan, if it is not for memory
    seconds: float | None = None  # of a simulated step; None: unknown, or it does not fit
    write: tuple[str, ...] = ()  # lines of YAML, one per section; none: the config as it is

    @property
    def training(self) -> str:
        return "this config" if self.given else " + ".join((self.kind, *self.strategies))

    @property
    def fits(self) -> bool:
        return not self.missing and not self.refused

    @property
    def lacks(self) -> str:
        return ", ".join(f"{tier.value} lacks {human(size)}" for tier, size in self.missing.items())

    def using(self, names: Sequence[str]) -> FitRow:
        """The same with these strategies, under the options with which they save memory."""
        options = {name: {**(_fit(name).options or {}), **self.kept.get(name, {})} for name in names}
        tree = self.tree | {"strategies": self.tree["strategies"] | options}
        return replace(self, strategies=tuple(names), tree=tree)


@dataclass(frozen=True, slots=True)
class Fit:
    """The question for one config, as many ranks as are given and more, and one machine."""

    config: RunConfig
    ranks: Ranks
    machine: Machine
    written: Tree | None = None  # in the user's file, which the lines of the table change; None: all of ``config``
    say: Callable[[str], None] = lambda line: None  # told of each plan before it is made
    short: bool = False  # no ways of training beyond the first that fits, but that of ``config``

    def lines(self, *, as_given: bool = False) -> list[str]:
        """The heading, the answer and the table. See ``rows``."""
        rows = self.rows(as_given=as_given)
        return [*self.heading(), "", *lines(rows)]

    def rows(self, *, as_given: bool = False) -> list[FitRow]:
        """All rows; with ``as_given`` the first one is the config as it is, if it has strategies. Raises ConfigError if
        the model cannot be described.
        """
        rows = self._here(as_given=as_given)
        if self.short and any(row.fits for row in rows):
            return rows
        inexact = [] if any(row.fits for row in rows if row.kind == "full") else [*self._inexactly()]
        rows += [*inexact, *self._over_more_ranks()]
        whole = (row for row in rows if row.kind == "full" and row.ranks <= self.ranks.world_size)
        return rows if any(row.fits for row in whole) else [*rows, *self._rows_divided()]

    def heading(self) -> list[str]:
        """Model, machine and its memory, tokens and precision, and how to change them."""
        machine, section, training = self.machine, self.config.model, self.config.training
        name = section.name_or_path or (section.config or {})["model_type"]
        memory = f"{human(machine.host_available_bytes // self.ranks.local_world_size)} of host memory per rank"
        if machine.device_kind != "cpu":
            memory = f"{human(machine.device_total_bytes)} of device memory, {memory}; {SHARE} of each is used"
        steps = training.gradient_accumulation_steps
        rows = f"{training.per_device_train_batch_size} x {self.config.data.max_length:,} tokens"
        return [
            f"does it fit? {name} on {machine.name}: {memory}",
            f"each rank: {rows}{f', {steps} times per step' * (steps > 1)}, {precision_of(self.config).value}, "
            f"{training.optim}; change with training.per_device_train_batch_size=, data.max_length=, training.bf16=",
        ]

    def _here(self, *, as_given: bool) -> list[FitRow]:
        """Rows on the ranks that were asked for: each way that is not the same as one before it."""
        config, rows = self.config, list[FitRow]()
        if as_given and config.strategies:
            given = FitRow(kind=_kind(config), tree=config.tree(), given=True)
            rows.append(self._row(given, self.ranks))
        names = [name for name in _saving() if not _fit(name).needs_ranks]
        own = [plain.kind for plain in _plain(config)].index(_kind(config))
        for number, plain in enumerate(_plain(config)):
            if self.short and number > own and any(row.fits for row in rows):
                break
            for group in ([], *([name] for name in names), names):
                row = self._row(plain.using(group), self.ranks)
                if not any(_alike(row, other) for other in rows):
                    rows.append(row)
                if row.refused and not group:  # it cannot be trained so
                    break
        return rows

    def _inexactly(self) -> Iterator[FitRow]:
        """All weights on the ranks that were asked for, with ever less state until it fits."""
        way = _plain(self.config)[0].using([each for each in _saving() if not _fit(each).needs_ranks])
        for less in (changed for name in way.strategies for changed in _fit(name).inexactly):
            row = self._row(replace(way, kind=INEXACT, tree=merged(way.tree, dict(less))), self.ranks)
            if row.refused:
                continue
            yield row
            if row.fits:
                return

    def _over_more_ranks(self) -> Iterator[FitRow]:
        """All weights over more ranks of this machine: what needs ranks alone if that fits, else with another one."""
        whole, now = _plain(self.config)[0], self.ranks
        whole = replace(whole, kept={name: _exactly(name, some) for name, some in whole.kept.items()})
        alone = [name for name in _saving() if not _fit(name).needs_ranks]
        for sharing in (name for name in _saving() if _fit(name).needs_ranks):
            ways = [whole.using([sharing]), *(whole.using([sharing, name]) for name in alone)]
            for count in [now.world_size] * (now.world_size > 1) + [times * now.world_size for times in MORE_RANKS]:
                if not ways:  # all are refused, on so many ranks as well
                    break
                ranks = Ranks(world_size=count, local_world_size=min(count, max(now.local_world_size, A_MACHINE)))
                rows = []
                for way in list(ways):
                    rows.append(self._row(way, ranks))
                    if rows[-1].refused:  # two that decide the same
                        ways.remove(way)
                    if rows[-1].fits:
                        break
                yield min(rows, key=lambda row: (not row.fits, bool(row.refused), sum(row.missing.values())))

    def _rows_divided(self) -> Iterator[FitRow]:
        """All weights, with all that saves memory, and rows divided over the ranks of a machine, or as many of them as
        the model takes.
        """
        way, here = _plain(self.config)[0].using(_saving()), self.ranks.local_world_size
        for name in (each for each in available() if _fit(each).rows_by):
            for degree in (each for each in range(here, 1, -1) if here % each == 0):
                chosen = {name: {_fit(name).rows_by: degree}, **way.tree["strategies"]}
                tree = way.tree | {"strategies": chosen}
                row = self._row(replace(way, strategies=(name, *way.strategies), tree=tree), self.ranks)
                if not row.refused:
                    yield row
                    break

    def _row(self, way: FitRow, ranks: Ranks) -> FitRow:
        """``way`` with what its plan on ``ranks`` needs. Raises ConfigError about the model as the config trains it."""
        row = replace(way, ranks=ranks.world_size, write=changes(self.written or self.config.tree(), way.tree))
        self.say(f"planning {row.training} on {row.ranks} rank{'s' * (row.ranks > 1)}")
        try:
            config = build(row.tree).like(self.config)
            if not row.given:
                brief = {name: each.briefly() for name, each in config.strategies.items()}
                config = config.model_copy(update={"strategies": brief})
            plans = plans_of(config, ranks, self.machine)
            plan = max(plans, key=lambda each: each.peak(Tier.DEVICE))  # of stages, that which needs most
        except TooLargeError as short:
            tier = Tier(short.tier)
            return replace(row, needed={tier: short.needed}, missing={tier: short.needed - short.budget})
        except ValidationError as error:
            return replace(row, refused=error.errors()[0]["msg"].removeprefix("Value error, "))
        except (ConfigError, ValueError) as error:
            if isinstance(error, ConfigError) and row.kind == _kind(self.config) and not (row.strategies or row.given):
                raise
            return replace(row, refused=str(error).splitlines()[0])
        needed, missing = {tier: plan.peak(tier) for tier in Tier}, _missing(plan)
        return replace(row, needed=needed, missing=missing, seconds=None if missing else _seconds(plan))


@contextmanager
def explained(config: RunConfig, ranks: Ranks, machine: Machine) -> Iterator[None]:
    """A refusal for memory that is raised inside ends with the table when it is reported; others have file and line."""
    try:
        with config.placing():
            yield
    except TooLargeError as refused:
        refused.what_fits = lambda: ["", *Fit(config, ranks, machine, short=True).lines(), *MORE]
        raise


def _fit(name: str) -> FitOptions:
    return find(name).fit or FitOptions()


def _saving() -> list[str]:
    """Names of the strategies that save memory, in the order in which they decide."""
    names = [name for name in available() if _fit(name).options is not None]
    return sorted(names, key=lambda name: list(Phase).index(find(name).phase))


def _kind(config: RunConfig) -> str:
    base = "LoRA" if config.model.quantization_config is None else "QLoRA"
    return "full" if config.model.lora is None else base


def _plain(config: RunConfig) -> list[FitRow]:
    """Training of all weights, of adapters, and of these on a base in 4 bits or the config's, without strategies that
    save memory and what they exclude, and without those that divide one copy of the model over ranks, which
    ``deepstow search`` compares.
    """
    tree, saving = config.tree(), _saving()
    given = {name: tree["strategies"][name] or {} for name in saving if name in tree["strategies"]}
    kept = {name: _of_machine(name, some) for name, some in given.items()}
    dropped = {*saving, *(name for name, strategy in config.strategies.items() if strategy.divides())}
    tree["strategies"] = {name: options for name, options in tree["strategies"].items() if name not in dropped}
    alone = {f"strategies.{name}" for name in saving}
    for section, name in (rule.key.split(".")[:2] for rule in rules(saving) if rule.beside in alone):
        if section == "training" and tree[section].get(name):
            tree[section] = tree[section] | {name: False}
    model = dict(tree["model"])
    own, _ = model.pop("lora", None), model.pop("adapter", None)
    if own is not None and model["dtype"] == "bfloat16":
        model["dtype"] = "float32"  # bf16 was for the frozen weights
    bits = model.pop("quantization_config", None)
    half = {"dtype": "bfloat16"} if config.training.bf16 and own is None else {}
    adapters = {name: value for name, value in tree["model"].items() if name != "quantization_config"}
    adapters |= {"lora": own or LORA_SECTION} | half
    rows = [
        FitRow(tree=tree | {"model": model}, kept=kept),
        FitRow(kind="LoRA", tree=tree | {"model": adapters}, kept=kept),
    ]
    if bits is None and (find_spec("bitsandbytes") is None or not TASKS[config.task].language):
        return rows
    compute = {"bnb_4bit_compute_dtype": "bfloat16"} if config.training.bf16 else {}
    packed = tree | {"model": adapters | {"quantization_config": bits or FOUR_BITS | compute}}
    return [*rows, FitRow(kind="QLoRA", tree=packed, kept=kept)]


def _exactly(name: str, options: Tree) -> Tree:
    """Those of a strategy's ``options`` that give no exactness up; the others are for one rank."""
    inexact = {key for each in _fit(name).inexactly for key in each["strategies"][name]}
    return {key: value for key, value in options.items() if key not in inexact}


def _of_machine(name: str, options: Tree) -> Tree:
    """Those of a strategy's ``options`` that stay as they are, without defaults."""
    kind = find(name)
    stay = {key: options[key] for key in _fit(name).kept if key in options}
    return {key: value for key, value in stay.items() if value != kind.model_fields[key].default}


def _missing(plan: Plan) -> dict[Tier, int]:
    """Bytes beyond what may be used of one rank's memory, by tier. A CPU's device is its host memory."""
    machine = plan.facts.machine
    device, host = plan.peak(Tier.DEVICE), plan.peak(Tier.HOST)
    beyond = {Tier.HOST: device + host - machine.host_bytes}
    if machine.has_accelerator:
        beyond = {Tier.DEVICE: device - device_budget(machine), Tier.HOST: host - int(SHARE * machine.host_bytes)}
    return {tier: size for tier, size in beyond.items() if size > 0}


def _seconds(plan: Plan) -> float | None:
    """The simulated step; of a plan that stows nothing, with all updates on the device after backward. None: over a
    network, or unknown rates.
    """
    cost, rates = plan_cost(plan), plan.facts.machine.rates
    if cost is not None:
        return cost.seconds
    if rates is None or not plan.facts.run.forward_flops or plan.facts.run.world_size > 1:
        return None
    facts = plan.facts_as_kept()
    updated_bytes = TOUCHED_BYTES * sum(unit.num_trainable for unit in facts.units)
    return cost_of(facts, empty(facts), rates).seconds + updated_bytes / rates.device_bytes_per_s


def _alike(row: FitRow, other: FitRow) -> bool:
    """Whether two rows are the same training in the same bytes and time: a strategy that had nothing to do."""
    same = (row.needed, row.missing, row.seconds) == (other.needed, other.missing, other.seconds)
    return same and not row.refused and not other.refused


def changes(written: Tree, tree: Tree) -> tuple[str, ...]:
    """One line of YAML for each section that has to change; ``strategies`` as a whole, others key by key."""
    found = {}
    for section in ("model", "training"):
        old, new = written[section], tree[section]
        changed = {name: value for name, value in new.items() if name not in old or value != old[name]}
        if changed := changed | {name: None for name in old if name not in new}:
            found[section] = changed
    if tree["strategies"] != written["strategies"]:
        found["strategies"] = tree["strategies"]
    return tuple(one_line(section, value) for section, value in found.items())


# --- the table -------------------------------------------------------------------------------------------------------


def lines(rows: Sequence[FitRow]) -> list[str]:
    """The answer, then one row per way of training; further lines to write are below their row."""
    common = [line for line in rows[0].write if all(line in row.write for row in rows if row.kind != INEXACT)]
    cells = [cell for row in rows for cell in _cells(row, common)]
    some = any(line not in row.write for row in rows for line in common)  # an inexact one that changes more there
    always = [f"in every row{' that has no other' * some}: {line}" for line in common]
    parts = [(what, [row for row in rows if row.kind == kind]) for kind, what in KINDS.items()]
    answers = [_answer(what, some) for what, some in parts if some]
    return [*answers, "", *table(HEADER, cells, {"ranks", "device", "host", "step"}), *always]


def _cells(row: FitRow, common: Sequence[str]) -> Iterator[tuple[str, ...]]:
    needed = (human(row.needed[tier]) if tier in row.needed else UNKNOWN for tier in (Tier.DEVICE, Tier.HOST))
    says = "yes" if row.fits else f"no: {'refused' if row.refused else row.lacks}"
    seconds = UNKNOWN if row.seconds is None else f"{row.seconds:.3g} s"
    own = [line for line in row.write if line not in common]
    first, *others = (f"({row.refused})",) if row.refused else own or ("as it is",)
    yield (says, row.training, str(row.ranks), *needed, seconds, first)
    for line in others:
        yield ("", "", "", "", "", "", line)


def _answer(what: str, rows: Sequence[FitRow]) -> str:
    """One line: what fits on as many ranks as there are, or what would."""
    least = min(row.ranks for row in rows)
    fitting = [row for row in rows if row.fits]
    here = [row for row in fitting if row.ranks == least]
    if here:
        known = [row.seconds for row in here if row.seconds is not None]
        best = next(row for row in here if row.seconds is None or row.seconds <= min(known) * (1 + SAME))
        seconds = "" if best.seconds is None else f", {best.seconds:.3g} s per step (simulated)"
        return f"{what} fits: {best.training}{seconds}"
    near = [row for row in rows if row.missing and row.ranks == least]
    short = ""
    if near:
        # With fewer strategies the planner may have given up at one memory before it looked at the other.
        best = max(near, key=lambda row: (len(row.strategies), -sum(row.missing.values())))
        short = f"; nearest is {best.training}, {best.lacks}"
    more = f"; on {fitting[0].ranks} ranks {fitting[0].training} fits" if fitting else ""
    no = "is refused" if all(row.refused for row in rows) else "does not fit"
    return f"{what} {no} on {least} rank{'s' * (least > 1)}{short}{more}"
