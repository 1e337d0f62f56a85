"""The interface of a strategy: one file with one frozen class of options, which first decides and later acts.

``decide`` is pure, so that every placement can be shown, compared and tested before anything is allocated. ``apply``
changes the model afterwards, in the order that ``trainer/run/building.py`` gives.

Each strategy answers one question, its phase, about units of the model. Phases are decided in the order of the enum
below, because each answer needs the sizes that the phases before it have settled. The rest of this project does not
know strategies by name: what one requires, excludes or measures it declares here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.metadata import version
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, PrivateAttr

from deepstow.strategies.core.resume import Rule, on_resume

if TYPE_CHECKING:
    from torch import nn

    from deepstow.strategies.core.facts import Facts, RunFacts, Tier
    from deepstow.strategies.core.plan import Decision, Plan


class Phase(Enum):
    """The question that a strategy answers. Phases are decided in the order of the members."""

    HOW = "how is it computed"
    WHO = "who holds which share"
    KEEP = "what does forward keep"
    WHERE = "where does it rest, when does it travel"
    BUFFER = "which buffer receives it"


class Axis(Enum):
    """Along which a copy of the model, or a row, is divided among ranks (``strategies/core/grid.py``); the value is the
    key. Ranks that divide ``EXPERTS`` are not one copy's: each has rows of its own, and the grid does not know them.
    ``TOKENS`` are divided over the ranks of ``TENSOR`` once more, between layers.
    """

    STAGES = "strategies.pipeline.stages"
    TENSOR = "strategies.tensor.degree"
    TOKENS = "strategies.tensor.sequence_parallel"
    SEQUENCE = "strategies.sequence.degree"
    EXPERTS = "strategies.experts.degree"


COMPILE_KEYS = ("torch_compile", "torch_compile_backend", "torch_compile_mode")  # each alone switches it on
COMPILING = tuple(f"training.{key}" for key in COMPILE_KEYS)


class Requirement(Enum):
    """Something that the trainer prepares only for strategies that declare it in ``requires``."""

    PARAMETERS = "the model's parameters, listed one by one"
    BLOCK_TIMES = "measured times of the model's blocks, if there are any"
    COMPUTE_DTYPE = "weights in the dtype of compute instead of autocast"
    DEEPSPEED = "DeepSpeed's engine and its process group"


@dataclass(frozen=True, slots=True)
class Parity:
    """How far weights trained with a strategy may differ from those of plain training.

    ``tolerance`` is the largest difference, relative to the largest weight of the same tensor, after the steps of the
    parity tests; 0.0 means bit for bit, and ``LOSSY`` that no difference is too large: the result is another one.
    """

    tolerance: float
    reason: str

    def __post_init__(self) -> None:
        assert self.tolerance == 0.0 or self.reason, "a tolerance above zero states its reason"

    @property
    def is_lossy(self) -> bool:
        return self.tolerance == LOSSY


LOSSY = inf
BITWISE = Parity(0.0, "")


class Removed(NamedTuple):
    """An option, or a value of one, that earlier versions had."""

    cure: str  # what to write instead
    state: str = ""  # why no run goes on from a checkpoint that was saved with it; empty: one goes on without


@dataclass(frozen=True, slots=True)
class FitOptions:
    """With which options ``deepstow fit`` tries a strategy."""

    options: Mapping[str, Any] | None = None  # with which training fits into less memory; None: it does not
    # Changes of the config for it, each of which saves more and gives exactness up: tried where nothing else fits.
    inexactly: tuple[Mapping[str, Any], ...] = ()
    kept: tuple[str, ...] = ()  # options that say what the machine has or what is given up: they stay as written
    rows_by: str = ""  # the option that takes how many ranks of a machine share rows, where nothing else fits
    needs_ranks: bool = False  # it saves memory on several ranks only
    # The options for a folder on a disk, and for how much of it, which are tried where memory alone is too small.
    disk: tuple[str, str] | None = None


class Strategy(BaseModel, ABC):
    """Base of every strategy. Fields are the options; the class docstring is the user's manual."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    phase: ClassVar[Phase]
    examples: ClassVar[tuple[Mapping[str, Any], ...]]  # small options with which the parity tests run it
    # Strategies that this one depends on: switched on with these options if the config does not name them.
    implies: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    # Strategies that are not switched on for others where this one is: they do not go together, or it does their work.
    spares: ClassVar[tuple[str, ...]] = ()
    requires: ClassVar[frozenset[Requirement]] = frozenset()
    fit: ClassVar[FitOptions | None] = None  # what ``deepstow fit`` may do with it; None: nothing
    # Strategies whose questions this one answers itself, where both are on; then they are in ``_others``.
    takes_over: ClassVar[tuple[str, ...]] = ()
    resume: ClassVar[Rule] = "fixed"  # its rule for resuming, and that of options that state none
    # Options that earlier versions had, by option and value; None: whatever the value.
    removed: ClassVar[Mapping[tuple[str, str | None], Removed]] = {}

    _others: Mapping[str, Strategy] = PrivateAttr(default_factory=dict)
    _brief: bool = PrivateAttr(default=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        on_resume(cls.resume)

    @classmethod
    def removed_of(cls, option: str, value: object) -> Removed | None:
        """Whether only earlier versions had ``option``, or this value of it."""
        return cls.removed.get((option, str(value))) or cls.removed.get((option, None))

    @property
    def written(self) -> Mapping[str, Any]:
        """The options that were given, without defaults."""
        return self.model_dump(exclude_unset=True)

    def parity(self, run: RunFacts) -> Parity:
        """How a run with this precision, clipping and accumulation must compare with the same run without it."""
        return BITWISE

    @abstractmethod
    def decide(self, facts: Facts, plan: Plan) -> Iterable[Decision]:
        """Answer this strategy's question for the units it changes. No torch, no clock, no device. Raise Refusal if the
        options cannot work with these facts, and say what would; Idle if there is nothing to decide, and say why.
        """

    def narrowed(self, facts: Facts, rank: int) -> Facts:
        """The facts of the part of the model that ``rank`` has; every strategy decides about that part alone. Raise
        Refusal if the model cannot be divided so.
        """
        return facts

    def planned(self, by: Callable[[Facts], Plan], facts: Facts) -> Plan:
        """The plan that ``by`` makes for ``facts``, or for the facts of another way to make a step."""
        return by(facts)

    def beside(self, others: Mapping[str, Strategy]) -> Strategy:
        """This strategy as it decides instead of ``others``, which it takes over."""
        changed = self.model_copy()
        changed._others = others
        return changed

    def briefly(self) -> Strategy:
        """This strategy as it decides for comparisons: sooner, and its step may be some per cent slower."""
        changed = self.model_copy()
        changed._brief = True
        return changed

    def apply(self, model: nn.Module, plan: Plan) -> None:
        """Change the model as the plan says, before an engine gets it; but not names, order or number of parameters,
        buffers and modules, which the caller checks.
        """

    def divides(self) -> Mapping[Axis, int]:
        """Over how many ranks it divides the model along each axis."""
        return {}

    def refusals(self, run: RunFacts) -> Iterable[Refusal]:
        """Options that cannot work in such a run, whatever the model and the machine are, and that no rule of
        ``compatibility`` is about. All of them are reported together, before any data is read.
        """
        return ()

    def refuses_model(self, model: Mapping[str, Any]) -> Iterable[Refusal]:
        """Why a model of this configuration (Hugging Face's keys) cannot be trained. Asked as soon as it is known."""
        return ()

    def check_installed(self) -> None:
        """Raise Refusal if the strategy does not work with the packages and folders that are here."""


@runtime_checkable
class CutsBlocks(Protocol):
    """A strategy that divides the blocks of a model."""

    def least_blocks(self) -> int:
        """How many blocks a model must have for it."""
        ...


@runtime_checkable
class KnowsMachines(Protocol):
    """A strategy for which it matters on which machines ranks are."""

    def refuses_machines(self, firsts: Sequence[int]) -> Iterable[Refusal]:
        """Why it cannot work on these machines, of several: for each rank the first one of its machine."""
        ...


@runtime_checkable
class HasBudget(Protocol):
    """A strategy that places bytes within a budget."""

    def budget(self, facts: Facts) -> int:
        """Bytes of the device that the options allow on this machine."""
        ...

    def host_budget(self, facts: Facts) -> int:
        """Bytes of the host that the options allow one rank, with those of the process itself."""
        ...

    def suggest(self, plan: Plan) -> Sequence[str]:
        """Lines for people: changes of the config that would make a step faster, the best first."""
        ...


class Refusal(ValueError):
    """A strategy cannot work with these facts: the dotted key, its value, and why or what to write instead."""

    def __init__(self, key: str, value: object, cure: str) -> None:
        super().__init__(key, value)
        self.key = key
        self.value = value
        self._cure = cure

    @property
    def cure(self) -> str:
        return self._cure

    def __str__(self) -> str:
        written = str(self.value).lower() if isinstance(self.value, bool) else repr(self.value)
        return f"{self.key} = {written}: {self.cure}"


def compared_with(key: str, value: object, package: str, release: tuple[int, int]) -> None:
    """Raise Refusal if an older release of ``package`` is installed than what was compared with plain training."""
    if is_older(package, release):
        minimum = ".".join(map(str, release))
        cure = f"was compared with plain training under {package} {minimum}, not {version(package)}; install {minimum}"
        raise Refusal(key, value, cure)


def is_older(package: str, release: tuple[int, int]) -> bool:
    """Whether an older release of ``package`` is installed."""
    return tuple(int(number) for number in version(package).split(".")[:2]) < release


class MemoryRefusal(Refusal):
    """A budget is too small: ``needed`` bytes at ``tier``, of which there may be ``budget``. What ``find_cure`` and
    ``find_needed`` find may take seconds; they are called if somebody reads it.
    """

    def __init__(
        self,
        key: str,
        value: object,
        find_cure: Callable[[], str],
        find_needed: Callable[[], int],
        *,
        tier: Tier,
        budget: int,
    ) -> None:
        super().__init__(key, value, "")
        self.tier = tier
        self.budget = budget
        self._find_cure, self._find_needed = cache(find_cure), cache(find_needed)

    @property
    def cure(self) -> str:
        return self._find_cure()

    @property
    def needed(self) -> int:
        return self._find_needed()


class Idle(Exception):
    """A strategy that is switched on has nothing to decide here. The plan shows the reason."""
