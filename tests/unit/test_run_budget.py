"""What a run takes: operations with active parameters, days, cost, energy; and what is refused, in one line."""

import json
from pathlib import Path

import pytest
import yaml

from deepstow.launch import cost, plan, search
from deepstow.strategies.report import run_budget
from deepstow.strategies.report.run_budget import Asked
from deepstow.trainer.machine.profiles import profile
from deepstow.trainer.planning import hybrid
from deepstow.trainer.planning.facts import gather
from tests.helpers.tiny import LLAMA, MIXTRAL, run_config

DATA = {"path": "random tokens", "max_length": 64}


def test_active_parameters_are_those_that_a_token_meets() -> None:
    # Embedding and head of 128 x 32; q, o 32 x 32, k, v 32 x 16; three of 32 x 64 of two experts, and a router.
    params = 2 * 4096 + 2 * (3072 + 2 * 3 * 2048 + 128)
    facts = gather(run_config(MIXTRAL, stage=0, data=DATA, bf16=True), 1, 1, profile("h100-sxm-pcie5"))
    # Releases of Transformers compute the angles of positions by a product, or not.
    assert run_budget.active_params(facts) == pytest.approx(params, rel=1e-4) and params < facts.num_params


def test_a_run_by_hand() -> None:
    """1e9 parameters and tokens: 6e18 operations; on 10 ranks at half of 1e15 flop/s 1,200 s, or 3.3 GPU-hours."""
    first, at, _, _, *rows, _ = run_budget.lines(
        Asked(1e9, 30, 600, 0.5), 1e9, 1.0, 1e15, [(10, 1_000_000, 3.6), (20, 2_000_000, 3.6)]
    )
    assert first == "a run of 1B tokens: 6e+18 FLOPs (6 x 1B active parameters x tokens), 2e+18 recomputed"
    assert at == "at 50% MFU: 0.0139 days on 10 ranks, GPU-hours 3, cost 100, kWh 2"
    # A thousand steps of 3.6 s are an hour, of ten ranks; a sixth of the peak.
    assert rows[0].split() == ["10", "1,000,000", "3.6", "0.0417", "300", "6", "17%"]
    assert rows[1].split() == ["20", "2,000,000", "3.6", "0.0208", "300", "6", "17%"]


def write(folder: Path, **strategies: object) -> list[str]:
    path = folder / "mine.yaml"
    training = {"output_dir": str(folder / "run"), "bf16": True, "per_device_train_batch_size": 2}
    tree = {"model": {"config": LLAMA, "tokenizer": "none"}, "data": DATA, "training": training}
    path.write_text(yaml.safe_dump(tree | {"strategies": strategies}))
    return ["--config", str(path)]


def rows_of(said: str) -> list[list[str]]:
    return [line.split() for line in said.split("a run of ")[1].splitlines()[4:-1]]


@pytest.mark.slow
def test_a_plan_and_a_search_say_what_a_run_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hybrid, "MICRO_BATCHES", (1,))
    machine = ["--profile", "h100-sxm-pcie5"]
    asked = [*machine, "--tokens", "15M", "--price-per-gpu-hour", "2.5"]
    alone = write(tmp_path, offload={"site": "host"})
    assert plan.main([*alone, *machine]) == 0
    simulated = float(capsys.readouterr().out.split("\ntime per step ")[1].split()[0])
    assert cost.main([*alone, *asked]) == 0
    ((ranks, _, seconds, *_), *_) = rows_of(capsys.readouterr().out)
    assert ranks == "1" and float(seconds) == pytest.approx(simulated, rel=1e-2)

    assert cost.main([*write(tmp_path, zero={"stage": 3}), *asked, "--ranks", "16"]) == 0
    own = rows_of(capsys.readouterr().out)
    assert [row[0] for row in own] == ["16", "32", "64", "128"]
    assert [float(row[2]) for row in own] == sorted(float(row[2]) for row in own), "a ring has more hops"

    found = tmp_path / "search.json"
    assert search.main([*write(tmp_path), *machine, "--ranks", "16", "--json", str(found)]) == 0
    said = capsys.readouterr().out
    content = json.loads(found.read_text())
    first, *_ = plans = content["plans"]
    table = said.split("----\n")[1].split("\n\n")[0].splitlines()
    assert [row.split()[12] for row in table] == [plan["rates"] for plan in plans]
    assert [" * " in row for row in table] == [not plan["place_is_settled"] for plan in plans]
    assert {"assumed", "profile"} >= {plan["rates"] for plan in plans} and len(first["seconds_between"]) == 2
    assert cost.main([*write(tmp_path), *asked, "--ranks", "16", *content["write"]]) == 0
    assert float(rows_of(capsys.readouterr().out)[0][2]) == pytest.approx(first["seconds"], rel=1e-3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--tokens", "15X"], "--tokens 15X: must be a number above 0, as in 15B"),
        (["--tokens", "1B", "--mfu", "1.2"], "--mfu 1.2: must be a number above 0 and at most 1"),
        (["--tokens", "1B", "--price-per-gpu-hour", "0"], "--price-per-gpu-hour 0: must be a number above 0, as in"),
        (["--tokens", "1B", "--profile", "cpu"], "neither the rates nor the peak of cpu are known; give --profile"),
        (["--tokens", "0", "--ranks", "8"], "--tokens 0: must be"),
        (["--tokens", "1B", "--world-size", "16", "--profile", "rtx4090-pcie4"], "give --network 200"),
    ],
)
def test_errors_are_one_line(given: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cost.main([*write(tmp_path, zero={"stage": 1}), *given]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1
