"""The grid of the engine's exactness gate: what a case is made of, and how it is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from deepstow.strategies.engine.transfer.transfer import Transfer
from deepstow.strategies.planner.hybrid.step_seconds import in_order
from tests.helpers.doubles import Delayed, RaceDetector, Vacant
from tests.helpers.engine import STEPS, Result, checkpointing, differences, plain, plan_of, stowed
from tests.helpers.models import build, on, tokens
from tests.helpers.pairwise import Row, Table

NORMS: Mapping[str, float] = {"in-backward": 0.0, "passing": 0.0, "off": 0.0, "tight": 0.05, "loose": 1e6}
TRANSFERS: Mapping[str, type[Transfer]] = {
    "at-once": Transfer,
    "delayed": Delayed,
    "watched": RaceDetector,
    "vacant": Vacant,
}

# Gradients of what is updated on the device have no reason to go down; nothing is fetched early where nothing travels.
# Which expert gets no token is known only when all have come, and the next bucket needs the place before.
FORBIDDEN = [
    (("model", "experts"), ("clip", "passing")),
    (("site", "device"), ("park", "host")),
    *((("weights", "resident"), ("prefetch", ahead)) for ahead in (0, 1, 5)),
]
ENGINE: Mapping[str, Sequence[object]] = {  # what every table has, in this order
    "site": ("host", "streamed", "mixed", "device"),
    "weights": ("travelling", "some", "resident"),
    "bucket": ("one", "several", "half"),
    "park": ("host", "device"),
    "clip": ("in-backward", "off", "tight", "loose"),
    "accumulation": (1, 3),
}


def _table(*models: str, strength: int = 2, **changes: Sequence[object]) -> Table:
    rest: Mapping[str, Sequence[object]] = {
        "tied": (False, True), "groups": (1, 2), "recompute": ("none", "later"), "prefetch": (2, 0, 5),
        "transfer": ("delayed", "watched", "at-once"),
    }  # fmt: skip
    return Table({"model": models, **ENGINE, **rest, **changes}, FORBIDDEN, strength)


FP32 = _table(
    "llama", "gpt2", "bloom", "mixtral", "experts", "bert",
    strength=3, clip=("in-backward", "passing", "off", "tight", "loose"), recompute=("none", "later", "reentrant"),
    prefetch=(2, 0, 1, 5),
)  # fmt: skip
DRAWING = ("gpt2", "opt", "bert")  # random numbers
BF16 = _table("llama", "experts", "gpt2", bucket=("one", "half"))
IN_STAGES = _table(
    "gpt2", "experts",
    clip=("off", "tight"), accumulation=(4,), order=("1f1b", "gpipe"), transfer=("delayed", "watched", "vacant"),
)  # fmt: skip
IN_LAYERS = _table(
    "llama", "mixtral", "experts", "gpt2",
    tied=(False,), accumulation=(2, 3), dtype=(torch.float32, torch.bfloat16), order=("layers",),
    transfer=("delayed", "watched", "vacant", "at-once"),
    clip=("in-backward", "passing", "off", "tight", "loose"), prefetch=(2, 0, 1, 5),
)  # fmt: skip


def title(row: Row) -> str:
    """A row in one line."""
    return ", ".join(str(level) if isinstance(level, str) else f"{name} {level}" for name, level in row.items())


@cache
def expected(model: str, tied: bool, recompute: str, dtype: torch.dtype, device: str, **loop: Any) -> Result:
    """Plain training, once for all cases that differ in memory only."""
    made = on(device, build(model, tied=tied, dtype=dtype))
    checkpointing(made, recompute)
    return plain(made, batches_on(device, model, STEPS * loop["accumulation"]), **loop)


def loop_of(row: Row) -> dict[str, Any]:
    """What plain training has to know of a case, besides the model."""
    case: dict[str, Any] = dict(row)
    return {"accumulation": case["accumulation"], "max_norm": NORMS[case["clip"]], "groups": case["groups"]}


def noise(row: Row, dtype: torch.dtype, device: str) -> list[str]:
    """What differs between plain training and plain training."""
    case: dict[str, Any] = dict(row)
    return _noise(case["model"], case["tied"], case["recompute"], dtype, device, **loop_of(row))


@cache
def _noise(*case: Any, **loop: Any) -> list[str]:
    return differences(expected(*case, **loop), expected.__wrapped__(*case, **loop))


def batches_on(device: str, model: str, number: int) -> list[dict[str, torch.Tensor]]:
    """The same tokens everywhere."""
    return [{name: value.to(device) for name, value in batch.items()} for batch in tokens(model, number)]


def both(
    row: Row, dtype: torch.dtype = torch.float32, device: str = "cpu", transfer: Transfer | None = None
) -> tuple[Result, Result]:
    """Train a case plainly and by the engine."""
    case: dict[str, Any] = dict(row)
    loop = loop_of(row)
    wanted = expected(case["model"], case["tied"], case["recompute"], dtype, device, **loop)
    model = build(case["model"], tied=case["tied"], dtype=dtype)
    checkpointing(model, case["recompute"])
    where = {name: case[name] for name in ("site", "weights", "bucket", "park", "prefetch")}
    layers = case.get("order") == "layers"
    early, passing = case["clip"] in ("in-backward", "passing"), case["clip"] == "passing"
    passes = {"accumulation": 1} if layers else {}
    plan = plan_of(model, in_backward=early, passing=passing, **where, **(loop | passes))
    batches = batches_on(device, case["model"], STEPS * case["accumulation"])
    moves = transfer or TRANSFERS[case["transfer"]]()
    tasks = None
    if "order" in case and not layers:  # of the first of three stages, which has most micro-batches under way
        count = case["accumulation"]
        tasks = [(backward, number) for stage, backward, number in in_order(3, count) if stage == 0]
        if case["order"] == "gpipe":
            tasks = [(backward, number) for backward in (False, True) for number in range(count)]
    order: dict[str, Any] = {"tasks": tasks, "layers": layers, "draws": case["model"] in DRAWING}
    return wanted, stowed(model, plan, batches, transfer=moves, device=device, **order, **loop)


def run(row: Row, dtype: torch.dtype = torch.float32) -> list[str]:
    """What differs between the two."""
    return differences(*both(row, dtype))
