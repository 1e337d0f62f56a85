"""A sealed folder: what the manifest says, and that every way of changing a file is found and named."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from deepstow.strategies.state import sealed
from deepstow.strategies.state.sealed import MANIFEST, Damaged, damage, read, seal

FILES = {"a": b"first file", "inner/b": b"second one", "inner/deep/c": b"", "other": b"first filf"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / "f" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "f" / name).write_bytes(content)
    seal(tmp_path / "f", "test", {"step": 3})
    return tmp_path / "f"


def found(folder: Path) -> list[str]:
    return damage(folder, read(folder, "test"))


def test_what_was_sealed_is_read_again(folder: Path) -> None:
    assert read(folder, "test").about == {"step": 3}
    sizes = {name: len(content) for name, content in FILES.items()}
    assert {name: file.bytes for name, file in read(folder, "test").files.items()} == sizes
    assert found(folder) == []
    before = (folder / MANIFEST).read_bytes()
    seal(folder, "test", {"step": 3})
    assert (folder / MANIFEST).read_bytes() == before, "the same content has the same manifest, sealed again too"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (lambda f: flip(f / "inner/b"), "inner/b: damaged, its hash is another"),
    "longer": (lambda f: (f / "inner/deep/c").write_bytes(b"x"), "inner/deep/c: 1 bytes, 0 were written"),
    "a folder": (lambda f: ((f / "a").unlink(), (f / "a").mkdir()), "a: cannot be read: Is a directory"),
    "a link": (lambda f: ((f / "a").unlink(), (f / "a").symlink_to("other")), "a: a symbolic link; only files are"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named(name: str, folder: Path) -> None:
    change, line = CHANGES[name]
    change(folder)
    (said,) = found(folder)
    assert said.startswith(line)


def refused(folder: Path, kind: str = "test") -> str:
    with pytest.raises(Damaged) as caught:
        read(folder, kind)
    return str(caught.value)


def test_a_manifest_that_is_none(folder: Path) -> None:
    another = "manifest.json is damaged, its hash is another"
    for text, line in {
        "": "manifest.json cannot be read",
        "[" * 200_000: "manifest.json cannot be read",
        "[]": "manifest.json is damaged, something is missing in it",
        '{"sha256": "x", "content": {}}': another,
        (folder / MANIFEST).read_text().replace('"step": 3', '"step": 4'): another,
    }.items():
        (folder / MANIFEST).write_text(text)
        assert refused(folder) == line
    (folder / MANIFEST).unlink()
    assert refused(folder) == "there is no manifest.json in it"


def forged(folder: Path, **changes: object) -> None:
    content = json.loads((folder / MANIFEST).read_text())["content"] | changes
    signed = {"sha256": sealed.digest_of(content), "content": content}
    (folder / MANIFEST).write_text(json.dumps(signed))


def test_a_missing_key_another_format_or_kind(folder: Path) -> None:
    assert "is of the kind test, not checkpoint" in refused(folder, "checkpoint")
    forged(folder, format=9)
    assert "has format 9, this release reads 1" in refused(folder)
    forged(folder, format=1, files={"a": {"bytes": 1}})
    assert "something is missing" in refused(folder)


def test_no_name_leads_out_of_the_folder_and_a_link_is_not_sealed(folder: Path) -> None:
    (folder.parent / "outside").write_bytes(b"")
    for name in ("/etc/passwd", "inner/../../outside"):
        forged(folder, files={name: {"bytes": 0, "sha256": "x"}})
        assert found(folder) == [f"{name!r}: not a name inside the folder"]
    (folder / "link").symlink_to("a")
    with pytest.raises(OSError, match="link: a symbolic link"):
        seal(folder, "test", {})


def test_everything_is_on_the_disk_before_the_manifest_begins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / MANIFEST).unlink()
    synced: set[str] = set()
    at_manifest: list[set[str]] = []
    fsync, write = os.fsync, sealed.replace_file

    def noted(handle: int) -> None:
        synced.add(str(Path(f"/proc/self/fd/{handle}").readlink()))
        fsync(handle)

    def manifest(path: Path, content: str) -> None:
        at_manifest.append(set(synced))
        write(path, content)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(sealed, "replace_file", manifest)
    seal(folder, "test", {})
    (before,) = at_manifest
    assert before == {str(folder / name) for name in [*FILES, "inner", "inner/deep"]}
    assert str(folder) in synced, "the name of the manifest, too"
