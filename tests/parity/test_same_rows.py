"""A checkpoint that is resumed on other ranks, where every update keeps its rows: nothing has to be allowed, and it
ends with the bits of plain training on one rank that nothing interrupted.

Two micro-batches per update: of one copy of the model, or one of each of two. The runs go on into a second epoch. What
is compared for a pair is what the reader has found (the saver's exact state) and how it ends. Tensor parallelism adds
up products in another order, so its end is compared within its tolerance.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepstow.trainer.run.checkpoints import checkpoint, resuming
from tests.helpers.moves import (
    OFFLOAD,
    SAVED,
    Job,
    Kind,
    different,
    far,
    in_worlds,
    offload,
    pipeline,
    plain,
    shared,
    tensor,
    zero,
)
from tests.helpers.releases import HIGHEST_STAGE

pytestmark = pytest.mark.ranks
STEPS = 6  # of 4 in an epoch
ROWS, TOLERANCE = 3, 1e-2  # of a micro-batch; of Adam's moments and weights after six steps


def kind(made: Kind) -> Kind:
    count = {"per_device_train_batch_size": ROWS, "gradient_accumulation_steps": 2 // made.copies}
    return replace(made, training={**made.training, **count})


KINDS = {
    "plain": kind(plain()),
    "offload": kind(offload()),
    "data": kind(plain(2)),
    "zero 1": kind(zero(1, 2)),
    "zero 2": kind(zero(2, 2)),
    "zero 3": kind(zero(HIGHEST_STAGE, 2)),
    "offload of two": kind(offload(2)),
    "zero with offload": kind(shared(2)),
    "pipeline": kind(pipeline(2)),
    "tensor": kind(tensor(1)),
    "tensor with offload": kind(Kind(2, {"tensor": {"degree": 2}, **OFFLOAD})),
    "tensor in chunks": kind(Kind(2, {"tensor": {"degree": 2, "chunks": ROWS}, "zero": {"stage": 1}})),
}
SOME = [("plain", reader) for reader in ("data", "zero with offload", "pipeline")]
RING = list(zip(KINDS, [*list(KINDS)[1:], "plain"], strict=True))


def begun(folder: Path, names: Iterable[str]) -> Iterator[tuple[Kind, Job]]:
    for name in names:
        yield KINDS[name], (name, KINDS[name].config(folder / name, STEPS), None)


def resumed(folder: Path, pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[Kind, Job]]:
    """With what the rules say about each pair."""
    for saver, reader in pairs:
        path, config = (
            folder / saver / f"checkpoint-{SAVED}",
            KINDS[reader].config(folder / f"{saver}, {reader}", STEPS),
        )
        changes = resuming.compare(config, KINDS[reader].ranks, checkpoint.Found(path, checkpoint.read(path)[1]))
        assert changes.refused == [] and all(line.startswith("strategies.") for line in changes.said), changes
        yield KINDS[reader], (f"{saver}, {reader}", config, str(path))


@pytest.mark.parametrize("pairs", [SOME, pytest.param(RING, marks=pytest.mark.slow)], ids=["some", "in a ring"])
def test_the_bits_of_one_rank(pairs: list[tuple[str, str]], tmp_path: Path) -> None:
    whole = in_worlds(begun(tmp_path, dict.fromkeys(["plain", *(saver for saver, _ in pairs)])))
    found, plainly = in_worlds(resumed(tmp_path, pairs)), whole["plain"]["end"]
    wrong = [name for name, run in whole.items() if not same(name, run["end"], plainly)]
    for saver, reader in pairs:
        run = found[f"{saver}, {reader}"]
        wrong += [f"{saver}, {reader}: start"] if different(whole[saver][f"saved at {SAVED}"], run["start"]) else []
        wrong += [] if same(saver + reader, run["end"], plainly) else [f"{saver}, {reader}: end"]
    assert wrong == []


def same(names: str, one: dict[str, Any], other: dict[str, Any]) -> bool:
    return not (far(one, other, TOLERANCE) if "tensor" in names else different(one, other))
