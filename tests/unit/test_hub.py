"""Names that only the hub has, where it is refused, silent, or not asked."""

import socket
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetInfo
from datasets.arrow_writer import ArrowWriter

from deepstow.trainer.config.sections import ModelSection
from deepstow.trainer.data import sources, tokenizer
from deepstow.trainer.errors import ConfigError, DataError
from deepstow.trainer.model import build, hub


@pytest.fixture(autouse=True)
def _asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # discard: nobody listens
    hub.unreachable.cache_clear()


def test_a_name_that_is_not_cached_is_refused_without_retries(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as model:
        build.load_config(ModelSection(name_or_path="owner/nothing-of-this-name"))
    with pytest.raises(ConfigError, match=r"^model\.tokenizer: owner/nothing-of-this-name cannot be loaded: ") as words:
        tokenizer.load("owner/nothing-of-this-name", None, False, tmp_path, [])
    with pytest.raises(DataError) as data:
        sources.open_source("owner/nothing-of-this-name", None, "train", False)
    why = "the hub cannot be reached ([Errno 111] Connection refused)"
    assert model.value.lines == (
        "model.name_or_path = 'owner/nothing-of-this-name': there is no such folder here, the cache of the Hugging "
        f"Face hub has no such model, and {why}",
    )
    assert len(words.value.lines) == 1
    assert data.value.lines == (
        f"data.path: owner/nothing-of-this-name is neither here nor in the cache of Hugging Face datasets, and {why}",
    )
    assert caplog.text == ""  # the client says it when it tries again


def test_a_silent_hub_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "LOOK_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert hub.unreachable() in ("no answer within 0.05 s", "timed out")
    monkeypatch.setattr("huggingface_hub.get_session", lambda: pytest.fail("asked again"))
    assert hub.options("owner/name") == {"local_files_only": True}


def test_a_folder_is_not_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.get_session", lambda: pytest.fail("asked"))
    assert hub.options(str(tmp_path)) == {}


@pytest.mark.parametrize("subset", [None, "default"])
def test_a_cached_data_set_is_opened_without_asking(
    subset: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As ``load_dataset`` leaves one: of the owner's name, with a subset, a version and a hash."""
    home = tmp_path / "owner___one_name" / "default" / "0.0.0" / ("0" * 40)
    home.mkdir(parents=True)
    rows = Dataset.from_list([{"text": "one"}, {"text": "two"}])
    with ArrowWriter(path=str(home / "one_name-train.arrow"), features=rows.features) as writer:
        writer.write_table(rows.data.table)
        writer.finalize()
    splits: Any = [{"name": "train", "num_examples": 2, "dataset_name": "one_name"}]
    info = DatasetInfo(features=rows.features, splits=splits)
    info.builder_name, info.dataset_name, info.config_name, info.version = "json", "one_name", "default", "0.0.0"
    info.write_to_directory(str(home))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **more: pytest.fail("asked"))
    source = sources.open_source("owner/OneName", subset, "train", False)
    assert [row.values for row in source.rows(["text"])] == [{"text": "one"}, {"text": "two"}]
    with pytest.raises(DataError, match=r"hub data set owner/OneName cannot be loaded: .*test"):
        sources.open_source("owner/OneName", subset, "test", False)
