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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

FOLLOWED = (
    "open,openat,write,writev,pwrite64,ftruncate,truncate,rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir,"
    "fsync,fdatasync,close,dup,dup2,dup3,fcntl,lseek,read,mmap,clone,clone3,fork,vfork"
)
REFUSED = "creat,pwritev,pwritev2,link,linkat,symlink,symlinkat,copy_file_range,sendfile,splice,fallocate"
ROOT = 0  # the folder's own number


class Data(Enum):
    """What is there of content that was not synced."""

    KEPT, LOST, ZEROS, SOME = "kept", "lost", "zeros", "some"


class Names(Enum):
    """What is there of names that were not synced."""

    KEPT, LOST, FIRST, SOME = "kept", "lost", "the first half", "some"


@dataclass(frozen=True)
class Loss:
    """What a power cut takes of what was not synced; ``seed`` decides what is some of it."""

    data: Data
    names: Names
    seed: int = 0


@dataclass(frozen=True)
class Write:
    file: int
    offset: int
    content: bytes


@dataclass(frozen=True)
class Cut:
    file: int
    size: int


@dataclass(frozen=True)
class Name:
    """A name in a folder stands for ``entry`` from now on, for nothing if that is None."""

    folder: int
    name: str
    entry: int | None


@dataclass(frozen=True)
class Rename:
    folder: int
    name: str
    to_folder: int
    to_name: str
    entry: int


@dataclass(frozen=True)
class Sync:
    what: int


Call = Write | Cut | Name | Rename | Sync


@dataclass
class _Open:
    """An open file; descriptors that were duplicated share it."""

    path: Path
    number: int | None  # None: not below the folder
    appends: bool
    position: int = 0


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
    """Run ``command``; the calls of it and its children that change what is below ``root``, which is empty before."""
    strace = ["strace", "-f", "-o", str(log), "-xx", "-s", "100000000", "-e", f"trace={FOLLOWED},{REFUSED}"]
    subprocess.run([*strace, *command], cwd=cwd, env=environment, check=True, stdout=subprocess.DEVNULL)
    lines = list(_whole_lines(log))
    reader = _Reader(root, cwd, dict(_parents(lines)))
    for process, line in lines:
        reader.read(process, line)
    return reader.recorded


def _parents(lines: Sequence[tuple[str, str]]) -> Iterator[tuple[str, tuple[str, bool]]]:
    """Each process and thread with its parent, and whether they share descriptors. A child may be seen earlier."""
    for process, line in lines:
        match = CALL.match(line)
        if match and match[1] in ("clone", "clone3", "fork", "vfork") and match[3].isdigit():
            yield match[3], (process, "CLONE_FILES" in match[2])


def _whole_lines(log: Path) -> Iterator[tuple[str, str]]:
    """Process and call of each line; a call that others have interrupted is one line, where it returned."""
    begun: dict[str, str] = {}
    with log.open() as lines:
        for text in lines:
            process, _, line = text.rstrip("\n").partition(" ")
            line = line.lstrip()
            if line.endswith("<unfinished ...>"):
                begun[process] = line.removesuffix("<unfinished ...>").rstrip()
            elif line.startswith("<... "):
                yield process, begun.pop(process) + line.partition(" resumed>")[2]
            else:
                yield process, line


CALL = re.compile(r"(\w+)\((.*)\)\s+= (-?\d+|0x[0-9a-f]+|\?)")
STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


class _Reader:
    """Follows descriptors and paths, process by process."""

    def __init__(self, root: Path, cwd: Path, parents: Mapping[str, tuple[str, bool]]) -> None:
        self.recorded = Recorded(root)
        self._cwd, self._parents = cwd, parents
        self._tables: dict[str, dict[int, _Open]] = {}

    def read(self, process: str, line: str) -> None:
        match = CALL.match(line)
        if match is None or match[3] == "?" or match[3].startswith("-"):
            return
        name, arguments, result = match[1], match[2], int(match[3], 0)
        table = self._table(process)
        handler = getattr(self, f"_{name}", None)
        strings = [bytes.fromhex(found.replace("\\x", "")) for found in STRING.findall(arguments)]
        plain = [each.strip() for each in STRING.sub('""', arguments).split(",")]
        if handler is not None:
            handler(table, plain, strings, result)

    def _table(self, process: str) -> dict[int, _Open]:
        if process not in self._tables:
            parent, shares = self._parents.get(process, (None, False))
            table = {} if parent is None else self._table(parent)
            self._tables[process] = table if shares else dict(table)
        return self._tables[process]

    # --- paths ---

    def _path(self, table: dict[int, _Open], folder: str, text: bytes) -> Path:
        named = Path(os.fsdecode(text))
        base = self._cwd if folder == "AT_FDCWD" else table[int(folder)].path if int(folder) in table else self._cwd
        return Path(os.path.normpath(base / named))

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
        place = self._place(path)
        return None if place is None else self.recorded.entries[place[0]].get(place[1])

    def _add(self, place: tuple[int, str], *, is_folder: bool) -> int:
        recorded = self.recorded
        recorded.last += 1
        recorded.entries[place[0]][place[1]] = recorded.last
        if is_folder:
            recorded.entries[recorded.last] = {}
        recorded.calls.append(Name(*place, recorded.last))
        return recorded.last

    # --- calls ---

    def _openat(self, table: dict[int, _Open], plain: list[str], strings: list[bytes], result: int) -> None:
        path, flags = self._path(table, plain[0], strings[0]), plain[2]
        number = self._number(path)
        place = self._place(path)
        if number is None and place is not None and "O_CREAT" in flags:
            number = self._add(place, is_folder=False)
        elif number is not None and "O_TRUNC" in flags:
            self._resize(number, 0)
        table[result] = _Open(path, number, "O_APPEND" in flags)

    def _open(self, table: dict[int, _Open], plain: list[str], strings: list[bytes], result: int) -> None:
        self._openat(table, ["AT_FDCWD", *plain], strings, result)

    def _close(self, table: dict[int, _Open], plain: list[str], strings: list[bytes], result: int) -> None:
        table.pop(int(plain[0]), None)

    def _dup(self, table: dict[int, _Open], plain: list[str], strings: list[bytes], result: int) -> None:
        if int(plain[0]) in table:
            table[result] = table[int(plain[0])]
        else:
            table.pop(result, None)

    _dup2 = _dup3 = _dup

    def _fcntl(self, table: dict[int, _Open], plain: list[str], strings: list[bytes], result: int) -> None:
        if plain[1].startswith("F_DUPFD"):
            self._dup(table, plain, strings, result)

    def _lseek(self, table: dict[int, _Open], plain: list[str], strings: list[bytes], result: int) -> None:
        if int(plain[0]) in table:
            table[int(plain[0])].position = result

    def _read(self, table: dict[int, _Open], plain: list[str], strings: list[bytes], result: int) -> None:
        if int(plain[0]) in table:
            table[int(plain[0])].position += result

    def _write(self, table: dict[int, _Open], plain: list[str], strings: list[bytes], result: int) -> None:
        held = table.get(int(plain[0]))
        if held is None or held.number is None:
            return
        if held.appends:
            held.position = self.recorded.sizes.get(held.number, 0)
        self._put(held.number, held.position, b"".join(strings)[:result])
        held.position += result

    _writev = _write

    def _pwrite64(self, table: dict[int, _Open], plain: list[str], strings: list[bytes], result: int) -> None:
        held = table.get(int(plain[0]))
        if held is not None and held.number is not None:
            self._put(held.number, int(plain[-1]), b"".join(strings)[:result])

    def _put(self, number: int, offset: int, content: bytes) -> None:
        self.recorded.calls.append(Write(number, offset, content))
        self.recorded.sizes[number] = max(self.recorded.sizes.get(number, 0), offset + len(content))

    def _resize(self, number: int, size: int) -> None:
        self.recorded.calls.append(Cut(number, size))
        self.recorded.sizes[number] = size

    def _ftruncate(self, table: dict[int, _Open], plain: list[str], strings: list[bytes], result: int) -> None:
        held = table.get(int(plain[0]))
        if held is not None and held.number is not None:
            self._resize(held.number, int(plain[1]))

    def _truncate(self, table: dict[int, _Open], plain: list[str], strings: list[bytes], result: int) -> None:
        number = self._number(self._path(table, "AT_FDCWD", strings[0]))
        if number is not None:
            self._resize(number, int(plain[1]))

    def _mkdirat(self, table: dict[int, _Open], plain: list[str], strings: list[bytes], result: int) -> None:
        place = self._place(self._path(table, plain[0], strings[0]))
        if place is not None:
            self._add(place, is_folder=True)

    def _mkdir(self, table: dict[int, _Open], plain: list[str], strings: list[bytes], result: int) -> None:
        self._mkdirat(table, ["AT_FDCWD"], strings, result)

    def _unlinkat(self, table: dict[int, _Open], plain: list[str], strings: list[bytes], result: int) -> None:
        place = self._place(self._path(table, plain[0], strings[0]))
        if place is not None:
            del self.recorded.entries[place[0]][place[1]]
            self.recorded.calls.append(Name(*place, None))

    def _unlink(self, table: dict[int, _Open], plain: list[str], strings: list[bytes], result: int) -> None:
        self._unlinkat(table, ["AT_FDCWD"], strings, result)

    _rmdir = _unlink

    def _renameat(self, table: dict[int, _Open], plain: list[str], strings: list[bytes], result: int) -> None:
        folders = (plain[0], plain[2]) if len(plain) > 3 else ("AT_FDCWD", "AT_FDCWD")
        place, to = (self._place(self._path(table, *each)) for each in zip(folders, strings, strict=True))
        assert (place is None) == (to is None), "a rename into the folder or out of it"
        if place is not None and to is not None:
            entries = self.recorded.entries
            entry = entries[to[0]][to[1]] = entries[place[0]].pop(place[1])
            self.recorded.calls.append(Rename(*place, *to, entry))

    _rename = _renameat2 = _renameat

    def _fsync(self, table: dict[int, _Open], plain: list[str], strings: list[bytes], result: int) -> None:
        held = table.get(int(plain[0]))
        if held is not None and held.number is not None:
            self.recorded.calls.append(Sync(held.number))

    _fdatasync = _fsync

    def _mmap(self, table: dict[int, _Open], plain: list[str], strings: list[bytes], result: int) -> None:
        held = table.get(int(plain[4])) if plain[4].isdigit() else None
        writes = "PROT_WRITE" in plain[2] and "MAP_SHARED" in plain[3]
        assert held is None or held.number is None or not writes, f"{held.path}: written through memory, not followed"

    def _not_followed(self, table: dict[int, _Open], plain: list[str], strings: list[bytes], result: int) -> None:
        held = [table.get(int(each)) for each in plain if each.isdigit()]
        assert not any(each and each.number is not None for each in held), "a call that is not followed"

    _copy_file_range = _sendfile = _splice = _fallocate = _pwritev = _pwritev2 = _not_followed
    _linkat = _symlinkat = _link = _symlink = _creat = _not_followed
