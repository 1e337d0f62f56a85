"""Every contender of every theme of the bench runs: once, on the smallest model, and can train on afterwards.

All of one number of ranks run in the same processes, one after the other: to import what they need takes longer. The
command itself, with a fresh process, runs one of them.
"""

import importlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from deepstow.benchmarks.harness import work
from deepstow.benchmarks.harness.work import Contender
from deepstow.launch import bench
from deepstow.strategies.engine.memory import accelerator
from deepstow.trainer.distributed.deepspeed_ops import cache_folder
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.machine import profiles
from deepstow.trainer.machine.probe import probe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ranks,
    pytest.mark.skipif(
        accelerator.kind() is not None, reason="drivers do not survive a fork; run launch/bench.py itself"
    ),
]
WORK = work.work("tiny", steps=1)


def eagerly(contender: Contender) -> Contender:
    """What inductor would generate takes a minute."""
    backend = {"compiled": "aot_eager"} if "compiled" in contender.options else {}
    return replace(contender, options={**contender.options, **backend})


BUDGET = "1500KiB"  # everything travels: 1468 KiB is the least
CASES = [
    *((1, "offload", each) for each in work.contenders([], [BUDGET])),
    *((1, "recompute", each) for each in work.RECOMPUTE),
    *((1, "linear", each) for each in work.LINEAR),
    *((1, "compute", eagerly(each)) for each in work.COMPUTE if each.label != "fsdp2"),
    *((2, "offload", each) for each in work.OFFLOAD_OVER_RANKS),
]
# Compiled for real a contender takes a minute. One goes through the partitioner, which is what looks at the budget; the
# others show only that the compiled module trains.
BACKENDS = {"compile": "eager", "compile-budget-50": "eager", "compile-budget-20": "aot_eager_decomp_partition"}
UPDATES = {"deepspeed-zero2", "deepspeed-zero3"}  # cannot forget gradients
# Round otherwise: DeepSpeed's kernel, the decompositions of a compiler, and BLAS libraries over other routes.
ROUNDS = {
    *UPDATES,
    "compile-budget-20",
    "plain-compiled",
    "plain-varlen",
    "ours-resident-compiled",
    "ours-streamed-compiled",
    "ours-streamed-varlen",
    "ours-flip",
    "ours-adaptive",
}
Results = Mapping[str, Mapping[str, Any]]


def measured(contender: Contender, todo: work.Work = WORK) -> dict[str, Any]:
    """As the child does it, and two steps more before the contender is closed. Gradients that should be forgotten would
    change the first update, of another batch than theirs, and so the second loss."""
    from deepstow.benchmarks.harness import child
    from deepstow.benchmarks.harness.contenders import Unavailable

    compiles = torch.compile
    if contender.label in BACKENDS:
        torch.compile = partial(compiles, backend=BACKENDS[contender.label])
    if contender.label.startswith("deepspeed"):
        stand_in_for_cpu_adam()
    module, name = contender.maker.split(":")
    maker = getattr(importlib.import_module(f"deepstow.benchmarks.harness.{module}"), name)
    after, close = dict[str, Any](), maker.close

    def train_on_and_close(trained: Any) -> None:
        batches = child.tokens(todo, trained.device)[::-1]
        after.update(child.timed(replace(todo, warmup=0, steps=2), trained, batches, trained.device))
        close(trained)

    maker.close = train_on_and_close
    try:
        return {**child.run(todo, contender), "after": after["losses"]}
    except Unavailable as error:
        return {"failed": child.reason(error)}
    finally:
        maker.close, torch.compile = close, compiles


def measured_in_turn(ranks: Ranks, cases: Sequence[tuple[str, Contender]]) -> Results:
    """One after the other, in the same processes."""
    one = replace(WORK, ranks=ranks.world_size)
    two = replace(one, accumulation=2)  # where copies of weights pay
    todo = {"linear": two, "compute": replace(one, documents=3)}
    return {f"{theme} {each.label}": measured(each, todo.get(theme, one)) for theme, each in cases}


def stand_in_for_cpu_adam() -> None:
    """Compiling DeepSpeed's kernel takes minutes; torch computes the same where nobody has built it with this torch."""
    from deepstow.launch.doctor import CPU_ADAM, Status, cache_folder, op_row

    if op_row(CPU_ADAM, cache_folder() / CPU_ADAM.name, Path(torch.__file__).parent).status is Status.OK:
        return
    from deepspeed.ops.op_builder import CPUAdamBuilder

    def update(number: int, step: int, lr: float, beta1: float, beta2: float, *rest: Any) -> None:
        eps, decay, _, weight, grad, *moments = rest
        count = torch.tensor(float(step - 1))
        settings: dict[str, Any] = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": decay}
        torch.optim._functional.adamw(  # type: ignore[attr-defined]
            [weight], [grad], [moments[0]], [moments[1]], [], [count], amsgrad=False, maximize=False, **settings
        )

    nothing = mock.Mock()
    kernel = SimpleNamespace(create_adam=nothing, destroy_adam=nothing, adam_update=update)
    CPUAdamBuilder.load = lambda self, *rest, **more: kernel


# --- tests -----------------------------------------------------------------------------------------------------------


@cache
def runs(num_ranks: int) -> Results:
    """What all contenders answer, by theme and label."""
    todo = [case for ranks, *case in CASES if ranks == num_ranks]
    found: Results = run_world(num_ranks, measured_in_turn, todo, deepspeed=num_ranks > 1)  # a single one opens its own
    return found


@pytest.mark.parametrize(("num_ranks", "theme", "contender"), CASES, ids=lambda one: getattr(one, "label", one))
def test_a_contender(num_ranks: int, theme: str, contender: Contender) -> None:
    """It trained like plain torch, was measured, and went on as if nothing had been measured."""
    run, plain = (runs(num_ranks)[f"{theme} {label}"] for label in (contender.label, work.PLAIN))
    if contender.label == "torchao":  # moves to CUDA and XPU only
        assert run["failed"] == "not installed" or "only supports CUDA" in run["failed"]
        return
    if contender.label.startswith("superoffload"):
        assert run["failed"] == "needs a CUDA GPU"
        return
    if contender.label in ("ours-disk", "zero-infinity"):
        assert run["failed"] == "needs --disk"
        return
    if contender.label in ("plain-flash", "plain-liger", "ours-streamed-liger"):
        assert run["failed"] == "needs a GPU"
        return
    assert "failed" not in run, run["failed"]
    assert run["compiled_later"] == 0, "after the second step"
    tolerance = 1e-4 if contender.label in ROUNDS else 0.0
    assert run["losses"] == pytest.approx(plain["losses"], rel=tolerance, abs=0)
    assert run["tokens_per_s"] > 0 and run["backward_peak_bytes"] > 0
    if contender.maker.endswith(":Ours"):
        assert run["device_peak_bytes"] == run["planned_device_bytes"] + run["saved_bytes"] > run["saved_bytes"] > 0
    if contender.label in UPDATES:
        assert all(math.isfinite(loss) for loss in run["after"]) and run["after"][-1] < run["losses"][0]
    else:
        assert run["after"] == pytest.approx(plain["after"], rel=tolerance, abs=0)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One contender in a fresh process, measured; with rates, of which only the origin matters here."""
    found = profiles.profile("h100-pcie5").rates
    assert found is not None
    stored = profiles.StoredRates(replace(found, origin="measured"), key=profiles.key_of(probe()))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(cache_folder()))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    profiles.save(profiles.stored_at(), stored)
    out = tmp_path / "records"
    words = f"offload --model tiny --steps 3 --rounds 1 --accumulation 2 --subjects ours-streamed --out {out}"
    assert bench.main(words.split()) == 0
    (folder,) = out.iterdir()
    told = json.loads((folder / "record.json").read_text())
    assert told["versions"]["torch"] and told["hardware"]["usable_cores"]
    (only,) = told["runs"]
    assert only["label"] == "ours-streamed"
    assert len(only["step_s"]) == 3 and len(only["losses"]) == 5
    assert only["losses"][4] < only["losses"][0], "the tokens repeat, so it learns"
    assert only["tokens_per_s"] == pytest.approx(3 * 128 / only["measured_s"])
    assert sum(only["step_s"]) == pytest.approx(only["measured_s"], rel=0.1, abs=0.01)
    assert only["host_peak_bytes"] > only["host_before_bytes"] > 1 << 20
