"""Two launchers, as on two machines, run one job: a pipeline of which each has a stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.commands import BIN, MODEL, TRAIN, Command, Server, digest, free_port, metrics, write_config

SECTION = {"config": MODEL | {"attention_dropout": 0.0}}  # stages draw numbers of their own


@pytest.mark.ranks
def test_two_launchers_make_what_one_process_makes(server: Server, tmp_path: Path) -> None:
    training = {"gradient_accumulation_steps": 2, "max_steps": 2}
    alone = write_config(tmp_path / "alone", training=training, model=SECTION)
    server.run(1, alone).check()
    config = write_config(tmp_path / "two", training=training, model=SECTION, strategies={"pipeline": {"stages": 2}})
    where = ["--nnodes", "2", "--nproc_per_node", "1", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    started = [
        Command(
            [str(BIN / "torchrun"), *where, "--node_rank", str(node), TRAIN, "--config", str(config)],
            tmp_path / f"node-{node}",
            OMP_NUM_THREADS="1",
        )
        for node in (0, 1)
    ]
    first, second = (command.wait(120.0).check() for command in started)
    assert first.lines("export: ")
    assert not second.lines("step "), "only the first rank of all prints"
    runs = [tmp_path / name / "run" for name in ("alone", "two")]
    assert digest(runs[0] / "export") == digest(runs[1] / "export")
    losses = [[(line["loss"], line["grad_norm"]) for line in metrics(run) if "loss" in line] for run in runs]
    assert losses[0] == losses[1]
