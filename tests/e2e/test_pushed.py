"""``training.push_to_hub`` of the real command, by the hub's real client, to a server on this machine."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepstow.strategies.state.sealed import damage, read
from deepstow.trainer.run.checkpoints import finished
from tests.e2e.commands import Result, Server, digest, write_config
from tests.helpers.hub import LOST, TOKEN, Hub
from tests.helpers.small_runs import make_rows_and_model

pytestmark = [pytest.mark.slow, pytest.mark.ranks]
AGAIN = "training.resume_from_checkpoint=auto"


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    found = Hub()
    yield found
    found.close()


@pytest.fixture(scope="module")
def told(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of ranks that know of the hub: its client reads that when it is imported."""
    folder = tmp_path_factory.mktemp("told")
    found = Server(folder / "ranks", **hub.variables, HF_HOME=str(folder))
    yield found
    found.close()


def pushed(config: Path, told: Server, *overrides: str, **variables: str) -> Result:
    return told.start(1, ["--config", str(config), *overrides], config.parent, **variables).wait().quiet()


def config_in(folder: Path) -> Path:
    training = {"push_to_hub": True, "hub_model_id": "mine", "hub_private_repo": True, "hub_revision": "v1"}
    return write_config(folder, training=training)


def test_refused_before_anything_is_there(hub: Hub, told: Server, tmp_path: Path) -> None:
    config = config_in(tmp_path)
    unknown = pushed(config, told, HF_TOKEN="hf_of-nobody").check(2)
    assert len(unknown.err.splitlines()) == 1 and "training.push_to_hub = true: " in unknown.err
    assert " is invalid." in unknown.err and "log in with `hf auth login`, or set HF_TOKEN" in unknown.err
    assert hub.asked == ["GET /api/whoami-v2"] and not (tmp_path / "run" / "data").exists()
    hub.fails["create"], hub.fails["revision"] = [403], [403]
    forbidden = pushed(config, told).check(2)
    assert (
        'training.hub_model_id = "mine": the hub does not let it be made: ' in forbidden.err and "403" in forbidden.err
    )
    assert not hub.files and not list((tmp_path / "run").glob("checkpoint-*"))


def test_what_arrives_is_the_export(hub: Hub, told: Server, tmp_path: Path) -> None:
    """Though large files are lost once on their way, the commit is not made, and then made while the line is cut."""
    config, export = config_in(tmp_path), tmp_path / "run" / "export"
    hub.fails = {"PUT": [LOST, 503], "commit": [500]}
    failed = pushed(config, told).check(1)
    made = digest(export)
    line = f"{export} is whole, and was not uploaded to me/mine: "
    assert line in failed.err and "500" in failed.err and "start the run again, or: hf upload mine " in failed.err
    assert hub.files == {"me/mine": {"main": {}, "v1": {}}} and hub.private == {"me/mine"}

    sent = hub.asked.count(f"PUT /large/{max(hub.large, key=lambda oid: len(hub.large[oid]))}")
    hub.fails["commit"] = [LOST]
    assert line in pushed(config, told, AGAIN).check(1).err
    found = pushed(config, told, AGAIN).check()
    assert f"uploaded:   {export}, as me/mine\n" in found.out and digest(export) == made
    assert sent == hub.asked.count(f"PUT /large/{max(hub.large, key=lambda oid: len(hub.large[oid]))}")  # not again
    arrived = {path.name: path.read_bytes() for path in export.iterdir()}
    assert hub.files == {"me/mine": {"main": {}, "v1": arrived}}
    assert b"Settings: learning_rate 0.01, " in arrived["README.md"] and "model.safetensors" in arrived


def test_a_run_that_has_gone_back_uploads_its_own_weights(hub: Hub, told: Server, tmp_path: Path) -> None:
    config, run = config_in(tmp_path), tmp_path / "run"
    saving = ["training.save_strategy=steps", "training.save_steps=2", "training.hub_model_id=back"]
    pushed(config, told, *saving).check()
    before = hub.files["me/back"]["v1"]["model.safetensors"]
    back = [f"training.resume_from_checkpoint={run / 'checkpoint-2'}", "training.learning_rate=0.1"]
    found = pushed(config, told, *saving, *back).check()
    assert f"uploaded:   {run / 'export'}, as me/back\n" in found.out
    after = hub.files["me/back"]["v1"]["model.safetensors"]
    assert before != after == (run / "export" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("adapters", [False, True], ids=["of all weights", "adapters"])
def test_what_is_uploaded_says_nothing_of_this_machine(adapters: bool, hub: Hub, told: Server, tmp_path: Path) -> None:
    """No path, no command, no secret; and what arrives is whole by its own manifest, and the base is at home."""
    home = tmp_path / "of-the-user"
    home.mkdir()
    make_rows_and_model(home)
    kept = json.loads((home / "model" / "config.json").read_text())
    (home / "model" / "config.json").write_text(json.dumps({**kept, "made_of": str(home / "corpus")}))
    name, secrets = f"clean-{adapters}", {"WANDB_API_KEY": "of-wandb", "MLFLOW_TRACKING_URI": "http://me:of-flow@x"}
    lora = {"lora": {"r": 4}} if adapters else {}
    config = write_config(
        home,
        model={"config": None, "tokenizer": None, "name_or_path": str(home / "model"), **lora},
        data={"path": str(home / "rows.jsonl"), "max_length": 24},
        training={"push_to_hub": True, "hub_model_id": name, "max_steps": 1},
        strategies={"offload": {"disk": str(home), "disk_memory": "1GiB"}},
    )
    overrides = ["training.run_name=of-nobody-else", "training.seed=8"]
    found = pushed(config, told, *overrides, **secrets).check()
    export, files = home / "run" / "export", hub.files[f"me/{name}"]["main"]
    hidden = [str(tmp_path), home.name, TOKEN, "of-wandb", "of-flow", "of-nobody-else", "launch/train.py", "seed=8"]
    leaks = [(file, word) for file, content in files.items() for word in hidden if word.encode() in content]
    assert leaks == [] and {*files} == {path.name for path in export.iterdir()}
    card = files["README.md"].decode()
    assert "`model`" in card and "trained on local files" in card and "seed 8" in card and "(a local path)" in card
    arrived = tmp_path / "arrived"
    arrived.mkdir()
    for file, content in files.items():
        (arrived / file).write_bytes(content)
    assert damage(arrived, read(arrived, finished.KIND)) == []
    changed = "adapter_config.json" if adapters else "config.json"
    assert f"; without the folders in {changed}, of which names were sent alone\n" in found.out
    if adapters:
        assert json.loads(files[changed])["base_model_name_or_path"] == "model"
        assert json.loads((export / changed).read_text())["base_model_name_or_path"] == str(home / "model")
