"""Every contender of every theme of the bench runs: once, on the smallest model, and can train on afterwards.

Each runs in a process of its own, as under ``launch/bench.py``, but forked from one that has its imports: that costs a
second instead of ten. The command itself, with fresh processes, runs two of them.
"""

import gc
import importlib
import json
import math
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.harness import processes, work
from benchmarks.harness.work import Contender
from launch import bench
from strategies.engine.memory import accelerator
from trainer.dist.ranks import Ranks
from trainer.dist.spawn import PRELOAD, run_world

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ranks,
    pytest.mark.skipif(
        accelerator.kind() is not None, reason="drivers do not survive a fork; run launch/bench.py itself"
    ),
]
WORK = work.work("tiny", steps=1)
BUDGET = "1500KiB"  # everything travels: 1468 KiB is the least
CASES = [("offload", each) for each in work.contenders([], [BUDGET])] + [("recompute", each) for each in work.RECOMPUTE]
# Compiled for real a contender takes a minute. One goes through the partitioner, which is what looks at the budget; the
# others show only that the compiled module trains.
BACKENDS = {"compile": "eager", "compile-budget-50": "eager", "compile-budget-20": "aot_eager_decomp_partition"}
UPDATES = {"deepspeed-zero2", "deepspeed-zero3"}  # cannot forget gradients
ROUNDS = {*UPDATES, "compile-budget-20"}  # round otherwise: DeepSpeed's kernel and the decompositions of a compiler
LOADED = [
    "deepspeed.runtime.engine", "deepspeed.runtime.zero.stage3", "deepspeed.runtime.zero.muon.muon_optimizer",
    "launch.bench", "strategies.report.full_report", "strategies.engine.forward.routed_linear",
    "torch._dynamo.backends.debugging", "torch._dynamo.convert_frame",
    "torch._inductor.compile_fx", "torch.distributed.fsdp", "torch.utils.flop_counter",
    "benchmarks.harness.child", "benchmarks.harness.linear", "benchmarks.harness.peers", "benchmarks.harness.recompute",
    "trainer.run.plan_check", "trainer.planning.plan_for", "transformers.models.llama.modeling_llama",
]  # fmt: skip

Results = Mapping[str, Mapping[str, Any]]


# --- in other processes ----------------------------------------------------------------------------------------------


def lead(jobs: Sequence[tuple[str, Callable[[], Any]]], folder: Path) -> None:
    """In a process without kernels or groups: import what the jobs need, then each in a fork, in turn."""
    from trainer.dist.ranks import settle_environment

    for number in (1, 2):
        os.dup2(os.open(folder / "log", os.O_CREAT | os.O_APPEND | os.O_WRONLY), number)
    settle_environment(Ranks(), 1)
    for name in LOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is shared is not copied by a collection
    for label, job in jobs:
        pid = os.fork()
        if pid == 0:
            fork(job, folder / label)
        os.waitpid(pid, 0)


def fork(job: Callable[[], Any], out: Path) -> None:
    torch.set_num_threads(1)
    try:
        out.write_text(json.dumps(job()))
    except BaseException:
        out.write_text(json.dumps({"failed": traceback.format_exc()}))
    sys.stdout.flush()
    os._exit(0)


def measured(contender: Contender, todo: work.Work = WORK) -> dict[str, Any]:
    """As the child does it, and two steps more before the contender is closed. Gradients that should be forgotten would
    change the first update, of another batch than theirs, and so the second loss."""
    from benchmarks.harness import child
    from benchmarks.harness.contenders import Unavailable

    if contender.label in BACKENDS:
        torch.compile = partial(torch.compile, backend=BACKENDS[contender.label])
    if contender.label.startswith("deepspeed"):
        stand_in_for_cpu_adam()
    module, name = contender.maker.split(":")
    maker = getattr(importlib.import_module(f"benchmarks.harness.{module}"), name)
    after, close = dict[str, Any](), maker.close

    def train_on_and_close(trained: Any) -> None:
        batches = child.tokens(todo, trained.device)[::-1]
        after.update(child.timed(replace(todo, warmup=0, steps=2), trained, batches, trained.device))
        close(trained)

    maker.close = train_on_and_close
    try:
        return {**child.run(todo, contender.maker, contender.options), "after": after["losses"]}
    except Unavailable as error:
        return {"failed": child.reason(error)}
    finally:
        maker.close = close


def measured_over_ranks(ranks: Ranks, contenders: Sequence[Contender]) -> Results:
    """One after the other, in the same processes."""
    todo = replace(WORK, ranks=ranks.world_size)
    return {contender.label: measured(contender, todo) for contender in contenders}


def stand_in_for_cpu_adam() -> None:
    """Compiling DeepSpeed's kernel takes minutes; torch computes the same where nobody has built it with this torch."""
    from launch.doctor import CPU_ADAM, Status, cache_folder, op_row

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


def linear_bench(folder: Path) -> Any:
    """The theme ``linear`` with one small layer and the smallest model."""
    from benchmarks.harness import linear

    hardware = {"name": "cpu", "device_kind": "cpu", "usable_cores": 2}
    around = {"hardware": hardware, "versions": {"torch": "0"}}
    words = "linear --models small --tokens 4 --dtypes fp32 --accumulation 2 --seconds 1 --steps 1 --step-model tiny"
    with (
        mock.patch.dict(linear.MODELS, {"small": ((8, 6),)}),
        mock.patch.object(processes, "surroundings", lambda: around),
    ):
        assert bench.main([*words.split(), "--out", str(folder)]) == 0
    (made,) = folder.glob("*_linear_*")
    return json.loads((made / "record.json").read_text())


def results(jobs: Sequence[tuple[str, Callable[[], Any]]], folder: Path) -> Results:
    """What the jobs answer, by label."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=lead, args=(jobs, folder))
    process.start()
    process.join(300)
    assert process.exitcode == 0, (folder / "log").read_text()[-4000:]
    return {label: json.loads((folder / label).read_text()) for label, _ in jobs if (folder / label).exists()}


# --- tests -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All that runs in one process: to import what it needs takes as long as many contenders."""
    jobs = [(f"{theme} {each.label}", partial(measured, each)) for theme, each in CASES]
    folder = tmp_path_factory.mktemp("bench")
    return results([*jobs, ("linear", partial(linear_bench, folder))], folder)


def check(contender: Contender, runs: Results) -> None:
    """``contender`` trained like plain torch, was measured, and went on as if nothing had been measured."""
    assert contender.label in runs, "it ended without a result"
    run, plain = runs[contender.label], runs[work.PLAIN]
    if contender.label == "torchao":  # moves to CUDA and XPU only
        assert run["failed"] == "not installed" or "only supports CUDA" in run["failed"]
        return
    if contender.label == "superoffload":
        assert run["failed"] == "needs a CUDA GPU"
        return
    assert "failed" not in run, run["failed"]
    tolerance = 1e-4 if contender.label in ROUNDS else 0.0
    assert run["losses"] == pytest.approx(plain["losses"], rel=tolerance, abs=0)
    assert run["tokens_per_s"] > 0 and run["backward_peak_bytes"] > 0
    if contender.maker.endswith(":Ours"):
        assert run["device_peak_bytes"] == run["planned_device_bytes"] + run["saved_bytes"] > run["saved_bytes"] > 0
    if contender.label in UPDATES:
        assert all(math.isfinite(loss) for loss in run["after"]) and run["after"][-1] < run["losses"][0]
    else:
        assert run["after"] == pytest.approx(plain["after"], rel=tolerance, abs=0)


@pytest.mark.parametrize(("theme", "contender"), CASES, ids=lambda one: getattr(one, "label", one))
def test_one_rank(theme: str, contender: Contender, everything: Results) -> None:
    prefix = f"{theme} "
    check(contender, {label.removeprefix(prefix): run for label, run in everything.items() if label.startswith(prefix)})


@pytest.fixture(scope="module")
def over_ranks() -> Results:
    found: Results = run_world(2, measured_over_ranks, work.OFFLOAD_OVER_RANKS)
    return found


@pytest.mark.parametrize("contender", work.OFFLOAD_OVER_RANKS, ids=lambda contender: contender.label)
def test_offload_over_ranks(contender: Contender, over_ranks: Results) -> None:
    check(contender, over_ranks)


def test_the_command(tmp_path: Path) -> None:
    """Two contenders in fresh processes, measured."""
    words = (
        f"offload --model tiny --steps 3 --rounds 1 --accumulation 2 --subjects plain,ours-streamed --out {tmp_path}"
    )
    assert bench.main(words.split()) == 0
    (folder,) = tmp_path.iterdir()
    told = json.loads((folder / "record.json").read_text())
    assert told["versions"]["torch"] and told["hardware"]["usable_cores"]
    only, ours = told["runs"]
    assert ours["label"] == "ours-streamed" and ours["losses"] == only["losses"]
    assert len(only["step_s"]) == 3 and len(only["losses"]) == 5
    assert only["losses"][4] < only["losses"][0], "the tokens repeat, so it learns"
    assert only["tokens_per_s"] == pytest.approx(3 * 128 / only["measured_s"])
    assert sum(only["step_s"]) == pytest.approx(only["measured_s"], rel=0.1, abs=0.01)
    assert only["host_peak_bytes"] > only["host_before_bytes"] > 1 << 20


def test_linear(everything: Results) -> None:
    record = everything["linear"]
    assert "failed" not in record, record["failed"]
    assert [case["shape"]["inputs"] for case in record["cases"]] == [8]
    assert {mode: len(seconds) for mode, seconds in record["steps"][0]["seconds"].items()} == {
        "plain": 1, "native": 1, "minimal": 1, "adaptive": 1,
    }  # fmt: skip
