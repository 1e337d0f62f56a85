"""What a benchmark trains and who trains it, as values. It imports no torch, so that a mistyped option fails at once.

A comparison is worth something only if all contenders do the same work. So everything that could differ (model, tokens,
steps, micro-batches, optimizer, clipping, precision) is in ``Work``, and a contender gets nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deepstow.strategies.core.sizes import parse_bytes
from deepstow.trainer.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama with equal blocks and a small vocabulary, so that the blocks dominate; and its usual batch."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocab: int
    rows: int
    length: int

    @property
    def block_params(self) -> int:
        """Parameters of one block: four square projections, three of the MLP, two norms."""
        return 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def num_params(self) -> int:
        """All parameters: blocks, embedding, head, last norm."""
        return self.layers * self.block_params + 2 * self.vocab * self.hidden + self.hidden


MODELS: Mapping[str, Shape] = {
    "tiny": Shape(64, 192, 2, 4, 256, rows=2, length=32),
    "13m": Shape(384, 1024, 6, 6, 4096, rows=1, length=1024),
    "11m": Shape(384, 1024, 6, 6, 2048, rows=2, length=256),  # as the quickstart's, but for its tied head
    "45m": Shape(512, 1536, 12, 8, 4096, rows=4, length=256),
    "350m": Shape(1024, 2816, 24, 16, 16384, rows=1, length=256),
    "1.3b": Shape(2048, 5504, 24, 16, 32000, rows=4, length=1024),
    "6.7b": Shape(4096, 11008, 32, 32, 32000, rows=4, length=2048),
}
DTYPES = ("fp32", "bf16")
ATTENTIONS = ("sdpa", "eager")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The training that every contender does."""

    model: str
    rows: int
    length: int
    accumulation: int = 1
    ranks: int = 1
    dtype: str = "fp32"
    steps: int = 5
    warmup: int = 2
    recompute: bool = False
    attention: str = "sdpa"
    dropout: float = 0.0  # of attention's probabilities
    documents: int = 1  # that a row is packed of
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    seed: int = 0
    disk: str = ""  # a folder for state that rests in files
    host_memory: int | str = "auto"  # of contenders of ours

    @property
    def shape(self) -> Shape:
        return shape_of(self.model)

    @property
    def tokens(self) -> int:
        """Tokens per optimizer step, of each rank."""
        return self.rows * self.length * self.accumulation

    @property
    def adamw(self) -> dict[str, Any]:
        """The optimizer's arguments, by torch's names, which all contenders use."""
        betas = (self.betas[0], self.betas[1])
        return {"lr": self.learning_rate, "betas": betas, "eps": self.eps, "weight_decay": self.weight_decay}


@dataclass(frozen=True, slots=True)
class Contender:
    """Who trains: ``maker`` is ``module:class`` in this package, and gets ``options``. Of an accelerator its process
    may use ``gpu_memory`` bytes, context and libraries included; None: all.
    """

    label: str
    maker: str
    options: Mapping[str, Any] = field(default_factory=dict)
    gpu_memory: int | None = None


PLAIN, ALL_RESIDENT = "plain", "ours-resident"
WHOLE = (PLAIN, ALL_RESIDENT)  # that have all on the device, whatever the budget of the others is
OURS = "contenders:Ours"
BUDGET = Contender("ours-budget", OURS, {"site": "auto", "weights": "auto"})
OFFLOAD: tuple[Contender, ...] = (
    Contender(PLAIN, "contenders:Plain"),
    Contender(ALL_RESIDENT, OURS, {"site": "device", "weights": "resident"}),
    Contender("ours-host", OURS, {"site": "host", "weights": "resident"}),
    Contender("ours-streamed", OURS, {"site": "host", "weights": "streamed"}),
    BUDGET,  # one row for each --gpu-memory
    Contender("deepspeed-zero2", "peers:DeepSpeed", {"stage": 2}),
    Contender("deepspeed-zero3", "peers:DeepSpeed", {"stage": 3}),
    Contender("superoffload", "peers:DeepSpeed", {"stage": 3, "super_offload": True}),
    Contender("superoffload-host", "peers:DeepSpeed", {"stage": 3, "super_offload": True, "ratio": 1.0}),
    Contender("ours-disk", OURS, {"site": "host", "weights": "streamed", "on_disk": True}),
    Contender("zero-infinity", "peers:DeepSpeed", {"stage": 3, "infinity": True}),
    Contender("fsdp2", "peers:Fsdp2"),
    Contender("torchao", "peers:TorchAo"),
)
# Pairs that leave the same on the device: weights and gradients (zero2), or what is in use (zero3, fsdp2). Ours gets
# weights from the common host, or over the network as the others do (network).
ZERO2: Mapping[str, Any] = {"zero": {"stage": 2}, "site": "host"}
ZERO3: Mapping[str, Any] = {"zero": {"stage": 3}, "site": "host", "weights": "streamed"}
OFFLOAD_OVER_RANKS: tuple[Contender, ...] = (
    Contender(PLAIN, "contenders:Plain"),
    Contender("ours-zero2", OURS, {**ZERO2, "gather": "host"}),
    Contender("ours-zero3", OURS, {**ZERO3, "gather": "host"}),
    Contender("ours-zero2-network", OURS, {**ZERO2, "gather": "network"}),
    Contender("ours-zero3-network", OURS, {**ZERO3, "gather": "network"}),
    Contender("deepspeed-zero2", "peers:DeepSpeed", {"stage": 2}),
    Contender("deepspeed-zero3", "peers:DeepSpeed", {"stage": 3}),
    Contender("fsdp2", "peers:Fsdp2"),
)

# auto with a budget between the predicted peaks of full (0) and none (1)
RECOMPUTE: tuple[Contender, ...] = (
    Contender(PLAIN, "contenders:Recomputed", {"policy": "none"}),
    Contender("ours-selective", "contenders:Recomputed", {"policy": "selective"}),
    Contender("ours-full", "contenders:Recomputed", {"policy": "full"}),
    Contender("ours-selective-host", "contenders:Recomputed", {"policy": "selective", "on_host": True}),
    Contender("ours-full-host", "contenders:Recomputed", {"policy": "full", "on_host": True}),
    Contender("ours-auto-0", "contenders:Recomputed", {"policy": "auto", "share": 0.0}),
    Contender("ours-auto-25", "contenders:Recomputed", {"policy": "auto", "share": 0.25}),
    Contender("ours-auto-50", "contenders:Recomputed", {"policy": "auto", "share": 0.5}),
    Contender("hf-checkpointing", "contenders:HuggingFace"),
    Contender("hf-checkpointing-host", "contenders:OnCpu"),
    Contender("compile", "contenders:Compiled", {"budget": 1.0}),
    Contender("compile-budget-50", "contenders:Compiled", {"budget": 0.5}),
    Contender("compile-budget-20", "contenders:Compiled", {"budget": 0.2}),
)

LINEAR: tuple[Contender, ...] = (
    Contender(PLAIN, "contenders:Plain"),
    Contender("plain-again", "contenders:Plain"),  # how far two equal ones lie apart
    Contender("ours-flip", "contenders:Routed", {"transpose": "flip"}),
    Contender("ours-adaptive", "contenders:Routed", {"transpose": "adaptive"}),
)

RESIDENT: Mapping[str, Any] = {"site": "device", "weights": "resident"}
STREAMED: Mapping[str, Any] = {"site": "host", "weights": "streamed"}
BY: Mapping[str, Any] = {"compiled": "inductor"}
VARLEN: Mapping[str, Any] = {"attention": "sdpa_varlen"}
REPEATS: Mapping[str, Any] = {"repeats": True}  # training.full_determinism
COMPUTE: tuple[Contender, ...] = (
    Contender(PLAIN, "contenders:Plain"),
    Contender("plain-compiled", "contenders:Plain", BY),
    Contender("plain-varlen", "contenders:Plain", VARLEN),
    Contender("plain-repeats", "contenders:Plain", REPEATS),
    Contender("plain-flash", "contenders:Plain", {"attention": "flash_attention_2"}),
    Contender("plain-liger", "contenders:Plain", {"liger": True}),
    Contender("ours-resident", OURS, RESIDENT),
    Contender("ours-resident-compiled", OURS, {**RESIDENT, **BY}),
    Contender("ours-streamed", OURS, STREAMED),
    Contender("ours-streamed-compiled", OURS, {**STREAMED, **BY}),
    Contender("ours-streamed-varlen", OURS, {**STREAMED, **VARLEN}),
    Contender("ours-streamed-repeats", OURS, {**STREAMED, **REPEATS}),
    Contender("ours-streamed-liger", OURS, {**STREAMED, "liger": True}),
    Contender("fsdp2", "peers:Fsdp2"),
)

# --- options of the command line -----------------------------------------------------------------------------


def choice(option: str, text: str, allowed: Iterable[str]) -> str:
    """Return ``text`` if it is in ``allowed``. Raise ConfigError, with the closest allowed name, if it is not."""
    names = list(allowed)
    if text in names:
        return text
    raise ConfigError(f"{option} {text}: must be one of {', '.join(names)}{nearest(text.lower(), names, cutoff=0.5)}")


def whole(option: str, text: str) -> int:
    """Parse a whole number. Raise ConfigError for anything else, and for 0."""
    if re.fullmatch(r"\d+", text) and int(text) >= 1:
        return int(text)
    raise ConfigError(f"{option} {text}: must be a whole number >= 1")


def part(option: str, text: str) -> float:
    """Parse a number from 0 to below 1. Raise ConfigError for anything else."""
    if re.fullmatch(r"0?\.\d+|0", text):
        return float(text)
    raise ConfigError(f"{option} {text}: must be a number >= 0 and < 1, as in 0.1")


def memory(option: str, text: str) -> int:
    """Parse a size such as ``16GiB`` into bytes. Raise ConfigError for anything else, and for a missing unit."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from None


def folder(option: str, text: str) -> str:
    """A folder that exists. Raise ConfigError for anything else."""
    if not Path(text).is_dir():
        raise ConfigError(f"{option} {text}: must be a folder that exists, on a local drive")
    return text


def shape_of(model: str) -> Shape:
    """Of one of ``MODELS``, or of "40 blocks": a Llama of 4096 by 11008 with so many."""
    blocks, _, word = model.partition(" ")
    return Shape(4096, 11008, int(blocks), 32, 32000, rows=1, length=2048) if word == "blocks" else MODELS[model]


def work(
    model: str, *, tokens: int | None = None, rows: int | None = None, length: int | None = None, accumulation: int = 1,
    **rest: Any,
) -> Work:  # fmt: skip
    """The work on ``model``, with its default batch unless given; ``tokens`` per optimizer step determine the rows.

    Raises:
        ConfigError: if the numbers contradict each other.
    """
    shape = shape_of(model)
    if tokens is not None:
        length = length or min(shape.length, max(1, tokens // accumulation // (rows or 1)))
        product = f"{rows or 'rows'} x {length} x {accumulation}"
        rows = rows or tokens // (length * accumulation)
        if rows < 1 or rows * length * accumulation != tokens:
            raise ConfigError(f"--tokens {tokens}: must be rows x length x accumulation, here {product}")
    rows, length = rows or shape.rows, length or shape.length
    return Work(model=model, rows=rows, length=length, accumulation=accumulation, **rest)


def contenders(
    names: Sequence[str], budgets: Sequence[str] = (), theme: Sequence[Contender] = OFFLOAD
) -> list[Contender]:
    """The contenders of a theme by name (all if none is named), with one ``ours-budget`` for each of ``budgets``. The
    largest of these is what the others may use of an accelerator, but for those of ``WHOLE``.

    Raises:
        ConfigError: if there is no such contender, or ours-budget is named without a budget.
    """
    by_label = {entry.label: entry for entry in theme}
    if BUDGET.label in names and not budgets:
        raise ConfigError(f"--subjects {BUDGET.label}: needs --gpu-memory, for example --gpu-memory 16GiB")
    sizes = {text.strip(): memory("--gpu-memory", text) for text in budgets}
    chosen: dict[str, Contender] = {}
    for name in names or by_label:
        entry = by_label[choice("--subjects", name, by_label)]
        if entry is not BUDGET:
            chosen[name] = entry if name in WHOLE else replace(entry, gpu_memory=max(sizes.values(), default=None))
        for text, size in sizes.items() if entry is BUDGET else ():
            label = f"{BUDGET.label} {text}"
            chosen[label] = Contender(label, OURS, {**BUDGET.options, "gpu_memory": size}, size)
    return list(chosen.values())
