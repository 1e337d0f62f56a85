"""The facts of one tensor rank: the model with a share of the heads and of the MLP's width, counted like any other.

Tensor parallelism as DeepSpeed and Megatron-LM do it gives each rank some heads, and some columns and rows of the MLP;
hidden states, norms, embedding and head stay whole. A block with so many heads and that width is the rank's block: what
it saves for backward, and its weights, are counted and not scaled. Its operations are the block's over the degree.

Blocks are alike, so a model of three stands for one of many, which takes a tenth of the time, and leaves out a scalar
or so per block; where they are not alike, all are counted. Not tried: models whose config has no size of a head by
itself, since theirs would follow from the number of heads, and mixtures of experts, which are split in other ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from strategies.core.facts import Facts, Unit, UnitKind
from strategies.planner.hybrid.parts import Model
from strategies.planner.step_cost import unit_flops
from trainer.config.load import build as build_config
from trainer.model.build import load_config
from trainer.model.config_keys import DEPTHS
from trainer.model.count_cache import cached
from trainer.model.shrink import PER_LAYER
from trainer.planning.facts import ModelCount, count_model, gather, vocab_size_of

if TYPE_CHECKING:
    from trainer.config.sections import RunConfig
    from trainer.dist.ranks import Ranks
    from trainer.machine.probe import Machine

FEW = 3  # blocks: the first, the last, and one that stands for all between
SPLIT = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
MICRO_BATCHES, TENSOR = (1, 2, 4), (2, 4, 8)
Known = dict[tuple[int, int], Facts]


def gather_parts(
    config: RunConfig, ranks: Ranks, machine: Machine, sequences: int, say: Callable[[str], None]
) -> tuple[Known, str]:
    """The facts of a tensor rank by micro-batch and tensor degree, and why no tensor degree is tried, if none is.

    Raises:
        ConfigError: the model cannot be described.
    """
    whole = gather(config, ranks.world_size, ranks.local_world_size, machine)
    sizes, why = _sizes(config)
    own = whole.run.micro_batch
    degrees = [1]
    for degree in TENSOR if not why else ():
        if ranks.local_world_size % degree == 0 and all(size % degree == 0 for size in sizes.values()):
            degrees.append(degree)
    found: Known = {}
    for micro_batch in [own, *(size for size in MICRO_BATCHES if sequences % size == 0 and size != own)]:
        for degree in degrees:
            if (micro_batch, degree) == (own, 1):
                found[micro_batch, degree] = whole
                continue
            say(f"counting a micro-batch of {micro_batch} on one of {degree} tensor rank{'s' * (degree > 1)}")
            found[micro_batch, degree] = _part(config, whole, micro_batch, degree, sizes)
    return found, why


def gather_stages(
    config: RunConfig, ranks: Ranks, machine: Machine, sizes: Sequence[int], say: Callable[[str], None]
) -> dict[int, Facts]:
    """The facts of a model in torch's pipeline, by micro-batch: plain training, its parameters listed.

    Raises:
        ConfigError: the model cannot be described.
    """
    whole = gather(config, ranks.world_size, ranks.local_world_size, machine)
    whole = replace(whole, run=replace(whole.run, stages=1))
    found = {}
    for size in sizes:
        say(f"counting a micro-batch of {size} in stages")
        found[size] = whole if size == whole.run.micro_batch else _part(config, whole, size, 1, {})
    return found


def _sizes(config: RunConfig) -> tuple[dict[str, int], str]:
    """The sizes that tensor ranks share, and why they cannot."""
    text = load_config(config.model, vocab_size_of(config)).get_text_config()
    if any(getattr(text, name, None) for name in EXPERTS):
        return {}, "experts are not split over tensor ranks"
    found = {name: getattr(text, name, None) for name in SPLIT}
    if not getattr(text, "head_dim", None) or not all(found.values()):
        return {}, "the model's config does not give heads, their size and the MLP's width one by one"
    return {name: int(size) for name, size in found.items() if size}, ""


def _part(config: RunConfig, whole: Facts, micro_batch: int, degree: int, sizes: dict[str, int]) -> Facts:
    """The facts of one of ``degree`` tensor ranks for another micro-batch."""
    tree = config.tree()
    tree["training"] = tree["training"] | {"per_device_train_batch_size": micro_batch}
    resized = build_config(tree).like(config)
    changed: dict[str, Any] = {name: size // degree for name, size in sizes.items()} if degree > 1 else {}
    blocks = sum(unit.kind is UnitKind.BLOCK for unit in whole.units)
    few = blocks > FEW and Model(whole).alike
    if few:
        changed |= _fewer(resized)
    what = ", ".join(f"{name}={size}" for name, size in changed.items())
    count = cached(resized, ModelCount, lambda: count_model(resized, changed), what=what)
    units = tuple(_lengthened(count.units, whole.units)) if few else count.units
    run = replace(
        whole.run,
        micro_batch=micro_batch,
        forward_flops=_flops(whole, micro_batch, degree),
        largest_param=count.largest_param,
    )
    return replace(whole, units=units, run=run, params=whole.params if degree == 1 else (), linears=())


def _fewer(config: RunConfig) -> dict[str, Any]:
    """The changes of a model's config that leave ``FEW`` layers."""
    text = load_config(config.model, vocab_size_of(config)).get_text_config()
    depth = next(name for name in DEPTHS if getattr(text, name, None))
    lists = {name: list(getattr(text, name))[:FEW] for name in PER_LAYER if getattr(text, name, None)}
    return {depth: FEW} | lists


def _lengthened(few: tuple[Unit, ...], whole: tuple[Unit, ...]) -> Iterator[Unit]:
    """``few`` with the block in the middle as often as ``whole`` has blocks, by the names of these."""
    at = [index for index, unit in enumerate(few) if unit.kind is UnitKind.BLOCK]
    blocks = [index for index, unit in enumerate(whole) if unit.kind is UnitKind.BLOCK]
    before, after = few[: at[1]], few[at[-1] :]
    middle = [few[at[1]]] * (len(whole) - len(before) - len(after))
    assert len(at) == FEW and len(blocks) == len(middle) + 2, "blocks follow one another"
    for unit, named in zip((*before, *middle, *after), whole, strict=True):
        yield replace(unit, name=named.name)


def _flops(whole: Facts, micro_batch: int, degree: int) -> int:
    """Forward operations of a rank: what is not in blocks is done by every tensor rank."""
    flops = unit_flops(whole)
    pairs = list(zip(whole.units, flops, strict=True))
    inside = sum(each for unit, each in pairs if unit.kind is UnitKind.BLOCK)
    return int(micro_batch / whole.run.micro_batch * (inside / degree + sum(flops) - inside))
