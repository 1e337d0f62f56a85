"""A power cut at any system call of a real run, with any part of what was not synced lost: it ends with the same bits.

The calls are those that the run really made (``tests/helpers/disk.py``). A look at every state of the disk, as a start
of the run looks, finds a good checkpoint, at most one interval older than the newest that was begun, with the
bytes that the run wrote. From some states the run is really started, and ends with the bits of the recorded one.
Part of ``make faults``, not of ``make test`` (minutes).
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from deepstow.trainer.config.load import load
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.run.checkpoints.checkpoint import WRITING, to_resume
from tests.e2e.commands import REPO, TRAIN, Server, digest, environment
from tests.e2e.interrupted import config_in
from tests.helpers.disk import Data, Loss, Name, Names, Recorded, Rename, Sync, put, record

SAVE, STEPS = 3, 9
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "offload": {"offload": {"site": "host", "weights": "streamed", "prefetch": 0}},
    "stage 2": {"zero": {"stage": 2}},
}
LOSSES = [
    Loss(Data.KEPT, Names.KEPT), Loss(Data.LOST, Names.KEPT), Loss(Data.ZEROS, Names.KEPT), Loss(Data.KEPT, Names.LOST),
    Loss(Data.LOST, Names.LOST), Loss(Data.LOST, Names.FIRST), Loss(Data.SOME, Names.SOME, 1),
    Loss(Data.SOME, Names.SOME, 2),
]  # fmt: skip
STARTED = 60  # states of each variant from which the run is started


class Run:
    """A run that was recorded. ``committed`` and ``begun``: at each cut, the newest step of such a save."""

    def __init__(self, folder: Path, strategies: dict[str, Any]) -> None:
        self.config = config_in(folder, strategies, max_steps=STEPS, save_steps=SAVE, save_total_limit=2)
        self.folder = folder / "run"
        self.folder.mkdir()
        command = [sys.executable, TRAIN, "--config", str(self.config)]
        self.recorded = record(
            command, self.folder, folder / "calls", REPO, environment(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
        )
        self.end = digest(self.folder / "export")
        self.committed, self.begun, self.written = self._history(self.recorded)

    def _history(self, recorded: Recorded) -> tuple[list[int], list[int], dict[int, dict[str, bytes]]]:
        committed, begun, renamed = [0], [0], 0
        written: dict[int, dict[str, bytes]] = {}
        for cut, call in enumerate(recorded.calls, 1):
            committed.append(committed[-1])
            begun.append(begun[-1])
            match call:
                case Name(_, name, int()) if name.startswith("checkpoint-"):
                    begun[-1] = int(name.removeprefix("checkpoint-"))
                case Rename(_, _, 0, name, _) if name.startswith("checkpoint-"):
                    renamed = int(name.removeprefix("checkpoint-"))
                    state = recorded.after(cut, LOSSES[0])
                    written[renamed] = {
                        path.partition("/")[2]: content
                        for path, content in state.items()
                        if path.startswith(f"{name}/") and content is not None
                    }
                case Sync(0):
                    committed[-1] = renamed
        return committed, begun, written


@pytest.fixture(scope="module", params=VARIANTS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("crash"), VARIANTS[request.param])


def test_the_recorded_calls_make_the_folder(run: Run) -> None:
    """Otherwise something was not followed."""
    found = {
        path.relative_to(run.folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in run.folder.rglob("*")
    }
    assert run.recorded.after(len(run.recorded.calls), LOSSES[0]) == found
    assert sorted(run.written) == list(range(SAVE, STEPS + 1, SAVE))
    assert run.committed[-1] == run.begun[-1] == STEPS


def test_every_state_has_a_good_checkpoint(run: Run) -> None:
    config, num, seen = load(run.config), 0, set[int]()
    for cut in run.recorded.cuts():
        for loss in LOSSES:
            state = run.recorded.after(cut, loss)
            key = hash(frozenset(state.items()))
            if key in seen:
                continue
            seen.add(key)
            num += 1
            put(run.folder, state)
            try:
                found, _ = to_resume(config)
            except ConfigError as error:
                pytest.fail(f"call {cut}, {loss}: {error}")
            step = found.step if found else 0
            assert step >= run.committed[cut], (cut, loss)
            assert step >= run.begun[cut] - SAVE, (cut, loss)
            if found is not None:
                bytes_of = {
                    path.relative_to(found.path).as_posix(): path.read_bytes()
                    for path in found.path.rglob("*")
                    if path.is_file()
                }
                assert bytes_of == run.written[step], (cut, loss)
    print(f"{num} states of {len(run.recorded.calls)} calls")
    assert num > 400


def test_a_start_from_a_state_ends_with_the_same_bits(server: Server, run: Run) -> None:
    draw = random.Random(0)
    first = next(cut for cut in run.recorded.cuts() if run.begun[cut])
    codes = []
    for _ in range(STARTED):
        cut, loss = draw.randrange(first, len(run.recorded.calls)), draw.choice(LOSSES)
        put(run.folder, run.recorded.after(cut, loss))
        result = server.run(1, run.config)
        assert result.code == 0, (cut, loss, result.text)
        assert digest(run.folder / "export") == run.end, (cut, loss)
        steps = [json.loads(line).get("step") for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        assert steps == sorted(steps), (cut, loss)
        assert not (run.folder / WRITING).exists()
        codes.append(result.code)
    assert len(codes) == STARTED
