"""Degrees as keys of a config: what the search replaces, what it counts with, and what to write for what it found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from strategies.planner.hybrid.degrees import Degrees, Rule, Stowed

SEARCHED = ("zero", "tensor", "pipeline", "recompute", "offload")  # strategies that the search decides
CHUNKS = "cross_entropy"
BUDGETS = ("gpu_memory", "host_memory")  # options that are kept
Tree = dict[str, Any]
Offer = tuple[str, Tree, Callable[[Degrees], bool]]  # a strategy, options, and the degrees that are written with them


def without(tree: Tree, tensor: int = 1) -> Tree:
    """A config as the model is counted: nothing recomputed, and weights in the dtype of compute."""
    divided = {"tensor": {"degree": tensor}, "zero": {"stage": 1}}
    return _with(tree, divided if tensor > 1 else {"zero": {"stage": 0}}, {})


def staged(tree: Tree) -> Tree:
    """The same for a stage of torch's pipeline: plain training under autocast."""
    return _with(tree, {"pipeline": {"stages": 2}}, {})


def written(degrees: Degrees, tree: Tree, blocks: Sequence[int] | None = None) -> Tree:
    """``tree`` with all that the search decides as ``degrees`` say; budgets of memory stay. ``blocks``: of each stage,
    where they are not those that ``strategies.pipeline`` chooses itself.
    """
    chosen = {}
    for name, options, used in offers(degrees):
        if used(degrees):
            kept = {key: value for key, value in tree["strategies"].get(name, {}).items() if key in BUDGETS}
            cut = {"blocks": list(blocks)} if name == "pipeline" and blocks is not None else {}
            chosen[name] = kept | options | cut
    training = {
        "per_device_train_batch_size": degrees.micro_batch,
        "gradient_accumulation_steps": degrees.micro_batches,
    }
    return _with(tree, chosen, training)


def read(tree: Tree, ranks: int) -> Degrees:
    """The degrees of a config on so many ``ranks``; of what is decided by its plan, the likely choice."""
    chosen, training = tree["strategies"], tree["training"]
    stages, tensor = chosen.get("pipeline", {}).get("stages", 1), chosen.get("tensor", {}).get("degree", 1)
    policy = chosen.get("recompute", {}).get("policy", "full" if training.get("gradient_checkpointing") else "none")
    return Degrees(
        stages=stages,
        tensor=tensor,
        data=ranks // stages // tensor,
        zero=chosen.get("zero", {}).get("stage", 0),
        recompute="selective" if policy == "auto" else policy,
        offload=Stowed.STATE if "offload" in chosen else Stowed.NOTHING,
        micro_batch=training["per_device_train_batch_size"],
        micro_batches=training["gradient_accumulation_steps"],
    )


def offers(degrees: Degrees) -> Iterator[Offer]:
    """Each strategy with the options that ``degrees`` have, and whose degrees these are."""
    yield "zero", {"stage": degrees.zero}, _writes_zero
    yield "tensor", {"degree": degrees.tensor}, lambda d: d.tensor > 1
    yield "pipeline", {"stages": degrees.stages, "schedule": "1f1b"}, lambda d: d.stages > 1
    yield "recompute", {"policy": degrees.recompute}, lambda d: d.recompute != "none"
    # What rests where is decided by its own planner, which may do better than the plain placements of the search.
    yield "offload", {}, lambda d: d.offload is not Stowed.NOTHING


def refused(offer: Offer, reason: str) -> Rule:
    """A rule for a strategy that refuses these options in this run."""
    name, options, used = offer
    return Rule(f"{name} refused", reason, lambda d, has: used(d) and options.get("stage", d.zero) == d.zero)


def _writes_zero(degrees: Degrees) -> bool:
    """Alone, stage 0 is DeepSpeed's engine with bf16 weights; beside an engine of its own there is nothing to write."""
    return degrees.zero > 0 or (degrees.stages == 1 and degrees.offload is Stowed.NOTHING)


def _with(tree: Tree, chosen: Tree, training: Tree) -> Tree:
    """``tree`` with these strategies in place of all that the search decides."""
    whole = tree["training"] | training
    if whole.get("gradient_checkpointing"):
        whole["gradient_checkpointing"] = False
    whole.pop("activation_checkpointing", None)
    others = {name: options for name, options in tree["strategies"].items() if name not in SEARCHED}
    return tree | {"training": whole, "strategies": others | chosen}
