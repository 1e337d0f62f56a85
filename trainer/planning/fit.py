"""Does it fit? Plans of a model in several ways of training, for one table (``strategies/report/fit_table.py``).

All weights, and low-rank adapters; each as it is, with every strategy that saves memory (``Strategy.to_fit``), with all
of those together, and over more ranks with the strategies that need them. Each row is a plan that ``plan_of`` makes of
a config that can be written. What fits has its predicted peaks within 0.9 of the memory, which is what ``auto`` uses.

Not counted: the network between ranks (no simulated step), and a model's weights while they are loaded into host
memory, before the device or the engine takes them.

The table also ends every refusal for memory (``explained``): those are raised where plans are made, and the table needs
plans, so the command attaches it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from strategies.core.facts import Home
from strategies.core.plan import Plan
from strategies.core.protocol import Phase
from strategies.core.registry import available, find
from strategies.core.sizes import SHARE, human
from strategies.planner.budget import device_budget
from strategies.planner.step_cost import TOUCHED_BYTES, cost_of, empty, plan_cost
from strategies.report import fit_table
from strategies.report.fit_table import FitRow
from trainer.config.load import build, load_tree
from trainer.config.yaml_file import one_line
from trainer.dist.ranks import Ranks
from trainer.errors import ConfigError, TooLargeError
from trainer.machine.profiles import known_rates
from trainer.planning.facts import precision_of
from trainer.planning.from_config import plans_of

if TYPE_CHECKING:
    from trainer.config.sections import RunConfig
    from trainer.machine.probe import Machine

MORE_RANKS, A_MACHINE = (2, 4, 8), 8  # times the ranks that were asked for; ranks that share a machine
LORA_RANK = 16
LORA_SECTION = {"r": LORA_RANK, "target_modules": "all-linear"}
# Of a model without a config file. The tokenizer is not read; the vocabulary is the model's.
ROWS, LENGTH, TOKENIZER = 1, 2048, "the-model's-own"
Tree = dict[str, Any]


def config_of(model: str | None, overrides: Sequence[str], *, accelerated: bool) -> RunConfig:
    """The config of a model by name, folder or keys of ``model.config`` among ``overrides``, with default tokens.

    Args:
        accelerated: train in bf16, as one does on an accelerator.

    Raises:
        ConfigError: no model is named, or a key is wrong.
    """
    named = any(each.startswith("model.config") for each in overrides)
    if model is None and not named:
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


@dataclass(frozen=True, slots=True)
class _Way:
    """One way of training: whether it trains all weights, the strategies that save memory, and the config as a tree."""

    whole: bool
    tree: Tree
    names: tuple[str, ...] = ()
    given: bool = False

    def using(self, names: Sequence[str]) -> _Way:
        """The same with these strategies, under the options with which they save memory."""
        options = {name: dict(find(name).to_fit or {}) for name in names}
        return replace(self, names=tuple(names), tree=self.tree | {"strategies": self.tree["strategies"] | options})


class Fit:
    """The question for one config, as many ranks as are given and more, and one machine.

    Args:
        written: what is in the user's file, which the lines of the table change; None: all of ``config``.
        say: told of each plan before it is made.
    """

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        machine: Machine,
        *,
        written: Tree | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._config, self._ranks, self._machine = config, ranks, machine
        self._written, self._say = written or config.tree(), say

    def lines(self, *, as_given: bool = False) -> list[str]:
        """The heading, the answer and the table. See ``rows``."""
        rows = self.rows(as_given=as_given)
        return [*self.heading(), "", *fit_table.lines(rows)]

    def rows(self, *, as_given: bool = False) -> list[FitRow]:
        """All rows.

        Args:
            as_given: the first one is the config as it is, if it has strategies.

        Raises:
            ConfigError: the model cannot be described.
        """
        return [*self._here(as_given=as_given), *self._over_more_ranks()]

    def heading(self) -> list[str]:
        """Model, machine and its memory, tokens and precision, and how to change them."""
        machine, section, training = self._machine, self._config.model, self._config.training
        name = section.name_or_path or (section.config or {})["model_type"]
        memory = f"{human(machine.host_available_bytes // self._ranks.local_world_size)} of host memory per rank"
        if machine.device_kind != "cpu":
            memory = f"{human(machine.device_total_bytes)} of device memory, {memory}; {SHARE} of each is used"
        steps = training.gradient_accumulation_steps
        rows = f"{training.per_device_train_batch_size} x {self._config.data.max_length:,} tokens"
        return [
            f"does it fit? {name} on {machine.name}: {memory}",
            f"each rank: {rows}{f', {steps} times per step' * (steps > 1)}, {precision_of(self._config).value}, "
            f"{training.optim}; change with training.per_device_train_batch_size=, data.max_length=, training.bf16=",
        ]

    def _here(self, *, as_given: bool) -> list[FitRow]:
        """Rows on the ranks that were asked for: each way that is not the same as one before it."""
        config, rows = self._config, list[FitRow]()
        if as_given and config.strategies:
            rows.append(self._row(_Way(config.model.lora is None, config.tree(), given=True), self._ranks))
        names = [name for name in _saving() if not find(name).needs_ranks]
        for plain in _plain(config):
            for group in ([], *([name] for name in names), names):
                row = self._row(plain.using(group), self._ranks)
                if not any(_alike(row, other) for other in rows):
                    rows.append(row)
        return rows

    def _over_more_ranks(self) -> Iterator[FitRow]:
        """All weights over more ranks of this machine: what needs ranks alone if that fits, else with another one."""
        whole, now = _plain(self._config)[0], self._ranks
        alone = [name for name in _saving() if not find(name).needs_ranks]
        for sharing in (name for name in _saving() if find(name).needs_ranks):
            ways = [whole.using([sharing]), *(whole.using([sharing, name]) for name in alone)]
            for count in [now.world_size] * (now.world_size > 1) + [times * now.world_size for times in MORE_RANKS]:
                ranks = Ranks(world_size=count, local_world_size=min(count, max(now.local_world_size, A_MACHINE)))
                rows = []
                for way in list(ways):
                    rows.append(self._row(way, ranks))
                    if rows[-1].refused:  # two that decide the same
                        ways.remove(way)
                    if rows[-1].fits:
                        break
                yield min(rows, key=lambda row: (not row.fits, bool(row.refused), sum(row.missing.values())))

    def _row(self, way: _Way, ranks: Ranks) -> FitRow:
        """The row of one way.

        Raises:
            ConfigError: it is about the model, since no strategy is on.
        """
        row = FitRow(
            whole=way.whole,
            strategies=way.names,
            given=way.given,
            ranks=ranks.world_size,
            write=changes(self._written, way.tree),
        )
        self._say(f"planning {row.training} on {row.ranks} rank{'s' * (row.ranks > 1)}")
        if known_rates(self._machine).rates is None:
            return self._planned(row, way, ranks, self._machine)
        # Without rates nothing is simulated, and a plan takes a tenth of the time. With rates saved tensors may wait on
        # the host, too: that makes room on the device for as many other bytes, so the host has to hold as much as
        # before, up to the sizes of slots.
        without = replace(self._machine, origin="profile", rates=None)
        quick = self._planned(row, way, ranks, without, only_host=True)
        short = Home.HOST in quick.missing or quick.refused
        return quick if short else self._planned(row, way, ranks, self._machine)

    def _planned(self, row: FitRow, way: _Way, ranks: Ranks, machine: Machine, *, only_host: bool = False) -> FitRow:
        """``row`` with what ``plans_of`` finds; of stages, that which needs most.

        Args:
            only_host: how much the device is short of is not wanted.
        """
        try:
            plans = plans_of(build(way.tree).like(self._config), ranks, machine, say=lambda line: None)
            plan = max(plans, key=lambda each: each.peak(Home.DEVICE))
        except TooLargeError as short:
            home = Home(short.home)
            if only_host and home is not Home.HOST:
                return row
            return replace(row, needed={home: short.needed}, missing={home: short.needed - short.budget})
        except (ConfigError, ValueError) as error:  # pydantic's is a ValueError
            if isinstance(error, ConfigError) and not way.names and not way.given:
                raise
            return replace(row, refused=str(error).splitlines()[0])
        needed, missing = {home: plan.peak(home) for home in Home}, _missing(plan)
        return replace(row, needed=needed, missing=missing, seconds=None if missing else _seconds(plan))


@contextmanager
def explained(config: RunConfig, ranks: Ranks, machine: Machine) -> Iterator[None]:
    """A refusal for memory that is raised inside ends with the table when it is reported."""
    try:
        yield
    except TooLargeError as refused:
        refused.what_fits = lambda: ["", *Fit(config, ranks, machine).lines()]
        raise


def _saving() -> list[str]:
    """Names of the strategies that save memory, in the order in which they decide."""
    names = [name for name in available() if find(name).to_fit is not None]
    return sorted(names, key=lambda name: list(Phase).index(find(name).phase))


def _plain(config: RunConfig) -> tuple[_Way, _Way]:
    """Training of all weights, and of adapters, without strategies that save memory and without what they exclude.

    Nor with those that divide one copy of the model over ranks, which ``launch/plan.py --search`` compares.
    """
    tree = config.tree()
    dropped = {*_saving(), *(name for name, strategy in config.strategies.items() if strategy.divides())}
    tree["strategies"] = {name: options for name, options in tree["strategies"].items() if name not in dropped}
    for key in chain.from_iterable(find(name).excludes for name in _saving()):
        section, name = key.split(".")
        if tree[section].get(name):
            tree[section] = tree[section] | {name: False}
    model = dict(tree["model"])
    own = model.pop("lora", None)
    if own is not None and model["dtype"] == "bfloat16":
        model["dtype"] = "float32"  # bf16 was for the frozen weights
    half = {"dtype": "bfloat16"} if config.training.bf16 and own is None else {}
    adapters = tree["model"] | {"lora": own or LORA_SECTION} | half
    return _Way(True, tree | {"model": model}), _Way(False, tree | {"model": adapters})


def _missing(plan: Plan) -> dict[Home, int]:
    """Bytes beyond what may be used of one rank's memory, by home. A CPU's device is its host memory."""
    machine = plan.facts.machine
    device, host = plan.peak(Home.DEVICE), plan.peak(Home.HOST)
    if not machine.has_accelerator:
        beyond = {Home.HOST: device + host - machine.host_bytes}
    else:
        beyond = {
            Home.DEVICE: device - device_budget(machine),
            Home.HOST: host - int(SHARE * machine.host_bytes),
        }
    return {home: size for home, size in beyond.items() if size > 0}


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
    changed_keys = {}
    for section in ("model", "training"):
        old, new = written[section], tree[section]
        changed = {name: value for name, value in new.items() if name not in old or value != old[name]}
        changed_keys[section] = changed | {name: None for name in old if name not in new}
    found = {section: change for section, change in changed_keys.items() if change}
    if tree["strategies"] != written["strategies"]:
        found["strategies"] = tree["strategies"]
    return tuple(one_line(section, value) for section, value in found.items())
