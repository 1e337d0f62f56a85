"""Degrees as keys of a config: what the search replaces, what it counts with, what strategies refuse of it, and what to
write for what it found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from deepstow.strategies.core.compose import refusals
from deepstow.strategies.core.facts import Compression, Facts, RunFacts
from deepstow.strategies.core.protocol import Refusal, Strategy
from deepstow.strategies.core.registry import available, find
from deepstow.strategies.planner.hybrid.degrees import Degrees, Size, Stowed

# Taken out of the config: what the search decides.
SEARCHED = ("zero", "tensor", "pipeline", "sequence", "experts", "recompute", "offload")
DIVIDING = ("tensor", "sequence", "experts")  # each by its ``degree``, which is a field of ``Degrees``
HERE = (2, 4, 8)  # degrees of what stays inside a machine
CHUNKS = "cross_entropy"
KEPT = ("gpu_memory", "host_memory", "sequence_parallel")  # options that are kept
LOSSY: tuple[Tree, ...] = ({"compress": "bf16"}, {"compress": "int8"}, {"compress": "powersgd"}, {"local_steps": 20})
Tree = dict[str, Any]
Refused = Callable[[Degrees], Refusal | None]


def divided(
    micro_batches: Sequence[int], ranks: int, per_machine: int, experts: int
) -> Iterator[tuple[str, list[Size]]]:
    """The divided shares that are tried, by strategy and degree, which rises.

    Rows are divided only where a micro-batch has one: of two, half as many ranks per row would have as many tokens, and
    exchange less.
    """
    in_machine = [degree for degree in HERE if per_machine % degree == 0]
    expert_degrees = [degree for degree in range(2, experts + 1) if ranks % degree == experts % degree == 0]
    for name, degrees in zip(DIVIDING, (in_machine, in_machine, expert_degrees), strict=True):
        sizes = [1] if name == "sequence" else micro_batches
        yield from ((name, [Size(size)._replace(**{name: degree}) for size in sizes]) for degree in degrees)


def without(tree: Tree, tensor: int = 1, sequence: int = 1, experts: int = 1) -> Tree:
    """A config as the model is counted: nothing recomputed, and weights in the dtype of compute."""
    kept = {key: value for key, value in tree["strategies"].get("tensor", {}).items() if key in KEPT}
    chosen = _divided(Degrees(tensor=tensor, sequence=sequence, experts=experts))
    if tensor > 1:
        chosen["tensor"] |= kept
    return _with(tree, {"zero": {"stage": int(bool(chosen))}, **chosen}, {})


def staged(tree: Tree, tensor: int = 1) -> Tree:
    """The same for a stage of torch's pipeline: plain training under autocast."""
    return _with(tree, {"pipeline": {"stages": 2}} | ({"tensor": {"degree": tensor}} if tensor > 1 else {}), {})


def written(degrees: Degrees, tree: Tree) -> Tree:
    """``tree`` with all that the search decides as ``degrees`` say; what is ``KEPT`` stays."""
    chosen = {}
    for name, options in strategies_of(degrees).items():
        kept = {key: value for key, value in tree["strategies"].get(name, {}).items() if key in KEPT}
        chosen[name] = kept | options
    training = {
        "per_device_train_batch_size": degrees.micro_batch,
        "gradient_accumulation_steps": degrees.micro_batches,
    }
    return _with(tree, chosen, training)


def lossy(facts: Facts, chosen: Sequence[Tree] = LOSSY) -> Iterator[Compression]:
    """What is ``chosen``, with the defaults of ``strategies.collectives``."""
    for options in chosen:
        how = find("collectives").model_validate(options).narrowed(facts, 0).run.compression
        yield from [how] if how is not None else []


def read(tree: Tree, ranks: int) -> Degrees:
    """The degrees of a config on so many ``ranks``; of what is decided by its plan, the likely choice."""
    chosen, training = tree["strategies"], tree["training"]
    stages = chosen.get("pipeline", {}).get("stages", 1)
    degrees = {name: chosen.get(name, {}).get("degree", 1) for name in DIVIDING}
    policy = chosen.get("recompute", {}).get("policy", "full" if training.get("gradient_checkpointing") else "none")
    return Degrees(
        stages=stages,
        **degrees,
        data=ranks // stages // degrees["tensor"] // degrees["sequence"],
        zero=chosen.get("zero", {}).get("stage", int("tensor" in chosen)),
        recompute="selective" if policy == "auto" else policy,
        offload=Stowed.STATE if "offload" in chosen else Stowed.NOTHING,
        micro_batch=training["per_device_train_batch_size"],
        micro_batches=training["gradient_accumulation_steps"],
    )


def strategies_of(degrees: Degrees) -> dict[str, Tree]:
    """The strategies of these degrees, with their options."""
    offloads = degrees.offload is not Stowed.NOTHING
    chosen: dict[str, Tree] = {}
    # Alone, stage 0 is DeepSpeed's engine with bf16 weights; beside an engine of its own there is nothing to write, but
    # that tensor ranks would not share the state.
    how = degrees.exchange
    if how is not None:
        chosen["collectives"] = {"local_steps": how.local_steps} if how.local_steps else {"compress": how.method}
    elif degrees.zero > 0 or degrees.tensor > 1 or (degrees.stages == 1 and not offloads):
        chosen["zero"] = {"stage": degrees.zero}
    chosen |= _divided(degrees)
    if degrees.stages > 1:
        chosen["pipeline"] = {"stages": degrees.stages, "schedule": "1f1b"}
    if degrees.recompute != "none":
        chosen["recompute"] = {"policy": degrees.recompute}
    # What rests where is decided by its own planner, which may do better than the plain placements of the search.
    return chosen | ({"offload": {}} if offloads else {})


def refused(run: RunFacts, beside: Mapping[str, Strategy]) -> Refused:
    """What strategies refuse first in such a run, as with its optimizer or number format, and ``beside`` those that the
    search leaves as they are.
    """

    @cache
    def first(degrees: Degrees) -> Refusal | None:
        named = {name: options for name, options in strategies_of(degrees).items() if name in available()}
        if run.in_slices and "tensor" in named:
            named["tensor"] = {**named["tensor"], "sequence_parallel": True}
        chosen = {name: find(name).model_validate(options) for name, options in named.items()}
        divided = replace(
            run,
            stages=degrees.stages,
            tensor=degrees.tensor,
            slices=degrees.sequence,
            world_size=degrees.ranks,
            accumulation=degrees.micro_batches,
            stowed="offload" in chosen,
        )
        return next(refusals({**beside, **chosen}, divided), None)

    return first


def _divided(degrees: Degrees) -> dict[str, Tree]:
    """The strategies that divide what a rank has of the model and of the rows, but for stages."""
    return {name: {"degree": degree} for name in DIVIDING if (degree := getattr(degrees, name)) > 1}


def _with(tree: Tree, chosen: Tree, training: Tree) -> Tree:
    """``tree`` with these strategies in place of all that the search decides."""
    settings = tree["training"] | training
    if settings.get("gradient_checkpointing"):
        settings["gradient_checkpointing"] = False
    settings.pop("activation_checkpointing", None)
    others = {name: options for name, options in tree["strategies"].items() if name not in SEARCHED}
    return tree | {"training": settings, "strategies": others | chosen}
