"""Every file of a real checkpoint flipped, cut, deleted or exchanged: the run goes back to the older one, or refuses.

Each damage is looked at, as a run does before it reads data; after one of them the run is trained on.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deepstow.launch.train import main
from deepstow.launch.verify import main as verify
from deepstow.strategies.state.sealed import MANIFEST
from deepstow.trainer.config.load import load
from deepstow.trainer.config.yaml_file import shown
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.run.checkpoints import checkpoint, finished, resuming

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
MODEL = {"model_type": "llama", "num_hidden_layers": 2, "max_position_embeddings": 64, **TINY}
OFFLOAD = {"offload": {"site": "host", "weights": "streamed"}}
SAVE, STEPS = 2, 4


def train(folder: Path, strategies: dict[str, Any], *overrides: str) -> int:
    """Train in ``folder``/run with a config in ``folder``; the exit code."""
    config = {
        "model": {"config": MODEL, "tokenizer": {"train": "bpe", "vocab_size": 300}},
        "data": {"path": "pydoc", "limit": 40, "max_length": 32, "packing": True},
        "training": {
            "output_dir": str(folder / "run"), "max_steps": STEPS, "save_steps": SAVE, "logging_steps": 1,
            "per_device_train_batch_size": 2, "learning_rate": 1e-3, "report_to": ["none"],
        },
        "strategies": strategies,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "c.yaml").write_text(json.dumps(config, indent=1))
    return main(["--config", str(folder / "c.yaml"), *overrides])


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "run/export/model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    assert train(folder, OFFLOAD) == 0
    return folder


def damages(newest: Path, older: Path) -> Iterator[tuple[str, str]]:
    """Do to each file in turn what a disk or a person does; yields what was done and the file, and undoes it."""
    for path in sorted(path for path in newest.rglob("*") if path.is_file()):
        name, content = path.relative_to(newest).as_posix(), path.read_bytes()
        other = older / name
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 16
        forms = {"flipped": bytes(flipped), "cut": content[: len(content) // 2], "emptied": b"", "deleted": None}
        if other.is_file() and other.read_bytes() != content:
            forms["exchanged"] = other.read_bytes()
        for what, changed in forms.items():
            path.unlink() if changed is None else path.write_bytes(changed)
            yield what, name
            path.write_bytes(content)


def test_every_file_and_every_damage(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest, older = trained / f"run/checkpoint-{STEPS}", trained / f"run/checkpoint-{SAVE}"
    config, named = (load(trained / "c.yaml", [f"training.resume_from_checkpoint={it}"]) for it in ("auto", newest))
    seen = set()
    for what, name in damages(newest, older):
        said: list[str] = []
        monkeypatch.setattr(resuming, "write_line", said.append)
        found = resuming.decide(config, Ranks())
        assert found is not None and found.path == older, (what, name)
        assert said[0].startswith(f"{newest}: damaged: ") and len(said) == 1, (what, name)
        assert name in said[0] or name == MANIFEST
        if what == "flipped":
            with pytest.raises(ConfigError) as caught:
                resuming.decide(named, Ranks())
            assert len(caught.value.lines) == 1 and caught.value.lines[0].endswith(f"the newest good one is {older}")
        seen.add((what, name))
    assert {"model.safetensors", "trainer_state.json", MANIFEST} <= {name for _, name in seen}
    assert {what for what, _ in seen} == {"flipped", "cut", "emptied", "deleted", "exchanged"} and len(seen) > 40
    found = resuming.decide(config, Ranks())
    assert found is not None and found.path == newest, "the fixture is whole again"


def test_the_resumed_run_has_the_bits_of_the_whole_one(trained: Path, tmp_path: Path) -> None:
    """The newest is damaged, the last one in between is another history's: back to the older, and to the same end."""
    shutil.copytree(trained / "run", tmp_path / "run")
    os.truncate(tmp_path / f"run/checkpoint-{STEPS}/model.safetensors", 1000)
    (tmp_path / "run/export/model.safetensors").unlink()
    assert train(tmp_path, OFFLOAD, "training.resume_from_checkpoint=auto") == 0
    assert weights(tmp_path) == weights(trained)
    assert verify(["--checkpoint", str(tmp_path / f"run/checkpoint-{STEPS}")]) == 0
    assert verify(["--checkpoint", str(tmp_path / f"run/earlier-1/checkpoint-{STEPS}")]) == 1


def test_verify_says_one_line_for_each_file(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / f"checkpoint-{SAVE}"
    shutil.copytree(trained / f"run/checkpoint-{SAVE}", folder)
    assert verify(["--checkpoint", str(folder)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{folder}: good: step {SAVE}, ") and line.endswith("its values are finite")
    (folder / "payload.pt").touch()
    (folder / "config.json").unlink()
    (folder / "trainer_state.json").write_text("{")
    assert verify(["--checkpoint", str(folder)]) == 1
    found = [line.removeprefix(f"{folder}: damaged: ") for line in capsys.readouterr().out.splitlines()]
    assert found[:2] == ["payload.pt: not in the manifest", "config.json: missing"]
    assert found[2].startswith("trainer_state.json: 1 bytes, ") and len(found) == 3
    assert verify(["--checkpoint", str(tmp_path / "nowhere")]) == 1
    assert capsys.readouterr().out == f"{tmp_path}/nowhere: there is no such folder\n"


def test_other_contents_are_refused_before_anything_is_tokenised(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same path with other rows in it. The config alone shows nothing of that."""
    rows = [json.dumps({"text": f"row {number} of a file that is trained on"}) for number in range(40)]
    (tmp_path / "d.jsonl").write_text("\n".join(rows))
    here = [f"data.path={tmp_path}/d.jsonl", f"training.output_dir={tmp_path}/run"]
    assert train(tmp_path, {}, *here) == 0
    (tmp_path / "d.jsonl").write_text("\n".join(rows[:-1]))
    capsys.readouterr()
    monkeypatch.setattr("deepstow.trainer.data.formats.Encoder.encode", lambda self, rows: pytest.fail("tokenised"))
    more = f"training.max_steps={STEPS + 2}"  # otherwise nothing is left to do
    assert train(tmp_path, {}, *here, "training.resume_from_checkpoint=auto", more) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"command line: data.path = {shown((), str(tmp_path / 'd.jsonl'))}: the rows made of it are not those that "
        f"{tmp_path}/run/checkpoint-{STEPS} was trained on; bring those back, or allow it with "
        f"training.allow_change: [data]"
    )


def test_the_best_one_is_kept_by_its_name_and_compared_before_it_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The "best" loss is the greatest one here, so it is the first; Hugging Face has seen it in the draft only."""
    best = ["eval_strategy=steps", f"eval_steps={SAVE}", "load_best_model_at_end=true", "metric_for_best_model=loss"]
    best += ["greater_is_better=true", "save_total_limit=1", "learning_rate=0.05"]
    overrides = ["data.eval_fraction=0.1", *(f"training.{each}" for each in best)]
    assert train(tmp_path, {}, *overrides) == 0
    said = f"the weights of step {SAVE}, of the best evaluation"
    assert said in capsys.readouterr().out and said in (tmp_path / "run/export/README.md").read_text()
    first, last = (tmp_path / f"run/checkpoint-{step}" for step in (SAVE, STEPS))
    for folder in (first, last):
        state = json.loads((folder / "trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == str(first)
        assert verify(["--checkpoint", str(folder)]) == 0
    made_of = finished.said_by(tmp_path / "run/export")
    assert (made_of[finished.BEST], made_of[finished.OF]) == (checkpoint.digest(first), checkpoint.digest(last))
    exported, saved = (load_file(folder / "model.safetensors") for folder in (tmp_path / "run/export", first))
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
    assert sorted(path.name for path in (tmp_path / "run").glob("*point*")) == [first.name, last.name]
    os.truncate(first / "model.safetensors", 100)
    capsys.readouterr()
    assert train(tmp_path, {}, *overrides, "training.resume_from_checkpoint=auto", "training.max_steps=6") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "damaged" in line]
    assert line.startswith(
        f"command line: training.load_best_model_at_end = true: {first} cannot be loaded: damaged: model.safetens"
    )
