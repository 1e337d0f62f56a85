"""What the copy of ``launch/verify.py`` is made to move, and what the command says of it; nothing is trained here."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepstow.launch import verify as command
from deepstow.strategies.core.facts import Facts
from deepstow.strategies.core.layout import Site
from deepstow.strategies.core.registry import find
from deepstow.strategies.planner.memory_rows import UPDATES
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.errors import ExitCode
from deepstow.trainer.machine.probe import probe
from deepstow.trainer.model.shrink import TRAVEL, features, moves, moving
from deepstow.trainer.planning import facts
from deepstow.trainer.planning.from_config import plan_of
from deepstow.trainer.verify import verify
from deepstow.trainer.verify.verify import Check, Difference, Moved, Offloaded, shrink
from tests.helpers.tiny import GPT2, LLAMA, run_config

ON_DEVICE, ON_HOST, STREAMED = (UPDATES[site] for site in (Site.DEVICE, Site.HOST, Site.STREAMED))
WAIT_DEVICE, WAIT_HOST = "gradients wait on the device", "gradients wait on the host"


def offloading(options: Mapping[str, Any], base: Mapping[str, Any] = LLAMA, **training: Any) -> RunConfig:
    layers = "n_layer" if base is GPT2 else "num_hidden_layers"
    return run_config({**base, layers: 4}, strategies={"offload": options}, **training)


def shown(config: RunConfig) -> tuple[Any, list[Any]]:
    """The real plan, and the runs of the copy."""
    real = plan_of(config, Ranks(), probe())
    return real, moving(real, config.strategies, [facts_of(shrink(config, Path("unused"), 2, layers=4))])


def facts_of(config: RunConfig) -> Facts:
    return facts.gather(config, 1, 1, probe())


# --- which options ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"site": "host", "gradients": "device"}, [TRAVEL, ON_HOST, WAIT_DEVICE]),
        ({"site": "streamed", "weights": "streamed", "gradients": "host"}, [TRAVEL, STREAMED, WAIT_HOST]),
        ({"site": "host", "weights": "streamed", "bucket_size": "10GiB"}, [TRAVEL, ON_HOST]),
        ({}, [TRAVEL]),
    ],
    ids=str,
)
def test_what_the_real_plan_moves_the_copy_moves(options: dict[str, Any], expected: list[str]) -> None:
    # The one bucket of the tied model holds everything, so that what is seen of it does not travel.
    real, copies = shown(offloading(options, GPT2 if "bucket_size" in options else LLAMA))
    found = frozenset().union(*(copy.shows for copy in copies))
    assert found >= set(expected)
    assert not moves(real.layout) or found >= features(real.layout)
    assert moves(real.layout) is bool(options)


def test_every_site_of_a_mixed_plan_is_shown() -> None:
    """Where rates are known, a plan may have all three sites, which no budget of the copy brings about here."""
    config = offloading({})
    real = plan_of(config, Ranks(), probe())
    assert real.layout is not None
    sites = (Site.DEVICE, Site.HOST, Site.STREAMED)
    mixed = [replace(bucket, site=sites[i % 3]) for i, bucket in enumerate(real.layout.buckets)]
    plan: Any = SimpleNamespace(
        layout=replace(real.layout, buckets=tuple(mixed)), facts=real.facts, decided_by=real.decided_by
    )
    copies = moving(plan, config.strategies, [facts_of(shrink(config, Path("unused"), 2, layers=4))])
    assert {ON_DEVICE, ON_HOST, STREAMED, TRAVEL} <= frozenset().union(*(copy.shows for copy in copies))
    assert len(copies) <= 3
    named = [copy.options for copy in copies if "site" in copy.options]
    assert [options["site"] for options in named] == ["streamed"]


# --- what is said ----------------------------------------------------------------------------------------------------

SAME: list[Difference] = []
OTHER = [Difference("lm_head.weight", relative=1e-3, num_different=3, num_elements=9)]
ALL = [TRAVEL, ON_HOST, WAIT_HOST, WAIT_DEVICE]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[str]]]:
    """The exit code and the lines of the command where these are the checks."""

    def of(checks: list[Check], options: dict[str, Any], **training: Any) -> tuple[int, list[str]]:
        def given(self: Offloaded) -> Iterator[Check]:
            assert self.copies
            return iter(checks)

        monkeypatch.setattr(Offloaded, "checks", given)
        code = command.report(offloading(options, **training), 1, 2)
        return code, capsys.readouterr().out.splitlines()

    return of


def check(differences: list[Difference], shows: list[str], up: int = 1 << 20, tolerance: float = 0.0) -> Check:
    return Check({"gpu_memory": "2MiB"}, "plain training", Moved(8, 6, shows, up, up // 2), differences, tolerance)


HOST = {"site": "host", "weights": "streamed"}


def test_one_run_that_differs_is_not_equal(said: Any) -> None:
    """In bf16 plain training may differ by more than that; the engine may not differ from itself."""
    checks = [check(SAME, ALL), check(OTHER, ALL), check(OTHER, ALL, tolerance=2e-2)]
    code, lines = said(checks, HOST, bf16=True)
    assert (code, lines[-1]) == (1, "NOT equal: 1.0e-03 of the largest weight, 0e+00 is declared")
    assert lines[-2] == "lm_head.weight: 3 of 9 differ, at most 1.0e-03"
    code, lines = said([checks[0], checks[2]], {}, bf16=True)
    assert lines[0].endswith("all stays on the device, nothing would move; the copy is made to move")
    assert code == 0 and lines[-1].startswith("equal within the declared 2e-02: the engine computes with bf16 weights")


def test_ranks_that_share_the_engine_declare_its_tolerance() -> None:
    """And not that of ZeRO in DeepSpeed's engine. Plain data parallelism of more than two adds in another order."""
    config = offloading({})
    zero = find("zero").model_validate({"stage": 3})
    for clip in (0.0, 1.0):
        training = config.training.model_copy(update={"max_grad_norm": clip})
        shared = config.model_copy(update={"strategies": {**config.strategies, "zero": zero}, "training": training})
        assert command.declared(shared, 2) == (0.0, "")
        assert command.declared(shared, 4)[0] == 1e-3


def test_weights_of_16_bits_are_compared_as_mixed_precision_is(tmp_path: Path) -> None:
    tensor, same = {"tensor": {"degree": 2}}, {"recompute": {"policy": "full"}}
    config = run_config(strategies=tensor, model={"dtype": "bfloat16"})
    assert command.declared(config, 2) == command.declared(run_config(strategies=tensor, bf16=True), 2)
    assert command.declared(config, 2)[0] > command.declared(run_config(strategies=tensor, optim="sgd"), 2)[0]
    assert command.declared(run_config(strategies=same, model={"dtype": "bfloat16"}), 2) == (0.0, "")
    assert shrink(config, tmp_path, 2).training.optim == "sgd"  # since Adam enlarges what is rounded


def test_equality_is_not_claimed_of_what_did_not_happen(said: Any) -> None:
    code, lines = said([check(SAME, ALL), check(SAME, ALL, up=0)], HOST)
    assert code == 1 and lines[-1].startswith("nothing crossed the link in a run in which something should have")
    code, lines = said([check(SAME, [ON_HOST, WAIT_HOST, WAIT_DEVICE])], HOST)
    assert (code, lines[-1]) == (1, f"NOT shown, since it does not occur in the copy: {TRAVEL}")


def test_nothing_can_move(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(verify, "_trained", lambda *_: pytest.fail("there is nothing to train"))
    code = command.report(offloading({"site": "device", "weights": "resident"}), 1, 2)
    (line,) = capsys.readouterr().out.splitlines()
    assert code == ExitCode.FAILED and "equal" not in line
    assert line.startswith("nothing can move in a copy of this model") and "leave its site and weights at auto" in line


def test_strategies_that_are_not_offload_are_not_made_to_move(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(strategies={"recompute": {"policy": "full"}})
    monkeypatch.setattr(verify, "verify", lambda *_: [])
    assert command.report(config, 2, 3) == 0
    assert capsys.readouterr().out.splitlines() == [
        "training a shrunk copy twice, 3 steps on 2 ranks: plain, and with strategies recompute",
        "bitwise equal",
    ]


def test_in_bf16_the_engine_is_compared_with_itself_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its optimizer kept; then one run with plain training and SGD."""
    runs: list[tuple[Any, bool]] = []
    moved = {"num_buckets": 8, "num_left": 6, "shows": ALL, "up_bytes": 1, "down_bytes": 1}

    def train(self: Offloaded, options: Any, *, keep_optimizer: bool) -> dict[str, Any]:
        runs.append((options, keep_optimizer))
        ours = {"state": {"w exp_avg": torch.ones(1)}, "moved": moved} if options is not None else {}
        return {"weights": {"w": torch.ones(1)}, **ours}

    monkeypatch.setattr(Offloaded, "_run", train)
    monkeypatch.setattr(verify, "repeatable", lambda train: train())
    config = offloading(HOST, bf16=True)
    checked = Offloaded(config, plan_of(config, Ranks(), probe()), 1, 2, 2e-2)
    found = [(check.against.partition(",")[0], check.tolerance) for check in checked.checks()]
    num = len(checked.copies)
    assert found == [("the engine with all on the device", 0.0)] * num + [("plain training", 2e-2)]
    assert runs[0] == (verify.RESIDENT, True) and runs[num + 1] == (None, False) and not runs[-1][1]


@pytest.mark.ranks
def test_both_sides_have_the_same_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process beside four ranks, each with the threads of a quarter of the cores; real processes obey."""
    monkeypatch.setattr(verify, "usable_cores", lambda: 12)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    started = []

    def run(num_ranks: int, *_: Any, threads: int) -> dict[str, Any]:
        started.append((num_ranks, threads))
        return {"weights": {}}

    monkeypatch.setattr(verify, "run_world", run)
    assert verify.verify(run_config(strategies={"pipeline": {"stages": 4}}), 4, 1) == []
    assert {ranks for ranks, _ in started} == {1, 4} and {threads for _, threads in started} == {3}
    assert run_world(1, threads_here, threads=3, deepspeed=False) == 3


def threads_here(ranks: Ranks) -> int:
    return torch.get_num_threads()
