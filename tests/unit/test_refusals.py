"""What the planner refuses is one line with file and line of the key, as every error of a config, and exit code 2."""

from collections.abc import Callable
from pathlib import Path

import pytest

from deepstow.launch import plan as plan_command
from deepstow.strategies.core.plan import Plan
from deepstow.trainer.config.load import load
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.stopping import Stop
from deepstow.trainer.errors import ConfigError, TooLargeError
from deepstow.trainer.machine.probe import probe
from deepstow.trainer.planning import fit
from deepstow.trainer.planning.from_config import check_options, plans_of
from deepstow.trainer.run.session import in_group
from tests.e2e.commands import write_jsonl
from tests.helpers.tiny import LLAMA, run_config

CONFIG = """\
extends: base.yaml
data: {{path: {data}, max_length: 16}}
training:
  output_dir: {folder}/run
  use_cpu: true
{training}
strategies:
{strategies}
"""
BASE = """\
model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
    num_key_value_heads: 2, max_position_embeddings: 64}
  tokenizer: {train: bpe, vocab_size: 300}
training:
  max_grad_norm: 1.0
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def written(strategies: str, training: str = "", base: str = "") -> Path:
        data = write_jsonl(tmp_path / "text.jsonl", [{"text": f"row {i} of some words"} for i in range(40)])
        path = tmp_path / "x.yaml"
        path.write_text(CONFIG.format(data=data, folder=tmp_path, strategies=strategies, training=training))
        (tmp_path / "base.yaml").write_text(BASE + base)
        return path

    return written


@pytest.fixture(autouse=True)
def fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the table that follows a refusal for memory, each of which is a plan."""
    plain = fit._plain
    monkeypatch.setattr(fit, "_saving", list)
    monkeypatch.setattr(fit, "_plain", lambda config: plain(config)[:1])


def planned(path: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """The line that ``launch/plan.py`` ends with, and exit code 2; after one about memory comes the table."""
    assert plan_command.main(["--config", str(path), *overrides]) == 2
    line, *more = capsys.readouterr().err.splitlines()
    assert (more == []) is ("memory = " not in line)
    assert not more or ["row", "fits", "training"] in [each.split()[:3] for each in more]
    return line


def trained(path: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """The line that ``launch/train.py`` prints on its way out with exit code 2."""
    assert in_group(load(path, overrides), Ranks(), Stop()) == 2
    lines = capsys.readouterr().err.splitlines()
    table = next((index for index, line in enumerate(lines) if line.startswith("does it fit? ")), len(lines) + 1)
    return lines[table - 2]


def test_the_line_of_the_key(write: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """In this file, in its base, or on the command line."""
    path = write("  offload:\n    site: host\n    gpu_memory: 100KiB")
    said = 'strategies.offload.gpu_memory = "100KiB": '
    for command in (planned, trained):
        line = command(path, capsys)
        assert line.startswith(f"{path}:10: {said}"), line
        assert "are needed" in line and "write " in line
    path = write("  offload:\n    site: host", base="strategies: {offload: {gpu_memory: 100KiB}}\n")
    assert planned(path, capsys).startswith(f"{path.with_name('base.yaml')}:7: {said}")
    given = planned(path, capsys, "strategies.offload.gpu_memory=100KiB")
    assert given.startswith(f"command line: {said}")


def test_more_than_the_card_has(write: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """No plan before the refusal. Without an accelerator the budget may be larger than the memory."""
    path = write("  offload: {gpu_memory: 100GiB}")
    expected = (
        'strategies.offload.gpu_memory = "100GiB": more than tensors can have of the device, 22.6 GiB; write auto'
    )
    assert plan_command.main(["--config", str(path), "--profile", "rtx4090-pcie4"]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.splitlines()[0]) == ("", f"{path}:8: {expected}")
    assert plan_command.main(["--config", str(path)]) == 0


def test_a_key_that_is_not_written_names_its_section(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write("  offload: {gpu_memory: 1e-9}")
    line = planned(path, capsys, "strategies.offload.prefetch=1", "strategies.offload.site=host")
    assert line.startswith(f"{path}:8: strategies.offload.gpu_memory = 1e-09: ")
    path = write("  recompute: {policy: full}\n  offload:\n    site: host")
    line = planned(path, capsys, "strategies.offload.host_memory=1KiB", "strategies.recompute.every=1")
    assert line.startswith('command line: strategies.offload.host_memory = "1KiB": ')
    config = load(path, ["strategies.recompute.every=1"])
    assert config.located("strategies.recompute.policy", "x") == f"{path}:8: x"
    assert config.located("strategies.offload.gpu_memory", "x") == f"{path}:9: x"
    assert config.located("training.fp16", "x") == f"{path}:3: x"
    assert config.located("nowhere", "x") == f"{path}: x"
    assert config.model_copy().located("training.fp16", "x") == f"{path}:3: x"
    assert type(config).model_validate(dict(config)).located("training.fp16", "x") == "x"  # built in Python


def test_a_key_of_another_section(write: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = write("  offload: {}", training="  fp16: true")
    assert plan_command.main(["--config", str(path), "--profile", "rtx4090-pcie4"]) == 0
    assert "fp16" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"training\.fp16 = true: Accelerate trains in fp32 on the CPU then"):
        check_options(load(path), 1)
    for option, words in (
        ("update_in_backward: true", "update_in_backward = true: the norm is known only after backward"),
        ("update_in_backward: speculative", 'update_in_backward = "speculative": was removed: it gained nothing'),
        (
            "frozen_weights: fp8, disk: /var/tmp, disk_memory: 1GiB",
            'frozen_weights = "fp8": rest in the host\'s memory, not on a disk',
        ),
    ):
        path = write(f"  offload: {{{option}}}")
        assert planned(path, capsys).startswith(f"{path}:8: strategies.offload.{words}")


def test_what_the_file_says(write: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """A strategy is shown as it was written, and nothing is advised about what another one decides."""
    twice = "  gradient_accumulation_steps: 2"
    path = write("  pipeline: {stages: 2}\n  zero: {stage: 2}", twice)
    assert f"{path}:9: strategies.zero.stage = 2: cannot" in planned(path, capsys, "--world-size", "4")
    path = write("  zero: {stage: 2}\n  offload: {gpu_memory: 1e-9, site: host}", twice)
    line = planned(path, capsys, "--world-size", "2")
    assert line.endswith("or leave strategies.offload.site at auto")
    assert "offload.weights" not in line and "offload.gradients" not in line


def test_the_folder_of_the_run(write: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = write("  {}")
    (path.parent / "run").write_text("a file")
    line = trained(path, capsys)
    assert line.startswith(f'{path}:4: training.output_dir = "') and "is a file" in line


def test_a_budget_that_is_named_is_enough_for_all_stages(tmp_path: Path) -> None:
    """The first stage needs less than the last one here, and is planned first."""

    def plans(budget: int) -> list[Plan]:
        strategies = {"pipeline": {"stages": 2, "blocks": [1, 3]}, "offload": {"gpu_memory": budget}}
        config = run_config(
            {**LLAMA, "num_hidden_layers": 4}, output_dir=tmp_path, strategies=strategies, gradient_accumulation_steps=4
        )
        return plans_of(config, Ranks(world_size=2, local_world_size=2), probe())

    with pytest.raises(TooLargeError) as small:
        plans(10_000)
    assert len(plans(small.value.needed)) == 2
    with pytest.raises(TooLargeError):
        plans(small.value.needed - 64)
