"""Signals, stopped ranks, dead launchers, full disks and second runs, done to real runs; every one can be resumed.

``make faults`` does all of it at many moments (``tests/faults/full``); here is one of each kind.
"""

import hashlib
import os
import resource
import signal
import stat
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.commands import Server, digest
from tests.e2e.interrupted import STEPS, at_step, checkpoints, config_in, ended, ranks_of, same_end, start, until

pytestmark = pytest.mark.ranks

LONG = 100_000  # steps; nobody waits for them
ZERO = {"zero": {"stage": 2}}


@pytest.fixture(scope="module")
def whole(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a run of one rank that nothing happens to."""
    config = config_in(tmp_path_factory.mktemp("whole"))
    server.run(1, config).check()
    return config


def test_ctrl_c_saves_at_the_end_of_the_step(whole: Path, server: Server, tmp_path: Path) -> None:
    """A terminal sends it to all processes, those that load batches too, and a key may be pressed twice."""
    config = config_in(tmp_path / "run")
    overrides = ["training.dataloader_num_workers=2"]
    job = start(server, 1, config, *overrides)
    at_step(job, config, 2)
    (pid,) = ranks_of(job)
    loaders = [child.pid for child in psutil.Process(pid).children()]
    assert len(loaders) == 2
    for each in (*loaders, pid, pid):
        os.kill(each, signal.SIGINT)
    result = job.wait().check(130).quiet()
    (step,) = checkpoints(config)
    said = "SIGINT: the step is finished and saved first; Ctrl-C once more, after 2 s, ends the run at once"
    assert said in result.err and f"SIGINT: step {step} is saved, the run ends" in result.err
    assert 2 <= step < STEPS and ended(config) == (130, step)
    server.run(1, config, *overrides).check()
    same_end(config, whole)


def test_a_signal_to_one_of_two_ranks_saves_at_the_end_of_the_step(server: Server, tmp_path: Path) -> None:
    """While it trains it listens on the loopback interface alone."""
    config = config_in(tmp_path / "run", ZERO)
    job = start(server, 2, config)
    at_step(job, config, 2)
    pids = ranks_of(job)
    listening = {
        it.laddr.ip for pid in pids for it in psutil.Process(pid).net_connections("tcp") if it.status == "LISTEN"
    }
    assert listening == {"127.0.0.1"}
    os.kill(pids[1], signal.SIGUSR1)
    result = job.wait().check(10).quiet()
    (step,) = checkpoints(config)
    assert 2 <= step < STEPS
    assert f"SIGUSR1 on rank 1: step {step} is saved, the run ends" in result.err
    assert ended(config) == (10, step)
    assert not (config.parent / "run" / "run.lock").exists()


def test_a_signal_between_evaluations_that_save_only_the_best(whole: Path, server: Server, tmp_path: Path) -> None:
    """Evaluations change no bit of training, and the resumed run saves as often as its own config says."""
    config = config_in(
        tmp_path / "run", save_strategy="best", eval_strategy="steps", eval_steps=1, metric_for_best_model="loss",
        greater_is_better=True,
    )  # fmt: skip
    overrides = [f"data.eval_path={tmp_path / 'run' / 'few.jsonl'}"]
    job = start(server, 1, config, *overrides)  # the first evaluation, of the highest loss, is the best one
    at_step(job, config, 4)
    os.kill(ranks_of(job)[0], signal.SIGTERM)
    result = job.wait().check(10).quiet()
    step = max(checkpoints(config))
    assert step >= 4 and f"step {step} is saved, the run ends" in result.err
    overrides += ["training.save_strategy=steps", "training.save_steps=20", "training.eval_strategy='no'"]
    server.run(1, config, *overrides, "training.metric_for_best_model=null", "training.greater_is_better=null").check()
    assert checkpoints(config)[-3:] == [20, 40, STEPS]
    same_end(config, whole)


def files(folder: Path) -> dict[str, str]:
    """Hash of every file by name."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "exit.json"
    }


def test_a_finished_run_stays_as_it_is(server: Server, tmp_path: Path) -> None:
    """The learning rate does not end at 0, and the last step is not the end of an epoch."""
    config, folder = config_in(tmp_path), tmp_path / "run"
    server.run(1, config).check()
    before = files(folder)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}
    assert len(modes) == 1, modes
    again = server.run(1, config).check().quiet()
    assert again.out.startswith("finished before, at step 42: ") and again.out.count("\n") == 2
    assert files(folder) == before
    weights = folder / "export" / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    again = server.run(1, config).check()
    assert "the export of before is now in" in again.out and "train_loss" not in again.out
    assert files(folder / "export") == {name[7:]: it for name, it in before.items() if name.startswith("export/")}
    assert checkpoints(config) == [STEPS]
    assert (folder / "earlier-1" / "export" / "model.safetensors").read_bytes() == damaged
    anew = server.run(1, config, "training.resume_from_checkpoint=false", "training.save_strategy=no").check()
    assert "a fresh run: the checkpoints and the export of the earlier one are now in" in anew.out
    assert (folder / "earlier-2" / f"checkpoint-{STEPS}").is_dir() and checkpoints(config) == []
    assert digest(folder / "earlier-2" / "export") == digest(folder / "export")
    server.run(1, config, "training.overwrite=true").check()
    assert sorted(path.name for path in folder.glob("earlier-*")) == ["earlier-1", "earlier-2"]


def test_a_stopped_rank_ends_all_with_their_stacks(server: Server, tmp_path: Path) -> None:
    """Under ZeRO, whose groups have another timeout by themselves. Before, a second run in its folder is refused."""
    config = config_in(tmp_path, ZERO, max_steps=LONG, ddp_timeout=5)
    job = start(server, 2, config)
    at_step(job, config, 5)
    time.sleep(1.5)  # two beats of the watchdogs: each has heard what the other does in training
    first, second = ranks_of(job)
    for pid in (first, second):  # while another run is refused, for which neither has to train
        os.kill(pid, signal.SIGSTOP)
    refused = server.run(1, config).check(2).quiet()
    assert refused.err.count("\n") == 1 and f"in use by another run: process {first} on" in refused.err
    assert "data:" not in refused.text and not (tmp_path / "run" / "exit.json").exists()
    os.kill(first, signal.SIGCONT)
    until(lambda: not psutil.pid_exists(first), job, "ended", timeout_s=30.0)
    os.kill(second, signal.SIGKILL)
    result = job.wait().check(13)
    assert "watchdog: rank 0 of 2 ends, exit code 13: rank " in result.err
    assert "rank 1: in step " in result.err or "rank 1: after step " in result.err
    assert ended(config)[0] == 13
    assert "rank 0, thread MainThread:" in result.err and "trainer/run/session.py" in result.err


def test_a_full_disk_costs_a_checkpoint_and_nothing_else(whole: Path, server: Server, tmp_path: Path) -> None:
    """The disk is full for large files only, from step 2 until one save was in vain."""
    config = config_in(tmp_path / "run", save_steps=8)
    job = start(server, 1, config)
    at_step(job, config, 2)
    (pid,) = ranks_of(job)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    until(lambda: "was not saved" in job.text, job, "a save in vain")
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    result = job.wait().check().quiet()
    failed = [line for line in result.text.splitlines() if "was not saved" in line]
    assert failed and all(line.endswith("; older ones are as they were; the next save tries again") for line in failed)
    assert digest(config.parent / "run" / "export") == digest(whole.parent / "run" / "export")
    assert (config.parent / "run" / f"checkpoint-{STEPS}").is_dir()
