"""Writes the sections of docs/fit.md: models of 7, 14, 32 and 70 B parameters on one card, with arithmetic by hand.

    python -m benchmarks.fit_doc

The tables are what ``launch/plan.py --fit`` prints. Beside each stands the training state from the model's shapes and
the bytes per parameter alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from strategies.core.facts import Home
from strategies.core.sizes import SHARE, human
from strategies.report.table import table
from trainer.dist.ranks import Ranks
from trainer.machine.profiles import profile, sized
from trainer.planning.fit import LORA_RANK, Fit, FitRow, config_of, lines, unwritten

PAGE = Path(__file__).resolve().parent.parent / "docs" / "fit.md"
CARD, DEVICE, HOST = "rtx4090-pcie4", 24, 64  # GiB
MACHINE = f"--profile {CARD} --gpu-memory {DEVICE}GiB --host-memory {HOST}GiB"
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "vocab_size")  # fmt: skip
MODELS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "Llama-2-7B": ("llama", (4096, 11008, 32, 32, 32, 32000)),
    "Qwen2.5-14B": ("qwen2", (5120, 13824, 48, 40, 8, 152064)),
    "Qwen2.5-32B": ("qwen2", (5120, 27648, 64, 40, 8, 152064)),
    "Llama-3-70B": ("llama", (8192, 28672, 80, 64, 8, 128256)),
}


def num_params(kind: str, sizes: Sequence[int]) -> int:
    """Parameters of a Llama, or of a Qwen2, whose projections of queries, keys and values have biases."""
    width, inner, blocks, heads, groups, words = sizes
    keys = width // heads * groups
    biases = width + 2 * keys if kind == "qwen2" else 0
    block = 2 * width * width + 2 * width * keys + 3 * width * inner + 2 * width + biases
    return 2 * words * width + blocks * block + width


def num_adapters(sizes: Sequence[int]) -> int:
    """Parameters of adapters on every linear layer of the blocks: rank times width in plus width out."""
    width, inner, blocks, heads, groups, _ = sizes
    keys = width // heads * groups
    linear = [(width, width)] * 2 + [(width, keys)] * 2 + [(width, inner)] * 3
    return LORA_RANK * blocks * sum(a + b for a, b in linear)


def by_hand(kind: str, sizes: Sequence[int], rows: Sequence[FitRow]) -> Iterator[tuple[str, str, str, str]]:
    """What, bytes per parameter, their sum, and what the table says."""
    params, adapters = num_params(kind, sizes), num_adapters(sizes)

    alone = {row.training: row for row in rows if row.ranks == 1}

    def needed(row: FitRow | None, home: Home) -> str:
        return "-" if row is None or home not in row.needed else human(row.needed[home])

    def on_host(row: FitRow | None, share: int, device: int) -> tuple[str, str]:
        least, most = (human(max(0, size * share - device)) for size in (14, 16))
        return f"{least} to {most}", needed(row, Home.HOST)

    full, lora, offload = (alone.get(name) for name in ("full", "LoRA", "full + recompute + offload"))
    yield "full", "4 weight + 4 gradient + 8 moments, P", human(16 * params), needed(full, Home.DEVICE)
    card = int(SHARE * (DEVICE << 30))
    yield "full + recompute + offload, host", "14 to 16 P less 0.9 of the card", *on_host(offload, params, card)
    in_lora = human(2 * params + 16 * adapters)
    yield "LoRA", f"2 P + 16 of {adapters:,} in adapters", in_lora, needed(lora, Home.DEVICE)
    for ranks in (2, 4, 8):
        row = next(row for row in rows if row.ranks == ranks)
        what = f"{row.training}, {ranks} ranks"
        if "offload" in row.training:
            yield f"{what}, host", "at most 14 to 16 P / ranks", *on_host(row, params // ranks, 0)
        else:
            state, step = 16 * params // ranks, 20 * params // ranks
            yield what, "16 P / ranks; 20 P in the update", f"{human(state)}; {human(step)}", needed(row, Home.DEVICE)


def section(name: str, kind: str, sizes: Sequence[int]) -> Iterator[str]:
    """One model: the command, what it prints, and the arithmetic."""
    overrides = [f"model.config.model_type={kind}"]
    overrides += [f"model.config.{key}={size}" for key, size in zip(NAMES, sizes, strict=True)]
    config, machine = config_of(None, overrides, accelerated=True), sized(profile(CARD), DEVICE << 30, HOST << 30)
    fit = Fit(config, Ranks(), machine, written=unwritten(config), say=lambda line: print(line, file=sys.stderr))
    rows = fit.rows()
    yield f"## {name}\n"
    yield f"    python launch/plan.py --fit {MACHINE} {' '.join(overrides)}\n"
    yield "```"
    yield from (*fit.heading(), "", *lines(rows))
    yield "```\n"
    biases = " + biases" if kind == "qwen2" else ""
    formula = f"2 V h + L (2 h² + 2 h k + 3 h f + 2 h{biases}) + h; k: width of the keys"
    yield f"By hand, P = {num_params(kind, sizes):,} parameters ({formula}):\n"
    head = ("what", "bytes", "by hand", "table")
    yield from table(head, by_hand(kind, sizes, rows), head[2:], markdown=True)
    yield ""


if __name__ == "__main__":
    introduction = PAGE.read_text().partition("\n## ")[0]
    sections = (line for name, (kind, sizes) in MODELS.items() for line in section(name, kind, sizes))
    PAGE.write_text("\n".join([introduction, *sections]))
