"""`deepspeed`, `accelerate launch` and `deepstow train --ranks` start the run that ranks of the server are; `torchrun`
in ``test_machines.py``, and a plain interpreter in ``test_wheel.py``.

Every line of the output is accounted for: what we print, what the launcher prints, and nothing else.
"""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.commands import PYTHON, TRAIN, Result, Server, digest, launcher, metrics, run, started, write_config
from tests.e2e.interrupted import until
from tests.helpers.releases import HIGHEST_STAGE

pytestmark = [pytest.mark.slow, pytest.mark.ranks]

STEPS = 4
RUNS = [("deepspeed", 2, 2), ("accelerate", 1, HIGHEST_STAGE)]
IDS = [f"{name}-{num_ranks}" for name, num_ranks, _ in RUNS]

LAUNCHERS_OWN = {
    "deepspeed": r"\[\d{4}-\d\d-\d\d .*\] \[(INFO|WARNING)\] \[(real_accelerator|runner|launch)\.py:",
    "torchrun": r"W\d{4} .* torch/distributed/run\.py:",
    "accelerate": r"The following values were not|\t`--|To avoid this warning|W\d{4} .* torch/distributed/run\.py:",
}
OURS = [
    r"data: .*",
    r"plan: it fits\. 0\.\d+ M parameters, fp32, (1 rank|2 ranks) on cpu, \d+ tokens per step",
    r"(device memory|host memory|time per step|zero|more)  .*",
    r"step \d/4  \d+%  loss \d.*  lr .*  grad .* tok/s  host .* MiB  eta .*",
    r"measured after step 2:",
    r"process memory  .*",
    r" +counted rows have .* tokens; the plan is for the longest, .*",
    r"eval at step \d: loss .*  perplexity .*",
    r"trained to step 4: mean loss .*",
    r"sample at step 4, the prompt in brackets:",
    r"    .*",
    r"perplexity .* at step 0 -> .* at step 4",
    r"export: .*",
    r"run folder: .*",
    r"curves:     tensorboard --logdir .*",
    r"next:       deepstow chat .*",
    r"",
    r"DeepSpeed compiles its collectives for CPUs; only once, .*",
]


class Finished(NamedTuple):
    launcher: str
    num_ranks: int
    result: Result
    folder: Path

    @property
    def lines(self) -> list[str]:
        return self.result.out.splitlines()


@pytest.fixture(scope="module", params=RUNS, ids=IDS)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    name, num_ranks, stage = request.param
    folder = tmp_path_factory.mktemp(f"{name}-{num_ranks}")
    training = {
        "max_grad_norm": 0.0, "save_strategy": "steps", "save_steps": STEPS, "eval_strategy": "steps",
        "eval_steps": STEPS, "eval_on_start": True, "report_to": "tensorboard",
    }  # fmt: skip
    strategies = {} if stage is None else {"zero": {"stage": stage}}
    config = write_config(folder, data={"eval_fraction": 0.1}, training=training, strategies=strategies)
    command = [*launcher(name, num_ranks), TRAIN, "--config", str(config)]
    result = run(command, folder, OMP_NUM_THREADS="1").check().quiet()  # as the ranks of the server
    if name == "deepspeed":
        port = command[command.index("--master_port") + 1]
        assert not list(Path("/dev/shm").glob(f"*_{port}_*")), "memory is left behind"
    yield Finished(name, num_ranks, result, folder / "run")


def strange(launched_by: str, text: str) -> list[str]:
    """Lines that neither we nor the launcher should have said."""
    known = re.compile("|".join(f"(?:{pattern})$" for pattern in OURS))
    own = re.compile(LAUNCHERS_OWN[launched_by])
    return [line for line in text.splitlines() if not known.match(line) and not own.match(line)]


def test_every_line_is_ours_or_the_launchers(finished: Finished) -> None:
    """The plan comes first and once, and the end says where things are."""
    assert strange(finished.launcher, finished.result.text) == []
    begins = [line.split(" ")[0] for line in finished.lines]
    assert begins.count("plan:") == 1 and begins.index("plan:") < begins.index("step")
    assert [line.split("  ")[0] for line in finished.lines if line.startswith("step ")] == [
        f"step {step}/{STEPS}" for step in range(1, STEPS + 1)
    ]
    ours = [line for line in finished.lines if line.startswith(("export:", "run folder:", "curves:", "next:"))]
    assert [line.split()[0] for line in ours] == ["export:", "run", "curves:", "next:"]
    assert str(finished.folder) in ours[-1]


def test_the_run_folder(finished: Finished) -> None:
    folder = finished.folder
    for name in ("config.yaml", "facts.json", "plan.json", "plan.txt", "ds_config.json", "metrics.jsonl"):
        assert (folder / name).is_file(), name
    assert (folder / f"checkpoint-{STEPS}" / "manifest.json").is_file()
    assert list((folder / "runs").glob("*/events.out.tfevents.*"))
    assert "predicted peak per rank, " in (folder / "plan.txt").read_text()
    assert {path.name for path in (folder / "export").iterdir()} >= {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    records = metrics(folder)
    assert [record["step"] for record in records if "loss" in record] == list(range(1, STEPS + 1))
    before, after = (record for record in records if "eval_loss" in record)
    assert (before["step"], after["step"]) == (0, STEPS) and after["eval_loss"] < before["eval_loss"]


def test_all_train_the_same_weights(finished: Finished, server: Server, tmp_path: Path) -> None:
    """Launcher and stage change no bit."""
    config = write_config(tmp_path, data={"eval_fraction": 0.1}, training={"max_grad_norm": 0.0})
    server.run(finished.num_ranks, config).check()
    assert digest(finished.folder / "export") == digest(tmp_path / "run" / "export")


def test_our_own_ranks_save_when_their_launcher_is_asked_to_stop(tmp_path: Path) -> None:
    """SIGTERM to that process alone. All ranks end, and the exit code is theirs."""
    config = write_config(tmp_path, training={"max_steps": 1000, "save_strategy": "steps", "save_steps": 1000})
    ours = [PYTHON, "-m", "deepstow.launch.cli", "train", "--ranks", "2", "--config", str(config)]
    job = started(ours, tmp_path, OMP_NUM_THREADS="1")
    until(lambda: "step 2/1000" in job.text, job, "training")
    os.kill(job.pid, signal.SIGTERM)
    result = job.wait().check(10).quiet()
    (said,) = result.lines("SIGTERM: step ")
    assert (tmp_path / "run" / f"checkpoint-{said.split()[2]}" / "manifest.json").is_file()
