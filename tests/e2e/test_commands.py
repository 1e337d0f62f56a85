"""The commands beside training: plan, verify, and what any command says about itself."""

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

from deepstow.launch import bench, cli, plan, verify
from deepstow.trainer.errors import ExitCode
from tests.e2e.commands import REPO, TRAIN, Server, write_config
from tests.e2e.test_errors import without_torch
from tests.helpers.releases import needs_stage_3

LARGE = str(REPO / "configs" / "llama-70b.yaml")


def explained(name: str, text: str) -> None:
    """Whether the help of a command has two examples that it can parse, its exit codes, and where the docs are."""
    assert text.startswith(f"usage: deepstow {name}") and "\npages: deepstow docs" in text
    assert re.search(r"^exit codes: 0 finished, 1 failed, 2 ", text, re.MULTILINE)
    examples = re.findall(rf"^  deepstow {name}(.*)$", text, re.MULTILINE)
    assert len(examples) == 2
    command = importlib.import_module(f"deepstow.launch.{name}")
    for example in examples:
        if name != "doctor":  # its options are parsed where they are used
            command.parse(shlex.split(example))


def test_help_and_schema_need_no_torch(tmp_path: Path) -> None:
    for name in ("init", "train", "plan", "verify", "doctor", "chat", "docs"):
        found = without_torch(tmp_path, f"launch/{name}.py", "--help").check()
        assert found.err == ""
        explained(name, found.out)
    explained("bench", bench.parser().format_help())
    schema = json.loads(without_torch(tmp_path, TRAIN, "--schema").check().out)
    assert set(schema["properties"]) >= {"model", "data", "training", "strategies"}


def test_the_command_deepstow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(cli.MEANINGS) == set(ExitCode)
    for given, code in ((["--help"], 0), (["--version"], 0), (["trian"], 2)):
        with pytest.raises(SystemExit, match=str(code)):
            cli.main(given)
    found = capsys.readouterr()
    assert all(f"\n    {name} " in found.out for name in cli.COMMANDS) and "\ndeepstow 0." in found.out
    assert found.err.count("\n") == 1 and found.err.endswith("did you mean 'train'?\n")
    config = str(write_config(tmp_path))
    assert cli.main(["plan", "--config", config, "--profile", "h100-pcie"]) == 2
    assert "did you mean 'h100-pcie5'?" in capsys.readouterr().err


@pytest.mark.slow
def test_plan_of_a_70_b_model(server: Server, tmp_path: Path) -> None:
    """On any laptop: no weights, no GPU, two gigabytes."""
    written = tmp_path / "plan.json"
    arguments = ["--config", LARGE, "--world-size", "64", "--profile", "h100-sxm-pcie5", "--json", str(written)]
    arguments += ["--full", "--explain", "model.layers.3", "--deepspeed"]
    found = server.start(1, arguments, tmp_path, script="launch/plan.py").wait().check().quiet()
    assert found.err == ""
    assert 100 < found.peak_mib < 2000
    assert found.lines("plan: 70,553.7 M parameters")
    (blocks,) = found.lines("model.layers.0..79 x80")
    assert "1/64" in blocks and "stage 3" in blocks
    assert json.loads(written.read_text())["deepspeed"]["zero_optimization.stage"] == 3
    assert found.lines("model.layers.3: ") and found.lines("backward: ")
    engine = json.loads(found.out[found.out.index("\n{") : found.out.rindex("}") + 1])
    assert engine["zero_optimization"]["stage"] == 3 and engine["bf16"] == {"enabled": True}


def test_plan_refuses_what_it_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(write_config(tmp_path))

    def refused(*arguments: str) -> str:
        assert plan.main(["--config", config, *arguments]) == 2
        return capsys.readouterr().err

    said = refused("--explain", "model.layers.7", "--json", str(tmp_path / "x"))
    assert said.startswith("--explain model.layers.7: no such unit; the units are embedding, ")
    for option, path, why in (
        ("--json", "/proc/no/plan.json", "No such file or directory"),
        ("--plot", "/proc", "Is a directory"),
    ):
        assert plan.main(["--config", config, option, path]) == 2
        found = capsys.readouterr()
        assert (found.out, found.err) == ("", f"{option} {path}: {why}\n"), "before the plan is made"


def test_attention_is_settled_before_the_plan(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the run, and by its plan."""
    config = write_config(tmp_path, model={"attn_implementation": "auto"}, data={"packing": True})
    line = "model.attn_implementation = auto: sdpa_varlen, which needs no mask for every pair of tokens"
    found = server.start(1, ["--config", str(config)], tmp_path).wait().check()
    assert found.out.startswith(line) and found.out.count("attn_implementation") == 1
    assert "attn_implementation: sdpa_varlen" in (tmp_path / "run" / "config.yaml").read_text()
    assert plan.main(["--config", str(config)]) == 0
    assert capsys.readouterr().err.startswith(line)


@needs_stage_3
@pytest.mark.slow
@pytest.mark.ranks
def test_verify(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = str(write_config(tmp_path, strategies={"zero": {"stage": 3}}))
    assert verify.main(["--config", config, "--steps", "2", "training.max_grad_norm=0"]) == 0
    found = capfd.readouterr()
    assert found.out.splitlines()[-1] == "bitwise equal" and found.err == ""
