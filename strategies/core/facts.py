"""Facts: what is known about the model, the run and the machine before anything is decided. Plain numbers, no torch.

A model is a list of units in order of first use: the embedding, the blocks, the head. A parameter that is used twice
(a tied head) is counted once, in the unit that uses it first. ``trainer/planning/facts.py`` fills these in from a
fake-tensor copy of the model. ``params`` are listed only where a strategy places single parameters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from math import inf
from typing import Literal

from deepstow.strategies.core.grid import Cut, Grid


@dataclass(frozen=True, slots=True)
class Compression:
    """How gradients are exchanged in fewer bytes (``strategies/plugins/compressed.py``)."""

    method: Literal["none", "bf16", "fp16", "powersgd", "topk", "int8"]
    density: float  # the part of the elements that top-k sends
    rank: int  # of PowerSGD's factors
    start: int  # steps before that exchange all, where something is owed
    local_steps: int = 0  # after which ranks exchange what they have learned, in place of gradients; 0: gradients
    outer_lr: float = 0.7  # of that exchange's SGD
    outer_momentum: float = 0.9
    momentum: float = 0.0  # of each rank's own gradients, in place of the optimizer's, under top-k

    @property
    def owes(self) -> bool:
        """Whether ranks keep what they have not sent, and send it later."""
        return self.method not in ("none", "bf16", "fp16")

    @property
    def words(self) -> str:
        corrected = f", momentum {self.momentum:g}" if self.momentum else ""
        options = {"topk": f", density {self.density:g}{corrected}", "powersgd": f", rank {self.rank}"}
        summary = f"{'fp32' if self.method == 'none' else self.method}{options.get(self.method, '')}"
        if self.local_steps:
            outer = f"outer_lr {self.outer_lr:g}, outer_momentum {self.outer_momentum:g}"
            return f"{summary}, every {self.local_steps} steps ({outer})"
        return f"{summary}{f', from step {self.start + 1} on' if self.owes else ''}"


class UnitKind(Enum):
    """Which part of the model a unit is. Blocks repeat; the others appear at most once."""

    EMBEDDING = "embedding"
    BLOCK = "block"
    HEAD = "head"


class Tier(Enum):
    """Where bytes are kept. ``DEVICE`` is the accelerator (RAM if there is none); ``HOST`` is pinned RAM."""

    __hash__ = object.__hash__  # by identity; Enum's own looks the name up each time

    DEVICE = "device"
    HOST = "host"


class Precision(Enum):
    """Number format of compute. ``BF16`` and ``FP16`` mean mixed precision: fp32 master weights."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def element_bytes(self) -> int:
        return 4 if self is Precision.FP32 else 2


@dataclass(frozen=True, slots=True)
class Work:
    """The work of operators: floating-point operations, or bytes read and written for operators without any."""

    flops: int = 0
    touched_bytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.touched_bytes + other.touched_bytes)


NO_WORK = Work()


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator whose outputs of ``num_bytes`` may be kept; its ``work`` is then not done again."""

    name: str
    num_bytes: int
    work: Work


@dataclass(frozen=True, slots=True)
class Choices:
    """What a recomputed block may keep: its input always, outputs of ``operators`` one by one.

    ``rest`` is work that is done again in any case; meanwhile ``running_bytes`` are on the device: the input and
    everything that autograd saves. ``stream_bytes`` of the input are the hidden states, which nothing else keeps. They
    and the outputs of operators may wait on the host instead; 0: they may not.
    """

    input_bytes: int
    running_bytes: int
    operators: tuple[Operator, ...]
    rest: Work
    stream_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Temporaries:
    """The most bytes that a unit has on the device beyond what it and the units before it save for backward."""

    forward: int
    backward: int  # the gradient of a weight counts until it lands where it is kept
    landing: int  # in backward, with the gradients of the unit that have landed


@dataclass(frozen=True, slots=True)
class InChunks:
    """What a head saves, and its temporaries, if its cross-entropy is computed by chunks of rows."""

    logits: int  # elements
    saved_bytes: int
    temporaries: Temporaries | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """One part of the model, used as a whole.

    ``num_params`` and ``num_trainable`` count weights. Those that are ``quantised`` are frozen, and take
    ``quantised_bytes``, of which each is an element. ``saved_bytes`` is what autograd keeps for backward of one
    micro-batch, counted on a fake run, parameters excluded.
    """

    name: str
    kind: UnitKind
    num_params: int
    num_trainable: int
    saved_bytes: int = 0
    choices: Choices | None = None  # None: a block that cannot be recomputed
    again: Work = NO_WORK  # that backward repeats
    hosted_bytes: int = 0  # that wait on the host until backward
    temporaries: Temporaries | None = None  # None: not counted
    in_chunks: InChunks | None = None  # None: its loss cannot be computed by chunks
    quantised: int = 0
    quantised_bytes: int = 0
    launches: int = 0  # operators of one forward that a device is given one by one; 0: not counted
    launches_back: int = 0  # of one backward; 0: not counted, and about twice as many

    def __post_init__(self) -> None:
        assert 0 <= self.num_trainable <= self.num_params, self
        assert self.saved_bytes >= 0, self

    @property
    def num_elements(self) -> int:
        """Of its parameters as they are stored."""
        return self.num_params - self.quantised + self.quantised_bytes

    def with_chunks(self) -> Unit:
        chunks = self.in_chunks
        assert chunks is not None, self.name
        return replace(self, saved_bytes=chunks.saved_bytes, temporaries=chunks.temporaries)


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter tensor, listed in the unit that uses it first."""

    name: str
    unit: str
    num_elements: int
    dtype: str  # of compute under the memory engine, by torch's name: "float32" or "bfloat16"; of quantised ones theirs
    group: int | None  # of the optimizer; None: frozen
    users: tuple[str, ...] = ()  # further units that use it, as a tied head does
    elsewhere: bool = False  # may be in use while units run that do not own it, as a head by which a loss multiplies
    looked_up: bool = False  # its unit only looks rows up in it, and does not read it in backward
    vector: bool = False  # it has less than two dimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNumbers:
    """What is counted of a model besides its units; of a rank's part, but for ``model_params`` and ``model_flops``."""

    hidden_size: int = 0  # 0: the model has no such number; bucket sizes then take their defaults
    largest_param: int = 0  # elements of the largest single parameter tensor
    forward_flops: int = 0  # of one micro-batch; backward takes twice as many where nothing is frozen; 0: not counted
    trained_bytes: int = 4  # per trainable parameter, as plain training has them; ``frozen_bytes`` per frozen one
    frozen_bytes: int = 4
    model_params: int = 0  # of the whole model where a rank has a part of it; 0: the same as the rank
    model_flops: int = 0  # of one micro-batch's forward through it
    scales_bytes: int = 0  # of quantised weights, always on the device
    tied: bool = False  # the head multiplies by the embedding's weight
    untied: tuple[str, ...] = ()  # weights that the config ties, and of which the files have values of their own
    written: tuple[str, ...] = ()  # weights that forward writes to
    head_words: int = 0  # of a whole head that tensor ranks divide; 0: there is none, or it is tied
    num_experts: int = 0  # of a layer; 0: there are none
    experts_per_token: int = 0
    positions: int = 0  # tokens of a row that the model is made for; 0: it says no number
    not_layerwise: str = ""  # why micro-batches cannot pass layer by layer; empty: they can
    draws: bool = False  # forward draws random numbers, as dropout does
    loss_reads_blocks: bool = (
        False  # the loss reads more of the blocks than what the last one makes, as router losses do
    )
    sums: tuple[int, int, int] = (2, 2, 2)  # over tensor ranks, of a block: forward, backward, and if all runs again


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes that something beside model and strategies holds, under the name of its ``owner``: all the time, outside
    any arena, or ``in_step`` of the optimizer alone.
    """

    owner: str
    reason: str
    num_bytes: int
    tier: Tier = Tier.DEVICE
    in_step: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts(ModelNumbers):
    """The run as configured: micro-batch in sequences, sequence in tokens, ranks over all nodes.

    ``stages`` x ``tensor`` ranks hold one copy of the model together, and ``slices`` copies work on the same rows
    (``strategies/core/grid.py``). Where layers or rows are divided over ranks, units are one rank's part.
    """

    micro_batch: int
    sequence: int
    accumulation: int
    max_grad_norm: float
    precision: Precision
    world_size: int
    layerwise: int = 1  # micro-batches that pass a layer before any goes on; else 1, and ``accumulation`` of an update
    autocast: Precision | None = None  # in which operators compute, where weights and gradients stay in ``precision``
    moments: int = 2  # fp32 numbers of optimizer state per trainable parameter; Adam keeps two
    optim: str = "adamw_torch_fused"  # Hugging Face's name of the optimizer
    recomputes: bool = False  # blocks run forward once more in backward
    compiled: bool = False  # blocks, each by itself
    accelerated: bool = False  # the device has other kernels than the host
    stages: int = 1
    stage: int = 0  # of this rank
    in_flight: int = 1  # micro-batches that are between their forward and their backward at a time
    tensor: int = 1
    slices: int = 1  # ranks that each have a part of every row
    stowed: bool = False  # the memory engine trains it
    in_slices: bool = False  # tensor ranks have slices of the tokens between divided layers
    adapters: bool = False  # low-rank ones are trained, and no base
    sequences: int = 1  # of a row of data: two where it is a pair
    apart: int = 0  # parameters of this rank that others have, too, but not all copies
    alike: int = 1  # ranks that have the same of these
    two_level: int = 0  # slices of exchanges in phases inside and across machines; 0: ranks exchange in one ring
    compression: Compression | None = None  # of gradients between ranks
    steps: int = 0  # of the optimizer, as the config says; 0: it says epochs
    held: tuple[Held, ...] = ()
    evaluation_rows: int = 0  # at a time; 0: no evaluation is counted
    evaluation_bytes: int = 0  # that it takes beside what is on the device between two steps

    def refuses_copies_of_written(self) -> str:
        """Why what keeps second copies of weights cannot train this model; empty if it can."""
        if not self.written:
            return ""
        return f"the model's forward writes to {self.written[0]}, whose copy the next update goes on from; leave it out"

    @property
    def computes_in(self) -> Precision:
        """The number format of matrix products."""
        return self.autocast or self.precision

    @property
    def grid(self) -> Grid:
        return Grid(self.stages, self.replicas, self.tensor, self.slices)

    @property
    def replicas(self) -> int:
        """Sets of ranks, each of which is given other data."""
        return self.copies // self.slices

    @property
    def copies(self) -> int:
        """Of the model. Their ranks add up gradients, and can share state."""
        return self.world_size // (self.stages * self.tensor)

    @property
    def adding_copies(self) -> int:
        """Copies that add up gradients in every step: one, if ranks train alone for some steps."""
        return 1 if self.compression is not None and self.compression.local_steps else self.copies

    @property
    def tokens_per_step(self) -> int:
        return self.micro_batch * self.sequence * self.micro_batches * self.replicas

    @property
    def micro_batches(self) -> int:
        """Per update, of one copy of the model."""
        return self.accumulation * self.layerwise


# Per parameter, of an update on the host: master and two moments read and written (24), and the gradient clipped in
# place (8), or in bf16 the gradient read, and the master once more for the new weight, which is written (8).
HOST_UPDATE_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast a machine works. Directions are the device's: *up* is host to device."""

    gemm_fp32_flops_per_s: float  # of a matrix product on the device, without TF32
    gemm_bf16_flops_per_s: float | None  # None: the device has no such units
    gemm_fp16_flops_per_s: float | None = None  # None: as in bf16, which all but cards without bf16's units reach
    up_bytes_per_s: float  # the link alone, for large copies of pinned memory
    down_bytes_per_s: float
    duplex_factor: float  # share of either direction's rate while both run; 1.0: they do not disturb each other
    link_latency_s: float  # that a copy takes in addition to its bytes
    dram_bytes_per_s: float  # of the host, reads plus writes: of its updates and of copies in both directions together
    update_fp32_params_per_s: float  # AdamW on the host by the engine's worker, gradients in fp32, clipped
    update_bf16_params_per_s: float  # the same with bf16 gradients, fp32 masters and new bf16 weights
    device_bytes_per_s: float  # of the device's memory, reads plus writes
    launch_s: float = 1e-5  # of the host, to launch one operator on the device
    net_bytes_per_s: float | None = None  # a rank to others of its machine, and from them; None: by way of the host
    net_latency_s: float = 1e-5  # per hop of a message between ranks of a machine, in addition to its bytes
    net_across_bytes_per_s: float | None = None  # to ranks of other machines; None: unknown
    net_across_latency_s: float = 17e-6  # from where: strategies/planner/network.py
    # Of each drive for optimizer state, past the page cache; by default what one of PCI Express 4 may sustain.
    disk_read_bytes_per_s: float = 5e9
    disk_write_bytes_per_s: float = 2e9
    disk_overlap: float = 1.0  # of both at once: 1 is either or, 2 each as if it were alone
    disk_folder: str = ""  # or folders, that were measured; empty: assumed
    origin: Literal["measured", "profile", "assumed"]  # on this machine; by name

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name in ("origin", "disk_folder") or value is None:
                continue
            if name.endswith(("latency_s", "launch_s")):
                if not 0 <= value < inf:
                    raise ValueError(f"{name} = {value!r}: must be at least 0 and finite")
            elif not 0 < value < inf:
                raise ValueError(f"{name} = {value!r}: must be more than 0 and finite")
        if self.duplex_factor > 1:
            raise ValueError(f"duplex_factor = {self.duplex_factor!r}: must be at most 1")

    def shared_by(self, ranks: int) -> Rates:
        """The rates of one of ``ranks`` that share the machine's memory, cores and disk."""
        memory = ("dram_bytes_per_s", "update_fp32_params_per_s", "update_bf16_params_per_s")
        disk = ("disk_read_bytes_per_s", "disk_write_bytes_per_s")
        return replace(self, **{name: getattr(self, name) / ranks for name in (*memory, *disk)})

    def exchange_bytes_per_s(self) -> float:
        """Bytes per second that a rank sends to others, while it receives as many."""
        return self.net_bytes_per_s or 1 / (1 / self.up_bytes_per_s + 1 / self.down_bytes_per_s)

    def gemm_flops(self, precision: Precision) -> float:
        """Flop/s of a matrix product; where no rate is known for a format, that of fp32."""
        half = None if precision is Precision.FP32 else self.gemm_bf16_flops_per_s
        if precision is Precision.FP16:
            half = self.gemm_fp16_flops_per_s or half
        return half or self.gemm_fp32_flops_per_s

    def seconds(self, work: Work, precision: Precision) -> float:
        return work.flops / self.gemm_flops(precision) + work.touched_bytes / self.device_bytes_per_s

    def update_params_per_s(self, precision: Precision) -> float:
        return self.update_bf16_params_per_s if precision is Precision.BF16 else self.update_fp32_params_per_s


EXPERT = re.compile(r"\.experts\.\w+$")  # weights of all experts of a layer, by name
IN_ORDER = ("x86_64", "AMD64")  # processors that keep the order of writes, by ``platform.machine``


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """One rank's machine: bytes on its device, and its part of the bytes on the host, which ``ranks`` share.

    On a machine without an accelerator the device *is* the host: ``device_bytes`` is then this rank's part of RAM.
    """

    name: str
    device_bytes: int
    host_bytes: int
    runtime_host_bytes: int = 0  # Python, torch and libraries, before any tensor
    rates: Rates | None = None  # this rank's part; None: unknown
    ranks: int = 0  # of the job that are on it; 0: all
    in_order: bool = True  # one of ``IN_ORDER``, or not known to be another
    device_overhead_bytes: int = 0  # of the whole device, that its context and libraries have; not in ``device_bytes``

    @property
    def has_accelerator(self) -> bool:
        return self.name != "cpu"


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """Measured seconds of compute of one micro-batch, forward and backward; for blocks the average.

    Backward is without recomputed work, which is added as counted. ``origin`` says where the measurement is from.
    ``chunks``: of a block with one of so many equal parts of the rows.
    """

    embedding: tuple[float, float]
    block: tuple[float, float]
    head: tuple[float, float]
    origin: str
    chunks: Mapping[int, tuple[float, float]] = field(default_factory=dict)

    def of(self, kind: UnitKind) -> tuple[float, float]:
        return {UnitKind.EMBEDDING: self.embedding, UnitKind.BLOCK: self.block, UnitKind.HEAD: self.head}[kind]


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that decisions may depend on."""

    units: tuple[Unit, ...]
    run: RunFacts
    machine: MachineFacts
    params: tuple[Param, ...] = ()
    unit_times: UnitTimes | None = None  # measured by an earlier run or by ``deepstow plan --measure``
    cut: Cut | None = None  # of the whole model, where the units are those of one stage

    def __post_init__(self) -> None:
        names = [unit.name for unit in self.units]
        assert len(set(names)) == len(names), f"unit names repeat: {names}"
        if self.params:
            elements, units = dict.fromkeys(names, 0), set(names)
            for param in self.params:
                assert units.issuperset((param.unit, *param.users)), f"{param.name} is used by a unit that is not there"
                elements[param.unit] += param.num_elements
            assert elements == {unit.name: unit.num_elements for unit in self.units}, "parameters add up to their units"

    @property
    def num_params(self) -> int:
        return sum(unit.num_params for unit in self.units)

    @property
    def loaded_bytes(self) -> int:
        """Of the weights as they are loaded, before any strategy changes their dtype; where a rank loads a part of the
        model, of that, and for a moment of the largest of all; of experts, drawn before a rank's own are kept, of both.
        """
        if self.run.model_params:
            beside = (2 if self.run.apart else 1) * self.run.largest_param
            return self.run.trained_bytes * (self.num_params + beside)
        packed = sum(unit.quantised_bytes for unit in self.units) + self.run.scales_bytes
        frozen = sum(unit.num_params - unit.num_trainable - unit.quantised for unit in self.units)
        return self.run.trained_bytes * self.num_trainable + self.run.frozen_bytes * frozen + packed

    @property
    def num_trainable(self) -> int:
        return sum(unit.num_trainable for unit in self.units)

    def unit(self, name: str) -> Unit:
        return next(unit for unit in self.units if unit.name == name)
