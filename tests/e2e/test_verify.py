"""``launch/verify.py`` with offload, on real ranks: the copy moves, and an engine that is broken is found out."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deepstow.launch import verify as command
from deepstow.trainer.config.load import load
from deepstow.trainer.distributed import spawn
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError, ExitCode
from deepstow.trainer.planning import fit
from deepstow.trainer.verify import verify
from deepstow.trainer.verify.verify import Offloaded, shrink, train_or_refuse
from tests.e2e.commands import MODEL, write_config

pytestmark = pytest.mark.ranks


def config_with(folder: Path, offload: Mapping[str, Any], stages: int = 1, **training: Any) -> Path:
    model = {"config": MODEL | {"num_hidden_layers": 4, "vocab_size": 512}, "tokenizer": "none"}
    pipeline = {"pipeline": {"stages": stages, "blocks": [1, 3]}} if stages > 1 else {}
    return write_config(folder, model=model, training=training, strategies={"offload": offload, **pipeline})


def run(config: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], str]:
    code = command.main(["--config", str(config), "--steps", "2", *arguments])
    found = capsys.readouterr()
    return code, found.out.splitlines(), found.err


@pytest.mark.slow
def test_a_copy_that_moves_as_the_real_plan_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 7 MiB some state is on the host; two runs show that and weights that travel."""
    code, lines, err = run(config_with(tmp_path, {"gpu_memory": "7MiB"}), capsys, "--ranks", "2")
    assert (code, err, lines[-1]) == (0, "", "bitwise equal")
    assert "updated by the CPU, updated on the device" in lines[0]
    travels, mixed = lines[2:-1]
    assert "weights of 6 of 8 buckets travelled" in travels and "weights travel" in travels
    assert "weights of 0 of 8 buckets travelled" in mixed and "updated by the CPU, updated on the device" in mixed
    for line in (travels, mixed):
        assert " up and " in line and " 0 B " not in line and line.endswith("against plain training: bitwise equal")


@pytest.mark.slow
def test_a_copy_in_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The copy has more blocks than the run, so that some can leave the device in each stage."""
    config = config_with(tmp_path, {"site": "host", "weights": "streamed"}, 2, gradient_accumulation_steps=2)
    code, lines, err = run(config, capsys, "--ranks", "2")
    assert (code, err, lines[-1]) == (0, "", "bitwise equal")
    assert "weights travel" in lines[2] and lines[2].endswith("against plain training: bitwise equal")


@pytest.mark.slow
def test_in_bf16_the_engine_equals_itself_with_the_optimizer_of_the_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_with(tmp_path, {"site": "host", "weights": "streamed"}, bf16=True)
    code, lines, err = run(config, capsys, "--ranks", "1")
    assert (code, err) == (0, "")
    runs = [line for line in lines if line.startswith("gpu_memory ")]
    assert runs[0].endswith("against the engine with all on the device, adamw_torch_fused: bitwise equal")
    assert "travelled" in runs[-1] and "against plain training, sgd: " in runs[-1]
    assert lines[-1].startswith("equal within the declared 2e-02: ")


def broken(ranks: Ranks, config: Any) -> dict[str, Any]:
    """Whatever goes down the link arrives with one number changed a little."""
    from deepstow.strategies.engine.transfer.transfer import Stream, Transfer

    right = Transfer.copy

    def copy(self: Any, stream: Stream, target: Any, source: Any) -> None:
        right(self, stream, target, source)
        if stream is Stream.DOWN:
            target.view(-1)[:1].mul_(1.01)

    Transfer.copy = copy  # type: ignore[method-assign]
    return train_or_refuse(ranks, config)


def test_a_broken_engine_is_not_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By less than what bf16 may differ from plain training."""
    monkeypatch.setattr(verify, "train_or_refuse", broken)
    first = Offloaded.checks
    monkeypatch.setattr(Offloaded, "checks", lambda self: [next(first(self))])  # enough, and two runs instead of four
    config = config_with(tmp_path, {"site": "host", "weights": "streamed"}, bf16=True)
    code, lines, _ = run(config, capsys, "--ranks", "1")
    assert code == ExitCode.FAILED and lines[-1].startswith("NOT equal: ")
    assert lines[-1].endswith("0e+00 is declared") and "bitwise equal" not in "\n".join(lines)


def test_too_small_a_budget_is_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(spawn, "run_world", lambda *_: pytest.fail("something is trained"))
    monkeypatch.setattr(fit, "_saving", list)  # fewer rows of its table
    config = config_with(tmp_path, {"gpu_memory": "1MiB"})
    code, lines, err = run(config, capsys)
    assert (code, lines) == (ExitCode.CONFIG, [])
    line, empty, *table = err.splitlines()
    assert re.match(rf'{re.escape(str(config))}:\d+: strategies\.offload\.gpu_memory = "1MiB": ', line)
    assert "or more" in line
    assert not empty and table[0].startswith("does it fit? ")


def test_a_refusal_on_the_ranks_is_one_line(tmp_path: Path) -> None:
    config = shrink(load(str(config_with(tmp_path, {"gpu_memory": "6MiB"})), []), tmp_path / "run", 1)
    small = config.strategies["offload"].model_copy(update={"gpu_memory": "100KiB"})
    with pytest.raises(ConfigError, match=r'^strategies\.offload\.gpu_memory = "100KiB": ') as refused:
        verify._trained(2, config.model_copy(update={"strategies": {"offload": small}}), 1)
    assert len(refused.value.lines) == 1 and "Traceback" not in str(refused.value)
