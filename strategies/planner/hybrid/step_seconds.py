"""Seconds of a step under given degrees: simulated, by operations over rates.

A stage's forward and backward are those of ``step_cost.py``, with what recomputation repeats. To that come

    tensor      per block all-reduces of the hidden states: two in forward, in backward one for each layer divided by
                columns (``RunFacts.sums``), and under full recomputation the first one again; nothing hides them.
                Where ranks have slices of the tokens there is a gather before and a scattered sum behind attention and
                the MLP; two gathers are made once more in backward, and two when a block runs again, which under
                ``full`` also scatters a sum
    sequence    per block four messages of heads in each pass (``network.py``), once more if the block runs again
    experts     per layer of experts what products do not hide of sending rows there and back, in each pass, and if the
                block runs again (``overlap.py``); rows are spread evenly. Gradients, weights and state of experts
                are exchanged and divided by the ranks that have the same ones
    ZeRO 3      weights gathered in forward and in backward, gradients scattered, at every micro-batch (3 M); ZeRO 2
                scatters gradients at every micro-batch (M + 1); in a machine a pass takes the longer of compute and
                exchange, across machines their sum (``network.py``). One message per unit: blocks are gathered whole
    ZeRO 0, 1   gradients once per step (2), under the backward of the last micro-batch, but for the last unit's;
                torch's pipeline sums them after it, and under ZeRO 1 as well (3 with the weights that it gathers)
    offload     gradients down under the last backward; then the CPU's update and the new weights up under the next
                forward, but never less than an update on the device, so that offload is not proposed where it is not
                needed. Weights that travel come up twice per micro-batch, under its passes
    lossy       the part that is sent of what ZeRO 0 sends, and coding, which nothing hides (``planner/lossy.py``);
                of local steps the average, and nothing hides it
    update      on the device, as in ``step_cost.py``; ZeRO 1 and 2 gather the new weights after it

and the clock of a pipeline in 1F1B. With s stages to come, a stage runs s forwards to fill the pipeline, then one
forward and one backward in turn. A forward waits for the activations of the stage before, a backward for the gradients
of the stage after. They are sent while stages compute, one after the other in each direction of each boundary. Orders
do not depend on times, so an end is a maximum of sums of durations: what gets shorter makes no end later.

That smaller products are slower is not modelled, so narrow shards and small micro-batches look better than they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product

from deepstow.strategies.core.facts import HOST_UPDATE_BYTES, Rates, UnitKind, Work
from deepstow.strategies.core.layout import SCRATCH_ELEMENTS
from deepstow.strategies.planner import lossy
from deepstow.strategies.planner.activation_policy import FULL, by_policy
from deepstow.strategies.planner.engine_bytes import boundary_bytes
from deepstow.strategies.planner.hybrid.degrees import Degrees, Model, Models, Part, Stowed
from deepstow.strategies.planner.network import Cluster, Timeline, slices_seconds
from deepstow.strategies.planner.overlap import exchanges_of
from deepstow.strategies.planner.step_cost import (
    device_update,
    slowed,
    trained_seconds,
    unit_seconds,
)


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Of one micro-batch in one stage, and of sending its activations on, or as many gradients back the same way."""

    forward: float
    backward: float
    send: float = 0.0  # to the next stage; the last one sends nothing


def in_order(stages: int, micro_batches: int) -> list[tuple[int, bool, int]]:
    """All that the stages do in an order in which each waits for earlier ones only: the stage, whether it is a
    backward, and the micro-batch. Sorted by when it is done if a forward and a backward take one unit of time each.
    """

    def slot(task: tuple[int, bool, int]) -> int:
        stage, backward, number = task
        if backward:
            return 2 * (stages + number) - 1 - stage
        return stage + (number if number < stages - stage else 2 * number)

    return sorted(product(range(stages), (False, True), range(micro_batches)), key=slot)


def last_backwards(stages: Sequence[StageSeconds], micro_batches: int) -> list[float]:
    """Per stage, when its last backward ends, in seconds from the start of the step."""
    count, timeline = len(stages), Timeline()
    if count == 1:
        return [micro_batches * (stages[0].forward + stages[0].backward)]
    arrived: dict[tuple[int, bool, int], float] = {}
    for task in in_order(count, micro_batches):
        stage, backward, number = task
        seconds, to = stages[stage], stage - 1 if backward else stage + 1
        ended = timeline.add(stage, seconds.backward if backward else seconds.forward, arrived.pop(task, 0.0))
        if 0 <= to < count:
            send = stages[min(stage, to)].send
            arrived[to, backward, number] = timeline.add((stage, to), send, ended)
    return [timeline.free[stage] for stage in range(count)]


def least_seconds(stages: Sequence[StageSeconds], micro_batches: int) -> float:
    """No schedule is faster: a stage waits for the first micro-batch, does all, and the last one has to go back."""
    bound = started = 0.0
    for stage in stages:
        busy = stage.forward + stage.backward
        bound = max(bound, started + micro_batches * busy)
        started += busy + 2 * stage.send
    return bound


@dataclass(frozen=True, slots=True)
class StagePrice:
    """One stage.

    Args:
        work: compute of one micro-batch, forward and backward; ``again`` is recomputed, ``reduced`` exchanged inside.
        seconds: of one micro-batch as the pipeline's clock takes it, with exchanges that compute does not hide.
        sync: seconds of exchanges under the last backward; ``first`` is the last unit's, which nothing hides.
        after: seconds after the gradients are complete: the update, and gathering or fetching the new weights.
    """

    work: float
    again: float
    reduced: float
    seconds: StageSeconds
    sync: float
    first: float
    after: float

    def exposed(self, end: float) -> float:
        """When its gradients are complete, if the last backward ends at ``end``."""
        return max(end + self.first, end - self.seconds.backward + self.sync)


@dataclass(frozen=True, slots=True)
class Price:
    """A step under some degrees, and where its seconds go; they add up.

    In ``parts``, of the average stage: compute, recompute, exchanges inside layers, and waiting for what else is
    exchanged or fetched at every micro-batch; then the bubble, with unlike stages and sending; at the end the gradient
    exchange that is not hidden, and the update.
    """

    seconds: float
    parts: Mapping[str, float]

    @property
    def binds(self) -> str:
        """What takes most, and what besides compute takes most."""
        shares = {name: seconds / self.seconds for name, seconds in self.parts.items()}
        named = sorted(shares, key=lambda name: -shares[name])
        beside = named[1] if named[0] == COMPUTE else ""
        return f"{named[0]} {shares[named[0]]:.0%}" + (f", {beside} {shares[beside]:.0%}" if beside else "")


COMPUTE = "compute"


def _inside(degrees: Degrees) -> str:
    """Who exchanges inside layers."""
    return "sequence" if degrees.sequence > 1 else "expert" if degrees.experts > 1 else "tensor"


class Pricing:
    """Prices degrees, and remembers what it counted. ``trained``: compute as in published runs (``step_cost.py``)."""

    def __init__(self, models: Models, cluster: Cluster, rates: Rates, *, trained: bool = False) -> None:
        inside, across = cluster.inside, cluster.across
        rates = replace(rates, net_bytes_per_s=inside.bytes_per_s, net_latency_s=inside.latency_s)
        if across is not None:
            rates = replace(rates, net_across_bytes_per_s=across.bytes_per_s, net_across_latency_s=across.latency_s)
        self._models = models
        self._cluster = cluster
        self._rates = rates
        self._trained = trained
        self._again = slowed(rates) if trained else rates
        self._sums_of: dict[object, list[list[float]]] = {}
        self._stages_of: dict[object, StagePrice] = {}

    def stages(self, degrees: Degrees) -> list[StagePrice]:
        """The price of each stage."""
        model = self._models.of(degrees)
        parts = model.parts(degrees.stages)
        prices, ranks = [], degrees.tensor * degrees.copies
        size = boundary_bytes(model.facts.run)
        for index, part in enumerate(parts):
            key = (degrees, model.key(part))
            if key not in self._stages_of:
                self._stages_of[key] = self._stage(degrees, model, part)
            price = self._stages_of[key]
            send = self._cluster.send_seconds(size, index, ranks) if index + 1 < len(parts) else 0.0
            prices.append(replace(price, seconds=replace(price.seconds, send=send)))
        return prices

    def least(self, degrees: Degrees) -> float:
        """Not more than what ``price`` finds, in no time."""
        stages = self.stages(degrees)
        end = least_seconds([stage.seconds for stage in stages], degrees.micro_batches)
        return stages[0].exposed(end) + max(stage.after for stage in stages)

    def price(self, degrees: Degrees) -> Price:
        """The simulated step. No update begins before all gradients are there, since they are clipped together."""
        stages = self.stages(degrees)
        ends = last_backwards([stage.seconds for stage in stages], degrees.micro_batches)
        complete = max(stage.exposed(end) for stage, end in zip(stages, ends, strict=True))
        after = max(stage.after for stage in stages)
        share = degrees.micro_batches / len(stages)
        spent = {
            COMPUTE: share * sum(stage.work for stage in stages),
            "recompute": share * sum(stage.again for stage in stages),
            f"{_inside(degrees)} exchanges": share * sum(stage.reduced for stage in stages),
        }
        waited = share * sum(stage.seconds.forward + stage.seconds.backward for stage in stages) - sum(spent.values())
        spent["waiting"] = max(0.0, waited)
        spent["bubble"] = max(0.0, max(ends) - sum(spent.values()))
        spent |= {"gradient exchange": complete - max(ends), "update": after}
        return Price(complete + after, spent)

    def _stage(self, degrees: Degrees, model: Model, part: Part) -> StagePrice:
        facts, rates = model.facts, self._rates
        units, plain = model.units(part), self._models.plain(degrees)
        key = (degrees.size, degrees.recompute, plain)
        if key not in self._sums_of:
            self._sums_of[key] = self._sums(degrees, model)
        forward, backward, again, *reduced = (sums[part.end] - sums[part.start] for sums in self._sums_of[key])
        work = forward + backward
        size = facts.run.trained_bytes if plain else facts.run.precision.element_bytes
        weights = size * sum(unit.num_params for unit in units)
        trained = sum(unit.num_trainable for unit in units)
        grads = size * trained
        messages = max(1, len(units))
        copies = degrees.copies
        coded = 0.0
        apart, alike = facts.run.apart if degrees.experts > 1 else 0, copies // degrees.experts

        def gather(num_bytes: float) -> float:
            of_experts = num_bytes * apart / trained if apart else 0.0
            experts_s = self._cluster.gather_seconds(of_experts, alike, degrees.experts, messages) if apart else 0.0
            return experts_s + self._cluster.gather_seconds(num_bytes - of_experts, copies, degrees.tensor, messages)

        forward, backward = forward + reduced[0], backward + again + reduced[1]
        arriving = gather(weights) if degrees.zero == 3 else 0.0
        leaving = gather(grads) if degrees.zero >= 2 else 0.0
        shown = self._cluster.exposed(copies, degrees.tensor)
        forward, backward = forward + shown * arriving, backward + shown * arriving + shown * leaving
        if degrees.offload is not Stowed.NOTHING and copies == 1 and degrees.micro_batches > 1:
            leaving = grads / rates.down_bytes_per_s  # they are added up on the host
        arriving = max(arriving, self._fetched(degrees, weights))
        seconds = StageSeconds(max(forward, arriving), max(backward, arriving + leaving))
        # The last unit's gradients are made last, and nothing is left to hide them.
        if degrees.exchange is not None:
            share, coding = lossy.share_and_coding(degrees.exchanged(facts), rates)
            every = max(1, degrees.exchange.local_steps)
            sent = self._cluster.all_reduce_seconds(share * grads, copies, messages=messages / every)
            once, plain = sent + coding, degrees.exchange.local_steps > 0
            coded = coding * (not plain)
        elif degrees.zero == 0 or plain:
            once = self._cluster.all_reduce_seconds(grads, copies, degrees.tensor, messages)
        else:
            once = gather(grads) if degrees.zero == 1 else 0.0
        sync, first = once, once if plain else coded + (once - coded) / messages
        after = gather(weights) if degrees.zero in (1, 2) else 0.0
        share = (trained - apart) / copies + apart / alike if degrees.zero else trained
        update = device_update(share, rates, -(-share // SCRATCH_ELEMENTS))
        if degrees.offload is not Stowed.NOTHING:
            down = size * share / rates.down_bytes_per_s
            sync, first = max(sync, down), max(first, down / messages)
            on_host = (
                share / rates.update_params_per_s(facts.run.precision),
                size * share / rates.up_bytes_per_s,
                share * (HOST_UPDATE_BYTES + size) / rates.dram_bytes_per_s,
            )
            update = max(update, max(on_host) - seconds.forward)
        after += update
        return StagePrice(work, again, sum(reduced), seconds, sync, first, after)

    def _fetched(self, degrees: Degrees, weights: float) -> float:
        """Seconds in which weights that rest on the host come up, once."""
        if degrees.offload is not Stowed.WEIGHTS:
            return 0.0
        num_bytes = weights / (degrees.copies if degrees.zero == 3 else 1)
        return max(num_bytes / self._rates.up_bytes_per_s, num_bytes / self._rates.dram_bytes_per_s)

    def _sums(self, degrees: Degrees, model: Model) -> list[list[float]]:
        """Sums along the units of the model, of seconds for one micro-batch: forward, backward, what is repeated, and
        exchanges inside layers of both passes.
        """
        original, precision = model.facts, model.facts.run.precision
        facts = replace(original, run=replace(original.run, slices=1))  # these are counted beside the operations
        plain = (trained_seconds if self._trained else unit_seconds)(
            replace(facts, units=tuple(replace(unit, again=Work()) for unit in facts.units)), self._rates
        )
        again = [self._again.seconds(by_policy(unit, degrees.recompute).again, precision) for unit in facts.units]
        exchanging, size = {unit.name for unit in facts.units if unit.kind is UnitKind.BLOCK}, boundary_bytes(facts.run)
        if degrees.sequence > 1:
            exchange_s = slices_seconds(original, self._rates)
            passes = exchange_s, exchange_s * (1 + (degrees.recompute != "none"))
        elif degrees.experts > 1:
            machine = replace(facts.machine, rates=self._rates, ranks=self._cluster.per_machine)
            experts = [param for param in facts.params if param.name != param.unit]
            exchanges = exchanges_of(replace(facts, machine=machine), experts, degrees.experts, None)
            exchanging = {param.unit for param in experts}
            # Selective recomputation keeps products, so the second exchange has none beside it.
            repeated = {"none": 0.0, FULL: exchanges.exposed(1)}.get(degrees.recompute, exchanges.alone)
            passes = exchanges.exposed(1), exchanges.exposed(2) + repeated
        elif facts.run.in_slices and degrees.tensor > 1:
            exchange_s = self._cluster.gather_seconds(size, degrees.tensor)
            repeats = {"none": 0, FULL: 3}.get(degrees.recompute, 2)
            passes = 4 * exchange_s, (6 + repeats) * exchange_s
        else:
            forward_sums, backward_sums, repeats = facts.run.sums
            once = self._cluster.all_reduce_seconds(size, degrees.tensor)
            passes = forward_sums * once, (backward_sums + repeats * (degrees.recompute == FULL)) * once
        forward, backward = ([seconds * (unit.name in exchanging) for unit in facts.units] for seconds in passes)
        columns = (
            [seconds for seconds, _ in plain],
            [seconds for _, seconds in plain],
            again,
            forward,
            backward,
        )
        return [list(accumulate(column, initial=0.0)) for column in columns]
