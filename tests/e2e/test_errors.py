"""What is wrong is said once, in a line, by one rank; the code says of which kind it was; nothing stays behind."""

import os
from pathlib import Path

import pytest

from deepstow.launch import plan, train
from tests.e2e.commands import PYTHON, REPO, TRAIN, Result, Server, launcher, run, write_config, write_jsonl

pytestmark = pytest.mark.ranks


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def without_torch(folder: Path, *arguments: str) -> Result:
    """The command where importing torch, or anything else that takes a second, is an error."""
    stubs = folder / "stubs"
    stubs.mkdir(exist_ok=True)
    for name in ("torch", "transformers", "deepspeed", "datasets", "accelerate", "numpy", "peft"):
        (stubs / f"{name}.py").write_text(f"raise AssertionError('{name} is imported')\n")
    return run([PYTHON, *arguments], folder, PYTHONPATH=f"{stubs}{os.pathsep}{REPO}")


def misspelt(config: Path) -> str:
    """Spoil the file; the line that is due."""
    config.write_text(config.read_text().replace("learning_rate", "learning_rte"))
    number = next(i for i, line in enumerate(config.read_text().splitlines(), 1) if "learning_rte" in line)
    return f"{config}:{number}: training.learning_rte = 0.01: unknown key; did you mean 'learning_rate'?"


def test_a_bad_config_is_refused_before_torch_is_imported(config: Path) -> None:
    line = misspelt(config)
    found = without_torch(config.parent, TRAIN, "--config", str(config)).check(2)
    assert found.out == "" and found.err.splitlines() == [line]
    for script in ("launch/plan.py", "launch/verify.py"):
        assert without_torch(config.parent, script, "--config", str(config)).check(2).err.splitlines() == [line]


def test_a_bad_config_is_told_once_per_job(server: Server, config: Path) -> None:
    line = misspelt(config)
    assert server.run(2, config).check(2).quiet().text.splitlines() == [line]


@pytest.mark.slow
def test_torchs_launcher_shows_it_last(config: Path) -> None:
    """Once, below its own traceback, whatever that is; its exit code is 1."""
    line = misspelt(config)
    command = [*launcher("torchrun", 2), TRAIN, "--config", str(config)]
    said = run(command, config.parent).check(1).text.splitlines()
    assert said.count(line) == 1 and not any(said[said.index(line) + 1 :][1:]), said


def test_a_refusal_for_memory_is_told_once_per_job_with_its_table(server: Server, config: Path) -> None:
    """The first rank plans what would fit, while the others wait for it."""
    lines = server.run(2, config, "strategies={offload: {gpu_memory: 100KiB}}").check(2).text.splitlines()
    assert sum("gpu_memory = " in each for each in lines) == 1
    assert sum(each.startswith("does it fit? ") for each in lines) == 1
    assert any(each.startswith("full fine-tuning fits: ") for each in lines)


def test_the_command_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: str) -> str:
        try:
            code = train.main(arguments)
        except SystemExit as end:  # by argparse
            code = end.code  # type: ignore[assignment]
        assert code == 2
        return capsys.readouterr().err

    near = config.with_name("confg.yaml")
    assert refused("--config", str(near)).splitlines() == [f"{near}: no such file; did you mean '{config}'?"]
    assert "unrecognized arguments: --confgi" in refused("--config", str(config), "--confgi")
    assert "unrecognized arguments: --local_rnk=0" in refused("--local_rnk=0", "--config", str(config))
    assert "--config FILE is required" in refused()
    assert "try --config my.yaml" in refused("my.yaml")
    assert "without dashes, as in training.learning_rate=1e-4" in refused("--config", "my.yaml", "--learning_rate=1")
    assert "training.max_steps = 0: must be a whole number >= 1" in refused(
        "--config", str(config), "training.max_steps=0"
    )
    # Options and overrides in any order, and what launchers put first.
    for rank in ("--local_rank=0", "--local-rank=0"):
        text = refused(rank, "--config", str(config), "data.max_length=1", "--show-sample", "training.seed=-1")
        assert "data.max_length = 1" in text and "training.seed = -1" in text


def test_bad_data_on_two_ranks(server: Server, config: Path) -> None:
    data = config.parent / "text.jsonl"
    lines = data.read_text().splitlines()
    data.write_text("\n".join([*lines[:6], '{"text": "cut off', *lines[6:]]) + "\n")
    found = server.run(2, config).check(3).quiet()
    assert found.err.splitlines() == [f"{data}:7: broken JSON: Unterminated string starting at column 10"]
    assert found.out == ""


def test_a_key_that_only_the_data_shows_to_be_wrong_has_its_line(server: Server, config: Path) -> None:
    line = next(n for n, text in enumerate(config.read_text().splitlines(), 1) if "path:" in text)
    (config.parent / "text.jsonl").unlink()
    found = server.run(1, config).check(3).quiet().err.splitlines()
    assert len(found) == 1 and found[0].startswith(f"{config}:{line}: data.path: ") and "does not exist" in found[0]


def test_options_that_cannot_work_are_all_told_before_data_is_read(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "text.jsonl"
    data.write_text("no JSON\n")
    wrong = {
        "offload": {"reduction": "fast", "update_in_backward": True},
        "recompute": {"policy": "auto", "every": 2},
    }
    config = write_config(tmp_path, data={"path": str(data)}, training={"optim": "adafactor"}, strategies=wrong)
    keys = ("strategies.recompute.every", "training.optim", *(f"strategies.offload.{key}" for key in wrong["offload"]))
    assert plan.main(["--config", str(config)]) == 2
    for said in (capsys.readouterr().err, server.run(1, config).check(2).quiet().err):
        lines = said.splitlines()
        assert all(line.startswith(f"{config}:") for line in lines)
        assert sorted(line.split(": ")[1].split(" = ")[0] for line in lines) == sorted(keys)


def test_bad_data_met_while_training(server: Server, tmp_path: Path) -> None:
    """A stream is read by the first rank, which knows what is wrong; the second only sees its peer go."""
    rows = [{"text": f"row {i} of a stream of rows"} for i in range(20)]
    data = write_jsonl(tmp_path / "stream.jsonl", [*rows[:12], {"text": None}, *rows[12:]])
    config = write_config(
        tmp_path,
        data={"path": str(data), "streaming": True},
        training={"max_steps": 50},
        strategies={"zero": {"stage": 1}},
    )
    found = server.run(2, config).check(3).quiet()
    assert found.err.splitlines() == [f"{data}:13: field 'text' is null; every row needs a string"]
    assert found.lines("step 1/50")


def test_a_state_larger_than_the_machine_is_never_allocated(server: Server, config: Path) -> None:
    large = ["model.config.hidden_size=262144", "model.config.num_hidden_layers=2", "strategies.zero={stage: 2}"]
    earlier = config.parent / "run" / "checkpoint-4"
    earlier.mkdir(parents=True)
    found = server.run(1, config, *large).check(2).quiet()
    assert earlier.is_dir()  # a refused run moves nothing of an earlier one
    assert found.lines("plan: it does not fit: ") and found.lines("device memory ")
    line, *more = found.err.splitlines()
    assert line.startswith("the training state needs ") and line.endswith(" too much")
    assert any(each.startswith("does it fit? llama on cpu: ") for each in more)
    assert 100 < found.peak_mib < 2000  # of which the libraries are 500
    assert not (config.parent / "run" / "plan.json").exists()


def test_a_save_that_cannot_be_made_is_one_line_and_training_goes_on(server: Server, config: Path) -> None:
    """A file stands where a checkpoint is to be: the first rank finds it, all learn it, and the next one is saved."""
    (config.parent / "run").mkdir()
    (config.parent / "run" / "checkpoint-2").write_text("in the way")
    saving = ["training.save_strategy=steps", "training.save_steps=2", "strategies.zero={stage: 1}"]
    found = server.run(2, config, *saving).check(0)  # and nothing of the job is left 10 s later
    place = config.parent / "run" / "checkpoint-2"
    what = f"[Errno 17] not a folder, so it is not replaced: '{place}'"
    said = f"{place} was not saved: {what}; older ones are as they were; the next save tries again"
    assert found.text.splitlines().count(said) == 1 and place.read_text() == "in the way"
    assert (config.parent / "run" / "checkpoint-4" / "manifest.json").is_file()
