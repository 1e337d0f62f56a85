"""``deepstow search``: how to use all ranks of a job, by the search of ``strategies/planner/hybrid``; and
``--tokens``: what a whole run takes, with the best of them or with the config's own degrees.

The global batch is what the config says: micro-batch x accumulation x ranks. Everything that the search decides is
taken out of the config first; the rest stays, and so do budgets of memory and ``strategies.tensor.sequence_parallel``.
A rank's share of the model is counted for each micro-batch and degree as that of a config with ``strategies.tensor``,
``strategies.pipeline``, ``strategies.sequence`` or ``strategies.experts``. Not tried: degrees that these refuse for
this model or beside what else is in the config.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from deepstow.strategies.core.compose import degrees as degrees_of
from deepstow.strategies.core.facts import EXPERT, Compression, Facts, Param, Rates, UnitKind
from deepstow.strategies.core.plan import Plan
from deepstow.strategies.core.protocol import Axis, HasBudget, Refusal
from deepstow.strategies.core.sizes import human
from deepstow.strategies.planner.hybrid import keys
from deepstow.strategies.planner.hybrid.degrees import Degrees, Known, Models, Size
from deepstow.strategies.planner.hybrid.search import Options, hybrid
from deepstow.strategies.planner.hybrid.step_seconds import Pricing
from deepstow.strategies.planner.lossy import words
from deepstow.strategies.planner.network import Cluster
from deepstow.strategies.planner.step_cost import HIDDEN, NEAR, plan_cost, step_flops
from deepstow.strategies.report import hybrid_table, run_budget
from deepstow.strategies.report.run_budget import Asked, Step
from deepstow.trainer.config.load import build
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError, first_line
from deepstow.trainer.machine.probe import Machine
from deepstow.trainer.machine.profiles import COMMAND, across, known_rates, stored_at
from deepstow.trainer.model.build import config_of
from deepstow.trainer.planning.facts import check_model, gather, run_facts
from deepstow.trainer.planning.fit import changes
from deepstow.trainer.planning.from_config import narrowed
from deepstow.trainer.tasks.task import only_language

MICRO_BATCHES = (1, 2, 4)
Say = Callable[[str], None]


def search(
    config: RunConfig, ranks: Ranks, machine: Machine, gigabits: float | None, say: Say, *, lossy: bool = False
) -> tuple[list[str], dict[str, Any]]:
    """The lines of the report, and the same for programs.

    Args:
        gigabits: per second, of a rank's network to other machines; None: what is known of the machine.
        lossy: offer compressed exchanges of gradients between machines, too.

    Raises:
        ConfigError: the model cannot be described, rates are unknown, or nothing fits: with what is missing.
    """
    only_language(config, "deepstow search")
    if config.model.quantization_config is not None:
        what = "quantised weights are not divided over ranks, so there is nothing to search; deepstow plan has its plan"
        raise config.error("model.quantization_config", config.tree()["model"]["quantization_config"], what)
    rates = known_rates(machine).rates
    if rates is None:
        what = f"nothing is known of how fast {machine.name} is, and degrees are compared by seconds"
        raise ConfigError(f"deepstow search: {what}; give --profile, or measure this machine: {COMMAND}")
    cluster = cluster_of(rates, ranks, gigabits)
    if lossy and ranks.world_size == ranks.local_world_size:
        what = f"all {ranks.world_size} ranks are on one machine, and less is sent between machines"
        raise ConfigError(f"--lossy: {what}; give --ranks-per-machine, or leave it out")
    tree = config.tree()
    run = run_facts(config, ranks.world_size)
    sequences = run.micro_batch * run.accumulation * run.replicas
    began = time.process_time()
    shares = Shares(config, ranks, machine, say)
    by_size, not_tried = shares.by_size(sequences)
    in_stages = shares.in_stages(sorted(by_size))
    counted_at = time.process_time()
    facts = next(iter(by_size.values()))
    options = _options(config, facts, lossy=lossy)
    answer = hybrid(by_size, cluster, sequences, options, in_stages)
    ended = time.process_time()
    say(f"CPU seconds: {ended - counted_at:.2f} to search, {counted_at - began:.2f} to count the model before")
    if not answer.best:
        size = human(options.device_bytes or machine.device_total_bytes or machine.host_available_bytes)
        rank_words = f"{ranks.world_size} rank{'s' * (ranks.world_size > 1)}"
        line = f"deepstow search: nothing fits on {rank_words} of {machine.name} with {size}; nearest:"
        raise ConfigError([line, *hybrid_table.nothing_fits(answer)])
    peak = machine.peak_flops.get(facts.run.precision.value)
    flops = step_flops(facts) * sequences / facts.run.micro_batch
    scale = hybrid_table.Scale(
        tokens=sequences * facts.run.sequence,
        ranks=ranks.world_size,
        seconds_at_peak=flops / peak / ranks.world_size if peak else None,
        origin=rates.origin,
    )
    best = answer.best[0].degrees
    write = changes(tree, keys.written(best, tree))
    speed = scale.tokens / scale.ranks / answer.best[0].price.seconds
    near = f"{(1 - NEAR) * speed:,.0f} to {(1 + NEAR) * speed:,.0f} tokens/s/rank for the first row"
    lines = [*heading(config, ranks, machine, cluster, sequences)]
    lines += [f"published runs were within {NEAR:.0%} of what is found so, to either side: {near}", ""]
    lines += hybrid_table.lines(answer, scale, write, not_tried, links(facts, cluster) if lossy else {})
    return lines, hybrid_table.to_json(answer, scale, write)


def _options(config: RunConfig, facts: Facts, *, lossy: bool) -> Options:
    """What the search may vary, by what the config has besides."""
    budgets = (strategy.budget(facts) for strategy in config.strategies.values() if isinstance(strategy, HasBudget))
    in_chunks = config.strategies.get(keys.CHUNKS)
    beside = {name: strategy for name, strategy in config.strategies.items() if name not in keys.SEARCHED}
    try:
        compressions = [*keys.lossy(facts)] if lossy else []
    except Refusal as refusal:
        raise ConfigError(f"--lossy: {refusal}") from None
    return Options(
        lossy=compressions,
        refused=keys.refused(replace(facts.run, in_slices=Axis.TOKENS in degrees_of(config.strategies)), beside),
        chunked=in_chunks.model_dump()["chunked"] if in_chunks is not None else None,
        device_bytes=min((size for size in budgets if size is not None), default=None),
        trained=True,
    )


def links(facts: Facts, cluster: Cluster) -> dict[Compression, str]:
    """What the link between machines gains by each lossy exchange; top-k with the ranks at which it gains nothing."""
    assert facts.machine.rates is not None and cluster.across is not None
    rates = replace(facts.machine.rates, net_across_bytes_per_s=cluster.across.bytes_per_s)
    machine = replace(facts.machine, rates=rates, ranks=cluster.per_machine)
    about = replace(facts, machine=machine)
    hows = keys.lossy(facts, (*keys.LOSSY, {"compress": "topk"}))
    return {how: words(replace(about, run=replace(facts.run, compression=how))) for how in hows}


def more_ranks(models: Models, rates: Rates, cluster: Cluster, degrees: Degrees) -> Iterator[tuple[int, int, float]]:
    """The step of ``degrees``, and those of twice to eight times as many data ranks, as far as the network is known."""
    sequence = models.of(degrees).facts.run.sequence
    for times in (1, 2, 4, 8):
        wide, more = replace(degrees, data=times * degrees.data), replace(cluster, ranks=times * cluster.ranks)
        if times == 1 or cluster.across is not None or more.ranks <= cluster.per_machine:
            tokens = wide.data * wide.micro_batch * wide.micro_batches * sequence
            yield more.ranks, tokens, Pricing(models, more, rates, trained=True).price(wide).seconds


def budget(
    config: RunConfig, ranks: Ranks, machine: Machine, gigabits: float | None, plans: Sequence[Plan], asked: Asked
) -> Iterator[str]:
    """What a run with the ``plans`` of a config takes, one per stage. ConfigError: the machine's rates and peak are
    unknown.
    """
    shares, degrees = Shares(config, ranks, machine, lambda _: None), keys.read(config.tree(), ranks.world_size)
    facts = shares.whole
    cost = plan_cost(plans[0])
    rates = known_rates(machine).rates
    peak = machine.peak_flops.get(facts.run.precision.value)
    if rates is None and not peak:
        raise ConfigError(f"--tokens: neither the rates nor the peak of {machine.name} are known; give --profile")
    steps: list[Step] = [(ranks.world_size, plans[0].facts.run.tokens_per_step, None)]
    if rates is not None:
        models = shares.of(degrees)
        priced = list(more_ranks(models, rates, cluster_of(rates, ranks, gigabits), degrees))
        # A plan that stows knows what rests where; how its step grows is ours.
        ratio = cost.seconds / priced[0][2] if cost is not None and len(plans) == 1 else 1.0
        steps = [(number, tokens, ratio * seconds) for number, tokens, seconds in priced]
    again = run_budget.repeated(plan.facts_as_kept() for plan in plans)
    yield from run_budget.lines(asked, run_budget.active_params(facts), again, peak, steps)


def heading(config: RunConfig, ranks: Ranks, machine: Machine, cluster: Cluster, sequences: int) -> Iterator[str]:
    """Model, machine, network and batch: what all rows have in common."""
    name = config.model.name_or_path or (config.model.config or {})["model_type"]
    size = human(machine.device_total_bytes) if machine.device_kind != "cpu" else "no accelerator"
    rank_words = f"{ranks.world_size:,} rank{'s' * (ranks.world_size > 1)}, {ranks.local_world_size} per machine"
    yield f"degrees for {name} on {rank_words}, of {machine.name} ({size})"
    net = f"exchanges {cluster.inside.bytes_per_s / 1e9:.3g} GB/s per rank inside a machine"
    if cluster.across is not None and cluster.ranks > cluster.per_machine:
        net += f", {cluster.across.bytes_per_s / 1e9:.3g} across"
    tokens = config.data.max_length
    yield f"{net}; {sequences:,} sequences of {tokens:,} tokens per step, as the config says; all seconds are simulated"


def cluster_of(rates: Rates, ranks: Ranks, gigabits: float | None) -> Cluster:
    """The ranks and their network. ConfigError: machines are not full, or the network across them is unknown."""
    if gigabits is not None:
        rates = replace(rates, net_across_bytes_per_s=across(gigabits))
    several = ranks.world_size > ranks.local_world_size
    if ranks.world_size % ranks.local_world_size:
        what = f"{ranks.world_size} ranks do not fill machines of {ranks.local_world_size}"
        raise ConfigError(f"--ranks-per-machine {ranks.local_world_size}: {what}; give a number that divides them")
    if several and rates.net_across_bytes_per_s is None:
        raise ConfigError(
            f"nothing is known of the network across machines; give --network 200 (Gb/s of each rank), or "
            f"write net_across_bytes_per_s into {stored_at()}, which is never measured"
        )
    return replace(Cluster.of(rates, ranks.world_size, ranks.local_world_size), hidden=HIDDEN)


class Shares:
    """Counts the shares of one config's model; ``say`` is told of each count before. Raises ConfigError if the model
    cannot be described.
    """

    def __init__(self, config: RunConfig, ranks: Ranks, machine: Machine, say: Say) -> None:
        for name, strategy in config.strategies.items():
            if (parity := strategy.parity(run_facts(config, ranks.world_size))).is_lossy:
                what = (
                    f"deepstow search and --tokens offer nothing lossy of a config, and {parity.reason}; leave it out"
                )
                raise config.error(f"strategies.{name}", strategy.written, what)
        self._config = config
        self._ranks = ranks
        self._machine = machine
        self._say = say
        self._tree = config.tree()
        self.whole = self._gathered(build(keys.without(self._tree)).like(config))

    def of(self, degrees: Degrees) -> Models:
        """What ranks of these degrees run, with the config's own micro-batch."""
        share = self._share(degrees.size)
        return Models({degrees.size: share}, self.in_stages([degrees.size]) if degrees.stages > 1 else None)

    def by_size(self, sequences: int) -> tuple[Known, list[str]]:
        """Facts of each share that is tried, and why others are not: multiples of a degree that is refused are, too."""
        own_size = self.whole.run.micro_batch
        ranks = self._ranks
        refused = dict[str, str]()
        sizes = [own_size, *(size for size in MICRO_BATCHES if sequences % size == 0 and size != own_size)]
        facts_of = {Size(own_size): self.whole} | {Size(size): self._share(Size(size)) for size in sizes[1:]}
        experts = self.whole.run.num_experts
        for name, shares in keys.divided(sizes, ranks.world_size, ranks.local_world_size, experts):
            if name not in refused:
                try:
                    facts_of |= {share: self._share(share) for share in shares}
                except (ConfigError, ValueError) as error:
                    line = str(error).splitlines()[0] if isinstance(error, ConfigError) else first_line(error)
                    refused[name] = line
        return facts_of, [*refused.values()]

    def in_stages(self, sizes: Sequence[Size]) -> Known:
        """Facts of a model in torch's pipeline, of those sizes that stages may have; none where it cannot be cut."""
        if sum(unit.kind is UnitKind.BLOCK for unit in self.whole.units) < 2:
            return {}
        plain = [size for size in sizes if size.sequence == size.experts == 1]
        try:
            return {size: self._share(size, staged=True) for size in plain}
        except (ConfigError, ValueError):  # a pipeline does not go with what else the config says
            return {}

    def _share(self, size: Size, *, staged: bool = False) -> Facts:
        """The facts of a rank's share of the model; ``staged``: in torch's pipeline."""
        micro_batch, *divided = size
        tree = keys.staged(self._tree, size.tensor) if staged else keys.without(self._tree, *divided)
        labelled = zip(("tensor rank", "rank of a row", "rank of experts"), divided, strict=True)
        share = next((f"one {name} of {degree}" for name, degree in labelled if degree > 1), "a rank")
        self._say(f"counting a micro-batch of {micro_batch} on {share}{' in stages' * staged}")
        tree = tree | {"training": tree["training"] | {"per_device_train_batch_size": micro_batch}}
        return self._gathered(build(tree).like(self._config))

    def _gathered(self, config: RunConfig) -> Facts:
        """Facts as of a whole model, with one parameter per unit, which says that a tied head uses the embedding's, and
        one for its experts if ranks divide them.
        """
        facts = gather(config, self._ranks.world_size, self._ranks.local_world_size, self._machine)
        experts = Counter[str]()
        if Axis.EXPERTS in degrees_of(config.strategies):
            check_model(config, config_of(config))  # which counts that are kept do not
            facts = narrowed(config, facts, 0)
            for param in facts.params:
                if EXPERT.search(param.name):
                    experts[param.unit] += param.num_elements
        head = next((unit.name for unit in facts.units if unit.kind is UnitKind.HEAD), None)
        params = [
            Param(
                name=unit.name,
                unit=unit.name,
                num_elements=unit.num_params - experts[unit.name],
                dtype="float32",
                group=0 if unit.num_trainable else None,
                users=(head,) if facts.run.tied and head is not None and unit.kind is UnitKind.EMBEDDING else (),
            )
            for unit in facts.units
        ]
        params += [Param(f"{unit}: experts", unit, size, "float32", 0) for unit, size in experts.items()]
        run = replace(facts.run, stages=1, tensor=1, model_params=0, model_flops=0)
        return replace(facts, run=run, params=tuple(params))
