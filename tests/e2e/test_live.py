"""``training.live`` in real runs on a pseudo terminal: what a person sees while one trains, and when it is over."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.commands import Server, write_config
from tests.e2e.interrupted import ranks_of
from tests.helpers.terminal import Terminal

pytestmark = pytest.mark.ranks

ENDS = {
    "at its end": "next:       deepstow chat ",
    "Ctrl-C": "is saved, the run ends; training.resume_from_checkpoint=auto goes on from there",
    "an error of another rank": "RuntimeError: on purpose",
}


def kept(logits: Any, labels: Any) -> Any:
    return logits.argmax(-1)


def of_rank_0(prediction: Any) -> dict[str, float]:
    """A metric of the run below, once its screen has been seen."""
    if os.environ["RANK"] == "1" and Path(os.environ["SEEN"]).exists():
        raise RuntimeError("on purpose")
    return {}


@pytest.mark.parametrize("how", [pytest.param("at its end", marks=pytest.mark.slow), *list(ENDS)[1:]])
def test_lines_above_a_screen_that_is_gone_when_the_run_is(how: str, server: Server, tmp_path: Path) -> None:
    """The error is the last thing that is seen, also of a rank that does not know of the screen."""
    ranks, steps = 2 if how.startswith("an error") else 1, 500 if how == "at its end" else 5000
    training = {"live": True, "max_steps": steps}
    if ranks == 2:
        functions = {"compute_metrics": "of_rank_0", "preprocess_logits_for_metrics": "kept"}
        training |= {key: f"tests.e2e.test_live:{name}" for key, name in functions.items()}
        training |= {"eval_strategy": "steps", "eval_steps": 20}
    config = write_config(tmp_path, training=training, data={"eval_fraction": 0.2})
    terminal = Terminal(40, 110)
    device, flag = os.ttyname(terminal.end), tmp_path / "seen"
    job = server.start(ranks, ["--config", str(config)], tmp_path, terminal=device, SEEN=str(flag))
    rule, seen = "─" * 110, False
    while job.poll() is None:
        terminal.read(0.2)
        if rule in terminal.screen and terminal.screen[-1].endswith("at its peak") and not seen:
            seen = True
            flag.touch()
            at = terminal.screen.index(rule)
            assert terminal.screen[at + 1].startswith(f"{tmp_path}/run  step ") and terminal.region == (0, at - 1)
            # The loss begins high; a mark may be the mean of some steps.
            assert terminal.screen[at + 2][:14] in {f"  loss       {mark}" for mark in "▅▆▇█"}
            if how == "Ctrl-C":
                os.kill(ranks_of(job)[0], signal.SIGINT)
    terminal.read(0.1)
    lines = terminal.shown()
    assert seen and terminal.region == (0, 39)
    assert {"at its end": 0, "Ctrl-C": 130}.get(how, 1) == job.poll()
    assert [line for line in lines if line.startswith("  loss  ") or line == rule or "at its peak" in line] == []
    numbers = [int(line.split("/")[0].removeprefix("step ")) for line in lines if line.startswith("step ")]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 2
    assert ENDS[how] in lines[-1] or (ranks == 2 and any(line == ENDS[how] for line in lines[-12:])), lines[-12:]
