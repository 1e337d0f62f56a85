"""Offload: where the training state rests. The device is used first; the host takes what does not fit.

Arithmetic, for P parameters in bf16 with Adam; the table in ``strategies/core/layout.py`` has all cases:
    device     16 P on the device                      nothing moves
    host        4 P on the device, 12 P on the host    a gradient goes down (2 P), a weight comes up (2 P) per step
    streamed    4 P on the device, 12 P on the host    the state comes and goes: 24 P per step, no work for the CPU
Where weights travel, their 2 P on the device shrink to those in use or in flight, and come up twice per micro-batch.
What of the 12 P of ``host`` has no room there may rest on the disk (``disk``), read and written once per step: 24 P.
So may weights that travel, which are read in forward and in backward, and if they are trained written once: with
updates in backward that take the gradients (``gradients: passing``) nothing of a block has to rest in memory.
With ``zero`` beside it, the ranks share the state in this engine: see ``strategies/engine/ranks/shares.py``.

Invariant. Copies change no bits: weights equal plain training bit for bit in fp32. Gradients wait for the norm if
clipping is on, and each weight is updated before it is next read; nothing is stale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field

from deepstow.strategies.core.facts import Facts, Precision, RunFacts, Tier, UnitKind
from deepstow.strategies.core.formats import names_of, nothing_to_encode, refused_by
from deepstow.strategies.core.layout import Reduction, common_bytes
from deepstow.strategies.core.on_disk import check_folders, disk_bytes, folders_of
from deepstow.strategies.core.optimizers import ELEMENTWISE, OPTIMIZERS
from deepstow.strategies.core.plan import RUN, Conflict, Decision, EngineSet, Plan, Stow
from deepstow.strategies.core.protocol import (
    BITWISE,
    LOSSY,
    FitOptions,
    MemoryRefusal,
    Parity,
    Phase,
    Refusal,
    Removed,
    Requirement,
    Strategy,
)
from deepstow.strategies.core.resume import on_resume
from deepstow.strategies.core.sizes import AUTO, check_budget, check_size, check_size_or_auto, human, parse_bytes
from deepstow.strategies.planner import edits, keep_or_offload, memory_rows
from deepstow.strategies.planner.budget import device_budget, host_budget
from deepstow.strategies.planner.network import from_host
from deepstow.strategies.planner.places import OffloadRequest
from deepstow.strategies.planner.step_cost import plan_cost

_ROUNDING = "the engine computes with bf16 weights and keeps fp32 masters; plain training autocasts fp32 weights"
_ORDER = (
    "plain data parallelism adds the gradients of more than two ranks in another order; where those of an element "
    "cancel, Adam moves it by the learning rate in either direction"
)
_TIED = "a tied head's gradients of all micro-batches are added before those of the embedding; see _ORDER"
_KERNELS = "the CPU's kernel updates what rests on the host; it differs from the device's in the last bit"


Budget: TypeAlias = Annotated[str | int | float, AfterValidator(check_budget)]


class Offload(Strategy):
    """Train a model that is larger than the device: optimizer state, gradients and weights rest on the host, as far as
    they have to.

    By default it uses 0.9 of the memory. Set ``gpu_memory`` to leave more room. The plan shows what goes where
    before anything is allocated.
    """

    phase = Phase.WHERE
    resume = "said"
    implies = {"buffers": {}, "cross_entropy": {}}
    takes_over = ("zero",)
    spares = ("zero",)
    fit = FitOptions(
        {},
        inexactly=(
            *({"strategies": {"offload": {"moments": name}}} for name in names_of("moments")),
            {"strategies": {"offload": {"moments": "int8", "masters": "bf16"}}},
            {
                "strategies": {"offload": {"moments": "int8", "masters": "bf16", "gradients": "passing"}},
                "training": {"max_grad_norm": 0.0},
            },
            {"strategies": {"offload": {"gradients": "passing"}}, "training": {"max_grad_norm": 0.0}},  # beside a disk
        ),
        kept=("disk", "disk_memory", "moments", "masters", "frozen_weights"),
        disk=("disk", "disk_memory"),
    )
    requires = frozenset([Requirement.PARAMETERS, Requirement.COMPUTE_DTYPE, Requirement.BLOCK_TIMES])
    examples = (
        {"site": "device"},
        {"site": "host"},
        {"site": "host", "gradients": "device", "weights": "streamed"},
        {"site": "streamed"},
        {"site": "streamed", "weights": "streamed", "prefetch": 1},
    )

    gpu_memory: Budget = Field(
        default=AUTO,
        description="Memory to use on the device: a size (20GiB), a share (0.8), or auto: 0.9 of it. A size is that of "
        "all tensors; on CUDA the context and libraries have up to 1 GiB beside it.",
    )
    host_memory: Budget = Field(
        default=AUTO,
        description="Host memory that all ranks of a machine use together: a size (200GiB), a share (0.8), or auto: "
        "0.9 of the free memory.",
    )
    disk: Annotated[str | list[str], AfterValidator(check_folders)] | None = Field(
        default=None,
        description="A folder on a local disk, for optimizer state that the CPU updates, and weights, that the host "
        "has no room for: in files there that end with the run. Or a list of folders on several drives, which have "
        "equal parts of it. Goes with disk_memory.",
    )
    disk_memory: Annotated[str, AfterValidator(check_size)] | None = Field(
        default=None,
        description="How much of these disks all ranks of a machine may use together, at most: a size (800GiB).",
    )
    disk_checksums: bool = Field(
        default=True,
        description="What is read from these disks is compared with what was written there. false: the drives are "
        "believed, which saves a seventh of the time of a core for as long as they are read and written.",
    )
    bucket_size: Annotated[str, AfterValidator(check_size_or_auto)] = Field(
        default=AUTO, description="Bytes that are copied together (64MiB); auto: one block."
    )
    prefetch: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        default="auto",
        description="How many blocks ahead of their use weights that travel are fetched, at most; auto: as early as "
        "memory allows.",
    )
    site: Literal["auto", "device", "host", "streamed"] = Field(
        default="auto",
        description="Where weights are updated: on the device, by the CPU (host), on the device with state that rests "
        "on the host (streamed), or as memory allows.",
    )
    weights: Literal["auto", "resident", "streamed"] = Field(
        default="auto",
        description="Weights of blocks: always on the device, fetched for each use (streamed), or as memory allows.",
    )
    gradients: Literal["auto", "device", "host", "passing"] = Field(
        default="auto",
        description="Where gradients wait for the update. passing: nowhere, if weights are their own masters (in fp32, "
        "or masters: bf16), or there is a disk, and the CPU updates in backward (training.max_grad_norm: 0): there are "
        "places for a few on the host, and backward waits for the CPU. It saves 4 bytes of host memory per parameter "
        "in fp32, 2 in bf16.",
    )
    moments: Literal["fp32", "bf16", "int8"] = Field(
        default="fp32",
        description="How AdamW's moments rest. bf16 and int8 save 4 and 6 bytes of host memory per parameter, all "
        "updates are the CPU's and take longer, and training is not exact.",
        json_schema_extra=on_resume("moments"),
    )
    masters: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="bf16: weights in bf16 have no masters in fp32; each update rounds them stochastically. Goes with "
        "moments in fewer bits. It saves 2 bytes of host memory per parameter, 4 with several micro-batches.",
        json_schema_extra=on_resume("moments"),
    )
    frozen_weights: Literal["fp8"] | None = Field(
        default=None,
        description="fp8: frozen matrices of blocks are rounded once, before training, to a byte per weight, and a "
        "scale for each 128. Those that travel rest on the host so, cross the link so, and are made whole on the "
        "device: half the bytes of bf16. Training is exact for the rounded model, not for the one that was loaded.",
        json_schema_extra=on_resume("moments"),
    )
    gather: Literal["auto", "network", "host"] = Field(
        default="auto",
        description="How ranks that share the state (strategies.zero) get each other's parts of weights that are on "
        "the host: over the network, or out of its memory, if all ranks are on one machine; auto: by the rates.",
    )
    reduction: Reduction = Field(
        default="exact",
        description="How ranks that share the state (zero) add their gradients. exact: in the order of ranks, with the "
        "bits of one process that accumulates. fast: by one reduce-scatter, which needs no memory to receive them, "
        "sends less between machines and adds in another order (1e-3 of the largest weight; two ranks: the same bits).",
    )
    accumulation: Literal["auto", "micro_batches", "layers"] = Field(
        default="auto",
        description="The order of a step with several micro-batches. micro_batches: one after the other through all "
        "layers. layers: all of them through a layer before the next, so that weights and gradients cross the link "
        "once per step; what each saves waits meanwhile. A tied head's gradient is then added in another order. auto: "
        "the faster by the simulated step, of the same bits.",
        json_schema_extra=on_resume("sums"),
    )
    update_in_backward: bool | Literal["auto"] = Field(
        default="auto",
        description="Updates start while backward runs: those by the CPU, and those on the device that need no copies; "
        "auto: where nothing is clipped.",
    )

    removed = {
        ("update_in_backward", "speculative"): Removed("it gained nothing that was measured; write auto"),
        ("weight_copies", None): Removed("weights that travel have their copy on the host; leave it out"),
    }

    @property
    def _stage(self) -> int:
        """The stage of strategies.zero, if that is on."""
        return self._others["zero"].model_dump()["stage"] if self._others else 0

    @property
    def _rounded(self) -> str:
        """What rests in fewer bits than in plain training; empty: nothing."""
        formats = {"moments": self.moments, "masters": self.masters, "frozen weights": self.frozen_weights}
        return ", ".join(f"{tensors} in {bits}" for tensors, bits in formats.items() if bits not in (None, "fp32"))

    def parity(self, run: RunFacts) -> Parity:
        """Bit for bit in fp32 if one kernel updates everything and at most two ranks have gradients; bf16 rounds at
        other places than autocast.
        """
        if rounded := self._rounded:
            return Parity(LOSSY, f"not exact: {rounded}")
        if run.precision is Precision.BF16:
            return Parity(2e-2, _ROUNDING)
        if run.replicas > 2:
            return Parity(1e-3, _ORDER)
        if self.accumulation == "layers" and run.tied and run.micro_batches > 1:
            return Parity(1e-3, _TIED)
        return Parity(1e-4, _KERNELS) if run.accelerated and self.site in ("auto", "host") else BITWISE

    def refusals(self, run: RunFacts) -> Iterator[Refusal]:
        if run.optim not in ELEMENTWISE:
            cure = f"strategies.offload updates element by element; write one of {', '.join(ELEMENTWISE)}"
            yield Refusal("training.optim", run.optim, cure)
        if self.update_in_backward is True and self._agrees(run):
            cure = "ranks that share the state, or the model, agree on a step first; write auto"
            yield self._refusal("update_in_backward", cure)
        elif self.update_in_backward is True and run.precision is Precision.FP16:
            yield self._refusal("update_in_backward", "fp16's loss scale needs all gradients first; write auto")
        elif self.update_in_backward is True and run.max_grad_norm > 0:
            cure = "the norm is known only after backward; write auto, or training.max_grad_norm: 0"
            yield self._refusal("update_in_backward", cure)
        yield from self._refuses_disk()
        if self.frozen_weights and (reason := refused_by(run, shared=self._stage > 0, disk=self.disk is not None)):
            yield self._refusal("frozen_weights", reason)
        yield from self._refuses_moments(run)
        yield from self._refuses_layers(run) if self.accumulation == "layers" else ()
        yield from self._refuses_passing(run) if self.gradients == "passing" else ()
        if run.stages > 1 and run.tied:
            cure = "gradients of a tied head's two ends are added before any update; leave strategies.offload out"
            yield Refusal("strategies.pipeline.stages", run.stages, f"cannot go with strategies.offload: {cure}")
        if self._sums_over_ranks(run) and self.gradients == "host":
            cure = "micro-batches would be summed on the host before the ranks are; write auto or device"
            yield self._refusal("gradients", cure)

    def _refusal(self, option: str, cure: str) -> Refusal:
        return Refusal(f"strategies.offload.{option}", getattr(self, option), cure)

    def check_installed(self) -> None:
        """The folders of ``disk`` can have a file each, however large."""
        from deepstow.strategies.engine.memory.tiers import unsuitable

        for folder in folders_of(self.disk):
            if complaint := unsuitable(folder):
                raise self._refusal("disk", f"{folder}: {complaint}" if isinstance(self.disk, list) else complaint)

    def planned(self, by: Callable[[Facts], Plan], facts: Facts) -> Plan:
        """In the order of ``accumulation``; under ``auto`` in the faster one of those that fit."""
        run = facts.run
        if self.accumulation == "micro_batches" or run.accumulation == 1:
            return by(facts)
        in_layers = replace(facts, run=replace(run, accumulation=1, layerwise=run.accumulation))
        if self.accumulation == "layers":
            if run.not_layerwise:
                raise self._refusal("accumulation", f"{run.not_layerwise}; write micro_batches")
            return by(in_layers)
        knows_times = facts.machine.rates is not None and run.forward_flops > 0
        # A weight that others read, too, would have its gradients added in another order. Blocks in several lists, as
        # of a vision tower, may not all run in each micro-batch.
        shared = run.tied or any(param.elsewhere or param.users for param in facts.params)
        lists = {unit.name.rpartition(".")[0] for unit in facts.units if unit.kind is UnitKind.BLOCK}
        stays = run.not_layerwise or shared or len(lists) > 1 or any(self._refuses_layers(run))
        if stays or not knows_times:
            return by(facts)
        plans, refused = [], []
        for candidate in (facts, in_layers):
            try:
                plans.append(by(candidate))
            except MemoryRefusal as refusal:
                refused.append(refusal)
        if not plans:
            raise refused[0]
        costs = [plan_cost(plan) for plan in plans]
        return min(zip(costs, plans, strict=True), key=lambda pair: pair[0].seconds if pair[0] else inf)[1]

    def _refuses_layers(self, run: RunFacts) -> Iterator[Refusal]:
        clashing = {
            "strategies.pipeline": run.stages > 1,
            "strategies.tensor": run.tensor > 1,
            "strategies.sequence": run.slices > 1,
            "strategies.experts": run.alike != run.copies and run.apart > 0,
            "strategies.collectives": run.compression is not None or run.two_level > 0,
            "training.fp16": run.precision is Precision.FP16,
        }
        for name in (name for name, is_so in clashing.items() if is_so):
            yield self._refusal("accumulation", f"layers cannot go with {name} so far; write micro_batches")

    def decide(self, facts: Facts, plan: Plan) -> Iterator[Decision]:
        self._refuse(facts, plan)
        keeps, layout = keep_or_offload.decide(plan, self.request(facts), brief=self._brief)
        yield from keeps
        yield from memory_rows.of_units(facts, layout)
        reason = "only the excess is offloaded, unless offloading more is faster"
        if on_disk := disk_bytes(layout):
            reason += f"; {human(on_disk)} rest on the disk ({', '.join(layout.disk)})"
        if rounded := self._rounded:
            reason += f"; not exact: {rounded}"
        if common_bytes(layout):
            reason += "; ranks copy each other's parts of weights up from the host's memory"
        yield Stow(unit=RUN, reason=reason, layout=layout)

    def budget(self, facts: Facts) -> int:
        return device_budget(facts.machine, self.gpu_memory)

    def host_budget(self, facts: Facts) -> int:
        return host_budget(facts.machine, self.host_memory) + facts.machine.runtime_host_bytes

    def suggest(self, plan: Plan) -> list[str]:
        changes = edits.ranked(plan.facts_as_kept(), self.request(plan.facts), plan.transient_peak())
        return [f"  {change}: about {gain:+.0%} tokens per second" for change, gain in changes.items()]

    def _refuse(self, facts: Facts, plan: Plan) -> None:
        assert facts.params, "offload places single parameters; these facts do not list them"
        if why := facts.run.refuses_copies_of_written():
            raise Refusal("strategies.offload", self.written, why)
        engine = [by for decision, by in plan.answers.values() if isinstance(decision, EngineSet)]
        if engine:
            raise Conflict(("Share", "all units"), engine[0], "offload")
        if self.frozen_weights and (complaint := nothing_to_encode(facts)):
            raise self._refusal("frozen_weights", complaint)
        machine, budget = facts.machine, device_budget(facts.machine, self.gpu_memory)
        if self.gather == "host" and 0 < machine.ranks < facts.run.world_size:
            on = f"{facts.run.world_size} ranks are on machines of {machine.ranks} each"
            raise self._refusal("gather", f"{on}; write auto or network")
        if self.gather == "host" and not machine.in_order:
            raise self._refusal("gather", "only on x86 may ranks read each other's memory; write auto or network")
        if machine.has_accelerator and budget > machine.device_bytes:
            has = f"more than tensors can have of the device, {human(machine.device_bytes)}; write auto"
            key, size = "strategies.offload.gpu_memory", machine.device_bytes
            raise MemoryRefusal(key, self.gpu_memory, lambda: has, lambda: budget, tier=Tier.DEVICE, budget=size)

    def _refuses_disk(self) -> Iterator[Refusal]:
        if self.disk is None:
            if self.disk_memory is not None:
                yield self._refusal("disk_memory", "of which disk? Write strategies.offload.disk: a folder, beside it")
            return
        if self.disk_memory is None:
            yield self._refusal("disk", "how much of it? Write strategies.offload.disk_memory: a size, beside it")

    def _refuses_moments(self, run: RunFacts) -> Iterator[Refusal]:
        if self.moments == "fp32":
            return
        if OPTIMIZERS.get(run.optim, ("",))[0] != "AdamW":
            yield self._refusal("moments", f"is for AdamW's two, not for {run.optim}'s; leave it out")
        if run.world_size > 1:
            yield self._refusal("moments", f"is for one rank, and there are {run.world_size}; leave it out")

    def _refuses_passing(self, run: RunFacts) -> Iterator[Refusal]:
        on_device = ("device", "streamed")
        beside = run.precision is Precision.BF16 and self.masters == "fp32" and self.disk is None
        cures = {
            "is for update_in_backward: auto, training.max_grad_norm: 0, and not fp16": not self._in_backward(run),
            f"is for one rank, and there are {run.world_size}; write auto": run.world_size > 1,
            f"is for what the CPU updates, not site: {self.site}; write site: host": self.site in on_device,
            "is for weights that are their own masters, or rest on a disk; write masters: bf16 and moments: int8, or "
            "disk and disk_memory, beside it": beside,
        }
        yield from (self._refusal("gradients", cure) for cure, is_so in cures.items() if is_so)

    def _common_host(self, facts: Facts) -> bool:
        machine, shards = facts.machine, self._shards(facts.run)
        if self.gather != "auto" or shards == 1 or 0 < machine.ranks < facts.run.world_size or not machine.in_order:
            return self.gather == "host"
        if machine.rates is None:
            return not machine.has_accelerator  # its network is the same memory, read and written once more
        return from_host(machine.rates, shards)

    def _shards(self, run: RunFacts) -> int:
        """How many ranks hold a span of each bucket."""
        return run.copies if self._stage else 1

    def _disk_bytes(self, facts: Facts) -> int:
        """Of the disk, that one rank may use."""
        ranks = facts.machine.ranks or facts.run.world_size
        return parse_bytes(self.disk_memory) // ranks if self.disk and self.disk_memory else 0

    def _agrees(self, run: RunFacts) -> bool:
        """Whether ranks decide together if a step is skipped."""
        return max(self._shards(run), run.stages, run.tensor) > 1

    def _may_update_in_backward(self, run: RunFacts) -> bool:
        return not self._agrees(run) and run.max_grad_norm == 0 and run.precision is not Precision.FP16

    def _in_backward(self, run: RunFacts) -> bool:
        asked = self.update_in_backward
        return bool(asked) and (asked is True or self._may_update_in_backward(run))

    def _sums_over_ranks(self, run: RunFacts) -> bool:
        """Whether gradients are summed over micro-batches and then over ranks, which has to happen on the device."""
        return run.adding_copies > 1 and run.accumulation > 1

    def request(self, facts: Facts) -> OffloadRequest:
        decided = {"weights": self._stage in (1, 2), "gradients": self._sums_over_ranks(facts.run)}
        return OffloadRequest(
            device_bytes=device_budget(facts.machine, self.gpu_memory),
            host_bytes=host_budget(facts.machine, self.host_memory),
            gpu_memory=self.gpu_memory,
            host_memory=self.host_memory,
            bucket_bytes=None if self.bucket_size == AUTO else parse_bytes(self.bucket_size),
            prefetch=None if self.prefetch == "auto" else self.prefetch,
            in_backward=self._in_backward(facts.run),
            site=self.site if self.moments == "fp32" else "host",
            moments_as=self.moments,
            rounds=self.masters == "bf16",
            frozen_as=self.frozen_weights or "",
            weights="resident" if decided["weights"] else self.weights,
            shards=self._shards(facts.run),
            splits_gradients=self._stage >= 2,
            gradients="device" if decided["gradients"] else self.gradients,
            common_host=self._common_host(facts),
            reduction=self.reduction,
            disk=folders_of(self.disk),
            disk_checksums=self.disk_checksums,
            disk_bytes=self._disk_bytes(facts),
            decided=frozenset(name for name, is_so in decided.items() if is_so),
        )
