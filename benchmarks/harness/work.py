"""What a benchmark trains and who trains it, as values. No torch here: a mistyped option is told at once.

Why one value: a comparison is worth something only if all subjects do the same work. Everything that could differ
(model, tokens, steps, micro-batches, optimizer, clipping, precision) is in ``Work``, and a subject gets nothing else.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strategies.core.sizes import parse_bytes
from trainer.errors import ConfigError


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
    "45m": Shape(512, 1536, 12, 8, 4096, rows=4, length=256),
    "1.3b": Shape(2048, 5504, 24, 16, 32000, rows=4, length=1024),
    "6.7b": Shape(4096, 11008, 32, 32, 32000, rows=4, length=2048),
}
DTYPES = ("fp32", "bf16")
ATTENTIONS = ("sdpa", "eager")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One and the same training for every subject."""

    model: str
    rows: int
    length: int
    accumulation: int = 1
    dtype: str = "fp32"
    steps: int = 5
    warmup: int = 2
    recompute: bool = False
    attention: str = "sdpa"
    dropout: float = 0.0  # of attention's probabilities
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    seed: int = 0

    @property
    def shape(self) -> Shape:
        """The model's numbers."""
        return MODELS[self.model]

    @property
    def tokens(self) -> int:
        """Per optimizer step."""
        return self.rows * self.length * self.accumulation

    @property
    def adamw(self) -> dict[str, Any]:
        """The optimizer's numbers, by the names that everybody gives them."""
        return {
            "lr": self.learning_rate,
            "betas": tuple(self.betas),
            "eps": self.eps,
            "weight_decay": self.weight_decay,
        }


@dataclass(frozen=True, slots=True)
class Contender:
    """Who trains: ``maker`` is ``module:class`` in this package, ``options`` go to it."""

    label: str
    maker: str
    options: Mapping[str, Any] = field(default_factory=dict)


PLAIN = "plain"
BUDGET = Contender("ours-budget", "contenders:Ours", {"site": "auto", "weights": "auto"})
SUBJECTS: tuple[Contender, ...] = (
    Contender(PLAIN, "contenders:Plain"),
    Contender("ours-resident", "contenders:Ours", {"site": "device", "weights": "resident"}),
    Contender("ours-host", "contenders:Ours", {"site": "host", "weights": "resident"}),
    Contender("ours-streamed", "contenders:Ours", {"site": "host", "weights": "streamed"}),
    BUDGET,  # one row for each --gpu-memory
    Contender("deepspeed-zero2", "peers:DeepSpeed", {"stage": 2}),
    Contender("deepspeed-zero3", "peers:DeepSpeed", {"stage": 3}),
    Contender("superoffload", "peers:DeepSpeed", {"stage": 3, "super_offload": True}),
    Contender("fsdp2", "peers:Fsdp2"),
    Contender("torchao", "peers:TorchAo"),
)

# Budgets of auto: between the peaks of full (0) and of none (1).
RECOMPUTE: tuple[Contender, ...] = (
    Contender(PLAIN, "recompute:Recomputed", {"policy": "none"}),
    Contender("ours-selective", "recompute:Recomputed", {"policy": "selective"}),
    Contender("ours-full", "recompute:Recomputed", {"policy": "full"}),
    Contender("ours-selective-host", "recompute:Recomputed", {"policy": "selective", "on_host": True}),
    Contender("ours-full-host", "recompute:Recomputed", {"policy": "full", "on_host": True}),
    Contender("ours-auto-0", "recompute:Recomputed", {"policy": "auto", "share": 0.0}),
    Contender("ours-auto-25", "recompute:Recomputed", {"policy": "auto", "share": 0.25}),
    Contender("ours-auto-50", "recompute:Recomputed", {"policy": "auto", "share": 0.5}),
    Contender("hf-checkpointing", "recompute:HuggingFace"),
    Contender("hf-checkpointing-host", "recompute:OnCpu"),
    Contender("compile", "recompute:Compiled", {"budget": 1.0}),
    Contender("compile-budget-50", "recompute:Compiled", {"budget": 0.5}),
    Contender("compile-budget-20", "recompute:Compiled", {"budget": 0.2}),
)

# --- from the words of a command line -----------------------------------------------------------------------------


def choice(option: str, text: str, allowed: Iterable[str]) -> str:
    """``text`` if it is allowed.

    Raises:
        ConfigError: it is not; the line has the nearest of what is.
    """
    names = list(allowed)
    if text in names:
        return text
    near = difflib.get_close_matches(text.lower(), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{option} {text}: must be one of {', '.join(names)}{hint}")


def whole(option: str, text: str, least: int = 1) -> int:
    """A whole number of at least ``least``.

    Raises:
        ConfigError: it is something else.
    """
    if re.fullmatch(r"\d+", text) and int(text) >= least:
        return int(text)
    raise ConfigError(f"{option} {text}: must be a whole number >= {least}")


def part(option: str, text: str) -> float:
    """A number from 0 up to, and without, 1.

    Raises:
        ConfigError: it is something else.
    """
    if re.fullmatch(r"0?\.\d+|0", text):
        return float(text)
    raise ConfigError(f"{option} {text}: must be a number >= 0 and < 1, as in 0.1")


def memory(option: str, text: str) -> int:
    """``16GiB`` or ``512MiB`` in bytes.

    Raises:
        ConfigError: it is no size, or a number without a unit.
    """
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from None


def work(
    model: str,
    *,
    tokens: int | None = None,
    rows: int | None = None,
    length: int | None = None,
    accumulation: int = 1,
    **rest: Any,
) -> Work:
    """The model's usual batch, changed by what is given; ``tokens`` are per optimizer step and fix the rows.

    Raises:
        ConfigError: the numbers contradict each other.
    """
    shape = MODELS[model]
    if tokens is None:
        return Work(
            model=model, rows=rows or shape.rows, length=length or shape.length, accumulation=accumulation, **rest
        )
    length = length or min(shape.length, max(1, tokens // accumulation // (rows or 1)))
    fitting = tokens // (length * accumulation)
    if fitting < 1 or fitting * length * accumulation != tokens or rows not in (None, fitting):
        product = f"{rows or 'rows'} x {length} x {accumulation}"
        raise ConfigError(f"--tokens {tokens}: must be rows x length x accumulation, here {product}")
    return Work(model=model, rows=fitting, length=length, accumulation=accumulation, **rest)


def subjects(
    names: Sequence[str] | None, budgets: Sequence[str], there: Sequence[Contender] = SUBJECTS
) -> list[Contender]:
    """Those of ``there`` by name (all, unless named), with one ``ours-budget`` for each of ``budgets``.

    Raises:
        ConfigError: no such subject, or ours-budget without a budget.
    """
    known = {subject.label: subject for subject in there}
    if names and BUDGET.label in names and not budgets:
        raise ConfigError(f"--subjects {BUDGET.label}: needs --gpu-memory, for example --gpu-memory 16GiB")
    found: dict[str, Contender] = {}
    for name in names or known:
        subject = known[choice("--subjects", name, known)]
        if subject is BUDGET:
            for text in budgets:
                label = f"{BUDGET.label} {text.strip()}"
                options = {**BUDGET.options, "gpu_memory": memory("--gpu-memory", text)}
                found[label] = Contender(label, BUDGET.maker, options)
        else:
            found[name] = subject
    return list(found.values())
