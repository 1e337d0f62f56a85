"""Hashes of files are taken once, and again when anything about a file says that it is another; of saved models those
files count that are read, and of data the contents in their order.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from deepstow.strategies.state.sealed import digest_of, size_and_hash
from deepstow.trainer.config.sections import ModelSection
from deepstow.trainer.data.sources import open_source
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.model import contents, hashes


@pytest.fixture(autouse=True)
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The files that are read, of which any is large enough to be kept, and none has to rest."""
    seen: list[Path] = []

    def counted(path: Path) -> tuple[int, str]:
        seen.append(path)
        return size_and_hash(path)

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(hashes, "LARGE", 1)
    monkeypatch.setattr(hashes, "SETTLED_S", 0.0)
    monkeypatch.setattr(hashes, "size_and_hash", counted)
    monkeypatch.chdir(tmp_path)
    yield seen


def write(name: str, content: str) -> Path:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(content)
    return Path(name)


def back_in_time(path: Path, before: os.stat_result) -> None:
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_file_is_read_once(read: list[Path]) -> None:
    path = write("a", "one")
    expected = [size_and_hash(path)[1]]
    assert hashes.hashes([path]) == hashes.hashes([path]) == expected and read == [path]


def rewritten(path: Path) -> None:
    time.sleep(0.05)  # beyond a tick of the file system's clock
    path.write_text("two")


def replaced(path: Path) -> None:
    write("b", "two").replace(path)


def relinked(path: Path) -> None:
    path.unlink()
    path.symlink_to(write("b", "two"))


@pytest.mark.parametrize("change", [rewritten, replaced, relinked])
def test_a_file_of_the_same_size_and_time_is_read_again(change: Callable[[Path], None]) -> None:
    path = write("a", "one")
    (first,) = hashes.hashes([path])
    before = path.stat()
    change(path)
    back_in_time(path, before)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert hashes.hashes([path]) == [size_and_hash(path)[1]] != [first]


def test_a_link_that_is_exchanged_is_read_again() -> None:
    for name, content in {"one": "one", "two": "two"}.items():
        write(name, content)
    back_in_time(Path("two"), Path("one").stat())
    found = []
    for name in ("one", "two"):
        Path("link").unlink(missing_ok=True)
        Path("link").symlink_to(name)
        found += hashes.hashes([Path("link")])
    assert found == [size_and_hash(Path(name))[1] for name in ("one", "two")]


def test_a_file_that_has_just_changed_is_not_kept(monkeypatch: pytest.MonkeyPatch, read: list[Path]) -> None:
    """A change while it is read, in the same tick of the clock, would leave it the same times."""
    monkeypatch.setattr(hashes, "SETTLED_S", 100.0)
    path = write("a", "one")
    for _ in range(2):
        hashes.hashes([path])
    assert len(read) == 2


@pytest.mark.parametrize("damage", ["", "{}", None])
def test_what_is_kept_and_damaged_is_read_again(damage: str | None, read: list[Path], tmp_path: Path) -> None:
    """None: the hash in it is another."""
    path = write("a", "one")
    expected = hashes.hashes([path])
    (kept,) = (tmp_path / "home/.cache/deepstow/hashes").iterdir()
    kept.write_text(kept.read_text().replace(expected[0], "0" * 64) if damage is None else damage)
    assert hashes.hashes([path]) == expected and len(read) == 2


def test_without_a_place_to_keep_it(tmp_path: Path) -> None:
    write("home", "a file")
    assert hashes.hashes([write("a", "one")]) == [size_and_hash(Path("a"))[1]]


# --- saved models ----------------------------------------------------------------------------------------------------


def weights(folder: str = "m", **config: Any) -> str:
    return contents.weights(ModelSection(name_or_path=folder), SimpleNamespace(**config), 0)


def sharded(folder: str) -> None:
    for number in (1, 2):
        write(f"{folder}/model-{number}.safetensors", str(number))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}}
    write(f"{folder}/model.safetensors.index.json", json.dumps(index))


def test_weights_are_the_files_that_are_read(read: list[Path]) -> None:
    """Of several forms the one that Transformers takes; beside them files may change."""
    sharded("m")
    first = weights()
    assert sorted({path.name for path in read}) == ["model-1.safetensors", "model-2.safetensors"]
    for name in ("pytorch_model.bin", "consolidated.safetensors", "README.md", "config.json"):
        write(f"m/{name}", "other")
    assert weights() == first
    shutil.copytree("m", "elsewhere")
    assert weights("elsewhere") == first
    write("m/model-2.safetensors", "other")
    other = weights()
    write("m/model.safetensors", "whole")
    whole = weights()
    write("m/named.safetensors", "named")
    assert len({first, other, whole, weights(transformers_weights="named.safetensors")}) == 4


def test_weights_that_are_not_files_of_the_folder() -> None:
    """On the hub the commit counts, of random ones the seed, and of adapters their base as well."""
    commits = (("owner", "1"), ("other", "1"), ("owner", "2"))
    first, renamed, second = (weights(f"{owner}/name", _commit_hash=commit) for owner, commit in commits)
    assert first == renamed != second
    section = ModelSection(config={"model_type": "llama"})
    assert contents.weights(section, None, 1) != contents.weights(section, None, 2)
    sharded("base")
    write("m/adapter_config.json", json.dumps({"base_model_name_or_path": "base"}))
    write("m/adapter_model.safetensors", "adapters")
    found = [weights()]
    for name in ("base/model-1.safetensors", "m/adapter_model.safetensors"):
        write(name, "other ones")
        found.append(weights())
    assert len({*found}) == 3


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": []}', '{"weight_map": {"a": "missing"}}'])
def test_weights_that_cannot_be_read(index: str) -> None:
    write("m/model.safetensors.index.json", index)
    with pytest.raises(ConfigError, match=r"^model\.name_or_path = 'm': its weights cannot be read: [^\n]*$"):
        weights()


def test_code_is_all_python_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the folder, and of a repository that the configuration names."""
    monkeypatch.setattr(hashes, "LARGE", 100)  # they change within a tick
    write("m/modeling_a.py", "a = 1")
    write("m/inner/more.py", "b = 1")
    theirs = write("theirs/modeling_b.py", "c = 1")
    asked = []

    def file_of(name: str, file: str) -> Path:
        asked.append((name, file))
        return theirs

    monkeypatch.setattr("deepstow.trainer.model.hub.file_of", file_of)
    config = SimpleNamespace(
        auto_map={"AutoModel": "owner/name--modeling_b.B", "AutoTokenizer": ["modeling_a.A", None]}
    )

    def code(name: str = "m", *, trusted: bool = True) -> str:
        return contents.code(ModelSection(name_or_path=name, trust_remote_code=trusted), config)

    found = [code()]
    assert asked == [("owner/name", "modeling_b.py")] and code(trusted=False) == ""
    shutil.copytree("m", "elsewhere")
    assert code("elsewhere") == found[0]
    for path in (Path("m/modeling_a.py"), Path("m/inner/more.py"), theirs):
        path.write_text(path.read_text().replace("1", "2"))
        found.append(code())
    assert len(set(found)) == 4


# --- data ------------------------------------------------------------------------------------------------------------


def identity(path: str, split: str = "train", *, exact: bool = True) -> list[str]:
    return open_source(path, None, split, False).identity(exact)


def row(text: str) -> str:
    return json.dumps({"text": text}) + "\n"


def test_files_are_their_contents_in_their_order() -> None:
    for name, content in {
        "d/a.jsonl": row("a"),
        "d/b.jsonl": row("b"),
        "e/x.jsonl": row("a"),
        "e/y.jsonl": row("b"),
    }.items():
        write(name, content)
    assert identity("d") == identity("e") and identity("d/a.jsonl") == identity("e/x.jsonl") == identity("d")[:1]
    write("f/1.jsonl", row("b"))
    write("f/2.jsonl", row("a"))
    assert identity("f") == identity("d")[::-1]
    write("g.txt", row("a"))  # the same bytes, and other rows
    assert identity("g.txt") != identity("d/a.jsonl")


def test_a_stream_is_size_and_time() -> None:
    write("a.jsonl", row("a"))
    before = Path("a.jsonl").stat()
    Path("b.jsonl").write_text(row("b"))
    back_in_time(Path("b.jsonl"), before)
    assert identity("a.jsonl", exact=False) == identity("b.jsonl", exact=False)
    os.utime("b.jsonl", ns=(0, 0))
    assert identity("a.jsonl", exact=False) != identity("b.jsonl", exact=False)


@pytest.mark.parametrize("with_splits", [False, True])
def test_saved_data_is_its_shards_in_the_order_of_the_state(with_splits: bool) -> None:
    rows = Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]})
    data: Any = DatasetDict(train=rows, test=rows.select([0])) if with_splits else rows
    data.save_to_disk("saved", num_shards={"train": 2, "test": 1} if with_splits else 2)
    shutil.copytree("saved", "elsewhere")
    home = Path("saved/train" if with_splits else "saved")
    first, rows_before = (
        identity("saved"),
        [each.values for each in open_source("saved", None, "train", False).rows(["text"])],
    )
    assert identity("elsewhere") == first
    before = open_source("saved", None, "train", False).former(True)
    assert before == ["train", *(size_and_hash(path)[1] for path in sorted(Path("saved").rglob("*.arrow")))]
    state = json.loads((home / "state.json").read_text())

    def changed(**values: Any) -> list[str]:
        (home / "state.json").write_text(json.dumps(state | values))
        return identity("saved")

    found = [first, changed(_data_files=state["_data_files"][::-1])]
    assert [each.values for each in open_source("saved", None, "train", False).rows(["text"])] == rows_before[::-1]
    found += [changed(_data_files=state["_data_files"][:1]), changed(_format_columns=["text"])]
    assert changed(_fingerprint="other") == first
    info = json.loads((home / "dataset_info.json").read_text())
    info["features"]["label"] = {"names": ["x", "y"], "_type": "ClassLabel"}
    (home / "dataset_info.json").write_text(json.dumps(info))
    found.append(identity("saved"))
    assert len({digest_of(each) for each in found}) == 5
    if with_splits:  # which other splits have says nothing
        shutil.rmtree("elsewhere/test")
        (Path("elsewhere") / "dataset_dict.json").write_text('{"splits": ["train"]}')
        assert identity("elsewhere") == first


def test_files_as_releases_identified_them_that_had_their_names() -> None:
    for name in ("a", "b"):
        write(f"d/{name}.jsonl", row(name))
    marks = [f"{name} {size_and_hash(Path(name))[1]}" for name in ("d/a.jsonl", "d/b.jsonl")]
    assert open_source("d", None, "train", False).former(True) == marks
    assert open_source("d/a.jsonl", None, "train", False).former(True) == [marks[0].removeprefix("d/")]
