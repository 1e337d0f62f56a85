"""Two launchers, as on two machines, run one job: a pipeline of which each has a stage."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deepstow.trainer.distributed.ranks import unused_port
from tests.e2e.commands import BIN, MODEL, TRAIN, Job, Server, digest, metrics, started, write_config
from tests.e2e.test_launchers import strange

pytestmark = pytest.mark.slow

SECTION = {"config": MODEL | {"attention_dropout": 0.0}}  # stages draw numbers of their own


def launched(config: Path, folder: Path) -> list[Job]:
    """One rank on each of two "machines", which torchrun starts one by one."""
    meet = ["--master_addr", "127.0.0.1", "--master_port", str(unused_port())]
    where = ["--nnodes", "2", "--nproc_per_node", "1"]
    return [
        started(
            [str(BIN / "torchrun"), *where, *meet, "--node_rank", str(node), TRAIN, "--config", str(config)],
            folder / f"node-{node}",
            OMP_NUM_THREADS="1",
        )
        for node in (0, 1)
    ]


@pytest.mark.ranks
def test_two_launchers_make_what_one_process_makes(server: Server, tmp_path: Path) -> None:
    training = {"gradient_accumulation_steps": 2, "max_steps": 2}
    alone = write_config(tmp_path / "alone", training=training, model=SECTION)
    server.run(1, alone).check()
    config = write_config(tmp_path / "both", training=training, model=SECTION, strategies={"pipeline": {"stages": 2}})
    first, second = (command.wait(120.0).check() for command in launched(config, tmp_path / "both"))
    assert first.lines("export: ")
    assert not second.lines("step "), "only the first rank of all prints"
    # The first launcher serves the store, and may have ended when the second's agent says goodbye: torch complains,
    # after everything that ranks have said.
    assert (
        strange("torchrun", first.err + second.out + re.split(r"\[W.*recvValueWithTimeout failed", second.err)[0]) == []
    )
    runs = [tmp_path / name / "run" for name in ("alone", "both")]
    assert digest(runs[0] / "export") == digest(runs[1] / "export")
    losses = [[(line["loss"], line["grad_norm"]) for line in metrics(run) if "loss" in line] for run in runs]
    assert losses[0] == losses[1]
