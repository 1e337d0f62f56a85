"""Ranks with a simulated accelerator each, whose collectives are as asynchronous as it is.

The memory engine shared by ranks, over a table of cases; and whole runs through a config, each rank as a launcher would
start it on a machine of its own.
"""

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from deepstow.strategies.engine import stow
from deepstow.strategies.engine.transfer.transfer import AcceleratorTransfer, Stream
from deepstow.trainer.distributed.ranks import Ranks, describe
from tests.accelerator.conftest import COPIES_US, KERNELS_US, library
from tests.accelerator.rank import in_group, started, through_a_config
from tests.accelerator.test_trainer import config_of, left
from tests.helpers.engine import plan_of
from tests.helpers.grid import batches_on
from tests.helpers.models import build
from tests.helpers.pairwise import Row, Table
from tests.helpers.simulated import collectives
from tests.parity.test_engine_shares import CASE, FACTORS, FEW, FORBIDDEN, train

pytestmark = [pytest.mark.ranks, pytest.mark.simulated("the fake CUDA has no collectives")]
DEVICE = "sim:0"
SLOW_US = 2_000
FAST = {"site": "streamed", "weights": "travelling", "park": "host", "clip": "tight", "reduction": "fast"}
TRAVEL = {"site": "streamed", "weights": "streamed", "gradients": "device"}
SAVED = {"policy": "selective", "activation_offloading": True}


def opened() -> Any:
    """The ranks' group, with a device for each of them."""
    library().delay(COPIES_US, KERNELS_US)
    collectives.register(library())
    return dist.new_group(backend=collectives.NAME)


def unlike(ranks: Ranks, group: Any) -> list[str]:
    """What differs; of every other case copies up lag behind all else, of the others copies down."""
    lagging = cycle((Stream.DOWN, Stream.UP))
    ends = {"weights": ("travelling", "resident"), "bucket": ("one", "several")}
    few = Table({"model": ("blocks", "llama"), **{name: FACTORS[name] for name in FEW}, **ends}, FORBIDDEN)
    rows: list[Row] = [{**CASE, **row} for row in few.rows()]
    rows.append({**rows[0], **FAST, "split": False})

    def how() -> dict[str, Any]:
        transfer, late = AcceleratorTransfer(torch.device(DEVICE)), next(lagging)
        for stream, stream in transfer._streams.items():
            library().slow(stream.stream_id, SLOW_US if stream is late else 0)
        return {"transfer": transfer, "process_group": group}

    return train(ranks, rows, DEVICE, how)


def waits(ranks: Ranks, group: Any) -> list[dict[str, int]]:
    """What the hosts did with their devices in two steps after two that warm up, for each site of the update."""
    found = []
    for site in ("host", "streamed"):
        model: Any = build("llama")
        how: Any = {"weights": "travelling", "max_norm": 0.5, "ranks": ranks.world_size, "debug": False}
        plan: Any = plan_of(model, site=site, **how)
        optimizer = stow(model, plan, device=DEVICE, process_group=group)
        for number, batch in enumerate(batches_on(DEVICE, "llama", 4)):
            if number == 2:
                before = library().counts()
            model(**batch).loss.backward()
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        after = library().counts()
        found.append({kind: after[kind] - count for kind, count in before.items()})
        optimizer.close()
    return found


def everything(ranks: Ranks) -> dict[str, Any]:
    group = opened()
    return {"waits": waits(ranks, group), "unlike": unlike(ranks, group)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    common = {**describe(Ranks()), "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
    places = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    started(places, folder, in_group, folder / "found", everything)
    return dict(torch.load(folder / "found"))


def test_the_bits_of_one_process(found: dict[str, Any]) -> None:
    assert found["unlike"] == []


def test_no_host_waits_for_its_device(found: dict[str, Any]) -> None:
    """Ranks compare what they run, and which gradients they have, and for that no device has to come to an end."""
    assert len(found["waits"]) == 2
    for counts in found["waits"]:
        assert counts["sync_copies"] == counts["sync_kernels"] == 0 < counts["async_kernels"]


def run(folder: Path, strategies: dict[str, Any], num_ranks: int, accumulation: int) -> Any:
    """What a run leaves whose ranks each have a machine."""
    config = config_of(folder, strategies, gradient_accumulation_steps=accumulation)
    ranks = {**describe(Ranks()), "WORLD_SIZE": str(num_ranks)}
    started([{**ranks, "RANK": str(rank)} for rank in range(num_ranks)], folder, through_a_config, config)
    return left(folder)


def test_runs_through_a_config(tmp_path: Path) -> None:
    """Two ranks that share the engine, with saved tensors on the host, and the engine in two stages of a pipeline: both
    have the bits of one process that accumulates, and so of each other.
    """
    shared, weights = run(tmp_path / "shared", {"zero": {"stage": 3}, "offload": TRAVEL, "recompute": SAVED}, 2, 1)
    staged, others = run(tmp_path / "staged", {"pipeline": {"stages": 2}, "offload": TRAVEL}, 2, 2)
    assert len(shared) == 4 and shared == staged
    assert weights.keys() == others.keys() and all(torch.equal(value, others[key]) for key, value in weights.items())


def test_what_is_owed_visits_the_device(tmp_path: Path) -> None:
    """It rests on the host. Spans, and whole copies of the state, exchange the same."""
    less = {"collectives": {"compress": "topk", "density": 0.1, "start": 2}, "offload": TRAVEL}
    whole, weights = run(tmp_path / "whole", less, 2, 1)
    spans, others = run(tmp_path / "spans", {**less, "zero": {"stage": 3}}, 2, 1)
    assert len(whole) == 4 and whole == spans
    assert all(torch.equal(value, others[key]) for key, value in weights.items())
    file = "run/checkpoint-4/compressed-00001-of-00002.safetensors"
    owed, same = (load_file(tmp_path / way / file) for way in ("whole", "spans"))
    assert all(torch.equal(value, same[key]) for key, value in owed.items())
    assert all(value.any() for key, value in owed.items() if "embed" not in key), "whose rows are few, and all sent"
