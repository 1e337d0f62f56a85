"""Every way to disturb a run while it trains, at many moments: ``make faults``, not part of ``make test``.

Each case ends in the same two questions: did everything end that had to, in bounded time; and has the run, started once
more, the bits of one that nobody disturbed?
"""

import os
import random
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.commands import PYTHON, REPO, TRAIN, Job, Server, environment, launcher, started, write_text_data
from tests.e2e.interrupted import (
    STEPS,
    at_step,
    checkpoints,
    config_in,
    ended,
    ranks_of,
    same_end,
    start,
    step_of,
    until,
)
from tests.helpers.terminal import Terminal

pytestmark = pytest.mark.ranks

LONG = 100_000
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "offload": (1, {"offload": {"site": "host", "weights": "streamed", "prefetch": 0}}),
    "two ranks": (2, {}),
    "zero 2": (2, {"zero": {"stage": 2}}),
    "zero 3": (2, {"zero": {"stage": 3}}),
}
MOMENTS = 20
TREE = ("TERM launcher", "KILL launcher", "KILL its child", "USR1 launcher", "KILL a rank", "STOP a rank")


@pytest.fixture(scope="module")
def whole(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The config of a run that nobody disturbed, by variant."""
    made: dict[str, Path] = {}

    def of(variant: str) -> Path:
        if variant not in made:
            num_ranks, strategies = VARIANTS[variant]
            made[variant] = config_in(tmp_path_factory.mktemp("whole"), strategies, save_steps=5)
            server.run(num_ranks, made[variant]).check()
        return made[variant]

    return of


def send_to(job: Job, to: str, number: signal.Signals) -> None:
    ranks = ranks_of(job)
    for pid in ranks if to == "all" else [ranks[-1 if to == "last" else 0]]:
        os.kill(pid, number)


@pytest.mark.parametrize("moment", range(MOMENTS))
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_signal_at_any_moment(
    variant: str, number: signal.Signals, moment: int, whole: Any, server: Server, tmp_path: Path
) -> None:
    """From the first moment to the last; to one rank or all. What was asked to stop and could, has saved."""
    num_ranks, strategies = VARIANTS[variant]
    draw = random.Random(f"{variant} {number} {moment}")
    expected = whole(variant)
    config = config_in(tmp_path, strategies, save_steps=5)
    job = start(server, num_ranks, config)
    until(lambda: len(ranks_of(job)) == num_ranks, job, "started")
    if moment < MOMENTS // 4:
        time.sleep(draw.random() * 2.0)  # preparing, or anywhere
    else:
        at_step(job, config, draw.randrange(1, STEPS - 5))
    if job.poll() is None:
        send_to(job, draw.choice(["first", "last", "all"]) if num_ranks > 1 else "first", number)
    result = job.wait(60.0)
    # While Python imports, Ctrl-C ends it as it ends any program.
    early = {-signal.SIGINT} if not (tmp_path / "run").exists() else set()
    allowed = {signal.SIGINT: {0, 130, 15} | early, signal.SIGKILL: {0, -9, 15}}.get(number, {0, 10, -number, 15})
    assert result.code in allowed, result.text
    if "is saved, the run ends" in result.err:
        said = int(result.err.split(": step ")[1].split()[0])
        assert max(checkpoints(config)) == said
    server.run(num_ranks, config).check()
    same_end(config, expected)


@pytest.mark.parametrize("what", TREE)
@pytest.mark.parametrize("name", ["deepspeed", "torchrun"])
def test_nothing_outlives_a_launcher(name: str, what: str, tmp_path: Path) -> None:
    """All processes of the job are gone in bounded time; where the ranks could save, the newest step is saved."""
    config = config_in(tmp_path, max_steps=LONG, ddp_timeout=10)
    job = started([*launcher(name, 2), TRAIN, "--config", str(config)], tmp_path)
    at_step(job, config, 3)
    above = psutil.Process(job.pid)
    child = next((each for each in above.children() if name == "deepspeed"), above)
    ranks = [each for each in child.children() if TRAIN in " ".join(each.cmdline())]
    assert len(ranks) == 2
    number, to = {
        "TERM launcher": (signal.SIGTERM, above),
        "KILL launcher": (signal.SIGKILL, above),
        "KILL its child": (signal.SIGKILL, child),
        "USR1 launcher": (signal.SIGUSR1, above),
        "KILL a rank": (signal.SIGKILL, ranks[1]),
        "STOP a rank": (signal.SIGSTOP, ranks[1]),
    }[what]
    processes = [above, *above.children(recursive=True)]  # torchrun's ranks have sessions of their own
    os.kill(to.pid, number)
    deadline_s = time.monotonic() + 90.0
    while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes):
        assert time.monotonic() < deadline_s, job.text
        job.poll()
        time.sleep(0.1)
    if "a rank" not in what:
        assert checkpoints(config) == [step_of(tmp_path / "run")]


@pytest.mark.parametrize("name", ["python", "deepspeed", "torchrun", "accelerate"])
def test_ctrl_c_in_a_terminal(name: str, tmp_path: Path) -> None:
    """Under each launcher, which gets it as well as its ranks and their loading processes: the step is saved."""
    config = config_in(tmp_path, max_steps=LONG, dataloader_num_workers=1)
    command = [*launcher(name, 1 if name in ("python", "accelerate") else 2), TRAIN, "--config", str(config)]
    terminal = Terminal(40, 200)
    shell = subprocess.Popen(  # which stays, as a person's does: a terminal whose shell ends sends SIGHUP to all
        ["setsid", "--ctty", "sh", "-c", f"trap : INT; {shlex.join(command)}; echo prompt; read line"],
        stdin=terminal.end, stdout=terminal.end, stderr=terminal.end, cwd=REPO,
        env=environment(OMP_NUM_THREADS="1"),
    )  # fmt: skip
    deadline_s = time.monotonic() + 240.0
    try:
        while step_of(tmp_path / "run") < 3:
            terminal.read(0.1)
            assert time.monotonic() < deadline_s, terminal.shown()
        processes = psutil.Process(shell.pid).children(recursive=True)
        terminal.type("\x03")
        while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes):
            terminal.read(0.1)
            assert time.monotonic() < deadline_s, terminal.shown()
        terminal.read(0.5)
        (step,) = checkpoints(config)
        assert ended(config) == (130, step) and step >= 3, terminal.shown()
        assert any(f"step {step} is saved, the run ends" in line for line in terminal.shown())
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


@pytest.mark.parametrize("name", ["deepspeed", "torchrun"])
def test_a_first_rank_that_is_killed_while_it_exports(name: str, tmp_path: Path) -> None:
    """The launcher ends with a failure, and what the run says is why."""
    config, flag = config_in(tmp_path, max_steps=4), tmp_path / "held"
    command = [*launcher(name, 2), "tests/e2e/held_export.py", "--config", str(config)]
    job = started(command, tmp_path, HELD=str(flag))
    until(lambda: flag.exists() and flag.read_text(), job, "in the export")
    os.kill(int(flag.read_text()), signal.SIGKILL)
    assert job.wait(60.0).code != 0
    assert ended(config) == (15, 4) and not (tmp_path / "run" / "export").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="a small /dev/shm is mounted for the run alone")
def test_shared_memory_that_is_full(tmp_path: Path) -> None:
    """With one process, which no other one watches."""
    config = config_in(tmp_path, max_steps=LONG, dataloader_num_workers=2)
    small = f"mount -t tmpfs -o size=64k tmpfs /dev/shm && exec {shlex.join([PYTHON, TRAIN, '--config', str(config)])}"
    result = started(["unshare", "-m", "sh", "-c", small], tmp_path).wait(120.0).check(14).quiet()
    assert "which has 64.0 KiB; if it is full the run ends: make /dev/shm larger" in result.out
    assert "training.dataloader_num_workers: /dev/shm, through which batches come, is full (" in result.err
    assert result.err.count("\n") == 1 and ended(config) == (14, 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loading_process_that_is_stopped(rank: int, server: Server, tmp_path: Path) -> None:
    """It ends the run as a stopped rank does, and does not outlive it. One that has loaded its last batch ends none."""
    config = config_in(tmp_path, max_steps=LONG, ddp_timeout=5, dataloader_num_workers=1)
    many = write_text_data(tmp_path / "many.jsonl", num_rows=20_000)
    job = start(server, 1 + rank, config, f"data.path={many}")
    at_step(job, config, 3)
    (loader,) = psutil.Process(ranks_of(job)[rank]).children()
    os.kill(loader.pid, signal.SIGSTOP)
    assert job.wait(60.0).code == 13  # and nothing is left of it
    assert ended(config)[0] == 13


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("variant", ["two ranks", "zero 2", "zero 3"])
def test_a_rank_that_is_stopped_or_dead(
    variant: str, rank: int, number: signal.Signals, server: Server, tmp_path: Path
) -> None:
    """The other one ends within the timeout and what reporting takes."""
    config = config_in(tmp_path, VARIANTS[variant][1], max_steps=LONG, ddp_timeout=5)
    job = start(server, 2, config)
    at_step(job, config, 50)
    pids = ranks_of(job)
    os.kill(pids[rank], number)
    until(lambda: not psutil.pid_exists(pids[1 - rank]), job, "over", timeout_s=25.0)
    if number is signal.SIGSTOP:
        os.kill(pids[rank], signal.SIGKILL)
    assert job.wait().code == (13 if number is signal.SIGSTOP else -9)
