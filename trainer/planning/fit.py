"""``deepstow fit``: plans of a model in several ways of training, and what to write for each, as one table.

All weights, low-rank adapters, and these on a base in 4 bits; each as it is, with every strategy that saves memory
(``Strategy.fit``), and with all of those together. Where that is too much for device and host: with a disk, and of all
weights with ever less state. More ranks are tried if they are asked for, with the strategies that need them, and where
nothing fits on several ranks with rows of data divided over them (``FitOptions.rows_by``).

Each row is a plan of a config that can be written; if the planner refuses it, the row has the bytes that it said are
needed. What fits has its predicted peaks within 0.9 of the memory, which is what ``auto`` uses. All plans but that of
the config as it is are brief: their steps may be some per cent longer than those of runs (``Strategy.briefly``). Every
refusal for memory ends with a short table (``explained``): ways of training up to the config's, and from there on as
far as the first that fits. Each further one has to count its model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any

from pydantic import ValidationError

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.on_disk import disk_bytes
from deepstow.strategies.core.plan import Plan
from deepstow.strategies.core.protocol import FitOptions, Phase
from deepstow.strategies.core.registry import available, find, rules
from deepstow.strategies.core.sizes import SHARE, human
from deepstow.strategies.planner.budget import device_budget
from deepstow.strategies.report.short_plan import simulated
from deepstow.strategies.report.table import table
from deepstow.trainer.config.load import build, load_tree, merged
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.config.yaml_file import Key, one_line, write
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError, TooLargeError
from deepstow.trainer.machine.probe import Machine
from deepstow.trainer.planning.facts import precision_of
from deepstow.trainer.planning.from_config import plans_of

A_MACHINE = 8  # ranks that share it
BOUNDLESS = 1 << 50  # bytes of host memory, or of a disk: more than any machine has
GB = 10**9
FOLDER = "/path/on/a/local/disk"  # of a config that names none
LORA_SECTION = {"r": 16, "target_modules": "all-linear"}
# Of a model without a config file. The tokenizer is not read; the vocabulary is the model's.
ROWS = 1
LENGTH = 2048
TOKENIZER = "the-model's-own"
ROWS_OF_NOBODY = "my.jsonl"
HEADER = ("row", "fits", "training", "ranks", "device", "host", "step", "set in the config")
INEXACT = "full (inexact)"
KINDS = {"full": "full fine-tuning", INEXACT: "full fine-tuning with inexact state", "LoRA": "LoRA", "QLoRA": "QLoRA"}
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
MORE = ("", "more ways of training: deepstow fit --config FILE; over more cards: with --ranks 1,2,4,8")
UNKNOWN = "-"
SAME = 0.1  # relative difference of simulated seconds for which no strategy is worth writing
Tree = dict[str, Any]


def config_of(model: str | None, overrides: Sequence[str], *, accelerated: bool) -> RunConfig:
    """The config of a model by name, folder or keys of ``model.config`` among ``overrides``, with default tokens; in
    bf16 if ``accelerated``. Raises ConfigError if no model is named, or a key is wrong.
    """
    if model is None and not any(override.startswith("model.config") for override in overrides):
        raise ConfigError(
            "deepstow fit: which model? Give --config FILE, --model NAME_OR_FOLDER, or model.config.model_type=llama "
            "model.config.hidden_size=4096 and the other sizes"
        )
    section: Tree = {"name_or_path": model} if model is not None else {"tokenizer": TOKENIZER}
    training = {"output_dir": "runs/fit", "per_device_train_batch_size": ROWS, "bf16": accelerated}
    tree = {"model": section, "data": {"path": ROWS_OF_NOBODY, "max_length": LENGTH}, "training": training}
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
    instead: str = ""  # of a host that is too small: with how much of it how much of the device is enough
    seconds: float | None = None  # of a simulated step; None: unknown, or it does not fit
    disk: int = 0  # bytes of a disk, which the config did not name
    write: tuple[str, ...] = ()  # changes, as on the command line; none: the config as it is

    @property
    def training(self) -> str:
        ways = (self.kind, *self.strategies, *["disk"] * bool(self.disk))
        return "this config" if self.given else " + ".join(ways)

    @property
    def fits(self) -> bool:
        return not self.missing and not self.refused

    @property
    def lacks(self) -> str:
        amounts = ", ".join(f"{tier.value} lacks {human(size)}" for tier, size in self.missing.items())
        return f"{amounts}; {self.instead}" if self.instead else amounts

    def using(self, names: Sequence[str]) -> FitRow:
        """The same with these strategies, under the options with which they save memory."""
        options = {name: {**(_fit(name).options or {}), **self.kept.get(name, {})} for name in names}
        tree = self.tree | {"strategies": self.tree["strategies"] | options}
        return replace(self, strategies=tuple(names), tree=tree)

    def on_disk(self, size: int) -> FitRow:
        """The same with so many bytes of a disk for the strategies that can use one."""
        strategies = dict(self.tree["strategies"])
        for name in self.strategies:
            if (keys := _fit(name).disk) is not None:
                strategies[name] = strategies[name] | dict(zip(keys, (FOLDER, f"{-(-size // GB)}GB"), strict=True))
        return replace(self, tree=self.tree | {"strategies": strategies}, disk=size)


@dataclass(frozen=True, slots=True)
class Fit:
    """The question for one config, as many ranks as are given, and one machine."""

    config: RunConfig
    ranks: Ranks
    machine: Machine
    written: Tree | None = None  # in the user's file, which the lines of the table change; None: all of ``config``
    more: tuple[int, ...] = ()  # further numbers of ranks, of the same kind of machine
    say: Callable[[str], None] = lambda line: None  # told of each plan before it is made
    short: bool = False  # no ways of training beyond the first that fits, but that of ``config``

    def lines(self) -> list[str]:
        """The heading, the answer and the table. See ``rows``."""
        return [*self.heading(), "", *lines(self.rows())]

    def rows(self, *, as_given: bool = False) -> list[FitRow]:
        """All rows; with ``as_given`` the first one is the config as it is, if it has strategies. Raises ConfigError if
        the model cannot be described.
        """
        rows = self._here(as_given=as_given)
        if self.short and any(row.fits for row in rows):
            return rows
        lost = [] if any(row.fits for row in rows if row.kind == "full") else [*self._inexactly()]
        rows += [*self._on_disk(rows), *lost, *self._over_ranks()]
        in_full = (row for row in rows if row.kind == "full" and row.ranks <= self.ranks.world_size)
        return rows if any(row.fits for row in in_full) else [*rows, *self._rows_divided()]

    def own(self, *, plain: bool = False) -> list[FitRow]:
        """Ways of training what the config trains: as it is and, unless ``plain``, with each strategy that saves memory
        and with all of them.
        """
        way = next(row for row in _plain(self.config) if row.kind == _kind(self.config))
        names = [name for name in _saving() if not _fit(name).needs_ranks]
        groups = [[]] if plain else [[], *([name] for name in names), names]
        return [self._row(way.using(group), self.ranks) for group in groups]

    def heading(self) -> list[str]:
        """Model, machine and its memory, tokens and precision, and how to change them."""
        machine = self.machine
        section = self.config.model
        training = self.config.training
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
            unchanged = FitRow(kind=_kind(config), tree=config.tree(), given=True)
            rows.append(self._row(unchanged, self.ranks))
        names = [name for name in _saving() if not _fit(name).needs_ranks]
        own_index = [plain.kind for plain in _plain(config)].index(_kind(config))
        for number, plain in enumerate(_plain(config)):
            if self.short and number > own_index and any(row.fits for row in rows):
                break
            for group in ([], *([name] for name in names), names):
                row = self._row(plain.using(group), self.ranks)
                if not any(_alike(row, other) for other in rows):
                    rows.append(row)
                if row.refused and not group:  # it cannot be trained so
                    break
        return rows

    def _on_disk(self, rows: Sequence[FitRow]) -> Iterator[FitRow]:
        """Ways of which nothing fits, with as much of a disk as it takes."""
        names = [name for name in _saving() if not _fit(name).needs_ranks]
        for plain in _plain(self.config):
            of_kind = [row for row in rows if row.kind == plain.kind]
            disk_keys = [key for name in names for key in _fit(name).disk or () if key in plain.kept.get(name, {})]
            if disk_keys or not any(row.missing for row in of_kind) or any(row.fits for row in of_kind):
                continue
            if (size := self._disk_of(plain.using(names).on_disk(BOUNDLESS))) is not None:
                yield self._row(plain.using(names).on_disk(size), self.ranks)

    def _disk_of(self, row: FitRow) -> int | None:
        """The bytes of a disk that the plan of ``row`` would use on a machine; None: there is no plan."""
        try:
            plan = self._planned(row, self.ranks, self.machine)
        except (ConfigError, ValueError):
            return None
        return self.ranks.local_world_size * disk_bytes(plan.layout) if plan.layout is not None else None

    def _inexactly(self) -> Iterator[FitRow]:
        """All weights on the ranks that were asked for, with ever less state until it fits."""
        way = _plain(self.config)[0].using([name for name in _saving() if not _fit(name).needs_ranks])
        for options in (changed for name in way.strategies for changed in _fit(name).inexactly):
            row = self._row(replace(way, kind=INEXACT, tree=merged(way.tree, dict(options))), self.ranks)
            if row.refused:
                continue
            yield row
            if row.fits:
                return

    def _over_ranks(self) -> Iterator[FitRow]:
        """All weights over several ranks of a machine: what needs ranks alone if that fits, else with another one."""
        full, present = _plain(self.config)[0], self.ranks
        full = replace(full, kept={name: _exactly(name, options) for name, options in full.kept.items()})
        alone = [name for name in _saving() if not _fit(name).needs_ranks]
        for sharing in (name for name in _saving() if _fit(name).needs_ranks):
            ways = [full.using([sharing]), *(full.using([sharing, name]) for name in alone)]
            for count in [present.world_size] * (present.world_size > 1) + [*self.more]:
                if not ways:  # all are refused, on so many ranks as well
                    break
                ranks = Ranks(world_size=count, local_world_size=min(count, max(present.local_world_size, A_MACHINE)))
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
        way, on_machine = _plain(self.config)[0].using(_saving()), self.ranks.local_world_size
        for name in (name for name in available() if _fit(name).rows_by):
            for degree in (degree for degree in range(on_machine, 1, -1) if on_machine % degree == 0):
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
            plan = self._planned(row, ranks, self.machine)
        except TooLargeError as short:
            tier = Tier(short.tier)
            if tier is Tier.DEVICE and not row.given and (of_host := self._short_of_host(row, ranks, short.budget)):
                return of_host
            return replace(row, needed={tier: short.needed}, missing={tier: short.needed - short.budget})
        except ValidationError as error:
            return replace(row, refused=error.errors()[0]["msg"].removeprefix("Value error, "))
        except (ConfigError, ValueError) as error:
            if isinstance(error, ConfigError) and row.kind == _kind(self.config) and not (row.strategies or row.given):
                raise
            return replace(row, refused=str(error).splitlines()[0])
        needed, missing = {tier: plan.peak(tier) for tier in Tier}, _missing(plan)
        step = None if missing else simulated(plan)
        return replace(row, needed=needed, missing=missing, seconds=None if step is None else step.seconds)

    def _planned(self, row: FitRow, ranks: Ranks, machine: Machine) -> Plan:
        """The plan of ``row``; of stages, that which needs most."""
        config = build(row.tree).like(self.config)
        if not row.given:
            brief = {name: strategy.briefly() for name, strategy in config.strategies.items()}
            config = config.model_copy(update={"strategies": brief})
        return max(plans_of(config, ranks, machine), key=lambda each: each.peak(Tier.DEVICE))

    def _short_of_host(self, row: FitRow, ranks: Ranks, budget: int) -> FitRow | None:
        """``row``, of which the planner has refused the device, if it is the host that is too small: what the device
        must have within so much of the host is then much more than with a larger one. None: it is not.
        """
        machine = self.machine
        if machine.device_kind == "cpu":
            return None
        try:
            on_device = self._planned(row, ranks, replace(machine, host_available_bytes=BOUNDLESS)).peak(Tier.DEVICE)
        except TooLargeError as short:
            on_device = short.needed
        except (ConfigError, ValueError):
            return None
        enough = max(machine.device_total_bytes, int(on_device / SHARE) + 2)
        try:
            self._planned(row, ranks, replace(machine, device_total_bytes=enough))
        except TooLargeError as short:
            if short.tier != Tier.HOST.value:
                return None
            lacks = short.needed - short.budget
            host_bytes = machine.host_available_bytes + ranks.local_world_size * -(-lacks * 10 // 9)
            instead = f"with {human(host_bytes)} of host memory {human(on_device)} of the device do"
            needed, missing = {Tier.DEVICE: on_device, Tier.HOST: short.needed}, {Tier.HOST: lacks}
            missing |= {Tier.DEVICE: on_device - budget} if on_device > budget else {}
            return replace(row, needed=needed, missing=missing, instead=instead)
        except (ConfigError, ValueError):
            pass
        return None


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
    configured = {name: tree["strategies"][name] or {} for name in saving if name in tree["strategies"]}
    kept = {name: _of_machine(name, options) for name, options in configured.items()}
    dropped = {*saving, *(name for name, strategy in config.strategies.items() if strategy.divides())}
    tree["strategies"] = {name: options for name, options in tree["strategies"].items() if name not in dropped}
    alone = {f"strategies.{name}" for name in saving}
    for section, name in (rule.key.split(".")[:2] for rule in rules(saving) if rule.beside in alone):
        if section == "training" and tree[section].get(name):
            tree[section] = tree[section] | {name: False}
    model = dict(tree["model"])
    lora, _ = model.pop("lora", None), model.pop("adapter", None)
    if lora is not None and model["dtype"] == "bfloat16":
        model["dtype"] = "float32"  # bf16 was for the frozen weights
    bits = model.pop("quantization_config", None)
    half = {"dtype": "bfloat16"} if config.training.bf16 and lora is None else {}
    adapters = {name: value for name, value in tree["model"].items() if name != "quantization_config"}
    adapters |= {"lora": lora or LORA_SECTION} | half
    rows = [
        FitRow(tree=tree | {"model": model}, kept=kept),
        FitRow(kind="LoRA", tree=tree | {"model": adapters}, kept=kept),
    ]
    if bits is None and (find_spec("bitsandbytes") is None or not config.chosen_task.language):
        return rows
    compute = {"bnb_4bit_compute_dtype": "bfloat16"} if config.training.bf16 else {}
    packed = tree | {"model": adapters | {"quantization_config": bits or FOUR_BITS | compute}}
    return [*rows, FitRow(kind="QLoRA", tree=packed, kept=kept)]


def _exactly(name: str, options: Tree) -> Tree:
    """Those of a strategy's ``options`` that give no exactness up; the others are for one rank."""
    inexact = {key for change in _fit(name).inexactly for key in change["strategies"][name]}
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


def _alike(row: FitRow, other: FitRow) -> bool:
    """Whether two rows are the same training in the same bytes and time: a strategy that had nothing to do."""
    same = (row.needed, row.missing, row.seconds) == (other.needed, other.missing, other.seconds)
    return same and not row.refused and not other.refused


def changes(written: Tree, tree: Tree) -> tuple[str, ...]:
    """What has to change in a config, as on the command line: ``model.dtype=bfloat16``, ``strategies.zero=null``."""
    changed = [line for name in ("model", "training") for line in _changed((name,), written[name], tree[name])]
    old, new = (
        {name: _without_defaults(name, options) for name, options in side["strategies"].items()}
        for side in (written, tree)
    )
    return *changed, *_changed(("strategies",), old, new)


def _changed(key: Key, old: Tree, new: Tree) -> Iterator[str]:
    for name in dict.fromkeys((*new, *old)):
        before, after = old.get(name), new.get(name)
        if before == after and (name in old) == (name in new):
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _changed((*key, name), before, after)
        else:
            _, _, value = one_line(name, after).partition(": ")
            yield f"{'.'.join((*key, name))}={value}"


# --- the table -------------------------------------------------------------------------------------------------------


def lines(rows: Sequence[FitRow]) -> list[str]:
    """The answer, then one row per way of training; further changes are below their row."""
    common = [line for line in rows[0].write if all(line in row.write for row in rows)]
    cells = [cell for number, row in enumerate(rows, 1) for cell in _cells(number, row, common)]
    always = [f"in every row: {quote(line)}" for line in common]
    by_kind = [(what, [row for row in rows if row.kind == kind]) for kind, what in KINDS.items()]
    answers = [_answer(what, of_kind) for what, of_kind in by_kind if of_kind]
    header, several = list(HEADER), len({row.ranks for row in rows}) > 1
    if not several:
        at = header.index("ranks")
        header, cells = header[:at] + header[at + 1 :], [cell[:at] + cell[at + 1 :] for cell in cells]
    return [*answers, "", *table(header, cells, {"row", "ranks", "device", "host", "step"}), *always]


def _cells(number: int, row: FitRow, common: Sequence[str]) -> Iterator[tuple[str, ...]]:
    needed = (human(row.needed[tier]) if tier in row.needed else UNKNOWN for tier in (Tier.DEVICE, Tier.HOST))
    short = ", ".join(f"{tier.value} lacks {human(size)}" for tier, size in row.missing.items())
    says = "yes" if row.fits else f"no: {'refused' if row.refused else short}"
    seconds = UNKNOWN if row.seconds is None else f"{row.seconds:.3g} s"
    edits = [quote(line) for line in row.write if line not in common] or ["as it is"]
    if not row.fits:
        edits = [f"({row.refused or row.instead})"] if row.refused or row.instead else [""]
    if row.disk:
        edits.append(f"(with a disk of {human_gb(row.disk)})")
    first, *others = edits
    yield (str(number), says, row.training, str(row.ranks), *needed, seconds, first)
    for line in others:
        yield ("", "", "", "", "", "", "", line)


def human_gb(size: int) -> str:
    """A disk as its maker counts it: ``120 GB``."""
    return f"{-(-size // GB):,} GB"


def _answer(what: str, rows: Sequence[FitRow]) -> str:
    """One line: what fits on as many ranks as there are, or what would."""
    least = min(row.ranks for row in rows)
    fitting = [row for row in rows if row.fits]
    on_least = [row for row in fitting if row.ranks == least]
    if on_least:
        best = fastest(on_least)
        seconds = "" if best.seconds is None else f", {best.seconds:.3g} s per step (simulated)"
        disk = f" with a disk of {human_gb(best.disk)}" if best.disk else ""
        return f"{what} fits{disk}: {best.training}{seconds}"
    near = [row for row in rows if row.missing and row.ranks == least]
    short = ""
    if near:
        # With fewer strategies the planner may have given up at one memory before it looked at the other.
        best = max(near, key=lambda row: (len(row.strategies), -sum(row.missing.values())))
        short = f"; nearest is {best.training}, {best.lacks}"
    more = f"; on {fitting[0].ranks} ranks {fitting[0].training} fits" if fitting else ""
    no = "is refused" if all(row.refused for row in rows) else "does not fit"
    return f"{what} {no} on {least} rank{'s' * (least > 1)}{short}{more}"


def fastest(rows: Sequence[FitRow]) -> FitRow:
    """The first of these rows that is about as fast as any; all of them fit."""
    seconds = [row.seconds for row in rows if row.seconds is not None]
    return next(row for row in rows if row.seconds is None or row.seconds <= min(seconds) * (1 + SAME))


# --- a whole config --------------------------------------------------------------------------------------------------


def chosen(rows: Sequence[FitRow], config: RunConfig, number: int | None) -> FitRow:
    """The row with this ``number``; None: the fastest that fits, of what the config trains if there is one. Raises
    ConfigError if there is no such row, or it does not fit.
    """
    if number is not None:
        if not 1 <= number <= len(rows):
            raise ConfigError(f"--row {number}: there are rows 1 to {len(rows)}")
        if not rows[number - 1].fits:
            raise ConfigError(f"--row {number}: {rows[number - 1].training} does not fit, so nothing is written")
        return rows[number - 1]
    least = min(row.ranks for row in rows)
    for kind in (_kind(config), *KINDS):
        fitting = [row for row in rows if row.kind == kind and row.fits]
        if fitting := [row for row in fitting if row.ranks == least] or fitting:
            return fastest(fitting)
    raise ConfigError("--write: nothing fits, so nothing is written")


def text(config: RunConfig, row: FitRow, machine: Machine, path: Path) -> str:
    """The config of ``row`` as a file, with what is known of it."""
    peaks = ", ".join(f"{tier.value} {human(row.needed[tier])}" for tier in Tier if tier in row.needed)
    step = "" if row.seconds is None else f", {row.seconds:.3g} s per step (simulated)"
    ranks = f" --ranks {row.ranks}" if row.ranks > 1 else ""
    notes = [f"{row.training}, on {machine.name}", f"each rank, by the plan: {peaks}{step}"]
    notes += [f"next: deepstow train{ranks} --config {path}"]
    tree = whole(config, row)
    notes += ["data.path: name a file of yours"] * (tree["data"].get("path") == ROWS_OF_NOBODY)
    notes += ["model.tokenizer: name one"] * (tree["model"].get("tokenizer") == TOKENIZER)
    notes += [f"strategies.offload.disk: name a folder on a local disk with {human_gb(row.disk)} free"] * bool(row.disk)
    return "".join(f"# {line}\n" for line in notes) + write(tree)


def whole(config: RunConfig, row: FitRow) -> Tree:
    """The config of ``row``, with the keys that ``config`` has set and those that differ."""
    tree, result = config.tree(), _set(config)
    for section in ("model", "training"):
        values = row.tree[section]
        kept = {name: value for name, value in result[section].items() if name in values}
        result[section] = kept | {name: value for name, value in values.items() if tree[section].get(name) != value}
    own_options = {name: dict(strategy.written) for name, strategy in config.strategies.items()}
    result["strategies"] = {
        name: own_options[name] if options == tree["strategies"].get(name) else _without_defaults(name, options)
        for name, options in row.tree["strategies"].items()
    }
    assert build(merged(result, {})).tree() == build(row.tree).tree(), "what is written is the row"
    return result


def _set(config: RunConfig) -> Tree:
    """The sections of ``config`` without keys that nobody has set."""
    return {
        name: {key: value for key, value in section.items() if key in getattr(config, name).model_fields_set}
        if isinstance(section, dict) and name != "strategies"
        else section
        for name, section in config.tree().items()
    }


def _without_defaults(name: str, options: Tree) -> Tree:
    fields = find(name).model_fields
    return {key: value for key, value in options.items() if value != fields[key].default}
