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


def launched(by: str, config: Path, folder: Path) -> list[Job]:
    """One rank on each of two "machines", which ``by`` starts one by one."""
    meet = ["--master_addr", "127.0.0.1", "--master_port", str(unused_port())]
    hosts = folder / "hosts"
    hosts.write_text("node-0 slots=1\nnode-1 slots=1\n")
    where = {
        "torchrun": ["--nnodes", "2", "--nproc_per_node", "1"],
        "deepspeed": ["--hostfile", str(hosts), "--no_ssh"],
    }[by]
    return [
        started(
            [str(BIN / by), *where, *meet, "--node_rank", str(node), TRAIN, "--config", str(config)],
            folder / f"node-{node}",
            OMP_NUM_THREADS="1",
        )
        for node in (0, 1)
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("by", ["torchrun", pytest.param("deepspeed", marks=pytest.mark.rare)])
def test_two_launchers_make_what_one_process_makes(by: str, server: Server, tmp_path: Path) -> None:
    training = {"gradient_accumulation_steps": 2, "max_steps": 2}
    alone = write_config(tmp_path / "alone", training=training, model=SECTION)
    server.run(1, alone).check()
    config = write_config(tmp_path / by, training=training, model=SECTION, strategies={"pipeline": {"stages": 2}})
    first, second = (command.wait(120.0).check() for command in launched(by, config, tmp_path / by))
    assert first.lines("export: ")
    assert not second.lines("step "), "only the first rank of all prints"
    # The first launcher serves the store, and may have ended when the second's agent says goodbye: torch complains,
    # after everything that ranks have said.
    assert strange(by, first.err + second.out + re.split(r"\[W.*recvValueWithTimeout failed", second.err)[0]) == []
    runs = [tmp_path / name / "run" for name in ("alone", by)]
    assert digest(runs[0] / "export") == digest(runs[1] / "export")
    losses = [[(line["loss"], line["grad_norm"]) for line in metrics(run) if "loss" in line] for run in runs]
    assert losses[0] == losses[1]
