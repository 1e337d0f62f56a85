"""What a disk may hold after a power cut at any moment of a program, from the system calls that it really made.

``record`` runs a command under strace and reads every call that changes files below a folder. ``Recorded.after`` makes
the folder as it may be found after a power cut: everything before the cut has happened in memory, what was synced is on
the disk, and of the rest a ``Loss`` says what is.

A file's content is on the disk when the file was synced, its name when the folder was. A rename is on the disk as a
whole when the folder it leads to was synced. File systems give more than that; nothing may rely on it.
"""

import os
import random
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple

OF_DESCRIPTORS = ("write", "writev", "pwrite64", "ftruncate", "fsync", "fdatasync", "lseek", "read", "mmap")
OF_PATHS = "open,openat,truncate,rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir"
FOLLOWED = f"{','.join(OF_DESCRIPTORS)},{OF_PATHS}"
REFUSED = "creat,pwritev,pwritev2,link,linkat,symlink,symlinkat,copy_file_range,sendfile,splice,fallocate"
ROOT = 0  # the folder's own number


class Data(Enum):
    """What is there of content that was not synced."""

    KEPT, LOST, ZEROS, SOME = "kept", "lost", "zeros", "some"


class Names(Enum):
    """What is there of names that were not synced."""

    KEPT, LOST, FIRST, SOME = "kept", "lost", "the first half", "some"


class Loss(NamedTuple):
    """What a power cut takes of what was not synced; ``seed`` decides what is some of it."""

    data: Data
    names: Names
    seed: int = 0


class Write(NamedTuple):
    file: int
    offset: int
    content: bytes


class Cut(NamedTuple):
    file: int
    size: int


class Name(NamedTuple):
    """A name in a folder stands for ``entry`` from now on, for nothing if that is None."""

    folder: int
    name: str
    entry: int | None


class Rename(NamedTuple):
    folder: int
    name: str
    to_folder: int
    to_name: str
    entry: int


class Sync(NamedTuple):
    what: int


Call = Write | Cut | Name | Rename | Sync


@dataclass
class Recorded:
    """The calls below a folder, in their order. ``entries`` are the folders by number, as they are at the end."""

    root: Path
    calls: list[Call] = field(default_factory=list)
    entries: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    sizes: dict[int, int] = field(default_factory=dict)
    last: int = ROOT

    def cuts(self) -> range:
        """The moments at which the power may go: before each call, and after the last."""
        return range(len(self.calls) + 1)

    def after(self, cut: int, loss: Loss) -> dict[str, bytes | None]:
        """Files by path as they may be found if the power goes before call ``cut``; None stands for a folder."""
        calls = self.calls[:cut]
        lost = self._lost(calls, loss)
        draw = random.Random(loss.seed)
        data_of: dict[int, Data] = {}
        entries: dict[int, dict[str, int]] = {ROOT: {}}
        files: dict[int, bytearray] = {}
        for index, call in enumerate(calls):
            match call:
                case Name(folder, name, entry):
                    if index in lost:
                        continue
                    if entry is None:
                        entries.get(folder, {}).pop(name, None)
                    else:
                        entries.setdefault(folder, {})[name] = entry
                case Rename(folder, name, to_folder, to_name, entry):
                    if index not in lost:
                        entries.get(folder, {}).pop(name, None)
                        entries.setdefault(to_folder, {})[to_name] = entry
                case Write(file, offset, content):
                    data = loss.data
                    if data is Data.SOME:
                        data = data_of.setdefault(file, draw.choice([Data.KEPT, Data.LOST, Data.ZEROS]))
                    if index in lost and data is Data.LOST:
                        continue
                    held = files.setdefault(file, bytearray())
                    held.extend(bytes(max(0, offset + len(content) - len(held))))
                    if index not in lost or data is Data.KEPT:
                        held[offset : offset + len(content)] = content
                case Cut(file, size):
                    held = files.setdefault(file, bytearray())
                    if index in lost and loss.data is not Data.KEPT and size >= len(held):
                        continue
                    del held[size:]
                    held.extend(bytes(size - len(held)))
                case Sync():
                    pass
        return dict(self._tree(ROOT, "", entries, files))

    def _tree(
        self, folder: int, path: str, entries: dict[int, dict[str, int]], files: dict[int, bytearray]
    ) -> Iterator[tuple[str, bytes | None]]:
        for name, number in entries.get(folder, {}).items():
            inner = f"{path}{name}"
            if number in self.entries:
                yield inner, None
                yield from self._tree(number, f"{inner}/", entries, files)
            else:
                yield inner, bytes(files.get(number, b""))

    def _lost(self, calls: Sequence[Call], loss: Loss) -> set[int]:
        """Indices of calls whose effect is not on the disk, or, for content, not as it was written."""
        content: dict[int, list[int]] = {}  # by file
        names: dict[int, list[int]] = {}  # by folder
        for index, call in enumerate(calls):
            match call:
                case Write(file) | Cut(file):
                    content.setdefault(file, []).append(index)
                case Name(folder):
                    names.setdefault(folder, []).append(index)
                case Rename(_, _, to_folder, _, _):
                    names.setdefault(to_folder, []).append(index)
                case Sync(what):
                    content.pop(what, None)
                    names.pop(what, None)
        pending = sorted(index for indices in names.values() for index in indices)
        draw = random.Random(loss.seed + 1)
        match loss.names:
            case Names.KEPT:
                pending = []
            case Names.FIRST:
                pending = pending[len(pending) // 2 :]
            case Names.SOME:
                pending = [index for index in pending if draw.random() < 0.5]
            case Names.LOST:
                pass
        return {index for indices in content.values() for index in indices} | set(pending)


def put(root: Path, state: dict[str, bytes | None]) -> None:
    """Make ``state`` what is in ``root``."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for name, content in state.items():
        path = root / name
        if content is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


# --- reading what strace has written ---------------------------------------------------------------------------------


def record(command: Sequence[str], root: Path, log: Path, cwd: Path, environment: dict[str, str]) -> Recorded:
    """Run ``command``; the calls of it and its children that change what is below ``root``, which is empty before.

    ``-y`` shows the path of each descriptor, as it is at the call, so that nobody has to follow those.
    """
    strace = ["strace", "-f", "-y", "-o", str(log), "-xx", "-s", "100000000", "-e", f"trace={FOLLOWED},{REFUSED}"]
    subprocess.run([*strace, *command], cwd=cwd, env=environment, check=True, stdout=subprocess.DEVNULL)
    reader = _Reader(root, cwd)
    for line in _whole_lines(log):
        reader.read(line)
    return reader.recorded


def _whole_lines(log: Path) -> Iterator[str]:
    """Each call; one that others have interrupted is one line, where it returned."""
    begun: dict[str, str] = {}
    with log.open() as lines:
        for text in lines:
            process, _, line = text.rstrip("\n").partition(" ")
            line = line.lstrip()
            if line.endswith("<unfinished ...>"):
                begun[process] = line.removesuffix("<unfinished ...>").rstrip()
            elif line.startswith("<... "):
                yield begun.pop(process) + line.partition(" resumed>")[2]
            else:
                yield line


CALL = re.compile(r"(\w+)\((.*)\)\s+= (\d+|0x[0-9a-f]+)")  # of those that succeeded
STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
HELD = re.compile(r"<((?:\\x[0-9a-f]{2})*)>")


def _bytes(found: Sequence[str]) -> list[bytes]:
    return [bytes.fromhex(each.replace("\\x", "")) for each in found]


class _Reader:
    """Turns calls into what they change. A file has one position: who writes to it opened it last, or appends."""

    def __init__(self, root: Path, cwd: Path) -> None:
        self.recorded = Recorded(root)
        self._cwd = cwd
        self._positions: dict[int, int] = {}
        self._appended: set[int] = set()

    def read(self, line: str) -> None:
        match = CALL.match(line)
        if match is None:
            return
        name, arguments, result = match[1], match[2], int(match[3], 0)
        held = [Path(os.fsdecode(each)) for each in _bytes(HELD.findall(arguments))]
        strings = _bytes(STRING.findall(arguments))
        plain = [each.strip() for each in HELD.sub("", STRING.sub("", arguments)).split(",")]
        if name in OF_DESCRIPTORS:
            number = self._number(held[0]) if held else None
            if number is not None:
                self._of_descriptor(name, number, plain, b"".join(strings), result)
            return
        bases = held or [self._cwd]
        paths = [Path(os.path.normpath(bases[min(at, len(bases) - 1)] / os.fsdecode(text)))
                 for at, text in enumerate(strings)]  # fmt: skip
        if name in REFUSED.split(","):
            inside = [path for path in (*held, *paths) if self._number(path) is not None]
            assert not inside, f"{inside[0]}: {name} is not followed"
        else:
            self._of_paths(name.removesuffix("2").removesuffix("at"), paths, arguments)

    def _of_descriptor(self, name: str, number: int, plain: list[str], content: bytes, result: int) -> None:
        calls, sizes = self.recorded.calls, self.recorded.sizes
        match name:
            case "fsync" | "fdatasync":
                calls.append(Sync(number))
            case "ftruncate":
                self._resize(number, int(plain[1]))
            case "lseek":
                self._positions[number] = result
            case "read":
                self._positions[number] = self._positions.get(number, 0) + result
            case "mmap":
                writes = "PROT_WRITE" in plain[2] and "MAP_SHARED" in plain[3]
                assert not writes, "written through memory, which is not followed"
            case _:
                at = sizes.get(number, 0) if number in self._appended else self._positions.get(number, 0)
                offset = int(plain[-1]) if name == "pwrite64" else at
                calls.append(Write(number, offset, content[:result]))
                sizes[number] = max(sizes.get(number, 0), offset + result)
                if name != "pwrite64":
                    self._positions[number] = offset + result

    def _of_paths(self, name: str, paths: list[Path], arguments: str) -> None:
        entries, calls, places = self.recorded.entries, self.recorded.calls, [self._place(path) for path in paths]
        place = places[0]
        if name == "rename":
            to = places[1]
            assert (place is None) == (to is None), "a rename into the folder or out of it"
            if place is not None and to is not None:
                entry = entries[to[0]][to[1]] = entries[place[0]].pop(place[1])
                calls.append(Rename(*place, *to, entry))
        elif place is None:
            return
        elif name == "mkdir":
            self._add(place, is_folder=True)
        elif name in ("unlink", "rmdir"):
            del entries[place[0]][place[1]]
            calls.append(Name(*place, None))
        elif name == "truncate":
            self._resize(entries[place[0]][place[1]], int(arguments.rpartition(",")[2]))
        else:
            self._open(place, arguments)

    def _open(self, place: tuple[int, str], flags: str) -> None:
        number = self.recorded.entries[place[0]].get(place[1])
        if number is None:
            number = self._add(place, is_folder=False)
        elif "O_TRUNC" in flags:
            self._resize(number, 0)
        self._positions[number] = 0
        if "O_APPEND" in flags:
            self._appended.add(number)

    def _place(self, path: Path) -> tuple[int, str] | None:
        """The folder's number and the name in it; None for what is not below the root."""
        if not path.is_relative_to(self.recorded.root) or path == self.recorded.root:
            return None
        parts, folder = path.relative_to(self.recorded.root).parts, ROOT
        for part in parts[:-1]:
            folder = self.recorded.entries[folder][part]
        return folder, parts[-1]

    def _number(self, path: Path) -> int | None:
        if path == self.recorded.root:
            return ROOT
        try:
            place = self._place(path)
        except KeyError:  # in a folder that is gone
            return None
        return None if place is None else self.recorded.entries[place[0]].get(place[1])

    def _add(self, place: tuple[int, str], *, is_folder: bool) -> int:
        recorded = self.recorded
        recorded.last += 1
        recorded.entries[place[0]][place[1]] = recorded.last
        if is_folder:
            recorded.entries[recorded.last] = {}
        recorded.calls.append(Name(*place, recorded.last))
        return recorded.last

    def _resize(self, number: int, size: int) -> None:
        self.recorded.calls.append(Cut(number, size))
        self.recorded.sizes[number] = size
