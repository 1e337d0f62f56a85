"""``deepstow search``: a tensor rank is counted as a model of its own, and what is printed can be planned."""

import re
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from deepstow.launch import cli, cost
from deepstow.launch import plan as plan_command
from deepstow.launch.search import main, parse
from deepstow.strategies.core.facts import Facts
from deepstow.strategies.core.plan import Plan, Tier
from deepstow.strategies.core.sizes import human
from deepstow.strategies.planner.hybrid import keys
from deepstow.strategies.planner.hybrid.account import Account
from deepstow.strategies.planner.hybrid.degrees import Degrees, Model, Models, Size, Stowed
from deepstow.trainer.config.load import build, load
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.machine.profiles import profile, sized
from deepstow.trainer.planning import hybrid
from deepstow.trainer.planning.facts import gather
from deepstow.trainer.planning.from_config import plan_of, plans_of
from deepstow.trainer.planning.hybrid import Shares
from tests.helpers.tiny import GPT2, LLAMA, MIXTRAL, run_config

WIDE = {**LLAMA, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 4, "num_attention_heads": 16}
WIDE |= {"num_key_value_heads": 2, "vocab_size": 16_000, "max_position_embeddings": 512}
DATA = {"path": "random tokens", "max_length": 512}
RANKS = Ranks(world_size=8, local_world_size=8)
CARD = profile("h100-sxm-pcie5")
SCALARS = 64  # bytes
COUNTED = run_config(WIDE, stage=0, data=DATA, bf16=True, per_device_train_batch_size=2)


@pytest.fixture(autouse=True)
def fewer_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each the model is counted, whole and in stages."""
    monkeypatch.setattr(hybrid, "MICRO_BATCHES", (2,))


@pytest.mark.slow
def test_shares_are_counted_as_if_they_were_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid, "MICRO_BATCHES", (1, 2))
    parts, why = Shares(COUNTED, RANKS, CARD, lambda line: None).by_size(16)
    assert [each.split(": ")[1] for each in why] == [
        "must divide model.config.num_key_value_heads, which is 2; write 2"
    ]
    divided = {Size(sequence=degree) for degree in (2, 4, 8)}
    assert set(parts) == {Size(size, tensor) for size in (1, 2) for tensor in (1, 2)} | divided  # of 2 heads
    tree = COUNTED.tree()
    tree["training"]["per_device_train_batch_size"] = 1
    whole = gather(build(tree), 8, 8, CARD)
    assert parts[Size(1)].units == whole.units and parts[Size(1)].run == whole.run
    divided = gather(build(keys.without(COUNTED.tree(), 2)), 8, 8, CARD)
    assert parts[Size(2, 2)].units == divided.units
    assert parts[Size(2, 2)].run.forward_flops == divided.run.forward_flops


PHI = {**MIXTRAL, "model_type": "phimoe"}  # whose experts no strategy divides


@pytest.mark.parametrize(("model", "why"), [(GPT2, "Conv1D"), (MIXTRAL, "experts"), (PHI, "phimoe")])
def test_models_that_tensor_ranks_cannot_share(model: dict[str, object], why: str) -> None:
    config = run_config(model, bf16=True, per_device_train_batch_size=1)
    found, said = Shares(config, RANKS, CARD, lambda line: None).by_size(1)
    assert why in said[0] and all("was not compared" in each for each in said[1:]) and len(said) == 2 + (model is PHI)
    assert {(size.tensor, size.sequence) for size in found} == {(1, 1)}
    assert {size.experts for size in found} == ({1, 2, 4} if model is MIXTRAL else {1})


@cache
def counted_share(size: Size) -> Facts:
    return Shares(COUNTED, RANKS, CARD, lambda line: None)._share(size)


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"data": 8, "zero": 2}, {"weights": "resident"}),
        ({"data": 8, "zero": 3, "offload": Stowed.WEIGHTS, "micro_batches": 4}, {"weights": "streamed"}),
        ({"stages": 2, "data": 4, "zero": 1, "micro_batches": 4}, {}),
        ({"tensor": 2, "data": 4, "zero": 1}, {"weights": "resident"}),
    ],
)
def test_with_offload_the_account_is_near_the_plan(options: dict[str, Any], given: dict[str, str]) -> None:
    degrees = Degrees(**{"recompute": "full", "micro_batch": 2, "offload": Stowed.STATE} | options)
    staged = degrees.stages > 1
    in_stages = Shares(COUNTED, RANKS, CARD, lambda line: None).in_stages([Size(2)]) if staged else None
    counted = counted_share(degrees.size)
    found = Account(Models({degrees.size: counted}, in_stages)).of(degrees)
    tree = keys.written(degrees, COUNTED.tree())
    tree["strategies"]["offload"] = {"site": "host", "accumulation": "micro_batches", **given}
    plans = plans_of(build(tree), RANKS, CARD)
    assert found.device == pytest.approx(max(plan.peak(Tier.DEVICE) for plan in plans), rel=0.15)
    if not staged:
        own, runtime = counted.machine.runtime_host_bytes, plans[0].facts.machine.runtime_host_bytes
        assert found.host - own == pytest.approx(plans[0].peak(Tier.HOST) - runtime, rel=0.05)


def test_a_head_of_uneven_parts_is_not_offered_beside_offload() -> None:
    """As the plan of such a config refuses it (test_tensor.py)."""
    config = run_config({**WIDE, "vocab_size": 16_001, "tie_word_embeddings": False}, data=DATA, bf16=True)
    run = Shares(config, RANKS, CARD, lambda line: None).whole.run
    stowed = Degrees(tensor=2, data=4, zero=1, offload=Stowed.STATE)
    said = [str(keys.refused(run, {})(each)) for each in (stowed, replace(stowed, offload=Stowed.NOTHING))]
    assert ["words of the head" in each for each in said] == [True, False]


def write(folder: Path, **training: object) -> Path:
    path = folder / "mine.yaml"
    usual = {"bf16": True, "gradient_checkpointing": True, "per_device_train_batch_size": 2}
    training = {"output_dir": str(folder / "run"), **usual, **training}
    tree = {"model": {"config": dict(WIDE), "tokenizer": "none"}, "data": DATA, "training": training}
    path.write_text(yaml.safe_dump(tree | {"strategies": {"zero": {"stage": 1}}}))
    return path


def first_as_written(path: Path, said: str, ranks: Ranks = RANKS) -> Plan:
    """The plan of the config with what is to be set for the first row."""
    changes = [line.strip() for line in said.split("for the first row:\n")[1].splitlines()]
    return plan_of(load(path, changes), ranks, sized(CARD, None, None))


def test_lossy_exchanges_between_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path)
    given = ["--config", str(path), "--world-size", "4", "--profile", "h100-sxm-pcie5", "--lossy"]
    assert main(given) == 2 and "--lossy: all 4 ranks are on one machine" in capsys.readouterr().err
    assert main([*given, "--ranks-per-machine", "1", "--network", "1"]) == 0
    said = capsys.readouterr().out
    first = said.split("----\n")[1].splitlines()[0]
    assert first.startswith("1 x 1 x 4, powersgd, lossy ")
    assert "topk, density 0.01, from step 11 on, lossy: each rank sends" in said
    assert "at a density of 0.25 with 4 ranks, or with 100 ranks at this one" in said
    assert (
        len(re.findall(r"lossy: each rank sends .*; a step [\d.]+ s, [\d.]+ times as fast as the fastest", said)) == 4
    )
    plan = first_as_written(path, said, Ranks(world_size=4, local_world_size=1))
    assert human(plan.peak(Tier.DEVICE)) in first


def test_a_budget_of_the_config_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--config", str(write(tmp_path)), "--world-size", "4", "--profile", "h100-sxm-pcie5"]
    most = []
    for changes in ([], ["strategies.offload.gpu_memory=2GiB"]):
        assert main([*given, *changes]) == 0
        rows = capsys.readouterr().out.split("----\n")[1].split("\n\n")[0].splitlines()
        found = [re.search(r"([\d.]+) ([MG]iB) +[\d.]+ GiB", row) for row in rows if " x " in row]
        most.append(max(float(each[1]) * (1024 if each[2] == "GiB" else 1) for each in found if each))
    assert most[1] <= 2048 < most[0]


@pytest.mark.parametrize(
    ("policy", "micro_batches", "shape"),
    [
        ("none", 4, {"data": 2}),
        ("selective", 8, {"data": 2}),
        ("full", 4, {"data": 2}),
        ("none", 4, {"tensor": 2}),
        ("full", 4, {"tensor": 2, "data": 4, "zero": 1}),
    ],
)
def test_the_account_of_a_stage_is_its_plan(policy: str, micro_batches: int, shape: dict[str, int]) -> None:
    """But for scalars, which the account leaves out."""
    config = run_config({**WIDE, "tie_word_embeddings": True}, data=DATA, bf16=True, per_device_train_batch_size=2)
    degrees = Degrees(stages=4, recompute=policy, micro_batch=2, micro_batches=micro_batches, **shape)
    in_stages = Shares(config, RANKS, CARD, lambda line: None).in_stages([degrees.size])
    account, model = Account(Models({}, in_stages)), Model(in_stages[degrees.size])
    cuts = model.parts(4)
    tree = keys.written(degrees, config.tree())
    plans = plans_of(build(tree), replace(RANKS, world_size=degrees.ranks), CARD)
    for stage, (part, plan) in enumerate(zip(cuts, plans, strict=True)):
        found = account.of_stage(degrees, stage, part)
        assert -SCALARS <= found.device - plan.peak(Tier.DEVICE) <= SCALARS, (stage, policy)
        assert found.host == plan.peak(Tier.HOST)


MIXTURE = {**WIDE, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
MIXTURE |= {"intermediate_size": 2048, "num_hidden_layers": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (WIDE, {"sequence": 4, "data": 2, "zero": 0}),
        (WIDE, {"sequence": 2, "data": 4, "zero": 1, "recompute": "selective", "micro_batches": 3}),
        (WIDE, {"sequence": 8, "zero": 3, "recompute": "full"}),
        (MIXTURE, {"experts": 2, "data": 8, "zero": 1}),
        (MIXTURE, {"experts": 8, "data": 8, "zero": 2, "recompute": "full", "micro_batches": 2, "micro_batch": 2}),
    ],
)
def test_the_account_of_a_part_of_rows_or_experts_is_its_plan(model: dict[str, Any], options: dict[str, Any]) -> None:
    config = run_config(model, data={**DATA, "max_length": 1000}, bf16=True)
    degrees = Degrees(**options)
    found = Account(Shares(config, RANKS, CARD, lambda line: None).of(degrees)).of(degrees)
    plan = plan_of(build(keys.written(degrees, config.tree())), RANKS, CARD)
    assert (found.device, found.host) == (plan.peak(Tier.DEVICE), plan.peak(Tier.HOST))


@pytest.mark.parametrize(
    ("model", "tokens", "memory", "degree"),
    [({**WIDE, "num_hidden_layers": 2}, 131_072, "6GiB", "sequence"), (MIXTURE, 512, "1100MiB", "experts")],
)
def test_what_fits_in_no_other_way(
    model: dict[str, Any],
    tokens: int,
    memory: str,
    degree: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that one rank cannot hold, and experts: all that fits divides them, and fits as planned."""
    monkeypatch.setattr(hybrid, "MICRO_BATCHES", (1,))
    path = write(tmp_path, per_device_train_batch_size=1)
    tree = yaml.safe_load(path.read_text())
    tree["model"]["config"], tree["data"] = dict(model), {**DATA, "max_length": tokens}
    path.write_text(yaml.safe_dump(tree))
    given = ["--world-size", "8", "--profile", "h100-sxm-pcie5", "--gpu-memory", memory, "--host-memory", "9GiB"]
    assert main(["--config", str(path), *given]) == 0
    said = capsys.readouterr().out
    rows = said.split("----\n")[1].split("\n\n")[0].splitlines()
    assert rows and all(f", {degree} " in row for row in rows)
    assert human(first_as_written(path, said).peak(Tier.DEVICE)) in rows[0]


def test_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--config", str(write(tmp_path)), "--world-size", "2", "--profile", "h100-sxm-pcie5"]
    assert main([*given, "--gpu-memory", "1MiB", "--host-memory", "8GiB"]) == 2
    first, *nearest = capsys.readouterr().err.split("before\n")[1].splitlines()
    assert first.startswith("deepstow search: nothing fits on 2 ranks of NVIDIA H100 80GB HBM3 with 1.0 MiB; nearest:")
    assert 1 <= len(nearest) <= 3 and all("lacks" in line and "device memory per rank" in line for line in nearest)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--world-size", "16", "--profile", "rtx4090-pcie4"], "--network 200"),
        (["--world-size", "9", "--profile", "a100-80g-sxm"], "9 ranks do not fill machines of 8"),
        (["--world-size", "8", "--profile", "cpu"], "how fast cpu is"),
    ],
)
def test_what_is_not_known_is_asked_for(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(write(tmp_path)), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    [
        (parse, "", "--config FILE is required"),
        (parse, "--config x --network -1", "'-1' must be a number more than 0"),
        (parse, "--config x --world-size 1000001", "--ranks 1000001: must be from 1 to 1000000"),
        (parse, "--config x --ranks 8 --ranks-per-machine 0", "must be from 1 to the number of ranks, 8"),
        (parse, "--config x --ranks 8 --ranks-per-machine 9", "must be from 1 to the number of ranks, 8"),
        (parse, "--config x --plot x", "unrecognized arguments: --plot"),
        (plan_command.parse, "--config x --network 100", "unrecognized arguments: --network"),
        (plan_command.parse, "--config x --profle a", "unrecognized arguments: --profle; did you mean '--profile'?"),
        (cost.parse, "--config x", "the following arguments are required: --tokens"),
        (plan_command.parse, "--config x --lossy", "unrecognized arguments: --lossy"),
    ],
)
def test_flags_that_do_not_go_together(
    command: Any, arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command(arguments.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("deepstow ") and said in line


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("plan --search --config my.yaml --ranks 8", "search --config my.yaml --ranks 8"),
        ("plan --fit --config 'my config.yaml'", "fit --config 'my config.yaml'"),
        ("plan --config my.yaml --tokens=15B --mfu 0.3", "cost --config my.yaml --tokens=15B --mfu 0.3"),
        ("search --price-per-gpu-hour 2 --tokens 1T", "cost --price-per-gpu-hour 2 --tokens 1T"),
    ],
)
def test_the_old_spelling_names_the_command(old: str, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(shlex.split(old)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f" is a command of its own: deepstow {new}")
