"""``training.push_to_hub`` of the real command, by the hub's real client, to a server on this machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.commands import Result, Server, digest, write_config
from tests.helpers.hub import LOST, Hub

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
