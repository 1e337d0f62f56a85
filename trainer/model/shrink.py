"""Make a small copy of a model's config (same architecture, few narrow layers) and choose how much memory it gets.

The copy keeps what changes behaviour (architecture, grouped heads, tied weights, activation function, dropout, layer
types) and shrinks what only costs time.

With ``strategies.offload`` a copy would fit into the real model's budget, and nothing of it would move. So ``moving``
looks for options under which the plan of the copy moves what the real plan moves: weights that travel, each site of
updates, both tiers of gradients that wait. It plans the copy with several budgets, from the least that it can be
trained with to the one that everything fits into, and asks by option for what no budget causes, if the user left that
at auto. The result is few sets of options that show everything; each is a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from deepstow.strategies.core.compose import compose
from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.layout import ALIGN_BYTES, Bucket, Layout, Site
from deepstow.strategies.core.plan import RUN, Stow
from deepstow.strategies.core.protocol import Refusal, Strategy
from deepstow.strategies.core.sizes import AUTO, parse_bytes, written
from deepstow.strategies.planner.buckets import block_bytes
from deepstow.strategies.planner.cuts import DEPTHS
from deepstow.strategies.planner.memory_rows import UPDATES
from deepstow.trainer.model.config_keys import WIDTHS, keys_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from deepstow.strategies.core.facts import Facts
    from deepstow.strategies.core.plan import Plan

LENGTH = 32
# The names that Hugging Face configs have for these sizes, and the size in the copy.
HIDDEN = 64
HEADS = 4
FFN = 128
VOCAB = 512
HEAD_DIM = HIDDEN // HEADS
LAYERS, MOVING_LAYERS = 2, 4  # of two layers both are always in use or about to be, so neither could leave the device
SIZES: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), HIDDEN),
    **dict.fromkeys(("num_attention_heads", "n_head"), HEADS),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size"), FFN),
    "shared_expert_intermediate_size": FFN,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 2 * LENGTH),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}
COUNTS = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "ffn_dim")
PER_LAYER = ("layer_types", "mlp_layer_types")


def shrink_model(config: PretrainedConfig, layers: int = LAYERS) -> dict[str, Any]:
    """``model.config`` of the shrunk copy: the same architecture with ``layers`` small layers."""
    text = config.get_text_config()
    keys = keys_of(text)
    full = {name: value for name, value in text.to_diff_dict().items() if name in keys}  # others are read by nothing
    small = {"model_type": text.model_type, **full}
    for name, size in {**SIZES, **dict.fromkeys(DEPTHS, layers)}.items():
        value = getattr(config, name, None)
        if isinstance(value, int) and (name in full or name in type(config)().to_dict()):
            small[name] = min(value, size)
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(groups, int):
        fewer = min(heads, HEADS)  # a model of fewer than four heads keeps them
        shared = (number for number in range(min(groups, HEADS // 2), 0, -1) if fewer % number == 0)
        small["num_key_value_heads"] = fewer if groups == heads else next(shared)
    for name in (*WIDTHS, "word_embed_proj_dim"):
        if isinstance(heads, int) and isinstance(small.get(name), int) and small[name] % min(heads, HEADS):
            small[name] = min(heads, HEADS) * HEAD_DIM
    if small.get("word_embed_proj_dim") and text.word_embed_proj_dim != text.hidden_size:
        small["word_embed_proj_dim"] = small["hidden_size"] // 2  # with projections, as the real one
    for name in PER_LAYER:
        if small.get(name):
            small[name] = small[name][:layers]
    for name in ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path"):
        small.pop(name, None)
    return small


def small_copy(config: PretrainedConfig, options: Mapping[str, Any], layers: int = LAYERS) -> Any:
    """The shrunk copy with random weights; ``options`` are those of ``from_config``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    small = shrink_model(config, layers)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(small.pop("model_type"), **small), **options)


def widen(small: dict[str, Any], degree: int) -> None:
    """Give a shrunk copy heads and widths that ``degree`` ranks can divide, as the real model has."""
    sizes = [name for name in (*COUNTS, *WIDTHS, "word_embed_proj_dim") if isinstance(small.get(name), int)]
    if any(small[name] % degree for name in sizes):
        for name in sizes:
            small[name] *= degree


# --- what moves ------------------------------------------------------------------------------------------------------

TRAVEL = "weights travel"
MOVING = (TRAVEL, UPDATES[Site.HOST], UPDATES[Site.STREAMED])
LEVELS = 12  # budgets that are tried
OPEN = {"site": ("device", "host", "streamed"), "weights": ("streamed",), "gradients": ("device", "host")}


def layout_strategy(plan: Plan) -> str:
    """Name of the strategy that decided the layout of ``plan``."""
    return plan.decided_by((Stow.__name__, RUN))


def leaves(bucket: Bucket, layout: Layout) -> bool:
    """Whether the weight of ``bucket`` is off the device at some tick."""
    return not bucket.resident and sum(end - start for start, end in bucket.resident_ticks) < layout.num_ticks


def features(layout: Layout) -> frozenset[str]:
    """What a verification of ``layout`` has to show, in words."""
    trained = [bucket for bucket in layout.buckets if bucket.site is not Site.NONE]
    shown = {UPDATES[bucket.site] for bucket in trained}
    shown |= {f"gradients wait on the {bucket.grad_tier.value}" for bucket in trained}
    return frozenset(shown | {TRAVEL for bucket in layout.buckets if leaves(bucket, layout)})


def moves(layout: Layout) -> bool:
    """Whether anything crosses the link in a step."""
    return bool(features(layout) & set(MOVING))


@dataclass(frozen=True, slots=True)
class CopyRun:
    """Options of ``strategies.offload`` for a run of the copy, and the features that it shows with them."""

    options: Mapping[str, Any]
    shows: frozenset[str]


def moving(real: Plan, strategies: Mapping[str, Strategy], stages: Sequence[Facts]) -> list[CopyRun]:
    """Runs of the copy that together show what ``real`` moves, and weights that travel if possible.

    If ``real`` moves nothing, this is one run in which something moves; empty if nothing can.

    Args:
        strategies: of the config.
        stages: the facts of the copy; where it is cut, of each stage. What it shows is what the first one shows.
    """
    assert real.layout is not None
    name = layout_strategy(real)
    configured, always = strategies[name].model_dump(), dict[str, Any]()
    if configured["bucket_size"] != AUTO and block_bytes(real.facts):
        scaled = parse_bytes(configured["bucket_size"]) * block_bytes(stages[0]) // block_bytes(real.facts)
        always["bucket_size"] = str(max(2 * ALIGN_BYTES, scaled))
    ample = stages[0].machine.device_bytes  # more than any copy needs

    def plans(options: Mapping[str, Any]) -> list[Plan]:
        """The plan of each stage with these options; empty if one is refused."""
        changed = type(strategies[name]).model_validate({**configured, **options})
        try:
            return [compose({**strategies, name: changed}, facts) for facts in stages]
        except Refusal:
            return []

    def sized(budget: int) -> dict[str, Any]:
        return {**always, "gpu_memory": written(budget)}

    def by_budget() -> Iterator[dict[str, Any]]:
        """From the least budget that the copy can be trained with to the one that everything fits into."""
        most = plans(sized(ample))
        if not most or any(plan.addresses is None for plan in most):
            return
        high = max(plan.peak(Tier.DEVICE) for plan in most)
        low, unfit = high, 0
        while low - unfit > high >> 6:
            middle = (low + unfit) // 2
            low, unfit = (middle, unfit) if plans(sized(middle)) else (low, middle)
        yield from (sized(low + (high - low) * level // LEVELS) for level in range(LEVELS))

    def by_option() -> Iterator[dict[str, Any]]:
        """With what the user has left open, asked for by name."""
        free = {key: (AUTO, *values) if configured[key] == AUTO else (AUTO,) for key, values in OPEN.items()}
        for finer in ({}, {"prefetch": 0}, {"prefetch": 0, "bucket_size": AUTO}):
            for values in product(*free.values()):
                explicit = {key: value for key, value in zip(free, values, strict=True) if value != AUTO}
                yield {**sized(ample), **explicit, **finer}

    def shown(some: Iterator[dict[str, Any]]) -> list[CopyRun]:
        pairs = ((options, plans(options)) for options in some)
        return [CopyRun(options, features(trial[0].layout)) for options, trial in pairs if trial and trial[0].layout]

    def cover(wanted: frozenset[str]) -> list[CopyRun]:
        """Few runs that show what is ``wanted``: by budgets, and by explicit options for what no budget causes."""
        chosen, lacking = _fewest(shown(by_budget()), wanted)
        return chosen + _fewest(shown(by_option()), lacking)[0] if lacking else chosen

    if moves(real.layout):
        return cover(features(real.layout) | {TRAVEL})
    return next((runs for alone in MOVING if (runs := cover(frozenset([alone])))), [])


def _fewest(copies: Sequence[CopyRun], wanted: frozenset[str]) -> tuple[list[CopyRun], frozenset[str]]:
    """Greedily chosen runs that show ``wanted``, and what none of ``copies`` shows."""
    chosen = list[CopyRun]()
    while copies and wanted:
        best = max(copies, key=lambda copy: len(copy.shows & wanted))
        if not best.shows & wanted:
            break
        chosen.append(best)
        wanted -= best.shows
    return chosen, wanted
