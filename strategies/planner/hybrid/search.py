"""The search over uniform degrees: every stage has the same ranks, used in the same way.

The grid: stages x tensor x data x ZeRO x recompute x offload x micro-batch; and in one stage, without tensor ranks,
sequence or experts, which no strategy takes beside the two. What cannot be run (``degrees.py``), what strategies refuse
(``keys.py``) and what does not fit (``account.py``) is left out; of the rest each has a lower bound, and only those
that can be among the best are priced by the clock (``step_seconds.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import combinations, islice
from math import inf

from deepstow.strategies.core.facts import Compression
from deepstow.strategies.core.protocol import Refusal
from deepstow.strategies.core.sizes import SHARE
from deepstow.strategies.planner.budget import device_budget
from deepstow.strategies.planner.hybrid import keys
from deepstow.strategies.planner.hybrid.account import Account, Bytes, Chunked
from deepstow.strategies.planner.hybrid.degrees import Degrees, Known, Model, Models, Stowed, is_possible
from deepstow.strategies.planner.hybrid.step_seconds import Price, Pricing
from deepstow.strategies.planner.network import Cluster
from deepstow.strategies.planner.overlap import divisors

POLICIES = ("none", "selective", "full")
BEST, NEAREST = 10, 3
MATTERS = 0.01  # of a step: less does not show
ROUNDING = 1e-12  # of a bound and a price, which add the same numbers in other orders


@dataclass(frozen=True, slots=True)
class Found:
    """Degrees that fit, with a rank's bytes and the simulated step.

    Args:
        between: its seconds at the hopeful and at the careful end of what is assumed of the network (``network.py``).
        settled: at neither end would it change places with another that moves less, nor lose the first place.
    """

    degrees: Degrees
    bytes: Bytes
    price: Price
    between: tuple[float, ...] = ()
    settled: bool = True

    @property
    def assumed(self) -> bool:
        """Whether its seconds depend on what is assumed of the network."""
        return any(abs(seconds - self.price.seconds) > MATTERS * self.price.seconds for seconds in self.between)

    @property
    def order(self) -> tuple[float, ...]:
        """The faster is better, then that which needs less memory; the rest makes the order definite."""
        numbers = (getattr(self.degrees, field.name) for field in fields(Degrees) if field.type == "int")
        return self.price.seconds, self.bytes.device, self.bytes.host, *numbers


@dataclass(frozen=True, slots=True)
class Lacking:
    """Degrees that can be run and do not fit: what is missing of each memory, in bytes."""

    degrees: Degrees
    device: int
    host: int


@dataclass(frozen=True, slots=True)
class Left:
    """What strategies refuse although it would fit, and the lowest bound on its seconds."""

    refusal: Refusal
    seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What the search found.

    Args:
        best: at most ten, the fastest first.
        tried: degrees that were looked at; ``fitting`` of them can be run and fit with as little recomputation and
            offload as that takes; ``priced`` were simulated.
        nearest: those that lack least; where others fit, of those that would be faster than these.
        left: what strategies refuse and would have fitted, of each key the fastest.
        firsts: what would be first with the network at the hopeful and at the careful end of what is assumed.
        lossy: the fastest of each lossy exchange that fits.
        exact: the fastest without one, where lossy ones were looked at.
    """

    best: tuple[Found, ...]
    tried: int
    fitting: int
    priced: int
    nearest: tuple[Lacking, ...] = ()
    left: tuple[Left, ...] = ()
    firsts: tuple[Found, ...] = ()
    lossy: tuple[Found, ...] = ()
    exact: Found | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """What may vary.

    Args:
        refused: what cannot be run; None: what the strategies refuse by themselves.
        chunked: see ``account.py``.
        device_bytes: that may be used of each device; None: the share that is used by default.
        lossy: exchanges of plain data parallelism, besides the exact one.
        trained: compute takes as long as in published runs.
    """

    refused: keys.Refused | None = None
    policies: Sequence[str] = POLICIES
    offloads: Sequence[Stowed] = tuple(Stowed)
    chunked: Chunked = None
    device_bytes: int | None = None
    lossy: Sequence[Compression] = ()
    trained: bool = False


def hybrid(
    known: Known,
    cluster: Cluster,
    sequences: int,
    options: Options | None = None,
    in_stages: Known | None = None,
) -> Answer:
    """The best degrees for ``sequences`` per step, simulated. Pure. ``known`` and ``in_stages``: see ``Models``."""
    return _Search(known, cluster, sequences, options or Options(), in_stages).answer()


class _Search:
    """One question, with what was counted for it so far."""

    def __init__(
        self, known: Known, cluster: Cluster, sequences: int, options: Options, in_stages: Known | None
    ) -> None:
        facts = next(iter(known.values()))
        rates, machine = facts.machine.rates, facts.machine
        assert rates is not None and facts.run.forward_flops, "degrees are compared by simulated seconds"
        self._cluster = cluster
        self._sequences = sequences
        self._options = options
        self._machine = machine
        self._models = Models(known, in_stages)
        self._account = Account(self._models, options.chunked)
        self._priced_on = partial(Pricing, self._models, rates=rates, trained=options.trained)
        self._pricing = self._priced_on(cluster)
        self._whole = Model(facts)
        self._refused = options.refused or keys.refused(facts.run, {})

    def answer(self) -> Answer:
        fitting: list[tuple[Degrees, Bytes]] = []
        lacking: list[Lacking] = []
        rules: dict[str, Left] = {}
        tried = 0
        for on_grid in self._grid():
            # Recomputing or offloading more is never faster: what fits with less of one needs less of the other.
            offloads, refused_keys = list(self._options.offloads), set[str]()
            for recompute in self._options.policies:
                for index, offload in enumerate(offloads):
                    degrees = replace(on_grid, recompute=recompute, offload=offload)
                    tried += 1
                    if not is_possible(degrees, self._cluster.per_machine):
                        continue
                    refusal = self._refused(degrees)
                    if refusal is not None and refusal.key in refused_keys:
                        continue
                    need = self._account.of(degrees)
                    device, host = self._missing(need)
                    if max(device, host) > 0:
                        lacking += [] if refusal else [Lacking(degrees, max(0, device), max(0, host))]
                    elif refusal is not None:
                        refused_keys.add(refusal.key)
                        rule = Left(refusal, self._pricing.least(degrees))
                        rules[refusal.key] = min(rules.get(refusal.key, rule), rule, key=lambda each: each.seconds)
                    else:
                        fitting.append((degrees, need))
                        del offloads[index:]
                        break
        found_best, priced = _best(fitting, self._pricing)
        best, firsts = self._weighed(found_best, fitting)
        exact, *lossy = (
            next(iter(_best([pair for pair in fitting if pair[0].exchange == how], self._pricing)[0]), None)
            for how in (None, *self._options.lossy)
        )
        return Answer(
            best=best,
            lossy=tuple(way for way in lossy if way is not None),
            exact=exact if self._options.lossy else None,
            firsts=firsts,
            tried=tried,
            fitting=len(fitting),
            priced=priced,
            nearest=tuple(islice(self._nearest(lacking, best[0].price.seconds if best else inf), NEAREST)),
            left=tuple(sorted(rules.values(), key=lambda each: each.seconds)),
        )

    def _nearest(self, short: Sequence[Lacking], than: float) -> Iterator[Lacking]:
        """Those that could take less time ``than`` what fits, that which lacks least first; of each kind one."""
        by_kind: dict[object, Lacking] = {}
        for lacking in sorted(short, key=lambda each: each.device + each.host):
            by_kind.setdefault(_kind(lacking.degrees), lacking)
        return (lacking for lacking in by_kind.values() if than == inf or self._pricing.least(lacking.degrees) < than)

    def _grid(self) -> Iterator[Degrees]:
        """Everything that uses all ranks and the whole batch, can it be run or not; without recompute and offload."""
        ranks = self._cluster.ranks
        for size in self._models.sizes:
            together = size.tensor * size.sequence
            most_stages = max(1, self._whole.blocks) if size.sequence == size.experts == 1 else 1
            for stages in divisors(ranks // together, ranks) if ranks % together == 0 else ():
                data = ranks // together // stages
                if stages > most_stages or self._sequences % (data * size.micro_batch):
                    continue
                shape = Degrees(stages=stages, data=data, **size._asdict())
                levels = range(4) if shape.copies > 1 else range(2) if size.tensor > 1 else range(1)
                micro_batches = self._sequences // (data * size.micro_batch)
                for zero in levels:
                    degrees = replace(shape, zero=zero, micro_batches=micro_batches)
                    yield degrees
                    if data == ranks > 1 and zero == 0 and size.experts == 1 and self._models.torchs:
                        yield from (replace(degrees, exchange=exchange) for exchange in self._options.lossy)

    def _missing(self, need: Bytes) -> tuple[int, int]:
        """Bytes beyond what may be used of the device and of the host; at most 0: it fits."""
        machine, asked_bytes = self._machine, self._options.device_bytes
        budget = device_budget(machine) if asked_bytes is None else asked_bytes
        if not machine.has_accelerator:  # its device is its host
            return need.device + need.host - machine.runtime_host_bytes - budget, 0
        return need.device - budget, need.host - int(SHARE * machine.host_bytes)

    def _weighed(
        self, best: Sequence[Found], fitting: Sequence[tuple[Degrees, Bytes]]
    ) -> tuple[tuple[Found, ...], tuple[Found, ...]]:
        """The best with what they would take if the network is otherwise, and what would be first then."""
        others = [self._priced_on(cluster) for cluster in self._cluster.either_way()] if best else []
        firsts = tuple(_best(fitting, pricing)[0][0] for pricing in others)
        between = [tuple(pricing.price(plan.degrees).seconds for pricing in others) for plan in best]
        moving = {0} if any(first.degrees != best[0].degrees for first in firsts) else set[int]()
        for index, other in combinations(range(len(best)), 2):
            for ends in zip(between[index], between[other], strict=True):
                if ends[0] > ends[1]:  # they change places, and the cause is the one that moves more
                    moved = [abs(end - best[at].price.seconds) for end, at in zip(ends, (index, other), strict=True)]
                    moving.add(index if moved[0] > moved[1] else other)
        weighed = (replace(plan, between=between[at], settled=at not in moving) for at, plan in enumerate(best))
        return tuple(weighed), firsts


def _best(fitting: Sequence[tuple[Degrees, Bytes]], pricing: Pricing) -> tuple[list[Found], int]:
    """The best by price, and how many were priced: in the order of lower bounds, until these exceed the last."""
    best: list[Found] = []
    priced = 0
    bounds = [pricing.least(degrees) for degrees, _ in fitting]
    for bound, (degrees, need) in sorted(zip(bounds, fitting, strict=True), key=lambda each: each[0]):
        if len(best) == BEST and bound * (1 - ROUNDING) > best[-1].price.seconds:
            break
        priced += 1
        best = sorted([*best, Found(degrees, need, pricing.price(degrees))], key=lambda each: each.order)[:BEST]
    return best, priced


def _kind(degrees: Degrees) -> object:
    """The same for degrees that are alike to who looks for the nearest."""
    return degrees.stages, degrees.size._replace(micro_batch=1), degrees.offload
